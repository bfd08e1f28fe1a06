#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/dtype.h"

// What the benchmarks share: timing on a stream, and what the device could do.

namespace tessera::apps {

/// Times of single runs, milliseconds.
struct Timing {
  double median_ms = 0, min_ms = 0, max_ms = 0;
};

/// Of any number of times; zero without any.
Timing summarize(std::vector<double> times_ms);

/// Times what `submit` puts on the current stream, `runs` times after `warm_ups` runs.
/// On `cpu` each run is timed alone, after a buffer larger than the caches was overwritten; what
/// is known is then in memory, as it mostly is in training. On `cuda` a run is a row of submissions
/// back to back that lasts at least 2 ms, so that launches hide behind each other; working sets
/// should exceed the L2 several times.
Timing time_on_stream(const std::function<void()>& submit, int runs = 20, int warm_ups = 2);

/// "this takes about 40 s" as a line on stderr, before a bench begins or after its first part.
void say_estimate(double seconds);
/// "about 40 s", "about 3 min", "about 1.5 h".
std::string estimate_text(double seconds);

/// What the device reaches: bytes read + written by a copy of 256 MiB, and floating-point
/// operations of a matrix product of `width`^3.
struct Roofline {
  double bytes_per_s = 0;
  double f32_flops_per_s = 0;
  double bf16_flops_per_s = 0;

  double flops_per_s(DType dtype) const {
    return dtype == kF32 || dtype == kF64 ? f32_flops_per_s : bf16_flops_per_s;
  }
  /// The shortest time for so many operations and bytes, milliseconds.
  double floor_ms(double flops, double nbytes, DType dtype) const;
};
/// `width` 0: 2048, on `cuda` 8192.
Roofline measure_roofline(int64_t width = 0);

}  // namespace tessera::apps
