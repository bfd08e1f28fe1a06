#include "dist/checkpoint/gguf.h"

#include "core/check.h"
#include "dist/checkpoint/hf_tensors.h"

namespace tessera::dist {
namespace {

nn::GgufModel gguf_model_of(const nn::FamilyConfig& config) {
  TESSERA_CHECK_AS(ConfigError, config.family().gguf != nullptr,
                   "export: llama.cpp has no model like {}", config.family().name);
  return config.family().gguf(config);
}

/// general.file_type: what most tensors are.
uint32_t file_type_of(DType dtype) {
  return dtype == kF32 ? 0 : dtype == kF16 ? 1 : 32;
}

}  // namespace

GgufExport::GgufExport(const std::string& dir, const nn::FamilyConfig& config,
                       const GgufExportOptions& options)
    : dtype_(options.dtype), model_(gguf_model_of(config)) {
  std::vector<GgufEntry> entries;
  for (const nn::HfParameter& p : model_.parameters) {
    by_name_.emplace(p.name, &p);
    for (const nn::HfTensor& t : p.sources) entries.push_back({t.name, dtype_of(t), t.shape});
  }
  for (const nn::GgufConstant& constant : model_.constants) {
    entries.push_back({constant.name, kF32, {std::ssize(constant.values)}});
  }
  GgufFields fields = {{"general.architecture", model_.architecture},
                       {"general.type", std::string("model")},
                       {"general.file_type", file_type_of(dtype_)}};
  if (!options.name.empty()) fields.emplace_back("general.name", options.name);
  fields.insert(fields.end(), model_.fields.begin(), model_.fields.end());
  fields.insert(fields.end(), options.fields.begin(), options.fields.end());
  place_ = std::make_unique<ExportDirectory>(dir);
  writer_ = std::make_unique<GgufWriter>(place_->path() + "/" + kFileName, fields, entries);
  for (const nn::GgufConstant& constant : model_.constants) {
    writer_->write(constant.name, constant.values.data(),
                   static_cast<int64_t>(constant.values.size() * sizeof(float)));
  }
}

GgufExport::~GgufExport() = default;

DType GgufExport::dtype_of(const nn::HfTensor& tensor) const {
  const bool is_added = tensor.name == "position_embd.weight";
  return tensor.shape.num_dims() < 2 || is_added ? kF32 : dtype_;
}

void GgufExport::write(std::string_view name, const Shape& shape, const float* values) {
  const auto found = by_name_.find(name);
  TESSERA_CHECK(found != by_name_.end(), "export: the model has no parameter {}", name);
  const nn::HfParameter& p = *found->second;
  TESSERA_CHECK(shape == p.shape, "export: {} is {}, expected {} of the model", name, shape,
                p.shape);
  const DType dtype = dtype_of(p.sources.front());  // of all parts of a parameter
  check_hf_range(name, values, shape.numel(), dtype);
  for (const nn::HfTensor& t : p.sources) {
    const std::vector<std::byte> bytes = make_hf_tensor(t, values, p.cols(), dtype);
    writer_->write(t.name, bytes.data(), static_cast<int64_t>(bytes.size()));
  }
}

void GgufExport::finish() {
  writer_->finish();
  place_->commit();
}

}  // namespace tessera::dist
