#pragma once

#include <string>

#include "core/runtime/stream.h"

namespace tessera {

/// A stream of the CPU: a FIFO worker thread. See StreamOptions for its threads and spinning.
Stream make_cpu_stream(std::string name, const StreamOptions& options);

}  // namespace tessera
