#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "core/profiler.h"
#include "core/runtime/allocator.h"
#include "core/runtime/stream.h"

// The CUDA half of the device seam: streams, events and memory over the CUDA runtime. A build
// without CUDA has the same functions; they throw UnimplementedError.

struct CUevent_st;

namespace tessera {

/// What stands between this process and a CUDA device.
struct CudaProbe {
  bool is_built = false;  ///< the build has the CUDA runtime
  int num_devices = 0;
  std::string problem =
      {};  ///< one clause: "no NVIDIA driver is installed"; empty if CUDA can be used
};
CudaProbe probe_cuda();

/// A CUDA stream that does not wait for the default stream. Kernels are launched on
/// `Stream::cuda()`; `submit` throws, as host functions do not run in it. Errors of kernels are
/// rethrown by `synchronize`, as CudaError.
Stream make_cuda_stream(Device device, std::string name, const StreamOptions& options);
/// cudaMalloc; null when the device is out of memory.
std::unique_ptr<MemoryBackend> make_cuda_backend(Device device);
/// Page-locked host memory, visible to all devices.
std::unique_ptr<MemoryBackend> make_pinned_backend(Device device);
/// Makes `device` the current one of this thread, as launches on its streams need.
void use_cuda_device(Device device);
/// The same if this thread has none yet: for calls that go by a stream, an event or an address, and
/// from any thread (watchdogs, writers, last owners). The runtime would make its context on device
/// 0 for them, half a GiB that is another rank's.
void ensure_cuda_device(Device device) noexcept;
/// The device's place on the bus of its machine: equal for ranks that share a device.
std::string cuda_device_id(Device device);

/// Makes `error` the stream's from now on, as that of a failed task would be: `synchronize` of the
/// stream, and of streams and events that have waited for it, rethrow it. What is queued still
/// runs. For errors that the host finds. Any thread.
void poison_cuda_stream(const Stream& stream, std::exception_ptr error);
/// Calls `watch` whenever the host has waited for the stream, or for one that has waited for it,
/// before it looks for errors: to find what went wrong meanwhile. Any thread.
void watch_cuda_stream(const Stream& stream, std::function<void()> watch);

class CudaTimeline;
class TimingPool;
const std::shared_ptr<CudaTimeline>& timeline_of(const Stream& stream);  // of a CUDA stream

/// The time that a CUDA stream takes from one of its points to a later one; see [Note: Times of
/// CUDA streams] (cuda_timing.h). Any thread; the stream may go before it.
class CudaSpan {
 public:
  CudaSpan() = default;                     ///< of no stream: 0 ms
  explicit CudaSpan(const Stream& stream);  ///< begins after what the stream has been given
  CudaSpan(CudaSpan&& other) noexcept;
  CudaSpan& operator=(CudaSpan&& other) noexcept;
  ~CudaSpan();

  void end();  ///< once, while the stream is there
  /// Milliseconds. Blocks until the stream has passed the end; 0 without one.
  double ms() const;

 private:
  friend class CudaTask;
  friend class CudaTimeline;
  explicit CudaSpan(const CudaTimeline& timeline);

  std::shared_ptr<TimingPool> pool_;
  CUstream_st* stream_ = nullptr;
  CUevent_st *begin_ = nullptr, *end_ = nullptr;
};

/// What a CUDA stream is given in this scope, as one task of the profiler's timeline. Nothing
/// unless the profiler is on, nor inside of another one. The names must live for ever; `unit` is
/// what it is for.
class CudaTask {
 public:
  CudaTask(const Stream& stream, const char* name, const char* unit = "") {
    if (profiler::is_on()) [[unlikely]]
      begin(timeline_of(stream), name, unit);
  }
  CudaTask(const std::shared_ptr<CudaTimeline>& timeline, const char* name) {
    if (profiler::is_on()) [[unlikely]]
      begin(timeline, name, "");
  }
  ~CudaTask() {
    if (timeline_ != nullptr) [[unlikely]]
      end();
  }
  CudaTask(const CudaTask&) = delete;
  CudaTask& operator=(const CudaTask&) = delete;

 private:
  void begin(const std::shared_ptr<CudaTimeline>& timeline, const char* name, const char* unit);
  void end() noexcept;

  std::shared_ptr<CudaTimeline> timeline_;
  CudaSpan span_;
  const char* name_ = nullptr;
  const char* unit_ = nullptr;
  int32_t label_ = 0;
};

/// A gate in a CUDA stream that a thread of the host opens: the stream stands there, the host does
/// not. Gates are opened in the order in which they were waited on. The owner drains the stream
/// before it goes.
class HostGate {
 public:
  explicit HostGate(Device device);
  ~HostGate();
  HostGate(const HostGate&) = delete;
  HostGate& operator=(const HostGate&) = delete;

  /// What is submitted to `stream` from now on runs after `open` with the result.
  uint32_t wait_on(const Stream& stream);
  void open(uint32_t ticket) noexcept;  ///< any thread

 private:
  std::unique_ptr<MemoryBackend> backend_;
  uint32_t* flag_ = nullptr;  // page-locked; the last gate that is open
  uint32_t num_waits_ = 0;
};

}  // namespace tessera
