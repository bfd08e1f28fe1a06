#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "core/runtime/cuda/cuda.h"

// [Note: Times of CUDA streams]
// A stream is timed by events that the host puts into it and reads later, when it has passed them:
// no call here waits but `CudaSpan::ms` and the end of a trace. Events with a time are kept by
// their stream and used again. Between two events of a device the runtime gives milliseconds as a
// float, so a timeline is a chain from each event to the next; the last link of the chain is one
// base event a device, whose time the host reads as it comes back from waiting for it.

namespace tessera {

/// Timing events of one stream, made when none is idle. Any thread.
class TimingPool {
 public:
  explicit TimingPool(Device device) : device_(device) {}
  ~TimingPool();
  TimingPool(const TimingPool&) = delete;
  TimingPool& operator=(const TimingPool&) = delete;

  Device device() const { return device_; }
  cudaEvent_t take();
  void give_back(cudaEvent_t event) noexcept;

 private:
  const Device device_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> idle_;
};

/// The tasks of one stream while the profiler is on.
class CudaTimeline {
 public:
  CudaTimeline(Device device, int stream_id, cudaStream_t stream);

  const std::shared_ptr<TimingPool>& pool() const { return pool_; }
  Device device() const { return device_; }
  cudaStream_t stream() const { return stream_; }
  void add(const char* name, const char* unit, int32_t label, CudaSpan span);

  /// A point of a device and the host's time of it.
  struct Base {
    std::shared_ptr<TimingPool> pool;
    cudaEvent_t event = nullptr;
    int64_t host_ns = 0;
    Base() = default;
    Base(const Base&) = delete;
    Base& operator=(const Base&) = delete;
    ~Base();
  };
  /// Waits for the tasks and hands them to the profiler. Makes `base` if it is not there.
  void collect(Base& base);
  /// The same for the last time: the stream goes.
  void close() noexcept;

 private:
  struct Entry {
    const char* name;
    const char* unit;
    int32_t label;
    CudaSpan span;
  };
  void collect_locked(Base& base);

  const Device device_;
  const int stream_id_;
  cudaStream_t stream_;
  const std::shared_ptr<TimingPool> pool_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

/// A timeline that the profiler collects from while the stream lives.
std::shared_ptr<CudaTimeline> make_cuda_timeline(Device device, int stream_id, cudaStream_t stream);

}  // namespace tessera
