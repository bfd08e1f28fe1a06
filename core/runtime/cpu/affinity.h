#pragma once

#include <vector>

#include "core/runtime/cpu/quota.h"
#include "core/runtime/stream.h"

namespace tessera {

/// Processors that this process may run on (its affinity mask), ascending; those of the first call.
const std::vector<int>& allowed_processors();

inline int num_allowed_processors() {
  return static_cast<int>(allowed_processors().size());
}

/// The quota that control groups set this process; that of the first call.
const CpuQuota& cpu_quota();

/// Threads that this process has processors and time for: those of its affinity mask, or of its
/// quota if that is fewer.
int num_usable_processors();

/// Binds thread i of what a CPU stream runs to `processors[i]`, so that threads stay near the
/// memory they touched first and those of several ranks apart. In stream order; for the worker of a
/// stream with `processors.size()` threads.
/// Errors   Error at the stream's next synchronization, if the system refuses
void pin_threads(const Stream& stream, const std::vector<int>& processors);

}  // namespace tessera
