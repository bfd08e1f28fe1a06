#pragma once

#include <cstdint>

#include "core/enum_names.h"
#include "core/tensor.h"
#include "dist/fsdp/fully_shard.h"
#include "kernels/loss_scale/loss_scale.h"

namespace tessera::dist {

/// Whether the loss is scaled, and how the scale moves.
enum class LossScaling : unsigned char {
  kNone,     ///< no scale: 1
  kStatic,   ///< stays `init`; a step that is not finite is skipped
  kDynamic,  ///< halves when a step is not finite, doubles after `interval` good ones
};
constexpr auto enum_names(LossScaling) {
  return std::to_array<EnumName<LossScaling>>({{LossScaling::kNone, "none"},
                                               {LossScaling::kStatic, "static"},
                                               {LossScaling::kDynamic, "dynamic"}});
}

/// Options of a LossScaler.
struct LossScaleOptions {
  LossScaling scaling = LossScaling::kDynamic;
  double init = 65536;  ///< a power of two changes no bit of what neither over- nor underflows
  LossScaleRule rule = {};
};

/// Keeps the gradients of an f16 model within its range: the loss is multiplied by a scale, the
/// optimizer divides by it. All of it is device scalars, the same on all ranks because each step's
/// verdict is taken from the global norm. Nothing waits for them. A step:
///
///   Tensor start = scaler.grad_scale(1.0 / num_valid);            // where backward starts
///   backward(model.loss(..., {.grad_scale = start}).sum, start);
///   ClippedNorm clip = fsdp.clip_grad_norm(1.0, 2.0, scaler.scale());  // the true norm
///   adamw.step(lr, clip.factor, clip.found_inf);                  // changes nothing if skipped
///   scaler.update(clip.found_inf);
class LossScaler {
 public:
  /// ConfigError if an option is out of range.
  explicit LossScaler(const LossScaleOptions& options = {});

  /// scale * factor, f32 []: the gradient of the loss sum (and `grad_scale` of
  /// linear_cross_entropy). A tensor of its own: `update` does not change it.
  Tensor grad_scale(double factor) const;
  /// Moves the scale by what `clip_grad_norm` found.
  void update(const Tensor& found_inf);

  const Tensor& scale() const { return state_.scale; }  ///< f32 [], changed by `update`
  const LossScaleOptions& options() const { return options_; }

  /// What a checkpoint holds. Copying into the tensors loads it; the same on all ranks.
  struct State {
    Tensor scale;        ///< f32 []
    Tensor num_good;     ///< i64 []: finite steps since the scale moved
    Tensor num_skipped;  ///< i64 []: steps skipped in all
  };
  State state() const { return state_; }

 private:
  LossScaleOptions options_;
  State state_;
};

}  // namespace tessera::dist
