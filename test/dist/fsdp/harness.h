#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/checkpoint/state.h"
#include "dist/comm/local.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/scaler.h"
#include "nn/llama/llama.h"

// A short training of a tiny Llama under FSDP, for tests that compare runs: the same global batches
// whatever the number of ranks and micro-batches.

namespace tessera::testing {

inline constexpr dist::Strategy kStrategies[] = {
    dist::Strategy::kFullShard, dist::Strategy::kShardGradOp, dist::Strategy::kShardOptim,
    dist::Strategy::kNoShard,   dist::Strategy::kHybridShard, dist::Strategy::kHybridShardZero2};

struct FsdpRun {
  dist::FsdpOptions fsdp;
  nn::LlamaConfig model = tiny_llama();
  nn::RecomputePolicy recompute;
  /// Another model than `model`, of its vocabulary and at least 16 positions.
  std::function<std::unique_ptr<nn::LanguageModel>()> make_model;
  int num_steps = 3;
  int num_micro_batches = 1;  ///< a rank and step
  int samples_per_step = 8;   ///< over all ranks and micro-batches
  double max_norm = 1.0;
  float lr = 1e-2f;                       ///< of AdamW
  std::optional<uint64_t> rounding_seed;  ///< of AdamW
  /// Another optimizer than AdamW.
  std::function<std::unique_ptr<optim::Optimizer>(const std::vector<optim::FlatShard>&)>
      make_optimizer;
  double norm_p = 2.0;
  std::optional<dist::LossScaleOptions> loss_scale;
  bool with_eval = false;  ///< evaluates between micro-batches
  bool twice = false;      ///< runs forward and backward of each micro-batch twice
  bool ragged = false;     ///< samples have unequal numbers of valid targets, also none
  std::function<void(nn::LanguageModel&)> prepare;  ///< before fully_shard (freezing)
  /// Before each micro-batch; what it returns lives until the micro-batch is over (guards).
  std::function<std::shared_ptr<void>(int micro_batch, dist::Fsdp&, nn::LanguageModel&)> scope;
  std::function<void(dist::Fsdp&, dist::World&)> on_ready;  ///< before step 0
  /// After the optimizer, before `end_step`: gradients and program of the step are still there.
  std::function<void(int step, dist::Fsdp&, dist::World&)> on_step;
  /// Before the first step, and after `end_step`: what a checkpoint holds.
  std::function<void(const dist::TrainingState&, dist::World&)> on_state;
  std::function<void(int step, const dist::TrainingState&, dist::World&)> after_step;
  int first_step = 0;        ///< of `num_steps`; the ones before it were done elsewhere
  dist::LocalOptions local;  ///< of thread ranks

  static nn::LlamaConfig tiny_llama();
};

struct FsdpResult {
  std::vector<double> losses, grad_norms;
  std::vector<double> loss_scales;                        ///< of each step, with `loss_scale`
  std::map<std::string, std::vector<double>> gradients;   ///< of step 0, true ones
  std::map<std::string, std::vector<double>> parameters;  ///< at the end
  std::string program;                                    ///< of step 1
  std::string summary;
};

/// One rank's part; the result is the same on all ranks.
FsdpResult run_fsdp(dist::World& world, const FsdpRun& run);
/// On thread ranks with the debug aids on; the result of rank 0, after checking that all agree.
FsdpResult run_fsdp_on_threads(int world_size, const FsdpRun& run);

/// Losses, norms, parameters and gradients bit by bit.
void check_same(const FsdpResult& actual, const FsdpResult& expected, const std::string& what);
/// The same within a relative tolerance (of a tensor's largest element).
void check_near(const FsdpResult& actual, const FsdpResult& expected, double tolerance,
                const std::string& what);

}  // namespace tessera::testing
