// NF4 on CUDA ([Note: NF4] in kernel.h).
//
// nf4_quantize     a warp takes a record of 256 values, a lane 8 neighbours; 8 lanes share a block
// nf4_dequantize   the same. A record begins at a multiple of 4 bytes: a lane reads its 8 codes as one
//                  word, the 16 values lie in the registers of the warp and go by shuffles. 0.52
//                  bytes in and 2 (bf16) out an element.
// nf4_mean         one block: a thread takes every 256th scale, in f64; then halves are added
// nf4_compress     a block takes 256 scales; thresholds are read through the cache
// Determinism      fixed orders, no atomics; no product is fused with a sum

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/reduce.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/nf4/codes.h"
#include "kernels/nf4/kernel.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::dynamic_smem;
using tessera::cuda::grid_blocks;
using tessera::cuda::kFullMask;
using tessera::cuda::kWarpSize;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / kWarpSize;
constexpr int kLaneValues = static_cast<int>(kNf4Record) / kWarpSize;
constexpr int kBlockLanes = static_cast<int>(kNf4Block) / kLaneValues;
constexpr int64_t kNestedRecords = kNf4NestedBlock / kNf4RecordBlocks;
static_assert(kLaneValues == 8, "a lane has a word of codes");

/// The larger one; what is not a number wins.
__device__ float larger(float a, float b) {
  return a > b || a != a ? a : b;
}

/// A magnitude that is not finite is not a number.
__device__ float finite_or_nan(float x) {
  return x <= 3.402823466e38f ? x : __uint_as_float(0x7fc00000u);
}

/// Calls f(record) for the records that a warp takes.
template <class F>
__device__ void for_records(int64_t numel, const F& f) {
  const int64_t num_records = ceil_div(numel, kNf4Record);
  const int64_t warp = threadIdx.x / kWarpSize;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + warp; r < num_records;
       r += static_cast<int64_t>(gridDim.x) * kWarps) {
    f(r);
  }
}

LaunchConfig config_for(int64_t numel, cudaStream_t stream) {
  const int64_t blocks = ceil_div(ceil_div(numel, kNf4Record), kWarps);
  const int64_t resident = int64_t{8} * tessera::cuda::num_multiprocessors();
  return {grid_blocks(blocks < resident ? blocks : resident), kBlock, 0, stream};
}

template <class T>
__global__ void __launch_bounds__(kBlock) nf4_quantize_kernel(Nf4Quantize p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for_records(p.numel, [&](int64_t r) {
    const int64_t at = r * kNf4Record + lane * kLaneValues;
    const int64_t left = p.numel - at;
    const T* const x = static_cast<const T*>(p.values) + at;
    float values[kLaneValues];
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      values[i] = i < left ? tessera::cuda::to_float(x[i]) : 0.0f;
      largest = larger(largest, finite_or_nan(fabsf(values[i])));
    }
#pragma unroll
    for (int distance = kBlockLanes / 2; distance > 0; distance /= 2) {
      largest = larger(largest, __shfl_xor_sync(kFullMask, largest, distance));
    }
    const int64_t first = r * kNf4Record + lane / kBlockLanes * kNf4Block;  // of the block
    const bool is_whole = first + kNf4Block <= p.numel;
    const float scale = largest < kNf4LeastScale ? kNf4LeastScale : largest;
    const float inverse = 1.0f / scale;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const float scaled = is_whole ? values[i] * inverse : values[i] / scale;
      uint32_t code = 0;
#pragma unroll
      for (int t = 0; t < 15; ++t) code += scaled > nf4_threshold(t) ? 1u : 0u;
      if (i >= left) code = kNf4Zero;
      word |= code << (i / 2 * 8 + (i % 2 == 0 ? 4 : 0));
    }
    *reinterpret_cast<uint32_t*>(p.records + r * kNf4RecordNbytes + lane * 4) = word;
    if (lane % kBlockLanes == 0 && first < p.numel) {
      p.absmax[first / kNf4Block] = is_whole ? largest : scale;
    }
  });
}

__global__ void __launch_bounds__(kBlock) nf4_mean_kernel(Nf4Mean p) {
  double* const sums = dynamic_smem<double>();
  double sum = 0;
  for (int64_t i = threadIdx.x; i < p.num_blocks; i += kBlock) {
    sum += static_cast<double>(p.absmax[i]);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned half = kBlock / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    *p.mean = static_cast<float>(sums[0] / static_cast<double>(p.num_blocks));
  }
}

/// How many of 255 ascending thresholds are below x.
__device__ uint8_t scale_code(const float* thresholds, float x) {
  int code = 0;
#pragma unroll
  for (int half = 128; half > 0; half /= 2) {
    if (thresholds[code + half - 1] < x) code += half;
  }
  return static_cast<uint8_t>(code);
}

__global__ void __launch_bounds__(kBlock) nf4_compress_kernel(Nf4Compress p) {
  float* const shared = dynamic_smem<float>();
  for (int64_t k = blockIdx.x; k * kNf4NestedBlock < p.num_blocks; k += gridDim.x) {
    const int64_t i = k * kNf4NestedBlock + threadIdx.x;
    const bool is_there = i < p.num_blocks;
    const float centred = is_there ? p.absmax[i] - *p.mean : 0.0f;
    float largest = finite_or_nan(fabsf(centred));
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      largest = larger(largest, __shfl_xor_sync(kFullMask, largest, distance));
    }
    __syncthreads();  // who still reads those of the round before
    if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = largest;
    __syncthreads();
    float nested = 0;
    for (int w = 0; w < kWarps; ++w) nested = larger(nested, shared[w]);
    if (threadIdx.x == 0) p.nested[k] = nested;
    const int64_t own = i - p.first;
    if (!is_there || own < 0 || own >= p.count) continue;
    const float x = centred * (1 / nested);
    const uint8_t code =
        nested > 0 ? scale_code(p.map + 256, x > -1 ? (x < 1 ? x : 1.0f) : -1.0f) : uint8_t{0};
    p.records[own / kNf4RecordBlocks * kNf4RecordNbytes + kNf4CodeBytes + own % kNf4RecordBlocks] =
        code;
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) nf4_dequantize_kernel(Nf4Dequantize p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float code_value = 0;  // of code lane % 16
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (lane % 16 == i) code_value = nf4_value(i);
  }
  const float mean = *p.mean;
  for_records(p.numel, [&](int64_t r) {
    const uint8_t* const record = p.records + r * kNf4RecordNbytes;
    const uint32_t word = *reinterpret_cast<const uint32_t*>(record + lane * 4);
    const float nested = p.nested[(p.first_record + r) / kNestedRecords];
    const float scale = p.map[record[kNf4CodeBytes + lane / kBlockLanes]];
    const float absmax = __fadd_rn(__fmul_rn(scale, nested), mean);
    Floats<kLaneValues> values;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const uint32_t code = word >> (i / 2 * 8 + (i % 2 == 0 ? 4 : 0)) & 15u;
      values[i] = __shfl_sync(kFullMask, code_value, static_cast<int>(code)) * absmax;
    }
    const int64_t at = r * kNf4Record + lane * kLaneValues;
    T* const out = static_cast<T*>(p.values) + at;
    if (at + kLaneValues <= p.numel) {
      store_floats<kLaneValues>(out, values);
      return;
    }
    for (int i = 0; i < kLaneValues; ++i) {
      if (at + i < p.numel) out[i] = tessera::cuda::from_float<T>(values[i]);
    }
  });
}

}  // namespace

void nf4_quantize(CUstream_st* stream, const Nf4Quantize& p) {
  if (p.numel == 0) return;
  tessera::cuda::visit_device_float(p.dtype, "nf4_quantize", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("nf4_quantize", &nf4_quantize_kernel<T>, config_for(p.numel, stream), p);
  });
}

void nf4_mean(CUstream_st* stream, const Nf4Mean& p) {
  launch("nf4_mean", &nf4_mean_kernel, LaunchConfig{1, kBlock, kBlock * sizeof(double), stream}, p);
}

void nf4_compress(CUstream_st* stream, const Nf4Compress& p) {
  if (p.num_blocks == 0) return;
  launch("nf4_compress", &nf4_compress_kernel,
         LaunchConfig{grid_blocks(ceil_div(p.num_blocks, kNf4NestedBlock)), kBlock,
                      kWarps * sizeof(float), stream},
         p);
}

void nf4_dequantize(CUstream_st* stream, const Nf4Dequantize& p) {
  if (p.numel == 0) return;
  tessera::cuda::visit_device_float(p.dtype, "nf4_dequantize", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("nf4_dequantize", &nf4_dequantize_kernel<T>, config_for(p.numel, stream), p);
  });
}

}  // namespace tessera::kernels::cuda
