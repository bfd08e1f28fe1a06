#include <algorithm>
#include <cstdlib>

#include "core/runtime/cpu/affinity.h"
#include "dist/comm/local.h"
#include "dist/comm/watchdog.h"
#include "test/dist/comm/cases.h"
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
    made.watchdog().set_timeout(std::chrono::seconds(30));
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

/// How many ranks of a communicator of all are on this rank's node (test/meson.build pretends that
/// there are several).
int num_near() {
  return world().local_size();
}

/// Memory of `allocate` that holds some values.
template <class T>
class Allocated {
 public:
  Allocated(Comm& comm, const std::vector<T>& values)
      : num_values_(values.size()),
        storage_(
            comm.allocate(static_cast<int64_t>(values.size() * sizeof(T)), MemoryClass::kOther)) {
    current_stream().synchronize();  // fresh bytes are poisoned in stream order
    std::copy(values.begin(), values.end(), data());
  }
  T* data() const { return static_cast<T*>(storage_->data()); }
  std::vector<T> values() const { return {data(), data() + num_values_}; }

 private:
  size_t num_values_;
  std::shared_ptr<Storage> storage_;
};

/// All collectives on memory of `allocate`, several times over the same buffers, which change as
/// soon as a call is done.
template <class T, class Out>
void check_allocated(Comm& comm, int64_t numel) {
  const Stream stream = Context::current()->make_stream("comm");
  const int n = comm.world_size(), rank = comm.rank();
  const Allocated<T> full(comm, input<T>(rank, numel * n)), shard(comm, input<T>(rank, numel));
  const Allocated<T> gathered(comm, std::vector<T>(static_cast<size_t>(numel * n)));
  const Allocated<Out> sum(comm, std::vector<Out>(static_cast<size_t>(numel)));
  const int64_t staging_nbytes = comm.reduce_scatter_staging_nbytes(numel, dtype_of<T>, true);
  expect(staging_nbytes == (n - num_near()) * numel * static_cast<int64_t>(sizeof(T)),
         "allocated: {} bytes of staging", staging_nbytes);
  const Buffer<double> staging = scratch(staging_nbytes);
  const Buffer<double> all_staging =
      scratch(comm.all_reduce_staging_nbytes(numel * n, dtype_of<T>));
  for (int64_t turn = 0; turn < 3; ++turn) {
    const std::vector<T> fresh = input<T>(rank, numel * n, turn);
    std::copy(fresh.begin(), fresh.end(), full.data());
    std::copy(fresh.begin(), fresh.begin() + numel, shard.data());
    comm.all_gather(stream, gathered.data(), shard.data(), numel, dtype_of<T>);
    comm.reduce_scatter(stream, sum.data(), full.data(), numel, dtype_of<T>, dtype_of<Out>, false,
                        staging_nbytes > 0 ? staging.data() : nullptr);
    stream.synchronize();
    std::vector<T> expected;
    std::vector<Out> expected_sum;
    for (int r = 0; r < n; ++r) {
      const std::vector<T> theirs = input<T>(r, numel, turn);
      expected.insert(expected.end(), theirs.begin(), theirs.end());
    }
    for (int64_t i = 0; i < numel; ++i) {
      expected_sum.push_back(Out(tree_sum<T>(0, n, rank * numel + i + turn)));
    }
    expect_bits(gathered.values(), expected, "all_gather of allocated memory");
    expect_bits(sum.values(), expected_sum, "reduce_scatter of allocated memory");
    comm.all_reduce(stream, full.data(), numel * n, dtype_of<T>, all_staging.data());
    stream.synchronize();
    std::vector<T> expected_all;
    for (int64_t i = 0; i < numel * n; ++i) {
      expected_all.push_back(T(static_cast<float>(tree_sum<T>(0, n, i + turn))));
    }
    expect_bits(full.values(), expected_all, "all_reduce of allocated memory");
  }
}

}  // namespace

TEST_CASE("comm_mpi: buffers in memory that ranks share are read in place, with the same bits",
          "[comm]") {
  const auto comm = world().make_comm();
  const auto other = comm->duplicate();  // of the same memory
  for (const int64_t numel : {1, 1031, 20000}) {
    REQUIRE_NOTHROW(check_allocated<float, float>(*comm, numel));
    REQUIRE_NOTHROW(check_allocated<BFloat16, float>(*other, numel));
  }
}

TEST_CASE("comm_mpi: what is freed is no longer resident, and its addresses are taken again",
          "[comm]") {
  if (num_near() == 1) return;
  const auto comm = world().make_comm();
  constexpr int64_t kNbytes = int64_t{48} << 20;
  const auto reserved = [] { return Context::current()->allocator()->stats().reserved; };
  const int64_t before = reserved();
  const void* first = nullptr;
  for (int turn = 0; turn < 3; ++turn) {
    const auto storage = comm->allocate(kNbytes, MemoryClass::kGathered);
    current_stream().fill_bytes("fill", storage->data(), 1, static_cast<size_t>(kNbytes));
    current_stream().synchronize();
    REQUIRE(reserved() == before + kNbytes);
    if (first == nullptr) first = storage->data();
    REQUIRE(storage->data() == first);
  }
  REQUIRE(reserved() == before);
  const auto storage = comm->allocate(kNbytes, MemoryClass::kGathered);
  const auto* bytes = static_cast<const unsigned char*>(storage->data());
  REQUIRE(std::count(bytes, bytes + kNbytes, 1) == 0);
}

TEST_CASE("comm_mpi: staging that is missing, memory of some ranks only", "[comm]") {
  if (num_near() != world().world_size() || num_near() == 1) return;
  constexpr int64_t kNumel = 20000;
  const int n = world().world_size(), rank = world().rank();
  const auto reduce = [&](bool is_shared) {
    const auto comm = world().make_comm();
    const Stream stream = Context::current()->make_stream("comm");
    const Allocated<float> shared(*comm, input<float>(rank, kNumel * n));
    std::vector<float> own = input<float>(rank, kNumel * n), sum(kNumel);
    comm->reduce_scatter(stream, sum.data(), is_shared ? shared.data() : own.data(), kNumel, kF32,
                         kF32, false, nullptr);
    const std::string message = error_of([&] { stream.synchronize(); });
    world().control().barrier();
    return message;
  };
  REQUIRE(reduce(false) ==
          "reduce_scatter: no staging, and `full` is not memory of Comm::allocate");
  REQUIRE(reduce(rank == 0) ==
          "reduce_scatter: `full` is memory of Comm::allocate on some ranks only");
}

TEST_CASE("comm_mpi: an all_reduce by messages says that its staging is missing", "[comm]") {
  const int n = world().world_size();
  if (num_near() == n) return;  // the sum of little data needs none where all meet
  const auto comm = world().make_comm();
  const Stream stream = Context::current()->make_stream("comm");
  float x = 1;
  comm->all_reduce(stream, &x, 1, kF32, nullptr);
  REQUIRE(error_of([&] { stream.synchronize(); }) ==
          fmt::format("all_reduce: expected {} bytes of staging, got none", 4 * (n - 1)));
  world().control().barrier();
}

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
  const char* pretended = std::getenv("TESSERA_RANKS_PER_NODE");
  const int ranks_per_node = pretended != nullptr ? std::atoi(pretended) : world().world_size();
  const int first = world().rank() / ranks_per_node * ranks_per_node;
  REQUIRE(world().local_rank() == world().rank() - first);
  REQUIRE(world().local_size() == std::min(ranks_per_node, world().world_size() - first));
  const int threads = world().num_threads();
  REQUIRE(threads == std::max(1, num_usable_processors() / world().local_size()));
  REQUIRE(world().num_threads(3) == 3);
}

TEST_CASE("comm_mpi: each rank has processors of its own, or none has", "[comm]") {
  const int num_local = world().local_size();
  const auto& allowed = allowed_processors();
  const auto num_allowed = static_cast<int>(allowed.size());
  CHECK(world().processors(num_allowed / num_local + 1).empty());
  if (num_allowed < num_local) return;
  const int num_threads = num_allowed / num_local;
  const std::vector<int> mine = world().processors(num_threads);
  REQUIRE(std::ssize(mine) == num_threads);
  for (int i = 0; i < num_threads; ++i) {
    CHECK(mine[i] == allowed[world().local_rank() * num_threads + i]);
  }
}

TEST_CASE("comm_mpi: sizes that differ between ranks are an error on those who see it", "[comm]") {
  if (world().world_size() == 1) return;
  const auto comm = world().make_comm();
  const Stream stream = Context::current()->make_stream("comm");
  const int n = world().world_size(), rank = world().rank();
  std::vector<float> full(static_cast<size_t>(16 * n)), shard(16);
  const bool is_odd = rank == n - 1;
  if (num_near() != n && num_near() != 1) return;  // those of other nodes would not see it
  comm->all_gather(stream, full.data(), shard.data(), is_odd ? 4 : 8, kF32);
  const std::string message = error_of([&] { stream.synchronize(); });
  // Ranks at one board see all calls, others what has come from whom.
  const std::string expected =
      num_near() == n
          ? fmt::format(
                "all_gather: the ranks disagree: rank 0 calls all_gather (32 bytes), rank "
                "{} calls all_gather (16 bytes)",
                n - 1)
      : is_odd
          ? "all_gather: the ranks disagree: expected 16 bytes from rank "
          : fmt::format("all_gather: the ranks disagree: expected 32 bytes from rank {}, got 16",
                        n - 1);
  CAPTURE(message);
  REQUIRE(message.rfind(expected, 0) == 0);
  world().control().barrier();  // buffers live until all have seen theirs
}
