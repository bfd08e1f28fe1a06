#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/shard.h"

namespace tessera::dist {

/// A group of parameters of a unit as one rank holds it, in elements of [Note: Flat layout].
struct HeldGroup {
  int unit;                 ///< index
  const std::string& name;  ///< of the unit
  const GroupLayout& layout;
  int64_t begin;                 ///< of the rank's shard in the group
  int64_t numel;                 ///< of the shard
  int64_t own_begin, own_numel;  ///< of the shard, this rank's part among the replicas
  Tensor values;                 ///< [numel]: the f32 master; of a frozen group what gathers send
  Tensor low;       ///< [numel]: what gathers send, where that is rounded from `values`
  Tensor gathered;  ///< [layout.numel]: where that stays for a step; else undefined
};

/// What this rank holds of a sharded model: for those who save, load or compare it. Lives no longer
/// than the Fsdp.
class ShardView {
 public:
  explicit ShardView(const Fsdp& fsdp);

  const std::vector<HeldGroup>& groups() const { return groups_; }  ///< in the order of units
  int shard_size() const;
  int num_replicas() const;
  /// The first rank of all that hold something.
  bool is_first() const;
  /// `HeldGroup::gathered` has values now.
  bool is_gathered(int unit) const;
  Comm& comm() const;  ///< of all ranks, on the compute stream

 private:
  const FsdpParts& parts_;
  std::vector<HeldGroup> groups_;
};

}  // namespace tessera::dist
