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

/// One kind of optimizer state, for checkpoints: `tensors[i]` belongs to shard i, element for
/// element (f32, the shape of its master).
struct NamedState {
  std::string name;  ///< "exp_avg"
  std::vector<Tensor> tensors;
};

/// Updates flat shards in place: the f32 masters and their low-precision copies. Everything runs on
/// the current stream; neither construction nor `step` waits for it.
/// Memory   4 bytes per element and state (class kOptimizer), and the segment tables; a shard with
///          a store keeps its states there, and its update passes through windows, with the same
///          bits
/// State    the number of steps taken is a device scalar, because only the device knows whether a
///          step was skipped
class Optimizer {
 public:
  /// With `rounding_seed` low-precision copies are rounded stochastically (`FlatUpdate::rounding_step`).
  /// ShapeError or DtypeError if a shard's tensors do not fit, Error if its segments overlap.
  Optimizer(std::vector<FlatShard> shards, float lr,
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

  bool has_stochastic_rounding() const { return rounding_seed_.has_value(); }
  /// Makes the low-precision copies again as the last step made them, after masters and step count
  /// were loaded.
  void round_low();

  /// The states in a fixed order; writing into the tensors loads them.
  virtual std::vector<NamedState> state() const = 0;
  /// i64 []: steps taken and not skipped.
  const Tensor& step_count() const { return step_count_; }
  const std::vector<FlatShard>& shards() const { return shards_; }

 protected:
  /// Updates a shard or a part of it, with its states in the order of `state`; the step count is
  /// already that of this step.
  virtual void update_shard(const FlatUpdate& update, std::span<const Tensor> states) = 0;
  /// A zeroed state of each shard.
  NamedState make_state(std::string name) const;

 private:
  /// Calls `f` with every shard, or with windows that cover it, and its states.
  void for_each_part(const std::function<void(const FlatUpdate&, std::span<const Tensor>)>& f);

  std::vector<FlatShard> shards_;
  std::vector<FlatSegments> segments_;
  Tensor step_count_;
  std::optional<uint64_t> rounding_seed_;
  float lr_;
};

}  // namespace tessera::optim
