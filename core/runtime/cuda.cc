#include "core/runtime/cuda.h"

#include "core/log.h"
#if defined(TESSERA_CUDA)
#include "core/runtime/cuda/check.h"
#endif

namespace tessera {

#if defined(TESSERA_CUDA)

namespace cuda {

void fail(const char* call, cudaError_t error, const char* file, int line) {
  cudaGetLastError();
  detail::fail<CudaError>(file, line, "{}: {} ({})", call, cudaGetErrorString(error),
                          cudaGetErrorName(error));
}

}  // namespace cuda

namespace {

/// For destructors: the error is logged and gone.
void log_failure(const char* what, cudaError_t error) noexcept {
  // At the end of the process the runtime may be gone before the last owner is.
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  cudaGetLastError();
  log_error("{}: {}", what, cudaGetErrorString(error));
}

class CudaEvent final : public EventImpl {
 public:
  explicit CudaEvent(cudaStream_t stream) {
    TESSERA_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    if (const cudaError_t error = cudaEventRecord(event_, stream); error != cudaSuccess) {
      log_failure("cudaEventDestroy", cudaEventDestroy(event_));
      cuda::fail("cudaEventRecord(event, stream)", error, __FILE__, __LINE__);
    }
  }
  ~CudaEvent() override { log_failure("cudaEventDestroy", cudaEventDestroy(event_)); }

  // A failed stream is done: `synchronize` tells.
  bool is_done() const override { return cudaEventQuery(event_) != cudaErrorNotReady; }
  void synchronize() const override { TESSERA_CUDA_CHECK(cudaEventSynchronize(event_)); }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

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
  }
  ~CudaStream() override {
    drain();
    log_failure("cudaStreamDestroy", cudaStreamDestroy(stream_));
  }

  void submit(const char* task_name, Task) override {
    TESSERA_UNIMPLEMENTED("{}: host tasks do not run on device {}", task_name, device);
  }
  void fill_bytes(const char*, void* data, unsigned char value, size_t nbytes) override {
    TESSERA_CUDA_CHECK(cudaMemsetAsync(data, value, nbytes, stream_));
  }
  Event record() override { return Event(std::make_shared<CudaEvent>(stream_)); }
  void wait(const Event& event) override {
    const auto* target = dynamic_cast<const CudaEvent*>(event.impl());
    TESSERA_CHECK(target != nullptr, "Stream::wait: the event is of another device than {}",
                  device);
    TESSERA_CUDA_CHECK(cudaStreamWaitEvent(stream_, target->get(), 0));
  }
  void synchronize() override { TESSERA_CUDA_CHECK(cudaStreamSynchronize(stream_)); }
  void drain() noexcept override { log_failure(name.c_str(), cudaStreamSynchronize(stream_)); }
  CUstream_st* cuda() const override { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

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
  void free(void* data, size_t) noexcept override { log_failure("cudaFree", cudaFree(data)); }

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
    log_failure("cudaFreeHost", cudaFreeHost(data));
  }

 private:
  const Device device_;
};

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

/// Why no device can be used, or empty.
std::string find_problem(int* num_devices) {
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

void use_cuda_device(Device device) {
  TESSERA_CUDA_CHECK(cudaSetDevice(device.index));
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

#endif

}  // namespace tessera
