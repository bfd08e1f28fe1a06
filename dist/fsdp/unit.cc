#include "dist/fsdp/unit.h"

#include "core/autograd.h"
#include "core/profiler.h"
#include "dist/fsdp/flat_bytes.h"

namespace tessera::dist {

const char* intern(const std::string& text) {
  return profiler::lasting(text);
}

Unit::Unit(const UnitSpec& spec, const UnitPlan& plan, Lanes& lanes)
    : spec_(spec),
      plan_(plan),
      static_name_(intern(spec.name)),
      lanes_(lanes),
      gathered(*this),
      gradients(*this),
      whole(*this) {
  for (const GroupPlan& g : plan.groups) static_cast<GroupPlan&>(groups_.emplace_back()) = g;
}

int64_t Unit::shard_begin(const Group& g) const {
  return lanes_.policy.mesh.shard_rank * g.shard_numel;
}
int64_t Unit::own_numel(const Group& g) const {
  return g.shard_numel / lanes_.policy.mesh.replicate_size;
}
int64_t Unit::own_begin(const Group& g) const {
  return lanes_.policy.mesh.replicate_rank * own_numel(g);
}

// ---- shards

std::vector<std::string> Unit::shard_parameters() {
  std::vector<std::string> missing;
  for (Group& g : groups_) {
    make_memory(g);
    if (g.layout.is_trainable) make_gradient_memory(g);
    // Padding is never read, but a shard is gathered whole: give it a value.
    if (g.shard.is_defined()) g.shard.fill_(0);
    if (g.master.is_defined()) g.master.fill_(0);
    take_values(g, &missing);
  }
  finish_codes();
  make_views();
  return missing;
}

void Unit::make_memory(Group& g) {
  const GroupLayout& layout = g.layout;
  const Policy& policy = lanes_.policy;
  g.full = std::make_shared<Storage>(static_cast<size_t>(nbytes_of(layout.numel, layout.dtype)),
                                     lanes_.compute.device());
  const MemoryScope scope(MemoryClass::kParameters);
  if (layout.is_coded) return make_codes(g);
  const auto make = [&](DType dtype, bool is_on_host) {
    return is_on_host ? empty_on_host(g.shard_numel, dtype) : empty({g.shard_numel}, dtype);
  };
  if (g.has_own_memory && policy.residence == Residence::kKeep) {
    g.memory = lanes_.allocate(static_cast<int64_t>(g.full->nbytes()), MemoryClass::kParameters);
    g.shard = view_of_storage(g.memory, shard_begin(g), {g.shard_numel}, layout.dtype);
  } else {
    const bool is_sent = lanes_.gather_comm != nullptr && !policy.offloads_parameters();
    g.shard = is_sent ? lanes_.allocate_array(g.shard_numel, layout.dtype)
                      : make(layout.dtype, policy.offloads_parameters());
    if (g.has_own_memory) g.memory = g.shard.storage();
  }
  if (layout.dtype == kF32) {
    g.master = g.shard;
  } else if (layout.is_trainable) {
    g.master = make(kF32, policy.offloads());
  }
}

void Unit::make_codes(Group& g) {
  if (!lanes_.nf4_map.is_defined()) lanes_.nf4_map = nf4_map();
  const Policy& policy = lanes_.policy;
  const int64_t nbytes = g.layout.shard_nbytes(g.shard_numel);
  const bool is_sent = lanes_.gather_comm != nullptr && !policy.offloads_parameters();
  Tensor codes = is_sent                        ? lanes_.allocate_array(nbytes, kU8)
                 : policy.offloads_parameters() ? empty_on_host(nbytes, kU8)
                                                : empty({nbytes}, kU8);
  codes.fill_(0);
  g.coded = std::make_unique<Coded>(g.layout, shard_begin(g), codes);
}

void Unit::finish_codes() {
  for (Group& g : groups_) {
    if (g.coded != nullptr) g.coded->finish(lanes_, {"quantize", static_name_, -1});
  }
}

void Unit::make_gradient_memory(Group& g) {
  const MemoryScope scope(MemoryClass::kGradients);
  if (lanes_.policy.offloads_gradients()) {
    g.host_grad = std::make_unique<HostGradient>();
    g.host_grad->home = empty_on_host(g.shard_numel, kF32);
    g.grad = empty_unmaterialized({g.shard_numel}, kF32);
  } else {
    g.grad = lanes_.replicate_comm != nullptr || lanes_.is_reduced_into_shards
                 ? lanes_.allocate_array(g.shard_numel, kF32)
                 : empty({g.shard_numel}, kF32);
  }
  g.full_grad = std::make_shared<Storage>(
      static_cast<size_t>(nbytes_of(g.layout.numel, g.grad_dtype)), lanes_.compute.device());
  if (lanes_.policy.keeps_whole_gradients()) {
    const auto memory =
        lanes_.allocate(static_cast<int64_t>(g.full_grad->nbytes()), MemoryClass::kGradients);
    g.full_grad->attach(memory->data(), memory);
  }
  g.is_written.assign(g.layout.placements.size(), false);
}

/// This rank's part of what values the parameters have.
void Unit::take_values(Group& g, std::vector<std::string>* missing) {
  const NoGrad no_grad;
  const int64_t first = shard_begin(g);
  for (size_t i = 0; i < g.layout.placements.size(); ++i) {
    const Placement& p = g.layout.placements[i];
    const Tensor& value = p.parameter->tensor;
    if (!p.parameter->has_values()) missing->push_back(p.name);
    if (!value.storage()->is_materialized()) continue;
    if (g.coded != nullptr) g.coded->set_written(i);
    const Overlap own(first, first + g.shard_numel, p.begin, p.numel);
    if (own.is_empty()) continue;
    const Tensor part =
        value.detach().contiguous().view({p.numel}).narrow(0, own.begin - p.begin, own.numel());
    if (g.coded != nullptr) {
      g.coded->write(i, own.begin - p.begin, part);
      continue;
    }
    g.shard.narrow(0, own.begin - first, own.numel()).copy_(part);
    if (g.has_low_copy()) g.master.narrow(0, own.begin - first, own.numel()).copy_(part);
  }
}

void Unit::make_views() {
  for (size_t k = 0; k < groups_.size(); ++k) {
    Group& g = groups_[k];
    for (size_t i = 0; i < g.layout.placements.size(); ++i) {
      const Placement& p = g.layout.placements[i];
      Tensor view = view_of_storage(g.full, p.begin, p.shape, g.layout.dtype);
      view.set_requires_grad(g.layout.is_trainable);
      if (g.layout.is_trainable) set_grad_sink(view, gradients.sink(k, i));
      p.parameter->tensor = view;
      p.parameter->is_sharded = true;
    }
    g.full->set_owner(fmt::format(
        "parameters of unit \"{}\", which can be read from when a call of {} begins until another "
        "unit is called, and the same in backward; call block(x), not block->forward(x), which "
        "gathers nothing; outside of calls make an UnshardGuard",
        spec_.name, spec_.modules.size() == 1 ? "its module" : "one of its modules"));
  }
}

void Unit::write_shards(const std::vector<bool>& is_written) {
  const NoGrad no_grad;
  size_t index = 0;
  for (Group& g : groups_) {
    const int64_t first = shard_begin(g);
    for (size_t i = 0; i < g.layout.placements.size(); ++i) {
      const Placement& p = g.layout.placements[i];
      const Overlap own(first, first + g.shard_numel, p.begin, p.numel);
      if (!is_written[index++]) continue;
      if (g.coded != nullptr) g.coded->set_written(i);
      if (own.is_empty()) continue;
      const Tensor part = view_of_storage(g.full, own.begin, {own.numel()}, g.layout.dtype);
      if (g.coded != nullptr) {
        g.coded->write(i, own.begin - p.begin, part);
        continue;
      }
      Tensor shard = g.shard.narrow(0, own.begin - first, own.numel());
      if (shard.raw_data() != part.raw_data()) shard.copy_(part);
      if (g.has_low_copy()) g.master.narrow(0, own.begin - first, own.numel()).copy_(part);
    }
  }
  finish_codes();
}

void Unit::detach() {
  for (Group& g : groups_) {
    for (const Placement& p : g.layout.placements) {
      set_grad_sink(p.parameter->tensor, nullptr);
      p.parameter->is_sharded = false;
    }
    g.full->set_owner(fmt::format("parameters of unit \"{}\", whose Fsdp has ended", spec_.name));
  }
  gathered.hide();
}

}  // namespace tessera::dist
