#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "core/profiler.h"
#include "core/runtime/context.h"
#include "core/runtime/cuda/cuda.h"
#include "core/runtime/order_check.h"
#include "core/runtime/staging.h"
#include "core/tensor.h"
#include "test/simt/fake_cuda.h"
#include "test/simt/simt.h"
#include "test/stderr_of.h"
#include "test/testing.h"

// The CUDA half of the runtime over the fake of CUDA, and that the fake finds what it is for.

namespace tessera {
namespace {

using testing::error_of;

constexpr Device kCuda0{DeviceType::kCuda, 0};

std::shared_ptr<Context> make_context(int index = 0) {
  return std::make_shared<Context>(ContextOptions{
      .device = {DeviceType::kCuda, index}, .num_threads = 1, .poison = true, .order_check = true});
}

bool contains(const std::string& text, const std::string& part) {
  INFO(text);
  const bool is_there = text.find(part) != std::string::npos;
  CHECK(is_there);
  return is_there;
}

/// A stream of the fake that stands still until it is opened.
class Gate {
 public:
  explicit Gate(const Stream& stream) : gate_(stream.device()), ticket_(gate_.wait_on(stream)) {}
  void open() { gate_.open(ticket_); }

 private:
  HostGate gate_;
  uint32_t ticket_;
};

TEST_CASE("simt runtime: tensors are made, computed with and read on the device", "[cuda][simt]") {
  const auto context = make_context();
  const Context::Scope scope(context);
  CHECK(context->compute().cuda() != nullptr);
  const Tensor x = from_values({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {2, 3}, kF32);
  CHECK(x.device() == kCuda0);
  Tensor y = x.transpose(0, 1).contiguous();
  y.add_(full({3, 2}, 10, kBF16));
  CHECK(y.to_vector() == std::vector<double>{11, 14, 12, 15, 13, 16});
  CHECK(x.transpose(0, 1).to_vector() == std::vector<double>{1, 4, 2, 5, 3, 6});
  CHECK(full({}, 2.5, kF64).item() == 2.5);
  CHECK(y.to_string() == "Tensor(f32, [3, 2]: 11, 14, 12, 15, 13, 16)");
  CHECK(zeros({0, 3}).to_vector().empty());
  context->order_check()->throw_if_conflicts();
}

TEST_CASE("simt runtime: the host does not wait for the device", "[cuda][simt]") {
  const auto context = make_context();
  const Context::Scope scope(context);
  Gate gate(context->compute());
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Tensor> tensors;
  std::vector<HostCopy> copies;
  for (int i = 0; i < 50; ++i) {
    tensors.push_back(from_values({static_cast<double>(i)}, {1}, kF32));
    tensors.back().add_(full({1}, 1));
    copies.emplace_back(tensors.back());
  }
  const Event end = context->compute().record();
  CHECK(!end.is_done());
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
  gate.open();
  for (int i = 0; i < 50; ++i) CHECK(copies[static_cast<size_t>(i)].item() == i + 1);
  end.synchronize();
  CHECK(end.is_done());
}

TEST_CASE("simt runtime: threads that never used a device make no context on device 0",
          "[cuda][simt]") {
  simt::take_mistakes();
  const auto on_thread = [](const std::function<void()>& f) { std::thread(f).join(); };
  {
    const auto context = make_context(3);
    std::optional<Context::Scope> scope(context);
    Event event = context->compute().record();
    std::optional<HostBuffer> buffer(context->staging()->acquire(64));
    const Tensor x = full({4}, 1);
    buffer->download("download", context->compute(), x.raw_data());
    std::optional<CudaSpan> span(context->compute());
    span->end();
    // What watchdogs, writers and the last owners of things do.
    on_thread([&] { (void)event.is_done(); });
    on_thread([&] { event.synchronize(); });
    on_thread([&] { CHECK(span->ms() >= 0); });
    on_thread([&] { span.reset(); });
    on_thread([&] { event = Event(); });
    on_thread([&] { context->compute().drain(); });
    on_thread([&] { context->compute().synchronize(); });
    on_thread([&] { buffer.reset(); });
    on_thread([&] { event = context->compute().record(); });
    on_thread([&] { context->compute().wait(event); });
    auto backend = make_cuda_backend({DeviceType::kCuda, 3});
    auto pinned = make_pinned_backend({DeviceType::kCuda, 3});
    void* data = backend->allocate(64);
    void* host = pinned->allocate(64);
    on_thread([&] { backend->free(data, 64); });
    on_thread([&] { pinned->free(host, 64); });
    scope.reset();
  }
  CHECK(simt::take_mistakes() == std::vector<std::string>{});
}

TEST_CASE("simt runtime: streams are ordered by events; a missing wait is a conflict",
          "[cuda][simt]") {
  const auto context = make_context();
  const Context::Scope scope(context);
  const Stream side = context->make_stream("side", {.high_priority = true});
  const Tensor x = full({1000}, 1);
  simt::set_random_delays(300, 7);
  for (int i = 0; i < 5; ++i) {
    side.wait(context->compute().record());
    {
      const StreamGuard guard(side);
      Tensor(x).add_(x.clone());
    }
    context->compute().wait(side.record());
    Tensor(x).add_(x.clone());
  }
  simt::set_random_delays(0, 0);
  CHECK(x.to_vector()[999] == 1024);
  context->order_check()->throw_if_conflicts();
  Tensor(x).fill_(1);
  {
    const StreamGuard guard(side);
    Tensor(x).fill_(0);
  }
  const auto conflicts = context->order_check()->conflicts();
  REQUIRE(!conflicts.empty());
  contains(conflicts[0], "fill (side)");
  side.synchronize();
}

TEST_CASE("simt runtime: a span measures what a stream waits for, and its events are used again",
          "[cuda][simt]") {
  const auto context = make_context();
  const Context::Scope scope(context);
  const Stream& compute = context->compute();
  const Stream side = context->make_stream("side");
  CHECK(CudaSpan().ms() == 0);
  size_t num_objects = 0;
  for (int i = 0; i < 3; ++i) {
    Gate gate(side);
    CudaSpan outer(compute), none(compute);
    none.end();
    CudaSpan inner(compute);
    compute.wait(side.record());
    inner.end();
    outer.end();
    const double none_ms = none.ms();  // the stream's thread has come to the wait, on any machine
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    gate.open();
    CHECK(inner.ms() >= 25);
    CHECK(outer.ms() >= inner.ms());
    CHECK(none_ms >= 0);
    CHECK(none_ms <= outer.ms());
    CudaSpan moved = std::move(inner);
    CHECK(moved.ms() >= 25);
    CHECK(inner.ms() == 0);  // NOLINT: what is left of it
    if (i == 0) num_objects = simt::live_objects().size();
    CHECK(simt::live_objects().size() == num_objects);
  }
}

/// The traced tasks of a stream by name, in order.
std::vector<TraceEvent> traced(const Stream& stream, const std::string& name = "") {
  std::vector<TraceEvent> found;
  for (const TraceEvent& e : profiler::events()) {
    if (e.stream_id == stream.id() && (name.empty() || e.name == name)) found.push_back(e);
  }
  return found;
}

TEST_CASE("simt runtime: the timeline has the tasks of all streams on one clock", "[cuda][simt]") {
  const auto context = make_context();
  const Context::Scope scope(context);
  const Stream& compute = context->compute();
  const Stream side = context->make_stream("side");
  auto short_lived = std::make_unique<Stream>(context->make_stream("short"));
  const int short_id = short_lived->id();
  const Tensor x = full({1000}, 1), y = full({1000}, 1);
  compute.synchronize();
  for (int round = 0; round < 2; ++round) {
    profiler::start();
    short_lived->fill_bytes("early", x.raw_data(), 0, 8);
    compute.wait(short_lived->record());
    if (round == 1) short_lived.reset();  // a stream that goes keeps its tasks
    Gate gate(side);
    {
      const StreamGuard guard(side);
      Tensor(y).fill_(2);
    }
    {
      const CudaTask task(compute, "wait", "block3");
      compute.wait(side.record());
      compute.fill_bytes("hidden", x.raw_data(), 0, 4);
    }
    compute.copy_bytes("late", x.raw_data(), y.raw_data(), 16);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate.open();
    profiler::stop();
    compute.copy_bytes("after", x.raw_data(), y.raw_data(), 16);
    const auto tasks = traced(compute);
    REQUIRE(tasks.size() == 3);
    CHECK(tasks[0].name == std::string("wait"));
    CHECK(tasks[0].unit == std::string());
    CHECK(tasks[1].name == std::string("wait"));
    CHECK(tasks[1].unit == std::string("block3"));
    CHECK(tasks[2].name == std::string("late"));
    for (size_t i = 0; i < tasks.size(); ++i) {
      CHECK(tasks[i].end_ns >= tasks[i].begin_ns);
      if (i > 0) CHECK(tasks[i].begin_ns >= tasks[i - 1].end_ns);
    }
    const auto fills = traced(side, "fill");
    REQUIRE(fills.size() == 1);
    constexpr int64_t kRounding_ns = 10'000;
    CHECK(tasks[1].end_ns - tasks[1].begin_ns >= 15'000'000);
    CHECK(fills[0].begin_ns >= tasks[0].end_ns - kRounding_ns);
    CHECK(tasks[1].end_ns >= fills[0].end_ns - kRounding_ns);
    int num_early = 0;
    for (const TraceEvent& e : profiler::events()) num_early += e.stream_id == short_id ? 1 : 0;
    CHECK(num_early == 1);
  }
  compute.synchronize();
  profiler::start();
  profiler::stop();
  CHECK(profiler::events().empty());
}

TEST_CASE("simt runtime: memory is cached, poisoned and given back", "[cuda][simt]") {
  const auto context = make_context();
  const Context::Scope scope(context);
  Allocator& allocator = *context->allocator();
  {
    const Tensor x = full({1 << 20}, 1);
    CHECK(allocator.stats().reserved >= 4 << 20);
  }
  const int64_t num_backend = allocator.stats().num_backend_allocations;
  {
    const Tensor x = empty({1 << 20});
    const double value = x.narrow(0, 12345, 1).to_vector()[0];
    CHECK(value != value);  // NaN
  }
  CHECK(allocator.stats().num_backend_allocations == num_backend);
  CHECK(allocator.stats().largest_free >= 4 << 20);
  allocator.empty_cache();
  CHECK(allocator.stats().reserved == 0);
  simt::set_device_capacity(8 << 20);
  contains(error_of([] { empty({16 << 20}); }), "out of memory on cuda:0: requested 64.0 MiB");
  simt::set_device_capacity(int64_t{4} << 30);
}

TEST_CASE("simt runtime: page-locked memory and copies in every direction", "[cuda][simt]") {
  const auto context = make_context();
  const Context::Scope scope(context);
  const Stream& s = context->compute();
  Storage host(4096, kCuda0), device(4096, kCuda0), back(4096, kCuda0);
  host.materialize(context->host_allocator(), s, MemoryClass::kOther);
  back.materialize(context->host_allocator(), s, MemoryClass::kOther);
  device.materialize();
  s.fill_bytes("fill", host.data(), 9, 4096);
  s.copy_bytes("up", device.data(), host.data(), 4096);
  s.copy_bytes("down", back.data(), device.data(), 4096);
  s.synchronize();
  CHECK(std::memcmp(back.data(), host.data(), 4096) == 0);
  CHECK(static_cast<char*>(back.data())[4095] == 9);
  std::vector<char> pageable(4096);
  contains(error_of([&] { s.copy_bytes("copy", device.data(), pageable.data(), 4096); }),
           "not inside one allocation");
  contains(error_of([&] {
             s.copy_bytes("copy", device.data(), static_cast<char*>(device.data()) + 1, 64);
           }),
           "the ranges overlap");
  CHECK(simt::take_mistakes().size() == 2);
}

void break_device(const Stream& stream) {
  CHECK(simt::submit(stream.cuda(), "kernel", {}, [] { throw simt::Error("bad_kernel: oops"); }) ==
        cudaSuccess);
}

TEST_CASE("simt runtime: of a device that is lost one line is logged", "[cuda][simt]") {
  simt::set_num_devices(10);
  const Device broken{DeviceType::kCuda, 9};  // its own, since it does not recover
  const std::string text = testing::stderr_of([&] {
    const std::unique_ptr<MemoryBackend> memory = make_cuda_backend(broken);
    void* const blocks[] = {memory->allocate(4096), memory->allocate(4096)};
    std::vector<Event> events;
    const Stream s = make_stream(broken, "lost");
    for (int i = 0; i < 5; ++i) events.push_back(s.record());
    break_device(s);
    s.drain();
    for (void* block : blocks) memory->free(block, 4096);
  });
  CHECK(text ==
        "error: lost: unspecified launch failure: bad_kernel: oops; the device is lost to this "
        "process, later calls that fail for this reason are not told\n");
  simt::set_num_devices(8);
  simt::take_mistakes();
}

TEST_CASE("simt runtime: what a kernel does wrong is the stream's error for good", "[cuda][simt]") {
  simt::set_num_devices(9);
  const Device broken{DeviceType::kCuda, 8};  // its own, since it does not recover
  {
    const Stream s = make_stream(broken, "s");
    break_device(s);
    const std::string text = error_of([&] { s.synchronize(); });
    contains(text, "unspecified launch failure: bad_kernel: oops (cudaErrorLaunchFailure)");
    CHECK(error_of([&] { s.synchronize(); }) == text);
    CHECK_THROWS_AS(s.record(), CudaError);
    CHECK_THROWS_AS(make_cuda_backend(broken)->allocate(4096), CudaError);
  }
  simt::set_num_devices(8);
  simt::take_mistakes();
}

TEST_CASE("simt runtime: an error that the host finds follows the streams", "[cuda][simt]") {
  const auto context = make_context();
  const Stream a = context->make_stream("a"), b = context->make_stream("b");
  const Stream c = context->make_stream("c");
  b.wait(a.record());
  c.wait(b.record());
  a.wait(c.record());  // in a circle
  const Event before = c.record();
  c.synchronize();
  poison_cuda_stream(a, std::make_exception_ptr(CommError("the network is gone")));
  poison_cuda_stream(a, std::make_exception_ptr(CommError("a later one")));
  for (const Stream& s : {a, b, c}) {
    CHECK(error_of([&] { s.synchronize(); }) == "the network is gone");
    CHECK(error_of([&] { s.record().synchronize(); }) == "the network is gone");
  }
  CHECK_NOTHROW(context->compute().synchronize());
  const Stream d = context->make_stream("d"), e = context->make_stream("e");
  e.wait(d.record());
  watch_cuda_stream(
      d, [&d] { poison_cuda_stream(d, std::make_exception_ptr(CommError("found late"))); });
  CHECK(error_of([&] { e.synchronize(); }) == "found late");
  contains(error_of([&] { poison_cuda_stream(make_stream({}, "cpu"), nullptr); }),
           "cuda: expected a CUDA stream, got one on cpu");
}

TEST_CASE("simt runtime: each thread rank has its device", "[cuda][simt]") {
  CHECK(device_from_name("cuda", 11).index == 3);
  CHECK(cuda_device_id({DeviceType::kCuda, 2}) != cuda_device_id({DeviceType::kCuda, 3}));
  const auto outer = make_context(2), context = make_context(5);
  const Context::Scope outer_scope(outer);
  {
    const Context::Scope scope(context);
    CHECK(full({3}, 2).to_vector() == std::vector<double>(3, 2));
  }
  int device = -1;  // of this thread, for the launches of the outer scope
  CHECK(cudaGetDevice(&device) == cudaSuccess);
  CHECK(device == 2);
  CHECK(full({3}, 2).to_vector() == std::vector<double>(3, 2));
  std::thread([&] {  // another thread, whose device is another
    context->compute().record().synchronize();
  })
      .join();
}

TEST_CASE("simt runtime: without a device auto is the CPU, and cuda one clear error",
          "[cuda][simt]") {
  simt::set_num_devices(0);
  CHECK(device_from_name("auto").type == DeviceType::kCpu);
  CHECK(error_of([] { device_from_name("cuda"); }) ==
        "device: \"cuda\" is not available: the NVIDIA driver sees no device");
  simt::set_num_devices(8);
}

TEST_CASE("simt runtime: a device that the kernels were not compiled for is none", "[cuda][simt]") {
  for (const int capability : {80, 86, 89, 90, 100, 120}) {  // the last two by PTX
    CAPTURE(capability);
    simt::set_compute_capability(capability);
    CHECK(device_from_name("auto").type == DeviceType::kCuda);
  }
  for (const int capability : {75, 60}) {
    simt::set_compute_capability(capability);
    CHECK(device_from_name("auto").type == DeviceType::kCpu);
    CHECK(error_of([] { device_from_name("cuda"); }) ==
          fmt::format(
              "device: \"cuda\" is not available: device 0 has compute capability {}.{}, this "
              "build has kernels for 8.0, 9.0 (option gpu_arch; CUDA_VISIBLE_DEVICES hides a "
              "device)",
              capability / 10, capability % 10));
  }
  simt::set_compute_capability(90);
}

TEST_CASE(
    "simt runtime: streams get hardware queues of their own, unless the user has said how many",
    "[cuda][simt]") {
  ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  probe_cuda();
  CHECK(std::string(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS")) == "32");
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  probe_cuda();
  CHECK(std::string(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS")) == "1");
}

// ----- planted: the fake finds what is wrong

TEST_CASE("planted: a wait for an event that was never recorded is caught", "[simt]") {
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0);
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  CHECK(cudaStreamWaitEvent(stream, event, 0) == cudaErrorInvalidValue);
  CHECK(cudaGetErrorString(cudaErrorInvalidValue) ==
        std::string("cudaStreamWaitEvent: the event was never recorded"));
  CHECK(cudaEventRecord(event, stream) == cudaSuccess);
  CHECK(cudaStreamWaitEvent(stream, event, 0) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(cudaEventDestroy(event) == cudaSuccess);
  CHECK(cudaEventQuery(event) == cudaErrorInvalidResourceHandle);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  CHECK(simt::take_mistakes().size() == 2);
  cudaGetLastError();
}

TEST_CASE(
    "planted: memory freed while a copy uses it, and a stream destroyed with work, are caught",
    "[simt]") {
  cudaSetDevice(0);
  cudaStream_t stream = nullptr;
  void *device = nullptr, *host = nullptr;
  cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0);
  cudaMalloc(&device, 1000);
  cudaHostAlloc(&host, 1000, 0);
  std::atomic<bool> is_open{false};
  simt::submit(stream, "gate", {}, [&] {
    while (!is_open) std::this_thread::yield();
  });
  cudaMemcpyAsync(device, host, 1000, cudaMemcpyDefault, stream);
  CHECK(cudaFree(device) == cudaErrorInvalidValue);
  CHECK(cudaFreeHost(host) == cudaErrorInvalidValue);
  auto mistakes = simt::take_mistakes();
  REQUIRE(mistakes.size() == 2);
  CHECK(mistakes[0] == "cudaFree: cudaMemcpyAsync still uses the memory");
  CHECK(mistakes[1] == "cudaFreeHost: cudaMemcpyAsync still uses the memory");
  is_open = true;
  cudaStreamSynchronize(stream);
  CHECK(cudaFree(device) == cudaSuccess);
  CHECK(cudaFree(device) == cudaErrorInvalidValue);
  CHECK(cudaFreeHost(host) == cudaSuccess);
  is_open = false;
  simt::submit(stream, "gate", {}, [&] {
    while (!is_open) std::this_thread::yield();
  });
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    is_open = true;
  });
  CHECK(cudaStreamDestroy(stream) == cudaErrorInvalidValue);
  opener.join();
  mistakes = simt::take_mistakes();
  REQUIRE(mistakes.size() == 2);
  contains(mistakes[1], "cudaStreamDestroy: 1 tasks are not finished on device 0");
  cudaGetLastError();
}

/// Runs `body` in a process of its own; its exit status.
template <class F>
int status_of_child(const F& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    close(STDERR_FILENO);
    body();
    std::exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_CASE("planted: a leak of memory, a stream or an event is caught at the end", "[simt]") {
  cudaSetDevice(0);
  CHECK(simt::live_objects().empty());
  CHECK(status_of_child([] {}) == 0);
  CHECK(status_of_child([] {
          void* data = nullptr;
          cudaMalloc(&data, 64);
        }) == simt::kLeakStatus);
  CHECK(status_of_child([] {
          cudaEvent_t event = nullptr;
          cudaEventCreateWithFlags(&event, 0);
        }) == simt::kLeakStatus);
  CHECK(status_of_child([] {
          void* data = nullptr;
          cudaHostAlloc(&data, 64, 0);
        }) == simt::kLeakStatus);
  void* data = nullptr;
  cudaMalloc(&data, 64);
  CHECK(simt::live_objects() == std::vector<std::string>{"64 bytes of device 0"});
  cudaFree(data);
}

}  // namespace
}  // namespace tessera
