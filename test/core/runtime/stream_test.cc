#include "core/runtime/stream.h"

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "core/runtime/context.h"
#include "core/runtime/cpu/parallel.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::error_of;

/// Holds a stream until it is opened, so that a test decides what runs when.
class Gate {
 public:
  void hold(const Stream& stream) const {
    stream.submit("gate", [future = future_] { future.wait(); });
  }
  void open() { promise_.set_value(); }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_{promise_.get_future()};
};

Stream make(const char* name = "test") {
  return make_stream({}, name);
}

TEST_CASE("stream: tasks run in submission order on one thread", "[stream]") {
  const Stream s = make();
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  for (int i = 0; i < 1000; ++i) {
    s.submit("push", [&, i] {
      order.push_back(i);
      threads.push_back(std::this_thread::get_id());
    });
  }
  s.synchronize();
  REQUIRE(order.size() == 1000);
  for (int i = 0; i < 1000; ++i) REQUIRE(order[static_cast<size_t>(i)] == i);
  CHECK(std::all_of(threads.begin(), threads.end(),
                    [&](auto id) { return id == threads[0] && id != std::this_thread::get_id(); }));
}

TEST_CASE("stream: the host never blocks, however much is queued", "[stream]") {
  const Stream s = make(), other = make("other");
  Gate gate;
  gate.hold(s);
  int ran = 0;
  for (int i = 0; i < 10000; ++i) s.submit("count", [&ran] { ++ran; });
  const Event end = s.record();
  other.wait(end);
  const Event other_end = other.record();
  CHECK_FALSE(end.is_done());
  CHECK_FALSE(other_end.is_done());
  CHECK(ran == 0);
  gate.open();
  other_end.synchronize();
  CHECK(ran == 10000);
  CHECK(end.is_done());
}

TEST_CASE("stream: an event orders two streams", "[stream]") {
  const Stream producer = make("producer"), consumer = make("consumer");
  for (int i = 0; i < 200; ++i) {
    int value = 0, seen = -1;
    producer.submit("write", [&] { value = 7; });
    const Event written = producer.record();
    producer.submit("later", [] {});
    consumer.wait(written);
    consumer.submit("read", [&] { seen = value; });
    consumer.synchronize();
    REQUIRE(seen == 7);
    producer.synchronize();
  }
}

TEST_CASE("stream: an event is a point: later tasks of its stream do not hold it", "[stream]") {
  const Stream s = make(), other = make("other");
  const Event before = s.record();
  Gate gate;
  gate.hold(s);
  other.wait(before);
  other.synchronize();
  CHECK(before.is_done());
  CHECK_FALSE(s.record().is_done());
  gate.open();
}

TEST_CASE("stream: a default event is done and orders nothing", "[stream]") {
  const Stream s = make();
  const Event none;
  CHECK(none.is_done());
  none.synchronize();
  s.wait(none);
  s.synchronize();
}

TEST_CASE("stream: events outlive their stream", "[stream]") {
  Event event;
  {
    const Stream s = make();
    event = s.record();
  }
  CHECK(event.is_done());
  event.synchronize();
}

TEST_CASE("stream: an exception skips later tasks and is rethrown at every synchronize",
          "[stream]") {
  const Stream s = make();
  int ran = 0;
  const Event before = s.record();
  s.submit("bad", [] { throw Error("boom"); });
  s.submit("after", [&] { ++ran; });
  const Event after = s.record();
  CHECK(error_of([&] { s.synchronize(); }) == "boom");
  CHECK(error_of([&] { s.synchronize(); }) == "boom");
  CHECK(error_of([&] { after.synchronize(); }) == "boom");
  before.synchronize();
  s.drain();
  CHECK(ran == 0);
}

TEST_CASE("stream: poison travels with events, and only with them", "[stream]") {
  const Stream bad = make("bad"), next = make("next"), last = make("last"), apart = make("apart");
  int ran = 0;
  const Event before = bad.record();
  bad.submit("bad", [] { throw CommError("lost a rank"); });
  next.wait(bad.record());
  next.submit("skipped", [&] { ++ran; });
  last.wait(next.record());
  last.submit("skipped", [&] { ++ran; });
  CHECK_THROWS_AS(last.synchronize(), CommError);
  // Also when the event was done before the wait.
  const Stream late = make("late");
  late.wait(bad.record());
  bad.drain();
  late.submit("skipped", [&] { ++ran; });
  CHECK(error_of([&] { late.synchronize(); }) == "lost a rank");
  CHECK(ran == 0);
  apart.wait(before);
  apart.submit("runs", [&] { ++ran; });
  apart.synchronize();
  CHECK(ran == 1);
}

TEST_CASE("stream: drain waits and does not throw", "[stream]") {
  const Stream s = make();
  std::atomic<int> ran = 0;
  s.submit("slow", [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ++ran;
  });
  s.drain();
  CHECK(ran == 1);
  s.submit("bad", [] { throw Error("boom"); });
  s.drain();
}

TEST_CASE("stream: the last reference runs what is queued", "[stream]") {
  int ran = 0;
  {
    const Stream s = make();
    for (int i = 0; i < 500; ++i) s.submit("count", [&ran] { ++ran; });
  }
  CHECK(ran == 500);
}

TEST_CASE("stream: its own task may hold the last reference", "[stream]") {
  auto promise = std::make_shared<std::promise<int>>();
  std::future<int> result = promise->get_future();
  auto ran = std::make_shared<int>(0);
  Gate gate;
  {
    Stream s = make();
    gate.hold(s);
    s.submit("holder", [s, ran] { ++*ran; });
    s.submit("after", [ran, promise] { promise->set_value(++*ran); });
  }
  gate.open();
  CHECK(result.get() == 2);
}

TEST_CASE("stream: draining on its own worker runs what is queued first", "[stream]") {
  const Stream s = make();
  std::vector<int> order;
  s.submit("outer", [&, s] {
    s.submit("later", [&] { order.push_back(1); });
    s.drain();
    order.push_back(2);
  });
  s.synchronize();  // may end within the drain
  s.synchronize();
  CHECK(order == std::vector<int>{1, 2});
}

TEST_CASE("stream: captures of any size are kept and destroyed once", "[stream]") {
  struct Counted {
    explicit Counted(std::atomic<int>* live) : live(live) { ++*live; }
    Counted(const Counted& other) : live(other.live) { ++*live; }
    Counted(Counted&& other) noexcept : live(other.live) { ++*live; }
    ~Counted() { --*live; }
    std::atomic<int>* live;
  };
  std::atomic<int> live = 0;
  double sum = 0;
  {
    const Stream s = make();
    std::array<double, 100> large{};
    large.fill(0.5);
    s.submit("small", [c = Counted(&live), &sum] { sum += *c.live > 0 ? 1 : 0; });
    s.submit("large", [c = Counted(&live), large, &sum] {
      for (const double v : large) sum += *c.live > 0 ? v : 0;
    });
    // Skipped tasks are destroyed too.
    s.submit("bad", [] { throw Error("boom"); });
    s.submit("skipped", [c = Counted(&live), large, &sum] { sum += large[0] + *c.live; });
    s.drain();
  }
  CHECK(sum == 51);
  CHECK(live == 0);
}

TEST_CASE("task: moves, replaces, and keeps over-aligned captures aligned", "[stream]") {
  struct alignas(64) Wide {
    float values[16];
  };
  Task empty;
  CHECK_FALSE(static_cast<bool>(empty));
  uintptr_t address = 1;
  Task task([wide = Wide{}, &address] { address = reinterpret_cast<uintptr_t>(&wide) % 64; });
  Task moved = std::move(task);
  CHECK_FALSE(static_cast<bool>(task));  // NOLINT: a moved-from task is empty
  moved();
  CHECK(address == 0);
  auto shared = std::make_shared<int>(1);
  moved = Task([shared] {});
  CHECK(shared.use_count() == 2);
  moved = std::move(empty);
  CHECK(shared.use_count() == 1);
}

TEST_CASE("stream: only a worker with threads of its own runs kernels in parallel", "[stream]") {
  CHECK(cpu::num_threads() == 1);
  const Stream one = make(), three = make_stream({}, "three", {.num_threads = 3, .spin_us = 20});
  int seen_one = 0, seen_three = 0;
  one.submit("ask", [&] { seen_one = cpu::num_threads(); });
  three.submit("ask", [&] { seen_three = cpu::num_threads(); });
  one.synchronize(), three.synchronize();
  CHECK(seen_one == 1);
  CHECK(seen_three == 3);
}

TEST_CASE("parallel_for: covers every index once, and nothing of an empty range", "[stream]") {
  const Stream s = make_stream({}, "threads", {.num_threads = 2});
  for (const int64_t count : {0, 1, 2, 3, 100, 1001}) {
    for (const int64_t grain : {0, 1, 7, 5000}) {
      std::vector<int> hits(static_cast<size_t>(count), 0);
      s.submit("cover", [&] {
        cpu::parallel_for(count, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
        });
      });
      s.synchronize();
      INFO("count " << count << ", grain " << grain);
      CHECK(std::all_of(hits.begin(), hits.end(), [](int h) { return h == 1; }));
    }
  }
}

TEST_CASE("stream: guards nest", "[stream]") {
  const Stream a = make("a"), b = make("b");
  const Stream outside = current_stream();
  CHECK(outside == Context::current()->compute());
  {
    const StreamGuard guard_a(a);
    CHECK(current_stream() == a);
    {
      const StreamGuard guard_b(b);
      CHECK(current_stream() == b);
    }
    CHECK(current_stream() == a);
  }
  CHECK(current_stream() == outside);
}

TEST_CASE("stream: submitting from several threads loses nothing", "[stream]") {
  const Stream s = make();
  int ran = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) s.submit("count", [&ran] { ++ran; });
    });
  }
  for (std::thread& t : threads) t.join();
  s.synchronize();
  CHECK(ran == 2000);
}

TEST_CASE("stream: bytes are filled in order", "[stream]") {
  const Stream s = make();
  unsigned char bytes[8] = {};
  Gate gate;
  gate.hold(s);
  s.fill_bytes("fill", bytes + 2, 0xff, 4);
  CHECK(bytes[2] == 0);
  gate.open();
  s.synchronize();
  CHECK((bytes[1] == 0 && bytes[2] == 0xff && bytes[5] == 0xff && bytes[6] == 0));
}

}  // namespace
}  // namespace tessera
