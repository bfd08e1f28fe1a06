#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/tensor.h"
#include "dist/comm/world.h"

namespace tessera::dist {

/// Sums of a few values over all ranks, on the compute stream.
class Scalars {
 public:
  /// Collective. `world` outlives this.
  Scalars(World& world, bool is_reproducible);

  /// In place, in fixed order; f32.
  void all_reduce(const Tensor& values, int64_t step);
  /// `Fsdp::sum_micro_batches`.
  Tensor sum_micro_batches(std::span<const Tensor> per_micro_batch, int64_t step);

  int world_size() const { return comm_->world_size(); }
  Comm& comm() const { return *comm_; }  ///< of all ranks

 private:
  const bool is_reproducible_;
  std::unique_ptr<Comm> comm_;
  Tensor staging_;
};

}  // namespace tessera::dist
