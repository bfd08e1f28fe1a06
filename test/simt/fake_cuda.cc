#include "test/simt/fake_cuda.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "test/simt/simt.h"

namespace {

using simt::Range;
using Clock = std::chrono::steady_clock;

constexpr size_t kAlignment = 512;
constexpr int kHost = -1;  // the device of page-locked memory

bool overlap(const void* a, int64_t a_nbytes, const void* b, int64_t b_nbytes) {
  const auto* x = static_cast<const char*>(a);
  const auto* y = static_cast<const char*>(b);
  return a_nbytes > 0 && b_nbytes > 0 && x < y + b_nbytes && y < x + a_nbytes;
}

/// Of the stream whose thread this is: what its work so far is said to have taken.
thread_local double planted_stream_ms = 0;

/// A point that a stream passes once. An event refers to the one of its last record.
struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_passed = false;
  Clock::time_point time;
  double planted_ms = 0;

  void pass() {
    {
      const std::lock_guard lock(mutex);
      is_passed = true;
      time = Clock::now();
      planted_ms = planted_stream_ms;
    }
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return is_passed; });
  }
  bool is_done() {
    const std::lock_guard lock(mutex);
    return is_passed;
  }
};

struct Work {
  const char* name = "";
  std::vector<Range> ranges;
  std::function<void()> run;  // empty: the end
};

struct Allocation {
  size_t nbytes;
  int device;
};

thread_local int current_device = 0;
thread_local bool has_device = false;  // cudaSetDevice was called: current_device is meant
thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

struct CUevent_st {
  bool has_timing = false;
  int device = 0;
  std::mutex mutex;
  std::shared_ptr<Point> point;  // null: not recorded

  std::shared_ptr<Point> get() {
    const std::lock_guard lock(mutex);
    return point;
  }
};

struct CUstream_st {
  CUstream_st(int on_device, int with_priority) : device(on_device), priority(with_priority) {
    thread = std::thread([this] { run(); });
  }

  void push(Work work) {
    {
      const std::lock_guard lock(mutex);
      queue.push_back(std::move(work));
    }
    changed.notify_one();
  }
  void run();

  const int device, priority;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;  // the front is the one that runs
  std::thread thread;
};

namespace {

/// What the process shares. Never destroyed: threads of leaked streams may outlive static objects.
struct Machine {
  std::mutex mutex;
  int num_devices = 8;
  int capability = 90;  // of device 0
  std::map<int, std::string> device_names;
  int64_t capacity = int64_t{4} << 30;
  int max_delay_us = 0;
  uint64_t delay_seed = 0;
  std::atomic<bool> skips_work{false};
  std::atomic<bool> has_planted_times{false};
  std::map<std::string, int64_t> calls;
  std::vector<std::string> mistakes;
  std::map<const char*, Allocation> allocations;  // by their first byte
  std::map<int, int64_t> allocated;               // bytes by device
  std::map<const void*, std::string> objects;     // streams, events and those of other fakes
  std::map<const CUstream_st*, CUstream_st*> streams;
  std::map<int, std::string> failures;  // what broke a device, for good
  std::deque<std::string> texts;        // that cudaGetErrorString has returned

  static Machine& get() {
    static auto* machine = new Machine;
    return *machine;
  }
};

void count_call(const char* name) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  ++m.calls[name];
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

/// `call` works in the primary context of the thread's device. For a thread that never said which
/// one it means CUDA makes a context on device 0: half a GiB of what may be another rank's.
void enter_context(const char* call) {
  if (has_device) return;
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  m.mistakes.push_back(std::string(call) +
                       ": makes a context on device 0, since its thread never called "
                       "cudaSetDevice");
}

/// The error of a device whose kernel failed; it stays.
cudaError_t failure_of(int device) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  return m.failures.count(device) != 0 ? cudaErrorLaunchFailure : cudaSuccess;
}

void fail_device(int device, const std::string& what) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  m.failures.emplace(device, what);
}

/// The name of queued work that uses the range, if any, and its stream.
std::string user_of(const void* data, int64_t nbytes) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  for (const auto& [_, stream] : m.streams) {
    const std::lock_guard stream_lock(stream->mutex);
    for (const Work& work : stream->queue) {
      for (const Range& range : work.ranges) {
        if (overlap(range.data, range.nbytes, data, nbytes)) return work.name;
      }
    }
  }
  return "";
}

cudaError_t allocate(void** data, size_t nbytes, int device) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  const auto count = static_cast<int64_t>(nbytes);
  if (nbytes == 0 || count < 0) return remember(cudaErrorInvalidValue);
  if (device != kHost && m.allocated[device] + count > m.capacity)
    return remember(cudaErrorMemoryAllocation);
  // Exactly as long as asked for, so that the first byte behind is out of bounds.
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, nbytes) != 0) return remember(cudaErrorMemoryAllocation);
  if (!m.skips_work) std::memset(memory, 0xff, nbytes);  // NaN
  m.allocations[static_cast<const char*>(memory)] = {nbytes, device};
  m.allocated[device] += count;
  *data = memory;
  return cudaSuccess;
}

cudaError_t release(const char* call, void* data, bool on_device) {
  if (data == nullptr) return cudaSuccess;
  Machine& m = Machine::get();
  Allocation allocation{};
  {
    const std::lock_guard lock(m.mutex);
    const auto it = m.allocations.find(static_cast<const char*>(data));
    if (it == m.allocations.end() || (it->second.device != kHost) != on_device) {
      m.mistakes.push_back(std::string(call) + ": not an allocation of its kind, or freed before");
      return remember(cudaErrorInvalidValue);
    }
    allocation = it->second;
  }
  if (const std::string user = user_of(data, static_cast<int64_t>(allocation.nbytes));
      !user.empty()) {
    return simt::report_mistake(std::string(call) + ": " + user + " still uses the memory");
  }
  if (on_device) {  // CUDA waits for the device here
    std::vector<std::shared_ptr<Point>> points;
    {
      const std::lock_guard lock(m.mutex);
      for (const auto& [_, stream] : m.streams) {
        if (stream->device != allocation.device) continue;
        points.push_back(std::make_shared<Point>());
        stream->push({"cudaFree", {}, [point = points.back()] { point->pass(); }});
      }
    }
    for (const auto& point : points) point->wait();
  }
  {
    const std::lock_guard lock(m.mutex);
    m.allocations.erase(static_cast<const char*>(data));
    m.allocated[allocation.device] -= static_cast<int64_t>(allocation.nbytes);
  }
  std::free(data);
  return cudaSuccess;
}

bool is_alive(const void* object) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  return m.objects.count(object) != 0;
}

cudaError_t bad_handle(const char* call) {
  simt::report_mistake(std::string(call) + ": not a stream or event, or destroyed before");
  return remember(cudaErrorInvalidResourceHandle);
}

/// cuStreamWaitValue32 with CU_STREAM_WAIT_VALUE_GEQ.
int wait_value(CUstream_st* stream, uint64_t address, uint32_t value, unsigned flags) {
  auto* flag = reinterpret_cast<uint32_t*>(address);
  if (flags != 0 || !simt::is_reachable({flag, 4, false})) return 1;
  return simt::submit(stream, "cuStreamWaitValue32", {{flag, 4, false}}, [flag, value] {
    while (static_cast<int32_t>(__atomic_load_n(flag, __ATOMIC_ACQUIRE) - value) < 0)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
}

/// Kernels go into the fake's streams.
void set_launcher_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    simt::set_launcher([](cudaStream_t stream, std::function<void()> work) {
      const cudaError_t error = simt::submit(stream, "kernel", {}, std::move(work));
      if (error != cudaSuccess) throw simt::Error(cudaGetErrorString(error));
    });
  });
}

/// At the end of the process nothing may be alive.
struct Process {
  ~Process() {
    const std::vector<std::string> alive = simt::live_objects();
    if (alive.empty()) return;
    std::fprintf(stderr, "fake CUDA: %zu leaked:\n", alive.size());
    for (const std::string& line : alive) std::fprintf(stderr, "  %s\n", line.c_str());
    std::fflush(nullptr);
    std::_Exit(simt::kLeakStatus);
  }
} process;

}  // namespace

void CUstream_st::run() {
  std::mt19937_64 random(Machine::get().delay_seed + reinterpret_cast<uintptr_t>(this));
  for (;;) {
    Work* work = nullptr;
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return !queue.empty(); });
      work = &queue.front();  // stays there while it runs: a deque's elements do not move
    }
    if (!work->run) return;
    if (const int max_us = Machine::get().max_delay_us; max_us > 0) {
      std::uniform_int_distribution<int> delay(0, max_us);
      std::this_thread::sleep_for(std::chrono::microseconds(delay(random)));
    }
    try {
      // A broken device does nothing more, but its events are over.
      const bool is_point = work->ranges.empty() && std::strcmp(work->name, "kernel") != 0;
      const bool is_skipped = Machine::get().skips_work && !is_point &&
                              std::strcmp(work->name, "cuStreamWaitValue32") != 0;
      if (!is_skipped && (is_point || failure_of(device) == cudaSuccess)) work->run();
      if (std::strcmp(work->name, "kernel") == 0) simt::take_time(simt::kPlantedKernelMs);
    } catch (const std::exception& error) {
      fail_device(device, error.what());
    }
    Work done;  // destroyed outside of the lock
    const std::lock_guard lock(mutex);
    std::swap(done, queue.front());
    queue.pop_front();
  }
}

// ----- for tests and other fakes

namespace simt {

void set_compute_capability(int capability) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  m.capability = capability;
}

void set_device_name(int device, std::string name) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  m.device_names[device] = std::move(name);
}

void set_num_devices(int num_devices) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  m.num_devices = num_devices;
}

void set_device_capacity(int64_t nbytes) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  m.capacity = nbytes;
}

void set_random_delays(int max_us, uint64_t seed) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  m.max_delay_us = max_us;
  m.delay_seed = seed;
}

void set_planted_times(bool is_on) {
  Machine::get().has_planted_times = is_on;
}

void take_time(double ms) {
  planted_stream_ms += ms;
}

void set_skips_work(bool skips) {
  Machine::get().skips_work = skips;
}

std::map<std::string, int64_t> take_calls() {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  return std::exchange(m.calls, {});
}

std::vector<std::string> take_mistakes() {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  return std::exchange(m.mistakes, {});
}

std::vector<std::string> live_objects() {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  std::vector<std::string> lines;
  for (const auto& [_, allocation] : m.allocations) {
    lines.push_back(std::to_string(allocation.nbytes) + " bytes of " +
                    (allocation.device == kHost ? "page-locked host memory"
                                                : "device " + std::to_string(allocation.device)));
  }
  for (const auto& [_, description] : m.objects) lines.push_back(description);
  return lines;
}

cudaError_t submit(cudaStream_t stream, const char* name, std::vector<Range> ranges,
                   std::function<void()> work) {
  enter_context(name);
  if (stream == nullptr) {
    report_mistake(std::string(name) + ": in the default stream, which waits for all others");
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (!is_alive(stream)) return bad_handle(name);
  if (const cudaError_t error = failure_of(stream->device); error != cudaSuccess)
    return remember(error);
  for (const Range& range : ranges) {
    if (range.nbytes > 0 && !is_reachable(range)) {
      return report_mistake(std::string(name) + ": " + std::to_string(range.nbytes) +
                            " bytes that are not inside one allocation of device or page-locked "
                            "memory");
    }
  }
  count_call(name);
  stream->push({name, std::move(ranges), std::move(work)});
  return cudaSuccess;
}

bool is_reachable(const Range& range) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  const auto* first = static_cast<const char*>(range.data);
  auto it = m.allocations.upper_bound(first);
  if (it == m.allocations.begin()) return false;
  --it;
  return first + range.nbytes <= it->first + it->second.nbytes;
}

cudaError_t report_mistake(std::string text) {
  Machine& m = Machine::get();
  {
    const std::lock_guard lock(m.mutex);
    m.mistakes.push_back(std::move(text));
  }
  return remember(cudaErrorInvalidValue);
}

void add_object(const void* object, std::string description) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  m.objects[object] = std::move(description);
}

void remove_object(const void* object) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  m.objects.erase(object);
}

int device_of(cudaStream_t stream) {
  return stream->device;
}

}  // namespace simt

// ----- the runtime's functions

extern "C" {

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define TESSERA_NAME(error) \
  case error:               \
    return #error;
    TESSERA_NAME(cudaSuccess)
    TESSERA_NAME(cudaErrorInvalidValue)
    TESSERA_NAME(cudaErrorMemoryAllocation)
    TESSERA_NAME(cudaErrorCudartUnloading)
    TESSERA_NAME(cudaErrorInsufficientDriver)
    TESSERA_NAME(cudaErrorNoDevice)
    TESSERA_NAME(cudaErrorInvalidDevice)
    TESSERA_NAME(cudaErrorECCUncorrectable)
    TESSERA_NAME(cudaErrorInvalidResourceHandle)
    TESSERA_NAME(cudaErrorNotReady)
    TESSERA_NAME(cudaErrorIllegalAddress)
    TESSERA_NAME(cudaErrorLaunchTimeout)
    TESSERA_NAME(cudaErrorContextIsDestroyed)
    TESSERA_NAME(cudaErrorAssert)
    TESSERA_NAME(cudaErrorHardwareStackError)
    TESSERA_NAME(cudaErrorIllegalInstruction)
    TESSERA_NAME(cudaErrorMisalignedAddress)
    TESSERA_NAME(cudaErrorInvalidAddressSpace)
    TESSERA_NAME(cudaErrorInvalidPc)
    TESSERA_NAME(cudaErrorLaunchFailure)
#undef TESSERA_NAME
  }
  return "?";
}

// Says more than CUDA does: what the emulator found in a kernel, or the mistake.
const char* cudaGetErrorString(cudaError_t error) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  if (error == cudaErrorLaunchFailure) {
    const auto it = m.failures.find(current_device);
    m.texts.push_back("unspecified launch failure: " +
                      (it != m.failures.end() ? it->second : std::string("another device")));
    return m.texts.back().c_str();
  }
  if (error == cudaErrorInvalidValue || error == cudaErrorInvalidResourceHandle) {
    m.texts.push_back(m.mistakes.empty() ? "invalid argument" : m.mistakes.back());
    return m.texts.back().c_str();
  }
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    default:
      return cudaGetErrorName(error);
  }
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* num_devices) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  *num_devices = m.num_devices;
  return m.num_devices == 0 ? remember(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  if (device < 0 || device >= m.num_devices) return remember(cudaErrorInvalidDevice);
  current_device = device;
  has_device = true;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  const int capability = device == 0 ? m.capability : 90;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = simt::kNumMultiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(simt::max_shared_bytes());
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = capability / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = capability % 10;
      return cudaSuccess;
  }
  return remember(cudaErrorInvalidValue);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  if (device < 0 || device >= m.num_devices) return remember(cudaErrorInvalidDevice);
  const int capability = device == 0 ? m.capability : 90;
  const auto name = m.device_names.find(device);
  *properties = {{}, capability / 10, capability % 10};
  std::snprintf(properties->name, sizeof properties->name, "%s",
                name != m.device_names.end() ? name->second.c_str() : "Fake device");
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  enter_context("cudaDeviceGetStreamPriorityRange");
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool is_known = std::strcmp(symbol, "cuStreamWaitValue32") == 0;
  *function = is_known ? reinterpret_cast<void*>(&wait_value) : nullptr;
  *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t nbytes) {
  count_call("cudaMalloc");
  enter_context("cudaMalloc");
  if (const cudaError_t error = failure_of(current_device); error != cudaSuccess)
    return remember(error);
  return allocate(data, nbytes, current_device);
}

cudaError_t cudaFree(void* data) {
  count_call("cudaFree");
  enter_context("cudaFree");
  const cudaError_t error = release("cudaFree", data, true);
  return error != cudaSuccess ? error : remember(failure_of(current_device));
}

cudaError_t cudaHostAlloc(void** data, size_t nbytes, unsigned) {
  count_call("cudaHostAlloc");
  enter_context("cudaHostAlloc");
  return allocate(data, nbytes, kHost);
}

cudaError_t cudaFreeHost(void* data) {
  count_call("cudaFreeHost");
  enter_context("cudaFreeHost");
  return release("cudaFreeHost", data, false);
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  const auto count = static_cast<int64_t>(nbytes);
  if (overlap(dst, count, src, count))
    return simt::report_mistake("cudaMemcpyAsync: the ranges overlap");
  return simt::submit(stream, "cudaMemcpyAsync", {{dst, count, true}, {src, count, false}},
                      [=] { std::memcpy(dst, src, nbytes); });
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t nbytes, cudaStream_t stream) {
  return simt::submit(stream, "cudaMemsetAsync", {{data, static_cast<int64_t>(nbytes), true}},
                      [=] { std::memset(data, value, nbytes); });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  enter_context("cudaStreamCreateWithPriority");
  if (const cudaError_t error = failure_of(current_device); error != cudaSuccess)
    return remember(error);
  set_launcher_once();
  *stream = new CUstream_st(current_device, priority);
  simt::add_object(*stream, "a stream of device " + std::to_string(current_device));
  Machine& m = Machine::get();
  const std::lock_guard lock(m.mutex);
  m.streams[*stream] = *stream;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  enter_context("cudaStreamDestroy");
  if (stream == nullptr || !is_alive(stream)) return bad_handle("cudaStreamDestroy");
  simt::remove_object(stream);
  {
    Machine& m = Machine::get();
    const std::lock_guard lock(m.mutex);
    m.streams.erase(stream);
  }
  size_t num_unfinished = 0;
  {
    const std::lock_guard lock(stream->mutex);
    for (const Work& work : stream->queue) {  // a cudaFree of another stream's owner may pass by
      if (std::strcmp(work.name, "cudaFree") != 0) ++num_unfinished;
    }
  }
  stream->push({});
  stream->thread.join();
  const int device = stream->device;
  delete stream;
  if (num_unfinished != 0) {
    return simt::report_mistake("cudaStreamDestroy: " + std::to_string(num_unfinished) +
                                " tasks are not finished on device " + std::to_string(device));
  }
  return remember(failure_of(device));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count_call("cudaStreamSynchronize");
  enter_context("cudaStreamSynchronize");
  const auto point = std::make_shared<Point>();
  const int device = stream != nullptr && is_alive(stream) ? stream->device : 0;
  // Also on a broken device: what was queued comes to its end first.
  if (stream == nullptr || !is_alive(stream)) return bad_handle("cudaStreamSynchronize");
  stream->push({"cudaStreamSynchronize", {}, [point] { point->pass(); }});
  point->wait();
  // The task leaves the queue right after it has run.
  for (;;) {
    const std::lock_guard lock(stream->mutex);
    if (stream->queue.empty() ||
        std::strcmp(stream->queue.front().name, "cudaStreamSynchronize") != 0)
      break;
  }
  return remember(failure_of(device));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (event == nullptr || !is_alive(event)) return bad_handle("cudaStreamWaitEvent");
  const std::shared_ptr<Point> point = event->get();
  if (point == nullptr)
    return simt::report_mistake("cudaStreamWaitEvent: the event was never recorded");
  return simt::submit(stream, "cudaStreamWaitEvent", {}, [point] { point->wait(); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  enter_context("cudaEventCreateWithFlags");
  *event = new CUevent_st;
  (*event)->has_timing = (flags & cudaEventDisableTiming) == 0;
  (*event)->device = current_device;
  simt::add_object(*event, "an event of device " + std::to_string(current_device));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  enter_context("cudaEventDestroy");
  if (event == nullptr || !is_alive(event)) return bad_handle("cudaEventDestroy");
  simt::remove_object(event);
  const int device = event->device;
  delete event;
  return remember(failure_of(device));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (event == nullptr || !is_alive(event)) return bad_handle("cudaEventRecord");
  if (stream != nullptr && is_alive(stream) && stream->device != event->device)
    return simt::report_mistake("cudaEventRecord: the event is of another device than the stream");
  const auto point = std::make_shared<Point>();
  const cudaError_t error = simt::submit(stream, "cudaEventRecord", {}, [point] { point->pass(); });
  if (error != cudaSuccess) return error;
  const std::lock_guard lock(event->mutex);
  event->point = point;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  enter_context("cudaEventQuery");
  if (event == nullptr || !is_alive(event)) return bad_handle("cudaEventQuery");
  const std::shared_ptr<Point> point = event->get();
  if (point != nullptr && !point->is_done()) return cudaErrorNotReady;
  return remember(failure_of(event->device));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count_call("cudaEventSynchronize");
  enter_context("cudaEventSynchronize");
  if (event == nullptr || !is_alive(event)) return bad_handle("cudaEventSynchronize");
  if (const std::shared_ptr<Point> point = event->get()) point->wait();
  return remember(failure_of(event->device));
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  enter_context("cudaEventElapsedTime");
  const std::shared_ptr<Point> a = begin->get(), b = end->get();
  if (a == nullptr || b == nullptr || !begin->has_timing || !end->has_timing)
    return simt::report_mistake("cudaEventElapsedTime: an event without a time");
  if (begin->device != end->device)
    return simt::report_mistake("cudaEventElapsedTime: the events are of two devices");
  if (!a->is_done() || !b->is_done()) return cudaErrorNotReady;
  *ms = Machine::get().has_planted_times
            ? static_cast<float>(b->planted_ms - a->planted_ms)
            : std::chrono::duration<float, std::milli>(b->time - a->time).count();
  return cudaSuccess;
}

}  // extern "C"
