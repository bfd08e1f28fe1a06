#include "apps/checkpoint_command.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "apps/options.h"
#include "apps/tokenizer.h"
#include "core/check.h"
#include "core/files.h"
#include "core/runtime/allocator.h"
#include "dist/checkpoint/durable_file.h"
#include "dist/checkpoint/export.h"
#include "dist/checkpoint/huggingface.h"
#include "dist/checkpoint/reader.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;

std::string optional_text(const std::optional<double>& value) {
  return value ? fmt::format("{}", *value) : "none";
}

/// Sizes, headers and hashes of a whole checkpoint.
void check(const dist::CheckpointReader& reader) {
  reader.check_sizes();
  reader.check_files();
}

void inspect(const std::string& path, std::FILE* out) {
  const dist::CheckpointReader reader(dist::resolve_checkpoint(path));
  const dist::Manifest& m = reader.manifest();
  const dist::Progress& p = m.progress;
  fmt::print(out, "{}\nrun {}, written by {} ranks of version {}\n", reader.dir(), m.run,
             m.world_size, m.project_version);
  fmt::print(out,
             "step {}, {} tokens, next sample {}, {} samples a step, {} steps skipped, lr {:g}\n"
             "validation loss {}, best {}; seed {}, data {}\n",
             p.step, p.tokens, p.next_sample, p.samples_per_step, p.num_skipped, p.lr,
             optional_text(p.val_loss), optional_text(p.best_val_loss), p.seed, p.data_id);
  check(reader);
  fmt::print(out, "{} files, {}, xxh64 as written:\n", m.files.size(), format_nbytes(m.nbytes()));
  for (const dist::FileRecord& file : m.files) {
    fmt::print(out, "  {}  {} bytes  {:016x}\n", file.name, file.nbytes, file.hash);
  }
  fmt::print(out, "{} tensors:\n", m.tensors.size());
  for (const dist::TensorRecord& tensor : m.tensors) {
    fmt::print(out, "  {}  {} {}  {} slices\n", tensor.name, tensor.dtype, tensor.shape,
               tensor.slices.size());
  }
}

/// One checkpoint, or all in a directory: a line each. Whether all are whole.
bool verify(const std::string& path, std::FILE* out) {
  std::vector<std::string> dirs;
  if (fs::exists(fs::path(path) / dist::kManifestName)) {
    dirs.push_back(path);
  } else {
    for (const auto& place : dist::list_checkpoints(path)) dirs.push_back(place.dir);
    for (const auto& place : dist::list_incomplete(path)) {
      fmt::print(out, "{}: incomplete, never used\n", place.dir);
    }
    if (dirs.empty()) dirs.push_back(dist::resolve_checkpoint(path));  // says what is missing
  }
  bool all_whole = true;
  for (const std::string& dir : dirs) {
    try {
      const dist::CheckpointReader reader(dir);
      check(reader);
      fmt::print(out, "{}: whole ({} files, {})\n", dir, reader.manifest().files.size(),
                 format_nbytes(reader.manifest().nbytes()));
    } catch (const CheckpointError& error) {
      fmt::print(out, "{}\n", error.what());
      all_whole = false;
    }
  }
  return all_whole;
}

struct ExportOptions {
  std::string format = "hf";
  dist::HfWriteOptions hf;
};

/// The model of a checkpoint without values, for its sizes.
std::unique_ptr<nn::LanguageModel> model_of(const Config& config, const std::string& tokenizer) {
  const int64_t vocab_size = config.model.vocab != 0 ? config.model.vocab
                             : fs::exists(tokenizer) ? load_tokenizer(tokenizer)->vocab_size()
                                                     : 0;
  const nn::DeferredInit deferred;
  return make_model(config.model, vocab_size);
}

/// A directory of Hugging Face's transformers, or one that `tessera-generate` takes.
void export_model(const std::string& path, const std::string& target, const ExportOptions& options,
                  std::FILE* out) {
  const dist::CheckpointReader reader(dist::resolve_checkpoint(path));
  check(reader);
  const std::string tokenizer = (fs::path(reader.dir()).parent_path() / "tokenizer.json").string();
  dist::make_directory_durably(target);
  if (options.format == "hf") {
    const Config config =
        parse_config(reader.manifest().progress.config, reader.dir() + ": config");
    const auto model = model_of(config, tokenizer);
    dist::HfWriteOptions hf = options.hf;
    hf.token_ids = {parse_ids(config.model.bos_ids), parse_ids(config.model.eos_ids),
                    parse_ids(config.model.pad_ids)};
    dist::HfWriter writer(target, dist::hf_config_of(*model), hf);
    dist::for_each_parameter(reader,
                             [&](const std::string& name, const Shape& shape, const float* values) {
                               writer.write(name, values, shape.numel());
                             });
    writer.finish();
  } else {
    dist::export_parameters(reader, target + "/model.safetensors");
    write_file_atomically(target + "/config.toml", reader.manifest().progress.config);
    if (fs::exists(tokenizer)) {
      write_file_atomically(target + "/tokenizer.json", MappedFile(tokenizer).text());
    }
  }
  fmt::print(out, "{}: parameters of step {}\n", target, reader.manifest().progress.step);
}

}  // namespace

int checkpoint_command(const std::vector<std::string>& arguments, std::FILE* out) {
  CLI::App app("Looks at checkpoints, checks and converts them, without the training.",
               "tessera-checkpoint");
  app.require_subcommand(1);
  std::string dir, target;
  int64_t num_ranks = 1;
  const auto add = [&](const char* name, const char* what) {
    CLI::App* command = app.add_subcommand(name, what);
    command->add_option("DIR", dir, "a checkpoint, a directory with several, or DIR/latest")
        ->required();
    return command;
  };
  CLI::App* inspects = add("inspect", "Prints what is in a checkpoint and checks its hashes.");
  CLI::App* verifies = add("verify",
                           "Checks a checkpoint, or all in a directory; status 4 if one "
                           "is damaged.");
  ExportOptions export_options;
  std::string dtype = "f32";
  CLI::App* exports = add("export",
                          "Writes the parameters for Hugging Face's transformers, or for "
                          "tessera-generate.");
  exports->add_option("OUT", target, "the directory to write")->required();
  exports
      ->add_option("--format", export_options.format,
                   "hf: config.json and model.safetensors; tessera: config.toml, "
                   "model.safetensors (f32), tokenizer.json")
      ->check(CLI::IsMember({"hf", "tessera"}));
  exports->add_option("--dtype", dtype, "hf: of the tensors")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  exports
      ->add_option("--max-file-bytes", export_options.hf.max_file_nbytes,
                   "hf: beyond it, several files and an index")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 50));
  CLI::App* reshards = add("reshard", "Writes the same checkpoint as another number of files.");
  reshards->add_option("OUT", target, "the directory for its step directory")->required();
  reshards->add_option("--ranks", num_ranks, "files to write")
      ->required()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // as CLI11 wants them
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    const auto parsed = app.get_subcommands();
    fmt::print(out, "{}", parsed.empty() ? app.help() : parsed.front()->help());
    return 0;
  } catch (const CLI::ParseError& error) {
    throw ConfigError(fmt::format("command line: {} (see --help)", error.what()));
  }
  if (inspects->parsed()) inspect(dir, out);
  if (verifies->parsed() && !verify(dir, out)) return CheckpointError("").exit_status();
  export_options.hf.dtype = dtype == "bf16" ? kBF16 : dtype == "f16" ? kF16 : kF32;
  if (exports->parsed()) export_model(dir, target, export_options, out);
  if (reshards->parsed()) {
    const dist::CheckpointReader reader(dist::resolve_checkpoint(dir));
    check(reader);
    fmt::print(out, "{}: {} files\n", dist::reshard_checkpoint(reader, target, num_ranks),
               num_ranks);
  }
  return 0;
}

}  // namespace tessera::apps
