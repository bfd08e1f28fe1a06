#include "dist/checkpoint/peft.h"

#include <algorithm>
#include <set>

#include "core/files.h"
#include "core/formats/durable_file.h"
#include "core/text.h"
#include "dist/checkpoint/export_dir.h"
#include "nn/linear.h"

namespace tessera::dist {
namespace {

constexpr int64_t kMaxAdapterConfigNbytes = int64_t{16} << 20;

/// All elements of a parameter.
std::vector<float> read_all(const ParameterSource& source, const std::string& name) {
  const int64_t numel = source.shape_of(name).numel();
  std::vector<float> values(static_cast<size_t>(numel));
  source.read(name, 0, numel, values.data());
  return values;
}

}  // namespace

PeftReader::PeftReader(const std::string& dir) : dir_(dir) {
  const std::string path = dir + "/" + kConfigName;
  const nn::PeftConfig config =
      nn::parse_peft_config(path, read_regular_file(path, kMaxAdapterConfigNbytes));
  options_ = config.options;
  file_ = std::make_unique<SafetensorsFile>(dir + "/" + kTensorsName);
  std::set<std::string> layers;
  for (const SafetensorsEntry& entry : file_->entries()) {
    tensors_.emplace(entry.name, HfFiles::Place{file_.get(), &entry});
    if (std::string layer = nn::peft_layer_of(entry.name); !layer.empty()) {
      layers.insert(std::move(layer));
    }
  }
  if (!config.has_pattern) return;
  for (const std::string& layer : layers) {
    options_.targets += (options_.targets.empty() ? "" : ",") + layer;
  }
}

void PeftReader::attach(nn::Module& model) {
  const std::vector<nn::HfParameter> parameters = nn::peft_parameters(model);
  const std::vector<std::string> problems =
      hf_tensor_problems(parameters, tensors_, [](std::string_view) { return false; });
  if (!problems.empty()) {
    throw InputError(fmt::format("{}: tensors are not those of {} for this model: {}", dir_,
                                 kConfigName, join_few(problems, "; ")));
  }
  for (const nn::HfParameter& p : parameters) parameters_.emplace(p.name, p);
}

std::vector<std::string> PeftReader::names() const {
  std::vector<std::string> names;
  for (const auto& entry : parameters_) names.push_back(entry.first);
  return names;
}

Shape PeftReader::shape_of(std::string_view name) const {
  const auto found = parameters_.find(name);
  TESSERA_CHECK_AS(InputError, found != parameters_.end(), "{}: has no parameter {}", dir_, name);
  return found->second.shape;
}

void PeftReader::do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const {
  read_hf_parameter(parameters_.find(name)->second, tensors_, begin, end, dst);
}

void write_peft(const std::string& dir, nn::Module& model, const ParameterSource& source,
                const PeftWriteOptions& options) {
  const std::vector<nn::HfParameter> parameters = nn::peft_parameters(model);
  const std::string config = nn::peft_config_json(model, options.lora, options.base);
  ExportDirectory place(dir);
  std::vector<SafetensorsEntry> entries;
  for (const nn::HfParameter& p : parameters) {
    for (const nn::HfTensor& t : p.sources) entries.push_back({t.name, options.dtype, t.shape});
  }
  SafetensorsWriter writer(place.path() + "/" + PeftReader::kTensorsName, std::move(entries),
                           {{"format", "pt"}});
  for (const nn::HfParameter& p : parameters) {
    const std::vector<float> values = read_all(source, p.name);
    TESSERA_CHECK(source.shape_of(p.name) == p.shape, "export: {} is {}, expected {} of the model",
                  p.name, source.shape_of(p.name), p.shape);
    check_hf_range(p.name, values.data(), p.shape.numel(), options.dtype);
    for (const nn::HfTensor& t : p.sources) {
      const auto bytes = make_hf_tensor(t, values.data(), p.cols(), options.dtype);
      writer.write(t.name, bytes.data(), static_cast<int64_t>(bytes.size()));
    }
  }
  writer.finish();
  write_durably(place.path() + "/" + PeftReader::kConfigName, config);
  for (const auto& [name, text] : options.files) write_durably(place.path() + "/" + name, text);
  place.commit();
}

MergedSource::MergedSource(const ParameterSource& source, nn::Module& model) : source_(source) {
  for (const nn::NamedParameter& p : model.named_parameters()) {
    if (!nn::is_lora(p)) names_.push_back(p.name);
  }
  for (const nn::LoraLayer& layer : nn::lora_layers(model)) {
    if (layer.linear->lora() != nullptr) adapted_.emplace(layer.name + ".weight", layer.linear);
  }
}

std::vector<std::string> MergedSource::names() const {
  return names_;
}

void MergedSource::do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const {
  source_.read(name, begin, end, dst);
  const auto found = adapted_.find(name);
  if (found == adapted_.end()) return;
  const std::string layer(name.substr(0, name.rfind('.')));
  const std::vector<float> a = read_all(source_, layer + ".lora.A");
  const std::vector<float> b = read_all(source_, layer + ".lora.B");
  const nn::Linear& linear = *found->second;
  const int64_t K = linear.num_inputs(), rank = linear.lora()->rank();
  const auto scale = static_cast<float>(linear.lora()->scale());
  std::vector<float> delta(static_cast<size_t>(K));
  const float* b_row = b.data();
  const float* a_part = a.data();
  for (const nn::LoraPart& part : linear.lora()->parts()) {
    for (int64_t row = part.rows.first; row < part.rows.first + part.rows.count; ++row) {
      const int64_t first = std::max(begin, row * K), last = std::min(end, (row + 1) * K);
      if (first < last) {
        std::fill(delta.begin(), delta.end(), 0.0f);
        for (int64_t k = 0; k < rank; ++k) {
          const float factor = b_row[k];
          const float* a_row = a_part + k * K;
          for (int64_t c = 0; c < K; ++c) delta[static_cast<size_t>(c)] += factor * a_row[c];
        }
        for (int64_t i = first; i < last; ++i) {
          dst[i - begin] += scale * delta[static_cast<size_t>(i - row * K)];
        }
      }
      b_row += rank;
    }
    a_part += rank * K;
  }
}

}  // namespace tessera::dist
