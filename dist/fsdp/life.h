#pragma once

#include <memory>
#include <set>
#include <string>
#include <thread>

#include "dist/comm/world.h"
#include "optim/flat_shard.h"
#include "optim/shard_owner.h"

namespace tessera::dist {

/// How long an Fsdp may be used, and where its step stands: what optimizers, guards and the tape,
/// which may outlive it, ask before they touch it. The required calls of a step in order are
/// backward, `clip_grad_norm`, the optimizer's step (or none), `end_step`.
class Life final : public optim::ShardOwner {
 public:
  Life(const World& world, std::string model);

  /// Error if the Fsdp or its World has ended, or this is another thread than it was made on.
  void check(const char* what) const;
  bool is_over() const { return is_over_; }
  void end() { is_over_ = true; }

  /// A gather or a reduce for the model's calls: not between the optimizer's step and `end_step`.
  void check_open(const char* what) const;
  /// Gradients are complete, or (a backward follows) not any more.
  void set_complete(bool is_complete) { is_complete_ = is_complete; }
  void begin_update(const optim::FlatShard& shard, bool is_scaled) override;
  void end_step();

  bool needs_factor = false;  ///< gradient shards hold a multiple of the gradients
  int num_guards = 0;         ///< alive

 private:
  const std::string model_;
  const std::thread::id thread_ = std::this_thread::get_id();
  std::weak_ptr<const void> world_;
  bool is_over_ = false, is_complete_ = false;
  std::set<const TensorImpl*> updated_;  // masters of this step
};

}  // namespace tessera::dist
