#pragma once

#include <memory>
#include <string>

#include "dist/comm/transport.h"
#include "dist/comm/watchdog.h"

namespace tessera::dist {

/// Why NCCL cannot be used in this process, one clause ("libnccl.so.2 cannot be loaded (...)");
/// empty if it can. The library is opened at the first call: the file that the environment variable
/// TESSERA_NCCL names, or libnccl.so.2 where the loader or the toolkit has it.
const std::string& nccl_problem();

/// A Comm of the ranks of `transport` whose collectives run in CUDA streams of the current device,
/// which no two ranks share, with the NcclOptions of the current Context. Reductions are the project's own: an exchange of chunks by NCCL and
/// one local sum in [Note: Tree over ranks]. One rank alone needs no NCCL. Collective.
/// Errors   CommError with NCCL's words; a call of an aborted communicator poisons its stream
std::unique_ptr<Comm> make_nccl_comm(std::shared_ptr<HostTransport> transport,
                                     std::shared_ptr<Watchdog> watchdog);

}  // namespace tessera::dist
