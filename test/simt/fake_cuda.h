#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "test/simt/include/cuda_runtime_api.h"

// A CUDA runtime on the host: streams are threads that run their tasks in order, kernels run on the
// emulator (simt.h), each cudaMalloc is an allocation of its own, so that AddressSanitizer sees
// accesses out of bounds and after the free.
//
// It is stricter than CUDA, so that what works by luck there fails here. A wait for an event that
// was never recorded, a copy to or from memory that would block the host (pageable), a free of
// memory that queued work uses and a stream destroyed with work in it are mistakes: the call fails
// and the mistake is kept. A call from a thread that never called cudaSetDevice is one too, where
// CUDA would make a context on device 0 for it. What is alive at the end of the process is a leak:
// it is listed, and the process ends with kLeakStatus.

namespace simt {

constexpr int kLeakStatus = 86;

/// Devices that the fake driver sees, 8 at first; 0: no device.
void set_num_devices(int num_devices);
/// 10 major + minor of device 0, 90 at first; the others stay at 90.
void set_compute_capability(int capability);
/// Bytes of each device; 4 GiB at first.
void set_device_capacity(int64_t nbytes);
/// Each task of each stream starts up to this much late, in an order drawn from `seed`: a missing
/// wait shows soon.
void set_random_delays(int max_us, uint64_t seed);

/// Streams take work and events but do nothing of it, and memory has no bytes until it is touched:
/// for programs too large to run, whose calls are counted. Before the first allocation.
void set_skips_work(bool skips);
/// How often work was queued, by name ("kernel", "cudaMemcpyAsync"), and the host waited or asked
/// for memory ("cudaStreamSynchronize", "cudaMalloc"), since the last call.
std::map<std::string, int64_t> take_calls();

/// The mistakes since the last call.
std::vector<std::string> take_mistakes();
/// One line for each allocation, stream, event and communicator that is alive.
std::vector<std::string> live_objects();

// ----- for the fakes of libraries

struct Range {
  const void* data;
  int64_t nbytes;
  bool is_written;
};
/// Queues `work` in `stream`, as `name`, using `ranges` of device memory or page-locked memory.
cudaError_t submit(cudaStream_t stream, const char* name, std::vector<Range> ranges,
                   std::function<void()> work);
/// True if `range` lies inside one allocation of device or page-locked memory.
bool is_reachable(const Range& range);
/// Keeps a mistake; the error to return.
cudaError_t report_mistake(std::string text);
/// Counts objects of another fake as alive, by a description; the key is any address.
void add_object(const void* object, std::string description);
void remove_object(const void* object);
int device_of(cudaStream_t stream);

// ----- of the fake NCCL

/// Buffers that calls of NCCL read or wrote: inside of memory that was registered with the
/// communicator of the call, or not.
struct NcclBuffers {
  int64_t num_registered = 0, num_others = 0;
  int64_t largest_other = 0;  ///< bytes
};
/// Since the last call.
NcclBuffers take_nccl_buffers();

}  // namespace simt
