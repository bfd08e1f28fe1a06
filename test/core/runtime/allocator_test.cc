#include "core/runtime/allocator.h"

#include <algorithm>
#include <cstdlib>
#include <future>
#include <map>
#include <thread>

#include "core/runtime/context.h"
#include "core/runtime/memory_timeline.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::error_of;

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;

/// The heap, with what the allocator did to it; optionally as small as a real device.
class CountingBackend final : public MemoryBackend {
 public:
  struct Log {
    std::map<void*, size_t> live;
    int64_t total = 0, capacity = int64_t{1} << 40;
  };
  explicit CountingBackend(std::shared_ptr<Log> log) : log_(std::move(log)) {}

  void* allocate(size_t nbytes) override {
    if (log_->total + static_cast<int64_t>(nbytes) > log_->capacity) return nullptr;
    void* data = std::aligned_alloc(4096, nbytes);
    log_->live[data] = nbytes;
    log_->total += static_cast<int64_t>(nbytes);
    return data;
  }
  void free(void* data, size_t nbytes) noexcept override {
    if (log_->live[data] != nbytes) std::abort();
    log_->live.erase(data);
    log_->total -= static_cast<int64_t>(nbytes);
    std::free(data);
  }

 private:
  std::shared_ptr<Log> log_;
};

struct Fixture {
  explicit Fixture(Allocator::Options options = {}) : allocator(make(options)) {}
  std::unique_ptr<Allocator> make(Allocator::Options options) const {
    return std::make_unique<Allocator>(std::make_unique<CountingBackend>(log), options);
  }
  Allocator::Block* allocate(int64_t nbytes, MemoryClass c = MemoryClass::kOther) const {
    return allocator->allocate(static_cast<size_t>(nbytes), stream, c);
  }
  void free(Allocator::Block* block) const { allocator->free(block); }

  std::shared_ptr<CountingBackend::Log> log = std::make_shared<CountingBackend::Log>();
  Stream stream = make_stream({}, "owner");
  std::unique_ptr<Allocator> allocator;
};

TEST_CASE("allocator: small blocks are cut from one segment, in granules", "[allocator]") {
  const Fixture f;
  auto* a = f.allocate(1);
  auto* b = f.allocate(513);
  auto* c = f.allocate(512);
  const auto at = [](Allocator::Block* x) { return static_cast<char*>(Allocator::data(x)); };
  CHECK(at(b) - at(a) == 512);
  CHECK(at(c) - at(b) == 1024);
  CHECK(reinterpret_cast<uintptr_t>(at(a)) % 512 == 0);
  CHECK(f.log->live.size() == 1);
  CHECK(f.log->total == 2 * kMiB);
  CHECK(f.allocator->stats().allocated == 512 + 1024 + 512);
  CHECK(Allocator::stream(a) == f.stream);
  f.free(a), f.free(b), f.free(c);
  CHECK(f.allocator->stats().allocated == 0);
}

TEST_CASE("allocator: neighbours merge in any order of free", "[allocator]") {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    const Fixture f;
    std::vector<Allocator::Block*> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(f.allocate(512 * kKiB));
    CHECK(f.log->live.size() == 1);  // exactly full
    for (const int i : order) f.free(blocks[static_cast<size_t>(i)]);
    auto* whole = f.allocate(1 * kMiB);
    auto* rest = f.allocate(1 * kMiB);
    CHECK(f.log->live.size() == 1);
    f.free(whole), f.free(rest);
    f.allocator->empty_cache();
    CHECK(f.log->live.empty());
    CHECK(f.allocator->stats().reserved == 0);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("allocator: the best fit is taken", "[allocator]") {
  const Fixture f;
  auto* large = f.allocate(64 * kKiB);
  auto* wall = f.allocate(512);
  auto* fitting = f.allocate(8 * kKiB);
  auto* wall2 = f.allocate(512);
  const void* place = Allocator::data(fitting);
  f.free(large), f.free(fitting);
  auto* again = f.allocate(8 * kKiB);
  CHECK(Allocator::data(again) == place);
  f.free(again), f.free(wall), f.free(wall2);
}

TEST_CASE("allocator: large blocks have segments of their own and keep a small rest",
          "[allocator]") {
  const Fixture f;
  auto* a = f.allocate(5 * kMiB + 1);
  CHECK(f.log->total == 5 * kMiB + 4096);
  f.free(a);
  auto* same = f.allocate(4 * kMiB + 512 * kKiB);  // a rest under 1 MiB stays with it
  CHECK(f.log->live.size() == 1);
  CHECK(f.allocator->stats().allocated == 5 * kMiB + 4096);
  f.free(same);
  auto* part = f.allocate(2 * kMiB);
  auto* rest = f.allocate(3 * kMiB);
  CHECK(f.log->live.size() == 1);
  f.free(part), f.free(rest);
}

TEST_CASE("allocator: a large block of a small segment's size stays large", "[allocator]") {
  const Fixture f;
  auto* large = f.allocate(2 * kMiB);
  f.free(large);
  auto* small = f.allocate(512);
  CHECK(f.log->live.size() == 2);
  auto* again = f.allocate(2 * kMiB);
  CHECK(f.log->live.size() == 2);
  f.free(small), f.free(again);
}

TEST_CASE("allocator: each stream has its pool", "[allocator]") {
  const Fixture f;
  const Stream other = make_stream({}, "other");
  auto* a = f.allocate(4 * kKiB);
  const void* place = Allocator::data(a);
  f.free(a);
  auto* b = f.allocator->allocate(4 * kKiB, other, MemoryClass::kOther);
  CHECK(Allocator::data(b) != place);
  CHECK(f.log->live.size() == 2);
  auto* c = f.allocate(4 * kKiB);
  CHECK(Allocator::data(c) == place);
  f.free(b), f.free(c);
}

TEST_CASE("allocator: counts by class, with the split at the peak", "[allocator]") {
  const Fixture f;
  const auto by = [](const std::array<int64_t, kNumMemoryClasses>& values, MemoryClass c) {
    return values[static_cast<size_t>(c)];
  };
  auto* p = f.allocate(1 * kKiB, MemoryClass::kParameters);
  auto* a = f.allocate(4 * kKiB, MemoryClass::kActivations);
  f.free(a);
  auto* g = f.allocate(2 * kKiB, MemoryClass::kGradients);
  AllocatorStats s = f.allocator->stats();
  CHECK(s.allocated == 3 * kKiB);
  CHECK(s.peak_allocated == 5 * kKiB);
  CHECK(by(s.allocated_by_class, MemoryClass::kGradients) == 2 * kKiB);
  CHECK(by(s.allocated_by_class, MemoryClass::kActivations) == 0);
  CHECK(by(s.peak_by_class, MemoryClass::kActivations) == 4 * kKiB);
  CHECK(by(s.peak_by_class, MemoryClass::kGradients) == 0);
  CHECK(s.num_allocations == 3);
  CHECK(s.num_backend_allocations == 1);
  f.allocator->reset_peak();
  s = f.allocator->stats();
  CHECK(s.peak_allocated == 3 * kKiB);
  CHECK(by(s.peak_by_class, MemoryClass::kActivations) == 0);
  f.free(p), f.free(g);
}

TEST_CASE("allocator: a scope names the class", "[allocator]") {
  CHECK(MemoryScope::current() == MemoryClass::kActivations);
  {
    const MemoryScope outer(MemoryClass::kOptimizer);
    const MemoryScope inner(MemoryClass::kGathered);
    CHECK(MemoryScope::current() == MemoryClass::kGathered);
  }
  CHECK(MemoryScope::current() == MemoryClass::kActivations);
}

TEST_CASE("allocator: the limit holds, and fragments go back before giving up", "[allocator]") {
  const Fixture f({.limit = 8 * kMiB});
  auto* a = f.allocate(3 * kMiB);
  auto* b = f.allocate(3 * kMiB);
  f.free(a);
  auto* c = f.allocate(5 * kMiB);  // only after the cached 3 MiB went back
  CHECK(f.log->total == 8 * kMiB);
  CHECK_THROWS_AS(f.allocate(2 * kMiB), OutOfMemoryError);
  f.free(b), f.free(c);
  auto* d = f.allocate(8 * kMiB);
  f.free(d);
  CHECK_THROWS_AS(f.allocate(8 * kMiB + 1), OutOfMemoryError);
}

TEST_CASE("allocator: out of memory says how much, what for, and what helps", "[allocator]") {
  const Fixture f({.limit = 8 * kMiB, .name = "cpu"});
  auto* p = f.allocate(3 * kMiB, MemoryClass::kParameters);
  auto* a = f.allocate(2 * kMiB, MemoryClass::kActivations);
  const std::string text = error_of([&] { f.allocate(4 * kMiB); });
  INFO(text);
  CHECK(text.find("out of memory on cpu: requested 4.0 MiB, allocated 5.0 MiB, limit 8.0 MiB, "
                  "free 3.0 MiB\n") == 0);
  CHECK(text.find("  parameters            3.0 MiB      3.0 MiB\n") != std::string::npos);
  CHECK(text.find("  activations           2.0 MiB      2.0 MiB\n") != std::string::npos);
  CHECK(text.find("  total                 5.0 MiB      5.0 MiB\n") != std::string::npos);
  CHECK(text.find("  most is in parameters\n") != std::string::npos);
  f.allocator->set_advice([](const OutOfMemory& oom) {
    return fmt::format("  block0: {} more of {}\n", oom.nbytes, name_of(oom.memory_class));
  });
  CHECK(error_of([&] {
          f.allocate(4 * kMiB, MemoryClass::kGradients);
        }).find("  block0: 4194304 more of gradients\n") != std::string::npos);
  f.free(p), f.free(a);
}

TEST_CASE("allocator: out of memory for a small block says what it takes", "[allocator]") {
  const Fixture f({.limit = 3 * kMiB, .name = "cpu"});
  auto* a = f.allocate(2 * kMiB);
  const std::string text = error_of([&] { f.allocate(256 * kKiB); });
  INFO(text);
  CHECK(
      text.find("requested 256.0 KiB, allocated 2.0 MiB, limit 3.0 MiB, free 1.0 MiB; blocks of up "
                "to 1.0 MiB are cut from segments of 2.0 MiB: none has room, and another does not "
                "fit\n") != std::string::npos);
  f.free(a);
}

TEST_CASE("allocator: a cached block is cut if that leaves split_nbytes", "[allocator]") {
  for (const int64_t split : {kMiB, 4 * kMiB}) {
    const Fixture f({.split_nbytes = static_cast<int64_t>(split)});
    f.free(f.allocate(6 * kMiB));
    auto* a = f.allocate(3 * kMiB);  // leaves 3 MiB
    auto* b = f.allocate(3 * kMiB);
    CHECK(f.log->total == (split <= 3 * kMiB ? 6 : 9) * kMiB);
    f.free(a), f.free(b);
  }
}

TEST_CASE("allocator: a device without memory left says so too", "[allocator]") {
  const Fixture f;
  f.log->capacity = 4 * kMiB;
  const std::string text = error_of([&] { f.allocate(5 * kMiB); });
  CHECK(text.find("out of memory on device: requested 5.0 MiB, allocated 0 B, limit none\n") == 0);
}

TEST_CASE("allocator: empty_cache waits for the tasks that still use the memory", "[allocator]") {
  const Fixture f;
  std::promise<void> gate;
  auto* a = f.allocate(4 * kMiB);
  auto* data = static_cast<char*>(Allocator::data(a));
  f.stream.submit("slow", [&, future = gate.get_future().share()] {
    future.wait();
    data[0] = 1;  // freed by the host, not yet given back
  });
  f.free(a);
  std::thread opener([&] { gate.set_value(); });
  f.allocator->empty_cache();
  opener.join();
  CHECK(f.log->live.empty());
}

TEST_CASE("allocator: new and freed bytes are NaN, in stream order", "[allocator]") {
  const Fixture f({.poison = true});
  auto* a = f.allocate(4 * kKiB);
  auto* data = static_cast<float*>(Allocator::data(a));
  float fresh = 0, used = 0;
  f.stream.submit("read", [&] { fresh = data[5]; });
  std::promise<void> gate;
  f.stream.submit("gate", [future = gate.get_future().share()] { future.wait(); });
  f.stream.submit("write", [data] { std::fill(data, data + 1024, 2.0f); });
  f.stream.submit("read", [&] { used = data[1023]; });
  f.free(a);
  auto* again = f.allocate(4 * kKiB);
  CHECK(Allocator::data(again) == data);
  bool all_nan = false;
  f.stream.submit("read", [&] {
    all_nan = std::all_of(data, data + 1024, [](float v) { return std::isnan(v); });
  });
  gate.set_value();
  f.stream.synchronize();
  CHECK(std::isnan(fresh));
  CHECK(used == 2.0f);
  CHECK(all_nan);
  f.free(again);
}

TEST_CASE("allocator: threads may allocate and free each other's blocks", "[allocator]") {
  const Fixture f;
  std::mutex mutex;
  std::vector<Allocator::Block*> shared;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      uint32_t random = t + 1;
      for (int i = 0; i < 400; ++i) {
        random = random * 1664525u + 1013904223u;
        auto* block = f.allocate(1 + (random >> 8) % (3 * kMiB));
        std::lock_guard lock(mutex);
        shared.push_back(block);
        if (shared.size() > 8) {
          f.free(shared[random % shared.size()]);
          shared.erase(shared.begin() + random % static_cast<uint32_t>(shared.size()));
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (auto* block : shared) f.free(block);
  CHECK(f.allocator->stats().allocated == 0);
  CHECK(f.allocator->stats().num_allocations == 1600);
  f.allocator->empty_cache();
  CHECK(f.log->live.empty());
}

TEST_CASE("allocator: the last reference may go on the owner's worker", "[allocator]") {
  auto log = std::make_shared<CountingBackend::Log>();
  const Stream stream = make_stream({}, "owner");
  auto allocator =
      std::make_shared<Allocator>(std::make_unique<CountingBackend>(log), Allocator::Options{});
  auto* block = allocator->allocate(1000, stream, MemoryClass::kOther);
  auto owner = std::shared_ptr<Allocator::Block>(
      block, [allocator](Allocator::Block* b) { allocator->free(b); });
  allocator = nullptr;
  stream.submit("use", [owner] {});
  owner = nullptr;
  // The allocator drains the stream from within the task: the first wait may end in there.
  stream.synchronize();
  stream.synchronize();
  CHECK(log->live.empty());
}

TEST_CASE("allocator: sizes in and out of words", "[allocator]") {
  CHECK(parse_nbytes("2GiB") == int64_t{2} << 30);
  CHECK(parse_nbytes("1.5GiB") == int64_t{3} << 29);
  CHECK(parse_nbytes("64 KiB") == 65536);
  CHECK(parse_nbytes("1000") == 1000);
  CHECK(parse_nbytes("3MB") == 3000000);
  CHECK(parse_nbytes("7B") == 7);
  CHECK(parse_nbytes("") == 0);
  CHECK(parse_nbytes("none") == 0);
  for (const char* bad : {"2GIB", "-1", "GiB", "2 apples", "nan", "inf", "1e300TiB", "2GiB "}) {
    CHECK(error_of([&] { parse_nbytes(bad); }) ==
          fmt::format("\"{}\" is not a number of bytes such as \"512MiB\", \"2GiB\" or \"none\"",
                      bad));
  }
  CHECK(format_nbytes(0) == "0 B");
  CHECK(format_nbytes(1023) == "1023 B");
  CHECK(format_nbytes(1536) == "1.5 KiB");
  CHECK(format_nbytes(int64_t{5} << 40) == "5.0 TiB");
}

TEST_CASE("allocator: the heap's segments are aligned and zero-cost until touched", "[allocator]") {
  const auto backend = make_cpu_backend();
  for (const size_t nbytes : {size_t{4096}, size_t{2} << 20, (size_t{3} << 20) + 4096}) {
    auto* data = static_cast<char*>(backend->allocate(nbytes));
    REQUIRE(data != nullptr);
    CHECK(reinterpret_cast<uintptr_t>(data) % 4096 == 0);
    data[0] = 1, data[nbytes - 1] = 1;
    backend->free(data, nbytes);
  }
  CHECK(backend->allocate(size_t{1} << 60) == nullptr);
}

TEST_CASE("allocator: a segment from another backend is counted and goes straight back",
          "[allocator]") {
  const Fixture f({.limit = 8 * kMiB, .poison = true});
  const auto log = std::make_shared<CountingBackend::Log>();
  const auto backend = std::make_shared<CountingBackend>(log);
  auto* block =
      f.allocator->allocate_segment(backend, 3 * kMiB + 1, f.stream, MemoryClass::kGathered);
  CHECK(log->total == 3 * kMiB + 512);
  CHECK(f.log->total == 0);
  AllocatorStats stats = f.allocator->stats();
  CHECK(stats.allocated == 3 * kMiB + 512);
  CHECK(stats.reserved == 3 * kMiB + 512);
  CHECK(stats.allocated_by_class[static_cast<size_t>(MemoryClass::kGathered)] == stats.allocated);
  f.stream.synchronize();
  CHECK(static_cast<unsigned char*>(Allocator::data(block))[3 * kMiB] == 0xff);
  CHECK(error_of([&] {
          f.allocator->allocate_segment(backend, 6 * kMiB, f.stream, MemoryClass::kOther);
        }).find("out of memory on device: requested 6.0 MiB") == 0);
  f.free(block);
  CHECK(log->live.empty());
  stats = f.allocator->stats();
  CHECK(stats.allocated == 0);
  CHECK(stats.reserved == 0);
}

TEST_CASE("allocator: the report tells what is cached and its largest block", "[allocator]") {
  const Fixture f;
  std::vector<Allocator::Block*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(f.allocate(512 * kKiB));
  f.free(blocks[0]), f.free(blocks[2]);
  CHECK(f.allocator->stats().largest_free == 512 * kKiB);
  INFO(f.allocator->report());
  CHECK(f.allocator->report().find("1.0 MiB, the largest block 512.0 KiB") != std::string::npos);
  f.free(blocks[1]), f.free(blocks[3]);
  CHECK(f.allocator->stats().largest_free == 2 * kMiB);
}

TEST_CASE("allocator: a timeline has the bytes of each class in order, and keeps the peak",
          "[allocator]") {
  const Fixture f, other;
  auto* const before = f.allocate(512, MemoryClass::kParameters);
  const auto bytes = [](int64_t parameters, int64_t activations) {
    MemoryTimeline::Bytes b{};
    b[static_cast<size_t>(MemoryClass::kParameters)] = parameters;
    b[static_cast<size_t>(MemoryClass::kActivations)] = activations;
    return b;
  };
  {
    MemoryTimeline timeline(*f.allocator);
    timeline.mark("forward");
    auto* const a = f.allocate(1024, MemoryClass::kActivations);
    auto* const elsewhere = other.allocate(4096, MemoryClass::kActivations);
    timeline.mark("backward");
    f.free(a);
    other.free(elsewhere);
    const MemoryTimeline::Result result = timeline.result();
    CHECK(result.bytes == std::vector{bytes(512, 0), bytes(512, 1024), bytes(512, 0)});
    REQUIRE(result.marks.size() == 2);
    CHECK(result.marks[0].point == 1);
    CHECK(result.marks[1].point == 2);
    CHECK(result.marks[1].name == "backward");
  }
  // Many changes: no more points than asked for, the peak among them, marks where they were.
  MemoryTimeline timeline(*f.allocator, 16);
  for (int i = 0; i < 1000; ++i) {
    if (i == 500) timeline.mark("middle");
    f.free(f.allocate(i == 700 ? 8192 : 1024, MemoryClass::kActivations));
  }
  const MemoryTimeline::Result result = timeline.result();
  CHECK(result.bytes.size() <= 16);
  CHECK(result.bytes.size() >= 8);
  const auto peak = std::find(result.bytes.begin(), result.bytes.end(), bytes(512, 8192));
  REQUIRE(peak != result.bytes.end());
  const double count = static_cast<double>(result.bytes.size());
  CHECK(static_cast<double>(peak - result.bytes.begin()) / count == Approx(0.7).margin(0.1));
  CHECK(static_cast<double>(result.marks.at(0).point) / count == Approx(0.5).margin(0.1));
  f.free(before);
}

}  // namespace
}  // namespace tessera
