#include "kernels/random/random.h"

#include <cmath>

#include "core/autograd.h"
#include "kernels/destination.h"
#include "kernels/elementwise/row_view.h"
#include "kernels/random/kernel.h"

namespace tessera {

namespace kernels {

namespace {

/// Ten rounds of two multiplications and four exclusive ors, for four words.
constexpr double kPhiloxFlops = 15;

}  // namespace

Cost Dropout::cost() const {
  const auto nbytes = [&](int64_t stride, DType t) {
    return rows == 0 ? 0 : ((rows - 1) * stride + cols) * static_cast<int64_t>(size_of(t));
  };
  return Cost(static_cast<double>(rows * cols) * (kPhiloxFlops + 1))
      .read(x, nbytes(x_stride, dtype))
      .write_or_accumulate(y, nbytes(y_stride, y_dtype), accumulate);
}

Cost FillNormal::cost() const {
  return Cost(static_cast<double>(numel) * (kPhiloxFlops + 15))
      .write(x, numel * static_cast<int64_t>(size_of(dtype)));
}

Cost FillUniform::cost() const {
  return Cost(static_cast<double>(numel) * (kPhiloxFlops + 3))
      .write(x, numel * static_cast<int64_t>(size_of(dtype)));
}

TESSERA_DEFINE_KERNEL(dropout, Dropout);
TESSERA_DEFINE_KERNEL(fill_normal, FillNormal);
TESSERA_DEFINE_KERNEL(fill_uniform, FillUniform);

}  // namespace kernels

void apply_dropout(const DropoutMask& mask, const Tensor& y, bool accumulate, const Tensor& x) {
  if (x.numel() == 0) return;
  // Rows count for the mask, so that they are not merged even where all is contiguous.
  const int64_t cols = x.num_dims() < 2 ? 1 : x.dim(-1);
  const auto stride = [&](const Tensor& t) { return t.is_contiguous() ? cols : t.row_stride(); };
  kernels::dropout(current_stream(), {.y = y.raw_data(),
                                      .x = x.raw_data(),
                                      .y_dtype = y.dtype(),
                                      .dtype = x.dtype(),
                                      .key = mask.key,
                                      .threshold = static_cast<uint32_t>(mask.p * 0x1p32),
                                      .factor = 1.0 / (1.0 - mask.p),
                                      .first_row = mask.first_row,
                                      .rows = x.numel() / cols,
                                      .cols = cols,
                                      .y_stride = stride(y),
                                      .x_stride = stride(x),
                                      .accumulate = accumulate});
}

namespace {

void check_fill(const char* op, const Tensor& x, int64_t first_element) {
  TESSERA_CHECK_DTYPE(is_floating(x.dtype()), "{}: expected a floating dtype, got {}", op,
                      x.dtype());
  TESSERA_CHECK_SHAPE(x.is_contiguous(), "{}: x must be contiguous, got {} with strides {}", op,
                      x.shape(), x.strides());
  TESSERA_CHECK(first_element >= 0, "{}: first_element must be >= 0, got {}", op, first_element);
}

}  // namespace

DropoutMask draw_dropout_mask(const Tensor& x, double p) {
  RandomState& state = random_state();
  const uint64_t op_index = state.op_index++;
  const PhiloxKey step_key = make_key(state.seed, state.step);
  const int64_t samples = x.num_dims() == 0 ? 1 : x.dim(0);
  const int64_t cols = x.num_dims() < 2 ? 1 : x.dim(-1);
  const int64_t rows_per_sample = x.numel() == 0 ? 0 : x.numel() / cols / samples;
  return {make_key(uint64_t{step_key.k1} << 32 | step_key.k0, op_index), p,
          state.sample_offset * rows_per_sample};
}

Tensor dropout(const Tensor& input, double p) {
  TESSERA_CHECK(p >= 0 && p < 1, "dropout: p must be in [0, 1), got {}", p);
  TESSERA_CHECK_DTYPE(is_floating(input.dtype()), "dropout: expected a floating dtype, got {}",
                      input.dtype());
  const DropoutMask mask = draw_dropout_mask(input, p);
  if (p == 0) return input;

  const Tensor x = row_addressable(input);
  const Tensor y = empty(x.shape(), x.dtype());
  apply_dropout(mask, y, false, x);
  return record("dropout", {input}, y, [mask](const Tensor& dy, Grads& g) {
    if (!g.wanted(0)) return;
    kernels::Destination destination(g, 0);
    const GradDst& dx = destination.claim(is_row_addressable, dy.dtype());
    apply_dropout(mask, dx.view, dx.accumulate, row_addressable(dy));
    destination.finish();
  });
}

void fill_normal(const Tensor& x, double mean, double stddev, PhiloxKey key,
                 int64_t first_element) {
  check_fill("fill_normal", x, first_element);
  if (x.numel() == 0) return;
  ++*x.impl()->version;
  kernels::fill_normal(current_stream(), {.x = x.raw_data(),
                                          .dtype = x.dtype(),
                                          .key = key,
                                          .first_element = first_element,
                                          .numel = x.numel(),
                                          .mean = mean,
                                          .stddev = stddev});
}

void fill_uniform(const Tensor& x, double low, double high, PhiloxKey key, int64_t first_element) {
  check_fill("fill_uniform", x, first_element);
  if (x.numel() == 0) return;
  ++*x.impl()->version;
  kernels::fill_uniform(current_stream(), {.x = x.raw_data(),
                                           .dtype = x.dtype(),
                                           .key = key,
                                           .first_element = first_element,
                                           .numel = x.numel(),
                                           .low = low,
                                           .high = high});
}

}  // namespace tessera
