#include "apps/checkpointing.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "core/files.h"
#include "core/log.h"
#include "core/runtime/allocator.h"
#include "dist/checkpoint/choose.h"

namespace tessera::apps {
namespace {

constexpr const char* kRunFile = "/run.json";

/// The run whose checkpoints are in `dir`; empty if it does not say.
std::string read_run(const std::string& dir) {
  try {
    const MappedFile file(dir + kRunFile);
    const auto object = nlohmann::json::parse(file.text(), nullptr, /*allow_exceptions=*/false);
    return object.is_object() && object.contains("run") && object["run"].is_string()
               ? object["run"].get<std::string>()
               : "";
  } catch (const InputError&) {
    return "";
  }
}

void write_run(const std::string& dir, const std::string& run) {
  write_file_atomically(dir + kRunFile, nlohmann::json{{"run", run}}.dump() + "\n");
}

std::string new_run() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

void make_checkpoint_dir(const Config& config, const std::string& dir) {
  const std::string key = config.checkpoint.dir.empty() ? "output.dir" : "checkpoint.dir";
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error) {
    throw ConfigError(fmt::format("{}: {} = {}: {}, expected a directory that can be made",
                                  config.origin(key), key, dir, error.message()));
  }
  if (config.checkpoint.resume == "none") {
    const auto places = dist::list_checkpoints(dir);
    if (!places.empty()) {
      throw ConfigError(
          fmt::format("{}: {} = {} has checkpoints of another run (up to step {}), expected an "
                      "empty one, or --resume=auto to go on",
                      config.origin(key), key, dir, places.front().step));
    }
  }
  try {
    if (config.checkpoint.resume == "none" || read_run(dir).empty()) write_run(dir, new_run());
  } catch (const IoError& e) {
    throw ConfigError(fmt::format("{}: {}: {}, expected a directory that can be written",
                                  config.origin(key), key, e.what()));
  }
}

}  // namespace

std::string fingerprint(const Corpus& corpus) {
  constexpr int64_t kNumTokens = 65536;
  dist::Hasher hasher;
  const auto add = [&](int64_t value) { hasher.update(&value, sizeof(value)); };
  for (const TokenArray& shard : corpus.shards) {
    const int64_t count = shard.num_tokens();
    add(count);
    for (int64_t i = 0; i < std::min(count, kNumTokens); ++i) add(shard[i]);
    for (int64_t i = std::max<int64_t>(0, count - kNumTokens); i < count; ++i) add(shard[i]);
  }
  return fmt::format("{} tokens, {:016x}", corpus.num_tokens(), hasher.digest());
}

std::string stored_param_dtype(const Config& config, dist::World& world) {
  const CheckpointConfig& c = config.checkpoint;
  std::string dtype;
  if (world.rank() == 0 && c.resume != "none" && config.precision.param_dtype == "auto") {
    try {  // what is wrong with it is said when it is loaded
      const std::string dir = c.dir.empty() ? config.output.dir : c.dir;
      const dist::CheckpointReader reader(
          dist::resolve_checkpoint(c.resume == "auto" ? dir : c.resume));
      const std::string& text = reader.manifest().progress.config;
      dtype = parse_config(text, reader.dir() + ": config").precision.param_dtype;
    } catch (const Error&) {
      dtype.clear();
    }
  }
  return world.control().broadcast(dtype, 0);
}

Checkpointing::Checkpointing(const Config& config, dist::World& world)
    : config_(config),
      world_(world),
      dir_(config.checkpoint.dir.empty() ? config.output.dir : config.checkpoint.dir) {
  int64_t adopts = 0;
  world_.control().verdict([&] {
    if (world_.rank() != 0) return;
    adopts = config_.checkpoint.resume == "auto" && read_run(dir_).empty();
    make_checkpoint_dir(config_, dir_);
    run_ = read_run(dir_);
  });
  adopts_run_ = world_.control().max(adopts) != 0;
  run_ = world_.control().broadcast(run_, 0);
}

std::optional<dist::Progress> Checkpointing::start(const dist::TrainingState& state,
                                                   const RunIdentity& identity, Print print) {
  print_ = std::move(print);
  const std::string& from = config_.checkpoint.resume;
  dist::ChosenCheckpoint chosen;
  if (from == "auto") {
    chosen = dist::choose_checkpoint(world_, dir_, adopts_run_ ? "" : run_);
  } else if (from != "none") {
    std::string path;
    world_.control().verdict([&] { path = dist::resolve_checkpoint(from); });
    chosen.reader = dist::open_checkpoint(world_, path);
  }
  std::optional<dist::Progress> progress;
  if (chosen.reader != nullptr) {
    const dist::CheckpointReader& reader = *chosen.reader;
    world_.control().verdict([&] {
      check_identity(reader, identity);
      dist::check_tensors(reader, state);
      dist::load_state(reader, state);
    });
    progress = reader.manifest().progress;
    if (adopts_run_) run_ = reader.manifest().run;  // it is that run from here on
    world_.control().verdict([&] {
      if (world_.rank() == 0) write_run(dir_, run_);
    });
    if (world_.rank() == 0) {
      print_(fmt::format("resumed from {} ({} ranks wrote it)", reader.dir(),
                         reader.manifest().world_size));
    }
  } else if (from == "auto" && world_.rank() == 0) {
    print_(fmt::format("no checkpoint in {}: from the start", dir_));
  }
  last_step_ =
      progress && chosen.reader->dir() == dir_ + "/" + dist::step_directory_name(progress->step)
          ? progress->step
          : -1;
  writer_ = std::make_unique<dist::CheckpointWriter>(
      world_, state,
      dist::CheckpointOptions{.dir = dir_,
                              .run = run_,
                              .keep = config_.checkpoint.keep,
                              .keep_best = config_.checkpoint.best,
                              .damaged = chosen.damaged});
  return progress;
}

void Checkpointing::check_identity(const dist::CheckpointReader& reader,
                                   const RunIdentity& identity) const {
  if (config_.checkpoint.resume_override) return;
  const dist::Progress& p = reader.manifest().progress;
  std::vector<std::string> changes;
  const auto compare = [&](const char* what, const auto& there, const auto& here) {
    if (!(there == here)) changes.push_back(fmt::format("{} {} there, {} here", what, there, here));
  };
  compare("train.seed", p.seed, identity.seed);
  compare("samples a step (train.micro_batch x passes x ranks, or train.global_batch)",
          p.samples_per_step, identity.samples_per_step);
  compare("training data", p.data_id, identity.data_id);
  try {
    const Config there = parse_config(p.config, reader.dir() + ": config");
    compare("model.context", there.model.context, config_.model.context);
    compare("data.separator", there.data.separator, config_.data.separator);
    compare("data.restart_positions", there.data.restart_positions, config_.data.restart_positions);
  } catch (const ConfigError& error) {
    changes.push_back(fmt::format("its configuration cannot be read ({})", error.what()));
  }
  if (changes.empty()) return;
  throw ConfigError(fmt::format("{}: {}; expected the same, or --resume.override", reader.dir(),
                                fmt::join(changes, "; ")));
}

bool Checkpointing::is_due(int64_t step) const {
  return is_on() && step % config_.checkpoint.every == 0;
}

void Checkpointing::save(const dist::Progress& progress) {
  if (progress.step == last_step_) return;
  last_step_ = progress.step;
  report(writer_->begin(progress));
}

void Checkpointing::advance(std::span<const dist::CheckpointWriter::State> states) {
  report(writer_->advance(states));
}

bool Checkpointing::finish() {
  report(writer_->finish());
  return num_errors_ == 0;
}

void Checkpointing::report(const std::optional<dist::SaveResult>& result) {
  if (!result) return;
  const std::string name = dir_ + "/" + dist::step_directory_name(result->step);
  if (result->error.empty()) {
    num_errors_ = 0;
    if (world_.rank() == 0) {
      print_(fmt::format("checkpoint: {} ({}, {:.2f} s)", name, format_nbytes(result->nbytes),
                         result->seconds));
    }
    return;
  }
  ++num_errors_;
  last_step_ = -1;
  const CheckpointConfig& c = config_.checkpoint;
  const bool stops = c.on_error == "stop" || (c.max_errors > 0 && num_errors_ >= c.max_errors);
  if (stops) {
    const IoError error(fmt::format("checkpoint of step {}: {}", result->step, result->error));
    world_.control().verdict(&error);
  }
  if (world_.rank() == 0) {
    log_warning("checkpoint of step {}: {}; training goes on", result->step, result->error);
  }
}

}  // namespace tessera::apps
