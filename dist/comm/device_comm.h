#pragma once

#include <memory>

#include "dist/comm/transport.h"

namespace tessera::dist {

/// The communicator that fits the device of the current Context: NCCL, if it can be used and no two
/// ranks share a device, else through host memory, which rank 0 logs. Collective.
std::unique_ptr<Comm> make_device_comm(std::shared_ptr<HostTransport> transport,
                                       std::shared_ptr<Watchdog> watchdog);

}  // namespace tessera::dist
