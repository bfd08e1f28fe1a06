#include "apps/checkpointing.h"

#include <algorithm>
#include <random>

#include "apps/budget.h"
#include "apps/resume_keys.h"
#include "apps/run_dir.h"
#include "core/formats/durable_file.h"
#include "core/log.h"
#include "core/runtime/allocator.h"
#include "core/text.h"
#include "dist/checkpoint/choose.h"

namespace tessera::apps {
namespace {

std::string new_run() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

}  // namespace

std::string fingerprint(const Corpus& corpus) {
  constexpr int64_t kNumTokens = 65536;
  dist::Hasher hasher;
  const auto add = [&](int64_t value) { hasher.update(&value, sizeof(value)); };
  for (const TokenArray& shard : corpus.shards) {
    const int64_t count = shard.num_tokens();
    add(count);
    if (!shard.is_mapped()) {
      const std::string_view bytes = shard.bytes(0, count);
      hasher.update(bytes.data(), std::ssize(bytes));
      continue;
    }
    for (int64_t i = 0; i < std::min(count, kNumTokens); ++i) add(shard[i]);
    for (int64_t i = std::max<int64_t>(0, count - kNumTokens); i < count; ++i) add(shard[i]);
    shard.check();
  }
  for (const TokenArray& targets : corpus.targets) {
    const std::string_view bytes = targets.bytes(0, targets.num_tokens());
    hasher.update(bytes.data(), std::ssize(bytes));
  }
  return fmt::format("{} tokens, {:016x}", corpus.num_tokens(), hasher.digest());
}

std::string validation_id(const Corpus& corpus, const Config& config) {
  const int64_t num_samples = config.train.eval_batches * config.train.micro_batch;
  return fmt::format("{}, {} samples of {}", fingerprint(corpus),
                     num_samples == 0 ? "all" : std::to_string(num_samples), config.model.context);
}

std::optional<DType> stored_param_dtype(const Config& config, dist::World& world) {
  const CheckpointConfig& c = config.checkpoint;
  std::optional<DType> dtype;
  if (world.rank() == 0 && c.resume != "none" && !config.precision.param_dtype) {
    try {  // what is wrong with it is said when it is loaded
      std::string from = c.resume;
      if (from == "auto") {
        const std::string dir = c.dir.empty() ? config.output.dir : c.dir;
        from = dist::list_checkpoints(dir).empty() ? read_origin(dir) : dir;
      }
      if (!from.empty()) {
        const dist::CheckpointReader reader(dist::resolve_checkpoint(from));
        const std::string& text = reader.manifest().progress.config;
        dtype = parse_config(text, reader.path() + ": config").precision.param_dtype;
      }
    } catch (const Error&) {
      dtype.reset();
    }
  }
  const std::string name(dtype ? name_of(*dtype) : "");
  const std::string shared = world.control().broadcast(name, 0);
  return shared.empty() ? std::nullopt : std::optional(dtype_from_name(shared));
}

Checkpointing::Checkpointing(const Config& config, dist::World& world)
    : config_(config),
      world_(world),
      dir_(config.checkpoint.dir.empty() ? config.output.dir : config.checkpoint.dir) {
  const std::string& resume = config_.checkpoint.resume;
  int64_t adopts = 0;
  if (world_.rank() == 0) {
    if (resume != "none") run_ = read_run(dir_);
    adopts = resume == "auto" && run_.empty();
    if (run_.empty()) run_ = new_run();
  }
  adopts_run_ = world_.control().max(adopts) != 0;
  run_ = world_.control().broadcast(run_, 0);
}

std::optional<dist::Progress> Checkpointing::start(const dist::TrainingState& state,
                                                   const RunIdentity& identity, Print print) {
  print_ = std::move(print);
  const std::string& from = config_.checkpoint.resume;
  dist::ChosenCheckpoint chosen;
  if (from == "auto") {
    chosen = dist::choose_checkpoint(world_, dir_, adopts_run_ ? "" : run_,
                                     config_.checkpoint.resume_skip_unreadable);
    set_aside(chosen.damaged);
    if (chosen.reader == nullptr) open_origin(chosen);
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
    resumed_from_ = reader.path();
    resumed_content_ = progress->data_content;
    if (world_.rank() == 0) {
      print_(fmt::format("resumed from {} ({} ranks wrote it)", reader.path(),
                         reader.manifest().world_size));
      print_changes(reader);
    }
  } else if (from == "auto" && world_.rank() == 0) {
    const std::string before = describe_run(config_.output.dir, /*is_mine=*/true);
    print_(fmt::format("no checkpoint in {}: from the start{}", dir_,
                       before.empty() ? "" : " (the run there " + before + ")"));
  }
  last_step_ =
      progress && chosen.reader->path() == dir_ + "/" + dist::step_directory_name(progress->step)
          ? progress->step
          : -1;
  last_sample_ = progress ? progress->next_sample : -1;
  writer_ = std::make_unique<dist::CheckpointWriter>(
      world_, state,
      dist::CheckpointOptions{.dir = dir_,
                              .run = run_,
                              .keep = config_.checkpoint.keep,
                              .keep_best = config_.checkpoint.best,
                              .leave_alone = chosen.unreadable});
  return progress;
}

/// A run that has come to no checkpoint of its own goes on from the one that it began with.
void Checkpointing::open_origin(dist::ChosenCheckpoint& chosen) {
  dist::Control& control = world_.control();
  const std::string origin = control.broadcast(world_.rank() == 0 ? read_origin(dir_) : "", 0);
  if (origin.empty()) return;
  control.verdict([&] {
    try {
      dist::resolve_checkpoint(origin);
    } catch (const CheckpointError& error) {
      throw CheckpointError(fmt::format(
          "{}: no checkpoint in it, and the one that its run began with is gone ({}), expected it "
          "back, or --output.overwrite with another start",
          dir_, error.what()));
    }
  });
  chosen.reader = dist::open_checkpoint(world_, origin);
}

/// Damaged checkpoints make room for new ones of their steps and stay for whoever can mend them.
void Checkpointing::set_aside(const std::vector<std::string>& damaged) const {
  if (world_.rank() != 0) return;
  for (const std::string& dir : damaged) {
    try {
      log_warning("{}: damaged, kept as {}", dir, dist::set_checkpoint_aside(dir));
    } catch (const IoError& error) {
      log_warning("{}", error.what());
    }
  }
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
    const Config there = parse_config(p.config, reader.path() + ": config");
    for (std::string& change : compare_for_resume(there, config_, p.step).refused) {
      changes.push_back(std::move(change));
    }
  } catch (const ConfigError& error) {
    changes.push_back(fmt::format("its configuration cannot be read ({})", error.what()));
  }
  if (changes.empty()) return;
  throw ConfigError(fmt::format("{}: {}; expected the same, or --resume.override", reader.path(),
                                join_few(changes, "; ")));
}

void Checkpointing::check_content(const std::string& data_content) const {
  if (config_.checkpoint.resume_override || resumed_content_.empty() || data_content.empty() ||
      resumed_content_ == data_content) {
    return;
  }
  const ConfigError error(fmt::format(
      "{}: training data: the number of tokens, the first and the last are the same, others are "
      "not; expected the same, or --resume.override",
      resumed_from_));
  world_.control().verdict(&error);  // all ranks have it
}

/// Settings that are not the checkpoint's, which the run goes on with.
void Checkpointing::print_changes(const dist::CheckpointReader& reader) const {
  const dist::Progress& p = reader.manifest().progress;
  try {
    const Config there = parse_config(p.config, reader.path() + ": config");
    const ResumeChanges changes = compare_for_resume(there, config_, p.step);
    for (const std::string& change : changes.refused) print_("resume, overridden: " + change);
    for (const std::string& change : changes.told) print_("resume: " + change);
  } catch (const ConfigError&) {  // overridden as well
    print_("resume, overridden: the checkpoint's configuration cannot be read");
  }
}

bool Checkpointing::is_due(int64_t step) const {
  const CheckpointConfig& c = config_.checkpoint;
  return (c.every > 0 && step % c.every == 0) ||
         completes_part_of_epoch(config_, c.per_epoch, step);
}

bool Checkpointing::is_late() const {
  const std::chrono::duration<double> age = std::chrono::steady_clock::now() - last_begin_;
  const double seconds = config_.checkpoint.every_minutes * 60;
  return seconds > 0 && age.count() >= seconds;
}

void Checkpointing::add_val_loss(const dist::Progress& progress) {
  if (world_.rank() != 0 || progress.step != last_step_ || !progress.val_loss) return;
  const std::string dir = dir_ + "/" + dist::step_directory_name(progress.step);
  try {
    dist::Manifest manifest = dist::CheckpointReader(dir).manifest();
    manifest.progress = progress;
    write_durably(dir + "/" + dist::kManifestName, dist::to_json(manifest));
  } catch (const Error& error) {
    log_warning("{}; the checkpoint stays, without its validation loss", error.what());
  }
}

void Checkpointing::save(const dist::Progress& progress) {
  last_begin_ = std::chrono::steady_clock::now();
  // The same step with other samples is one that a rewind has come to again.
  if (progress.step == last_step_ && progress.next_sample == last_sample_) return;
  last_step_ = progress.step;
  last_sample_ = progress.next_sample;
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
  const bool stops =
      c.on_error == OnError::kStop || (c.max_errors > 0 && num_errors_ >= c.max_errors);
  if (stops) {
    const IoError error(fmt::format("checkpoint of step {}: {}", result->step, result->error));
    world_.control().verdict(&error);
  }
  if (world_.rank() == 0) {
    log_warning("checkpoint of step {}: {}; training goes on", result->step, result->error);
  }
}

}  // namespace tessera::apps
