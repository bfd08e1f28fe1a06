#include "core/runtime/cuda/cuda.h"

#include "core/runtime/context.h"
#include "core/runtime/cuda/library.h"
#include "core/runtime/order_check.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::error_of;

constexpr Device kCuda0{DeviceType::kCuda, 0};

/// The rest of a test needs a device; says so where there is none.
bool has_device() {
  const CudaProbe probe = probe_cuda();
  if (probe.num_devices == 0) WARN("skipped: " << probe.problem);
  return probe.num_devices != 0;
}

TEST_CASE("cuda: auto takes the CPU where CUDA cannot be used", "[cuda]") {
  const CudaProbe probe = probe_cuda();
  const Device device = device_from_name("auto", 0);
  CHECK((device.type == DeviceType::kCpu) == !probe.problem.empty());
}

TEST_CASE("cuda: asking for it says in one line why it cannot be used", "[cuda]") {
  const CudaProbe probe = probe_cuda();
  if (probe.problem.empty()) {
    CHECK(device_from_name("cuda", 1).index == 1 % probe.num_devices);
    return;
  }
  CHECK_THROWS_AS(device_from_name("cuda"), ConfigError);
  const std::string text = error_of([] { device_from_name("cuda"); });
  CHECK(text == "device: \"cuda\" is not available: " + probe.problem);
  CHECK(text.find('\n') == std::string::npos);
  if (!probe.is_built) CHECK(probe.problem == "this build has no CUDA");
}

TEST_CASE("cuda: a stream without the device is an error that names the call", "[cuda]") {
  const CudaProbe probe = probe_cuda();
  if (probe.num_devices > 0) return;
  const std::string text = error_of([] { make_stream(kCuda0, "compute"); });
  INFO(text);
  if (probe.is_built) {
    CHECK_THROWS_AS(make_stream(kCuda0, "compute"), CudaError);
    CHECK(text.find("cudaSetDevice(device.index): ") == 0);
    CHECK(text.find("(cudaError") != std::string::npos);
    CHECK(text.find(" core/runtime/cuda/cuda.cc:") != std::string::npos);
    CHECK_THROWS_AS(make_cuda_backend(kCuda0)->allocate(4096), CudaError);
    CHECK_THROWS_AS(make_pinned_backend(kCuda0)->allocate(4096), CudaError);
  } else {
    CHECK_THROWS_AS(make_stream(kCuda0, "compute"), UnimplementedError);
    CHECK(text.find("make_stream: this build has no device cuda:0 ") == 0);
    CHECK(error_of([] {
            make_cuda_backend(kCuda0);
          }).find("make_cuda_backend: this build has no device cuda:0 ") == 0);
    CHECK(error_of([] {
            make_pinned_backend(kCuda0);
          }).find("make_pinned_backend: this build has no device cuda:0 ") == 0);
    CHECK(error_of([] {
            use_cuda_device(kCuda0);
          }).find("use_cuda_device: this build has no device cuda:0 ") == 0);
  }
  CHECK_THROWS_AS(Context(ContextOptions{.device = kCuda0}), Error);
}

TEST_CASE("cuda: only streams of CUDA have spans and timelines", "[cuda]") {
  const Stream s = make_stream({}, "cpu");
  const std::string span = error_of([&] { CudaSpan{s}; }),
                    timeline = error_of([&] { timeline_of(s); });
  if (probe_cuda().is_built) {
    CHECK(span.find("cuda: expected a CUDA stream, got one on cpu") == 0);
    CHECK(timeline.find("cuda: expected a CUDA stream, got one on cpu") == 0);
  } else {
    CHECK(span.find("CudaSpan: this build has no CUDA, the stream is on cpu") == 0);
    CHECK(timeline.find("timeline_of: this build has no CUDA, the stream is on cpu") == 0);
  }
}

TEST_CASE("cuda: streams, events and memory of a context on the device", "[cuda]") {
  if (!has_device()) return;
  const auto context = std::make_shared<Context>(
      ContextOptions{.device = kCuda0, .poison = true, .order_check = true});
  const Context::Scope scope(context);
  const Stream& compute = context->compute();
  const Stream side = context->make_stream("side", {.high_priority = true});
  CHECK(compute.cuda() != nullptr);
  CHECK(compute.cuda() != side.cuda());
  auto* block = context->allocator()->allocate(1 << 20, compute, MemoryClass::kOther);
  auto* host = context->host_allocator()->allocate(1 << 20, compute, MemoryClass::kOther);
  compute.fill_bytes("fill", Allocator::data(block), 1, 1 << 20);
  const Event filled = compute.record();
  side.wait(filled);
  side.fill_bytes("fill", Allocator::data(block), 2, 1 << 20);
  compute.wait(side.record());
  compute.fill_bytes("fill", Allocator::data(host), 7, 1 << 20);
  compute.synchronize();
  CHECK(filled.is_done());
  CHECK(static_cast<unsigned char*>(Allocator::data(host))[12345] == 7);
  context->allocator()->free(block);
  context->host_allocator()->free(host);
  compute.synchronize();
  context->order_check()->throw_if_conflicts();
  CHECK(error_of([&] {
          compute.submit("task", [] {});
        }).find("task: host tasks do not run on device cuda:0") == 0);
  CHECK(error_of([&] {
          compute.wait(make_stream({}, "cpu").record());
        }).find("Stream::wait: the event is of another device than cuda:0") == 0);
}

TEST_CASE("cuda: running out of device memory is the allocator's error", "[cuda]") {
  if (!has_device()) return;
  const auto context = std::make_shared<Context>(ContextOptions{.device = kCuda0});
  CHECK(error_of([&] {
          context->allocator()->allocate(size_t{1} << 50, context->compute(), MemoryClass::kOther);
        }).find("out of memory on cuda:0: requested 1024.0 TiB") == 0);
}

TEST_CASE("cuda: a library that is missing is named, with what to do", "[cuda]") {
  std::string problem;
  CHECK(cuda::open_library("libnone.so.1", "TESSERA_TEST_LIBRARY", &problem) == nullptr);
  CHECK(problem ==
        "libnone.so.1 cannot be loaded (install it, or name its file in TESSERA_TEST_LIBRARY)");
  // The variable says which file, whatever is installed.
  setenv("TESSERA_TEST_LIBRARY", "/nowhere/lib.so", 1);
  CHECK(cuda::open_library("libc.so.6", "TESSERA_TEST_LIBRARY", &problem) == nullptr);
  CHECK(problem ==
        "/nowhere/lib.so cannot be loaded (install it, or name its file in TESSERA_TEST_LIBRARY)");
  setenv("TESSERA_TEST_LIBRARY", "libc.so.6", 1);
  CHECK(cuda::open_library("libnone.so.1", "TESSERA_TEST_LIBRARY", &problem) != nullptr);
  unsetenv("TESSERA_TEST_LIBRARY");
  CHECK(cuda::open_library("libc.so.6", "TESSERA_TEST_LIBRARY", &problem) != nullptr);
}

}  // namespace
}  // namespace tessera
