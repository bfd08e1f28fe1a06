#pragma once

#include "core/autograd.h"

namespace tessera::kernels {

/// Whether a kernel of one flat loop can read it.
inline bool is_contiguous_float(const Tensor& t) {
  return t.is_contiguous() && is_floating(t.dtype());
}

/// The gradient destination of one input for a kernel that cannot address every layout and dtype:
/// one that it cannot is replaced by a temporary, which `finish` copies or adds to it.
///   Destination dx(g, 0);
///   const GradDst& slot = dx.claim([&](const Tensor& view) { return ...; }, x.dtype());
///   ... submit the kernel that writes `slot` ...
///   dx.finish();
class Destination {
 public:
  Destination(Grads& g, int input) : g_(g), input_(input) {}

  /// The view to write, undefined if nobody wants the gradient. `can_write(view)` says whether the
  /// kernel can address it; if not, the temporary is contiguous with the given dtype.
  template <class CanWrite>
  const GradDst& claim(CanWrite&& can_write, DType dtype) {
    destination_ = slot_ = g_.destination(input_);
    if (!slot_) return slot_;
    is_direct_ = static_cast<bool>(can_write(slot_.view));
    if (!is_direct_) slot_ = {empty(destination_.view.shape(), dtype), false};
    return slot_;
  }
  void finish() {
    if (!destination_) return;
    if (!is_direct_ && destination_.accumulate) destination_.view.add_(slot_.view);
    if (!is_direct_ && !destination_.accumulate) destination_.view.copy_(slot_.view);
    g_.written(input_);
  }

 private:
  Grads& g_;
  int input_;
  bool is_direct_ = true;
  GradDst destination_, slot_;
};

}  // namespace tessera::kernels
