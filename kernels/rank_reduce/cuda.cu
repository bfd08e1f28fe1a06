// dst[i] = reduction over ranks r of source_r[i], in the tree of [Note: Tree over ranks].
//
// Layout           each source is read once, dst written once: memory-bound
// Parallelization  a thread owns the elements i of a 16-byte vector of the source and walks the
//                  whole tree for them, in registers for 1, 2, 4, 8 and 16 ranks. For other numbers
//                  a thread owns one element and keeps the open subtrees in its column of shared
//                  memory
// Determinism      the tree is fixed by the number of ranks; the bits are those of the CPU kernel
#include <bit>

#include "core/check.h"
#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/vec.cuh"
#include "kernels/rank_reduce/kernel.h"

namespace tessera::kernels::cuda {

namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::dynamic_smem;
using tessera::cuda::from_float;
using tessera::cuda::kVec;
using tessera::cuda::LaunchConfig;
using tessera::cuda::load_vec;
using tessera::cuda::store_vec;
using tessera::cuda::to_float;
using tessera::cuda::Vec;

constexpr int kBlock = 256;

/// The arrays of all ranks, as one of them sees them.
template <class T>
struct Sources {
  const T* own;
  const char* others;
  int64_t others_stride;
  int rank;

  __device__ const T* operator()(int r) const {
    if (r == rank) return own;
    return reinterpret_cast<const T*>(others + (r < rank ? r : r - 1) * others_stride);
  }
};

/// Sums add in f32, in f64 for f64; a maximum stays what it is.
template <class T, Reduction kReduction>
using Value = std::conditional_t<kReduction == Reduction::kSum, ComputeType<T>, T>;

template <Reduction kReduction, class T>
__device__ Value<T, kReduction> value_of(T x) {
  if constexpr (kReduction == Reduction::kSum && !std::is_same_v<T, double>)
    return to_float(x);
  else
    return x;
}

template <Reduction kReduction, class C>
__device__ C combine(C a, C b) {
  if constexpr (kReduction == Reduction::kSum && std::is_same_v<C, double>) {
    return a + b;
  } else if constexpr (kReduction == Reduction::kSum) {
    return __fadd_rn(a, b);
  } else {
    return b > a || b != b ? b : a;  // NaN wins
  }
}

/// out = reduction over the ranks [kBegin, kEnd) of the elements from i on.
template <Reduction kReduction, int kBegin, int kEnd, int kN, class T>
__device__ void reduce_tree(Value<T, kReduction> (&out)[kN], const Sources<T>& sources, int64_t i) {
  if constexpr (kEnd - kBegin == 1) {
    const Vec<T, kN> x = load_vec<kN>(sources(kBegin) + i);
#pragma unroll
    for (int j = 0; j < kN; ++j) out[j] = value_of<kReduction>(x[j]);
  } else {
    constexpr int kMiddle = kBegin + (kEnd - kBegin + 1) / 2;
    Value<T, kReduction> right[kN];
    reduce_tree<kReduction, kBegin, kMiddle>(out, sources, i);
    reduce_tree<kReduction, kMiddle, kEnd>(right, sources, i);
#pragma unroll
    for (int j = 0; j < kN; ++j) out[j] = combine<kReduction>(out[j], right[j]);
  }
}

/// How many subtrees of the tree over `num_ranks` end with leaf `r`.
__device__ int num_ending(int r, int num_ranks) {
  int begin = 0, end = num_ranks, count = 0;
  while (end - begin > 1) {
    const int middle = begin + (end - begin + 1) / 2;
    count = r < middle ? 0 : count + 1;
    (r < middle ? end : begin) = middle;
  }
  return count;
}

/// The same for any number of ranks and one element; `column` is this thread's, kBlock apart.
template <Reduction kReduction, class T>
__device__ Value<T, kReduction> reduce_any(const Sources<T>& sources, int num_ranks, int64_t i,
                                           Value<T, kReduction>* column) {
  int depth = 0;
  for (int r = 0; r < num_ranks; ++r) {
    auto value = value_of<kReduction>(sources(r)[i]);
    for (int n = num_ending(r, num_ranks); n > 0; --n)
      value = combine<kReduction>(column[--depth * kBlock], value);
    column[depth++ * kBlock] = value;
  }
  return column[0];
}

template <Reduction kReduction, class Out, class C>
__device__ Out result(C value, Out old, bool accumulate) {
  if constexpr (kReduction == Reduction::kSum && std::is_same_v<C, double>) {
    return accumulate ? old + value : value;
  } else if constexpr (kReduction == Reduction::kSum) {
    return from_float<Out>(accumulate ? __fadd_rn(to_float(old), value) : value);
  } else {
    return value;
  }
}

/// kRanks: the number of ranks, or 0 for any.
template <Reduction kReduction, class T, class Out, int kRanks, int kN>
__launch_bounds__(kBlock) __global__
    void rank_reduce_kernel(Out* dst, Sources<T> sources, int num_ranks, int64_t numel,
                            bool accumulate) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * kN;
  if (i >= numel) return;
  Value<T, kReduction> value[kN];
  if constexpr (kRanks == 0) {
    static_assert(kN == 1);
    auto* column = dynamic_smem<Value<T, kReduction>>() + threadIdx.x;
    value[0] = reduce_any<kReduction>(sources, num_ranks, i, column);
  } else {
    reduce_tree<kReduction, 0, kRanks>(value, sources, i);
  }
  Vec<Out, kN> out{};
  if (accumulate) out = load_vec<kN>(dst + i);
#pragma unroll
  for (int j = 0; j < kN; ++j) out[j] = result<kReduction>(value[j], out[j], accumulate);
  store_vec(dst + i, out);
}

/// Shared memory: the open subtrees of each thread, at most one a level and one more.
LaunchConfig rank_reduce_config(int64_t numel, int per_thread, int num_ranks, size_t value_nbytes,
                                CUstream_st* stream) {
  const int64_t blocks = ceil_div(numel, int64_t{kBlock} * per_thread);
  const auto levels = static_cast<size_t>(std::bit_width(static_cast<unsigned>(num_ranks)) + 1);
  const bool is_any = !std::has_single_bit(static_cast<unsigned>(num_ranks)) || num_ranks > 16;
  return {dim3(tessera::cuda::grid_blocks(blocks)), dim3(kBlock),
          is_any ? levels * kBlock * value_nbytes : 0, stream};
}

template <Reduction kReduction, class T, class Out, int kRanks, int kN>
void run(CUstream_st* stream, const RankReduce& a, int64_t first, int64_t numel) {
  if (numel == 0) return;
  const auto offset = [first](const void* data) {
    return static_cast<const char*>(data) + first * static_cast<int64_t>(sizeof(T));
  };
  const Sources<T> sources{reinterpret_cast<const T*>(offset(a.own)),
                           a.num_ranks > 1 ? offset(a.others) : nullptr, a.others_stride, a.rank};
  tessera::cuda::launch(
      "rank_reduce", &rank_reduce_kernel<kReduction, T, Out, kRanks, kN>,
      rank_reduce_config(numel, kN, a.num_ranks, sizeof(Value<T, kReduction>), stream),
      static_cast<Out*>(a.dst) + first, sources, a.num_ranks, numel, a.accumulate);
}

template <Reduction kReduction, class T, class Out, int kRanks>
void run_vectors(CUstream_st* stream, const RankReduce& a) {
  constexpr int kN = kVec<T>;
  const bool is_aligned = tessera::cuda::is_aligned16(a.own) &&
                          tessera::cuda::is_aligned16(a.dst) &&
                          tessera::cuda::is_aligned16(a.others) && a.others_stride % 16 == 0;
  const int64_t whole = is_aligned ? a.numel / kN * kN : 0;
  run<kReduction, T, Out, kRanks, kN>(stream, a, 0, whole);
  run<kReduction, T, Out, kRanks, 1>(stream, a, whole, a.numel - whole);
}

template <Reduction kReduction, class T, class Out>
void dispatch(CUstream_st* stream, const RankReduce& a) {
  switch (a.num_ranks) {
    case 1:
      return run_vectors<kReduction, T, Out, 1>(stream, a);
    case 2:
      return run_vectors<kReduction, T, Out, 2>(stream, a);
    case 4:
      return run_vectors<kReduction, T, Out, 4>(stream, a);
    case 8:
      return run_vectors<kReduction, T, Out, 8>(stream, a);
    case 16:
      return run_vectors<kReduction, T, Out, 16>(stream, a);
    default:
      return run<kReduction, T, Out, 0, 1>(stream, a, 0, a.numel);
  }
}

}  // namespace

void rank_reduce(CUstream_st* stream, const RankReduce& a) {
  check_reduce_dtypes(a.reduction, a.src_dtype, a.dst_dtype, a.accumulate);
  if (a.numel == 0) return;
  if (a.reduction == Reduction::kMax) {
    if (a.src_dtype == kF32) return dispatch<Reduction::kMax, float, float>(stream, a);
    if (a.src_dtype == kI32) return dispatch<Reduction::kMax, int32_t, int32_t>(stream, a);
    return dispatch<Reduction::kMax, uint8_t, uint8_t>(stream, a);
  }
  if (a.src_dtype == kF64 && a.dst_dtype == kF64)
    return dispatch<Reduction::kSum, double, double>(stream, a);
  tessera::cuda::visit_device_float(a.src_dtype, "rank_reduce", [&](auto source) {
    tessera::cuda::visit_device_float(a.dst_dtype, "rank_reduce", [&](auto out) {
      dispatch<Reduction::kSum, typename decltype(source)::type, typename decltype(out)::type>(
          stream, a);
    });
  });
}

}  // namespace tessera::kernels::cuda
