#pragma once

#include <memory>
#include <string>

#include "core/check.h"
#include "dist/comm/transport.h"
#include "dist/comm/watchdog.h"

namespace tessera::dist {

class Control;

/// Where a rank stands among the others.
struct WorldPlace {
  int rank = 0, world_size = 1;
  int local_rank = 0, local_size = 1;
  int num_sharing = 1;        ///< ranks on the node, this one too, that may use its processors
  int sharing_index = 0;      ///< place among these; -1 if they may not all use the same processors
  int num_sharing_quota = 1;  ///< ranks on the node, this one too, in the group of its CpuQuota
  int default_threads = 0;    ///< 0 = allowed processors / num_sharing
  bool is_launched = false;   ///< by mpirun, which binds ranks to processors by default
};

/// What the ranks have found out together before there is a World: all of them throw it.
class StartError : public ConfigError {
 public:
  StartError(const std::string& message, bool is_reporter)
      : ConfigError(message), is_reporter_(is_reporter) {}
  /// Whether this rank is the one that says it.
  bool is_reporter() const { return is_reporter_; }

 private:
  bool is_reporter_;
};

/// What a World is made of: transports, the watchdog, and how all ranks end.
class WorldBackend {
 public:
  virtual ~WorldBackend() = default;

  const WorldPlace& place() const { return place_; }
  const std::shared_ptr<Watchdog>& watchdog() const { return watchdog_; }
  /// For the control communicator, made once by World; the base of all others.
  const std::shared_ptr<HostTransport>& base() const { return base_; }
  virtual void abort(int status, const std::string& reason) noexcept = 0;
  /// Ends the collectives of this rank, which an exception destroys, with CommError; the others end
  /// when its handler says so.
  virtual void give_up(const std::string& reason) noexcept = 0;
  /// Called by World's destructor; not when an exception destroys the World.
  virtual void finalize(Control&) {}

 protected:
  WorldPlace place_;
  std::shared_ptr<Watchdog> watchdog_;
  std::shared_ptr<HostTransport> base_;
};

/// One rank alone, without MPI.
std::unique_ptr<WorldBackend> make_solo_backend();
#if TESSERA_MPI
/// Initializes MPI.
std::unique_ptr<WorldBackend> make_mpi_backend(int argc, char** argv);
#endif

}  // namespace tessera::dist
