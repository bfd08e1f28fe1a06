#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/runtime/device.h"
#include "core/runtime/unwinding.h"
#include "dist/comm/comm.h"
#include "dist/comm/control.h"

namespace tessera::dist {

class Watchdog;
class WorldBackend;

/// How long a collective may take unless `Watchdog::set_timeout` says otherwise.
inline constexpr std::chrono::seconds kDefaultTimeout{600};

/// All ranks of a run: the processes that mpirun started, or the thread ranks of `run_ranks`
/// (local.h), or one alone. Communicators are made from it in one fixed order, the same on all
/// ranks. A value that owns MPI: destroy communicators and streams first. Destroyed by an exception
/// it leaves MPI as it is, since the other ranks may never finalize; the process then has to end
/// with a non-zero status, on which the launcher ends the others (`run_main` does all of this).
/// Streams that the exception destroys on the World's thread wait for no other rank: collectives
/// that are stuck end, all of them ([Note: Unwinding]), unless all ranks have thrown the same
/// verdict.
class World {
 public:
  /// Starts MPI if a launcher (mpirun, srun) started this process, else a world of one rank.
  /// Errors   Error if a World of this process is alive, or one under a launcher has been;
  ///          ConfigError if a launcher says that it started several processes, but MPI has one
  ///          rank
  ///          ([Note: Launchers]; unless `checks_launcher` is false, then call `check_launcher`),
  ///          or for a value of TESSERA_RANKS_PER_NODE; CommError if MPI does not allow several
  ///          threads
  static World init(int argc, char** argv, bool checks_launcher = true);

  explicit World(std::unique_ptr<WorldBackend> backend);
  World(World&&) noexcept;
  ~World();

  /// ConfigError as above unless a lone process is meant, then if it is not alone. Collective.
  void check_launcher(bool single_process = false);

  int rank() const;
  int world_size() const;
  int local_rank() const;  ///< among the ranks on this node
  int local_size() const;  ///< ranks on this node

  /// `device_from_name(name, local_rank())`.
  Device device(std::string_view name) const;
  /// Threads for this rank's compute stream: `requested`, or, if 0, the processors this rank may
  /// use divided by the ranks on the node that may use them too (1 for thread ranks), or its share
  /// of the CPU quota that control groups set, if that is fewer. Warns if the affinity mask or the
  /// quota is smaller than the result, or the mask than this rank's share of the machine, as
  /// `mpirun` without `--bind-to none` causes.
  int num_threads(int requested = 0) const;
  /// Processors for `num_threads` threads of this rank, none of them another rank's. Empty if there
  /// are not enough, or ranks may use some and not all of each other's, or they are threads.
  std::vector<int> processors(int num_threads) const;

  /// A communicator of all ranks for memory of the current Context's device. Collective.
  std::unique_ptr<Comm> make_comm();
  Control& control();
  /// Expires when this World ends; for those that refer to it.
  std::weak_ptr<const void> life() const { return life_; }

  /// Of the collectives of this process: how long they may take, a log of them, their time, and what
  /// to do at the end. When one is late it ends all ranks with status 6.
  Watchdog& watchdog();

  /// Ends the World, when all ranks have come here; the destructor does it too, but can only log an
  /// error: CommError if a rank is elsewhere. Nothing else may be called afterwards.
  void finalize();

  /// Ends all ranks: MPI_Abort(status), which does not return; for thread ranks and a world of one
  /// all communicators end with CommError and the caller goes on to end itself.
  void abort(int status, const std::string& reason) noexcept;

 private:
  std::unique_ptr<WorldBackend> backend_;
  std::unique_ptr<Control> control_;
  std::unique_ptr<UnwindAction> unwind_action_;
  bool is_finalized_ = false;
  std::shared_ptr<const void> life_ = std::make_shared<int>();
  int num_exceptions_;  // in flight when it was made: one more means that it dies of one
};

/// The `main` of a program: World::init (argc, argv, checks_launcher), then `body`. An Error (or
/// any exception) is logged with the rank, and all ranks end with its exit status; an error of all
/// ranks (`Control::verdict`) is logged by one of them. Returns the status for `main`.
int run_main(int argc, char** argv, const std::function<int(World&)>& body,
             bool checks_launcher = true);

}  // namespace tessera::dist
