#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/tensor.h"

namespace tessera {

class HostCheckpoints;

/// Activation checkpointing: runs `fn(inputs)` without saving anything, and once more, with grad
/// mode on, when its gradient is needed. The second run draws the same random numbers, so it gives
/// the same bits. Peak memory falls by what `fn` saves; `inputs` stay alive, in host memory with `host`
/// (host_checkpoints.h).
/// Parameters that `fn` captures get their gradients as usual.
Tensor recompute(const std::function<Tensor(const std::vector<Tensor>&)>& fn,
                 const std::vector<Tensor>& inputs, HostCheckpoints* host = nullptr);

/// Selective checkpointing: `consume(produce(inputs))`, where the first output of `produce` (of a
/// norm or an activation, cheap to have again) loses its bytes once `consume` is through. When a
/// gradient reaches the result, `produce` runs again, draws the same random numbers and brings the
/// bytes back, so whatever `consume` has saved of that output is valid. Other outputs stay.
/// `consume` must not return a view of the first output. With grad mode off nothing is dropped.
Tensor recompute_output(
    const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& produce,
    const std::function<Tensor(const std::vector<Tensor>&)>& consume,
    const std::vector<Tensor>& inputs);

/// A function of rows: of x [n, C], and of what it adds to the result, [n, N] or undefined.
using RowsFunction = std::function<Tensor(const Tensor& x_RC, const Tensor& residual_RN)>;

/// residual + f(x), tile by tile: `fn(x, residual)` on up to `tile_rows` rows at a time, which it takes
/// apart from each other. Forward keeps x alone. Backward takes a tile after the other, from the last
/// to the first: it runs `fn(x, {})` again, with the same random numbers, and then its backward. So
/// what `fn` needs inside is memory of one tile, whatever the number of rows.
/// Shapes   x [..., C], residual [..., N] or undefined -> [..., N]
/// Random   a row has the numbers that it would have in `fn` of all rows
/// Saves    x; nothing of residual, whose gradient is dy
/// Grads    those of parameters that `fn` captures add up over tiles; where the memory of one that
///          `parameters` lists is bf16 or f16, in f32, with one rounding
/// Bits     those of `fn(x, residual)` as far as a row's do not depend on others. Gradients of parameters
///          are sums in another order, unless there is one tile
/// Errors   ShapeError if x has no rows; Error if tile_rows < 1
Tensor recompute_rows(const RowsFunction& fn, const Tensor& x, const Tensor& residual,
                      int64_t tile_rows, const std::function<std::vector<Tensor>()>& parameters);

/// True during the first run, whose backward is still to come although grad mode is off.
bool is_checkpointing();
/// True during the second run (units do not count it as a call).
bool is_recomputing();
/// Identifies the `recompute` whose first or second run this is (the outermost one, if nested); 0
/// outside of any, and in the second run of `recompute_output`. Whatever ran after it in the
/// forward has had its gradients when the second run begins.
int64_t recompute_region();

}  // namespace tessera
