#include "apps/bench/training.h"

#include <vector>

#include "core/autograd.h"
#include "core/random.h"
#include "core/runtime/context.h"

namespace tessera::apps {

BenchTraining::BenchTraining(dist::World& world, std::unique_ptr<nn::LanguageModel> model,
                             const dist::FsdpOptions& options, int64_t micro_batch)
    : world_(world), model_(std::move(model)), fsdp_(dist::fully_shard(*model_, world, options)) {
  fsdp_->initialize(1);
  optimizer_ = std::make_unique<optim::AdamW>(fsdp_->shards(), optim::AdamWOptions{});
  const int64_t T = model_->shape().context_length;
  const auto V = static_cast<uint64_t>(model_->shape().vocab_size);
  std::vector<int32_t> ids, targets;
  for (int64_t i = 0; i < micro_batch * T; ++i) {
    const uint64_t word = hash_name(fmt::format("{} {}", world.rank(), i));
    ids.push_back(static_cast<int32_t>(word % V));
    targets.push_back(static_cast<int32_t>((word >> 32) % V));
  }
  ids_BT_ = from_values(std::span<const int32_t>(ids), {micro_batch, T});
  targets_BT_ = from_values(std::span<const int32_t>(targets), {micro_batch, T});
  scale_ = full({}, 1.0 / static_cast<double>(micro_batch * T * world.world_size()));
}

void BenchTraining::check_finite(bool is_on) {
  check_.reset();
  if (is_on) check_ = std::make_unique<dist::FiniteCheck>(*model_, *fsdp_, *optimizer_, world_);
}

Tensor BenchTraining::step(float lr) {
  std::optional<OpObserverScope> observes;
  if (check_ != nullptr) observes.emplace(check_.get());
  const LossSum loss = model_->loss(ids_BT_, targets_BT_, {}, {.grad_scale = scale_});
  backward(loss.sum, scale_);
  observes.reset();
  const dist::ClippedNorm clip = fsdp_->clip_grad_norm(1.0);
  optimizer_->step(lr, clip.factor, clip.found_inf);
  if (check_ != nullptr) check_->after_update();
  fsdp_->end_step();
  if (check_ != nullptr) {
    const auto found = check_->find(*check_->end_step());
    TESSERA_CHECK_AS(NumericsError, !found, "{} is not finite", found ? found->text : "");
  }
  return loss.sum.detach();
}

void BenchTraining::finish() {
  Context::current()->compute().synchronize();
  world_.control().barrier();
}

}  // namespace tessera::apps
