#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/profiler.h"

namespace tessera::apps {

/// What the compute stream has done with the time of a step, milliseconds. From the last task of the
/// step before (the first step of a timeline: from its own first task) to its own last one, each
/// moment is in exactly one of the six.
struct StepTimes {
  int64_t step = 0;
  double compute_ms = 0;    ///< tasks of forward and backward
  double gather_ms = 0;     ///< it waited for gathers of parameters
  double reduce_ms = 0;     ///< and for reductions of gradients, losses and norms
  double data_ms = 0;       ///< it had nothing to do while the host read a batch
  double host_ms = 0;       ///< or while the host did something else
  double optimizer_ms = 0;  ///< gradient norm, clipping and update
  double recompute_ms = 0;  ///< of compute_ms, what was computed before
  double total_ms() const {
    return compute_ms + gather_ms + reduce_ms + data_ms + host_ms + optimizer_ms;
  }
};

/// Of the tasks of one stream, in the order in which they began, and of the times in which the host
/// read data. Tasks without a step count to none and end the step before.
std::vector<StepTimes> step_times(std::span<const TraceEvent> tasks,
                                  std::span<const std::pair<int64_t, int64_t>> reads_ns);
/// The mean of several; its step is that of the first.
StepTimes mean_times(std::span<const StepTimes> steps);

/// What an advice depends on beside the times.
struct Tuning {
  int world_size = 1;
  bool is_sharded = false;       ///< there are gathers in a step
  int64_t num_units = 1;         ///< of sharding
  int64_t mean_unit_nbytes = 0;  ///< that a gather of one moves
  bool is_wrap_fine = false;     ///< units are smaller than blocks
  int prefetch_forward = 1, prefetch_backward = 1;
  bool has_recompute = false;               ///< of whole blocks
  bool reduces_each_pass = false;           ///< although a step has several
  bool has_low_wire = false;                ///< gradients travel in two bytes
  int64_t read_ahead = 0;                   ///< steps
  int64_t micro_batch = 1, num_passes = 1;  ///< samples of a pass; passes of a step
  bool is_offloaded = false;                ///< the optimizer's states, or more, are on the host
  int64_t blocks_in_unit = 1;
};

/// What a step is limited by, and the change that should help most.
struct Advice {
  std::string limit;              ///< "exposed gathers (23 % of a step)"
  std::string why;                ///< "no unit is gathered while another one computes"
  std::vector<std::string> keys;  ///< "fsdp.prefetch_forward=1"; empty: nothing to gain by a key
  /// "limited by exposed gathers (23 % of a step): no unit ...; try --fsdp.prefetch_forward=1"
  std::string to_string() const;
};
Advice advise(const StepTimes& mean, const Tuning& tuning);

/// A line of titles, one a step and one of means, in milliseconds.
std::string profile_table(std::span<const StepTimes> steps);
std::string profile_json(std::span<const StepTimes> steps, const Advice& advice);

}  // namespace tessera::apps
