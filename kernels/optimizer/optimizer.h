#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/random.h"
#include "core/tensor.h"

// Updates of flat f32 shards in one pass over memory. Not differentiable. All scalars that depend
// on the step's numbers (step count, scale of the gradient, whether to skip) are on the device, so
// the host never waits. The bits do not depend on the number of threads.

namespace tessera {

/// Elements [begin, end) of a shard, and what multiplies the learning rate and weight decay there.
struct FlatSegment {
  int64_t begin = 0, end = 0;
  float lr_scale = 1;
  float decay_scale = 1;
  // For stochastic rounding of `low`.
  PhiloxKey key = {};         ///< of the parameter that the segment is a part of
  int64_t first_element = 0;  ///< `begin` is this element of it
};

/// The segments of a shard on the device.
struct FlatSegments {
  Tensor bounds;    ///< i64 [S, 2]
  Tensor factors;   ///< f32 [S, 2]
  Tensor rounding;  ///< i64 [S, 2], or undefined
};

/// Copies the segments of a shard of `numel` elements to the device. Error unless they are in
/// ascending order, do not overlap and lie within the shard. `has_rounding`: with what stochastic
/// rounding needs.
FlatSegments flat_segments(std::span<const FlatSegment> segments, int64_t numel,
                           bool has_rounding = false);

/// What every update reads and writes; kernel.h of this family has the formulas. Elements outside
/// the segments are neither read nor written.
struct FlatUpdate {
  Tensor master;          ///< f32 [numel]
  Tensor grad;            ///< f32 | bf16 | f16 [numel]
  Tensor low;             ///< undefined, or any floating dtype [numel]: the new master, rounded
  FlatSegments segments;  ///< of the whole shard
  Tensor grad_scale;      ///< undefined, or f32 []: multiplies the gradient
  Tensor skip;            ///< undefined, or u8 []: not 0 leaves everything as it is
  float lr = 0;
  float weight_decay = 0;
  int64_t first = 0;  ///< the tensors begin at this element of the shard
  /// Undefined, or i64 []: `low` (bf16 | f16) is rounded stochastically, up or down, such that its
  /// expectation is the master, and values that it can hold stay (Gupta et al. 2015,
  /// arXiv:1502.02551). The random bits are a function of a segment's key, this step and the
  /// element of the parameter: not of sharding, threads or device. What is beyond the largest
  /// finite value is rounded to nearest. At step 0 everything is.
  Tensor rounding_step = {};
};

struct AdamWUpdate {
  Tensor exp_avg, exp_avg_sq;  ///< f32 [numel]
  Tensor step;                 ///< i64 []: this step, counted from 1 (see `advance_step`)
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
};
/// AdamW with decoupled weight decay. ShapeError or DtypeError if a tensor does not fit.
void adamw_step(const FlatUpdate& update, const AdamWUpdate& adamw);

struct AdamW8bitUpdate {
  Tensor exp_avg, exp_avg_sq;                ///< u8 [numel]: codes
  Tensor exp_avg_absmax, exp_avg_sq_absmax;  ///< f32 [numel / 256], rounded up
  Tensor maps;                               ///< f32 [1024]: `kernels::dynamic_maps`
  Tensor step;                               ///< i64 []
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
};
/// AdamW with moments of 8 bits, in blocks of 256 elements that share a scale; segments and `first`
/// begin at multiples of 256. ShapeError or DtypeError if a tensor does not fit.
void adamw_8bit_step(const FlatUpdate& update, const AdamW8bitUpdate& adamw);

struct SgdUpdate {
  Tensor momentum_buffer;  ///< f32 [numel]; undefined without momentum
  float momentum = 0;
  bool nesterov = false;
};
/// Gradient descent with momentum; weight decay is added to the gradient. ShapeError or DtypeError
/// if a tensor does not fit.
void sgd_step(const FlatUpdate& update, const SgdUpdate& sgd);

struct MuonDirectionUpdate {
  Tensor momentum_buffer;  ///< f32 [numel]
  Tensor direction;        ///< bf16 [numel], written
  float momentum = 0.95f;
  bool nesterov = true;
};
/// The momentum of Muon, and what is orthogonalized. Neither master nor low changes. ShapeError or
/// DtypeError if a tensor does not fit.
void muon_direction(const FlatUpdate& update, const MuonDirectionUpdate& muon);

struct MuonApplyUpdate {
  Tensor orthogonal;  ///< bf16 [numel]
  Tensor scales;      ///< f32 [S]: of the segments
};
/// master = master (1 - lr weight_decay) - lr scale orthogonal; the gradient is not read. ShapeError
/// or DtypeError if a tensor does not fit.
void muon_apply(const FlatUpdate& update, const MuonApplyUpdate& muon);

struct LionUpdate {
  Tensor exp_avg;  ///< f32 [numel]
  double beta1 = 0.9, beta2 = 0.99;
};
/// Lion with decoupled weight decay. ShapeError or DtypeError if a tensor does not fit.
void lion_step(const FlatUpdate& update, const LionUpdate& lion);

/// The parts of Adafactor that go over a shard; kernel.h has the formulas and the layout of `values`
/// and `places`. ShapeError or DtypeError if a tensor does not fit.
void adafactor_collect(const FlatUpdate& update, const Tensor& scaled, const Tensor& squares);
void adafactor_apply(const FlatUpdate& update, const Tensor& scaled, const Tensor& values,
                     const Tensor& places, double eps1);

/// low = the master of `update`, rounded as the update of its `rounding_step` did: for masters that
/// come from elsewhere, such as a checkpoint. ShapeError or DtypeError if a tensor does not fit.
void round_low(const FlatUpdate& update);

/// step (i64 []) += 1, unless skip (undefined, or u8 []) is not 0.
void advance_step(const Tensor& step, const Tensor& skip = {});

}  // namespace tessera
