#include "dist/fsdp/life.h"

#include "core/check.h"

namespace tessera::dist {

Life::Life(const World& world, std::string model)
    : model_(std::move(model)), world_(world.life()) {}

void Life::check(const char* what) const {
  TESSERA_CHECK(!is_over_, "{}: the Fsdp of {} has ended", what, model_);
  TESSERA_CHECK(!world_.expired(), "{}: the World of the Fsdp of {} has ended before it", what,
                model_);
  TESSERA_CHECK(std::this_thread::get_id() == thread_,
                "{}: called from another thread than the one that made the Fsdp of {}", what,
                model_);
}

void Life::check_open(const char* what) const {
  check(what);
  TESSERA_CHECK(updated_.empty(),
                "{}: after the optimizer's step of the Fsdp of {}, expected Fsdp::end_step first",
                what, model_);
}

void Life::begin_update(const optim::FlatShard& shard, bool is_scaled) {
  check("Optimizer::step");
  TESSERA_CHECK(updated_.count(shard.master.impl()) == 0,
                "Optimizer::step: shard {} was updated in this step already, expected "
                "Fsdp::end_step between two updates",
                shard.name);
  TESSERA_CHECK(is_complete_,
                "Optimizer::step: the gradients of shard {} are not complete, expected "
                "Fsdp::clip_grad_norm first (max_norm 0 takes the norm only)",
                shard.name);
  TESSERA_CHECK(is_scaled || !needs_factor,
                "Optimizer::step: the gradients of shard {} are a multiple of the true ones (a "
                "mean over ranks, or f16 that travels divided), expected the factor that "
                "Fsdp::clip_grad_norm returned",
                shard.name);
  updated_.insert(shard.master.impl());
}

void Life::end_step() {
  is_complete_ = false;
  updated_.clear();
}

}  // namespace tessera::dist
