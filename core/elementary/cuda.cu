// Copy and fill for CUDA.
//   dst[i] = src[i], dst[i] += src[i] (in f32; f64 if either side has 8 bytes), dst[i] = value
// Layout: dimensions that are contiguous in both operands are merged first; what remains is rows of
//   an inner dimension. Rows whose two sides have unit stride and 16-byte aligned starts are cut
//   into pieces of whole vectors (16 bytes of the narrower dtype), all others into elements.
// Parallelization: one thread a piece. Copies between equal dtypes move bits, those among f32, bf16
//   and f16 have kernels of their own, and the rest share one that looks at the dtypes as it runs.
// Deterministic: every element is written once, by one thread.
#include "core/elementary/kernel.h"
#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/vec.cuh"

namespace tessera::kernels::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kBlock = 256;

/// The merged dimensions as the device takes them; the last one is the row.
struct Loop {
  int num_dims;
  int64_t shape[Shape::kMaxDims], dst[Shape::kMaxDims], src[Shape::kMaxDims];
  int64_t num_pieces, pieces_per_row;

  __host__ __device__ int64_t row() const { return shape[num_dims - 1]; }
};

struct Offsets {
  int64_t dst, src, column;
};

// ----- device helpers

/// a / b and a % b; 64-bit division only where it must be.
__device__ inline int64_t divide(int64_t a, int64_t b, int64_t* remainder) {
  const bool is_small = ((a | b) >> 32) == 0;
  const int64_t quotient =
      is_small ? static_cast<int64_t>(static_cast<unsigned>(a) / static_cast<unsigned>(b)) : a / b;
  *remainder = a - quotient * b;
  return quotient;
}

/// Where piece `piece` of `width` elements starts.
__device__ inline Offsets locate(const Loop& loop, int64_t piece, int width) {
  const int inner = loop.num_dims - 1;
  int64_t column = piece, rest = 0;
  if (inner > 0) rest = divide(piece, loop.pieces_per_row, &column);
  column *= width;
  Offsets at{column * loop.dst[inner], column * loop.src[inner], column};
  for (int i = inner - 1; i >= 0; --i) {
    int64_t index = 0;
    rest = divide(rest, loop.shape[i], &index);
    at.dst += index * loop.dst[i];
    at.src += index * loop.src[i];
  }
  return at;
}

__device__ inline int64_t this_piece() {
  return static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
}

template <bool kAdd, class D, class S>
__device__ inline D combine(D old, S fresh) {
  if constexpr (kAdd) {
    return from_float<D>(to_float(old) + to_float(fresh));
  } else if constexpr (std::is_same_v<D, S>) {
    return fresh;
  } else {
    return from_float<D>(to_float(fresh));
  }
}

/// A value of any dtype without loss.
struct AnyValue {
  bool is_integer;
  int64_t integer;
  double real;

  template <class T>
  __device__ T as() const {
    return is_integer ? static_cast<T>(integer) : static_cast<T>(real);
  }
};

__device__ inline AnyValue load_any(const void* data, DType dtype, int64_t i) {
  const auto integer = [](int64_t value) { return AnyValue{true, value, 0}; };
  const auto real = [](double value) { return AnyValue{false, 0, value}; };
  switch (dtype) {
    case DType::kF32:
      return real(static_cast<const float*>(data)[i]);
    case DType::kBF16:
      return real(to_float(static_cast<const BFloat16*>(data)[i]));
    case DType::kF16:
      return real(to_float(static_cast<const Float16*>(data)[i]));
    case DType::kF64:
      return real(static_cast<const double*>(data)[i]);
    case DType::kI32:
      return integer(static_cast<const int32_t*>(data)[i]);
    case DType::kI64:
      return integer(static_cast<const int64_t*>(data)[i]);
    case DType::kU8:
      break;
  }
  return integer(static_cast<const uint8_t*>(data)[i]);
}

__device__ inline void store_any(void* data, DType dtype, int64_t i, const AnyValue& value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[i] = value.as<float>();
      return;
    case DType::kBF16:
      static_cast<BFloat16*>(data)[i] = from_float<BFloat16>(value.as<float>());
      return;
    case DType::kF16:
      static_cast<Float16*>(data)[i] = from_float<Float16>(value.as<float>());
      return;
    case DType::kF64:
      static_cast<double*>(data)[i] = value.as<double>();
      return;
    case DType::kI32:
      static_cast<int32_t*>(data)[i] = value.as<int32_t>();
      return;
    case DType::kI64:
      static_cast<int64_t*>(data)[i] = value.as<int64_t>();
      return;
    case DType::kU8:
      static_cast<uint8_t*>(data)[i] = value.as<uint8_t>();
      return;
  }
}

// ----- kernels

template <class D, class S, int kWidth, bool kAdd>
__global__ void __launch_bounds__(kBlock) copy_kernel(D* dst, const S* src, Loop loop) {
  const int64_t piece = this_piece();
  if (piece >= loop.num_pieces) return;
  const Offsets at = locate(loop, piece, kWidth);
  dst += at.dst;
  src += at.src;
  if (kWidth > 1 && at.column + kWidth <= loop.row()) {
    const auto fresh = load_streaming<kWidth>(src);
    Vec<D, kWidth> result;
    if constexpr (kAdd) result = load_vec<kWidth>(dst);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result[i] = combine<kAdd>(result[i], fresh[i]);
    store_vec(dst, result);
    return;
  }
  // One element, or the end of a row of vectors (whose strides are 1).
  const int64_t count = min(static_cast<int64_t>(kWidth), loop.row() - at.column);
  for (int64_t i = 0; i < count; ++i) dst[i] = combine<kAdd>(dst[i], src[i]);
}

template <bool kAdd>
__global__ void __launch_bounds__(kBlock)
    copy_any_kernel(void* dst, DType dst_dtype, const void* src, DType src_dtype, bool adds_doubles,
                    Loop loop) {
  const int64_t piece = this_piece();
  if (piece >= loop.num_pieces) return;
  const Offsets at = locate(loop, piece, 1);
  AnyValue value = load_any(src, src_dtype, at.src);
  if constexpr (kAdd) {
    const AnyValue old = load_any(dst, dst_dtype, at.dst);
    const double sum = adds_doubles ? old.as<double>() + value.as<double>()
                                    : static_cast<double>(old.as<float>() + value.as<float>());
    value = {false, 0, sum};
  }
  store_any(dst, dst_dtype, at.dst, value);
}

/// T is an unsigned integer of the dtype's size.
template <class T, int kWidth>
__global__ void __launch_bounds__(kBlock) fill_kernel(T* dst, T value, Loop loop) {
  const int64_t piece = this_piece();
  if (piece >= loop.num_pieces) return;
  const Offsets at = locate(loop, piece, kWidth);
  dst += at.dst;
  if (kWidth > 1 && at.column + kWidth <= loop.row()) {
    Vec<T, kWidth> values;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = value;
    store_vec(dst, values);
    return;
  }
  const int64_t count = min(static_cast<int64_t>(kWidth), loop.row() - at.column);
  for (int64_t i = 0; i < count; ++i) dst[i] = value;
}

// ----- geometry

Loop merge_dims(const Shape& shape, const Strides& dst, const Strides& src) {
  Loop loop{};
  for (int i = 0; i < shape.num_dims(); ++i) {
    if (shape[i] == 1) continue;
    const int last = loop.num_dims - 1;
    if (last >= 0 && loop.dst[last] == dst[i] * shape[i] && loop.src[last] == src[i] * shape[i]) {
      loop.shape[last] *= shape[i];
      loop.dst[last] = dst[i];
      loop.src[last] = src[i];
    } else {
      loop.shape[loop.num_dims] = shape[i];
      loop.dst[loop.num_dims] = dst[i];
      loop.src[loop.num_dims] = src[i];
      ++loop.num_dims;
    }
  }
  if (loop.num_dims == 0) {
    loop.num_dims = 1;
    loop.shape[0] = loop.dst[0] = loop.src[0] = 1;
  }
  return loop;
}

/// Whether every row starts at a multiple of `width` elements on both sides and has unit stride.
bool rows_are_vectors(const Loop& loop, int width) {
  const int inner = loop.num_dims - 1;
  if (loop.dst[inner] != 1 || loop.src[inner] != 1) return false;
  for (int i = 0; i < inner; ++i) {
    if (loop.dst[i] % width != 0 || loop.src[i] % width != 0) return false;
  }
  return true;
}

LaunchConfig cut(Loop& loop, int width, CUstream_st* stream) {
  loop.pieces_per_row = ceil_div(loop.row(), width);
  loop.num_pieces = loop.pieces_per_row;
  for (int i = 0; i < loop.num_dims - 1; ++i) loop.num_pieces *= loop.shape[i];
  return {grid_blocks(ceil_div(loop.num_pieces, kBlock)), kBlock, 0, stream};
}

// ----- launchers

template <class D, class S, bool kAdd>
void launch_copy(void* dst_data, const void* src_data, Loop loop, CUstream_st* stream) {
  constexpr int kWidth = std::max(kVec<D>, kVec<S>);
  auto* dst = static_cast<D*>(dst_data);
  const auto* src = static_cast<const S*>(src_data);
  if (is_aligned16(dst) && is_aligned16(src) && rows_are_vectors(loop, kWidth)) {
    const LaunchConfig config = cut(loop, kWidth, stream);
    launch("copy", &copy_kernel<D, S, kWidth, kAdd>, config, dst, src, loop);
  } else {
    const LaunchConfig config = cut(loop, 1, stream);
    launch("copy", &copy_kernel<D, S, 1, kAdd>, config, dst, src, loop);
  }
}

/// Calls f(TypeTag<T>{}) with the unsigned integer of `nbytes` bytes.
template <class F>
void visit_size(size_t nbytes, F&& f) {
  switch (nbytes) {
    case 1:
      return f(TypeTag<uint8_t>{});
    case 2:
      return f(TypeTag<uint16_t>{});
    case 4:
      return f(TypeTag<uint32_t>{});
    default:
      return f(TypeTag<uint64_t>{});
  }
}

bool is_device_float(DType dtype) {
  return dtype == kF32 || dtype == kBF16 || dtype == kF16;
}

template <class T>
T bits_of(double value, DType dtype) {
  T bits{};
  visit_dtype(dtype, [&](auto tag) {
    using D = typename decltype(tag)::type;
    const D converted = [&] {
      if constexpr (std::is_same_v<D, BFloat16> || std::is_same_v<D, Float16>) {
        return D(static_cast<float>(value));
      } else {
        return static_cast<D>(value);
      }
    }();
    if constexpr (sizeof(D) == sizeof(T)) std::memcpy(&bits, &converted, sizeof(T));
  });
  return bits;
}

}  // namespace

void copy(CUstream_st* stream, const Copy& a) {
  if (a.shape.numel() == 0) return;
  Loop loop = merge_dims(a.shape, a.dst_strides, a.src_strides);
  if (a.dst_dtype == a.src_dtype && !a.accumulate) {
    visit_size(size_of(a.dst_dtype), [&](auto tag) {
      using T = typename decltype(tag)::type;
      launch_copy<T, T, false>(a.dst, a.src, loop, stream);
    });
    return;
  }
  if (is_device_float(a.dst_dtype) && is_device_float(a.src_dtype)) {
    visit_device_float(a.dst_dtype, "copy", [&](auto dst_tag) {
      visit_device_float(a.src_dtype, "copy", [&](auto src_tag) {
        using D = typename decltype(dst_tag)::type;
        using S = typename decltype(src_tag)::type;
        if (a.accumulate) {
          launch_copy<D, S, true>(a.dst, a.src, loop, stream);
        } else if constexpr (!std::is_same_v<D, S>) {
          launch_copy<D, S, false>(a.dst, a.src, loop, stream);
        }
      });
    });
    return;
  }
  const bool adds_doubles = size_of(a.dst_dtype) > 4 || size_of(a.src_dtype) > 4;
  const LaunchConfig config = cut(loop, 1, stream);
  launch("copy", a.accumulate ? &copy_any_kernel<true> : &copy_any_kernel<false>, config, a.dst,
         a.dst_dtype, a.src, a.src_dtype, adds_doubles, loop);
}

void fill(CUstream_st* stream, const Fill& a) {
  if (a.shape.numel() == 0) return;
  Loop loop = merge_dims(a.shape, a.strides, a.strides);
  visit_size(size_of(a.dtype), [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* dst = static_cast<T*>(a.dst);
    const T value = bits_of<T>(a.value, a.dtype);
    if (is_aligned16(dst) && rows_are_vectors(loop, kVec<T>)) {
      const LaunchConfig config = cut(loop, kVec<T>, stream);
      launch("fill", &fill_kernel<T, kVec<T>>, config, dst, value, loop);
    } else {
      const LaunchConfig config = cut(loop, 1, stream);
      launch("fill", &fill_kernel<T, 1>, config, dst, value, loop);
    }
  });
}

}  // namespace tessera::kernels::cuda
