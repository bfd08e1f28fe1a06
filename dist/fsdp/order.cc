#include "dist/fsdp/order.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace tessera::dist {
namespace {

constexpr int kNobody = -1;

bool contains(const std::vector<int>& units, int unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

}  // namespace

Order::Order(std::vector<UnitUse> units, std::vector<int> num_slots, const OrderOptions& options,
             Issuer& issuer)
    : options_(options),
      issuer_(issuer),
      ledger_(std::move(units), std::move(num_slots)),
      turns_(ledger_.num_units()),
      uses_(static_cast<size_t>(ledger_.num_units())) {}

// ---- actions

void Order::emit(ActionKind kind, int unit, Phase phase, int piece) {
  const int64_t nbytes = kind == ActionKind::kGather   ? ledger_.unit(unit).sent_nbytes
                         : kind == ActionKind::kReduce ? ledger_.unit(unit).gradient_nbytes
                                                       : 0;
  const Action action{kind, phase, unit, nbytes, piece};
  issuer_.act(action);
  const char* refusal = ledger_.apply(action);
  TESSERA_CHECK_AS(InternalError, refusal == nullptr, "order: {} of unit {}, but {}",
                   name_of(action), unit, refusal);
}

void Order::emit_reduces(int unit, Phase phase) {
  for (int piece = 0; piece < ledger_.unit(unit).num_reduces; ++piece) {
    emit(ActionKind::kReduce, unit, phase, piece);
  }
}

void Order::gather(int unit, Phase phase) {
  use(unit).is_ahead = false;
  if (ledger_.is_gathered(unit)) return;
  if (!ledger_.can_gather(unit)) emit(ActionKind::kAddSlot, unit);
  emit(ActionKind::kGather, unit, phase);
}

void Order::wait(int unit) {
  if (ledger_.state(unit) != ParamState::kOpen) emit(ActionKind::kWait, unit);
}

void Order::join(int unit) {
  if (ledger_.state(unit) == ParamState::kGathering) emit(ActionKind::kJoin, unit);
}

/// Gives the slot back, or where parameters keep their place hides them, unless somebody holds them.
void Order::release(int unit) {
  if (!ledger_.is_gathered(unit)) return;
  Use& u = use(unit);
  u.is_release_due = u.num_holds > 0;
  if (u.is_release_due) return;
  if (ledger_.unit(unit).residence == Residence::kReshard) {
    join(unit);
    emit(ActionKind::kRelease, unit);
  } else if (ledger_.state(unit) == ParamState::kOpen) {
    emit(ActionKind::kClose, unit);
  }
}

void Order::reduce(int unit) {
  emit_reduces(unit, accumulation.is_last ? Phase::kLast : Phase::kNone);
  use(unit).is_reduce_due = use(unit).is_finished = false;
}

void Order::expire(int unit) {
  const UnitUse& u = ledger_.unit(unit);
  if (u.residence == Residence::kWhole) return;
  join(unit);
  if (ledger_.is_gathered(unit) || u.keeps_part) emit(ActionKind::kExpire, unit);
}

// ---- between calls

void Order::keep_between_calls(int unit) {
  if (use(unit).calls.active == 0 && !contains(held_, unit)) held_.push_back(unit);
}

/// Releases what is between calls, but for `except` and units whose backward is to come.
void Order::release_held(int except) {
  std::erase_if(held_, [&](int unit) {
    if (use(unit).calls.active > 0) return true;
    if (unit == except || (in_backward_ && use(unit).calls.open > 0)) return false;
    release(unit);
    return true;
  });
}

/// The same when a forward comes to `position`, where units whose backward is to come stay as well
/// if nobody takes their slot until then: the last block before the head, the head itself.
void Order::release_held_before(int position) {
  const int next = turns_.unit_at(position);
  std::vector<int> kept;  // pools
  for (size_t i = held_.size(); i-- > 0;) {
    const int unit = held_[i];
    if (unit == next) continue;
    if (use(unit).calls.active == 0) {
      const int pool = ledger_.unit(unit).pool;
      if (use(unit).calls.open > 0 && !contains(kept, pool) && !is_slot_needed(unit, position)) {
        kept.push_back(pool);
        continue;
      }
      release(unit);
    }
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

/// A turn of another unit from `position` on may take the slot of this one.
bool Order::is_slot_needed(int unit, int position) const {
  const UnitUse& own = ledger_.unit(unit);
  if (own.residence != Residence::kReshard) return true;
  for (int p = position; p < turns_.size(); ++p) {
    const int other = turns_.unit_at(p);
    if (other != unit && ledger_.unit(other).pool == own.pool) return true;
  }
  return false;
}

// ---- prefetch

void Order::prefetch_forward(int position) {
  for (int k = 0; k < options_.prefetch_forward && ++position < turns_.size();) {
    const int unit = turns_.unit_at(position);
    if (ledger_.is_gathered(unit) && !use(unit).is_ahead) continue;  // it stayed
    if (!ledger_.can_gather(unit)) return;                           // the ring is the limit
    gather(unit, Phase::kForward);
    use(unit).is_ahead = true;
    ++k;
  }
}

void Order::prefetch_backward(size_t call) {
  // Calls in a row count once: their number may differ between ranks.
  int last = calls_[call].unit;
  for (int k = 0; k < options_.prefetch_backward && call > 0;) {
    const int unit = calls_[--call].unit;
    if (unit == std::exchange(last, unit)) continue;
    if (ledger_.is_gathered(unit) && !use(unit).is_ahead) continue;
    if (!ledger_.can_gather(unit)) return;
    gather(unit, Phase::kBackward);
    use(unit).is_ahead = true;
    ++k;
  }
}

// ---- forward

void Order::push_call(const Call& call) {
  calls_.push_back(call);
  num_live_ = calls_.size();
  ++use(call.unit).calls.open;
}

/// The turn of a unit that this rank does not call: what the other ranks issue, issued here too.
void Order::skip(int position, bool is_train) {
  const int unit = turns_.unit_at(position);
  is_train ? release_held_before(position) : release_held(unit);
  gather(unit, Phase::kForward);
  prefetch_forward(position);
  if (is_train) {
    push_call({unit, tick_, tick_, true, false});
    ++tick_;
  }
  keep_between_calls(unit);
}

void Order::flush_pass(Pass& pass, bool is_train) {
  if (pass.position < 0) return;
  for (int p = pass.position + 1; p < turns_.size(); ++p) skip(p, is_train);
  pass = {};
}

void Order::enter_forward(Pass& pass, int unit, bool is_train) {
  if (pass.position >= 0 && turns_.unit_at(pass.position) == unit && ledger_.is_gathered(unit)) {
    ++pass.num_calls;  // called again
    return;
  }
  int target = turns_.find(unit, pass.position + 1);
  if (target == turns_.size()) {  // not in the rest: a new pass begins
    flush_pass(pass, is_train);
    target = turns_.find(unit, 0);
  }
  for (int p = pass.position + 1; p < target; ++p) skip(p, is_train);
  is_train ? release_held_before(target) : release_held(unit);
  gather(unit, Phase::kForward);
  prefetch_forward(target);
  pass = {target, 1};
}

void Order::begin_call(int unit, Mode mode, int64_t region) {
  if (mode == Mode::kReplay) {
    begin_replay(unit, region);
    ++use(unit).calls.active;
    return;
  }
  const bool is_train = mode == Mode::kTrain;
  if (use(unit).calls.active == 0) {
    enter_forward(is_train ? train_pass_ : eval_pass_, unit, is_train);
  }
  wait(unit);
  ++use(unit).calls.active;
  std::erase(held_, unit);
  if (is_train) push_call({unit, tick_++, INT64_MAX, false, false, region});
}

size_t Order::end_call(int unit, Mode mode) {
  --use(unit).calls.active;
  keep_between_calls(unit);
  if (mode == Mode::kReplay) {
    const size_t call = replays_.back();
    replays_.pop_back();
    return call < calls_.size() ? call : kNoCall;
  }
  if (mode == Mode::kEval) {
    // An evaluation that is through leaves nothing gathered.
    const int last = turns_.size() - 1;
    if (use(unit).calls.active == 0 && eval_pass_.position == last &&
        eval_pass_.num_calls == turns_.num_calls_at(last)) {
      release_held(kNobody);
      eval_pass_ = {};
    }
    return kNoCall;
  }
  size_t call = calls_.size();
  while (call-- > 0) {
    if (calls_[call].unit == unit && calls_[call].end == INT64_MAX) break;
  }
  calls_[call].end = tick_++;
  return call;
}

void Order::end_root_call() {
  if (eval_pass_.position + 1 != turns_.size()) return;
  release_held(kNobody);
  eval_pass_ = {};
}

void Order::end_forward(bool ok) {
  if (!ok) {
    for (Use& u : uses_) u.calls.active = 0;
    replays_.clear();
    if (in_backward_) return;
    for (Use& u : uses_) u.calls.open = 0;
  }
  for (int unit = 0; unit < ledger_.num_units(); ++unit) {
    if (use(unit).calls.active == 0) release(unit);
  }
  held_.clear();
  eval_pass_ = {};
  if (in_backward_) return;
  for (const Call& call : calls_) use(call.unit).calls.open = 0;
  calls_.clear();
  num_live_ = 0;
  train_pass_ = {};
  ++generation_;
}

// ---- backward

void Order::begin_backward(int64_t generation) {
  if (std::exchange(in_backward_, true)) return;
  if (generation == generation_ && !calls_.empty()) {
    flush_pass(train_pass_, /*is_train=*/true);
    return;
  }
  // A second backward through the same forward.
  TESSERA_CHECK(calls_.empty() && (generation == generation_ || generation + 1 == generation_),
                "fsdp: backward of a forward that is over by more than one backward");
  calls_ = last_calls_;
  num_live_ = calls_.size();
  for (Call& c : calls_) {
    c.is_over = c.is_replayed = false;
    ++use(c.unit).calls.open;
  }
}

/// The call that a second run makes again: the first in the region that it has not made yet.
size_t Order::call_to_replay(int unit, int64_t region) const {
  for (size_t i = 0; region != 0 && i < calls_.size(); ++i) {
    const Call& c = calls_[i];
    if (c.unit == unit && c.region == region && !c.is_over && !c.is_replayed) return i;
  }
  for (size_t i = calls_.size(); i-- > 0;) {
    if (calls_[i].unit == unit && !calls_[i].is_over) return i;
  }
  return kNoCall;
}

/// A second run calls the unit: its parameters are needed, its backward is to come. Calls after the
/// region are over; those inside it are not, since their backward comes when the run is through.
void Order::begin_replay(int unit, int64_t region) {
  begin_backward(generation_);
  const size_t call = call_to_replay(unit, region);
  replays_.push_back(call);
  if (call < calls_.size()) {
    calls_[call].is_replayed = true;
    const int64_t end = calls_[call].end;
    for (size_t i = num_live_; region != 0 && i-- > call + 1;) {
      const Call& c = calls_[i];
      if (!c.is_over && c.begin >= end && c.region != region) finish_call(i, unit);
    }
    if (region != 0) release_held(unit);
  }
  gather(unit, Phase::kBackward);
  if (call < calls_.size()) prefetch_backward(call);
  wait(unit);
}

void Order::finish_later_calls(size_t call) {
  const int64_t end = calls_[call].end;
  for (size_t i = num_live_; i-- > call + 1;) {
    if (!calls_[i].is_over && calls_[i].begin >= end) finish_call(i, calls_[call].unit);
  }
  while (num_live_ > 0 && calls_[num_live_ - 1].is_over) --num_live_;
}

void Order::enter_backward(int64_t generation, size_t call) {
  begin_backward(generation);
  finish_later_calls(call);
  const int unit = calls_[call].unit;
  release_held(unit);
  gather(unit, Phase::kBackward);
  prefetch_backward(call);
  wait(unit);
  if (!contains(held_, unit)) held_.push_back(unit);
}

/// Until backward comes to another call of the unit, nobody takes its slot.
bool Order::stays_for_call_before(size_t index) const {
  const int unit = calls_[index].unit, pool = ledger_.unit(unit).pool;
  for (size_t i = index; i-- > 0;) {
    const int other = calls_[i].unit;
    if (other == unit) return true;
    if (ledger_.unit(other).pool == pool) return false;
  }
  return false;
}

/// The backward of a call is over; `next` is the unit whose backward follows.
void Order::finish_call(size_t index, int next) {
  const int unit = calls_[index].unit;
  if (calls_[index].is_skipped) {
    release_held(unit);
    gather(unit, Phase::kBackward);
    prefetch_backward(index);
  }
  calls_[index].is_over = true;
  Use& u = use(unit);
  if (--u.calls.open == 0 && ledger_.unit(unit).is_trainable) {
    const bool is_kept = accumulation.num_no_sync > 0 && !options_.is_alone;
    if (is_kept && !options_.keeps_whole_gradients) {
      emit(ActionKind::kKeep, unit);
      u.is_reduce_due = true;
    } else if (options_.keeps_whole_gradients && (is_kept || !accumulation.is_last)) {
      u.is_reduce_due = true;  // they go on collecting
    } else {
      reduce(unit);
    }
  }
  if (unit == next) return;  // called several times in a row: gathered for all of them
  if (stays_for_call_before(index)) return;
  if (u.calls.active == 0) release(unit);
  std::erase(held_, unit);
}

void Order::end_backward(bool ok) {
  if (!ok) {
    in_backward_ = false;
    for (Use& u : uses_) {
      u.calls.active = u.calls.open = 0;
      // Whole gradients of earlier micro-batches are lost with those of this one.
      if (options_.keeps_whole_gradients) u.is_reduce_due = false;
    }
    end_forward();
    return;
  }
  for (size_t i = num_live_; i-- > 0;) {
    if (!calls_[i].is_over) finish_call(i, kNobody);
  }
  in_backward_ = false;
  if (!turns_.is_known()) turns_.learn(calls_, issuer_.agree(Turns::hashes_of(calls_)));
  last_calls_ = std::move(calls_);
  calls_.clear();
  end_forward();
}

// ---- a step

void Order::complete_gradients() {
  for (int unit = 0; unit < ledger_.num_units(); ++unit) {
    // The optimizer writes shards that a gather for nobody may still send.
    join(unit);
    Use& u = use(unit);
    if (u.is_reduce_due) {  // the last backward did not
      emit_reduces(unit, Phase::kLast);
      u.is_reduce_due = u.is_finished = false;
    }
    if (!ledger_.unit(unit).is_trainable || u.is_finished) continue;
    emit(ActionKind::kFinish, unit);
    u.is_finished = true;
  }
}

void Order::end_step() {
  if (!calls_.empty()) end_forward();  // a forward without a backward
  for (int unit = 0; unit < ledger_.num_units(); ++unit) {
    use(unit).is_reduce_due = use(unit).is_finished = false;
    expire(unit);
  }
  accumulation.is_last = true;
}

// ---- scopes

Order::Before Order::hold(int unit) {
  const Before before{ledger_.is_gathered(unit), ledger_.state(unit) == ParamState::kOpen};
  gather(unit, Phase::kUnshard);
  wait(unit);
  ++use(unit).num_holds;
  return before;
}

void Order::end_hold(int unit, const Before& before, bool is_written) {
  Use& u = use(unit);
  if (--u.num_holds > 0) return;
  const bool is_due = std::exchange(u.is_release_due, false);
  if ((is_due || !before.was_gathered) && u.calls.active == 0) release(unit);
  // Gathered ahead of its turn: not to be read before that.
  if (!before.was_open && u.calls.active == 0 && ledger_.state(unit) == ParamState::kOpen) {
    emit(ActionKind::kClose, unit);
  }
  if (is_written) expire(unit);  // whatever this rank wrote, what counts is the shards
}

}  // namespace tessera::dist
