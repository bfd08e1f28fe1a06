#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "core/runtime/staging.h"
#include "core/tensor.h"
#include "dist/comm/world.h"
#include "dist/fsdp/shard_view.h"
#include "nn/module.h"
#include "optim/optimizer.h"

namespace tessera::dist {

/// What is compared by checksums, and how often.
struct StateGuardOptions {
  /// Steps between two comparisons of what all replicas hold; 0: none.
  int64_t replica_every = 0;
  /// Each step: a rank's shards and optimizer states are, when they are updated, what the last
  /// update left.
  bool checks_state = false;
};

// [Note: State guard]
// Memory forgets: a bit that flips in the state of one replica stays there for ever, since
// gradients are summed but states are never compared. Two checks find it by checksums
// (`add_checksums`: every flipped bit changes one, and they take one pass over the state):
//
//   replicas  what must be the same bits on several ranks: masters, low-precision shards and
//             optimizer states on the ranks with the same shard (no_shard, hybrid strategies);
//             gathered parameters that stay for the step on all ranks (shard_optim, shard_grad_op,
//             hybrid_shard_zero2); buffers, ignored parameters and counters on all ranks. Each
//             rank sends its checksums to all others.
//   state     what one rank alone holds: the checksums after an update are those before the next
//             one. Gathers in between have read the same bits.
//
// Both run on the compute stream before the optimizer. The host reads them one step later, so no
// step waits for them.

/// Finds memory of a training that has changed by itself, or by a rank that computes other numbers
/// than its replicas. All ranks make the same calls. One step:
///
///   clip_grad_norm(); guard.before_update(step); optimizer.step(); end_step();
///   guard.after_update(); guard.check(step - 1);
///
/// Memory   8 bytes a tensor and rank that has a part of it
class StateGuard {
 public:
  /// More values that are the same on all ranks, by name; each a contiguous tensor.
  using Extras = std::vector<std::pair<std::string, Tensor>>;

  /// Collective. `model` is the one that `fsdp` shards; all live as long as this.
  StateGuard(nn::Module& model, Fsdp& fsdp, optim::Optimizer& optimizer, World& world,
             const StateGuardOptions& options, const Extras& extras = {});
  StateGuard(const StateGuard&) = delete;
  StateGuard& operator=(const StateGuard&) = delete;

  /// After the gradients are complete, before the optimizer changes anything. Enqueues.
  void before_update(int64_t step);
  /// After the optimizer, before `end_step` lets gathers write where shards are read. Enqueues.
  void after_update();
  /// States were written by somebody else (a checkpoint, a rewind): what was there is forgotten.
  void states_changed() { has_after_ = false; }
  /// What was found in the steps up to `last_step`; waits for the device if it is not there yet.
  /// Errors   NumericsError (status 5) on all ranks, that names step, ranks, units and tensors
  void check(int64_t last_step);

 private:
  struct Item {
    std::string unit, tensor, kind;  // "blocks.0", "blocks.0.mlp.up.weight", "master"
    std::string to_string() const;
  };
  /// Segments of one flat buffer; their sums are neighbours.
  struct Buffer {
    Tensor values, segments;
    const HeldGroup* gathered = nullptr;  // whose values they are then; absent in some steps
    int64_t first_sum = 0;
  };
  struct Table {
    std::vector<Buffer> buffers;
    std::vector<Item> items;
    void add(const Tensor& values, const std::vector<optim::Segment>& segments,
             const std::string& unit, const std::string& kind, const HeldGroup* gathered = nullptr);
    int64_t size() const { return static_cast<int64_t>(items.size()); }
  };
  struct Pending {
    int64_t step;
    HostCopy all;            // replicas: the checksums of all ranks; undefined: not compared
    HostCopy after, before;  // this rank's states; undefined: not checked
  };

  void make_tables(nn::Module& model, optim::Optimizer& optimizer, const Extras& extras);
  void add_codes(const HeldGroup& g, std::vector<optim::Segment> records);
  void add_sums(const Tensor& sums, const Table& table) const;
  std::string find_drift(const Pending& pending, bool* is_any) const;
  std::string find_change(const Pending& pending) const;

  Fsdp& fsdp_;
  const ShardView view_;
  World& world_;
  const StateGuardOptions options_;
  Table shared_;  // the same on all ranks
  Table states_;  // the same on ranks with the same shard
  int64_t num_sums_ =
      0;                // a rank sends: of shared_, and the most of states_; 0: nothing to compare
  Tensor all_, after_;  // sums of all ranks; of states_ after the last update
  bool has_after_ = false;
  HostCopy after_copy_;
  std::deque<Pending> pending_;
};

}  // namespace tessera::dist
