#include "kernels/loss_scale/loss_scale.h"

#include "kernels/loss_scale/kernel.h"

namespace tessera {
namespace kernels {

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

TESSERA_DEFINE_KERNEL(unscale_norm, UnscaleNorm);
TESSERA_DEFINE_KERNEL(update_loss_scale, UpdateLossScale);

}  // namespace kernels

namespace {

void check_scalar(const char* op, const char* name, const Tensor& t, DType dtype) {
  TESSERA_CHECK_SHAPE(t.numel() == 1, "{}: {} must have one element, got {}", op, name, t.shape());
  TESSERA_CHECK_DTYPE(t.dtype() == dtype, "{}: {} must be {}, got {}", op, name, dtype, t.dtype());
}

}  // namespace

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
