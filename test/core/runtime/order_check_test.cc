#include "core/runtime/order_check.h"

#include <thread>

#include "core/runtime/context.h"
#include "core/tensor.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::error_of;

struct Fixture {
  std::shared_ptr<OrderCheck> check = std::make_shared<OrderCheck>();
  Stream a = make("a"), b = make("b"), c = make("c");
  std::vector<char> memory = std::vector<char>(4096);

  Stream make(const char* name) const { return make_stream({}, name, {.observer = check}); }
  void read(const Stream& s, const char* name, int64_t begin = 0, int64_t nbytes = 64) {
    s.declare(name, Cost().read(memory.data() + begin, nbytes));
    s.submit(name, [] {});
  }
  void write(const Stream& s, const char* name, int64_t begin = 0, int64_t nbytes = 64) {
    s.declare(name, Cost().write(memory.data() + begin, nbytes));
    s.submit(name, [] {});
  }
  std::string only_conflict() const {
    const auto all = check->conflicts();
    return all.size() == 1 ? all[0] : fmt::format("{} conflicts", all.size());
  }
};

TEST_CASE("order check: a read after a write needs a wait", "[order_check]") {
  Fixture f;
  f.write(f.a, "gather");
  SECTION("missing") {
    f.read(f.b, "matmul");
    CHECK(f.only_conflict() ==
          "matmul (b) reads bytes that gather (a) wrote: no event orders them");
    CHECK(error_of([&] { f.check->throw_if_conflicts(); }) ==
          "order check: 1 conflicts, the first: matmul (b) reads bytes that gather (a) wrote: no "
          "event orders them");
  }
  SECTION("there") {
    f.b.wait(f.a.record());
    f.read(f.b, "matmul");
    CHECK(f.check->conflicts().empty());
    CHECK_NOTHROW(f.check->throw_if_conflicts());
  }
  SECTION("too early: the event is from before the write") {
    Fixture g;
    const Event before = g.a.record();
    g.write(g.a, "gather");
    g.b.wait(before);
    g.read(g.b, "matmul");
    CHECK(g.check->conflicts().size() == 1);
  }
  SECTION("too late: the wait comes after the read") {
    const Event after = f.a.record();
    f.read(f.b, "matmul");
    f.b.wait(after);
    CHECK(f.check->conflicts().size() == 1);
  }
}

TEST_CASE("order check: a write after a read needs a wait", "[order_check]") {
  Fixture f;
  f.read(f.a, "matmul");
  SECTION("missing") {
    f.write(f.b, "gather");
    CHECK(f.only_conflict() ==
          "gather (b) writes bytes that matmul (a) read: no event orders them");
  }
  SECTION("there") {
    f.b.wait(f.a.record());
    f.write(f.b, "gather");
    CHECK(f.check->conflicts().empty());
  }
  SECTION("every reader counts, not only the last") {
    f.read(f.c, "norm");
    f.b.wait(f.c.record());
    f.write(f.b, "gather");
    CHECK(f.only_conflict() ==
          "gather (b) writes bytes that matmul (a) read: no event orders them");
  }
}

TEST_CASE("order check: two writes need a wait, two reads do not", "[order_check]") {
  Fixture f;
  f.read(f.a, "one");
  f.read(f.b, "two");
  CHECK(f.check->conflicts().empty());
  f.write(f.a, "first", 128);
  f.write(f.b, "second", 128);
  CHECK(f.only_conflict() == "second (b) writes bytes that first (a) wrote: no event orders them");
}

TEST_CASE("order check: one stream is in order by itself", "[order_check]") {
  Fixture f;
  for (int i = 0; i < 3; ++i) f.write(f.a, "write"), f.read(f.a, "read");
  CHECK(f.check->conflicts().empty());
}

TEST_CASE("order check: events are transitive", "[order_check]") {
  Fixture f;
  f.write(f.a, "produce");
  f.b.wait(f.a.record());
  f.c.wait(f.b.record());  // b does not touch the bytes itself
  f.read(f.c, "consume");
  f.write(f.c, "reuse");
  CHECK(f.check->conflicts().empty());
  // But an event taken before the wait carries nothing.
  const Event before = f.b.record();
  f.write(f.a, "produce", 512);
  f.b.wait(f.a.record());
  f.c.wait(before);
  f.read(f.c, "consume", 512);
  CHECK(f.check->conflicts().size() == 1);
}

TEST_CASE("order check: ranges overlap by bytes", "[order_check]") {
  Fixture f;
  f.write(f.a, "left", 0, 100);
  f.write(f.b, "beside", 100, 100);
  CHECK(f.check->conflicts().empty());
  SECTION("one byte is enough") {
    f.read(f.b, "across", 99, 1);
    CHECK(f.check->conflicts().size() == 1);
  }
  SECTION("in the middle of a larger range") {
    f.read(f.c, "inside", 40, 8);
    CHECK(f.only_conflict() == "inside (c) reads bytes that left (a) wrote: no event orders them");
  }
  SECTION("over several pieces, each with its writer") {
    f.read(f.c, "over", 50, 100);
    const auto all = f.check->conflicts();
    REQUIRE(all.size() == 2);
    CHECK(all[0].find("left (a)") != std::string::npos);
    CHECK(all[1].find("beside (b)") != std::string::npos);
  }
  SECTION("a part overwritten in order leaves the rest") {
    f.c.wait(f.a.record());
    f.write(f.c, "middle", 40, 20);
    f.read(f.a, "first part", 0, 40);
    f.read(f.a, "last part", 60, 40);
    CHECK(f.check->conflicts().empty());
    f.read(f.a, "middle part", 59, 1);
    CHECK(f.only_conflict() ==
          "middle part (a) reads bytes that middle (c) wrote: no event orders them");
  }
  SECTION("a read of bytes nobody wrote is remembered") {
    f.read(f.a, "fresh", 1000, 10);
    f.write(f.b, "reuse", 1005, 100);
    CHECK(f.only_conflict() == "reuse (b) writes bytes that fresh (a) read: no event orders them");
  }
}

TEST_CASE("order check: accumulating reads and writes at once", "[order_check]") {
  Fixture f;
  void* data = f.memory.data();
  f.a.declare("add", Cost().write_or_accumulate(data, 64, true));
  f.a.declare("add", Cost().write_or_accumulate(data, 64, true));
  CHECK(f.check->conflicts().empty());
  f.b.declare("add", Cost().write_or_accumulate(data, 64, true));
  CHECK(f.check->conflicts().size() >= 1);
}

TEST_CASE("order check: clear forgets a range, and only that", "[order_check]") {
  Fixture f;
  f.write(f.a, "old", 0, 300);
  f.check->clear(f.memory.data() + 100, 100);
  f.write(f.b, "new", 100, 100);
  CHECK(f.check->conflicts().empty());
  f.read(f.b, "left", 99, 1);
  CHECK(f.check->conflicts().size() == 1);
  f.read(f.c, "right", 200, 1);
  CHECK(f.check->conflicts().size() == 2);
}

TEST_CASE("order check: what the host waited for is over for everyone", "[order_check]") {
  Fixture f;
  f.write(f.a, "one", 0);
  f.a.synchronize();
  f.read(f.b, "after", 0);
  f.write(f.b, "two", 128);
  f.c.wait(f.b.record());
  f.c.record().synchronize();
  f.read(f.a, "after", 128);
  f.write(f.a, "three", 256);
  f.a.drain();
  f.write(f.b, "after", 256);
  CHECK(f.check->conflicts().empty());
  f.write(f.a, "four", 256);
  CHECK(f.check->conflicts().size() == 1);
}

TEST_CASE("order check: an event at the address of a gone one orders nothing of it",
          "[order_check]") {
  Fixture f;
  f.write(f.a, "write");
  // More than the checker keeps between two sweeps; the heap hands addresses out again.
  for (int i = 0; i < 3000; ++i) f.a.record();
  for (int i = 0; i < 3000; ++i) f.b.wait(f.c.record());
  f.read(f.b, "read");
  CHECK(f.check->conflicts().size() == 1);
}

TEST_CASE("order check: events of streams it does not see are let pass", "[order_check]") {
  Fixture f;
  const Stream apart = make_stream({}, "apart");
  f.a.wait(apart.record());
  f.write(f.a, "write");
  f.a.synchronize();
  CHECK(f.check->conflicts().empty());
}

TEST_CASE("order check: the same conflict is kept once, at most 100 in all", "[order_check]") {
  Fixture f;
  for (int i = 0; i < 10; ++i) f.write(f.a, "write"), f.read(f.b, "read");
  CHECK(f.check->conflicts().size() == 2);  // b reads what a wrote; a writes what b read
  std::vector<std::string> names;
  for (int i = 0; i < 150; ++i) names.push_back(fmt::format("read{}", i));
  for (const std::string& name : names) {
    f.write(f.a, "write");
    f.read(f.b, name.c_str());
  }
  CHECK(f.check->conflicts().size() == 100);
}

TEST_CASE("order check: memory that changed its stream through the backend is no conflict",
          "[order_check]") {
  const auto context = std::make_shared<Context>(
      ContextOptions{.num_threads = 1, .poison = true, .order_check = true});
  const Context::Scope scope(context);
  const Stream other = context->make_stream("other");
  // The kernel's address space may hand out the same segment again; whether or not it does, the
  // allocator waited for the first owner.
  for (int i = 0; i < 4; ++i) {
    { const Tensor t = full({2000000}, 1); }
    context->allocator()->empty_cache();
    const StreamGuard guard(other);
    { const Tensor t = full({2000000}, 1); }
    context->allocator()->empty_cache();
  }
  context->order_check()->throw_if_conflicts();
}

TEST_CASE("order check: a context's tensors are seen, on any of its streams", "[order_check]") {
  const auto context =
      std::make_shared<Context>(ContextOptions{.num_threads = 1, .order_check = true});
  const Context::Scope scope(context);
  Tensor x = full({16}, 1);
  const Stream side = context->make_stream("side");
  // Behind the checker's back, so that the test itself has no race.
  side.impl()->wait(context->compute().impl()->record());
  {
    const StreamGuard guard(side);
    x.fill_(2);
  }
  const auto found = context->order_check()->conflicts();
  REQUIRE(found.size() == 1);
  CHECK(found[0] == "fill (side) writes bytes that fill (compute) wrote: no event orders them");
  CHECK(Context(ContextOptions{.num_threads = 1}).order_check() == nullptr);
}

TEST_CASE("order check: several threads may report", "[order_check]") {
  Fixture f;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      const Stream s = f.make("own");
      for (int i = 0; i < 300; ++i) {
        f.write(s, "write", t * 512, 64);
        s.wait(s.record());
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(f.check->conflicts().empty());
}

}  // namespace
}  // namespace tessera
