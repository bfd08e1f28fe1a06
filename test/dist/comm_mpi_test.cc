#include "dist/comm/local.h"
#include "test/dist/comm_cases.h"
#include "test/testing.h"

// Started by mpirun (test/mpirun.sh) with 1 to 4 ranks; every rank runs all cases. A rank whose
// case fails ends the others through the watchdog.

using namespace tessera;
using namespace tessera::dist;
using namespace tessera::dist::testing;
using tessera::testing::error_of;

namespace {

World& world() {
  static World instance = [] {
    World made = World::init(0, nullptr);
    made.set_timeout(std::chrono::seconds(30));
    return made;
  }();
  return instance;
}

template <class T>
std::vector<T> reduce_once(Comm& comm, int64_t numel, bool accumulate) {
  const Stream stream = Context::current()->make_stream("comm");
  const std::vector<T> full = input<T>(comm.rank(), numel * comm.world_size());
  std::vector<T> shard = input<T>(comm.rank(), numel, 5);
  const Buffer<double> staging = scratch(comm.reduce_scatter_staging_nbytes(numel, dtype_of<T>));
  comm.reduce_scatter(stream, shard.data(), full.data(), numel, dtype_of<T>, dtype_of<T>,
                      accumulate, staging.data());
  stream.synchronize();
  return shard;
}

}  // namespace

TEST_CASE("comm_mpi: collectives equal their definition bit by bit", "[comm]") {
  REQUIRE_NOTHROW(check_collectives(world()));
}

TEST_CASE("comm_mpi: two communicators run side by side, their calls queued", "[comm]") {
  for (int i = 0; i < 5; ++i) REQUIRE_NOTHROW(check_queued(world()));
}

TEST_CASE("comm_mpi: sums over shard groups and replicas have the bits of flat ones", "[comm]") {
  REQUIRE_NOTHROW(check_mesh(world()));
}

TEST_CASE("comm_mpi: control exchanges, verdicts and memory", "[comm]") {
  REQUIRE_NOTHROW(check_control(world()));
  REQUIRE_NOTHROW(check_verdict(world()));
  REQUIRE_NOTHROW(check_allocate(world()));
}

TEST_CASE("comm_mpi: the same bits as thread ranks", "[comm]") {
  const auto comm = world().make_comm();
  for (const bool accumulate : {false, true}) {
    const std::vector<float> mine = reduce_once<float>(*comm, 3001, accumulate);
    const std::vector<BFloat16> mine_bf16 = reduce_once<BFloat16>(*comm, 3001, accumulate);
    REQUIRE_NOTHROW(run_ranks(world().world_size(), [&](World& threads) {
      const auto local = threads.make_comm();
      const auto theirs = reduce_once<float>(*local, 3001, accumulate);
      const auto theirs_bf16 = reduce_once<BFloat16>(*local, 3001, accumulate);
      if (threads.rank() != world().rank()) return;
      expect_bits(mine, theirs, "f32");
      expect_bits(mine_bf16, theirs_bf16, "bf16");
    }));
  }
}

TEST_CASE("comm_mpi: ranks on one node know their place and share its processors", "[comm]") {
  REQUIRE(world().local_rank() == world().rank());
  REQUIRE(world().local_size() == world().world_size());
  const int threads = world().num_threads();
  REQUIRE(threads == std::max(1, num_allowed_processors() / world().world_size()));
  REQUIRE(world().num_threads(3) == 3);
}

TEST_CASE("comm_mpi: sizes that differ between ranks are an error on those who see it", "[comm]") {
  if (world().world_size() == 1) return;
  const auto comm = world().make_comm();
  const Stream stream = Context::current()->make_stream("comm");
  const int n = world().world_size(), rank = world().rank();
  std::vector<float> full(static_cast<size_t>(16 * n)), shard(16);
  const bool is_odd = rank == n - 1;
  comm->all_gather(stream, full.data(), shard.data(), is_odd ? 4 : 8, kF32);
  const std::string message = error_of([&] { stream.synchronize(); });
  const std::string expected =
      is_odd ? "the ranks disagree: expected 16 bytes from rank "
             : fmt::format("the ranks disagree: expected 32 bytes from rank {}, got 16", n - 1);
  CAPTURE(message);
  REQUIRE(message.rfind(expected, 0) == 0);
  world().control().barrier();  // buffers live until all have seen theirs
}
