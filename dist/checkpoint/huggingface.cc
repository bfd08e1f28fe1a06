#include "dist/checkpoint/huggingface.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/formats/durable_file.h"
#include "core/text.h"

namespace tessera::dist {
namespace {

using nlohmann::json;

constexpr int64_t kMaxConfigNbytes = int64_t{16} << 20;

void check_finite(const HfFiles::Place& place, const float* values, int64_t count) {
  const float* const end = values + count;
  const float* bad = std::find_if(values, end, [](float value) { return !std::isfinite(value); });
  if (bad == end) return;
  throw InputError(fmt::format("{}: tensor {} has a value that is {}, expected finite ones",
                               place.file->path(), shorten(place.entry->name), *bad));
}

/// A number that `dtype` rounds to infinity would be a broken model.
void check_range(std::string_view name, const float* values, int64_t numel, DType dtype) {
  visit_float(dtype, "export", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const float* const end = values + numel;
    const float* bad = std::find_if(values, end, [](float value) {
      return std::isfinite(value) && !std::isfinite(static_cast<float>(T(value)));
    });
    if (bad == end) return;
    throw ConfigError(fmt::format("export: {} has {:g}, which {} cannot hold, expected --dtype={}",
                                  name, *bad, dtype, dtype == kF16 ? "bf16 or f32" : "f32"));
  });
}

/// The bytes of a tensor of transformers, made from the parameter of ours that holds its rows.
std::vector<std::byte> make_tensor(const nn::HfTensor& tensor, const float* ours, int64_t cols,
                                   DType dtype) {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.shape.numel()) * size_of(dtype));
  visit_float(dtype, "export", [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const dst = reinterpret_cast<T*>(bytes.data());
    for (const nn::HfRows& run : tensor.rows) {
      const float* first = ours + run.row * cols;
      if (!tensor.is_transposed) {
        std::transform(first, first + run.num_rows * cols, dst + run.hf_row * cols,
                       [](float value) { return T(value); });
        continue;
      }
      const int64_t num_rows = tensor.shape[1];
      for (int64_t c = 0; c < cols; ++c) {
        for (int64_t r = 0; r < run.num_rows; ++r) {
          dst[c * num_rows + run.hf_row + r] = T(first[r * cols + c]);
        }
      }
    }
  });
  return bytes;
}

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

HfReader::HfReader(const std::string& dir, const std::vector<std::string>& ignored_keys)
    : HfReader(dir, read_config(dir, ignored_keys)) {}

HfReader::HfReader(const std::string& dir, HfModel model)
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
  files_->settle_tied(config_);
  parameters_ = config_.hf_parameters();
  for (const nn::HfParameter& p : parameters_) by_name_.emplace(p.name, &p);
  check_tensors();
}

void HfReader::check_tensors() {
  const auto& tensors = files_->tensors();
  std::vector<std::string> problems;
  std::set<std::string, std::less<>> expected;
  for (const nn::HfParameter& p : parameters_) {
    for (const nn::HfTensor& t : p.sources) {
      expected.insert(t.name);
      const auto found = tensors.find(t.name);
      if (found == tensors.end()) {
        problems.push_back("missing " + t.name);
        continue;
      }
      const SafetensorsEntry& entry = *found->second.entry;
      const bool is_float = entry.dtype == kF32 || entry.dtype == kBF16 || entry.dtype == kF16;
      if (entry.shape != t.shape || !is_float) {
        problems.push_back(fmt::format("{} is {} {}, expected f32, bf16 or f16 {}", entry.name,
                                       entry.dtype, entry.shape, t.shape));
      }
    }
  }
  for (const auto& [name, place] : tensors) {
    if (!expected.contains(name) && !config_.is_derived_hf_tensor(name)) {
      problems.push_back("unexpected " + place.entry->name);
    }
  }
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
  const nn::HfParameter& p = *by_name_.at(std::string(name));
  const int64_t cols = p.cols();
  for (const nn::HfTensor& source : p.sources) {
    const HfFiles::Place& place = files_->tensors().find(source.name)->second;
    const DType dtype = *place.entry->dtype.ours();  // check_tensors
    const auto* data = static_cast<const char*>(place.file->data(*place.entry));
    const auto at = [&](int64_t element) {
      return data + element * static_cast<int64_t>(size_of(dtype));
    };
    for (const nn::HfRows& run : source.rows) {
      const int64_t first = std::max(begin, run.row * cols);
      const int64_t last = std::min(end, (run.row + run.num_rows) * cols);
      if (first >= last) continue;
      if (!source.is_transposed) {
        load_floats(dst + (first - begin), at(run.hf_row * cols + first - run.row * cols), dtype,
                    last - first);
        check_finite(place, dst + (first - begin), last - first);
        continue;
      }
      // Element (row, col) of ours is (col, row) there: a row of ours at a time.
      const int64_t num_rows = source.shape[1];
      for (int64_t i = first; i < last;) {
        const int64_t row = i / cols, col = i % cols;
        const int64_t count = std::min(last - i, cols - col);
        load_floats(dst + (i - begin), at(col * num_rows + run.hf_row + row - run.row), dtype,
                    count, num_rows);
        i += count;
      }
      check_finite(place, dst + (first - begin), last - first);
    }
    place.file->check();
  }
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
  check_range(name, values, shape.numel(), options_.dtype);
  for (const nn::HfTensor& t : p->sources) {
    const std::vector<std::byte> bytes = make_tensor(t, values, p->cols(), options_.dtype);
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
