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
/// What cudaGetDeviceProperties calls a device; "Fake device" at first.
void set_device_name(int device, std::string name);
/// Bytes of each device; 4 GiB at first.
void set_device_capacity(int64_t nbytes);
/// Each task of each stream starts up to this much late, in an order drawn from `seed`: a missing
/// wait shows soon.
void set_random_delays(int max_us, uint64_t seed);

/// Streams take work and events but do nothing of it, and memory has no bytes until it is touched:
/// for programs too large to run, whose calls are counted. Before the first allocation.
void set_skips_work(bool skips);
/// Events tell, in place of the real time, what the work of their stream is said to take: a kernel
/// kPlantedKernelMs, a call of a library what it says.
void set_planted_times(bool is_on);
constexpr double kPlantedKernelMs = 1;

/// How often work was queued, by name ("kernel", "cudaMemcpyAsync"), and the host waited or asked
/// for memory ("cudaStreamSynchronize", "cudaMalloc"), since the last call.
std::map<std::string, int64_t> take_calls();

/// The mistakes since the last call.
std::vector<std::string> take_mistakes();
/// One line for each allocation, stream, event and communicator that is alive.
std::vector<std::string> live_objects();

// ----- for the fakes of libraries

/// By work, on the thread of its stream: it is said to take so long.
void take_time(double ms);

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

// ----- of the fake cuBLASLt

/// One algorithm of the library. They add in different orders, `order` of them, and so differ in their
/// bits; the heuristic offers them in this order where they are not refused.
struct GemmAlgorithm {
  double ms = 1;           ///< planted time of a product
  double epilogue_ms = 0;  ///< on top for any epilogue but none and a bias
  double device_ms = 0;    ///< on top for each device before the stream's
  int order = 30;          ///< terms are added in runs of 1 << order, then the runs in order
  bool takes_f32 = true;
  bool takes_epilogues = true;  ///< other than none and a bias
  uint32_t min_alignment = 1;   ///< of A, B, C and D, bytes
  bool fails = false;           ///< offered, and refused when it is to run
  size_t workspace_nbytes = 4096;
};
/// Those of the library; one of the defaults at first.
void set_gemm_algorithms(std::vector<GemmAlgorithm> algorithms);
/// As cublasLtGetVersion() has it; 130100 at first.
void set_cublaslt_version(size_t version);
/// Which algorithm computed each product since the last call, by its place in the list.
std::vector<int> take_gemm_algorithms();

// ----- of the fake cuDNN

struct CudnnOptions {
  size_t version = 91900;  ///< as cudnnGetVersion() has it; old ones have their faults
  int num_configs = 2;     ///< that the heuristics offer for a graph; 0: no kernel
  int num_refused = 1;     ///< of them, the first ones, when a plan is made
  double ms = 1;           ///< planted time of a graph
};
void set_cudnn(const CudnnOptions& options);

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
