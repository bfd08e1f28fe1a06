#pragma once

#include <memory>

#include "dist/comm/transport.h"

namespace tessera::dist {

/// A Comm for CUDA streams whose collectives go through host memory: copied out, exchanged by
/// `transport` on a thread of its own, and copied back, in the order of the stream and without
/// blocking the host. For ranks that share a device, and where NCCL is not installed.
std::unique_ptr<Comm> make_staged_comm(std::shared_ptr<HostTransport> transport,
                                       std::shared_ptr<Watchdog> watchdog);

}  // namespace tessera::dist
