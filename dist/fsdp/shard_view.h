#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dist/fsdp/coded.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/shard.h"

namespace tessera::dist {

/// A group of parameters of a unit as one rank holds it, in elements of [Note: Flat layout].
struct HeldGroup {
  size_t unit, group;       ///< index of the unit, and in it
  const std::string& name;  ///< of the unit
  const GroupLayout& layout;
  int64_t begin;                 ///< of the rank's shard in the group
  int64_t numel;                 ///< of the shard
  int64_t own_begin, own_numel;  ///< of the shard, this rank's part among the replicas
  /// [numel]: the f32 master; of a frozen group what gathers send; undefined of codes.
  Tensor values;
  Tensor low;              ///< [numel]: what gathers send, where that is rounded from `values`
  bool stays_gathered;     ///< for the rest of a step, on all ranks
  Coded* coded = nullptr;  ///< in place of values; or null
};

/// What this rank holds of a sharded model, and how: for those who save, load, compare or describe
/// it. Lives no longer than the Fsdp.
class ShardView {
 public:
  explicit ShardView(const Fsdp& fsdp);

  const std::vector<HeldGroup>& groups() const { return groups_; }  ///< in the order of units
  int num_units() const;
  int64_t num_parameters() const;  ///< elements of all units, tied ones once, trainable or not
  /// The unit whose parameters a call of `module` needs, for `print_tree`; empty if none.
  std::string unit_of(const nn::Module& module) const;
  /// The actions since the last end_step ([Note: Program of a step] in program.h), one a line.
  std::string program() const;
  int shard_size() const;
  int num_replicas() const;
  /// The first rank of all that hold something.
  bool is_first() const;
  /// [layout.numel], for tasks of the compute stream: the gathered parameters of a group that stays,
  /// after `clip_grad_norm`; undefined if this step has gathered none.
  Tensor gathered(const HeldGroup& g) const;
  Comm& comm() const;  ///< of all ranks, on the compute stream

 private:
  const FsdpParts& parts_;
  std::vector<HeldGroup> groups_;
};

}  // namespace tessera::dist
