#include "core/runtime/cuda/cuda.h"

#include "core/log.h"
#include "core/runtime/cuda/device_name.h"
#if defined(TESSERA_CUDA)
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "core/runtime/cuda/check.h"
#include "core/runtime/cuda/timing.h"
#include "core/runtime/unwinding.h"
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif
#endif

namespace tessera {

#if defined(TESSERA_CUDA)

namespace cuda {

namespace {

/// Whether `error` is one of those after which the process must be started anew.
bool is_lasting(cudaError_t error) {
  constexpr std::array kLasting = {cudaErrorECCUncorrectable,    cudaErrorIllegalAddress,
                                   cudaErrorLaunchTimeout,       cudaErrorHardwareStackError,
                                   cudaErrorIllegalInstruction,  cudaErrorMisalignedAddress,
                                   cudaErrorInvalidAddressSpace, cudaErrorInvalidPc,
                                   cudaErrorLaunchFailure,       cudaErrorAssert,
                                   cudaErrorContextIsDestroyed};
  return std::find(kLasting.begin(), kLasting.end(), error) != kLasting.end();
}

/// True for all but the first of those: every later call returns it again, so each event, stream and
/// block of a broken device would tell it.
bool was_told(cudaError_t error) {
  static std::atomic<bool> is_broken = false;
  return is_lasting(error) && is_broken.exchange(true);
}

}  // namespace

void fail(const char* call, cudaError_t error, const char* file, int line) {
  cudaGetLastError();
  was_told(error);
  detail::fail<CudaError>(file, line, "{}: {} ({})", call, cudaGetErrorString(error),
                          cudaGetErrorName(error));
}

void log_failure(const char* call, cudaError_t error) noexcept {
  // At the end of the process the runtime may be gone before the last owner is.
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  cudaGetLastError();
  if (was_told(error)) return;
  log_error("{}: {}{}", call, cudaGetErrorString(error),
            is_lasting(error)
                ? "; the device is lost to this process, later calls that fail for this "
                  "reason are not told"
                : "");
}

}  // namespace cuda

namespace {

// The runtime carries its own errors along streams. What the host finds (a collective that was
// aborted) it lays down here: streams remember whose events they have waited for, and a search at
// `synchronize` goes from stream to stream.
class ErrorCell {
 public:
  void set(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) error_ = std::move(error);
  }

  void add_watch(std::function<void()> watch) {
    const std::lock_guard lock(mutex_);
    watches_.push_back(std::move(watch));
  }

  void add_upstream(const std::shared_ptr<ErrorCell>& cell) {
    const std::lock_guard lock(mutex_);
    std::erase_if(upstream_, [](const auto& weak) { return weak.expired(); });
    const bool is_known = std::any_of(upstream_.begin(), upstream_.end(), [&](const auto& weak) {
      return !weak.owner_before(cell) && !cell.owner_before(weak);
    });
    if (cell.get() != this && !is_known) upstream_.push_back(cell);
  }

  static void rethrow(const std::shared_ptr<ErrorCell>& first) {
    std::vector<std::shared_ptr<ErrorCell>> cells = {first};
    for (size_t i = 0; i < cells.size(); ++i) {
      const std::shared_ptr<ErrorCell> cell = cells[i];
      for (const auto& watch : cell->watches()) watch();  // may lay an error down
      const std::lock_guard lock(cell->mutex_);
      if (cell->error_ != nullptr) std::rethrow_exception(cell->error_);
      for (const auto& weak : cell->upstream_) {
        const std::shared_ptr<ErrorCell> next = weak.lock();
        if (next != nullptr && std::find(cells.begin(), cells.end(), next) == cells.end())
          cells.push_back(next);
      }
    }
  }

 private:
  std::vector<std::function<void()>> watches() {
    const std::lock_guard lock(mutex_);
    return watches_;
  }

  std::mutex mutex_;
  std::exception_ptr error_;
  std::vector<std::function<void()>> watches_;
  std::vector<std::weak_ptr<ErrorCell>> upstream_;
};

class CudaEvent final : public EventImpl {
 public:
  CudaEvent(Device device, cudaStream_t stream, std::shared_ptr<ErrorCell> errors)
      : device_(device), errors_(std::move(errors)) {
    use_cuda_device(device_);  // an event belongs to the thread's device
    TESSERA_CUDA_CHECK(
        cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync));
    if (const cudaError_t error = cudaEventRecord(event_, stream); error != cudaSuccess) {
      cuda::log_failure("cudaEventDestroy", cudaEventDestroy(event_));
      cuda::fail("cudaEventRecord(event, stream)", error, __FILE__, __LINE__);
    }
  }
  ~CudaEvent() override {
    ensure_cuda_device(device_);
    cuda::log_failure("cudaEventDestroy", cudaEventDestroy(event_));
  }

  // A failed stream is done: `synchronize` tells.
  bool is_done() const override {
    ensure_cuda_device(device_);
    return cudaEventQuery(event_) != cudaErrorNotReady;
  }
  void synchronize() const override {
    ensure_cuda_device(device_);
    TESSERA_CUDA_CHECK(cudaEventSynchronize(event_));
    ErrorCell::rethrow(errors_);
  }
  cudaEvent_t get() const { return event_; }
  const std::shared_ptr<ErrorCell>& errors() const { return errors_; }

 private:
  const Device device_;
  cudaEvent_t event_ = nullptr;
  const std::shared_ptr<ErrorCell> errors_;
};

/// Tools that read NVTX ranges put themselves into the process by these variables.
void show_spans_to_tool() {
#if __has_include(<nvtx3/nvToolsExt.h>)
  static const bool has_tool = [] {
    if (std::getenv("NVTX_INJECTION64_PATH") == nullptr &&
        std::getenv("CUDA_INJECTION64_PATH") == nullptr) {
      return false;
    }
    profiler::set_span_sink(
        {[](const char* name) { nvtxRangePushA(name); }, [] { nvtxRangePop(); }});
    return true;
  }();
  static_cast<void>(has_tool);
#endif
}

class CudaStream final : public StreamImpl {
 public:
  CudaStream(Device stream_device, std::string stream_name, const StreamOptions& options)
      : StreamImpl(stream_device, std::move(stream_name)) {
    observer = options.observer;
    use_cuda_device(device);
    int lowest = 0, highest = 0;
    TESSERA_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    TESSERA_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                                    options.high_priority ? highest : lowest));
    show_spans_to_tool();
    timeline_ = make_cuda_timeline(device, id, stream_);
    profiler::name_stream(id, name);
  }
  ~CudaStream() override {
    wait_while_unwinding(*this, num_exceptions_);
    timeline_->close();
    drain();  // which sets a device
    cuda::log_failure("cudaStreamDestroy", cudaStreamDestroy(stream_));
  }

  void submit(const char* task_name, Task) override {
    TESSERA_UNIMPLEMENTED("{}: host tasks do not run on device {}", task_name, device);
  }
  void fill_bytes(const char* task, void* data, unsigned char value, size_t nbytes) override {
    ensure_cuda_device(device);
    const CudaTask traced(timeline_, task);
    TESSERA_CUDA_CHECK(cudaMemsetAsync(data, value, nbytes, stream_));
  }
  void copy_bytes(const char* task, void* dst, const void* src, size_t nbytes) override {
    ensure_cuda_device(device);
    const CudaTask traced(timeline_, task);
    TESSERA_CUDA_CHECK(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream_));
  }
  Event record() override { return Event(std::make_shared<CudaEvent>(device, stream_, errors_)); }
  void wait(const Event& event) override {
    const auto* target = dynamic_cast<const CudaEvent*>(event.impl());
    TESSERA_CHECK(target != nullptr, "Stream::wait: the event is of another device than {}",
                  device);
    ensure_cuda_device(device);
    const CudaTask traced(timeline_, "wait");
    TESSERA_CUDA_CHECK(cudaStreamWaitEvent(stream_, target->get(), 0));
    errors_->add_upstream(target->errors());
  }
  void synchronize() override {
    ensure_cuda_device(device);
    TESSERA_CUDA_CHECK(cudaStreamSynchronize(stream_));
    ErrorCell::rethrow(errors_);
  }
  void drain() noexcept override {
    wait_while_unwinding(*this, num_exceptions_);
    ensure_cuda_device(device);
    cuda::log_failure(name.c_str(), cudaStreamSynchronize(stream_));
  }
  CUstream_st* cuda() const override { return stream_; }
  const std::shared_ptr<ErrorCell>& errors() const { return errors_; }
  const std::shared_ptr<CudaTimeline>& timeline() const { return timeline_; }

 private:
  const int num_exceptions_ = std::uncaught_exceptions();
  cudaStream_t stream_ = nullptr;
  const std::shared_ptr<ErrorCell> errors_ = std::make_shared<ErrorCell>();
  std::shared_ptr<CudaTimeline> timeline_;
};

CudaStream& cuda_stream_of(const Stream& stream) {
  auto* impl = dynamic_cast<CudaStream*>(stream.impl());
  TESSERA_CHECK(impl != nullptr, "cuda: expected a CUDA stream, got one on {}", stream.device());
  return *impl;
}

}  // namespace

const std::shared_ptr<CudaTimeline>& timeline_of(const Stream& stream) {
  return cuda_stream_of(stream).timeline();
}

namespace {

// cuStreamWaitValue32 of the driver, which is not linked: a build with CUDA starts without one.
using WaitValue32 = int (*)(CUstream_st* stream, uint64_t address, uint32_t value, unsigned flags);
constexpr unsigned kWaitGreaterOrEqual = 0;  // CU_STREAM_WAIT_VALUE_GEQ, cyclic

WaitValue32 find_wait_value() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned kVersion = 12000;
  TESSERA_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function, kVersion,
                                                      cudaEnableDefault, &found));
  TESSERA_CHECK_AS(CudaError, found == cudaDriverEntryPointSuccess && function != nullptr,
                   "cuda: the driver has no cuStreamWaitValue32, expected CUDA 12 or newer");
  return reinterpret_cast<WaitValue32>(function);
}

/// Null for out of memory, which is the allocator's to report; other errors are not.
void* memory_or_null(void* data, const char* call, cudaError_t error, int line) {
  if (error == cudaSuccess) return data;
  if (error != cudaErrorMemoryAllocation) cuda::fail(call, error, __FILE__, line);
  cudaGetLastError();
  return nullptr;
}

class CudaBackend final : public MemoryBackend {
 public:
  explicit CudaBackend(Device device) : device_(device) {}
  void* allocate(size_t nbytes) override {
    use_cuda_device(device_);
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, nbytes);
    return memory_or_null(data, "cudaMalloc(&data, nbytes)", error, __LINE__);
  }
  void free(void* data, size_t) noexcept override {
    ensure_cuda_device(device_);
    cuda::log_failure("cudaFree", cudaFree(data));
  }

 private:
  const Device device_;
};

class PinnedBackend final : public MemoryBackend {
 public:
  explicit PinnedBackend(Device device) : device_(device) {}
  void* allocate(size_t nbytes) override {
    use_cuda_device(device_);
    void* data = nullptr;
    const cudaError_t error = cudaHostAlloc(&data, nbytes, cudaHostAllocPortable);
    return memory_or_null(data, "cudaHostAlloc(&data, nbytes)", error, __LINE__);
  }
  void free(void* data, size_t) noexcept override {
    ensure_cuda_device(device_);
    cuda::log_failure("cudaFreeHost", cudaFreeHost(data));
  }

 private:
  const Device device_;
};

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

#if TESSERA_CUDA_KERNELS
/// Compute capabilities, 10 major + minor, that the kernels were compiled for, ascending.
constexpr std::array kArchs = {TESSERA_GPU_ARCHS};

/// Why the kernels cannot run on a device, or empty. Machine code runs where the major number is the
/// same and the minor one not smaller; of the last there is PTX, which the driver compiles for what is
/// newer.
std::string find_problem_of_device(int device) {
  int major = 0, minor = 0;
  TESSERA_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  TESSERA_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  const int capability = 10 * major + minor;
  const bool fits = capability >= kArchs.back() ||
                    std::any_of(kArchs.begin(), kArchs.end(),
                                [&](int arch) { return arch / 10 == major && arch <= capability; });
  if (fits) return "";
  std::string archs;
  for (const int arch : kArchs)
    archs += fmt::format("{}{}.{}", archs.empty() ? "" : ", ", arch / 10, arch % 10);
  return fmt::format(
      "device {} has compute capability {}.{}, this build has kernels for {} (option gpu_arch; "
      "CUDA_VISIBLE_DEVICES hides a device)",
      device, major, minor, archs);
}
#endif

/// Ranks with a gate in a stream hold one of the device's hardware queues; streams beyond their number
/// share them, and one that a gate holds up would hold up another that must open it. The variable is
/// read when the context is made; one that is set stays.
void ask_for_hardware_queues() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
}

/// Why no device can be used, or empty.
std::string find_problem(int* num_devices) {
  ask_for_hardware_queues();
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
    return "no NVIDIA driver is installed";
  const cudaError_t error = cudaGetDeviceCount(num_devices);
  cudaGetLastError();
  if (error == cudaErrorInsufficientDriver)
    return fmt::format("the NVIDIA driver is for CUDA {}, this build needs {}",
                       version_text(driver), version_text(CUDART_VERSION));
  if (error == cudaErrorNoDevice || (error == cudaSuccess && *num_devices == 0))
    return "the NVIDIA driver sees no device";
  if (error != cudaSuccess) return fmt::format("CUDA says: {}", cudaGetErrorString(error));
#if !TESSERA_CUDA_KERNELS
  return "this build has no CUDA kernels";
#else
  for (int device = 0; device < *num_devices; ++device) {
    if (std::string problem = find_problem_of_device(device); !problem.empty()) return problem;
  }
  return "";
#endif
}

}  // namespace

CudaProbe probe_cuda() {
  CudaProbe probe{.is_built = true};
  probe.problem = find_problem(&probe.num_devices);
  return probe;
}

Stream make_cuda_stream(Device device, std::string name, const StreamOptions& options) {
  return Stream(std::make_shared<CudaStream>(device, std::move(name), options));
}

std::unique_ptr<MemoryBackend> make_cuda_backend(Device device) {
  return std::make_unique<CudaBackend>(device);
}

std::unique_ptr<MemoryBackend> make_pinned_backend(Device device) {
  return std::make_unique<PinnedBackend>(device);
}

namespace {
thread_local bool has_device = false;
}

void use_cuda_device(Device device) {
  TESSERA_CUDA_CHECK(cudaSetDevice(device.index));
  has_device = true;
}

void ensure_cuda_device(Device device) noexcept {
  if (has_device) return;
  const cudaError_t error = cudaSetDevice(device.index);
  has_device = error == cudaSuccess;
  cuda::log_failure("cudaSetDevice", error);
}

std::string cuda_device_id(Device device) {
  char bus_id[32] = {};
  TESSERA_CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device.index));
  return bus_id;
}

std::string cuda_device_name(Device device) {
  if (device.type != DeviceType::kCuda) return name_of(device);
  cudaDeviceProp properties{};
  TESSERA_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index));
  return fmt::format("{} ({}.{})", properties.name, properties.major, properties.minor);
}

void poison_cuda_stream(const Stream& stream, std::exception_ptr error) {
  cuda_stream_of(stream).errors()->set(std::move(error));
}

void watch_cuda_stream(const Stream& stream, std::function<void()> watch) {
  cuda_stream_of(stream).errors()->add_watch(std::move(watch));
}

HostGate::HostGate(Device device) : backend_(make_pinned_backend(device)) {
  static constexpr size_t kNbytes = 4096;
  flag_ = static_cast<uint32_t*>(backend_->allocate(kNbytes));
  TESSERA_CHECK_AS(OutOfMemoryError, flag_ != nullptr, "cuda: no page-locked host memory");
  __atomic_store_n(flag_, 0, __ATOMIC_RELEASE);
}

HostGate::~HostGate() {
  backend_->free(flag_, 4096);
}

uint32_t HostGate::wait_on(const Stream& stream) {
  ensure_cuda_device(stream.device());
  static const WaitValue32 wait_value = find_wait_value();
  const uint32_t ticket = ++num_waits_;
  const int error =
      wait_value(stream.cuda(), reinterpret_cast<uint64_t>(flag_), ticket, kWaitGreaterOrEqual);
  TESSERA_CHECK_AS(CudaError, error == 0, "cuStreamWaitValue32: error {}", error);
  return ticket;
}

void HostGate::open(uint32_t ticket) noexcept {
  __atomic_store_n(flag_, ticket, __ATOMIC_RELEASE);
}

#else  // a build without CUDA

namespace {
[[noreturn]] void fail_absent(const char* op, Device device) {
  TESSERA_UNIMPLEMENTED("{}: this build has no device {}", op, device);
}
}  // namespace

CudaProbe probe_cuda() {
  return {.is_built = false, .num_devices = 0, .problem = "this build has no CUDA"};
}
Stream make_cuda_stream(Device device, std::string, const StreamOptions&) {
  fail_absent("make_stream", device);
}
std::unique_ptr<MemoryBackend> make_cuda_backend(Device device) {
  fail_absent("make_cuda_backend", device);
}
std::unique_ptr<MemoryBackend> make_pinned_backend(Device device) {
  fail_absent("make_pinned_backend", device);
}
void use_cuda_device(Device device) {
  fail_absent("use_cuda_device", device);
}
void ensure_cuda_device(Device) noexcept {}
std::string cuda_device_id(Device device) {
  fail_absent("cuda_device_id", device);
}
std::string cuda_device_name(Device device) {
  return name_of(device);
}
void poison_cuda_stream(const Stream& stream, std::exception_ptr) {
  fail_absent("poison_cuda_stream", stream.device());
}
void watch_cuda_stream(const Stream& stream, std::function<void()>) {
  fail_absent("watch_cuda_stream", stream.device());
}
HostGate::HostGate(Device device) {
  fail_absent("HostGate", device);
}
HostGate::~HostGate() = default;
uint32_t HostGate::wait_on(const Stream& stream) {
  fail_absent("HostGate", stream.device());
}
void HostGate::open(uint32_t) noexcept {}

#endif

}  // namespace tessera
