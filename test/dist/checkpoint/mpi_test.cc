// Started by mpirun (test/mpirun.sh) with 1 to 4 ranks: checkpoints pass between MPI and threads.

#include <cmath>
#include <filesystem>

#include "dist/comm/watchdog.h"
#include "test/dist/checkpoint/cases.h"

namespace tessera::testing {
namespace {

constexpr int kSaved = 10, kSteps = 20;

dist::World& world() {
  static dist::World instance = [] {
    dist::World made = dist::World::init(0, nullptr);
    made.watchdog().set_timeout(std::chrono::seconds(120));
    Context::set_process_context(
        std::make_shared<Context>(ContextOptions{.num_threads = 1, .poison = true}));
    return made;
  }();
  return instance;
}

FsdpRun make_run() {
  FsdpRun run;
  run.samples_per_step = kSharedSamples;
  run.num_steps = kSteps;
  return run;
}

/// A directory that all ranks see.
std::string shared_dir(const TempDir& dir) {
  return world().control().broadcast(dir.path(), 0);
}

/// Losses of rank 0 on every rank.
std::vector<double> from_rank_0(std::vector<double> losses) {
  losses.resize(kSteps);
  world().control().broadcast(losses.data(), kSteps * static_cast<int64_t>(sizeof(double)), 0);
  return losses;
}

void check_tail(const std::vector<double>& actual, const std::vector<double>& expected,
                double tolerance) {
  REQUIRE(actual.size() == kSteps - kSaved);
  for (size_t i = 0; i < actual.size(); ++i) {
    const double e = expected[i + kSaved];
    CAPTURE(i, actual[i], e);
    CHECK(std::abs(actual[i] - e) <= tolerance * std::abs(e));
  }
}

TEST_CASE("checkpoint over MPI: 4 thread ranks go on as MPI ranks", "[checkpoint]") {
  const TempDir temp;
  const std::string dir = shared_dir(temp), checkpoint = dir + "/step-00000010";
  FsdpResult saved;
  if (world().rank() == 0) {
    FsdpRun run = make_run();
    save_at(run, kSaved, {.dir = dir, .run = "r"});
    saved = run_fsdp_on_threads(4, run);
  }
  const std::vector<double> expected = from_rank_0(saved.losses);
  FsdpRun run = make_run();
  resume_from(run, checkpoint);
  const auto load = run.on_state;
  run.on_state = [&](const dist::TrainingState& state, dist::World& w) {
    load(state, w);
    const dist::CheckpointReader reader(checkpoint);
    for (const dist::Slice& s : dist::held_slices(state)) {
      std::string bytes(static_cast<size_t>(s.values.nbytes()), '\0');
      reader.read_tensor(s.tensor, s.begin, s.end(), bytes.data());
      CAPTURE(s.tensor);
      CHECK(std::memcmp(bytes.data(), s.values.raw_data(), bytes.size()) == 0);
    }
  };
  const FsdpResult result = run_fsdp(world(), run);
  check_tail(result.losses, expected, world().world_size() == 4 ? 0 : 1e-5);
  world().control().barrier();
}

TEST_CASE("checkpoint over MPI: in reproducible mode 4 thread ranks go on here bit by bit",
          "[checkpoint]") {
  if (world().world_size() == 3) return;  // no power of two
  const auto reproducible = [](int world_size) {
    FsdpRun run = make_run();
    run.samples_per_step = 8;
    run.num_micro_batches = 8 / world_size;
    run.fsdp.reproducible = true;
    return run;
  };
  const TempDir temp;
  const std::string dir = shared_dir(temp);
  FsdpResult saved;
  if (world().rank() == 0) {
    FsdpRun run = reproducible(4);
    save_at(run, kSaved, {.dir = dir, .run = "r"});
    saved = run_fsdp_on_threads(4, run);
  }
  const std::vector<double> expected = from_rank_0(saved.losses);
  FsdpRun run = reproducible(world().world_size());
  resume_from(run, dir + "/step-00000010");
  check_tail(run_fsdp(world(), run).losses, expected, 0);
  world().control().barrier();
}

TEST_CASE("checkpoint over MPI: these ranks' checkpoint goes on here and on threads",
          "[checkpoint]") {
  const TempDir temp;
  const std::string dir = shared_dir(temp), checkpoint = dir + "/step-00000010";
  FsdpRun run = make_run();
  save_at(run, kSaved, {.dir = dir, .run = "r"});
  const FsdpResult saved = run_fsdp(world(), run);
  FsdpRun again = make_run();
  resume_from(again, checkpoint);
  check_tail(run_fsdp(world(), again).losses, saved.losses, 0);
  if (world().rank() == 0) {
    for (const int num_threads : {1, 3, world().world_size()}) {
      CAPTURE(num_threads);
      FsdpRun threads = make_run();
      resume_from(threads, checkpoint);
      check_tail(run_fsdp_on_threads(num_threads, threads).losses, saved.losses,
                 num_threads == world().world_size() ? 0 : 1e-5);
    }
  }
  world().control().barrier();
}

}  // namespace
}  // namespace tessera::testing
