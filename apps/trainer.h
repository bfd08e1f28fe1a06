#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "apps/config.h"
#include "apps/data.h"
#include "apps/metrics.h"
#include "apps/run_control.h"
#include "core/runtime/context.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "kernels/loss/loss.h"
#include "nn/module.h"
#include "optim/optimizer.h"

namespace tessera::apps {

/// How a run ended.
struct TrainResult {
  int64_t steps = 0;
  double loss = 0;  ///< of the last step
  std::optional<double> val_loss;
  bool is_preempted = false;  ///< asked to end; the checkpoint is complete
};

/// A whole training run on the ranks of `world`; all call it. Makes `output.dir` with
///   config.toml        the resolved configuration
///   metrics.jsonl      one object a step (metrics.h)
///   status.json        running, finished, preempted or failed, and why; step, time, loss, process
///   model.safetensors  at the end: f32 parameters under their full names
///   tokenizer.json     if there are texts, with what came beside it
///   token_cache/       tokens of texts (token_cache.h)
///   step-NNNNNNNN/     checkpoints (checkpoint.*)
///   run.lock           held by the run while it lives (run_dir.h)
/// and prints a line a step on rank 0. What one rank alone sees wrong ends all ranks with the same
/// error.
/// Errors   ConfigError, InputError, CheckpointError, NumericsError (non-finite loss or gradient
///          norm, with step, rank and samples; that step changes nothing), IoError
TrainResult train(const Config& config, dist::World& world);

/// `tessera-train` with the arguments after the program's name.
int train_command(const std::vector<std::string>& arguments, dist::World& world);

/// Told what happens in a run, on every rank. What it keeps of its own is not in checkpoints.
class Callback {
 public:
  virtual ~Callback() = default;
  /// Before the first step; a resumed run has done some.
  virtual void on_begin(int64_t /*steps_done*/) {}
  /// A step, as the host knows it one step later, with its validation if there was one. Loss, gradient
  /// norm and what follows from them are the same on all ranks, times and bytes are each rank's.
  /// `Trainer::request_end` may be called.
  virtual void on_step(const StepMetrics&) {}
  /// After the last step, its checkpoint and the model.
  virtual void on_end(const TrainResult&) {}
};

/// Samples of a program's own: sample i in [0, num_samples) whenever, on whatever rank, `read` is
/// asked for it. With a `shuffle_seed` (to train on) each epoch has an order of its own; without (to
/// evaluate) they come in order. A sample has `targets_per_sample` targets, of which the loss is the
/// mean (windows of T tokens: T); for samples that differ in it derive from `Samples`.
class OwnSamples : public Samples {
 public:
  /// The batch of some samples: `B` (0: their number), `num_valid` (targets that count; 0: all of
  /// them) and what its loss needs, in `own`, say. The last batch of an evaluation may be shorter.
  using Read = std::function<Batch(std::span<const int64_t> indices)>;
  /// InputError for no samples, or no targets.
  OwnSamples(int64_t num_samples, Read read, std::optional<uint64_t> shuffle_seed = std::nullopt,
             int64_t targets_per_sample = 1);

  int64_t num_samples() const override { return num_samples_; }
  Batch batch(int64_t first_sample, int64_t B) const override;
  int64_t num_targets(int64_t, int64_t count) const override { return count * targets_per_sample_; }

 private:
  int64_t num_samples_, targets_per_sample_;
  Read read_;
  std::optional<uint64_t> shuffle_seed_;
};

/// `CONFIG.toml` and `--section.key=value` (also --resume, as tessera-train has it) over `defaults`, for
/// a program with a model and data of its own: keys of model, lora, data, dpo and sample are
/// ConfigErrors.
Config own_config(const std::vector<std::string>& arguments, Config defaults = {});

/// A run like that of `train`, with checkpoints, resume, guards, metrics and signals, of a program's
/// own model, samples and loss:
///
///   int main(int argc, char** argv) {
///     return dist::run_main(argc, argv, [&](dist::World& world) {
///       apps::Trainer trainer(apps::own_config({argv + 1, argv + argc}), world);
///       Net& net = trainer.make_model<Net>(/*width=*/64);
///       trainer.set_samples(std::make_unique<apps::OwnSamples>(1000, read, /*shuffle_seed=*/1));
///       trainer.set_loss([&](const apps::Batch& batch) { return ...; });
///       trainer.run();
///       return 0;
///     });
///   }
///
/// All ranks make the same calls. Tensors may be made from the constructor on: it opens the Context of
/// the run, which ends with it.
class Trainer {
 public:
  /// Errors   ConfigError if the ranks' configurations differ, or the device cannot be used
  Trainer(Config config, dist::World& world);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// A model without bytes, its parameters of `precision.param_dtype`; units by `wrap`, else by
  /// `fsdp.wrap`. It has values from `fsdp->initialize(train.seed)`, or a checkpoint, on.
  template <class M, class... Args>
  M& make_model(Args&&... args) {
    const nn::DeferredInit deferred;
    const nn::ParameterDtype dtype(param_dtype());
    auto model = std::make_unique<M>(std::forward<Args>(args)...);
    M& made = *model;
    set_model(std::move(model));
    return made;
  }
  /// A model that was made elsewhere; it gets the values of one of `make_model`.
  void set_model(std::unique_ptr<nn::Module> model);
  /// In place of `fsdp.wrap`.
  void set_wrap(dist::WrapPolicy wrap);
  /// To train on, and to evaluate (`train.eval_every`). `data_id`: what a resume compares. A batch
  /// to train on that counts other targets than `Samples::num_targets` is an InputError.
  void set_samples(std::unique_ptr<Samples> train, std::unique_ptr<Samples> val = nullptr,
                   std::string data_id = "");
  /// The sum of the losses of a batch's targets (`sum` alone is read), on the current stream: the
  /// gradient is that of its mean over the step's targets of all ranks.
  void set_loss(std::function<LossSum(const Batch&)> loss);
  /// In place of the one that `optim.*` describes. It is given the learning rate of that schedule.
  using MakeOptimizer =
      std::function<std::unique_ptr<optim::Optimizer>(const std::vector<optim::FlatShard>& shards)>;
  /// In place of `optim.name`. What its `state()` has is in checkpoints.
  void set_optimizer(MakeOptimizer make);
  /// Told after those that were added before.
  void add_callback(std::unique_ptr<Callback> callback);

  /// The whole run, once. Errors of `train`; ConfigError if model, samples or loss are missing.
  TrainResult run();
  /// Ends the run after this step, with a checkpoint to go on from; any rank may ask.
  static void request_end();

  const Config& config() const;
  DType param_dtype() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace tessera::apps
