// Copy and fill for the CPU. Dimensions that are contiguous in all operands are merged first, so
// that the inner loop is as long as it can be; it is vectorized where both sides have unit stride.
#include <cstring>

#include "core/elementary/kernel.h"
#include "core/runtime/cpu/parallel.h"

namespace tessera::kernels::cpu {
namespace {

using tessera::cpu::parallel_for;

constexpr int64_t kGrain = 32768;  // elements a thread, about 20 us of copying

/// Rows of an inner loop: outer dims [0, n - 1) and the inner dim, after merging.
struct Loop {
  Shape shape;
  Strides dst, src;
};

Loop merge_dims(const Shape& shape, const Strides& dst, const Strides& src) {
  Loop loop;
  for (int i = 0; i < shape.num_dims(); ++i) {
    if (shape[i] == 1) continue;
    const int last = loop.shape.num_dims() - 1;
    if (last >= 0 && loop.dst[last] == dst[i] * shape[i] && loop.src[last] == src[i] * shape[i]) {
      loop.shape[last] *= shape[i];
      loop.dst[last] = dst[i];
      loop.src[last] = src[i];
    } else {
      loop.shape.push_back(shape[i]);
      loop.dst.push_back(dst[i]);
      loop.src.push_back(src[i]);
    }
  }
  if (loop.shape.num_dims() == 0) loop = {{1}, {1}, {1}};
  return loop;
}

/// Calls f(dst_offset, src_offset, count) for pieces of inner rows that cover everything.
template <class F>
void for_each_row(const Loop& loop, F&& f) {
  const int inner = loop.shape.num_dims() - 1;
  const int64_t row = loop.shape[inner], rows = loop.shape.numel() / std::max<int64_t>(row, 1);
  if (rows == 1) {  // one long row: split it
    parallel_for(row, kGrain, [&](int64_t begin, int64_t end) {
      f(begin * loop.dst[0], begin * loop.src[0], end - begin);
    });
    return;
  }
  parallel_for(rows, std::max<int64_t>(1, kGrain / row), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      int64_t rest = r, dst = 0, src = 0;
      for (int i = inner - 1; i >= 0; --i) {
        const int64_t index = rest % loop.shape[i];
        rest /= loop.shape[i];
        dst += index * loop.dst[i];
        src += index * loop.src[i];
      }
      f(dst, src, row);
    }
  });
}

template <class D, class S>
D convert(S value) {
  if constexpr (std::is_same_v<D, S>)
    return value;
  else if constexpr (std::is_same_v<D, BFloat16> || std::is_same_v<D, Float16>)
    return D(static_cast<float>(value));
  else if constexpr (std::is_same_v<S, BFloat16> || std::is_same_v<S, Float16>)
    return static_cast<D>(static_cast<float>(value));
  else
    return static_cast<D>(value);
}

/// f32, or f64 if either side is wider than f32.
template <class D, class S>
using AddType = std::conditional_t<(sizeof(D) > 4 || sizeof(S) > 4), double, float>;

template <class D, class S, bool kAdd>
void copy_row(D* dst, int64_t dst_stride, const S* src, int64_t src_stride, int64_t count) {
  const auto value = [](const D& old, const S& fresh) {
    if constexpr (kAdd) {
      using A = AddType<D, S>;
      return convert<D>(convert<A>(old) + convert<A>(fresh));
    } else {
      return convert<D>(fresh);
    }
  };
  if (dst_stride == 1 && src_stride == 1) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) dst[i] = value(dst[i], src[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      dst[i * dst_stride] = value(dst[i * dst_stride], src[i * src_stride]);
    }
  }
}

}  // namespace

void copy(const Copy& a) {
  if (a.shape.numel() == 0) return;
  const Loop loop = merge_dims(a.shape, a.dst_strides, a.src_strides);
  const int inner = loop.shape.num_dims() - 1;
  visit_dtype(a.dst_dtype, [&](auto dst_tag) {
    visit_dtype(a.src_dtype, [&](auto src_tag) {
      using D = typename decltype(dst_tag)::type;
      using S = typename decltype(src_tag)::type;
      auto* dst = static_cast<D*>(a.dst);
      const auto* src = static_cast<const S*>(a.src);
      const int64_t ds = loop.dst[inner], ss = loop.src[inner];
      for_each_row(loop, [&](int64_t d, int64_t s, int64_t count) {
        if (a.accumulate) {
          copy_row<D, S, true>(dst + d, ds, src + s, ss, count);
        } else if (std::is_same_v<D, S> && ds == 1 && ss == 1) {
          std::memcpy(static_cast<void*>(dst + d), src + s, static_cast<size_t>(count) * sizeof(D));
        } else {
          copy_row<D, S, false>(dst + d, ds, src + s, ss, count);
        }
      });
    });
  });
}

void fill(const Fill& a) {
  if (a.shape.numel() == 0) return;
  const Loop loop = merge_dims(a.shape, a.strides, a.strides);
  const int64_t stride = loop.dst[loop.shape.num_dims() - 1];
  visit_dtype(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T value = convert<T>(a.value);
    for_each_row(loop, [&](int64_t d, int64_t, int64_t count) {
      T* dst = static_cast<T*>(a.dst) + d;
      for (int64_t i = 0; i < count; ++i) dst[i * stride] = value;
    });
  });
}

}  // namespace tessera::kernels::cpu
