#include "dist/fsdp/shard.h"

#include <algorithm>

#include "dist/fsdp/flat_bytes.h"
#include "kernels/nf4/nf4.h"

namespace tessera::dist {

std::vector<GroupLayout> make_layout(const UnitSpec& spec, const PrecisionOptions& precision,
                                     int world_size, const ParameterTable& table) {
  std::vector<GroupLayout> groups;
  for (const nn::NamedParameter& p : spec.parameters) {
    const bool keeps_f32 = precision.norm_fp32 && p.parameter->is_norm;
    const DType dtype = keeps_f32 ? kF32 : precision.param_dtype;
    const bool is_trainable = p.parameter->tensor.requires_grad();
    const auto found = table.find(p.parameter);
    const ParameterSettings settings = found == table.end() ? ParameterSettings{} : found->second;
    const std::string optimizer = is_trainable ? settings.optimizer : "";
    const bool is_coded = settings.is_coded;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const GroupLayout& g) {
      return g.dtype == dtype && g.is_trainable == is_trainable && g.optimizer == optimizer &&
             g.is_coded == is_coded;
    });
    if (group == groups.end()) {
      group =
          groups.insert(groups.end(), GroupLayout{dtype, is_trainable, {}, 0, optimizer, is_coded});
    }
    const Shape& shape = p.parameter->tensor.shape();
    group->placements.push_back(
        {p.name, p.parameter, shape, group->numel, shape.numel(), p.parameter->decay, settings});
    group->numel = round_up(group->numel + shape.numel(), kLayoutBlock);
  }
  for (GroupLayout& group : groups) {
    group.numel = round_up(group.numel, kLayoutBlock * world_size);
  }
  return groups;
}

int64_t GroupLayout::shard_nbytes(int64_t count) const {
  return is_coded ? nf4_nbytes(count) : nbytes_of(count, dtype);
}

int64_t num_scales(const GroupLayout& layout) {
  int64_t sum = 0;
  for (const Placement& p : layout.placements) sum += nf4_num_scales(p.numel);
  return sum;
}

std::vector<optim::Segment> segments_in(const GroupLayout& layout, int64_t begin, int64_t end) {
  std::vector<optim::Segment> segments;
  for (const Placement& p : layout.placements) {
    const Overlap part(begin, end, p.begin, p.numel);
    if (part.is_empty()) continue;
    optim::Segment segment;
    segment.parameter = p.name;
    segment.begin = part.begin - begin;
    segment.end = part.end - begin;
    segment.lr_scale = static_cast<float>(p.settings.lr_scale);
    segment.decay = p.decay;
    if (p.settings.weight_decay) {
      segment.weight_decay = static_cast<float>(*p.settings.weight_decay);
    }
    segment.offset = part.begin - p.begin;
    segments.push_back(std::move(segment));
  }
  return segments;
}

SlotPool::SlotPool(int64_t nbytes, int num_slots, Allocate allocate, bool is_eager)
    : nbytes_(nbytes), allocate_(std::move(allocate)) {
  for (int i = 0; i < num_slots; ++i) {
    add_slot();
    if (is_eager) materialize(*slots_.back());
  }
}

void SlotPool::add_slot() {
  slots_.push_back(std::make_unique<Slot>());
  free_.push_back(slots_.back().get());
}

int SlotPool::num_materialized() const {
  return static_cast<int>(std::count_if(slots_.begin(), slots_.end(),
                                        [](const auto& slot) { return slot->memory != nullptr; }));
}

void SlotPool::materialize(Slot& slot) {
  slot.memory = allocate_(nbytes_);
  // The memory belongs to the current stream, which may still be busy with what was there before.
  slot.is_free = current_stream().record();
}

Slot* SlotPool::acquire() {
  if (free_.empty()) add_slot();
  Slot* slot = free_.front();
  free_.erase(free_.begin());
  if (slot->memory == nullptr) materialize(*slot);
  return slot;
}

void SlotPool::release(Slot* slot, Event is_free) {
  slot->is_free = std::move(is_free);
  free_.push_back(slot);
}

}  // namespace tessera::dist
