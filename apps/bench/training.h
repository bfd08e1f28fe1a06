#pragma once

#include <memory>

#include "dist/fsdp/finite_check.h"
#include "dist/fsdp/fully_shard.h"
#include "nn/transformer.h"
#include "optim/adamw.h"

namespace tessera::apps {

/// One rank's part of a training that benchmarks time: AdamW, on the same random tokens in each
/// step, other ones on each rank. Lives no longer than the World.
class BenchTraining {
 public:
  /// Takes a deferred `model`; `micro_batch` rows of its whole context a rank and step. Collective.
  BenchTraining(dist::World& world, std::unique_ptr<nn::LanguageModel> model,
                const dist::FsdpOptions& options, int64_t micro_batch);

  /// This rank's part of the loss, which the device computes yet.
  Tensor step(float lr);
  /// Steps from here on look at each new value, as debug.nan of a trainer does; or no longer.
  void check_finite(bool is_on);
  /// All ranks are done with what was submitted.
  void finish();

  nn::LanguageModel& model() const { return *model_; }
  const dist::Fsdp& fsdp() const { return *fsdp_; }

 private:
  dist::World& world_;
  std::unique_ptr<nn::LanguageModel> model_;
  std::unique_ptr<dist::Fsdp> fsdp_;
  std::unique_ptr<optim::AdamW> optimizer_;
  std::unique_ptr<dist::FiniteCheck> check_;  // null: nothing is looked at
  Tensor ids_BT_, targets_BT_, scale_;
};

}  // namespace tessera::apps
