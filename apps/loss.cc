#include "apps/loss.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "core/autograd.h"
#include "core/runtime/staging.h"
#include "kernels/loss_scale/loss_scale.h"

namespace tessera::apps {
namespace {

/// The sum of the micro-batches that all ranks have evaluated: the same for any number of ranks.
double sum_in_sample_order(const std::vector<double>& mine, dist::World& world) {
  std::vector<double> all(mine.size() * static_cast<size_t>(world.world_size()));
  world.control().all_gather(all.data(), mine.data(),
                             static_cast<int64_t>(mine.size() * sizeof(double)));
  double total = 0;
  for (size_t pass = 0; pass < mine.size(); ++pass) {
    for (size_t i = pass; i < all.size(); i += mine.size()) total += all[i];
  }
  return total;
}

}  // namespace

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

LossInput loss_input(const Batch& batch) {
  const Shape shape{batch.B, batch.T};
  LossInput input{
      from_values(std::span<const int32_t>(batch.inputs), shape), {}, forward_options(batch)};
  const auto num_positions = static_cast<int64_t>(batch.targets.size());
  const int64_t num_rows = num_loss_rows(num_positions, batch.num_valid);
  if (num_rows == num_positions) {
    input.targets = from_values(std::span<const int32_t>(batch.targets), shape);
    return input;
  }
  std::vector<int32_t> rows, targets;
  for (size_t i = 0; i < batch.targets.size(); ++i) {
    if (batch.targets[i] == kIgnoredTarget) continue;
    rows.push_back(static_cast<int32_t>(i)), targets.push_back(batch.targets[i]);
  }
  rows.resize(static_cast<size_t>(num_rows), 0);
  targets.resize(static_cast<size_t>(num_rows), kIgnoredTarget);
  input.options.loss_rows = from_values(std::span<const int32_t>(rows), {num_rows});
  input.targets = from_values(std::span<const int32_t>(targets), {num_rows});
  return input;
}

int64_t num_loss_rows(int64_t num_positions, int64_t num_targets) {
  constexpr int64_t kLeast = 64, kSteps = 16;
  const int64_t step = ((num_positions + kSteps - 1) / kSteps + kLeast - 1) / kLeast * kLeast;
  const int64_t rows = std::max<int64_t>(1, (num_targets + step - 1) / step) * step;
  return std::min(rows, num_positions);
}

LossSum batch_loss(nn::LanguageModel& model, const Batch& batch, const Tensor& grad_scale,
                   const LossTerms& terms) {
  LinearCrossEntropyOptions options;
  options.ignore_index = kIgnoredTarget;
  options.grad_scale = grad_scale;
  options.z_loss = terms.z_loss, options.label_smoothing = terms.label_smoothing;
  const LossInput input = loss_input(batch);
  return model.loss(input.ids, input.targets, input.options, options);
}

void include_loss(const dist::ClippedNorm& clip, const Tensor& loss) {
  NoGrad no_grad;
  Tensor norm = clip.norm;
  norm.add_(scale_check(loss.detach().view({}), 0.0, clip.found_inf));  // 0 or NaN
}

std::optional<double> evaluate(nn::Module& model, dist::Fsdp& fsdp, dist::World& world,
                               const Samples& samples, const TrainConfig& config,
                               const LossOfBatch& loss_of, const std::function<bool()>& is_to_end) {
  // The same micro-batches whatever the number of ranks: rank r takes r, r + ranks, ...
  const int64_t B = config.micro_batch, ranks = world.world_size();
  int64_t batches = (samples.num_samples() + B - 1) / B;
  if (config.eval_batches > 0) batches = std::min(batches, config.eval_batches);
  if (batches == 0) return std::nullopt;
  const int64_t passes = (batches + ranks - 1) / ranks;
  NoGrad no_grad;
  model.train(false);
  constexpr size_t kMaxAhead = 2;
  std::deque<HostCopy> in_flight;
  std::vector<double> sums;
  const auto take = [&] {
    sums.push_back(in_flight.front().item());
    in_flight.pop_front();
  };
  int64_t num_valid = 0;
  bool is_cut = false;
  std::optional<InputError> error;
  // A rank that cannot read its data runs padding until the ranks are through, as one whose turn is
  // beyond the last batch does: all ranks make the same collectives.
  const auto batch_of = [&](int64_t index) {
    const int64_t end = samples.num_samples();
    try {
      return samples.batch(index < batches ? index * B : end, B);
    } catch (const InputError& e) {
      if (!error) error = e;
      return samples.batch(end, B);
    }
  };
  for (int64_t pass = 0; pass < passes; ++pass) {
    if (in_flight.size() == kMaxAhead) take();
    is_cut = world.control().max(is_to_end() ? 1 : 0) != 0;
    if (is_cut) break;
    const Batch batch = batch_of(pass * ranks + world.rank());
    const LossSum loss = loss_of(batch);
    in_flight.emplace_back(loss.sum.view({1}).to(kF64));
    num_valid += batch.num_counted();
  }
  while (!in_flight.empty()) take();
  fsdp.end_forward();
  model.train(true);
  world.control().verdict(error ? &*error : nullptr);
  if (is_cut) return std::nullopt;
  return sum_in_sample_order(sums, world) / static_cast<double>(world.control().sum(num_valid));
}

}  // namespace tessera::apps
