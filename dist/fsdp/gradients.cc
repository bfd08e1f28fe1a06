// A unit's gradients: where they are written, how they travel, when they are complete.
#include "dist/fsdp/gradients.h"

#include <algorithm>
#include <utility>

#include "core/op_observer.h"
#include "dist/fsdp/flat_bytes.h"
#include "dist/fsdp/unit.h"
#include "kernels/elementwise/kernel.h"

namespace tessera::dist {
namespace {

void* at(const void* data, int64_t element, DType dtype) {
  return static_cast<char*>(const_cast<void*>(data)) + nbytes_of(element, dtype);
}

/// Calls f(element of the group, element of the piece, how many) for each run of a piece.
template <class F>
void for_each_run(const Group& g, const Piece& piece, F&& f) {
  const int64_t part_numel = g.layout.numel / piece.num_parts;
  if (piece.numel == part_numel) return f(0, 0, g.layout.numel);
  for (int64_t part = 0; part < piece.num_parts; ++part) {
    f(part * part_numel + piece.begin, part * piece.numel, piece.numel);
  }
}

/// This rank's own part of a group's gradient shard.
void* own_part(const Unit& unit, const Group& g) {
  return static_cast<char*>(g.grad.raw_data()) + nbytes_of(unit.own_begin(g), kF32);
}

}  // namespace

class Gradients::Sink final : public RowGradSink {
 public:
  Sink(Gradients& gradients, size_t group, size_t placement)
      : gradients_(gradients), group_(group), placement_(placement) {}

  GradDst destination(const Tensor&) override { return gradients_.destination(group_, placement_); }
  void written(const Tensor&) override {
    gradients_.unit_.groups()[group_].is_written[placement_] = true;
  }
  bool takes_rows(const Tensor&) override { return gradients_.takes_rows(group_, placement_); }
  void add_rows(const Tensor& leaf, GradRows rows) override {
    gradients_.pieces_.add_rows(group_, placement_, observed(leaf, std::move(rows)));
    written(leaf);
  }

 private:
  Gradients& gradients_;
  const size_t group_, placement_;
};

Gradients::Gradients(Unit& unit) : unit_(unit), pieces_(unit) {}

std::shared_ptr<GradSink> Gradients::sink(size_t group, size_t placement) {
  return std::make_shared<Sink>(*this, group, placement);
}

// ---- collecting

/// One rank, f32: the first micro-batch's gradients are written where they are needed.
bool Gradients::can_write_into_shard() const {
  const Policy& policy = unit_.lanes().policy;
  const std::vector<Group>& groups = unit_.groups();
  return policy.world_size == 1 && !policy.keeps_whole_gradients() && !has_sums() &&
         !policy.offloads_parameters() &&
         std::all_of(
             groups.begin(), groups.end(),
             [](const Group& g) { return !g.layout.is_trainable || g.grad_dtype == kF32; }) &&
         (!policy.is_reproducible() || policy.wire_dtype == kF32);
}

void Gradients::begin_collecting() {
  if (buffer_ != Buffer::kNone) return;
  Lanes& lanes = unit_.lanes();
  if (lanes.policy.keeps_whole_gradients()) {
    // A backward after the last micro-batch's: the reduce may still read it.
    lanes.wait(lanes.compute, is_reduced_, WaitPoint::kWholeGradFree);
    buffer_ = Buffer::kWhole;
    return;
  }
  buffer_ = can_write_into_shard() ? Buffer::kShard
            : num_pieces() > 1     ? Buffer::kPieces
                                   : Buffer::kSlot;
  if (buffer_ != Buffer::kShard && pool_ != nullptr) slot_ = take_slot(*pool_);
  if (!is_in_pieces()) attach_buffer();
}

/// A slot that compute can write.
Slot* Gradients::take_slot(SlotPool& pool) {
  Lanes& lanes = unit_.lanes();
  Slot* const slot = pool.acquire();
  const ExposedWait exposed(lanes.compute, slot->is_free, &unit_.exposure, &ExposedTime::reduce_ns,
                            unit_.static_name(), lanes.measures_exposure);
  lanes.wait(lanes.compute, slot->is_free, WaitPoint::kGradSlotFree);
  return slot;
}

void Gradients::attach_buffer() {
  for (Group& g : unit_.groups()) {
    if (!g.layout.is_trainable) continue;
    if (buffer_ == Buffer::kShard) {
      g.full_grad->attach(g.grad.raw_data(), g.grad.storage());
    } else {
      g.full_grad->attach(bytes(slot_->memory, g.grad_slot_offset), slot_->memory);
    }
  }
}

int Gradients::num_pieces() const {
  return unit_.plan().num_pieces;
}

void Gradients::check_expected(size_t group, size_t placement) const {
  TESSERA_CHECK(
      is_expected(),
      "backward: a gradient of parameter \"{}\" comes outside of the calls of unit \"{}\", "
      "whose gradients are on their way already; call block(x), not block->forward(x)",
      unit_.groups()[group].layout.placements[placement].name, unit_.name());
}

bool Gradients::takes_rows(size_t group, size_t placement) {
  if (num_pieces() == 1) return false;
  check_expected(group, placement);
  begin_collecting();
  return is_in_pieces() && pieces_.takes_rows(group, placement);
}

GradDst Gradients::destination(size_t group, size_t placement) {
  Group& g = unit_.groups()[group];
  const Placement& p = g.layout.placements[placement];
  check_expected(group, placement);
  begin_collecting();
  if (is_in_pieces()) return pieces_.destination(group, placement, kept_memory());
  return {view_of_storage(g.full_grad, p.begin, p.shape, g.grad_dtype), g.is_written[placement]};
}

/// Ranges that nobody wrote become zero; the next gradients are the first again.
void Gradients::zero_unwritten() {
  for (Group& g : unit_.groups()) {
    if (!g.layout.is_trainable) continue;
    for (size_t i = 0; i < g.layout.placements.size(); ++i) {
      const Placement& p = g.layout.placements[i];
      if (g.is_written[i]) continue;
      fill_flat(unit_.lanes().compute, bytes(g.full_grad, nbytes_of(p.begin, g.grad_dtype)),
                p.numel, g.grad_dtype, 0);
    }
    g.is_written.assign(g.is_written.size(), false);
  }
}

/// Of a unit in pieces: the slot of what is no table.
std::shared_ptr<Storage> Gradients::kept_memory() const {
  return slot_ == nullptr ? nullptr : slot_->memory;
}

void Gradients::take_buffer_away() {
  if (buffer_ != Buffer::kSlot && buffer_ != Buffer::kShard) return;
  for (Group& g : unit_.groups()) {
    if (g.full_grad != nullptr) g.full_grad->release();
  }
}

void Gradients::discard() {
  if (buffer_ == Buffer::kNone) return;
  for (Group& g : unit_.groups()) g.is_written.assign(g.is_written.size(), false);
  take_buffer_away();
  pieces_.clear();
  next_piece_ = 0;
  if (slot_ != nullptr) {
    pool_->release(std::exchange(slot_, nullptr), unit_.lanes().compute.record());
  }
  buffer_ = Buffer::kNone;
}

void Gradients::reset() {
  discard();
  for (Group& g : unit_.groups()) g.leaves.reset();
  sum_ = Sum::kNothing;
  has_kept_ = false;
}

// ---- kept on this rank (no_sync)

void Gradients::keep() {
  if (buffer_ == Buffer::kNone) return;  // this rank has none
  if (!is_in_pieces()) zero_unwritten();
  for (Group& g : unit_.groups()) {
    if (!g.layout.is_trainable || g.unreduced.is_defined()) continue;
    const MemoryScope scope(MemoryClass::kGradients);
    g.unreduced = empty({g.layout.numel}, kF32);
  }
  const Stream& compute = unit_.lanes().compute;
  for (int index = 0; index < (is_in_pieces() ? num_pieces() : 1); ++index) {
    Slot* const slot = is_in_pieces() ? take_slot(*piece_pool_) : nullptr;
    for (const Collected& c : collect(index, slot)) {
      for_each_run(c.g, c.piece, [&](int64_t begin, int64_t offset, int64_t numel) {
        cast_flat(compute, at(c.g.unreduced.raw_data(), begin, kF32), kF32,
                  at(c.data, offset, c.g.grad_dtype), c.g.grad_dtype, numel, has_kept_);
      });
    }
    if (slot != nullptr) piece_pool_->release(slot, compute.record());
  }
  has_kept_ = true;
  discard();
}

/// What `keep` has added up is added to a piece: the sum in f32, rounded once to what travels.
void Gradients::add_kept(const Collected& c) const {
  const Stream& compute = unit_.lanes().compute;
  for_each_run(c.g, c.piece, [&](int64_t begin, int64_t offset, int64_t numel) {
    void* const kept = at(c.g.unreduced.raw_data(), begin, kF32);
    void* const own = at(c.data, offset, c.g.grad_dtype);
    cast_flat(compute, kept, kF32, own, c.g.grad_dtype, numel, /*accumulate=*/true);
    cast_flat(compute, own, c.g.grad_dtype, kept, kF32, numel);
  });
}

// ---- reduce

bool Gradients::sums_in_two_levels() const {
  const Policy& policy = unit_.lanes().policy;
  return policy.mesh.shard_size > 1 && policy.mesh.replicate_size > 1;
}

/// The next reduce of gradients ends in the shard group; sums over replicas come later.
bool Gradients::sums_in_group() const {
  const Policy& policy = unit_.lanes().policy;
  return policy.mesh.shard_size > 1 && (policy.mesh.replicate_size == 1 ||
                                        (policy.sync == GradSync::kShard && sum_ <= Sum::kGroup));
}

Piece Gradients::piece_of(const Group& g, int index) const {
  const Policy& policy = unit_.lanes().policy;
  const int64_t num_parts = sums_in_group() ? policy.mesh.shard_size : policy.world_size;
  const int64_t part_numel = g.layout.numel / num_parts;
  if (!is_in_pieces()) return {num_parts, 0, part_numel};
  const int64_t numel = g.piece_numel * (policy.world_size / num_parts);
  const int64_t begin = std::min(part_numel, index * numel);
  return {num_parts, begin, std::min(numel, part_numel - begin)};
}

/// What a reduce sends, group by group; `slot`: of a piece, which is computed into it, or null.
std::vector<Gradients::Collected> Gradients::collect(int index, Slot* slot) {
  std::vector<Collected> collected;
  std::vector<Group>& groups = unit_.groups();
  for (size_t k = 0; k < groups.size(); ++k) {
    Group& g = groups[k];
    if (!g.layout.is_trainable) continue;
    const Piece piece = piece_of(g, index);
    if (slot == nullptr) {
      collected.push_back({g, piece, g.full_grad->data()});
    } else if (piece.numel > 0) {
      pieces_.write(k, piece, slot->memory, kept_memory());
      collected.push_back({g, piece, bytes(slot->memory, g.piece_offset)});
    }
  }
  return collected;
}

void Gradients::reduce(int piece, bool is_last, int64_t step) {
  TESSERA_CHECK_AS(
      InternalError, piece == next_piece_ && piece < num_pieces(),
      "fsdp: the program says reduce of unit \"{}\", piece {}, expected piece {} of {}",
      unit_.name(), piece, next_piece_, num_pieces());
  if (piece == 0) begin_reduce();
  const bool is_whole = piece + 1 == num_pieces();  // with this one
  if (is_in_pieces()) {
    reduce_piece(piece, step);
  } else if (is_whole && buffer_ != Buffer::kShard) {
    reduce_all(is_last, step);
  }
  next_piece_ = is_whole ? 0 : piece + 1;
  if (is_whole) end_reduce(is_last, step);
}

void Gradients::begin_reduce() {
  begin_collecting();
  if (!is_in_pieces()) zero_unwritten();
  if (!unit_.lanes().policy.is_reproducible()) return;
  for (Group& g : unit_.groups()) {
    if (g.layout.is_trainable) begin_leaf(g);
  }
}

void Gradients::reduce_all(bool is_last, int64_t step) {
  const Lanes& lanes = unit_.lanes();
  const std::vector<Collected> all = collect(0, nullptr);
  if (has_kept_) std::for_each(all.begin(), all.end(), [this](const auto& c) { add_kept(c); });
  const Event ready = lanes.compute.record();
  for (const Collected& c : all) {
    Group& g = c.g;
    if (g.host_grad != nullptr) lanes.offloader->bring(*g.host_grad, g.grad, has_sums());
    reduce_group(c, ready, step);
    end_group(g, is_last, step);
    if (g.host_grad != nullptr) lanes.offloader->send_home(*g.host_grad, g.grad, is_reduced_);
  }
}

void Gradients::reduce_piece(int index, int64_t step) {
  Slot* const slot = take_slot(*piece_pool_);
  const std::vector<Collected> pieces = collect(index, slot);
  if (has_kept_) {
    std::for_each(pieces.begin(), pieces.end(), [this](const auto& c) { add_kept(c); });
  }
  const Event ready = unit_.lanes().compute.record();
  for (const Collected& c : pieces) reduce_group(c, ready, step);
  piece_pool_->release(slot, is_reduced_);
}

/// All pieces of a group are on their way.
void Gradients::end_group(Group& g, bool is_last, int64_t step) {
  const Lanes& lanes = unit_.lanes();
  if (lanes.policy.is_reproducible()) {
    g.leaves.end(summing_stream());
    is_reduced_ = summing_stream().record();
  }
  if (is_last && sums_in_two_levels() && sums_in_group()) sum_over_replicas(g, step);
}

void Gradients::end_reduce(bool is_last, int64_t step) {
  if (is_in_pieces()) {
    for (Group& g : unit_.groups()) {
      if (!g.layout.is_trainable) continue;
      end_group(g, is_last, step);
      g.is_written.assign(g.is_written.size(), false);
    }
    pieces_.clear();
  }
  has_kept_ = false;
  take_buffer_away();
  if (slot_ != nullptr) pool_->release(std::exchange(slot_, nullptr), is_reduced_);
  buffer_ = Buffer::kNone;
  sum_ = sums_in_two_levels() && sums_in_group() && !is_last ? Sum::kGroup : Sum::kOwn;
}

void Gradients::begin_leaf(Group& g) {
  const int micro_batch = unit_.lanes().micro_batch;
  TESSERA_CHECK(g.leaves.num_leaves() == micro_batch,
                "reproducible mode: unit {} has the gradients of {} backwards before that of "
                "micro-batch {}, expected one a micro-batch, each after begin_micro_batch",
                unit_.name(), g.leaves.num_leaves(), micro_batch);
  const MemoryScope scope(MemoryClass::kGradients);
  g.leaves.begin(g.grad.narrow(0, unit_.own_begin(g), unit_.own_numel(g)));
}

/// Where sums over ranks are added up, micro-batch by micro-batch.
const Stream& Gradients::summing_stream() const {
  const Lanes& lanes = unit_.lanes();
  return lanes.policy.mesh.replicate_size > 1 ? lanes.all_reduce
         : lanes.policy.mesh.shard_size > 1   ? lanes.reduce_scatter
                                              : lanes.compute;
}

/// On which the first sum is written.
const Stream& Gradients::writing_stream() const {
  const Lanes& lanes = unit_.lanes();
  return lanes.policy.mesh.shard_size > 1       ? lanes.reduce_scatter
         : lanes.policy.mesh.replicate_size > 1 ? lanes.all_reduce
                                                : lanes.compute;
}

void Gradients::reduce_group(const Collected& c, const Event& ready, int64_t step) {
  Lanes& lanes = unit_.lanes();
  Group& g = c.g;
  const Policy& policy = lanes.policy;
  const Stream& first = writing_stream();
  const auto [own, accumulate] = policy.is_reproducible()
                                     ? g.leaves.destination()
                                     : LeafTree::Destination{own_part(unit_, g), has_sums()};
  if (g.host_grad != nullptr) {
    lanes.offloader->wait(first, g.host_grad->is_here, OffloadWait::kGradientHere);
  }
  Journey journey{c, nullptr, at(own, c.piece.begin, kF32), accumulate, step};
  if (policy.world_size == 1) return reduce_alone(journey);
  lanes.wait(first, ready, WaitPoint::kGradReady);
  journey.source = on_the_wire(c, first);
  if (policy.mesh.shard_size == 1) return reduce_over_replicas(journey);
  if (sums_in_group()) return reduce_in_group(journey);
  reduce_in_two_levels(journey);
}

/// Gradients as they travel, written by `stream` if they were not collected so.
const void* Gradients::on_the_wire(const Collected& c, const Stream& stream) const {
  const Lanes& lanes = unit_.lanes();
  const Group& g = c.g;
  const bool is_cast = g.wire_dtype != g.grad_dtype;
  void* const sent = is_cast ? lanes.wire_buffer.raw_data() : c.data;
  const int64_t numel = c.piece.num_parts * c.piece.numel;
  if (lanes.policy.pre_divide != 1) {
    kernels::scale(stream, {.dst = sent,
                            .x = c.data,
                            .dst_dtype = g.wire_dtype,
                            .dtype = g.grad_dtype,
                            .factor = 1 / lanes.policy.pre_divide,
                            .rows = 1,
                            .cols = numel,
                            .dst_stride = numel,
                            .x_stride = numel});
  } else if (is_cast) {
    cast_flat(stream, sent, g.wire_dtype, c.data, g.grad_dtype, numel);
  }
  return sent;
}

void Gradients::reduce_alone(const Journey& j) {
  const Lanes& lanes = unit_.lanes();
  const Group& g = j.what.g;
  const int64_t numel = j.what.piece.numel;
  const void* source = j.what.data;
  DType dtype = g.grad_dtype;
  if (lanes.policy.is_reproducible() && g.wire_dtype != dtype) {  // rounded as if it travelled
    cast_flat(lanes.compute, lanes.wire_buffer.raw_data(), g.wire_dtype, source, dtype, numel);
    source = lanes.wire_buffer.raw_data();
    dtype = g.wire_dtype;
  }
  cast_flat(lanes.compute, j.own, kF32, source, dtype, numel, j.accumulate);
  is_reduced_ = lanes.compute.record();
}

/// Every rank has the whole parameters and sums a part of the gradients.
void Gradients::reduce_over_replicas(const Journey& j) {
  const Lanes& lanes = unit_.lanes();
  lanes.replicate_comm->reduce_scatter(
      lanes.all_reduce, j.own, j.source, j.what.piece.numel, j.what.g.wire_dtype, kF32,
      j.accumulate, lanes.replicas_staging(), {"reduce", unit_.static_name(), j.step});
  is_reduced_ = lanes.all_reduce.record();
}

/// One sum over the ranks of the shard group: with replicas, into the shard that they all sum.
void Gradients::reduce_in_group(const Journey& j) {
  const Lanes& lanes = unit_.lanes();
  const Group& g = j.what.g;
  const bool has_replicas = lanes.policy.mesh.replicate_size > 1;
  void* const sum = has_replicas ? at(g.grad.raw_data(), j.what.piece.begin, kF32) : j.own;
  lanes.reducing_comm().reduce_scatter(lanes.reduce_scatter, sum, j.source, j.what.piece.numel,
                                       g.wire_dtype, kF32, j.accumulate, lanes.staging(),
                                       {"reduce", unit_.static_name(), j.step});
  is_reduced_ = lanes.reduce_scatter.record();
}

/// Hybrid, all ranks after every micro-batch (or a backward after the last one): this one's sum
/// goes through a buffer of its own.
void Gradients::reduce_in_two_levels(const Journey& j) {
  Lanes& lanes = unit_.lanes();
  const int64_t numel = j.what.piece.numel;  // that this rank sums
  void* const partial = lanes.make_partial_shard().raw_data();
  lanes.wait(lanes.reduce_scatter, lanes.partial_shard_free, WaitPoint::kPartialFree);
  lanes.reducing_comm().reduce_scatter(
      lanes.reduce_scatter, partial, j.source, numel * lanes.policy.mesh.replicate_size,
      j.what.g.wire_dtype, kF32, false, lanes.staging(), {"reduce", unit_.static_name(), j.step});
  lanes.wait(lanes.all_reduce, lanes.reduce_scatter.record(), WaitPoint::kPartialReady);
  lanes.replicate_comm->reduce_scatter(lanes.all_reduce, j.own, partial, numel, kF32, kF32,
                                       j.accumulate, lanes.replicas_staging(),
                                       {"all_reduce", unit_.static_name(), j.step});
  is_reduced_ = lanes.partial_shard_free = lanes.all_reduce.record();
}

/// The sum over the shard group becomes that over all ranks, in this replica's part of the shard.
void Gradients::sum_over_replicas(Group& g, int64_t step) {
  const Lanes& lanes = unit_.lanes();
  lanes.wait(lanes.all_reduce, is_reduced_, WaitPoint::kOuterReady);
  lanes.replicate_comm->reduce_scatter(
      lanes.all_reduce, own_part(unit_, g), g.grad.raw_data(), unit_.own_numel(g), kF32, kF32,
      false, lanes.replicas_staging(), {"all_reduce", unit_.static_name(), step});
  is_reduced_ = lanes.all_reduce.record();
}

// ---- the end of a step

void Gradients::finish(int64_t step) {
  TESSERA_CHECK_AS(
      InternalError, buffer_ == Buffer::kNone && !has_kept_,
      "fsdp: the program says finish of unit \"{}\", which has gradients that were not "
      "reduced",
      unit_.name());
  if (is_complete()) return;
  Lanes& lanes = unit_.lanes();
  for (Group& g : unit_.groups()) {
    if (!g.layout.is_trainable) continue;
    has_sums() ? finish_group(g, step) : fill_with_zeros(g);
  }
  sum_ = has_sums() ? Sum::kComplete : Sum::kZeros;
  const ExposedWait exposed(lanes.compute, is_reduced_, &unit_.exposure, &ExposedTime::reduce_ns,
                            unit_.static_name(), lanes.measures_exposure);
  lanes.wait(lanes.compute, is_reduced_, WaitPoint::kGradShardReady);
}

void Gradients::fill_with_zeros(Group& g) {
  if (g.host_grad == nullptr) {
    g.grad.fill_(0);
    return;
  }
  g.host_grad->home.fill_(0);
  g.host_grad->is_home = unit_.lanes().compute.record();
}

void Gradients::finish_group(Group& g, int64_t step) {
  Lanes& lanes = unit_.lanes();
  if (lanes.policy.is_reproducible()) {
    g.leaves.finish(summing_stream());
    is_reduced_ = summing_stream().record();
  }
  if (lanes.policy.mesh.replicate_size == 1) return;
  // Each replica has summed its own part.
  if (g.host_grad != nullptr) {
    lanes.offloader->bring(*g.host_grad, g.grad, /*with_values=*/true);
    lanes.offloader->wait(lanes.all_reduce, g.host_grad->is_here, OffloadWait::kReplicaHere);
  }
  // The last micro-batch of the step had no backward: sums in the shard group are all there is.
  if (sum_ == Sum::kGroup) sum_over_replicas(g, step);
  lanes.replicate_comm->all_gather(lanes.all_reduce, g.grad.raw_data(), own_part(unit_, g),
                                   unit_.own_numel(g), kF32,
                                   {"all_reduce", unit_.static_name(), step});
  is_reduced_ = lanes.all_reduce.record();
  if (g.host_grad != nullptr) lanes.offloader->send_home(*g.host_grad, g.grad, is_reduced_);
}

}  // namespace tessera::dist
