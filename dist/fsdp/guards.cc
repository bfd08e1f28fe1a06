#include "dist/fsdp/guards.h"

#include <algorithm>
#include <utility>

#include "core/autograd.h"
#include "core/elementary/kernel.h"
#include "core/log.h"
#include "dist/fsdp/schedule.h"

namespace tessera::dist {
namespace {

std::vector<uint32_t> versions_of(Unit& unit) {
  std::vector<uint32_t> versions;
  for (const Group& g : unit.groups()) {
    for (const Placement& p : g.layout.placements) {
      versions.push_back(*p.parameter->tensor.impl()->version);
    }
  }
  return versions;
}

/// The group's gradients of this micro-batch to those that no_sync keeps.
kernels::Copy from_slot(const Group& g, bool accumulate) {
  return {g.unreduced.raw_data(),
          g.full_grad->data(),
          kF32,
          g.grad_dtype,
          {g.layout.numel},
          {1},
          {1},
          accumulate};
}

}  // namespace

// ---- unshard

UnshardGuard::UnshardGuard(Fsdp& fsdp, std::string_view unit, Access access)
    : scheduler_(fsdp.scheduler()), life_(scheduler_.life()), access_(access) {
  std::string names;
  for (const auto& u : scheduler_.units()) {
    if (u->name() == unit) {
      hold(*u);
      return;
    }
    names += fmt::format("{}{}", names.empty() ? "" : ", ", u->name());
  }
  throw Error(fmt::format("unshard: no unit is called \"{}\"; there are {}", unit, names));
}

UnshardGuard::UnshardGuard(Fsdp& fsdp, nn::Module& module, Access access)
    : scheduler_(fsdp.scheduler()), life_(scheduler_.life()), access_(access) {
  const std::vector<nn::NamedParameter> parameters = module.named_parameters(/*with_ties=*/true);
  for (const auto& u : scheduler_.units()) {
    const auto& own = u->spec().parameters;
    const bool is_used = std::any_of(own.begin(), own.end(), [&](const nn::NamedParameter& p) {
      return std::any_of(parameters.begin(), parameters.end(),
                         [&](const nn::NamedParameter& q) { return q.parameter == p.parameter; });
    });
    if (is_used) hold(*u);
  }
}

void UnshardGuard::hold(Unit& unit) {
  const bool was_unsharded = unit.is_unsharded(), was_open = unit.is_open();
  scheduler_.hold_unsharded(unit, access_ == Access::kWrite);
  ++life_->num_guards;
  held_.push_back({&unit, was_unsharded, was_open, versions_of(unit)});
}

UnshardGuard::~UnshardGuard() {
  life_->num_guards -= static_cast<int>(held_.size());
  if (life_->is_over()) return;  // with its units; it said so
  try {
    while (!held_.empty()) {
      const Held held = std::move(held_.back());
      held_.pop_back();
      std::vector<bool> is_written;
      if (access_ == Access::kWrite) {
        const std::vector<uint32_t> now = versions_of(*held.unit);
        for (size_t i = 0; i < now.size(); ++i) is_written.push_back(now[i] != held.versions[i]);
      }
      scheduler_.end_hold(*held.unit, {held.was_unsharded, held.was_open}, is_written);
    }
  } catch (const std::exception& error) {  // a stream is poisoned; synchronize says so too
    log_error("unshard: {}", error.what());
  }
}

void Scheduler::hold_unsharded(Unit& unit, bool is_write) {
  life_->check_open("UnshardGuard");
  if (!is_write) check_values("UnshardGuard");
  gather(unit, "gather_unshard");
  unit.wait_for_unshard();
  ++unit.num_holds;
}

void Scheduler::end_hold(Unit& unit, const HeldState& before, const std::vector<bool>& is_written) {
  if (!is_written.empty()) {
    unit.write_shards(is_written);
    size_t index = 0;
    for (const Group& g : unit.groups()) {
      for (const Placement& p : g.layout.placements) {
        if (is_written[index++]) std::erase(missing_values_, p.name);
      }
    }
  }
  if (--unit.num_holds > 0) return;
  const bool is_due = std::exchange(unit.is_reshard_due, false);
  if ((is_due || !before.was_unsharded) && unit.active_calls == 0) unit.reshard();
  // Gathered ahead of its turn: not to be read before that.
  if (!before.was_open && unit.active_calls == 0 && unit.is_open()) unit.close();
  if (is_written.empty()) return;
  unit.invalidate();  // whatever this rank wrote, what counts is the shards
  shards_ready_ = {};
}

void Unit::write_shards(const std::vector<bool>& is_written) {
  NoGrad no_grad;
  size_t index = 0;
  for (Group& g : groups_) {
    const int64_t begin = lanes_.shard_rank * g.shard_numel, end = begin + g.shard_numel;
    for (const Placement& p : g.layout.placements) {
      const int64_t from = std::max(begin, p.begin), to = std::min(end, p.begin + p.numel);
      if (!is_written[index++] || from >= to) continue;
      const Tensor part = view_of_storage(g.full, from, {to - from}, g.layout.dtype);
      Tensor shard = g.shard.narrow(0, from - begin, to - from);
      if (shard.raw_data() != part.raw_data()) shard.copy_(part);
      if (!g.master.is_defined() || g.master.impl() == g.shard.impl()) continue;
      g.master.narrow(0, from - begin, to - from).copy_(part);
    }
  }
}

// ---- no_sync

NoSync::NoSync(Fsdp& fsdp) : scheduler_(fsdp.scheduler()), life_(scheduler_.life()) {
  scheduler_.begin_no_sync();
  ++life_->num_guards;
}
NoSync::~NoSync() {
  --life_->num_guards;
  if (!life_->is_over()) scheduler_.end_no_sync();
}

void Scheduler::begin_no_sync() {
  life_->check("NoSync");
  TESSERA_CHECK_AS(ConfigError, !options_.reproducible,
                   "no_sync: not with train.reproducible, which reduces every micro-batch");
  ++num_no_sync_;
}

void Unit::keep_gradients() {
  if (!is_trainable()) return;
  if (keeps_full_grad_) return acquire_gradient_slot();  // it goes on collecting
  is_reduce_due_ = true;
  if (!has_full_grad_) return;  // this rank has none
  for (Group& g : groups_) {
    if (!g.layout.is_trainable) continue;
    zero_unwritten(g);
    g.is_written.assign(g.is_written.size(), false);
    if (!g.unreduced.is_defined()) {
      MemoryScope scope(MemoryClass::kGradients);
      g.unreduced = empty({g.layout.numel}, kF32);
    }
    kernels::copy(lanes_.compute, from_slot(g, has_unreduced_));
  }
  has_unreduced_ = true;
  discard_gradients();
}

void Unit::add_kept_gradients() {
  is_reduce_due_ = false;
  if (!std::exchange(has_unreduced_, false)) return;
  for (Group& g : groups_) {
    if (!g.layout.is_trainable) continue;
    // The sum in f32, rounded once to what travels.
    kernels::copy(lanes_.compute, from_slot(g, true));
    kernels::copy(lanes_.compute, {g.full_grad->data(),
                                   g.unreduced.raw_data(),
                                   g.grad_dtype,
                                   kF32,
                                   {g.layout.numel},
                                   {1},
                                   {1},
                                   false});
  }
}

}  // namespace tessera::dist
