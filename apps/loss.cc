#include "apps/loss.h"

#include <algorithm>
#include <vector>

#include "core/autograd.h"
#include "kernels/loss_scale/loss_scale.h"

namespace tessera::apps {
namespace {

nn::ForwardOptions forward_options(const Batch& batch) {
  nn::ForwardOptions options;
  const Shape shape{batch.B, batch.T};
  if (!batch.document_starts.empty()) {
    options.document_starts = from_values(std::span<const int32_t>(batch.document_starts), shape);
  }
  if (!batch.positions.empty()) {
    options.positions = from_values(std::span<const int32_t>(batch.positions), shape);
  }
  return options;
}

/// The sum of the micro-batches that all ranks have evaluated: the same for any number of ranks.
double sum_in_sample_order(const std::vector<Tensor>& sums, dist::World& world) {
  std::vector<double> mine, all(sums.size() * static_cast<size_t>(world.world_size()));
  for (const Tensor& sum : sums) mine.push_back(sum.item());
  world.control().all_gather(all.data(), mine.data(),
                             static_cast<int64_t>(mine.size() * sizeof(double)));
  double total = 0;
  for (size_t pass = 0; pass < sums.size(); ++pass) {
    for (size_t i = pass; i < all.size(); i += sums.size()) total += all[i];
  }
  return total;
}

}  // namespace

LossSum batch_loss(nn::LanguageModel& model, const Batch& batch, const Tensor& grad_scale) {
  LinearCrossEntropyOptions options;
  options.ignore_index = kIgnoredTarget;
  options.grad_scale = grad_scale;
  const Shape shape{batch.B, batch.T};
  return model.loss(from_values(std::span<const int32_t>(batch.inputs), shape),
                    from_values(std::span<const int32_t>(batch.targets), shape),
                    forward_options(batch), options);
}

void include_loss(const dist::ClippedNorm& clip, const Tensor& loss) {
  NoGrad no_grad;
  Tensor norm = clip.norm;
  norm.add_(scale_check(loss.detach().view({}), 0.0, clip.found_inf));  // 0 or NaN
}

std::optional<double> evaluate(nn::LanguageModel& model, dist::Fsdp& fsdp, dist::World& world,
                               const EvalSamples& samples, const TrainConfig& config) {
  const int64_t B = config.micro_batch, ranks = world.world_size();
  int64_t passes = (samples.num_samples() + B * ranks - 1) / (B * ranks);
  if (config.eval_batches > 0) passes = std::min(passes, config.eval_batches);
  if (passes == 0) return std::nullopt;
  NoGrad no_grad;
  model.train(false);
  Tensor total = zeros({1}, kF64);
  std::vector<Tensor> sums;
  int64_t num_valid = 0;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const Batch batch = samples.batch((pass * ranks + world.rank()) * B, B);
    const LossSum loss = batch_loss(model, batch);
    sums.push_back(loss.sum.view({1}).to(kF64));
    total.add_(sums.back());
    num_valid += batch.num_valid;
  }
  fsdp.end_forward();
  model.train(true);
  const double sum =
      config.reproducible ? sum_in_sample_order(sums, world) : world.control().sum(total.item());
  return sum / static_cast<double>(world.control().sum(num_valid));
}

}  // namespace tessera::apps
