#pragma once

#include "dist/comm/mesh.h"
#include "dist/fsdp/options.h"
#include "dist/fsdp/program.h"

namespace tessera::dist {

/// What options mean for one rank: resolved once, before anything is made, and the same for all
/// units; only ranks differ.
struct Policy {
  FsdpOptions options;  ///< with every default filled in
  int world_size = 1;
  Mesh mesh;
  int part_size = 1;  ///< `reshard_after_forward` = part_size; 1: whole units are resharded
  Residence residence = Residence::kReshard;
  GradSync sync = GradSync::kEveryMicroBatch;
  DType reduce_dtype = kF32, wire_dtype = kF32;
  double pre_divide = 1;   ///< of gradients before they travel; gradient shards hold the quotient
  double grad_factor = 1;  ///< true gradients are that many times those held
  bool poison = false;     ///< released memory is filled with NaN

  bool is_reproducible() const { return options.reproducible; }
  /// Each unit has its whole f32 gradient, reduced after the last micro-batch.
  bool keeps_whole_gradients() const { return sync == GradSync::kLast; }
  bool offloads() const { return options.offload != Offload::kNone; }
  bool offloads_parameters() const { return options.offload == Offload::kParamsAndOptimizer; }
  bool offloads_gradients() const { return offloads_parameters() && !options.reproducible; }
  /// Gathered parameters are memory that the shard is a part of.
  bool gathers_in_place() const {
    return options.strategy == Strategy::kShardOptim && !offloads_parameters();
  }
  bool reshards_after_forward() const;
  /// Chunks whose number the padding of a layout is a multiple of, and partial norms of a group.
  int num_layout_chunks() const;
  /// Of those, a rank's own.
  int64_t num_norm_chunks() const { return num_layout_chunks() / world_size; }
  int prefetch_depth() const;  ///< the larger of the two
};

/// Errors   ConfigError naming the setting, for options that contradict each other
Policy resolve_policy(const FsdpOptions& options, int world_size, int rank, int ranks_on_node,
                      bool poison);

}  // namespace tessera::dist
