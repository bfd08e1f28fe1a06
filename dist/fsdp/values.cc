#include "dist/fsdp/values.h"

#include "core/autograd.h"
#include "dist/fsdp/flat_bytes.h"

namespace tessera::dist {
namespace {

/// Calls `f(placement, target, begin)` for each part of a parameter that this rank's shards hold:
/// `target` is its f32 master, or what a frozen group has, from element `begin` of the parameter on.
template <class F>
void for_each_own_part(Unit& unit, Group& g, const F& f) {
  const int64_t first = unit.shard_begin(g);
  for (const Placement& p : g.layout.placements) {
    const Overlap own(first, first + g.shard_numel, p.begin, p.numel);
    if (own.is_empty()) continue;
    f(p, g.values().narrow(0, own.begin - first, own.numel()), own.begin - p.begin);
  }
}

}  // namespace

Values::Values(nn::Module& root, const Policy& policy,
               const std::vector<std::unique_ptr<Unit>>& units, std::vector<std::string> missing)
    : root_(root), policy_(policy), units_(units), missing_(std::move(missing)) {
  for (const std::string& name : policy.options.ignored) {
    if (!root.parameter(name).has_values()) empty_ignored_.push_back(name);
  }
}

void Values::initialize(uint64_t seed) {
  for (const std::string& name : empty_ignored_) {
    const nn::Parameter& p = root_.parameter(name);
    nn::fill_init(p.tensor, p.init, seed, name);
  }
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      for_each_own_part(*unit, g, [&](const Placement& p, const Tensor& part, int64_t begin) {
        nn::fill_init(part, p.parameter->init, seed, p.name, begin);
      });
      if (g.has_low_copy()) g.shard.copy_(g.master);
    }
  }
  missing_.clear();
}

void Values::load_full(const std::function<Tensor(const std::string&)>& values) {
  const NoGrad no_grad;
  for (const std::string& name : empty_ignored_) {
    Tensor target = root_.parameter(name).tensor;
    if (!root_.parameter(name).has_values()) target.copy_(values(name));
  }
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      const int64_t first = unit->shard_begin(g);
      for (const Placement& p : g.layout.placements) {
        const Tensor value = values(p.name);
        TESSERA_CHECK_EQ(value.shape(), p.shape, "load_full: {}", p.name);
        const Overlap own(first, first + g.shard_numel, p.begin, p.numel);
        if (own.is_empty()) continue;
        g.values()
            .narrow(0, own.begin - first, own.numel())
            .copy_(value.contiguous().view({p.numel}).narrow(0, own.begin - p.begin, own.numel()));
      }
    }
  }
}

void Values::shards_changed(optim::Optimizer* optimizer) {
  missing_.clear();
  const NoGrad no_grad;
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      if (g.has_low_copy()) g.shard.copy_(g.master);
    }
  }
  if (optimizer != nullptr && optimizer->has_stochastic_rounding()) optimizer->round_low();
}

void Values::check(const char* what) {
  if (is_complete_) return;
  std::vector<std::string> missing = missing_;
  for (const std::string& name : empty_ignored_) {
    if (!root_.parameter(name).has_values()) missing.push_back(name);
  }
  TESSERA_CHECK(missing.empty(),
                "{}: parameter \"{}\" of {} has no values (and {} more), expected "
                "Fsdp::initialize, Fsdp::load_full or a checkpoint before (Fsdp::shards_changed "
                "after writing shards())",
                what, missing.front(), root_.kind(), missing.size() - 1);
  is_complete_ = true;
}

void Values::for_each_full_master(int64_t step, const OnFull& f) {
  const NoGrad no_grad;
  for (const auto& unit : units_) {
    for (const Group& g : unit->groups()) {
      for_each_full(*unit, g, g.master.is_defined() ? g.master : g.shard.to(kF32), step, f);
    }
  }
  for (const std::string& name : policy_.options.ignored) {
    f(name, root_.parameter(name).tensor.to(kF32));
  }
}

void Values::for_each_full_gradient(int64_t step, const OnFull& f) {
  const NoGrad no_grad;
  for (const auto& unit : units_) {
    for (const Group& g : unit->groups()) {
      if (g.layout.is_trainable) for_each_full(*unit, g, g.home_of_grad(), step, f);
    }
  }
}

/// `shard`: this rank's part of the group's f32 values.
void Values::for_each_full(Unit& unit, const Group& g, Tensor shard, int64_t step,
                           const OnFull& f) {
  const Lanes& lanes = unit.lanes();
  Tensor full = shard;
  if (policy_.mesh.shard_size > 1) {
    full = empty({g.layout.numel}, kF32);
    if (lanes.offloader != nullptr) {  // sent from device memory
      Tensor place = full.narrow(0, unit.shard_begin(g), g.shard_numel);
      shard = place.copy_(shard);
    }
    lanes.wait(lanes.all_gather, lanes.compute.record(), WaitPoint::kFullReady);
    lanes.gather_comm->all_gather(lanes.all_gather, full.raw_data(), shard.raw_data(),
                                  g.shard_numel, kF32, {"gather_full", unit.static_name(), step});
    lanes.wait(lanes.compute, lanes.all_gather.record(), WaitPoint::kFullGathered);
  }
  for (const Placement& p : g.layout.placements) {
    f(p.name, full.narrow(0, p.begin, p.numel).view(p.shape));
  }
}

}  // namespace tessera::dist
