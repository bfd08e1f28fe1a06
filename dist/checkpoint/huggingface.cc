#include "dist/checkpoint/huggingface.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/formats/durable_file.h"
#include "core/text.h"
#include "dist/checkpoint/hf_tensors.h"

namespace tessera::dist {
namespace {

using nlohmann::json;

constexpr int64_t kMaxConfigNbytes = int64_t{16} << 20;

/// What config.json says, whatever the tensors are.
HfModel read_config(const std::string& dir, const std::vector<std::string>& ignored_keys) {
  const std::string path = dir + "/config.json";
  const std::string text = read_regular_file(path, kMaxConfigNbytes);
  return {nn::parse_hf_config(path, text, ignored_keys), nn::parse_hf_token_ids(path, text)};
}

}  // namespace

HfModel read_hf_model(const std::string& dir, const std::vector<std::string>& ignored_keys) {
  if (HfFiles::exist_in(dir)) {  // nothing that the files do not bear out gets any further
    const HfReader reader(dir, ignored_keys);
    return {reader.config(), reader.token_ids()};
  }
  return read_config(dir, ignored_keys);
}

HfReader::HfReader(const std::string& dir, const std::vector<std::string>& ignored_keys,
                   const nn::ClassifierConfig* classifier)
    : HfReader(dir, read_config(dir, ignored_keys), classifier) {}

HfReader::HfReader(const std::string& dir, HfModel model, const nn::ClassifierConfig* classifier)
    : dir_(dir), config_(std::move(model.config)), token_ids_(std::move(model.token_ids)) {
  files_ = std::make_unique<HfFiles>(dir, config_);
  // Each layer has tensors: before a list of all that a config tells is made.
  const int64_t num_layers = config_.num_layers();
  const auto num_tensors = static_cast<int64_t>(files_->tensors().size());
  if (num_layers > num_tensors) {
    throw InputError(
        fmt::format("{}/config.json: {} layers, expected no more than the {} tensors beside it",
                    dir, num_layers, num_tensors));
  }
  if (classifier != nullptr && config_.classifier() == nullptr) {
    config_.set_classifier(classifier->classes, classifier->pooling);
    parameters_ = config_.hf_parameters();
    std::erase_if(parameters_, [&](const nn::HfParameter& p) {
      return nn::is_of_classifier(p.name) &&
             std::none_of(p.sources.begin(), p.sources.end(), [&](const nn::HfTensor& t) {
               return files_->tensors().contains(t.name);
             });
    });
  } else {
    files_->settle_tied(config_);
    parameters_ = config_.hf_parameters();
  }
  for (const nn::HfParameter& p : parameters_) by_name_.emplace(p.name, &p);
  check_tensors();
}

void HfReader::check_tensors() {
  const std::vector<std::string> problems = hf_tensor_problems(
      parameters_, files_->tensors(),
      [this](std::string_view name) { return config_.is_derived_hf_tensor(name); });
  if (problems.empty()) return;
  const bool lacks_head =
      problems.size() == 1 && problems[0] == fmt::format("missing {}", config_.hf_layout().head);
  throw InputError(fmt::format("{}: tensors are not those of config.json: {}{}", dir_,
                               join_few(problems, "; "),
                               lacks_head ? " (tie_word_embeddings: true has none)" : ""));
}

std::vector<std::string> HfReader::names() const {
  std::vector<std::string> names;
  for (const nn::HfParameter& p : parameters_) names.push_back(p.name);
  return names;
}

Shape HfReader::shape_of(std::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  TESSERA_CHECK_AS(InputError, found != by_name_.end(), "{}: has no parameter {}", dir_, name);
  return found->second->shape;
}

void HfReader::do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const {
  read_hf_parameter(*by_name_.at(std::string(name)), files_->tensors(), begin, end, dst);
}

HfWriter::HfWriter(const std::string& dir, const nn::FamilyConfig& config,
                   const HfWriteOptions& options)
    : config_(config), options_(options), parameters_(config.hf_parameters()) {
  TESSERA_CHECK(options.dtype == kF32 || options.dtype == kBF16 || options.dtype == kF16,
                "export: dtype {}, expected f32, bf16 or f16", options.dtype);
  nn::hf_config_json(config,
                     options.dtype);  // refuses what has no name there before anything is made
  place_ = std::make_unique<ExportDirectory>(dir);
  std::vector<std::vector<SafetensorsEntry>> files(1);
  int64_t used = 0;
  for (const nn::HfParameter& p : parameters_) {
    by_name_.emplace(p.name, by_name_.size());
    for (const nn::HfTensor& t : p.sources) {
      const SafetensorsEntry entry{t.name, options.dtype, t.shape};
      if (used > 0 && used + entry.nbytes() > options.max_file_nbytes) {
        files.emplace_back();
        used = 0;
      }
      used += entry.nbytes();
      file_of_.emplace(t.name, files.size() - 1);
      files.back().push_back(entry);
    }
  }
  for (size_t i = 0; i < files.size(); ++i) {
    file_names_.push_back(
        files.size() == 1 ? HfFiles::kSingleName
                          : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size()));
    writers_.push_back(std::make_unique<SafetensorsWriter>(
        place_->path() + "/" + file_names_[i], std::move(files[i]),
        std::map<std::string, std::string>{{"format", "pt"}}));
  }
}

HfWriter::~HfWriter() = default;

void HfWriter::write(std::string_view name, const Shape& shape, const float* values) {
  const auto found = by_name_.find(std::string(name));
  TESSERA_CHECK(found != by_name_.end(), "export: the model has no parameter {}", name);
  const nn::HfParameter* const p = &parameters_[found->second];
  TESSERA_CHECK(shape == p->shape, "export: {} is {}, expected {} of the model", name, shape,
                p->shape);
  check_hf_range(name, values, shape.numel(), options_.dtype);
  for (const nn::HfTensor& t : p->sources) {
    const std::vector<std::byte> bytes = make_hf_tensor(t, values, p->cols(), options_.dtype);
    writers_[file_of_.at(t.name)]->write(t.name, bytes.data(), static_cast<int64_t>(bytes.size()));
  }
}

void HfWriter::finish() {
  for (const auto& writer : writers_) writer->finish();
  if (writers_.size() > 1) {
    json map = json::object();
    int64_t total = 0;
    for (const nn::HfParameter& p : parameters_) {
      for (const nn::HfTensor& t : p.sources) {
        map[t.name] = file_names_[file_of_.at(t.name)];
        total += t.shape.numel() * static_cast<int64_t>(size_of(options_.dtype));
      }
    }
    const json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
    write_durably(place_->path() + "/" + HfFiles::kIndexName, index.dump(2) + "\n");
  }
  std::map<std::string, std::string> texts = {
      {"config.json", nn::hf_config_json(config_, options_.dtype, options_.token_ids)},
      {"generation_config.json", nn::hf_generation_json(options_.token_ids)}};
  for (const auto& [name, text] : options_.files) texts[name] = text;
  for (const auto& [name, text] : texts) write_durably(place_->path() + "/" + name, text);
  place_->commit();
}

}  // namespace tessera::dist
