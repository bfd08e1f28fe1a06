#include "dist/fsdp/policy.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/settings.h"
#include "dist/fsdp/reproducible.h"
#include "dist/fsdp/shard.h"

namespace tessera::dist {
namespace {

void resolve_mesh(Policy& policy, int rank, int ranks_on_node) {
  const FsdpOptions& o = policy.options;
  const int world_size = policy.world_size;
  check_option(is_hybrid(o.strategy) || o.shard_size == 0 || o.shard_size == world_size,
               "FsdpOptions::shard_size", "{} with {}, expected a hybrid strategy", o.shard_size,
               name_of(o.strategy));
  const int shard_size = o.strategy == Strategy::kNoShard ? 1
                         : !is_hybrid(o.strategy)         ? world_size
                         : o.shard_size > 0               ? o.shard_size
                                                          : ranks_on_node;
  check_option(world_size % shard_size == 0, "FsdpOptions::shard_size",
               "{} does not divide the {} ranks", shard_size, world_size);
  policy.mesh = Mesh::make(world_size, rank, shard_size);
}

void resolve_residence(Policy& policy) {
  FsdpOptions& o = policy.options;
  const int shard_size = policy.mesh.shard_size;
  const bool reshards = o.strategy == Strategy::kFullShard || o.strategy == Strategy::kHybridShard;
  const std::variant<bool, int> asked = o.reshard_after_forward.value_or(reshards);
  const int* part_size = std::get_if<int>(&asked);
  check_option((part_size != nullptr || std::get<bool>(asked)) == reshards,
               "FsdpOptions::reshard_after_forward", "{} contradicts strategy {}",
               part_size != nullptr ? std::to_string(*part_size)
               : reshards           ? "false"
                                    : "true",
               name_of(o.strategy));
  if (part_size != nullptr) {
    check_option(*part_size > 1 && shard_size % *part_size == 0,
                 "FsdpOptions::reshard_after_forward",
                 "{}, expected true, false or a divisor of the "
                 "shard group's {} ranks",
                 *part_size, shard_size);
    if (*part_size < shard_size) policy.part_size = *part_size;
  }
  o.reshard_after_forward = asked;
  policy.residence = shard_size == 1 && !policy.offloads_parameters() ? Residence::kWhole
                     : policy.reshards_after_forward()                ? Residence::kReshard
                                                                      : Residence::kKeep;
}

void resolve_sync(Policy& policy) {
  FsdpOptions& o = policy.options;
  const GradSync default_sync = o.reproducible                        ? GradSync::kEveryMicroBatch
                                : is_hybrid(o.strategy)               ? GradSync::kShard
                                : o.strategy == Strategy::kShardOptim ? GradSync::kLast
                                                                      : GradSync::kEveryMicroBatch;
  policy.sync = o.sync_every_micro_batch.value_or(default_sync);
  check_option(o.strategy != Strategy::kShardOptim || policy.sync == GradSync::kLast,
               "FsdpOptions::sync_every_micro_batch",
               "{} with shard_optim, which keeps full gradients; "
               "expected false",
               name_of(policy.sync));
  check_option(policy.sync != GradSync::kShard || is_hybrid(o.strategy),
               "FsdpOptions::sync_every_micro_batch",
               "\"shard\" with {}, expected a hybrid strategy", name_of(o.strategy));
  o.sync_every_micro_batch = policy.sync;
}

void resolve_dtypes(Policy& policy) {
  const auto check_dtype = [](const char* field, DType dtype) {
    check_option(dtype == kF32 || dtype == kBF16 || dtype == kF16, field,
                 "{}, expected f32, bf16 or f16", dtype);
  };
  PrecisionOptions& p = policy.options.precision;
  check_dtype("PrecisionOptions::param_dtype", p.param_dtype);
  policy.reduce_dtype = p.reduce_dtype.value_or(p.param_dtype);
  check_dtype("PrecisionOptions::reduce_dtype", policy.reduce_dtype);
  policy.wire_dtype = p.wire_dtype.value_or(policy.reduce_dtype);
  check_dtype("PrecisionOptions::wire_dtype", policy.wire_dtype);
  check_option(p.param_dtype != kF32 || policy.reduce_dtype == kF32 ||
                   policy.wire_dtype == policy.reduce_dtype,
               "PrecisionOptions::wire_dtype",
               "{} with reduce_dtype {} and f32 parameters, whose "
               "gradients are rounded as they travel; expected {}",
               policy.wire_dtype, policy.reduce_dtype, policy.reduce_dtype);
  p.reduce_dtype = policy.reduce_dtype;
  p.wire_dtype = policy.wire_dtype;
  if (p.output_dtype) check_dtype("PrecisionOptions::output_dtype", *p.output_dtype);
  if (p.buffer_dtype) check_dtype("PrecisionOptions::buffer_dtype", *p.buffer_dtype);
}

void resolve_scale(Policy& policy) {
  FsdpOptions& o = policy.options;
  PrecisionOptions& p = o.precision;
  // The same for every strategy, so that they keep the same bits; in reproducible mode the same for
  // every number of ranks.
  const auto ranks = static_cast<unsigned>(policy.world_size);
  p.pre_divide = p.pre_divide.value_or(policy.wire_dtype == kF16 && !o.reproducible
                                           ? static_cast<double>(std::bit_ceil(ranks))
                                           : 1.0);
  int exponent = 0;
  check_option(*p.pre_divide > 0 && std::frexp(*p.pre_divide, &exponent) == 0.5,
               "PrecisionOptions::pre_divide", "{}, expected a power of two", *p.pre_divide);
  check_option(!o.reproducible || *p.pre_divide == 1, "PrecisionOptions::pre_divide",
               "{} in reproducible mode, expected 1", *p.pre_divide);
  if (policy.world_size == 1) p.pre_divide = 1.0;
  policy.pre_divide = *p.pre_divide;
  policy.grad_factor = policy.pre_divide / (o.average_gradients ? policy.world_size : 1);
}

}  // namespace

bool Policy::reshards_after_forward() const {
  const bool* whole = std::get_if<bool>(&*options.reshard_after_forward);
  return whole == nullptr || *whole;
}

int Policy::num_layout_chunks() const {
  return options.reproducible ? kReproducibleChunks : world_size;
}

int Policy::prefetch_depth() const {
  return std::max(options.prefetch_forward, options.prefetch_backward);
}

Policy resolve_policy(const FsdpOptions& options, int world_size, int rank, int ranks_on_node,
                      bool poison) {
  Policy policy;
  policy.options = options;
  policy.world_size = world_size;
  policy.poison = poison;
  FsdpOptions& o = policy.options;
  check_option(o.prefetch_forward >= 0, "FsdpOptions::prefetch_forward", "{}, expected >= 0",
               o.prefetch_forward);
  check_option(o.prefetch_backward >= 0, "FsdpOptions::prefetch_backward", "{}, expected >= 0",
               o.prefetch_backward);
  check_option(o.communicators == 1 || o.communicators == 2, "FsdpOptions::communicators",
               "{}, expected 1 or 2", o.communicators);
  resolve_mesh(policy, rank, ranks_on_node);
  resolve_residence(policy);
  if (o.reproducible) check_reproducible(o, world_size);
  resolve_sync(policy);
  resolve_dtypes(policy);
  resolve_scale(policy);
  check_option(o.offload_window > 0 && o.offload_window % kLayoutBlock == 0,
               "FsdpOptions::offload_window", "{}, expected a multiple of {}", o.offload_window,
               kLayoutBlock);
  if (!o.wrap) o.wrap = wrap::transformer_block();
  return policy;
}

}  // namespace tessera::dist
