#include "dist/fsdp/exchange.h"

namespace tessera::dist {
namespace {

constexpr CollectiveInfo kInfo{"optimizer", "whole parameters", -1};

}  // namespace

Event Exchange::gather_shards(const Tensor& whole, const Tensor& shard) {
  lanes_.all_gather.wait(current_stream().record());
  lanes_.gather_comm->all_gather(lanes_.all_gather, whole.raw_data(), shard.raw_data(),
                                 shard.numel(), shard.dtype(), kInfo);
  return lanes_.all_gather.record();
}

Event Exchange::scatter_sum(const Tensor& shard, const Tensor& whole) {
  Comm& comm = lanes_.reducing_comm();
  void* const scratch = staging(comm.reduce_scatter_staging_nbytes(shard.numel(), shard.dtype()));
  lanes_.reduce_scatter.wait(current_stream().record());
  comm.reduce_scatter(lanes_.reduce_scatter, shard.raw_data(), whole.raw_data(), shard.numel(),
                      whole.dtype(), shard.dtype(), /*accumulate=*/false, scratch, kInfo);
  return lanes_.reduce_scatter.record();
}

Event Exchange::sum(const Tensor& values) {
  Comm& comm = lanes_.reducing_comm();
  void* const scratch = staging(comm.all_reduce_staging_nbytes(values.numel(), values.dtype()));
  lanes_.reduce_scatter.wait(current_stream().record());
  comm.all_reduce(lanes_.reduce_scatter, values.raw_data(), values.numel(), values.dtype(), scratch,
                  kInfo);
  return lanes_.reduce_scatter.record();
}

void* Exchange::staging(int64_t nbytes) {
  if (nbytes == 0) return nullptr;
  if (!staging_.is_defined() || staging_.nbytes() < nbytes) {
    const MemoryScope scope(MemoryClass::kOptimizer);
    current_stream().wait(lanes_.reduce_scatter.record());  // who still uses the old one
    staging_ = empty({nbytes}, kU8);
  }
  return staging_.raw_data();
}

}  // namespace tessera::dist
