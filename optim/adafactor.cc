#include "optim/adafactor.h"

#include <algorithm>

#include "core/autograd.h"
#include "kernels/optimizer/dynamic_map.h"
#include "kernels/optimizer/kernel.h"
#include "optim/exchange.h"

namespace tessera::optim {
namespace {

constexpr const char* kAdafactor = "Adafactor";

}  // namespace

Adafactor::Adafactor(std::vector<FlatShard> shards, const AdafactorOptions& options)
    : Optimizer(std::move(shards), options.lr, options.weight_decay, options.rounding_seed),
      options_(options) {
  check_range(options.beta2_decay <= 0, kAdafactor, "beta2_decay", "at most 0",
              options.beta2_decay);
  check_not_negative(kAdafactor, "eps1", options.eps1);
  check_not_negative(kAdafactor, "eps2", options.eps2);
  check_range(options.d > 0, kAdafactor, "d", "above 0", options.d);
  check_not_negative(kAdafactor, "weight_decay", options.weight_decay);
  check_state_blocks(kAdafactor);
  const MemoryScope scope(MemoryClass::kOptimizer);
  int64_t largest_part = 0, largest_whole = 0;
  bool is_shared = false;
  for (const FlatShard& shard : shards_) {
    Group& group = groups_.emplace_back();
    int64_t numel = 0;
    std::vector<double> work(static_cast<size_t>(num_owners(shard)), 0);
    for (const WholeParameter& p : shard.parameters) {
      if (p.shape.numel() == 0) continue;
      const bool is_vector = p.shape.num_dims() < 2;
      const int64_t cols = is_vector ? p.shape.numel() : p.shape[p.shape.num_dims() - 1];
      const int64_t rows = is_vector ? 0 : p.shape.numel() / cols;
      const int owner = give_to_least(work, static_cast<double>(p.shape.numel()));
      group.factors.push_back({p, rows, cols, numel, owner});
      numel += rows + cols + 2;
    }
    group.values = zeros({numel}, kF32);
    group.next = zeros({numel}, kF32);
    std::vector<int64_t> places;
    for (const Segment& segment : shard.segments) {
      const Factors& f = of_parameter(kAdafactor, shard, segment, group.factors,
                                      [](const Factors& of) { return of.parameter.name; });
      places.insert(places.end(), {f.begin, f.begin + f.rows, f.begin + f.rows + f.cols,
                                   f.rows == 0 ? 0 : f.cols, segment.offset - segment.begin});
    }
    group.places = from_values(std::span<const int64_t>(places),
                               {static_cast<int64_t>(places.size() / 5), 5}, kI64);
    largest_part = std::max(largest_part, shard.master.numel());
    largest_whole = std::max(largest_whole, shard.master.numel() * num_owners(shard));
    is_shared |= shard.exchange != nullptr;
  }
  whole_ = zeros({largest_whole}, kF32);
  squares_ = zeros({kernels::state_blocks(largest_whole)}, kF32);
  part_ = is_shared ? zeros({largest_part}, kF32) : whole_;
  squares_part_ = is_shared ? zeros({kernels::state_blocks(largest_part)}, kF32) : squares_;
  workspace_ = zeros({kernels::AdafactorFactors::workspace_numel()}, kF32);
}

std::vector<WholeState> Adafactor::whole_state() const {
  std::vector<WholeState> all;
  for (const Group& group : groups_) {
    for (const Factors& f : group.factors) {
      const std::string& name = f.parameter.name;
      if (f.rows > 0) all.push_back({"row_var/" + name, group.values.narrow(0, f.begin, f.rows)});
      all.push_back({(f.rows > 0 ? "col_var/" : "variance/") + name,
                     group.values.narrow(0, f.begin + f.rows, f.cols)});
    }
  }
  return all;
}

void Adafactor::update(const StepScalars& step) {
  const NoGrad no_grad;
  for (size_t i = 0; i < shards_.size(); ++i) update_group(i, step);
}

void Adafactor::update_group(size_t index, const StepScalars& step) {
  const FlatShard& shard = shards_[index];
  Group& group = groups_[index];
  const int64_t numel = shard.master.numel();
  const Tensor part = part_.narrow(0, 0, numel);
  const Tensor squares_part = squares_part_.narrow(0, 0, kernels::state_blocks(numel));
  for_parts(index, index + 1, step, {}, [&](const FlatUpdate& window, std::span<const Tensor>) {
    const int64_t count = window.master.numel();
    adafactor_collect(
        window, part.narrow(0, window.first, count),
        squares_part.narrow(0, kernels::state_blocks(window.first), kernels::state_blocks(count)));
  });
  const int owner = this_owner(shard);
  if (shard.exchange != nullptr) {
    const int ranks = num_owners(shard);
    const Event squares_are_here = shard.exchange->gather_shards(
        squares_.narrow(0, 0, kernels::state_blocks(numel) * ranks), squares_part);
    current_stream().wait(squares_are_here);
    current_stream().wait(shard.exchange->gather_shards(whole_.narrow(0, 0, numel * ranks), part));
    group.next.fill_(0);
  }
  float* const next = group.next.data<float>();
  const float* const values = group.values.data<float>();
  for (const Factors& f : group.factors) {
    if (f.owner != owner) continue;
    const int64_t begin = f.parameter.begin;
    kernels::adafactor_factors(
        current_stream(),
        {.next = next + f.begin,
         .values = values + f.begin,
         .g = whole_.data<float>() + begin,
         .squares = squares_.data<float>() + begin / kernels::kStateBlock,
         .workspace = workspace_.data<float>(),
         .step = step_count().data<int64_t>(),
         .skip = step.skip.is_defined() ? step.skip.data<uint8_t>() : nullptr,
         .rows = f.rows,
         .cols = f.cols,
         .lr = static_cast<double>(step.lr) * static_cast<double>(f.parameter.lr_scale),
         .beta2_decay = options_.beta2_decay,
         .eps1 = options_.eps1,
         .eps2 = options_.eps2,
         .d = options_.d});
  }
  if (shard.exchange != nullptr) current_stream().wait(shard.exchange->sum(group.next));
  group.values.copy_(group.next);
  for_parts(index, index + 1, step, {.states = false, .grad = false},
            [&](const FlatUpdate& window, std::span<const Tensor>) {
              adafactor_apply(window, part.narrow(0, window.first, window.master.numel()),
                              group.values, group.places, options_.eps1);
            });
}

}  // namespace tessera::optim
