#include "dist/fsdp/scalars.h"

#include <vector>

#include "core/runtime/stream.h"
#include "dist/fsdp/reproducible.h"

namespace tessera::dist {

Scalars::Scalars(World& world, bool is_reproducible)
    : is_reproducible_(is_reproducible), comm_(world.make_comm()) {}

void Scalars::all_reduce(const Tensor& values, int64_t step) {
  if (world_size() == 1) return;
  const int64_t numel = values.numel();
  const int64_t staging = comm_->all_reduce_staging_nbytes(numel, values.dtype());
  if (staging > 0 && (!staging_.is_defined() || staging_.numel() < staging)) {
    staging_ = empty({staging}, kU8);
  }
  comm_->all_reduce(Context::current()->compute(), values.raw_data(), numel, values.dtype(),
                    staging > 0 ? staging_.raw_data() : nullptr, {"scalars", "", step});
}

Tensor Scalars::sum_micro_batches(std::span<const Tensor> values, int64_t step) {
  TESSERA_CHECK(!values.empty(), "sum_micro_batches: no values");
  const int64_t numel = values[0].numel();
  if (!is_reproducible_) {
    Tensor sum = zeros({numel}, kF32);
    for (const Tensor& value : values) sum.add_(value.view({numel}));
    all_reduce(sum, step);
    return sum.view(values[0].shape());
  }
  // Over ranks first, each micro-batch on its own.
  const auto count = static_cast<int64_t>(values.size());
  Tensor all = empty({count, numel}, kF32);
  std::vector<Tensor> sums;
  for (int64_t i = 0; i < count; ++i) {
    sums.push_back(all.narrow(0, i, 1).view(values[0].shape()));
    sums.back().copy_(values[static_cast<size_t>(i)]);
  }
  all_reduce(all, step);
  return sum_in_tree(sums);
}

}  // namespace tessera::dist
