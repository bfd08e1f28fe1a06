#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/tensor.h"
#include "dist/fsdp/clipped_norm.h"
#include "dist/fsdp/scalars.h"
#include "dist/fsdp/unit.h"

namespace tessera::dist {

// [Note: Order of a norm]
// One partial norm a (group, one of world_size chunks; kReproducibleChunks in reproducible mode),
// over the 256-element blocks of the flat layout in f64. All of them are gathered on every rank and
// added in the order of chunks, which is not that of ranks where groups of ranks hold replicas.

/// The global norm of the gradient shards, each element once under every strategy.
class GradNorm {
 public:
  /// Makes the tables of segments. What is given outlives this.
  GradNorm(const std::vector<std::unique_ptr<Unit>>& units, const Policy& policy, Scalars& scalars);

  /// `Fsdp::clip_grad_norm`, of gradients that are complete.
  ClippedNorm take(double max_norm, double p, const Tensor& loss_scale, int64_t step);
  /// `Fsdp::unit_norms`.
  UnitNorms by_unit(const ClippedNorm& clip, double p, const Tensor& loss_scale) const;

 private:
  struct Part {
    Group* group;
    Tensor grad, segments;  // a chunk of this rank's own, and its parameters in it
  };
  struct UnitGroups {
    std::string unit;
    int64_t num_groups = 0;  // trainable ones
  };
  void take_partial(const Part& part, const Tensor& into, double p);

  const std::vector<std::unique_ptr<Unit>>& units_;
  const Policy& policy_;
  Scalars& scalars_;
  std::vector<Part> parts_;
  std::vector<UnitGroups> unit_groups_;  // in their order
};

}  // namespace tessera::dist
