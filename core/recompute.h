#pragma once

#include <functional>
#include <vector>

#include "core/tensor.h"

namespace tessera {

/// Activation checkpointing: runs `fn(inputs)` without saving anything, and once more, with grad
/// mode on, when its gradient is needed. The second run draws the same random numbers, so it gives
/// the same bits. Peak memory falls by what `fn` saves; `inputs` stay alive.
/// Parameters that `fn` captures get their gradients as usual.
Tensor recompute(const std::function<Tensor(const std::vector<Tensor>&)>& fn,
                 const std::vector<Tensor>& inputs);

/// True during the first run, whose backward is still to come although grad mode is off.
bool is_checkpointing();
/// True during the second run (units do not count it as a call).
bool is_recomputing();

}  // namespace tessera
