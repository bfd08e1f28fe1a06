#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "core/runtime/context.h"
#include "dist/comm/world.h"

namespace tessera::dist {

struct LocalOptions {
  /// Of each rank; one thread, the debug aids on. On CUDA each rank has the device of its number.
  ContextOptions context = {
      .device = {}, .num_threads = 1, .memory_limit = 0, .poison = true, .order_check = true};
  std::chrono::milliseconds timeout{60'000};
  /// A network to imitate: each collective takes at least latency + bytes sent / bandwidth, without
  /// using a processor.
  double latency_us = 0;
  double bandwidth_bytes_per_s = 0;  ///< 0 = no limit
  /// Each collective of each rank starts up to this much late, drawn from `delay_seed`.
  int max_random_delay_us = 0;
  uint64_t delay_seed = 0;
};

/// Runs `body` on `world_size` threads, a rank each, with a Context of its own that the thread's
/// tensors use, and joins them. Collectives are single copy: each rank reads the buffers of the
/// others. If a rank throws, the collectives of the others end with CommError, and the exception
/// that came first is rethrown here; if none does, conflicts found by the happens-before checker
/// are thrown as InternalError.
void run_ranks(int world_size, const LocalOptions& options,
               const std::function<void(World&)>& body);
inline void run_ranks(int world_size, const std::function<void(World&)>& body) {
  run_ranks(world_size, LocalOptions{}, body);
}

}  // namespace tessera::dist
