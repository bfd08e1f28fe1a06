#include <atomic>
#include <barrier>
#include <chrono>
#include <future>

#include "core/runtime/cuda/cuda.h"
#include "core/runtime/order_check.h"
#include "dist/comm/local.h"
#include "dist/comm/nccl.h"
#include "test/dist/comm/cases.h"
#include "test/simt/fake_cuda.h"
#include "test/simt/include/nccl.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::dist;
using namespace tessera::dist::testing;
using tessera::testing::error_of;

namespace {

LocalOptions on_devices(std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  LocalOptions options;
  options.context.device = {DeviceType::kCuda, 0};
  options.timeout = timeout;
  return options;
}

LocalOptions on_devices(const NcclOptions& nccl) {
  LocalOptions options = on_devices();
  options.context.backends.nccl = nccl;
  return options;
}

/// Ranks share devices: collectives go through host memory.
class SharedDevices {
 public:
  explicit SharedDevices(int num_devices) { simt::set_num_devices(num_devices); }
  ~SharedDevices() { simt::set_num_devices(8); }
};

void expect_clean() {
  CHECK(simt::take_mistakes() == std::vector<std::string>{});
  CHECK(simt::live_objects() == std::vector<std::string>{});
}

}  // namespace

TEST_CASE("comm_nccl: collectives equal their definition bit by bit", "[comm][simt]") {
  for (const int world_size : {1, 2, 3, 4, 8}) {
    CAPTURE(world_size);
    REQUIRE_NOTHROW(run_ranks(world_size, on_devices(), check_collectives));
    expect_clean();
  }
}

TEST_CASE("comm_nccl: two communicators run side by side, their calls queued", "[comm][simt]") {
  simt::set_random_delays(300, 3);
  for (const int world_size : {1, 2, 4}) {
    CAPTURE(world_size);
    REQUIRE_NOTHROW(run_ranks(world_size, on_devices(), check_queued));
    expect_clean();
  }
  simt::set_random_delays(0, 0);
}

TEST_CASE("comm_nccl: sums over shard groups and replicas have the bits of flat ones",
          "[comm][simt]") {
  for (const int world_size : {1, 2, 4, 6}) {
    CAPTURE(world_size);
    REQUIRE_NOTHROW(run_ranks(world_size, on_devices(), check_mesh));
    expect_clean();
  }
}

TEST_CASE("comm_nccl: ranks that share a device go through host memory", "[comm][simt]") {
  const SharedDevices shared(2);
  simt::set_random_delays(200, 5);
  for (const int world_size : {3, 4}) {
    CAPTURE(world_size);
    REQUIRE_NOTHROW(run_ranks(world_size, on_devices(), check_collectives));
    REQUIRE_NOTHROW(run_ranks(world_size, on_devices(), check_queued));
    REQUIRE_NOTHROW(run_ranks(world_size, on_devices(), check_mesh));
    expect_clean();
  }
  simt::set_random_delays(0, 0);
}

TEST_CASE("comm_nccl: memory for rings is registered, counted and given back", "[comm][simt]") {
  REQUIRE_NOTHROW(run_ranks(2, on_devices(), check_allocate));
  run_ranks(2, on_devices(), [](World& world) {
    auto comm = world.make_comm();
    const int64_t nbytes = (int64_t{4} << 20) + 512;
    const AllocatorStats before = Context::current()->allocator()->stats();
    auto storage = comm->allocate(nbytes, MemoryClass::kGathered);
    const AllocatorStats after = Context::current()->allocator()->stats();
    expect(after.allocated - before.allocated == nbytes, "counted {} bytes",
           after.allocated - before.allocated);
    comm->all_gather(Context::current()->compute(), storage->data(),
                     static_cast<char*>(storage->data()) + world.rank() * nbytes / 2, nbytes / 8,
                     kF32);
    comm = nullptr;  // before its memory
    storage = nullptr;
    expect(Context::current()->allocator()->stats().reserved == before.reserved, "kept");
  });
  expect_clean();
}

TEST_CASE("comm_nccl: NCCL's own reduce_scatter is a setting", "[comm][simt]") {
  run_ranks(4, on_devices({.native_reduce_scatter = true, .max_ctas = 8}), [](World& world) {
    const auto comm = world.make_comm();
    const Stream stream = Context::current()->make_stream("comm");
    const Buffer<float> full(std::vector<float>(400, static_cast<float>(world.rank() + 1)));
    const Buffer<float> shard(std::vector<float>(100, 0.0f));
    // Nothing is staged where NCCL adds.
    comm->reduce_scatter(stream, shard.data(), full.data(), 100, kF32, kF32, false, nullptr);
    stream.synchronize();
    expect_bits(shard, std::vector<float>(100, 10.0f), "reduce_scatter");
    const Buffer<double> wide(std::vector<double>(400, 1 + 1e-12 * world.rank()));
    const Buffer<double> sum(std::vector<double>(100, 0.0));
    comm->reduce_scatter(stream, sum.data(), wide.data(), 100, kF64, kF64, false, nullptr);
    stream.synchronize();
    expect_bits(sum, std::vector<double>(100, 1 + (1 + 1e-12) + (1 + 2e-12) + (1 + 3e-12)),
                "reduce_scatter of f64");
  });
  expect_clean();
}

TEST_CASE("comm_nccl: two Worlds in one process keep options of their own", "[comm][simt]") {
  // In NCCL's order of ranks the sum is 1, in the project's tree over them 0.
  constexpr float kTerms[] = {1e8f, 1, -1e8f, 1};
  std::barrier both(8);
  const auto run = [&](bool is_native) {
    run_ranks(4, on_devices({.native_reduce_scatter = is_native}), [&](World& world) {
      const auto comm = world.make_comm();
      both.arrive_and_wait();  // the other World's are made with other options
      const auto child = comm->split(0, world.rank());
      const Stream stream = Context::current()->make_stream("comm");
      const Buffer<float> full(std::vector<float>(4, kTerms[world.rank()]));
      const Buffer<float> shard({-1.0f}), staging(std::vector<float>(16, 0.0f));
      for (Comm* c : {comm.get(), child.get()}) {
        c->reduce_scatter(stream, shard.data(), full.data(), 1, kF32, kF32, false, staging.data());
        stream.synchronize();
        expect_bits(shard, {is_native ? 1.0f : 0.0f}, is_native ? "native" : "tree");
      }
      both.arrive_and_wait();
    });
  };
  auto native = std::async(std::launch::async, [&] { run(true); });
  run(false);
  native.get();
  expect_clean();
}

TEST_CASE("comm_nccl: calls of streams and dtypes that it does not know are named",
          "[comm][simt]") {
  const auto check = [](World& world) {
    const auto comm = world.make_comm();
    const Stream cpu = make_stream({}, "cpu");
    const Stream& cuda = Context::current()->compute();
    const auto starts_with = [](const std::string& text, const std::string& start) {
      expect(text.rfind(start, 0) == 0, "got \"{}\"", text);
    };
    const Buffer<double> x({1.0, 2.0});
    starts_with(error_of([&] { comm->all_gather(cpu, x.data(), x.data(), 1, kF64); }),
                "all_gather: this communicator moves CUDA memory, the stream is on cpu");
    starts_with(error_of([&] {
                  comm->reduce_scatter(cuda, x.data(), x.data(), 1, kF32, kF64, false, x.data());
                }),
                "reduce_scatter: no sum of f32 into f64 on CUDA");
    starts_with(error_of([&] { comm->all_reduce(cuda, x.data(), 1, kI32, nullptr); }),
                "all_reduce: expected a floating dtype, got i32");
    starts_with(error_of([&] { comm->split(-1, 0); }),
                "split: expected a color that is not negative, got -1");
  };
  run_ranks(2, on_devices(), check);
  const SharedDevices shared(1);  // the same where they go through host memory
  run_ranks(2, on_devices(), check);
  expect_clean();
}

TEST_CASE("comm_nccl: staging that is missing is named", "[comm][simt]") {
  run_ranks(3, on_devices(), [](World& world) {
    const auto comm = world.make_comm();
    const Stream& cuda = Context::current()->compute();
    const Buffer<float> x(std::vector<float>(6, 1.0f));
    expect(error_of([&] { comm->all_reduce(cuda, x.data(), 6, kF32, nullptr); }) ==
               "all_reduce: expected 48 bytes of staging, got none",
           "all_reduce");
    expect(error_of([&] {
             comm->reduce_scatter(cuda, x.data(), x.data(), 2, kF32, kF32, false, nullptr);
           }) == "reduce_scatter: no staging, and `full` is not memory of Comm::allocate",
           "reduce_scatter");
  });
  expect_clean();
}

// ----- how they end

TEST_CASE("comm_nccl: a rank that throws ends the others, and its error is the one",
          "[comm][simt]") {
  for (const int num_devices : {8, 1}) {
    const SharedDevices devices(num_devices);
    std::atomic<int> num_ended{0};
    const auto begin = std::chrono::steady_clock::now();
    const std::string message = error_of([&] {
      run_ranks(3, on_devices(), [&](World& world) {
        const auto comm = world.make_comm();
        const Stream stream = Context::current()->make_stream("comm");
        const Buffer<float> full(std::vector<float>(48, 1.0f)), shard(std::vector<float>(16, 1.0f));
        // The end may come while a rank still waits for the first call.
        try {
          comm->all_gather(stream, full.data(), shard.data(), 16, kF32);
          stream.synchronize();
          if (world.rank() == 1) throw InputError("rank 1 read a bad file");
          comm->all_gather(stream, full.data(), shard.data(), 16, kF32);
          Context::current()->compute().wait(stream.record());
          Context::current()->compute().synchronize();
        } catch (const CommError& error) {
          expect(std::string(error.what()) == "rank 1 failed: rank 1 read a bad file",
                 "another reason: {}", error.what());
          // Later calls are no use either, and do not wait for anybody.
          comm->all_gather(stream, full.data(), shard.data(), 16, kF32);
          expect(error_of([&] { stream.synchronize(); }) == error.what(), "another error");
          num_ended++;
          throw;
        }
      });
    });
    CHECK(message == "rank 1 read a bad file");
    CHECK(num_ended == 2);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
    expect_clean();
  }
}

TEST_CASE("comm_nccl: the watchdog names a collective that does not finish", "[comm][simt]") {
  for (const int num_devices : {8, 1}) {
    const SharedDevices devices(num_devices);
    const std::string message = error_of([] {
      run_ranks(2, on_devices(std::chrono::milliseconds(400)), [](World& world) {
        const auto comm = world.make_comm();
        const Stream stream = Context::current()->make_stream("comm");
        const Buffer<float> full(std::vector<float>(32, 1.0f)), shard(std::vector<float>(16, 1.0f));
        if (world.rank() == 0) {
          comm->all_gather(stream, full.data(), shard.data(), 16, kF32, {"forward", "block3", 7});
          stream.synchronize();
        } else {
          world.control().barrier();
        }
      });
    });
    INFO(message);
    // NCCL's first call connects the ranks, on the host.
    const std::string call = num_devices == 8 ? "the call of " : "";
    CHECK(
        (message.find("rank 0: " + call + "all_gather of block3 (forward, step 7, 64 bytes") == 0 ||
         message.find("rank 1: barrier") == 0));
    CHECK(message.find("has not finished in 0.4 s") != std::string::npos);
    expect_clean();
  }
}

TEST_CASE("comm_nccl: the watchdog reports a host that is blocked inside of NCCL, and frees it",
          "[comm][simt]") {
  // The first collective and the first transfers between two ranks wait on the host for the other.
  for (const bool is_reduce : {false, true}) {
    std::atomic<bool> has_ended{false};
    const std::string message = error_of([&] {
      run_ranks(2, on_devices(std::chrono::milliseconds(400)), [&](World& world) {
        const auto comm = world.make_comm();
        const Stream stream = Context::current()->make_stream("comm");
        const Buffer<float> full(std::vector<float>(32, 1.0f)), shard(std::vector<float>(16, 1.0f)),
            staging(std::vector<float>(16, 1.0f));
        if (world.rank() == 1) {
          while (!has_ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          return;
        }
        if (is_reduce) {
          comm->reduce_scatter(stream, shard.data(), full.data(), 16, kF32, kF32, false,
                               staging.data(), {"backward", "block3", 7});
        } else {
          comm->all_gather(stream, full.data(), shard.data(), 16, kF32, {"forward", "block3", 7});
        }
        has_ended = true;  // it comes back, and the stream says why
        stream.synchronize();
      });
    });
    CHECK(message ==
          fmt::format("rank 0: the call of {} bytes, sequence 0) has not finished in 0.4 s; rank 1 "
                      "has not entered it",
                      is_reduce ? "reduce_scatter of block3 (backward, step 7, 128"
                                : "all_gather of block3 (forward, step 7, 64"));
    expect_clean();
  }
}

TEST_CASE("comm_nccl: abort ends what is queued, and what is called later", "[comm][simt]") {
  run_ranks(2, on_devices(), [](World& world) {
    const auto comm = world.make_comm();
    const Stream stream = Context::current()->make_stream("comm");
    const Buffer<float> x({1.0f}), staging({0.0f});
    if (world.rank() == 0) comm->all_reduce(stream, x.data(), 1, kF32, staging.data());
    if (world.rank() == 1) comm->abort("enough");
    if (world.rank() == 0) {
      expect(error_of([&] { stream.synchronize(); }) == "enough", "all_reduce goes on");
    }
    expect(error_of([&] { world.control().barrier(); }) == "enough", "control goes on");
    stream.drain();
  });
  expect_clean();
}

// ----- planted: ranks that call NCCL with different arguments

TEST_CASE("planted: a wrong count, a wrong type and a wrong order in NCCL are caught",
          "[comm][simt]") {
  const auto run = [](const std::function<void(Comm&, const Stream&, float*)>& odd,
                      const NcclOptions& options = {}) {
    const std::string message = error_of([&] {
      run_ranks(2, on_devices(options), [&odd](World& world) {
        const auto comm = world.make_comm();
        const Stream stream = Context::current()->make_stream("comm");
        const Buffer<float> data(std::vector<float>(64, 1.0f));
        if (world.rank() == 1) {
          odd(*comm, stream, data.data());
        } else {
          comm->all_gather(stream, data.data(), data.data() + 32, 8, kF32);
        }
        stream.synchronize();
      });
    });
    CHECK(simt::take_mistakes().size() == 1);
    CHECK(simt::live_objects() == std::vector<std::string>{});
    return message;
  };
  CHECK(
      run([](Comm& comm, const Stream& stream, float* data) {
        comm.all_gather(stream, data, data + 32, 4, kF32);
      }) ==
      "NCCL: invalid usage; the ranks disagree: rank 0 calls ncclAllGather of 32 elements of type "
      "1, rank 1 ncclAllGather of 16 elements of type 1");
  CHECK(
      run(
          [](Comm& comm, const Stream& stream, float* data) {
            comm.reduce_scatter(stream, data + 32, data, 8, kF32, kF32, false, nullptr);
          },
          {.native_reduce_scatter = true}) ==
      "NCCL: invalid usage; the ranks disagree: rank 0 calls ncclAllGather of 32 elements of type "
      "1, rank 1 ncclReduceScatter of 8 elements of type 7");
}

TEST_CASE("planted: a send and a receive of different lengths are caught", "[comm][simt]") {
  const std::string message = error_of([] {
    run_ranks(2, on_devices(), [](World& world) {
      const auto comm = world.make_comm();
      const Stream stream = Context::current()->make_stream("comm");
      const Buffer<float> full(std::vector<float>(64, 1.0f)), shard(std::vector<float>(32, 0.0f)),
          staging(std::vector<float>(32, 0.0f));
      comm->reduce_scatter(stream, shard.data(), full.data(), 8 + 8 * world.rank(), kF32, kF32,
                           false, staging.data());
      stream.synchronize();
    });
  });
  INFO(message);
  // Whichever rank is first to see it.
  CHECK((
      message ==
          "NCCL: invalid usage; rank 1 sends 64 elements of type 1, rank 0 receives 32 of type 1" ||
      message ==
          "NCCL: invalid usage; rank 0 sends 32 elements of type 1, rank 1 receives 64 of type "
          "1"));
  CHECK(!simt::take_mistakes().empty());
}

TEST_CASE("planted: a collective that reads beyond its buffer is caught", "[comm][simt]") {
  const std::string message = error_of([] {
    run_ranks(1, on_devices(), [](World& world) {
      const auto comm = world.make_comm();
      const auto backend = make_cuda_backend(Context::current()->device());
      void* data = backend->allocate(64);
      const Buffer<float> full(std::vector<float>(64, 0.0f));
      const std::string error = error_of(
          [&] { comm->all_gather(Context::current()->compute(), full.data(), data, 64, kF32); });
      backend->free(data, 64);
      throw Error(error);
    });
  });
  INFO(message);
  CHECK(message.find("256 bytes that are not inside one allocation") != std::string::npos);
  CHECK(!simt::take_mistakes().empty());
}
