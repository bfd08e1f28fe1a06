#include "apps/checkpoint_command.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <map>
#include <optional>

#include "apps/command_line.h"
#include "apps/options.h"
#include "apps/run_dir.h"
#include "apps/saved_model.h"
#include "apps/text/gguf_tokenizer.h"
#include "core/check.h"
#include "core/files.h"
#include "core/formats/durable_file.h"
#include "core/formats/safetensors.h"
#include "core/log.h"
#include "core/runtime/allocator.h"
#include "core/text.h"
#include "dist/checkpoint/export_dir.h"
#include "dist/checkpoint/gguf.h"
#include "dist/checkpoint/huggingface.h"
#include "dist/checkpoint/peft.h"
#include "dist/checkpoint/reader.h"
#include "dist/checkpoint/reshard.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;

/// One line, whatever names are in it.
template <class... Args>
void print_line(std::FILE* out, fmt::format_string<Args...> format, Args&&... args) {
  const std::string line = fmt::format(format, std::forward<Args>(args)...);
  fmt::print(out, "{}\n", shorten(printable(line), kMaxLineShown));
}

std::string optional_text(const std::optional<double>& value) {
  return value ? fmt::format("{}", *value) : "none";
}

/// Sizes, headers and hashes of a whole checkpoint.
void check(const dist::CheckpointReader& reader) {
  reader.check_sizes();
  reader.check_files();
}

/// A run's directory whose run is not finished says so first.
void print_run(const std::string& path, std::FILE* out) {
  const std::string run = describe_unfinished(path);
  if (!run.empty()) print_line(out, "{}: the run {}", run_dir_of(path), run);
}

void inspect_model(const ModelState& state, std::FILE* out) {
  print_line(out, "{}", state.path());
  const std::vector<std::string> names = state.parameters->names();
  print_line(out, "step {}, parameters only", state.step);
  print_line(out, "{} tensors:", names.size());
  for (const std::string& name : names) {
    print_line(out, "  {}  f32 {}", shorten(name), state.parameters->shape_of(name));
  }
}

void inspect(const std::string& path, std::FILE* out) {
  print_run(path, out);
  const std::string newest = newest_checkpoint(path);
  if (newest.empty()) return inspect_model(open_model(path), out);
  const dist::CheckpointReader reader(newest);
  const dist::Manifest& m = reader.manifest();
  const dist::Progress& p = m.progress;
  print_line(out, "{}", reader.path());
  print_line(out, "run {}, written by {} ranks of version {}", shorten(m.run), m.world_size,
             shorten(m.project_version));
  print_line(out,
             "step {}, {} tokens, next sample {}, {} samples a step, {} steps skipped, lr {:g}",
             p.step, p.tokens, p.next_sample, p.samples_per_step, p.num_skipped, p.lr);
  print_line(out, "validation loss {}, best {}; seed {}, data {}", optional_text(p.val_loss),
             optional_text(p.best_val_loss), p.seed, shorten(p.data_id));
  check(reader);
  print_line(out, "{} files, {}, xxh64 as written:", m.files.size(), format_nbytes(m.nbytes()));
  for (const dist::FileRecord& file : m.files) {
    print_line(out, "  {}  {} bytes  {:016x}", shorten(file.name), file.nbytes, file.hash);
  }
  print_line(out, "{} tensors:", m.tensors.size());
  for (const dist::TensorRecord& tensor : m.tensors) {
    print_line(out, "  {}  {} {}  {} slices", shorten(tensor.name), tensor.dtype, tensor.shape,
               tensor.slices.size());
  }
}

/// One checkpoint, or all states in a directory: a line each. Whether all are whole.
bool verify(const std::string& path, std::FILE* out) {
  const std::string home = run_dir_of(path);
  std::vector<std::string> dirs;
  bool all_whole = true, has_model = false;
  print_run(path, out);
  if (fs::exists(fs::path(path) / dist::kManifestName)) {
    dirs.push_back(path);
  } else {
    for (const auto& place : dist::list_checkpoints(home)) dirs.push_back(place.dir);
    for (const auto& place : dist::list_incomplete(home)) {
      print_line(out, "{}: incomplete, never used", place.dir);
    }
    has_model = model_step(home) >= 0;
    const std::string newest = newest_checkpoint(path);  // also in the run's checkpoint.dir
    if (dirs.empty() && !newest.empty()) dirs.push_back(newest);
    if (dirs.empty() && !has_model) open_model(path);  // says what is missing
  }
  for (const std::string& dir : dirs) {
    try {
      const dist::CheckpointReader reader(dir);
      check(reader);
      print_line(out, "{}: whole ({} files, {})", dir, reader.manifest().files.size(),
                 format_nbytes(reader.manifest().nbytes()));
    } catch (const CheckpointError& error) {
      print_line(out, "{}", error.what());
      all_whole = false;
    }
  }
  if (has_model) {
    const std::string file = home + "/model.safetensors";
    try {
      const SafetensorsFile model(file);
      print_line(out, "{}: whole ({} tensors of step {}; it has no checksum)", file,
                 model.entries().size(), model_step(home));
    } catch (const InputError& error) {
      print_line(out, "{}", error.what());
      all_whole = false;
    }
  }
  return all_whole;
}

struct ExportOptions {
  std::string format = "hf";
  bool merges = false;  ///< adapters into the weights
  dist::HfWriteOptions hf;
};

bool is_same_place(const std::string& a, const std::string& b) {
  std::error_code ignored;
  return fs::equivalent(a, b, ignored);
}

/// Files of the model that training began with which say how it is used: its tokenizer's (unless
/// `has_tokenizer`), and what its generation_config.json says beside the ids.
std::map<std::string, std::string> files_of_source(const std::string& source,
                                                   const nn::HfTokenIds& ids, bool has_tokenizer) {
  constexpr const char* kConfig = "config.json";
  constexpr const char* kGeneration = "generation_config.json";
  std::map<std::string, std::string> files;
  const auto read = [&](const std::string& name) -> std::optional<std::string> {
    const std::string path = source + "/" + name;
    std::error_code ignored;
    if (!fs::exists(path, ignored)) return std::nullopt;
    const MappedFile file(path);
    std::string text(file.text());
    file.check();
    return text;
  };
  if (!has_tokenizer) {
    std::vector<std::string> names = {"tokenizer.json", "tokenizer.model", "vocab.json",
                                      "merges.txt", "vocab.txt"};
    names.insert(names.end(), text::kCompanionFiles.begin(), text::kCompanionFiles.end());
    for (const std::string& name : names) {
      if (const auto text = read(name)) files[name] = *text;
    }
  }
  if (const auto text = read(kGeneration)) {
    const auto config = read(kConfig);
    const nn::HfTokenIds theirs =
        config ? nn::parse_hf_token_ids(source + "/" + kConfig, *config) : nn::HfTokenIds{};
    const bool changes = theirs.bos != ids.bos || theirs.eos != ids.eos || theirs.pad != ids.pad;
    files[kGeneration] = nn::hf_generation_json(ids, changes, source + "/" + kGeneration, *text);
  }
  if (files.empty() && !has_tokenizer) {
    log_warning("{}: no tokenizer there, expected that of model.source: the export has none",
                source);
  }
  return files;
}

/// The chat template that a run was given, or had from its tokenizer: with the tokenizer, wherever
/// that goes.
void add_chat_template(const std::string& home, std::map<std::string, std::string>& files) {
  constexpr const char* kName = "chat_template.jinja";
  constexpr int64_t kMaxNbytes = 64 << 20;
  const std::string path = home + "/" + kName;
  std::error_code ignored;
  if (fs::exists(path, ignored)) files[kName] = read_regular_file(path, kMaxNbytes);
}

/// What goes with the weights of a state that has a tokenizer: its files, for transformers or as a run
/// has them, with the chat template. Empty without one.
std::map<std::string, std::string> tokenizer_files(const std::string& home, bool is_hf) {
  const std::string path = home + "/tokenizer.json";
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return {};
  const auto tokenizer = text::load_tokenizer(path);
  std::map<std::string, std::string> files = is_hf ? tokenizer->hf_files() : tokenizer->files();
  add_chat_template(home, files);
  return files;
}

/// The model of a state, without values.
std::unique_ptr<nn::LanguageModel> shapes_of(const ModelState& state, const Config& config) {
  const nn::DeferredInit deferred;
  return make_model(config, vocab_size_of(config, state.home));
}

/// The adapters alone, as peft has them.
void export_adapters(const ModelState& state, const Config& config, nn::Module& model,
                     const std::string& target, const ExportOptions& options) {
  dist::PeftWriteOptions peft{
      .lora = config.lora.options, .base = config.model.source, .dtype = options.hf.dtype};
  peft.files = tokenizer_files(state.home, /*is_hf=*/true);
  dist::write_peft(target, model, *state.parameters, peft);
}

/// What goes with the weights: ids and files of the tokenizer.
dist::HfWriteOptions hf_options(const ModelState& state, const Config& config,
                                const ExportOptions& options) {
  dist::HfWriteOptions hf = options.hf;
  hf.token_ids = {parse_ids(config.model.bos_ids), parse_ids(config.model.eos_ids),
                  parse_ids(config.model.pad_ids)};
  hf.files = tokenizer_files(state.home, /*is_hf=*/true);
  const bool has_tokenizer = !hf.files.empty();
  if (!config.model.source.empty()) {
    for (const auto& [name, content] :
         files_of_source(config.model.source, hf.token_ids, has_tokenizer)) {
      hf.files[name] = content;
    }
  } else if (const auto g = hf.files.find("generation_config.json");
             g != hf.files.end() &&
             !(hf.token_ids.bos.empty() && hf.token_ids.eos.empty() && hf.token_ids.pad.empty())) {
    // That of the tokenizer's directory, with the ids that config.json gets.
    g->second = nn::hf_generation_json(hf.token_ids, /*changes_ids=*/true,
                                       state.home + "/" + g->first, g->second);
  }
  return hf;
}

/// The parameters of a whole model, adapters in its weights.
void copy_whole(const ModelState& state, const Config& config, nn::Module& model,
                ParameterSink& sink) {
  if (!config.lora.is_on()) return copy_parameters(*state.parameters, sink);
  copy_parameters(dist::MergedSource(*state.parameters, model), sink);
}

void check_not_the_source(const Config& config, const std::string& target) {
  if (is_same_place(target, config.model.source)) {
    throw ConfigError(fmt::format(
        "{}: has the model that this one was made from (model.from), expected another directory",
        target));
  }
}

/// A whole model of transformers, or of a model with adapters these.
void export_hf(const ModelState& state, const std::string& target, const ExportOptions& options) {
  const Config config = state.parse();
  check_not_the_source(config, target);
  const std::unique_ptr<nn::LanguageModel> model = shapes_of(state, config);
  if (config.lora.is_on() && !options.merges) {
    return export_adapters(state, config, *model, target, options);
  }
  dist::HfWriter writer(target, nn::hf_config_of(*model), hf_options(state, config, options));
  copy_whole(state, config, *model, writer);
}

/// For llama.cpp. Adapters go into the weights.
void export_gguf(const ModelState& state, const std::string& target, const ExportOptions& options) {
  const Config config = state.parse();
  check_not_the_source(config, target);
  const std::unique_ptr<nn::LanguageModel> model = shapes_of(state, config);
  const dist::HfWriteOptions hf = hf_options(state, config, options);
  const nn::FamilyConfig family = nn::hf_config_of(*model);
  dist::GgufExport writer(
      target, family,
      {.dtype = hf.dtype,
       .name = fs::path(state.home).lexically_normal().filename().string(),
       .fields = text::gguf_tokenizer(
           hf.files, {hf.token_ids.bos, hf.token_ids.eos, hf.token_ids.pad}, family.vocab_size())});
  copy_whole(state, config, *model, writer);
}

/// For `tessera-generate`.
void export_tessera(const ModelState& state, const std::string& target, bool merges) {
  const ParameterSource* source = state.parameters.get();
  std::string text = state.config;
  std::unique_ptr<nn::LanguageModel> model;
  std::optional<dist::MergedSource> merged;
  if (merges) {
    Config config = state.parse();
    model = shapes_of(state, config);
    source = &merged.emplace(*source, *model);
    config.lora = {};
    text = dump_config(config);
  }
  dist::ExportDirectory place(target);
  SafetensorsWriter writer(place.path() + "/model.safetensors", f32_entries(*source),
                           {{"format", "tessera"}, {"step", std::to_string(state.step)}});
  copy_parameters(*source, writer);
  if (!text.empty()) write_durably(place.path() + "/config.toml", text);
  for (const auto& [name, content] : tokenizer_files(state.home, /*is_hf=*/false)) {
    write_durably(place.path() + "/" + name, content);
  }
  place.commit();
}

void export_model(const std::string& path, const std::string& target, const ExportOptions& options,
                  std::FILE* out) {
  print_run(path, out);
  const ModelState state = open_model(path);
  check_export_target(target);
  if (options.merges && !state.parse().lora.is_on()) {
    throw ConfigError(fmt::format(
        "{}: --merge of a model without adapters, expected one with lora.targets", state.path()));
  }
  if (options.format == "hf") {
    export_hf(state, target, options);
  } else if (options.format == "gguf") {
    export_gguf(state, target, options);
  } else {
    export_tessera(state, target, options.merges);
  }
  print_line(out, "{}: parameters of step {}, from {}", target, state.step, state.path());
}

void reshard(const std::string& path, const std::string& target, int64_t num_ranks,
             std::FILE* out) {
  const dist::CheckpointReader reader(dist::resolve_checkpoint(path));
  check(reader);
  const std::string run = read_run(target);
  if (!run.empty() && run != reader.manifest().run) {
    throw ConfigError(fmt::format("{}: has run {}, expected a directory without one, or run {}",
                                  target, run, reader.manifest().run));
  }
  std::unique_ptr<RunLock> lock;
  std::error_code ignored;
  if (fs::exists(fs::path(target) / "run.lock", ignored)) {
    lock = RunLock::try_hold(target, 0);
    if (lock == nullptr) {
      throw ConfigError(
          fmt::format("{}: in use (the run {}), expected another directory, or its "
                      "end first",
                      target, describe_run(target)));
    }
  }
  print_line(out, "{}: {} files", dist::reshard_checkpoint(reader, target, num_ranks), num_ranks);
}

}  // namespace

int checkpoint_command(const std::vector<std::string>& arguments, std::FILE* out) {
  CommandLine app("Looks at checkpoints, checks and converts them, without the training.",
                  "tessera-checkpoint");
  app.require_subcommand(1);
  std::string dir, target;
  int64_t num_ranks = 1;
  const auto add = [&](const char* name, const char* what) {
    CLI::App* command = app.add_subcommand(name, what);
    command->add_option("DIR", dir, "a checkpoint, or the directory of a run: its newest state")
        ->required();
    return command;
  };
  CLI::App* inspects = add("inspect", "Prints what is in the newest state and checks its hashes.");
  CLI::App* verifies = add("verify",
                           "Checks a checkpoint, or all of a run; status 4 if one "
                           "is damaged.");
  ExportOptions export_options;
  std::string dtype = "f32";
  CLI::App* exports = add("export",
                          "Writes the parameters for Hugging Face's transformers, or for "
                          "tessera-generate.");
  exports->add_option("OUT", target, "the directory to write")->required();
  exports->add_flag("--merge", export_options.merges,
                    "of a model with adapters (lora.targets): the model with their products in its "
                    "weights; without it hf has the adapters alone, for Hugging Face's peft");
  exports
      ->add_option("--format", export_options.format,
                   "hf: config.json and model.safetensors; gguf: model.gguf of llama.cpp; tessera: "
                   "config.toml, model.safetensors (f32), tokenizer.json")
      ->check(CLI::IsMember({"hf", "gguf", "tessera"}));
  exports->add_option("--dtype", dtype, "hf, gguf: dtype of the tensors")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  exports
      ->add_option("--max-file-bytes", export_options.hf.max_file_nbytes,
                   "hf: largest file; beyond it several and an index")
      ->check(in_range<int64_t>(1));
  CLI::App* reshards = add("reshard", "Writes the same checkpoint as another number of files.");
  reshards->add_option("OUT", target, "the directory for its step directory")->required();
  reshards->add_option("--ranks", num_ranks, "files to write")
      ->required()
      ->check(in_range<int64_t>(1, 1 << 20));
  if (const auto status = app.read(arguments, out)) return *status;
  if (inspects->parsed()) inspect(dir, out);
  if (verifies->parsed() && !verify(dir, out)) return CheckpointError("").exit_status();
  export_options.hf.dtype = dtype == "bf16" ? kBF16 : dtype == "f16" ? kF16 : kF32;
  if (exports->parsed()) export_model(dir, target, export_options, out);
  if (reshards->parsed()) reshard(dir, target, num_ranks, out);
  return 0;
}

}  // namespace tessera::apps
