#include "dist/comm/local.h"

#include <atomic>
#include <future>
#include <thread>

#include "core/runtime/order_check.h"
#include "dist/comm/clocks.h"
#include "test/dist/comm/cases.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::dist;
using namespace tessera::dist::testing;
using tessera::testing::error_of;

TEST_CASE("comm_local: collectives equal their definition bit by bit", "[comm]") {
  for (const int world_size : {1, 2, 3, 4, 5, 8}) {
    CAPTURE(world_size);
    REQUIRE_NOTHROW(run_ranks(world_size, check_collectives));
  }
}

TEST_CASE("comm_local: two communicators run side by side, their calls queued", "[comm]") {
  for (const int world_size : {1, 2, 3, 8}) {
    CAPTURE(world_size);
    LocalOptions options;
    options.max_random_delay_us = 300;
    options.delay_seed = 5;
    REQUIRE_NOTHROW(run_ranks(world_size, options, check_queued));
  }
}

TEST_CASE("comm_local: sums over shard groups and replicas have the bits of flat ones", "[comm]") {
  for (const int world_size : {1, 2, 3, 4, 6, 8, 12}) {
    CAPTURE(world_size);
    REQUIRE_NOTHROW(run_ranks(world_size, check_mesh));
  }
}

TEST_CASE("comm_local: control exchanges, verdicts and memory", "[comm]") {
  for (const int world_size : {1, 2, 5}) {
    CAPTURE(world_size);
    REQUIRE_NOTHROW(run_ranks(world_size, check_control));
    REQUIRE_NOTHROW(run_ranks(world_size, check_verdict));
    REQUIRE_NOTHROW(run_ranks(world_size, check_allocate));
  }
}

TEST_CASE("comm_local: ranks have a place, a Context and a thread of their own", "[comm]") {
  std::atomic<int> seen{0};
  run_ranks(3, [&seen](World& world) {
    seen |= 1 << world.rank();
    expect(world.world_size() == 3 && world.local_rank() == world.rank() && world.local_size() == 3,
           "place of rank {}", world.rank());
    expect(world.num_threads() == 1 && world.device("cpu") == Device{}, "threads or device");
    expect(Context::current()->options().num_threads == 1, "threads of the Context");
    expect(Context::current()->order_check() != nullptr, "the checker is on");
  });
  REQUIRE(seen == 7);
}

TEST_CASE("comm_local: a rank that throws ends the others, and its error is the one", "[comm]") {
  for (const int world_size : {2, 3, 8}) {
    CAPTURE(world_size);
    std::atomic<int> num_ended{0};
    const auto begin = std::chrono::steady_clock::now();
    const std::string message = error_of([&] {
      run_ranks(world_size, [&](World& world) {
        const auto comm = world.make_comm();
        const Stream stream = Context::current()->make_stream("comm");
        std::vector<float> full(static_cast<size_t>(16 * world.world_size())), shard(16);
        comm->all_gather(stream, full.data(), shard.data(), 16, kF32);
        stream.synchronize();
        if (world.rank() == 1) throw InputError("rank 1 read a bad file");
        comm->all_gather(stream, full.data(), shard.data(), 16, kF32);
        try {
          stream.synchronize();
        } catch (const CommError& error) {
          expect(std::string(error.what()) == "rank 1 failed: rank 1 read a bad file",
                 "another reason: {}", error.what());
          num_ended++;
          throw;
        }
      });
    });
    REQUIRE(message == "rank 1 read a bad file");
    REQUIRE(num_ended == world_size - 1);
    REQUIRE(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
  }
  REQUIRE_THROWS_AS(run_ranks(2,
                              [](World& world) {
                                if (world.rank() == 0) throw InputError("x");
                                world.control().barrier();
                              }),
                    InputError);
}

TEST_CASE("comm_local: an exception waits for no collective that others never come to", "[comm]") {
  LocalOptions options;
  options.timeout = std::chrono::seconds(600);  // what it would wait for
  const std::string message = error_of([&] {
    run_ranks(2, options, [](World& world) {
      const auto comm = world.make_comm();
      std::vector<float> full(2);
      float x = 1;
      const Stream stream = Context::current()->make_stream("comm");
      if (world.rank() == 1) {
        comm->all_gather(stream, full.data(), &x, 1, kF32);
        throw InputError("rank 1 read a bad file");
      }
      expect(error_of([&] { world.control().barrier(); }) == "rank 1 is ended by an exception",
             "the other rank is not told");
      throw CommError("what follows from it");
    });
  });
  REQUIRE(message == "rank 1 read a bad file");
}

TEST_CASE("comm_local: a verdict ends streams in good order, and so does an error that is caught",
          "[comm]") {
  run_ranks(2, [](World& world) {
    const auto comm = world.make_comm();
    std::vector<float> full(2);
    float x = static_cast<float>(world.rank());
    for (const bool is_verdict : {true, false}) {
      const auto fail = [&] {
        const Stream stream = Context::current()->make_stream("comm");
        // Longer than the patience of a destructor.
        stream.submit("work", [] { std::this_thread::sleep_for(std::chrono::milliseconds(500)); });
        if (is_verdict) comm->all_gather(stream, full.data(), &x, 1, kF32);
        if (is_verdict) world.control().verdict([] { throw InputError("a bad file"); });
        throw InputError("a bad file");
      };
      expect(error_of(fail) == "a bad file", "another error");
      world.control().barrier();
    }
    expect(full[1] == 1, "the collective was not completed");
  });
}

TEST_CASE("comm_local: abort wakes ranks in a collective and fails later calls", "[comm]") {
  run_ranks(2, [](World& world) {
    const auto comm = world.make_comm();
    const Stream stream = Context::current()->make_stream("comm");
    float x = 1;
    if (world.rank() == 0) comm->all_reduce(stream, &x, 1, kF32, nullptr);
    if (world.rank() == 1) comm->abort("enough");
    if (world.rank() == 0) {
      expect(error_of([&] { stream.synchronize(); }) == "enough", "all_reduce goes on");
    }
    expect(error_of([&] { world.control().barrier(); }) == "enough", "control goes on");
  });
}

TEST_CASE("comm_local: different calls are an error that names them", "[comm]") {
  const auto run_mismatch = [](const std::function<void(Comm&, const Stream&, float*)>& odd) {
    return error_of([&odd] {
      run_ranks(3, [&odd](World& world) {
        const auto comm = world.make_comm();
        const Stream stream = Context::current()->make_stream("comm");
        std::vector<float> data(64), out(64);
        if (world.rank() == 2) {
          odd(*comm, stream, data.data());
        } else {
          comm->reduce_scatter(stream, out.data(), data.data(), 8, kF32, kF32, false, nullptr);
        }
        stream.synchronize();
      });
    });
  };
  REQUIRE(run_mismatch([](Comm& comm, const Stream& stream, float* data) {
            comm.reduce_scatter(stream, data, data, 4, kF32, kF32, false, nullptr);
          }) ==
          "reduce_scatter: the ranks disagree: rank 0 calls reduce_scatter (32 bytes), rank 2 "
          "calls reduce_scatter (16 bytes)");
  REQUIRE(run_mismatch([](Comm& comm, const Stream& stream, float* data) {
            comm.all_gather(stream, data, data, 8, kF32);
          }) ==
          "reduce_scatter: the ranks disagree: rank 0 calls reduce_scatter (32 bytes), rank 2 "
          "calls all_gather (32 bytes)");
  REQUIRE(run_mismatch([](Comm& comm, const Stream& stream, float* data) {
            comm.reduce_scatter(stream, data + 32, data, 16, kBF16, kF32, false, nullptr);
          }) ==
          "reduce_scatter: the ranks disagree: rank 0 calls reduce_scatter (32 bytes), rank 2 "
          "calls reduce_scatter (32 bytes); dtypes or root differ");
}

TEST_CASE("comm: wrong arguments are named", "[comm]") {
  run_ranks(1, [](World& world) {
    const auto comm = world.make_comm();
    const Stream stream = Context::current()->make_stream("comm");
    int32_t x = 0;
    const auto starts_with = [](const std::string& text, const std::string& start) {
      expect(text.rfind(start, 0) == 0, "got \"{}\"", text);
    };
    starts_with(error_of([&] { comm->all_reduce(stream, &x, 1, kI32, nullptr); }),
                "all_reduce: expected a floating dtype, got i32");
    starts_with(
        error_of([&] { comm->reduce_scatter(stream, &x, &x, 1, kI32, kF32, false, nullptr); }),
        "reduce_scatter: wire and out must be floating, got i32 and f32");
    starts_with(error_of([&] { comm->all_gather(stream, &x, &x, -1, kI32); }),
                "all_gather: expected a number of elements, got -1");
    starts_with(error_of([&] { comm->allocate(-1, MemoryClass::kOther); }),
                "allocate: expected a number of bytes, got -1");
    starts_with(error_of([&] { comm->split(-1, 0); }),
                "split: expected a color that is not negative, got -1");
    starts_with(error_of([&] { world.control().broadcast(&x, 4, -1); }),
                "broadcast: root -1 is not in [0, 1)");
  });
  REQUIRE(error_of([] {
            run_ranks(0, [](World&) {});
          }).rfind("run_ranks: expected at least one", 0) == 0);
}

TEST_CASE("mesh: a shard size that does not divide the world is named", "[comm]") {
  REQUIRE(error_of([] {
            Mesh::make(6, 0, 4);
          }).rfind("Mesh: shard_size: 4 does not divide the world size 6", 0) == 0);
  REQUIRE(error_of([] {
            Mesh::make(6, 0, 7);
          }).rfind("Mesh: shard_size: expected 1 to 6 (the world size), got 7", 0) == 0);
  REQUIRE_THROWS_AS(Mesh::make(6, 0, 0), ConfigError);
  const Mesh mesh = Mesh::make(6, 4, 3);
  REQUIRE((mesh.replicate_size == 2 && mesh.replicate_rank == 1 && mesh.shard_rank == 1));
}

TEST_CASE("comm_local: the checker sees what collectives read and write", "[comm]") {
  const std::string message = error_of([] {
    run_ranks(2, [](World& world) {
      const auto comm = world.make_comm();
      const Stream stream = Context::current()->make_stream("comm");
      Tensor shard = zeros({256});
      Tensor full = empty({512});
      std::promise<void> filled;  // ordered in fact, but by nothing that the checker knows
      Context::current()->compute().submit("fulfil", [&filled] { filled.set_value(); });
      filled.get_future().wait();
      comm->all_gather(stream, full.raw_data(), shard.raw_data(), 256, kF32);
      stream.synchronize();
    });
  });
  REQUIRE(message.find("all_gather") != std::string::npos);
}

TEST_CASE("comm_local: an imitated network takes its time without losing bits", "[comm]") {
  LocalOptions options;
  options.latency_us = 20000;
  options.bandwidth_bytes_per_s = 100e3;
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(2, options, [](World& world) {
    const auto comm = world.make_comm();
    const Stream stream = Context::current()->make_stream("comm");
    case_all_gather<float>(*comm, stream, 1000, false);  // 4000 bytes to the other: 40 ms
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  REQUIRE(took.count() >= 0.060);
  REQUIRE(took.count() < 2);
}

TEST_CASE("reduce_scatter: 64 ones and 2^-9 over a bf16 wire add up in f32", "[comm]") {
  run_ranks(65, [](World& world) {
    const auto comm = world.make_comm();
    const Stream stream = Context::current()->make_stream("comm");
    const std::vector<BFloat16> full(65, BFloat16(world.rank() == 17 ? 0x1p-9f : 1.0f));
    float sum = 0;
    BFloat16 rounded;
    comm->reduce_scatter(stream, &sum, full.data(), 1, kBF16, kF32, false, nullptr);
    comm->reduce_scatter(stream, &rounded, full.data(), 1, kBF16, kBF16, false, nullptr);
    stream.synchronize();
    expect(sum == 64.0f + 0x1p-9f, "f32 sum is {}", sum);
    expect(static_cast<float>(rounded) == 64.0f, "bf16 sum is {}", static_cast<float>(rounded));
  });
}

TEST_CASE("clocks: ranks of one machine have one clock", "[comm]") {
  run_ranks(3, [](World& world) {
    const ClockOffset clock = measure_clock(world.control());
    expect(clock.offset_ns == 0 && clock.error_ns == 0, "offset {} +- {}", clock.offset_ns,
           clock.error_ns);
  });
}

TEST_CASE("clocks: exchanges bound the offset, whatever the delays", "[comm]") {
  // This rank's clock is ahead by `truth`; a message takes 20 us, and what else comes between.
  for (const int64_t truth : {int64_t{0}, int64_t{123456789}, int64_t{-5000000000}}) {
    std::vector<ClockExchange> exchanges;
    int64_t at = 1000;
    uint32_t noise = 1;
    const auto draw = [&](uint32_t most) {
      return (noise = noise * 1664525u + 1013904223u) % most;
    };
    for (int round = 0; round < 16; ++round, at += 1000000) {
      // Who comes last sends late: only then is the other's wait the way of the message.
      const bool is_last = round % 2 == 0;
      const int64_t mine = at + (is_last ? 200000 : 0) + draw(1000),
                    theirs = at + (is_last ? 0 : 200000) + draw(1000);
      const int64_t there = mine + 20000 + draw(round == 6 ? 10 : 100000),
                    here = theirs + 20000 + draw(round == 7 ? 10 : 100000);
      exchanges.push_back(
          {mine + truth, std::max(here, mine) + truth, theirs, std::max(there, theirs)});
      const ClockOffset clock = clock_offset(exchanges);
      CHECK(std::abs(clock.offset_ns - truth) <= clock.error_ns);
    }
    const ClockOffset clock = clock_offset(exchanges);
    CHECK(clock.error_ns <= 25000);
  }
}
