#include "kernels/loss_scale/loss_scale.h"

#include "kernels/loss_scale/kernel.h"

namespace tessera {
namespace kernels {

Cost ScaleCheck::cost() const {
  const auto nbytes_of = [&](DType t) { return numel * static_cast<int64_t>(size_of(t)); };
  return Cost(static_cast<double>(numel))
      .read(x, nbytes_of(dtype))
      .write(dst, nbytes_of(dst_dtype))
      .write_or_accumulate(found_inf, 1, true);
}

Cost UnscaleNorm::cost() const {
  return Cost(5)
      .write_or_accumulate(norm, sizeof(float), true)
      .write(factor, sizeof(float))
      .write(found_inf, 1)
      .read(scale, sizeof(float));
}

Cost UpdateLossScale::cost() const {
  return Cost(2)
      .write_or_accumulate(scale, sizeof(float), true)
      .write_or_accumulate(num_good, sizeof(int64_t), true)
      .write_or_accumulate(num_skipped, sizeof(int64_t), true)
      .read(found_inf, 1);
}

TESSERA_DEFINE_KERNEL(scale_check, ScaleCheck);
TESSERA_DEFINE_KERNEL(unscale_norm, UnscaleNorm);
TESSERA_DEFINE_KERNEL(update_loss_scale, UpdateLossScale);

}  // namespace kernels

namespace {

void check_scalar(const char* op, const char* name, const Tensor& t, DType dtype) {
  TESSERA_CHECK_SHAPE(t.numel() == 1, "{}: {} must have one element, got {}", op, name, t.shape());
  TESSERA_CHECK_DTYPE(t.dtype() == dtype, "{}: {} must be {}, got {}", op, name, dtype, t.dtype());
}

}  // namespace

Tensor scale_check(const Tensor& x, double factor, const Tensor& found_inf) {
  TESSERA_CHECK_DTYPE(x.dtype() == kF32 || x.dtype() == kBF16 || x.dtype() == kF16,
                      "scale_check: x must be f32, bf16 or f16, got {}", x.dtype());
  TESSERA_CHECK_SHAPE(x.is_contiguous(), "scale_check: x must be contiguous, got strides {} of {}",
                      fmt::join(x.strides(), ", "), x.shape());
  check_scalar("scale_check", "found_inf", found_inf, kU8);
  Tensor scaled = empty(x.shape(), x.dtype());
  kernels::scale_check(current_stream(), {.dst = scaled.raw_data(),
                                          .x = x.raw_data(),
                                          .found_inf = found_inf.data<uint8_t>(),
                                          .dst_dtype = x.dtype(),
                                          .dtype = x.dtype(),
                                          .factor = static_cast<float>(factor),
                                          .numel = x.numel()});
  return scaled;
}

void unscale_norm(const Tensor& norm, const Tensor& factor, const Tensor& found_inf,
                  const Tensor& scale, double grad_factor, double max_norm) {
  TESSERA_CHECK(max_norm > 0, "unscale_norm: max_norm must be > 0, got {}", max_norm);
  TESSERA_CHECK(grad_factor > 0, "unscale_norm: grad_factor must be > 0, got {}", grad_factor);
  check_scalar("unscale_norm", "norm", norm, kF32);
  check_scalar("unscale_norm", "factor", factor, kF32);
  check_scalar("unscale_norm", "found_inf", found_inf, kU8);
  if (scale.is_defined()) check_scalar("unscale_norm", "scale", scale, kF32);
  kernels::unscale_norm(current_stream(),
                        {.norm = norm.data<float>(),
                         .factor = factor.data<float>(),
                         .found_inf = found_inf.data<uint8_t>(),
                         .scale = scale.is_defined() ? scale.data<float>() : nullptr,
                         .grad_factor = static_cast<float>(grad_factor),
                         .max_norm = static_cast<float>(max_norm)});
}

void update_loss_scale(const Tensor& scale, const Tensor& num_good, const Tensor& num_skipped,
                       const Tensor& found_inf, const LossScaleRule& rule) {
  check_scalar("update_loss_scale", "scale", scale, kF32);
  check_scalar("update_loss_scale", "num_good", num_good, kI64);
  check_scalar("update_loss_scale", "num_skipped", num_skipped, kI64);
  check_scalar("update_loss_scale", "found_inf", found_inf, kU8);
  kernels::update_loss_scale(current_stream(), {.scale = scale.data<float>(),
                                                .num_good = num_good.data<int64_t>(),
                                                .num_skipped = num_skipped.data<int64_t>(),
                                                .found_inf = found_inf.data<uint8_t>(),
                                                .growth = static_cast<float>(rule.growth),
                                                .backoff = static_cast<float>(rule.backoff),
                                                .min_scale = static_cast<float>(rule.min_scale),
                                                .max_scale = static_cast<float>(rule.max_scale),
                                                .interval = rule.interval});
}

}  // namespace tessera
