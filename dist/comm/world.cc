#include "dist/comm/world.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "core/log.h"
#include "core/runtime/context.h"
#include "core/runtime/cpu/affinity.h"
#include "dist/comm/backend.h"
#include "dist/comm/device_comm.h"
#include "dist/comm/host_comm.h"
#include "dist/comm/launcher.h"

namespace tessera::dist {

World World::init([[maybe_unused]] int argc, [[maybe_unused]] char** argv, bool checks_launcher) {
  static std::mutex mutex;
  static std::weak_ptr<const void> last;
  const std::lock_guard lock(mutex);
  TESSERA_CHECK(last.expired(), "World::init: this process has a World already, expected one");
  std::unique_ptr<WorldBackend> backend;
#if TESSERA_MPI
  if (is_launched_for_mpi(std::getenv)) {
    static bool is_started = false;
    TESSERA_CHECK(
        !std::exchange(is_started, true),
        "World::init: MPI was started and ended with the World before, expected one World "
        "a process");
    backend = make_mpi_backend(argc, argv);
  }
#endif
  World world(backend != nullptr ? std::move(backend) : make_solo_backend());
  last = world.life();
  if (world.world_size() > 1) set_log_rank(world.rank());
  if (checks_launcher) world.check_launcher();
  return world;
}

World::World(std::unique_ptr<WorldBackend> backend)
    : backend_(std::move(backend)),
      control_(std::make_unique<Control>(
          backend_->base(), backend_->watchdog()->make_log(backend_->base()->group()))),
      unwind_action_(
          std::make_unique<UnwindAction>([backend = backend_.get(), control = control_.get()] {
            if (control->has_thrown_verdict()) return;  // all ranks are here, and come to all of it
            const int rank = backend->place().rank;
            if (!backend->watchdog()->has_collective_in_flight(rank)) return;  // it only computes
            backend->give_up(fmt::format("rank {} is ended by an exception", rank));
          })),
      num_exceptions_(std::uncaught_exceptions()) {}

World::World(World&&) noexcept = default;

World::~World() {
  if (backend_ == nullptr || std::uncaught_exceptions() > num_exceptions_) return;
  try {
    finalize();
  } catch (const std::exception& error) {
    log_error("{}", error.what());
  }
}

void World::finalize() {
  if (!std::exchange(is_finalized_, true)) backend_->finalize(*control_);
}

void World::check_launcher(bool single_process) {
  control().verdict([&] {
    if (!single_process) {
      const std::string problem = launcher_problem(std::getenv, world_size());
      TESSERA_CHECK_AS(ConfigError, problem.empty(), "{}", problem);
    } else if (world_size() > 1) {
      throw ConfigError(
          fmt::format("World: a lone process was expected, but MPI has {} ranks", world_size()));
    }
  });
}

int World::rank() const {
  return backend_->place().rank;
}
int World::world_size() const {
  return backend_->place().world_size;
}
int World::local_rank() const {
  return backend_->place().local_rank;
}
int World::local_size() const {
  return backend_->place().local_size;
}

Device World::device(std::string_view name) const {
  return device_from_name(name, local_rank());
}

int World::num_threads(int requested) const {
  const WorldPlace& place = backend_->place();
  if (requested == 0 && place.default_threads > 0) return place.default_threads;
  const int allowed = num_allowed_processors();
  const CpuQuota& quota = cpu_quota();
  const bool has_quota = quota.processors > 0;
  int usable = std::max(1, allowed / place.num_sharing);
  if (has_quota) {
    usable = std::min(usable, num_quota_threads(quota.processors / place.num_sharing_quota));
  }
  const int threads = requested > 0 ? requested : usable;
  if (threads > allowed) {
    log_warning("this rank may use {} processors (its affinity mask), fewer than its {} threads{}",
                allowed, threads, place.is_launched ? "; start with mpirun --bind-to none" : "");
    return threads;
  }
  if (has_quota && threads > std::max(1.0, quota.processors)) {
    log_warning("this rank may use the time of {:.3g} processors ({}), fewer than its {} threads",
                quota.processors, quota.group, threads);
    return threads;
  }
  const int online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const bool is_bound = place.is_launched && (place.num_sharing < place.local_size ||
                                              (place.local_size == 1 && allowed <= 2));
  if (requested == 0 && is_bound && threads < online / place.local_size) {
    log_warning(
        "this rank may use only {} of {} processors (its affinity mask); if mpirun bound it, start "
        "with mpirun --bind-to none",
        allowed, online);
  }
  return threads;
}

std::vector<int> World::processors(int num_threads) const {
  const WorldPlace& place = backend_->place();
  const std::vector<int>& allowed = allowed_processors();
  if (place.sharing_index < 0 || place.default_threads > 0 ||
      int64_t{num_threads} * place.num_sharing > std::ssize(allowed)) {
    return {};
  }
  const auto first = allowed.begin() + std::ptrdiff_t{num_threads} * place.sharing_index;
  return {first, first + num_threads};
}

std::unique_ptr<Comm> World::make_comm() {
  auto transport = backend_->base()->split(0, rank());
  if (Context::current()->device().type == DeviceType::kCuda)
    return make_device_comm(std::move(transport), backend_->watchdog());
  return make_host_comm(std::move(transport), backend_->watchdog());
}

Control& World::control() {
  return *control_;
}

Watchdog& World::watchdog() {
  return *backend_->watchdog();
}

void World::abort(int status, const std::string& reason) noexcept {
  backend_->abort(status, reason);
}

int run_main(int argc, char** argv, const std::function<int(World&)>& body, bool checks_launcher) {
  ::signal(SIGXFSZ, SIG_IGN);  // a file that is too large is an error of the write
  std::optional<World> world;
  try {
    world.emplace(World::init(argc, argv, checks_launcher));
  } catch (const StartError& error) {
    if (error.is_reporter()) log_error("{}", error.what());
    return error.exit_status();
  } catch (const Error& error) {
    log_error("{}", error.what());
    return error.exit_status();
  }
  const auto end_all = [&world](int status, const char* message) {
    log_error("{}", message);
    world->abort(status, message);
    return status;
  };
  try {
    const int status = body(*world);
    world->finalize();
    return status;
  } catch (const Error& error) {
    const int reporter = world->control().verdict_rank(error);
    if (reporter < 0) return end_all(error.exit_status(), error.what());
    // All ranks are here: they end by finalizing, with the same status.
    if (reporter == world->rank()) log_error("{}", error.what());
    return error.exit_status();
  } catch (const std::exception& error) {
    return end_all(1, error.what());
  }
}

}  // namespace tessera::dist
