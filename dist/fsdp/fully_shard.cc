#include "dist/fsdp/fully_shard.h"

#include <algorithm>
#include <utility>

#include "dist/fsdp/parts.h"

namespace tessera::dist {

Fsdp::Fsdp(nn::Module& root, World& world, const FsdpOptions& options)
    : parts_(std::make_unique<FsdpParts>(root, world, options)) {}
Fsdp::~Fsdp() = default;

std::unique_ptr<Fsdp> fully_shard(nn::Module& root, World& world, const FsdpOptions& options) {
  return std::make_unique<Fsdp>(root, world, options);
}

FsdpParts& parts_of(Fsdp& fsdp) {
  return *fsdp.parts_;
}
const FsdpParts& parts_of(const Fsdp& fsdp) {
  return *fsdp.parts_;
}

// ---- values

void Fsdp::initialize(uint64_t seed) {
  parts_->life->check("Fsdp::initialize");
  parts_->values->initialize(seed);
  parts_->shards_changed();
}

void Fsdp::load_full(const std::function<Tensor(const std::string&)>& values) {
  parts_->life->check("Fsdp::load_full");
  parts_->values->load_full(values);
  shards_changed(nullptr);
}

void Fsdp::shards_changed(optim::Optimizer* optimizer) {
  parts_->life->check("Fsdp::shards_changed");
  parts_->values->shards_changed(optimizer);
  parts_->shards_changed();
}

void Fsdp::for_each_full(State state,
                         const std::function<void(const std::string&, const Tensor&)>& f) {
  parts_->life->check("Fsdp::for_each_full");
  if (state == State::kMaster) parts_->values->check("Fsdp::for_each_full");
  parts_->values->for_each_full(state == State::kMaster ? Phase::kMaster : Phase::kGradient, f);
}

std::vector<optim::FlatShard>& Fsdp::shards() {
  return parts_->shards;
}

// ---- a step

void Fsdp::begin_micro_batch(int index, int count) {
  parts_->life->check_open("Fsdp::begin_micro_batch");
  TESSERA_CHECK(index >= 0 && index < count, "begin_micro_batch: {} of {}", index, count);
  parts_->order.accumulation.is_last = index + 1 == count;
  parts_->lanes.micro_batch = index;
}

ClippedNorm Fsdp::clip_grad_norm(double max_norm, double p, const Tensor& loss_scale) {
  parts_->life->check_open("Fsdp::clip_grad_norm");
  parts_->order.complete_gradients();
  ClippedNorm clip = parts_->grad_norm->take(max_norm, p, loss_scale, parts_->runtime.step());
  clip.num_left_out = parts_->num_ignored;
  parts_->life->set_complete(true);
  return clip;
}

UnitNorms Fsdp::unit_norms(const ClippedNorm& clip, double p, const Tensor& loss_scale) const {
  return parts_->grad_norm->by_unit(clip, p, loss_scale);
}

void Fsdp::end_step() {
  parts_->life->check("Fsdp::end_step");
  parts_->life->end_step();
  parts_->order.end_step();
  for (const auto& unit : parts_->units) unit->gradients.reset();
  parts_->lanes.micro_batch = 0;
  parts_->runtime.end_step();
}

void Fsdp::end_forward() {
  parts_->order.end_forward();
}

void Fsdp::all_reduce_scalars(const Tensor& values) {
  parts_->life->check("Fsdp::all_reduce_scalars");
  parts_->scalars.all_reduce(values, parts_->runtime.step());
}

Tensor Fsdp::sum_micro_batches(std::span<const Tensor> per_micro_batch) {
  parts_->life->check("Fsdp::sum_micro_batches");
  return parts_->scalars.sum_micro_batches(per_micro_batch, parts_->runtime.step());
}

// ---- what it is

const FsdpOptions& Fsdp::options() const {
  return parts_->policy.options;
}

MemoryPlan Fsdp::memory() const {
  return memory_plan(*parts_);
}

std::string Fsdp::summary() const {
  const Policy& policy = parts_->policy;
  int64_t largest = 0, count = 0;
  for (const UnitPlan& unit : parts_->plan.units) {
    largest = std::max(largest, unit.num_parameters());
    count += unit.num_parameters();
  }
  std::string slots;
  for (const auto& pool : parts_->pools) {
    slots += fmt::format("{}{} x {}", slots.empty() ? "" : ", ", pool->num_slots(),
                         format_nbytes(pool->nbytes()));
  }
  const MemoryPlan plan = memory();
  std::string text = fmt::format(
      "{} units, {:.2f} M parameters, the largest unit {:.2f} M; {} over {} ranks "
      "(shard group {}, replicas {}); slots {}",
      parts_->units.size(), static_cast<double>(count) * 1e-6, static_cast<double>(largest) * 1e-6,
      name_of(policy.options.strategy), policy.world_size, policy.mesh.shard_size,
      policy.mesh.replicate_size, slots.empty() ? "none" : slots);
  text += fmt::format("; on this rank parameters {}, gradients {}, gathered units and staging {}",
                      format_nbytes(plan.nbytes_of(MemoryClass::kParameters)),
                      format_nbytes(plan.nbytes_of(MemoryClass::kGradients)),
                      format_nbytes(plan.nbytes_of(MemoryClass::kGathered)));
  int64_t num_coded = 0;
  for (const UnitPlan& unit : parts_->plan.units) {
    for (const GroupPlan& g : unit.groups) {
      for (const Placement& p : g.layout.placements) num_coded += g.layout.is_coded ? p.numel : 0;
    }
  }
  if (num_coded > 0) {
    text += fmt::format("; {:.2f} M parameters are NF4 codes, of which gathers move {} bytes each",
                        static_cast<double>(num_coded) * 1e-6,
                        fmt::format("{:.3f}", static_cast<double>(kNf4RecordNbytes) / kNf4Record));
  }
  const size_t num_ignored = policy.options.ignored.size();
  if (num_ignored > 0) {
    text += fmt::format("; {} ignored parameters on every rank, not reduced, clipped or optimized",
                        num_ignored);
  }
  return text;
}

std::shared_ptr<const ExposedTimes> Fsdp::exposed_times() {
  const std::vector<std::unique_ptr<Unit>>& units = parts_->units;
  Lanes& lanes = parts_->lanes;
  std::vector<ExposedTimes::Entry> entries;
  for (const auto& unit : units) entries.push_back({unit->name(), {}});
  auto times = std::make_shared<ExposedTimes>(std::move(entries));
  if (lanes.is_on_cpu()) {
    lanes.compute.submit("exposed_times", [&units, times] {
      for (size_t i = 0; i < units.size(); ++i) {
        times->set(i, std::exchange(units[i]->exposure.time, {}));
      }
    });
    return times;
  }
  lanes.measures_exposure = true;
  for (size_t i = 0; i < units.size(); ++i) {
    for (Exposure::Late& late : std::exchange(units[i]->exposure.late, {})) {
      times->add(i, late.part, std::move(late.span));
    }
  }
  return times;
}

}  // namespace tessera::dist
