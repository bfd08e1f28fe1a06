#include "dist/fsdp/fully_shard.h"

#include "dist/fsdp/schedule.h"

namespace tessera::dist {

Fsdp::Fsdp(nn::Module& root, World& world, const FsdpOptions& options)
    : scheduler_(std::make_unique<Scheduler>(root, world, options)) {}
Fsdp::~Fsdp() = default;

void Fsdp::initialize(uint64_t seed) {
  scheduler_->initialize(seed);
}
std::vector<optim::FlatShard>& Fsdp::shards() {
  return scheduler_->shards();
}
void Fsdp::begin_micro_batch(int index, int count) {
  scheduler_->begin_micro_batch(index, count);
}
ClippedNorm Fsdp::clip_grad_norm(double max_norm, double p, const Tensor& loss_scale) {
  return scheduler_->clip_grad_norm(max_norm, p, loss_scale);
}
void Fsdp::end_step() {
  scheduler_->end_step();
}
void Fsdp::end_forward() {
  scheduler_->end_forward();
}
void Fsdp::all_reduce_scalars(const Tensor& values) {
  scheduler_->all_reduce_scalars(values);
}
Tensor Fsdp::sum_micro_batches(std::span<const Tensor> per_micro_batch) {
  return scheduler_->sum_micro_batches(per_micro_batch);
}
void Fsdp::for_each_full(State state,
                         const std::function<void(const std::string&, const Tensor&)>& f) {
  scheduler_->for_each_full(state, f);
}
void Fsdp::load_full(const std::function<Tensor(const std::string&)>& values) {
  scheduler_->load_full(values);
}
void Fsdp::shards_changed(optim::Optimizer* optimizer) {
  scheduler_->shards_changed(optimizer);
}
int64_t Fsdp::num_parameters() const {
  int64_t count = 0;
  for (const auto& unit : scheduler_->units()) count += unit->num_parameters();
  return count;
}
int Fsdp::num_units() const {
  return static_cast<int>(scheduler_->units().size());
}
std::string Fsdp::unit_of(const nn::Module& module) const {
  return scheduler_->unit_of(module);
}
MemoryPlan Fsdp::memory() const {
  return scheduler_->memory_plan();
}
std::string Fsdp::summary() const {
  return scheduler_->summary();
}
std::shared_ptr<const ExposedTimes> Fsdp::exposed_times() {
  return scheduler_->exposed_times();
}
std::string Fsdp::program() const {
  return scheduler_->program();
}
const FsdpOptions& Fsdp::options() const {
  return scheduler_->options();
}

std::unique_ptr<Fsdp> fully_shard(nn::Module& root, World& world, const FsdpOptions& options) {
  return std::make_unique<Fsdp>(root, world, options);
}

}  // namespace tessera::dist
