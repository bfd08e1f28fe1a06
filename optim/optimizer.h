#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "kernels/optimizer/optimizer.h"
#include "optim/flat_shard.h"
#include "optim/shard_store.h"

namespace tessera::optim {

/// One kind of optimizer state, for checkpoints: `tensors[i]` belongs to shard i; undefined where an
/// optimizer without this state updates the shard. Value k of it belongs to elements
/// [k block, (k + 1) block) of the master, which no two parameters share.
struct NamedState {
  std::string name;  ///< "exp_avg"
  std::vector<Tensor> tensors;
  int64_t block = 1;
};

/// A state that is not an element's: of the shape that it has in a checkpoint.
struct WholeState {
  std::string name;
  Tensor values;  ///< f32
};

/// What `Optimizer::step` is given.
struct StepScalars {
  float lr = 0;
  Tensor grad_scale, skip;
};

/// Updates flat shards in place: the f32 masters and their low-precision copies. Everything runs on
/// the current stream; neither construction nor `step` waits for it.
/// Memory   4 bytes per element and f32 state (class kOptimizer), and the segment tables; a shard
///          with a store keeps its states there, and its update passes through windows, with the
///          same bits
/// State    the number of steps taken is a device scalar, because only the device knows whether a
///          step was skipped
class Optimizer {
 public:
  /// `weight_decay`: of segments that decay and have none of their own. With `rounding_seed`
  /// low-precision copies are rounded stochastically (`FlatUpdate::rounding_step`).
  /// ShapeError or DtypeError if a shard's tensors do not fit, Error if its segments overlap.
  Optimizer(std::vector<FlatShard> shards, double lr, double weight_decay,
            std::optional<uint64_t> rounding_seed = std::nullopt);
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One step on all shards. `grad_scale` (f32 [], may be undefined) multiplies the gradients: the
  /// clip factor times one over the loss scale. If `skip` (u8 [], may be undefined) is not 0 on the
  /// device, then nothing changes, neither parameters nor states nor the step count.
  /// Errors   Error of the shards' owner (Fsdp): a call before it is missing, or it has ended
  void step(float lr, const Tensor& grad_scale = {}, const Tensor& skip = {});
  /// With the learning rate of the options.
  void step() { step(lr_); }

  virtual bool has_stochastic_rounding() const { return rounding_seed_.has_value(); }
  /// Makes the low-precision copies again as the last step made them, after masters and step count
  /// were loaded.
  virtual void round_low();

  /// The states in a fixed order; writing into the tensors loads them.
  virtual std::vector<NamedState> state() const = 0;
  /// States of whole parameters, which all ranks have alike, by name: "row_var/head.weight".
  virtual std::vector<WholeState> whole_state() const { return {}; }
  /// i64 []: steps taken and not skipped.
  const Tensor& step_count() const { return step_count_; }
  const std::vector<FlatShard>& shards() const { return shards_; }

 protected:
  /// Of several optimizers, which have the tables.
  explicit Optimizer(std::vector<FlatShard> shards);

  /// Updates all shards; the step count is already that of this step. By default `update_shard` for
  /// each part.
  virtual void update(const StepScalars& step);
  /// Updates a shard or a part of it, with its states in the order of `state`.
  virtual void update_shard(const FlatUpdate& update, std::span<const Tensor> states);
  /// A zeroed state of each shard: one value of `dtype` for `block` elements.
  NamedState make_state(std::string name, DType dtype = kF32, int64_t block = 1) const;
  /// Error for a segment that begins elsewhere than at a multiple of `kernels::kStateBlock`.
  void check_state_blocks(const char* optimizer) const;
  /// What an update reads and writes beside the gradients' shards.
  struct PartUse {
    bool states = true, master = true, grad = true;
  };
  /// Updates a part with its states.
  using PartUpdate = std::function<void(const FlatUpdate&, std::span<const Tensor>)>;
  /// Calls `f` with shards [begin, end), or with windows that cover them, the scalars of the step in
  /// them, and their states.
  void for_parts(size_t begin, size_t end, const StepScalars& step, PartUse use,
                 const PartUpdate& f);

  friend class OptimizerSet;
  std::vector<FlatShard> shards_;
  std::vector<FlatSegments> segments_;
  Tensor step_count_;
  std::optional<uint64_t> rounding_seed_;
  float lr_ = 0;
};

/// ConfigError "AdamW: beta1 must be in [0, 1), got 1" unless `is_right`.
void check_range(bool is_right, const char* optimizer, const char* name, const char* range,
                 double value);
/// The same for what must be in [0, 1), and for what must be at least 0.
void check_decay_rate(const char* optimizer, const char* name, double value);
void check_not_negative(const char* optimizer, const char* name, double value);

}  // namespace tessera::optim
