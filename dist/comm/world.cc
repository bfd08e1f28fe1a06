#include "dist/comm/world.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <optional>

#include "core/log.h"
#include "core/runtime/affinity.h"
#include "core/runtime/context.h"
#include "dist/comm/backend.h"
#include "dist/comm/nccl.h"

namespace tessera::dist {

namespace {

// Ranks that a launcher says it started; 0 without one.
int num_launched_ranks() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"}) {
    if (const char* value = std::getenv(name)) return std::max(1, std::atoi(value));
  }
  return std::getenv("PMIX_RANK") != nullptr ? 1 : 0;
}

}  // namespace

World World::init([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {
  const int num_launched = num_launched_ranks();
  if (num_launched == 0) return World(make_solo_backend());
#if TESSERA_MPI
  World world(make_mpi_backend(argc, argv));
  if (world.world_size() > 1) set_log_rank(world.rank());
  return world;
#else
  TESSERA_CHECK_AS(ConfigError, num_launched == 1,
                   "World: a launcher started {} ranks, but this build has no MPI (-Dmpi=disabled)",
                   num_launched);
  return World(make_solo_backend());
#endif
}

World::World(std::unique_ptr<WorldBackend> backend)
    : backend_(std::move(backend)),
      control_(std::make_unique<Control>(backend_->base(),
                                         backend_->watchdog()->make_log(backend_->place().rank))),
      num_exceptions_(std::uncaught_exceptions()) {}

World::World(World&&) noexcept = default;

World::~World() {
  if (backend_ == nullptr || std::uncaught_exceptions() > num_exceptions_) return;
  try {
    backend_->finalize();
  } catch (const std::exception& error) {
    log_error("{}", error.what());
  }
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
  const int threads = requested > 0 ? requested : std::max(1, allowed / place.num_sharing);
  if (threads > allowed) {
    log_warning("this rank may use {} processors (its affinity mask), fewer than its {} threads{}",
                allowed, threads, place.is_launched ? "; start with mpirun --bind-to none" : "");
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
  return std::make_unique<HostComm>(std::move(transport), backend_->watchdog());
}

Control& World::control() {
  return *control_;
}

void World::set_timeout(std::chrono::milliseconds timeout) {
  backend_->watchdog()->set_timeout(timeout);
}

void World::set_verbose(bool verbose) {
  backend_->watchdog()->set_verbose(verbose);
}

void World::set_on_end(std::function<void(const std::string&)> action) {
  backend_->watchdog()->set_on_end(std::move(action));
}

void World::abort(int status, const std::string& reason) noexcept {
  backend_->abort(status, reason);
}

int run_main(int argc, char** argv, const std::function<int(World&)>& body) {
  ::signal(SIGXFSZ, SIG_IGN);  // a file that is too large is an error of the write
  std::optional<World> world;
  try {
    world.emplace(World::init(argc, argv));
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
    return body(*world);
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
