// The parameters as a whole: values, names, and what is said about them.
#include "dist/fsdp/schedule.h"

namespace tessera::dist {

void Scheduler::initialize(uint64_t seed) {
  life_->check("Fsdp::initialize");
  for (const std::string& name : empty_ignored_) {
    const nn::Parameter& p = root_->parameter(name);
    nn::fill_init(p.tensor, p.init, seed, name);
  }
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      const Tensor& target = g.master.is_defined() ? g.master : g.shard;
      const int64_t begin = lanes_.shard_rank * g.shard_numel, end = begin + g.shard_numel;
      for (const Placement& p : g.layout.placements) {
        const int64_t from = std::max(begin, p.begin), to = std::min(end, p.begin + p.numel);
        if (from >= to) continue;
        nn::fill_init(target.narrow(0, from - begin, to - from), p.parameter->init, seed, p.name,
                      from - p.begin);
      }
      if (target.impl() != g.shard.impl()) g.shard.copy_(target);
    }
    unit->invalidate();
  }
  missing_values_.clear();
  shards_ready_ = {};
}

void Scheduler::load_full(const std::function<Tensor(const std::string&)>& values) {
  life_->check("Fsdp::load_full");
  NoGrad no_grad;
  for (const std::string& name : empty_ignored_) {
    Tensor target = root_->parameter(name).tensor;
    if (!root_->parameter(name).has_values()) target.copy_(values(name));
  }
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      const Tensor& target = g.master.is_defined() ? g.master : g.shard;
      const int64_t begin = lanes_.shard_rank * g.shard_numel, end = begin + g.shard_numel;
      for (const Placement& p : g.layout.placements) {
        const Tensor value = values(p.name);
        TESSERA_CHECK_EQ(value.shape(), p.shape, "load_full: {}", p.name);
        const int64_t from = std::max(begin, p.begin), to = std::min(end, p.begin + p.numel);
        if (from >= to) continue;
        target.narrow(0, from - begin, to - from)
            .copy_(value.contiguous().view({p.numel}).narrow(0, from - p.begin, to - from));
      }
    }
  }
  shards_changed(nullptr);
}

void Scheduler::shards_changed(optim::Optimizer* optimizer) {
  life_->check("Fsdp::shards_changed");
  missing_values_.clear();
  NoGrad no_grad;
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      if (g.master.is_defined() && g.master.impl() != g.shard.impl()) g.shard.copy_(g.master);
    }
    unit->invalidate();
  }
  if (optimizer != nullptr && optimizer->has_stochastic_rounding()) optimizer->round_low();
  shards_ready_ = {};
}

void Scheduler::for_each_full(Fsdp::State state,
                              const std::function<void(const std::string&, const Tensor&)>& f) {
  life_->check("Fsdp::for_each_full");
  if (state == Fsdp::State::kMaster) check_values("Fsdp::for_each_full");
  NoGrad no_grad;
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      const bool is_gradient = state == Fsdp::State::kGradient;
      if (is_gradient && !g.layout.is_trainable) continue;
      Tensor shard = is_gradient             ? g.home_of_grad()
                     : g.master.is_defined() ? g.master
                                             : g.shard.to(kF32);
      Tensor full = shard;
      if (lanes_.shard_size > 1) {
        full = empty({g.layout.numel}, kF32);
        if (lanes_.offloader != nullptr) {  // sent from device memory
          Tensor place = full.narrow(0, lanes_.shard_rank * g.shard_numel, g.shard_numel);
          shard = place.copy_(shard);
        }
        lanes_.wait(lanes_.all_gather, lanes_.compute.record(), WaitPoint::kFullReady);
        lanes_.gather_comm->all_gather(lanes_.all_gather, full.raw_data(), shard.raw_data(),
                                       g.shard_numel, kF32,
                                       {"gather_full", intern(unit->name()), step_});
        lanes_.wait(lanes_.compute, lanes_.all_gather.record(), WaitPoint::kFullGathered);
      }
      for (const Placement& p : g.layout.placements) {
        f(p.name, full.narrow(0, p.begin, p.numel).view(p.shape));
      }
    }
  }
  if (state == Fsdp::State::kGradient) return;
  for (const std::string& name : options_.ignored) f(name, root_->parameter(name).tensor.to(kF32));
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
  const MemoryPlan plan = memory_plan();
  std::string text = fmt::format(
      "{} units, {:.2f} M parameters, the largest unit {:.2f} M; {} over {} ranks "
      "(shard group {}, replicas {}); slots {}",
      units_.size(), static_cast<double>(parameters) * 1e-6, static_cast<double>(largest) * 1e-6,
      name_of(options_.strategy), world_.world_size(), lanes_.shard_size, lanes_.replicate_size,
      slots.empty() ? "none" : slots);
  text += fmt::format("; on this rank parameters {}, gradients {}, gathered units and staging {}",
                      format_nbytes(plan.nbytes_of(MemoryClass::kParameters)),
                      format_nbytes(plan.nbytes_of(MemoryClass::kGradients)),
                      format_nbytes(plan.nbytes_of(MemoryClass::kGathered)));
  if (!options_.ignored.empty()) {
    text += fmt::format("; {} ignored parameters on every rank, not reduced, clipped or optimized",
                        options_.ignored.size());
  }
  return text;
}

std::shared_ptr<const ExposedTimes> Scheduler::exposed_times() {
  std::vector<ExposedTimes::Entry> entries;
  for (const auto& unit : units_) entries.push_back({unit->name(), {}});
  auto times = std::make_shared<ExposedTimes>(std::move(entries));
  if (lanes_.compute.device().type == DeviceType::kCpu) {
    lanes_.compute.submit("exposed_times", [this, times] {
      for (size_t i = 0; i < units_.size(); ++i) {
        times->set(i, std::exchange(units_[i]->exposure.time, {}));
      }
    });
    return times;
  }
  lanes_.measures_exposure = true;
  for (size_t i = 0; i < units_.size(); ++i) {
    for (Exposure::Late& late : std::exchange(units_[i]->exposure.late, {})) {
      times->add(i, late.part, std::move(late.span));
    }
  }
  return times;
}

}  // namespace tessera::dist
