#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "apps/config.h"
#include "apps/data.h"
#include "apps/metrics.h"
#include "apps/trainer.h"
#include "core/runtime/context.h"
#include "core/runtime/staging.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "kernels/loss/loss.h"
#include "nn/module.h"
#include "optim/optimizer.h"

namespace tessera::apps {

/// What a run trains: a model on samples by a loss. The rest (directory, ranks, steps, checkpoints,
/// guards, metrics) is the run's, the same for all. All ranks make the same calls, in the order below;
/// what is "local" throws on the ranks that see it, and the run makes it a verdict of all.
class Workload {
 public:
  virtual ~Workload() = default;

  /// The data as far as it can be read before the run's directory is held, and what lies in there;
  /// both end with what the ranks have to agree on.
  virtual void open(const Config& config, dist::World& world, const Context& context) = 0;
  virtual void load(const Config& config, dist::World& world, const Context& context) = 0;
  /// Local. From here on there are samples: for training, and for validation (maybe none).
  virtual void make_samples(const Config& config) = 0;
  virtual const Samples& train_samples() const = 0;
  virtual const Samples& val_samples() const = 0;
  virtual int64_t tokens_per_sample() const = 0;
  /// Local: what the data says of the configuration.
  virtual void resolve(Config& /*config*/) const {}
  /// The configuration with its budget resolved: that of all that follows.
  virtual void set_config(const Config& config) = 0;

  /// Local: what the configuration says that the data does not allow.
  virtual void check() const {}
  /// Local: what tells the data from any other, found at once; and that of validation.
  virtual std::string data_id() const = 0;
  virtual std::string val_id() const = 0;
  /// InputError: there are not the samples of a step.
  [[noreturn]] virtual void fail_too_few(int64_t samples_per_step) const = 0;
  /// Local: the model, deferred.
  virtual void make_model() = 0;
  virtual nn::Module& model() = 0;
  /// Checks of all of the data, which may go on beside the first steps.
  virtual void begin_checks(dist::World&) {}
  /// What is set before the model is sharded.
  virtual void prepare_model(dist::World& world) = 0;
  virtual dist::FsdpOptions fsdp_options() = 0;
  /// The model's values, before a checkpoint is loaded.
  virtual void initialize(dist::Fsdp& fsdp, dist::World& world) = 0;
  /// Local.
  virtual std::unique_ptr<optim::Optimizer> make_optimizer(
      const std::vector<optim::FlatShard>& shards) = 0;

  /// Whether hashes of all training and validation data are known, and they.
  virtual bool has_contents() const { return false; }
  virtual std::pair<std::string, std::string> contents() const { return {}; }
  /// Waits for the checks; false if it does not, since the run is to end.
  virtual bool finish_checks(const std::function<bool()>& /*is_to_end*/) { return true; }
  /// The directory is the run's.
  virtual void begin_run() {}
  /// Local, rank 0: what a model needs beside it.
  virtual void write_companions(const std::string& /*dir*/) const {}
  /// Lines for the log of rank 0.
  using Print = std::function<void(const std::string& text)>;
  virtual void describe_model(const Print&) {}
  virtual void describe_data(const Print&) {}
  /// Positions that training and validation samples have.
  virtual std::pair<int64_t, int64_t> num_positions() const = 0;
  /// All of the above has gone well.
  virtual void set_up(dist::World&) {}
  virtual void begin_steps(int64_t /*steps_done*/) {}

  /// The loss of a micro-batch; `grad_scale` is where backward will start. What it adds to `extras`
  /// is for `add_metrics` of the step.
  virtual LossSum loss(const Batch& batch, const Tensor& grad_scale,
                       std::vector<HostCopy>& extras) = 0;
  virtual LossSum val_loss(const Batch& batch) = 0;
  /// Around the losses of an evaluation: what it found beside them, by the names of metrics.jsonl; the
  /// same on all ranks.
  virtual void begin_evaluation() {}
  virtual Figures end_evaluation(dist::World&) { return {}; }
  /// Whether there are tasks that judge the model (section eval), and their figures, the same on all ranks;
  /// nothing if `is_to_end` said so on one. Lines for the log.
  virtual bool has_tasks() const { return false; }
  virtual Figures judge(dist::Fsdp&, dist::World&, const std::function<bool()>& /*is_to_end*/,
                        const Print&) {
    return {};
  }
  virtual void add_metrics(StepMetrics&, const std::vector<HostCopy>& /*extras*/, dist::World&) {}
  /// Of forward and backward; 0: not known.
  virtual double flops_per_token() const { return 0; }
  /// A step as the host knows it at last.
  virtual void end_step(const StepMetrics&) {}

  /// After the last step: of the samples that were seen, and of the model.
  virtual void describe_end(int64_t /*num_samples*/, const Print&) {}
  virtual void show_model(dist::Fsdp&, dist::World&, const Print&) {}
};

/// What is the same for every run: ranks that agree, timeouts, the device and its streams.
/// `config` gets what is resolved of it. Collective.
std::shared_ptr<Context> make_context(Config& config, dist::World& world);

/// A whole run; see `train` (trainer.h) for what it makes and throws. The workload ends with it.
TrainResult run_training(const Config& config, dist::World& world,
                         const std::shared_ptr<Context>& context, std::unique_ptr<Workload> work);

}  // namespace tessera::apps
