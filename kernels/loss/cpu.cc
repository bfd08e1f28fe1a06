#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/runtime/cpu/lanes.h"
#include "core/runtime/cpu/math.h"
#include "core/runtime/cpu/parallel.h"
#include "kernels/loss/kernel.h"
#include "kernels/rows.h"
#include "kernels/softmax/exponentials.h"

// Parallel over rows. A row of logits is walked in blocks that stay in the first cache level: the
// maximum of a block, then its exponentials against the running maximum, whose sum is rescaled when
// the maximum grows. A row's result does not depend on the others.

namespace tessera::kernels::cpu {
namespace {

using tessera::cpu::exp_lanes;
using tessera::cpu::for_lanes;
using tessera::cpu::load_lanes;
using tessera::cpu::parallel_for;
using tessera::cpu::store_lanes;

constexpr int64_t kBlock = 1024;

int64_t target_at(const Targets& targets, int64_t row) {
  return targets.dtype == kI64 ? static_cast<const int64_t*>(targets.data)[row]
                               : static_cast<const int32_t*>(targets.data)[row];
}

/// Throws: to be called outside of parallel regions.
void check_targets(const Targets& targets, int64_t rows, int64_t vocab) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t target = target_at(targets, row);
    const bool is_valid = (target >= 0 && target < vocab) || target == targets.ignore_index;
    TESSERA_CHECK(is_valid,
                  "{}: target {} at position {} is outside [0, {}) and is not ignore_index ({})",
                  targets.op, target, targets.first_row + row, vocab, targets.ignore_index);
  }
}

template <class F>
void for_each_row(int64_t rows, int64_t vocab, F&& f) {
  parallel_for(rows, std::max<int64_t>(1, 16384 / vocab), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

/// The maximum so far and the sum of exponentials against it.
template <class C>
struct OnlineSum {
  C max = kLowest<C>;
  C sum = 0;

  void raise(C new_max) {
    if (!(new_max > max)) return;
    sum *= tessera::cpu::exp(max - new_max);  // max = -inf: the sum is 0 and stays 0
    max = new_max;
  }
  /// What exponentials are taken against; finite while all logits so far are -inf.
  C reference() const { return max == kLowest<C> ? C(0) : max; }
};

/// tanh(x / cap): what a capped logit is divided by cap.
template <class C>
Vector<C> capped_fraction(Vector<C> x, C cap) {
  return tessera::cpu::tanh_lanes<C>(x / cap);
}
/// The same bits for one.
template <class C>
C capped_fraction_of(C x, C cap) {
  return capped_fraction<C>(tessera::cpu::broadcast(x), cap)[0];
}

/// Of logits that a soft-cap bounds, in f32 (f64).
template <class T>
[[gnu::flatten]] OnlineSum<ComputeType<T>> capped_row_sum(const T* x, int64_t vocab,
                                                          ComputeType<T> cap) {
  using C = ComputeType<T>;
  alignas(64) C block[kBlock];
  OnlineSum<C> online;
  for (int64_t first = 0; first < vocab; first += kBlock) {
    const int64_t count = std::min(kBlock, vocab - first);
    for_lanes<C>(count, [&](int64_t c, auto lanes) {
      store_lanes<C>(block + c, capped_fraction<C>(load_lanes<C>(x + first + c, lanes), cap) * cap,
                     lanes);
    });
    online.raise(max_logit(block, count));
    online.sum += sum_exponentials<C>(block, count, online.reference(), 0, [](auto&&...) {});
  }
  return online;
}

/// The mean of a row's logits, as bounded by `cap` unless that is 0.
template <class T>
[[gnu::flatten]] ComputeType<T> row_mean(const T* x, int64_t vocab, ComputeType<T> cap) {
  using C = ComputeType<T>;
  double sum = 0;  // over blocks
  for (int64_t first = 0; first < vocab; first += kBlock) {
    Vector<C> sums = tessera::cpu::broadcast(C(0));
    for_lanes<C>(std::min(kBlock, vocab - first), [&](int64_t c, auto lanes) {
      const Vector<C> values = load_lanes<C>(x + first + c, lanes);  // 0 beyond the end
      sums += cap > 0 ? capped_fraction<C>(values, cap) * cap : values;
    });
    sum += static_cast<double>(tessera::cpu::sum_lanes<C>(sums));
  }
  return static_cast<C>(sum / static_cast<double>(vocab));
}

template <class T>
[[gnu::flatten]] OnlineSum<ComputeType<T>> row_sum(const T* x, int64_t vocab) {
  using C = ComputeType<T>;
  // Exponentials of 16-bit logits within 2^-16: their sum is off by less than a logit's rounding.
  using E = std::conditional_t<sizeof(T) == 2, Float16, T>;
  OnlineSum<C> online;
  for (int64_t first = 0; first < vocab; first += kBlock) {
    const int64_t count = std::min(kBlock, vocab - first);
    const T* block = x + first;
    online.raise(max_logit(block, count));
    online.sum += sum_exponentials<E>(block, count, online.reference(), count, [](auto&&...) {});
  }
  return online;
}

/// dst = value(c, lanes), or +=, by vectors. Each is read before it is written, so that the row may
/// lie over the logits it is made of, also if its elements are narrower.
template <class D, class C, class Value>
void write_row(D* dst, int64_t count, bool accumulate, Value&& value) {
  for_lanes<C>(count, [=](int64_t c, auto lanes) {
    Vector<C> d = value(c, lanes);
    if (accumulate) d += load_lanes<C>(dst + c, lanes);
    store_lanes<C>(dst + c, d, lanes);
  });
}

template <class D>
void zero_row(D* dst, int64_t vocab, bool accumulate) {
  if (!accumulate) std::fill(dst, dst + vocab, D(0.0f));
}

template <class T, class D>
void cross_entropy_bwd_rows(const CrossEntropyBwd& a) {
  using C = ComputeType<T>;
  using Accuracy = std::conditional_t<std::is_same_v<T, double>, T, D>;
  const C cap = static_cast<C>(a.softcap), smoothing = static_cast<C>(a.label_smoothing);
  for_each_row(a.rows, a.vocab, [&](int64_t row) {
    D* dst = static_cast<D*>(a.dlogits) + row * a.dlogits_row_stride;
    if (target_at(a.targets, row) == a.targets.ignore_index) {
      return zero_row(dst, a.vocab, a.accumulate);
    }
    const int64_t target = target_at(a.targets, row) - a.first;  // a column, if it is one of these
    const bool has_target = target >= 0 && target < a.vocab;
    const T* x = static_cast<const T*>(a.logits) + row * a.row_stride;
    const C max = static_cast<const C*>(a.stats)[2 * row];
    const C log_sum = static_cast<const C*>(a.stats)[2 * row + 1];
    const C scale = static_cast<const C*>(a.scale)[row * a.scale_stride];
    // What p, the target and all classes count.
    const C of_p = a.z_loss > 0 ? scale * (1 + 2 * C(a.z_loss) * (max + log_sum)) : scale;
    const C of_target = scale * (1 - smoothing);
    const C of_all = scale * smoothing / static_cast<C>(a.last_class());
    const bool is_plain = a.z_loss == 0 && smoothing == 0;
    const auto at_target_of = [=](C p) {
      return is_plain ? (p - 1) * scale : p * of_p - of_target - of_all;
    };
    // The target's own, where p - 1 cancels, from an accurate exponential. Its inputs are read
    // before the row is written over them.
    const C before = a.accumulate && has_target ? C(dst[target]) : C(0);
    const C target_logit = has_target ? C(x[target]) : C(0);
    if (cap > 0) {
      const C t = capped_fraction_of<C>(target_logit, cap);
      const C at_target =
          before + at_target_of(tessera::cpu::exp((t * cap - max) - log_sum)) * (1 - t * t);
      write_row<D, C>(dst, a.vocab, a.accumulate, [=](int64_t c, auto lanes) {
        const Vector<C> t_lanes = capped_fraction<C>(load_lanes<C>(x + c, lanes), cap);
        return (exp_lanes<Accuracy>((t_lanes * cap - max) - log_sum) * of_p - of_all) *
               (1 - t_lanes * t_lanes);
      });
      if (has_target) assign(dst[target], at_target);
      return;
    }
    const C at_target = before + at_target_of(tessera::cpu::exp((target_logit - max) - log_sum));
    write_row<D, C>(dst, a.vocab, a.accumulate, [=](int64_t c, auto lanes) {
      return exp_lanes<Accuracy>((load_lanes<C>(x + c, lanes) - max) - log_sum) * of_p - of_all;
    });
    if (has_target) assign(dst[target], at_target);
  });
}

template <class C, class D>
void cross_entropy_fused_rows(const CrossEntropyFused& a) {
  const C scale = *static_cast<const C*>(a.scale);
  const int64_t width = CrossEntropyFused::block_cols(a.vocab);
  const int64_t ratio = static_cast<int64_t>(sizeof(C) / sizeof(D));
  for_each_row(a.rows, a.vocab, [&](int64_t row) {
    C* x = static_cast<C*>(a.logits) + row * a.row_stride;
    D* dst = static_cast<D*>(a.logits) + row * a.row_stride * ratio;
    const int64_t target = target_at(a.targets, row);
    if (target == a.targets.ignore_index) {
      static_cast<C*>(a.losses)[row] = 0;
      return zero_row(dst, a.vocab, false);
    }
    const C target_logit = x[target];
    // The maximum that each block's exponentials were taken against.
    C references[CrossEntropyFused::kMaxBlocks];
    OnlineSum<C> online;
    for (int64_t first = 0, k = 0; first < a.vocab; first += width, ++k) {
      const int64_t count = std::min(width, a.vocab - first);
      C* block = x + first;
      online.raise(max_logit(block, count));
      references[k] = online.max;  // -inf: its exponentials, all 0, get the factor 0
      online.sum += sum_exponentials<C>(block, count, online.reference(), count,
                                        [=](int64_t c, const Group<C>& e, auto lanes) {
                                          tessera::cpu::store_group(block + c, e, lanes);
                                        });
    }
    static_cast<C*>(a.losses)[row] = std::log(online.sum) - (target_logit - online.max);
    if (a.stats != nullptr) {
      C* const stats = static_cast<C*>(a.stats) + row * a.stats_stride;
      stats[0] = online.max, stats[1] = online.sum;
      std::copy_n(references, a.stats_stride - 2, stats + 2);
    }
    const C inverse_sum = scale / online.sum;
    for (int64_t first = 0, k = 0; first < a.vocab; first += width, ++k) {
      const C factor = tessera::cpu::exp(references[k] - online.max) * inverse_sum;
      const C* block = x + first;
      write_row<D, C>(
          dst + first, std::min(width, a.vocab - first), false,
          [=](int64_t c, auto lanes) { return load_lanes<C>(block + c, lanes) * factor; });
    }
    assign(dst[target], tessera::cpu::exp(target_logit - online.max) * inverse_sum - scale);
  });
}

/// Columns [first, first + vocab) of what cross_entropy_fused_rows made of the same logits.
template <class C, class D>
void cross_entropy_fused_again(const CrossEntropyBwd& a) {
  const C scale = *static_cast<const C*>(a.scale);
  const int64_t width = CrossEntropyFused::block_cols(a.last_class());
  for_each_row(a.rows, a.vocab, [&](int64_t row) {
    const C* x = static_cast<const C*>(a.logits) + row * a.row_stride;
    D* dst = static_cast<D*>(a.dlogits) + row * a.dlogits_row_stride;
    if (target_at(a.targets, row) == a.targets.ignore_index) return zero_row(dst, a.vocab, false);
    const int64_t target = target_at(a.targets, row) - a.first;
    const bool has_target = target >= 0 && target < a.vocab;
    const C target_logit = has_target ? x[target] : C(0);
    const C* const stats = static_cast<const C*>(a.stats) + row * a.stats_stride;
    const C max = stats[0], inverse_sum = scale / stats[1];
    for (int64_t begin = 0; begin < a.vocab;) {
      const int64_t block = (a.first + begin) / width;
      const int64_t end = std::min(a.vocab, (block + 1) * width - a.first);
      const C block_max = stats[2 + block];
      const C reference = block_max == kLowest<C> ? C(0) : block_max;
      const C factor = tessera::cpu::exp(block_max - max) * inverse_sum;
      const C* part = x + begin;
      write_row<D, C>(dst + begin, end - begin, false, [=](int64_t c, auto lanes) {
        return exp_lanes<C>(load_lanes<C>(part + c, lanes) - reference) * factor;
      });
      begin = end;
    }
    if (has_target) {
      assign(dst[target], tessera::cpu::exp(target_logit - max) * inverse_sum - scale);
    }
  });
}

template <class C>
void add_losses(const LossTotal& a) {
  double sum = 0;
  int64_t count = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    if (target_at(a.targets, row) == a.targets.ignore_index) continue;
    sum += static_cast<double>(static_cast<const C*>(a.losses)[row]);
    ++count;
  }
  *static_cast<C*>(a.sum) = static_cast<C>(sum);
  *static_cast<C*>(a.count) = static_cast<C>(count);
}

/// Calls f with the C++ types of logits and of their gradient.
template <class F>
void visit_types(const char* op, DType dtype, DType dlogits_dtype, F&& f) {
  visit_float(dtype, op, [&](auto tag) {
    if (dlogits_dtype == dtype) return f(tag, tag);
    if (dtype == kF32 && dlogits_dtype == kBF16) return f(tag, TypeTag<BFloat16>{});
    f(tag, TypeTag<Float16>{});
  });
}

}  // namespace

void cross_entropy_fwd(const CrossEntropyFwd& a) {
  check_targets(a.targets, a.rows, a.vocab);
  visit_float(a.dtype, a.targets.op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    for_each_row(a.rows, a.vocab, [&](int64_t row) {
      const int64_t target = target_at(a.targets, row);
      const T* x = static_cast<const T*>(a.logits) + row * a.row_stride;
      C loss = 0, max = 0, log_sum = 0;
      if (target != a.targets.ignore_index) {
        const C cap = static_cast<C>(a.softcap);
        const OnlineSum<C> online = cap > 0 ? capped_row_sum(x, a.vocab, cap) : row_sum(x, a.vocab);
        const C logit = cap > 0 ? capped_fraction_of<C>(C(x[target]), cap) * cap : C(x[target]);
        max = online.max, log_sum = std::log(online.sum);
        loss = log_sum - (logit - max);
        if (a.label_smoothing > 0) {
          loss += C(a.label_smoothing) * (logit - row_mean(x, a.vocab, cap));
        }
        const C log_z = max + log_sum;
        if (a.z_loss > 0) loss += C(a.z_loss) * log_z * log_z;
      }
      static_cast<C*>(a.losses)[row] = loss;
      if (a.stats != nullptr) {
        static_cast<C*>(a.stats)[2 * row] = max;
        static_cast<C*>(a.stats)[2 * row + 1] = log_sum;
      }
    });
  });
}

void cross_entropy_bwd(const CrossEntropyBwd& a) {
  if (a.of_fused) {
    if (a.dtype == kF64) return cross_entropy_fused_again<double, double>(a);
    return visit_types(a.targets.op, kF32, a.dlogits_dtype, [&](auto, auto d) {
      using D = typename decltype(d)::type;
      if constexpr (!std::is_same_v<D, double>) cross_entropy_fused_again<float, D>(a);
    });
  }
  visit_types(a.targets.op, a.dtype, a.dlogits_dtype, [&](auto t, auto d) {
    cross_entropy_bwd_rows<typename decltype(t)::type, typename decltype(d)::type>(a);
  });
}

void cross_entropy_fused(const CrossEntropyFused& a) {
  check_targets(a.targets, a.rows, a.vocab);
  if (a.dtype == kF64) return cross_entropy_fused_rows<double, double>(a);
  visit_types(a.targets.op, kF32, a.dlogits_dtype, [&](auto, auto d) {
    using D = typename decltype(d)::type;
    if constexpr (!std::is_same_v<D, double>) cross_entropy_fused_rows<float, D>(a);
  });
}

void loss_total(const LossTotal& a) {
  a.dtype == kF64 ? add_losses<double>(a) : add_losses<float>(a);
}

}  // namespace tessera::kernels::cpu
