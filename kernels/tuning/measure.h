#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "core/runtime/cuda/cuda.h"

namespace tessera::kernels {

/// Milliseconds that a CUDA stream takes for what `submit` gives it, the shortest of five runs behind
/// one that is not counted (plans, code and caches); waits for them. Infinite if `submit` is false: it
/// could not.
template <class Submit>
double time_of(const Stream& s, const Submit& submit) {
  constexpr int kRuns = 5;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  if (!submit()) return kNever;
  std::vector<CudaSpan> spans;
  for (int i = 0; i < kRuns; ++i) {
    spans.emplace_back(s);
    if (!submit()) return kNever;
    spans.back().end();
  }
  double ms = kNever;
  for (const CudaSpan& span : spans) ms = std::min(ms, span.ms());
  return ms;
}

}  // namespace tessera::kernels
