#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tessera::dist {

/// Device scalars of one gradient clipping; nothing waits for them.
struct ClippedNorm {
  Tensor norm;       ///< f32 []: the global norm before clipping
  Tensor factor;     ///< f32 []: what the optimizer multiplies gradients by
  Tensor found_inf;  ///< u8 []: 1 if the norm is not finite; the optimizer then changes nothing
  /// Elements of `ignored` parameters that require a gradient: it is neither in the norm nor
  /// clipped.
  int64_t num_left_out = 0;
  Tensor partials = {};  ///< f64: what `norm` was combined from, for `Fsdp::unit_norms`
};

/// Norms before clipping of the units that have trainable parameters.
struct UnitNorms {
  std::vector<std::string> units;
  Tensor norms;  ///< f32 [units]
};

}  // namespace tessera::dist
