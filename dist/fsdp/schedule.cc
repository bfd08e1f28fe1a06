// The walk through a step: which unit is gathered, released and reduced when.
#include "dist/fsdp/schedule.h"

#include <algorithm>

#include "core/elementary/kernel.h"
#include "core/random.h"
#include "core/recompute.h"
#include "dist/fsdp/reproducible.h"
#include "kernels/loss_scale/loss_scale.h"
#include "kernels/reduce/reduce.h"

namespace tessera::dist {
namespace {

bool contains(const std::vector<Unit*>& units, const Unit* unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

}  // namespace

// ---- gathers and their order

void Scheduler::note(const char* what, const Unit& unit) {
  const std::string line = fmt::format("{} {}", what, unit.name());
  const bool is_reduce = std::string_view(what) == "reduce";
  const int64_t nbytes = is_reduce ? unit.gradient_nbytes() : unit.gathered_nbytes();
  program_hash_ =
      hash_name(line) ^ static_cast<uint64_t>(nbytes) ^ (program_hash_ * 0x9E3779B97F4A7C15u + 1);
  program_.push_back(line);
  program_nbytes_.push_back(nbytes);
  ++num_issued_;
  if (step_ > 0 || world_.world_size() == 1) return;
  // Step 0: every collective is announced, so that a rank that would issue another one is named
  // before anybody hangs.
  struct Signature {
    int64_t sequence;
    uint64_t hash;
  };
  const Signature mine{num_issued_, program_hash_};
  std::vector<Signature> all(static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(all.data(), &mine, sizeof mine);
  for (const Signature& theirs : all) {
    if (theirs.hash != mine.hash || theirs.sequence != mine.sequence) throw_disagreement();
  }
}

/// All ranks have seen that their programs differ: says where.
void Scheduler::throw_disagreement() {
  std::string mine;
  for (size_t i = 0; i < program_.size(); ++i) {
    mine += fmt::format("{} ({} bytes)\n", program_[i], program_nbytes_[i]);
  }
  const std::vector<std::string> texts = world_.control().all_gather(mine);
  const std::string& first = texts.front();
  size_t other = 1;
  while (other + 1 < texts.size() && texts[other] == first) ++other;
  const std::string& second = texts[other];
  size_t begin = 0, i = 0;  // of the line in which character i lies
  int64_t number = 1;
  for (; i < std::min(first.size(), second.size()) && first[i] == second[i]; ++i) {
    if (first[i] == '\n') begin = i + 1, ++number;
  }
  const auto line_of = [begin](const std::string& text) {
    return begin < text.size() ? text.substr(begin, text.find('\n', begin) - begin)
                               : std::string("nothing");
  };
  throw CommError(fmt::format(
      "fsdp: the ranks issue different collectives in step {}: as number {}, rank 0 \"{}\" "
      "and rank {} \"{}\"",
      step_, number, line_of(first), other, line_of(second)));
}

void Scheduler::gather(Unit& unit, const char* phase) {
  unit.is_ahead = false;
  if (unit.is_unsharded()) return;
  if (unit.residence() != Residence::kWhole) note(phase, unit);
  unit.unshard(shards_ready_, step_, phase);
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

// ---- hooks

void Scheduler::cast_outputs(std::span<Tensor*> outputs) const {
  const std::optional<DType> dtype = options_.precision.output_dtype;
  if (!dtype) return;
  for (Tensor* output : outputs) {
    // A scalar is a loss: it stays as precise as it is.
    if (is_floating(output->dtype()) && output->num_dims() > 0) *output = output->to(*dtype);
  }
}

void Scheduler::begin_call(Unit& unit, std::span<Tensor*> inputs) {
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
                   [this, generation, call](std::span<const Tensor> dys, Grads& g) {
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

/// After the first backward: the order in which the units were called replaces the registration
/// order. Where all ranks called the same, turns that none of them took fall out, and units that
/// nobody called keep a turn behind their predecessor; else the turns stay as they were issued.
void Scheduler::agree_on_order() {
  std::vector<Turn> issued, called;
  for (const Call& call : calls_) {
    int index = 0;
    while (units_[static_cast<size_t>(index)].get() != call.unit) ++index;
    for (std::vector<Turn>* turns : {&issued, &called}) {
      if (turns == &called && call.is_skipped) continue;
      if (turns->empty() || turns->back().unit != index) turns->push_back({index, 0});
      if (!call.is_skipped) ++turns->back().num_calls;
    }
  }
  const auto hash_of = [](const std::vector<Turn>& turns) {
    uint64_t hash = 0;
    for (const Turn& turn : turns) {
      hash = hash * 0x100000001b3u + static_cast<uint64_t>(turn.unit) + 1;
    }
    return hash;
  };
  struct Hashes {
    uint64_t issued, called;
  };
  const Hashes mine{hash_of(issued), hash_of(called)};
  std::vector<Hashes> all(static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(all.data(), &mine, sizeof mine);
  const auto all_have = [&](uint64_t Hashes::*hash) {
    return std::all_of(all.begin(), all.end(),
                       [&](const Hashes& h) { return h.*hash == mine.*hash; });
  };
  TESSERA_CHECK_AS(CommError, all_have(&Hashes::issued),
                   "fsdp: the ranks called units in different orders in step 0");
  is_order_known_ = true;
  if (!all_have(&Hashes::called)) {
    order_ = std::move(issued);
    return;
  }
  order_ = std::move(called);
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    const auto turn_of = [this](int unit) {
      return std::find_if(order_.begin(), order_.end(),
                          [unit](const Turn& turn) { return turn.unit == unit; });
    };
    if (turn_of(u) != order_.end()) continue;
    order_.insert(u == 0 ? order_.begin() : turn_of(u - 1) + 1, Turn{u, 0});
  }
}

// ---- the end of a step

void Scheduler::begin_micro_batch(int index, int count) {
  TESSERA_CHECK(index >= 0 && index < count, "begin_micro_batch: {} of {}", index, count);
  is_last_micro_batch_ = index + 1 == count;
  lanes_.micro_batch = index;
}

ClippedNorm Scheduler::clip_grad_norm(double max_norm, double p, const Tensor& loss_scale) {
  for (const auto& unit : units_) {
    // The optimizer writes shards that a gather for nobody may still send.
    if (unit->is_unsharded()) unit->wait_for_unshard();
    if (unit->is_reduce_due()) {  // the last backward did not
      note("reduce", *unit);
      unit->reduce(/*is_last=*/true, step_);
    }
    if (unit->is_trainable()) unit->finish_gradients(step_);
  }
  const auto num_parts = static_cast<int64_t>(norm_inputs_.size());
  const int64_t shard_size = lanes_.shard_size, replicas = lanes_.replicate_size;
  const int64_t chunks = num_norm_chunks(), num_groups = num_parts / chunks;
  // One partial a (group, one of world_size chunks; kReproducibleChunks in reproducible mode),
  // gathered and added in the order of chunks, which is not that of ranks where groups of ranks
  // hold replicas.
  Tensor all = empty({num_parts * world_.world_size()}, kF64);
  Tensor mine = all.narrow(0, world_.rank() * num_parts, num_parts);
  for (size_t i = 0; i < norm_inputs_.size(); ++i) {
    Group& g = *norm_groups_[i];
    if (g.host_grad != nullptr) {
      lanes_.offloader->bring(*g.host_grad, g.grad, /*with_values=*/true);
      lanes_.offloader->wait(lanes_.compute, g.host_grad->is_here, OffloadWait::kNormHere);
    }
    partial_norm(mine.narrow(0, static_cast<int64_t>(i), 1), norm_inputs_[i].first,
                 norm_inputs_[i].second, p);
    if (g.host_grad != nullptr) lanes_.offloader->drop(*g.host_grad, g.grad);
  }
  if (world_.world_size() > 1) {
    scalar_comm_->all_gather(lanes_.compute, all.raw_data(), mine.raw_data(), num_parts, kF64,
                             {"grad_norm", "", step_});
  }
  Tensor ordered = empty({num_groups, shard_size, replicas, chunks}, kF64);
  kernels::copy(lanes_.compute, {ordered.raw_data(),
                                 all.raw_data(),
                                 kF64,
                                 kF64,
                                 ordered.shape(),
                                 ordered.strides(),
                                 {chunks, num_parts, shard_size * num_parts, 1},
                                 false});
  ClippedNorm clip{empty({}, kF32), empty({}, kF32), empty({}, kU8)};
  combine_norms(clip.norm, ordered.view({-1}), p);
  unscale_norm(clip.norm, clip.factor, clip.found_inf, loss_scale, lanes_.pre_divide,
               max_norm > 0 ? max_norm : std::numeric_limits<double>::infinity());
  return clip;
}

void Scheduler::end_step() {
  if (!calls_.empty()) end_forward();  // a forward without a backward
  for (const auto& unit : units_) {
    unit->zero_grad();
    unit->invalidate();
  }
  shards_ready_ = lanes_.compute.record();
  is_last_micro_batch_ = true;
  lanes_.micro_batch = 0;
  if (world_.world_size() > 1) {
    std::vector<uint64_t> all(static_cast<size_t>(world_.world_size()));
    world_.control().all_gather(all.data(), &program_hash_, sizeof program_hash_);
    for (const uint64_t theirs : all) {
      if (theirs != program_hash_) throw_disagreement();
    }
  }
  ++step_;
  program_hash_ = 0;
  num_issued_ = 0;
  program_.clear();
  program_nbytes_.clear();
}

void Scheduler::all_reduce_scalars(const Tensor& values) {
  if (world_.world_size() == 1) return;
  const int64_t numel = values.numel();
  const int64_t staging = scalar_comm_->all_reduce_staging_nbytes(numel, values.dtype());
  if (staging > 0 && (!scalar_staging_.is_defined() || scalar_staging_.numel() < staging)) {
    scalar_staging_ = empty({staging}, kU8);
  }
  scalar_comm_->all_reduce(lanes_.compute, values.raw_data(), numel, values.dtype(),
                           staging > 0 ? scalar_staging_.raw_data() : nullptr,
                           {"scalars", "", step_});
}

Tensor Scheduler::sum_micro_batches(std::span<const Tensor> values) {
  TESSERA_CHECK(!values.empty(), "sum_micro_batches: no values");
  const int64_t numel = values[0].numel();
  if (!options_.reproducible) {
    Tensor sum = zeros({numel}, kF32);
    for (const Tensor& value : values) sum.add_(value.view({numel}));
    all_reduce_scalars(sum);
    return sum.view(values[0].shape());
  }
  // Over ranks first, each micro-batch on its own.
  const auto count = static_cast<int64_t>(values.size());
  Tensor all = empty({count, numel}, kF32);
  std::vector<Tensor> sums;
  for (int64_t i = 0; i < count; ++i) {
    sums.push_back(all.narrow(0, i, 1).view(values[0].shape()));
    sums.back().copy_(values[static_cast<size_t>(i)]);
  }
  all_reduce_scalars(all);
  return sum_in_tree(sums);
}

// ---- descriptions

std::string Scheduler::unit_of(const nn::Module& module) const {
  for (const auto& [m, name] : unit_of_module_) {
    if (m == &module) return name;
  }
  return "";
}

std::string Scheduler::summary() const {
  int64_t parameters = 0, largest = 0;
  for (const auto& u : units_) {
    parameters += u->num_parameters();
    largest = std::max(largest, u->num_parameters());
  }
  std::string slots;
  for (const auto& pool : pools_) {
    slots += fmt::format("{}{} x {}", slots.empty() ? "" : ", ", pool->num_slots(),
                         format_nbytes(pool->nbytes()));
  }
  return fmt::format(
      "{} units, {:.2f} M parameters, the largest unit {:.2f} M; {} over {} ranks "
      "(shard group {}, replicas {}); slots {}",
      units_.size(), static_cast<double>(parameters) * 1e-6, static_cast<double>(largest) * 1e-6,
      name_of(options_.strategy), world_.world_size(), lanes_.shard_size, lanes_.replicate_size,
      slots.empty() ? "none" : slots);
}

std::shared_ptr<const ExposedTimes> Scheduler::exposed_times() {
  auto times = std::make_shared<ExposedTimes>();
  for (const auto& unit : units_) times->entries.push_back({unit->name(), {}});
  if (lanes_.compute.device().type != DeviceType::kCpu) return times;
  lanes_.compute.submit("exposed_times", [this, times] {
    for (size_t i = 0; i < units_.size(); ++i) {
      times->entries[i].time = std::exchange(units_[i]->exposed_time, {});
    }
  });
  return times;
}

std::string Scheduler::program() const {
  std::string text;
  for (const std::string& line : program_) text += line + "\n";
  return text;
}

}  // namespace tessera::dist
