// The walk through a step: which unit is gathered, released and reduced when.
#include "dist/fsdp/schedule.h"

#include <algorithm>

#include "core/recompute.h"

namespace tessera::dist {
namespace {

bool contains(const std::vector<Unit*>& units, const Unit* unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

}  // namespace

// ---- gathers and their order

void Scheduler::gather(Unit& unit, const char* phase) {
  unit.is_ahead = false;
  if (unit.is_unsharded()) return;
  if (unit.residence() != Residence::kWhole) note(phase, unit);
  // After whatever was submitted since the shards have changed: where a unit keeps its place, a
  // gather writes the bytes that a save or a snapshot reads.
  if (shards_ready_.impl() == nullptr) shards_ready_ = lanes_.compute.record();
  unit.unshard(shards_ready_, lanes_.compute.record(), step_, phase);
}

/// Reshards what is between calls, but for `except` and units whose backward is to come.
void Scheduler::release_held(const Unit* except) {
  std::erase_if(held_, [&](Unit* unit) {
    if (unit->active_calls > 0) return true;
    if (unit == except || (in_backward_ && unit->open_calls > 0)) return false;
    unit->reshard();
    return true;
  });
}

/// The same when a forward comes to `position`, where units whose backward is to come stay as well
/// if nobody takes their slot until then: the last block before the head, the head itself.
void Scheduler::release_held_before(int position) {
  const Unit& next = unit_at(position);
  std::vector<const SlotPool*> kept;
  for (size_t i = held_.size(); i-- > 0;) {
    Unit& unit = *held_[i];
    if (&unit == &next) continue;
    if (unit.active_calls == 0) {
      const SlotPool* pool = unit.gathered_pool();
      const bool is_newest = std::find(kept.begin(), kept.end(), pool) == kept.end();
      if (unit.open_calls > 0 && is_newest && !is_slot_needed(unit, position)) {
        kept.push_back(pool);
        continue;
      }
      unit.reshard();
    }
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

/// A turn of another unit from `position` on may take the slot of this one.
bool Scheduler::is_slot_needed(const Unit& unit, int position) const {
  if (unit.residence() != Residence::kReshard) return true;
  for (int p = position; p < static_cast<int>(order_.size()); ++p) {
    const Unit& other = unit_at(p);
    if (&other != &unit && other.gathered_pool() == unit.gathered_pool()) return true;
  }
  return false;
}

Unit& Scheduler::unit_at(int position) const {
  return *units_[static_cast<size_t>(order_[static_cast<size_t>(position)].unit)];
}

void Scheduler::prefetch_forward(int position) {
  const int size = static_cast<int>(order_.size());
  for (int k = 0; k < options_.prefetch_forward && ++position < size;) {
    Unit& unit = unit_at(position);
    if (unit.is_unsharded() && !unit.is_ahead) continue;  // it stayed
    if (!unit.can_prefetch()) return;                     // the ring is the limit
    gather(unit, "gather_forward");
    unit.is_ahead = true;
    ++k;
  }
}

void Scheduler::prefetch_backward(size_t call) {
  // Calls in a row count once: their number may differ between ranks.
  const Unit* last = calls_[call].unit;
  for (int k = 0; k < options_.prefetch_backward && call > 0;) {
    Unit& unit = *calls_[--call].unit;
    if (&unit == std::exchange(last, &unit)) continue;
    if (unit.is_unsharded() && !unit.is_ahead) continue;
    if (!unit.can_prefetch()) return;
    gather(unit, "gather_backward");
    unit.is_ahead = true;
    ++k;
  }
}

/// The turn of a unit that this rank does not call: what the other ranks issue, issued here too.
void Scheduler::skip(int position, bool is_train) {
  Unit& unit = unit_at(position);
  is_train ? release_held_before(position) : release_held(&unit);
  gather(unit, "gather_forward");
  prefetch_forward(position);
  if (is_train) {
    calls_.push_back({&unit, tick_, tick_, true, false});
    ++tick_;
    ++unit.open_calls;
  }
  if (unit.active_calls == 0 && !contains(held_, &unit)) held_.push_back(&unit);
}

void Scheduler::flush_pass(Pass& pass, bool is_train) {
  if (pass.position < 0) return;
  for (int p = pass.position + 1; p < static_cast<int>(order_.size()); ++p) skip(p, is_train);
  pass = {};
}

void Scheduler::enter_forward(Pass& pass, Unit& unit, bool is_train) {
  const auto is_at = [&](int p) { return &unit_at(p) == &unit; };
  const int size = static_cast<int>(order_.size());
  if (pass.position >= 0 && is_at(pass.position) && unit.is_unsharded()) {  // called again
    ++pass.num_calls;
    return;
  }
  int target = pass.position + 1;
  while (target < size && !is_at(target)) ++target;
  if (target == size) {  // not in the rest: a new pass begins
    flush_pass(pass, is_train);
    target = 0;
    while (!is_at(target)) ++target;
  }
  for (int p = pass.position + 1; p < target; ++p) skip(p, is_train);
  is_train ? release_held_before(target) : release_held(&unit);
  gather(unit, "gather_forward");
  prefetch_forward(target);
  pass = {target, 1};
}

/// A model of which nobody said what its values are would train on zeros.
void Scheduler::check_values(const char* what) {
  if (has_values_) return;
  std::vector<std::string> missing = missing_values_;
  for (const std::string& name : empty_ignored_) {
    if (!root_->parameter(name).has_values()) missing.push_back(name);
  }
  TESSERA_CHECK(missing.empty(),
                "{}: parameter \"{}\" of {} has no values (and {} more), expected "
                "Fsdp::initialize, Fsdp::load_full or a checkpoint before (Fsdp::shards_changed "
                "after writing shards())",
                what, missing.front(), root_->kind(), missing.size() - 1);
  has_values_ = true;
}

// ---- hooks

void Scheduler::cast_outputs(std::span<Tensor*> outputs) const {
  const std::optional<DType> dtype = options_.precision.output_dtype;
  if (!dtype) return;
  for (Tensor* output : outputs) {
    // A scalar is a loss: it stays as precise as it is.
    if (is_floating(output->dtype()) && output->num_dims() > 0) *output = output->to(*dtype);
  }
}

/// Before the order is known nobody knows which call is the last of an evaluation; the root does.
void Scheduler::end_root_call() {
  if (grad_mode() || is_checkpointing() || is_recomputing()) return;
  if (eval_pass_.position + 1 != static_cast<int>(order_.size())) return;
  release_held(nullptr);
  eval_pass_ = {};
}

void Scheduler::begin_call(Unit& unit, std::span<Tensor*> inputs) {
  life_->check_open("forward");
  check_values("forward");
  if (options_.precision.cast_forward_inputs) {
    for (Tensor* input : inputs) {
      if (is_floating(input->dtype()) && input->dtype() != kF64) {
        *input = input->to(options_.precision.param_dtype);
      }
    }
  }
  if (is_recomputing()) {
    begin_replay(unit);
    ++unit.active_calls;
    return;
  }
  const bool is_train = grad_mode() || is_checkpointing();
  if (unit.active_calls == 0) enter_forward(is_train ? train_pass_ : eval_pass_, unit, is_train);
  unit.wait_for_unshard();
  ++unit.active_calls;
  std::erase(held_, &unit);
  if (is_train) {
    calls_.push_back({&unit, tick_++, INT64_MAX, false, false, recompute_region()});
    ++unit.open_calls;
  }
}

void Scheduler::end_call(Unit& unit, std::span<Tensor*> outputs) {
  --unit.active_calls;
  if (unit.active_calls == 0 && !contains(held_, &unit)) held_.push_back(&unit);
  if (is_recomputing()) {
    const size_t call = replays_.back();
    replays_.pop_back();
    if (call < calls_.size() && grad_mode()) record_backward(generation_, call, outputs);
    return;
  }
  if (!grad_mode() && !is_checkpointing()) {
    // An evaluation that is through leaves nothing gathered.
    const int last = static_cast<int>(order_.size()) - 1;
    if (unit.active_calls == 0 && eval_pass_.position == last &&
        eval_pass_.num_calls == order_.back().num_calls) {
      release_held(nullptr);
      eval_pass_ = {};
    }
    return;
  }
  size_t call = calls_.size();
  while (call-- > 0) {
    if (calls_[call].unit == &unit && calls_[call].end == INT64_MAX) break;
  }
  calls_[call].end = tick_++;
  if (grad_mode()) record_backward(generation_, call, outputs);
}

/// Puts a node on the tape that says when gradients have come to the outputs of a call.
void Scheduler::record_backward(int64_t generation, size_t call, std::span<Tensor*> outputs) {
  std::vector<Tensor> with_grad;
  for (const Tensor* output : outputs) {
    if (output->requires_grad()) with_grad.push_back(*output);
  }
  if (with_grad.empty()) return;
  const std::vector<Tensor> wrapped =
      record_multi("unit", with_grad, with_grad,
                   [this, life = life_, generation, call](std::span<const Tensor> dys, Grads& g) {
                     life->check("backward");
                     enter_backward(generation, call);
                     for (size_t i = 0; i < dys.size(); ++i) {
                       if (dys[i].is_defined()) g.add(static_cast<int>(i), dys[i]);
                     }
                   });
  size_t next = 0;
  for (Tensor* output : outputs) {
    if (output->requires_grad()) *output = wrapped[next++];
  }
}

void Scheduler::on_forward_error() noexcept {
  try {
    for (const auto& unit : units_) unit->active_calls = 0;
    replays_.clear();
    if (!in_backward_) {
      end_forward();
      for (const auto& unit : units_) {
        // Whole gradients are those of earlier micro-batches, which are as good as before.
        if (lanes_.sync != GradSync::kLast) unit->discard_gradients();
        unit->open_calls = 0;
      }
    }
  } catch (...) {  // a stream is poisoned; synchronize will say so
  }
}

void Scheduler::end_forward() {
  for (const auto& unit : units_) {
    if (unit->active_calls == 0) unit->reshard();
  }
  held_.clear();
  eval_pass_ = {};
  if (in_backward_) return;
  for (const Call& call : calls_) call.unit->open_calls = 0;
  calls_.clear();
  train_pass_ = {};
  ++generation_;
}

// ---- backward

void Scheduler::begin_backward(int64_t generation) {
  if (in_backward_) return;
  life_->check_open("backward");
  life_->set_complete(false);
  in_backward_ = true;
  on_backward_end([this](bool ok) { finish_backward(ok); });
  if (generation == generation_ && !calls_.empty()) {
    flush_pass(train_pass_, /*is_train=*/true);
    return;
  }
  // A second backward through the same forward.
  TESSERA_CHECK(calls_.empty() && (generation == generation_ || generation + 1 == generation_),
                "fsdp: backward of a forward that is over by more than one backward");
  calls_ = last_calls_;
  for (Call& c : calls_) {
    c.is_over = c.is_replayed = false;
    ++c.unit->open_calls;
  }
}

/// The call that a second run makes again: the first in the region that it has not made yet.
size_t Scheduler::call_to_replay(const Unit& unit, int64_t region) const {
  for (size_t i = 0; region != 0 && i < calls_.size(); ++i) {
    const Call& c = calls_[i];
    if (c.unit == &unit && c.region == region && !c.is_over && !c.is_replayed) return i;
  }
  for (size_t i = calls_.size(); i-- > 0;) {
    if (calls_[i].unit == &unit && !calls_[i].is_over) return i;
  }
  return SIZE_MAX;
}

/// A second run calls the unit: its parameters are needed, its backward is to come. Calls after the
/// region are over; those inside it are not, since their backward comes when the run is through.
void Scheduler::begin_replay(Unit& unit) {
  begin_backward(generation_);
  const int64_t region = recompute_region();
  const size_t call = call_to_replay(unit, region);
  replays_.push_back(call);
  if (call < calls_.size()) {
    calls_[call].is_replayed = true;
    const int64_t end = calls_[call].end;
    for (size_t i = calls_.size(); region != 0 && i-- > call + 1;) {
      const Call& c = calls_[i];
      if (!c.is_over && c.begin >= end && c.region != region) finish_call(i, &unit);
    }
    if (region != 0) release_held(&unit);
  }
  gather(unit, "gather_backward");
  if (call < calls_.size()) prefetch_backward(call);
  unit.wait_for_unshard();
}

void Scheduler::enter_backward(int64_t generation, size_t call) {
  begin_backward(generation);
  const int64_t end = calls_[call].end;
  for (size_t i = calls_.size(); i-- > call + 1;) {
    if (!calls_[i].is_over && calls_[i].begin >= end) finish_call(i, calls_[call].unit);
  }
  Unit& unit = *calls_[call].unit;
  release_held(&unit);
  gather(unit, "gather_backward");
  prefetch_backward(call);
  unit.wait_for_unshard();
  if (!contains(held_, &unit)) held_.push_back(&unit);
}

/// Until backward comes to another call of the unit, nobody takes its slot.
bool Scheduler::stays_for_call_before(size_t index) const {
  const Unit& unit = *calls_[index].unit;
  for (size_t i = index; i-- > 0;) {
    const Unit& other = *calls_[i].unit;
    if (&other == &unit) return true;
    if (other.gathered_pool() == unit.gathered_pool()) return false;
  }
  return false;
}

/// The backward of a call is over; `next` is the unit whose backward follows.
void Scheduler::finish_call(size_t index, const Unit* next) {
  Call& call = calls_[index];
  Unit& unit = *call.unit;
  if (call.is_skipped) {
    release_held(&unit);
    gather(unit, "gather_backward");
    prefetch_backward(index);
  }
  call.is_over = true;
  if (--unit.open_calls == 0 && num_no_sync_ > 0 && world_.world_size() > 1) {
    unit.keep_gradients();
  } else if (unit.open_calls == 0 && unit.is_trainable()) {
    if (lanes_.sync != GradSync::kLast || is_last_micro_batch_) {
      if (world_.world_size() > 1) note("reduce", unit);
    }
    unit.reduce(is_last_micro_batch_, step_);
  }
  if (&unit == next) return;  // called several times in a row: gathered for all of them
  if (stays_for_call_before(index)) return;
  if (unit.active_calls == 0) unit.reshard();
  std::erase(held_, &unit);
}

void Scheduler::finish_backward(bool ok) {
  if (!ok) {
    in_backward_ = false;
    for (const auto& unit : units_) {
      unit->active_calls = unit->open_calls = 0;
      unit->discard_gradients();
    }
    end_forward();
    return;
  }
  for (size_t i = calls_.size(); i-- > 0;) {
    if (!calls_[i].is_over) finish_call(i);
  }
  in_backward_ = false;
  if (!is_order_known_) agree_on_order();
  last_calls_ = std::move(calls_);
  calls_.clear();
  end_forward();
}

}  // namespace tessera::dist
