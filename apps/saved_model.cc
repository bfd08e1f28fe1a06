#include "apps/saved_model.h"

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "apps/model_from.h"
#include "apps/options.h"
#include "apps/run_dir.h"
#include "core/autograd.h"
#include "core/files.h"
#include "core/formats/safetensors.h"
#include "core/text.h"
#include "dist/checkpoint/huggingface.h"
#include "dist/checkpoint/peft.h"
#include "dist/checkpoint/reader.h"
#include "dist/checkpoint/save_parameters.h"

namespace tessera::apps {

void save_model(const std::string& path, nn::Module& model, dist::Fsdp& fsdp, dist::World& world,
                int64_t step) {
  dist::save_parameters(fsdp, world, [&] {
    std::vector<SafetensorsEntry> entries;
    for (const nn::NamedParameter& p : model.named_parameters()) {
      entries.push_back({p.name, kF32, p.parameter->tensor.shape()});
    }
    return std::make_unique<SafetensorsWriter>(
        path, std::move(entries),
        std::map<std::string, std::string>{{"format", "tessera"}, {"step", std::to_string(step)}});
  });
}

namespace {

namespace fs = std::filesystem;

constexpr const char* kModelFile = "/model.safetensors";

/// The step that a model's file names, else that of a run that finished, else 0.
int64_t step_of(const SafetensorsFile& file, const std::string& dir) {
  const auto found = file.metadata().find("step");
  int64_t step = 0;
  if (found != file.metadata().end()) {
    const std::string& text = found->second;
    std::from_chars(text.data(), text.data() + text.size(), step);
    return std::max<int64_t>(step, 0);
  }
  const auto status = read_status(dir);
  return status && status->state == RunState::kFinished ? status->step : 0;
}

bool has_model(const std::string& dir) {
  std::error_code ignored;
  return fs::exists(dir + kModelFile, ignored) && fs::exists(dir + "/config.toml", ignored);
}

ModelState open_file(const std::string& dir) {
  auto file = std::make_unique<SafetensorsFile>(dir + kModelFile);
  for (const SafetensorsEntry& entry : file->entries()) {
    if (entry.dtype == kF32) continue;
    throw InputError(fmt::format("{}: tensor {} is {} {}, expected f32", file->path(),
                                 shorten(entry.name), entry.dtype, entry.shape));
  }
  const int64_t step = step_of(*file, dir);
  return {std::move(file), step, dir, read_regular_file(dir + "/config.toml", kMaxConfigNbytes)};
}

ModelState open_checkpoint(const std::string& dir) {
  auto reader = std::make_unique<dist::CheckpointReader>(dir);
  reader->check_sizes();
  reader->check_files();
  const dist::Progress progress = reader->manifest().progress;
  const std::string home = fs::path(dir).parent_path().string();
  return {std::move(reader), progress.step, home.empty() ? "." : home, progress.config};
}

/// The newest of each kind that a path means; -1: none.
struct States {
  std::string dir;  // of the run, or of the one checkpoint
  std::string checkpoint;
  int64_t checkpoint_step = -1, model_step = -1;
};

States find_states(const std::string& path) {
  std::error_code ignored;
  States found;
  if (fs::exists(fs::path(path) / dist::kManifestName, ignored)) {
    found.checkpoint = dist::resolve_checkpoint(path);
    found.dir = found.checkpoint;
    return found;
  }
  found.dir = run_dir_of(path);
  found.model_step = model_step(found.dir);
  std::vector<std::string> places = {found.dir};
  try {
    const std::string elsewhere = load_config(found.dir + "/config.toml").checkpoint.dir;
    if (!elsewhere.empty() && read_run(elsewhere) == read_run(found.dir)) {
      places.push_back(elsewhere);
    }
  } catch (const Error&) {
    // No run's directory: who needs its configuration says so.
  }
  for (const std::string& place : places) {
    const auto checkpoints = dist::list_checkpoints(place);
    if (checkpoints.empty() || checkpoints.front().step <= found.checkpoint_step) continue;
    found.checkpoint = checkpoints.front().dir;
    found.checkpoint_step = checkpoints.front().step;
  }
  return found;
}

}  // namespace

int64_t model_step(const std::string& dir) {
  if (!has_model(dir)) return -1;
  try {
    return step_of(SafetensorsFile(dir + kModelFile), dir);
  } catch (const InputError&) {
    return 0;  // damaged: it is named when it is read
  }
}

Config ModelState::parse() const {
  if (config.empty()) {
    throw CheckpointError(
        fmt::format("{}: no configuration in it (it is of a model of one's own), expected that of "
                    "tessera-train; export takes --format=tessera",
                    path()));
  }
  const bool is_file = path().ends_with(kModelFile);
  Config parsed = parse_config(config, is_file ? home + "/config.toml" : path() + ": config");
  if (parsed.is_own) {
    throw CheckpointError(fmt::format(
        "{}: its configuration has no model, which is a program's own, expected that of "
        "tessera-train; export takes --format=tessera",
        path()));
  }
  return parsed;
}

std::string newest_checkpoint(const std::string& path) {
  const States found = find_states(path);
  return found.checkpoint_step >= found.model_step ? found.checkpoint : "";
}

ModelState open_model(const std::string& path) {
  const States found = find_states(path);
  if (found.model_step >= 0 && found.model_step >= found.checkpoint_step) {
    return open_file(found.dir);
  }
  if (!found.checkpoint.empty()) return open_checkpoint(found.checkpoint);
  const std::string run = describe_run(found.dir);
  throw CheckpointError(fmt::format(
      "{}: no complete checkpoint, and no model.safetensors with a config.toml{}, expected the "
      "directory of a run, or a checkpoint",
      path, run.empty() ? "" : " (the run " + run + ")"));
}

OpenedModel open_any_model(const std::string& path) {
  OpenedModel opened;
  std::error_code ignored;
  if (fs::exists(path + "/config.json", ignored) && !fs::exists(path + "/config.toml", ignored)) {
    opened.state = {std::make_unique<dist::HfReader>(path), 0, path, ""};
    opened.config.model.from = path;
    take_model_from(opened.config);
  } else {
    opened.state = open_model(path);
    opened.config = opened.state.parse();
  }
  return opened;
}

std::unique_ptr<text::Tokenizer> tokenizer_of(const std::string& home) {
  std::error_code ignored;
  for (const char* name : {"/tokenizer.json", "/vocab.bpe", "/merges.txt"}) {
    if (fs::exists(home + name, ignored)) return text::load_tokenizer(home);
  }
  return nullptr;
}

namespace {

/// Of a model that was trained on documents without a separator.
text::DocumentTokens document_tokens_of(const Config& config, const text::Tokenizer* tokenizer) {
  const DataConfig& d = config.data;
  if (tokenizer == nullptr || !may_have_documents(d) || d.separator >= 0 ||
      d.document_tokens != DocumentMarks::kAuto) {
    return {};
  }
  return text::document_tokens(*tokenizer);
}

}  // namespace

std::vector<int32_t> end_tokens_of(const Config& config, const text::Tokenizer* tokenizer) {
  std::vector<int32_t> tokens;
  for (const int64_t id : parse_ids(config.model.eos_ids)) {
    tokens.push_back(static_cast<int32_t>(id));
  }
  const auto add = [&](int64_t id) {
    const auto token = static_cast<int32_t>(id);
    if (id >= 0 && std::find(tokens.begin(), tokens.end(), token) == tokens.end()) {
      tokens.push_back(token);
    }
  };
  add(config.data.separator);
  add(document_tokens_of(config, tokenizer).end);
  return tokens;
}

int32_t prefix_token_of(const Config& config, const text::Tokenizer* tokenizer) {
  const std::vector<int64_t> begins = parse_ids(config.model.bos_ids);
  if (!begins.empty()) return static_cast<int32_t>(begins[0]);
  const int32_t begin = document_tokens_of(config, tokenizer).begin;
  if (begin >= 0) return begin;
  const std::vector<int32_t> ends = end_tokens_of(config, tokenizer);
  return ends.empty() ? -1 : ends[0];
}

int64_t vocab_size_of(const Config& config, const std::string& home,
                      const text::Tokenizer* tokenizer) {
  if (config.model.vocab != 0) return config.model.vocab;
  if (tokenizer != nullptr) return tokenizer->vocab_size();
  const std::string path = home + "/tokenizer.json";
  std::error_code ignored;
  if (fs::exists(path, ignored)) return text::load_tokenizer(path)->vocab_size();
  throw InputError(
      fmt::format("{}: No such file or directory, expected the tokenizer that gives model.vocab = "
                  "0 its meaning",
                  path));
}

void check_shapes(const ModelState& state, const Config& config, int64_t vocab_size) {
  const auto num_tensors = static_cast<int64_t>(state.parameters->names().size());
  const int64_t num_layers = config.model.selected().num_layers();
  if (num_layers > num_tensors) {
    throw InputError(fmt::format("{}: {} tensors, expected those of model.layers = {}",
                                 state.path(), num_tensors, num_layers));
  }
  const nn::DeferredInit deferred;
  const std::unique_ptr<nn::LanguageModel> model = make_model(config, vocab_size);
  const auto parameters = model->named_parameters();
  for (const nn::NamedParameter& p : parameters) {
    const Shape shape = state.parameters->shape_of(p.name), &expected = p.parameter->tensor.shape();
    if (shape != expected) {
      throw InputError(
          fmt::format("{}: tensor {} is {}, expected {}", state.path(), p.name, shape, expected));
    }
  }
  if (num_tensors != std::ssize(parameters)) {
    throw InputError(fmt::format("{}: {} tensors, expected the model's {}", state.path(),
                                 num_tensors, parameters.size()));
  }
}

namespace {

/// Of the parameters that `source` has.
void load_values(const ParameterSource& source, nn::Module& model) {
  const NoGrad no_grad;
  std::vector<float> values;
  for (const std::string& name : source.names()) {
    Tensor& tensor = model.parameter(name).tensor;
    values.resize(static_cast<size_t>(tensor.numel()));
    source.read(name, 0, tensor.numel(), values.data());
    tensor.copy_(from_values(std::span<const float>(values), tensor.shape()));
  }
}

}  // namespace

std::unique_ptr<dist::PeftReader> attach_adapter(SavedModel& saved, const std::string& adapter) {
  if (saved.config.lora.is_on()) {
    throw ConfigError(fmt::format("{}: has adapters, expected a model without any beside {}",
                                  saved.path, adapter));
  }
  auto reader = std::make_unique<dist::PeftReader>(adapter);
  try {
    nn::add_lora(*saved.model, reader->options());
  } catch (const ConfigError& error) {
    throw ConfigError(
        fmt::format("{}/{}: {}", adapter, dist::PeftReader::kConfigName, error.what()));
  }
  reader->attach(*saved.model);
  return reader;
}

SavedModel describe_model(const OpenedModel& opened, int64_t& vocab_size) {
  const ModelState& state = opened.state;
  SavedModel saved{.config = opened.config,
                   .tokenizer = tokenizer_of(state.home),
                   .model = nullptr,
                   .path = state.path(),
                   .home = state.home,
                   .step = state.step};
  vocab_size = vocab_size_of(saved.config, saved.home, saved.tokenizer.get());
  check_shapes(state, saved.config, vocab_size);
  return saved;
}

SavedModel load_model(const std::string& path, DType dtype, const std::string& adapter) {
  const OpenedModel opened = open_any_model(path);
  int64_t vocab_size = 0;
  SavedModel saved = describe_model(opened, vocab_size);
  const nn::ParameterDtype of_parameters(dtype);
  saved.model = make_model(saved.config, vocab_size);
  load_values(*opened.state.parameters, *saved.model);
  if (!adapter.empty()) load_values(*attach_adapter(saved, adapter), *saved.model);
  saved.model->reset_buffers();
  return saved;
}

}  // namespace tessera::apps
