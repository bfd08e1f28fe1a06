#pragma once

#include <memory>
#include <string>

#include "dist/comm/transport.h"
#include "dist/comm/watchdog.h"

namespace tessera::dist {

/// Settings of all NCCL communicators made later in this process.
struct NcclOptions {
  /// reduce_scatter by NCCL's own sum where out == wire and nothing is accumulated: fewer bytes of
  /// staging, but the order of the sum is NCCL's, and so are the bits.
  bool native_reduce_scatter = false;
  /// Thread blocks a communicator may use at once; 0 = NCCL's choice. Two communicators at work
  /// take them from compute twice.
  int max_ctas = 0;
  /// `Comm::allocate` of fewer bytes gives ordinary memory: NCCL's comes in pieces of 2 MiB.
  int64_t min_registered_nbytes = int64_t{1} << 20;
};
void set_nccl_options(const NcclOptions& options);
NcclOptions nccl_options();

/// Why NCCL cannot be used in this process, one clause ("libnccl.so.2 cannot be loaded (...)");
/// empty if it can. The library is opened at the first call: the file that the environment variable
/// TESSERA_NCCL names, or libnccl.so.2 where the loader or the toolkit has it.
const std::string& nccl_problem();

/// A Comm of the ranks of `transport` whose collectives run in CUDA streams of the current device,
/// which no two ranks share. Reductions are the project's own: an exchange of chunks by NCCL and
/// one local sum in [Note: Tree over ranks]. One rank alone needs no NCCL. Collective.
/// Errors   CommError with NCCL's words; a call of an aborted communicator poisons its stream
std::unique_ptr<Comm> make_nccl_comm(std::shared_ptr<HostTransport> transport,
                                     std::shared_ptr<Watchdog> watchdog);

}  // namespace tessera::dist
