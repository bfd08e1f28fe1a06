#pragma once

#include <memory>

#include "dist/comm/transport.h"

namespace tessera::dist {

/// A Comm for CPU streams: its calls are tasks that block the stream's worker.
std::unique_ptr<Comm> make_host_comm(std::shared_ptr<HostTransport> transport,
                                     std::shared_ptr<Watchdog> watchdog);

}  // namespace tessera::dist
