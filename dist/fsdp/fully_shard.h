#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "dist/comm/world.h"
#include "dist/fsdp/clipped_norm.h"
#include "dist/fsdp/exposure.h"
#include "dist/fsdp/memory.h"
#include "dist/fsdp/options.h"
#include "nn/module.h"
#include "optim/optimizer.h"

namespace tessera::dist {

struct FsdpParts;

/// A model under Fully Sharded Data Parallel. Made by `fully_shard`; lives as long as the training,
/// not longer than the model and the World. One step:
///
///   for (i < A) { fsdp->begin_micro_batch(i, A); backward(loss(...)); }   // gathers, reduces
///   ClippedNorm clip = fsdp->clip_grad_norm(1.0);                         // waits on the device
///   adamw.step(lr, clip.factor, clip.found_inf);
///   fsdp->end_step();                                                     // next gathers see it
///
/// The host never waits for the device in any of them. Gradients are **summed** over the ranks (and
/// over the micro-batches of a step), as if one rank had computed the sum of all losses: divide the
/// loss by the number of samples or tokens of all ranks. PyTorch's FSDP averages over ranks:
/// `FsdpOptions::average_gradients` does that.
///
/// Required calls: values (`initialize`, `load_full` or a checkpoint) before the first forward;
/// `clip_grad_norm` before the optimizer's step; `end_step` after it. One that is missing is an
/// Error that names it. Everything is called on the thread that made it.
class Fsdp {
 public:
  Fsdp(nn::Module& root, World& world, const FsdpOptions& options);
  ~Fsdp();
  Fsdp(const Fsdp&) = delete;
  Fsdp& operator=(const Fsdp&) = delete;

  /// Fills the master shards by (seed, full name, element): the same model under any strategy,
  /// wrapping and world size.
  void initialize(uint64_t seed);
  /// What the optimizer updates: flat f32 masters and gradients of this rank's shards.
  std::vector<optim::FlatShard>& shards();

  /// Which micro-batch of the step follows; only the last one of `count` completes the reduction
  /// where `sync_every_micro_batch` is not `true`. Without it each backward counts as the last.
  void begin_micro_batch(int index, int count);

  /// Completes the gradients (flushes what is due, zeroes what no rank touched) and takes their
  /// global p-norm: each element once under every strategy, partial norms added in one fixed order.
  /// `ignored` parameters are left out of it, see `ClippedNorm::num_left_out`: their gradients are
  /// this rank's own, in `Tensor::grad`.
  /// p = infinity is allowed. max_norm <= 0: no clipping, the norm only. `loss_scale` (f32 [], or
  /// undefined: 1) is what backward started with beyond the true gradient; the norm is that of the
  /// true gradients and the factor turns the scaled ones into true, clipped ones.
  ClippedNorm clip_grad_norm(double max_norm, double p = 2.0, const Tensor& loss_scale = {});
  /// The norms of single units in what `clip_grad_norm` has just taken with the same `p` and
  /// `loss_scale`; no rank asks another one. Device values, on the compute stream.
  UnitNorms unit_norms(const ClippedNorm& clip, double p = 2.0,
                       const Tensor& loss_scale = {}) const;
  /// Call after the optimizer's step: gradients start from zero, gathers wait for the new shards,
  /// and the ranks compare what they have issued (CommError with status 6 if it differs).
  void end_step();

  /// After evaluation or generation under NoGrad: leaves every unit sharded.
  void end_forward();

  /// Sums device scalars (f32) over all ranks, in place, in fixed order; on the compute stream.
  void all_reduce_scalars(const Tensor& values);
  /// The sum over the step's micro-batches on all ranks of f32 values that each of them has (its
  /// loss): `per_micro_batch` are this rank's, of one shape. Fixed order; with
  /// `FsdpOptions::reproducible` the same for any number of ranks. On the compute stream.
  Tensor sum_micro_batches(std::span<const Tensor> per_micro_batch);

  /// What `for_each_full` gathers.
  enum class State { kMaster, kGradient };
  /// Calls `f` with each parameter's full name and its full f32 values (a tensor that lives for the
  /// call), unit by unit, then `ignored` ones (of kMaster). Gradients as they are held: sums over
  /// ranks and micro-batches, times the loss scale, over `PrecisionOptions::pre_divide`.
  /// Collective: all ranks must call it.
  void for_each_full(State state,
                     const std::function<void(const std::string& name, const Tensor& full)>& f);
  /// Sets master shards (and what the next gather sends) from full values, f32 tensors that
  /// `values` returns for each full name, also of `ignored` parameters that have none; local. Error
  /// if a shape differs.
  void load_full(const std::function<Tensor(const std::string& name)>& values);

  /// Call after the masters in `shards()` (of frozen parameters: what gathers send) were written
  /// from outside, on the compute stream: low-precision shards follow, and the next gathers see it.
  /// They are rounded to nearest, or as `optimizer` rounds them.
  void shards_changed(optim::Optimizer* optimizer = nullptr);

  /// "4 units, 0.12 M parameters, the largest unit 0.05 M; full_shard over 2 ranks (shard group 2,
  /// replicas 1); slots 2 x 194.0 KiB, ...".
  std::string summary() const;
  /// What it keeps in device memory on this rank, by what it is for and by unit. More of what it is:
  /// ShardView (shard_view.h).
  MemoryPlan memory() const;
  /// How long compute has waited for each unit's gathers and reduces since the last call. Complete
  /// after what the compute stream has been given so far. On cuda two events a wait measure it,
  /// from the first call on.
  std::shared_ptr<const ExposedTimes> exposed_times();

  const FsdpOptions& options() const;

 private:
  friend FsdpParts& parts_of(Fsdp& fsdp);
  friend const FsdpParts& parts_of(const Fsdp& fsdp);
  std::unique_ptr<FsdpParts> parts_;
};

/// Shards `root`: its parameters become views into memory that exists while a unit is gathered,
/// and calls of its modules gather, release and reduce. Parameters may be deferred
/// (nn::DeferredInit; then call `initialize` or load) or have values, of which each rank keeps its
/// part. `requires_grad` of a parameter is fixed from here on. Collective over `world`.
/// Errors   ConfigError naming the setting, on all ranks, for options that contradict each other,
/// or
///          the parameter that another Fsdp has sharded
std::unique_ptr<Fsdp> fully_shard(nn::Module& root, World& world, const FsdpOptions& options = {});

}  // namespace tessera::dist
