#include "dist/fsdp/lanes.h"

#include "dist/fsdp/flat_bytes.h"

namespace tessera::dist {

Lanes::Lanes(const Policy& policy_, Comm& everyone) : policy(policy_) {
  const Context& context = *Context::current();
  const FsdpOptions& options = policy.options;
  compute = context.compute();
  all_gather = context.make_stream("all_gather", {.high_priority = true});
  reduce_scatter = options.communicators == 1
                       ? all_gather
                       : context.make_stream("reduce_scatter", {.high_priority = true});
  all_reduce = context.make_stream("all_reduce");
  is_reduced_into_shards = !is_on_cpu() && context.options().backends.nccl.native_reduce_scatter;
  if (policy.offloads()) {
    offloader = std::make_shared<Offloader>(options.offload, options.offload_window,
                                            !options.reproducible, policy.poison);
  }
  const Mesh& mesh = policy.mesh;
  if (mesh.shard_size > 1) {
    gather_comm = mesh.split_shard(everyone);
    if (options.communicators == 2) reduce_comm = gather_comm->duplicate();
  }
  if (policy.part_size > 1) {
    part_comm =
        gather_comm->split(mesh.shard_rank / policy.part_size, mesh.shard_rank % policy.part_size);
  }
  if (mesh.replicate_size > 1) replicate_comm = mesh.split_replicate(everyone);
}

std::shared_ptr<Storage> Lanes::allocate(int64_t nbytes, MemoryClass memory_class) const {
  Comm* comm = gather_comm != nullptr ? gather_comm.get() : replicate_comm.get();
  if (comm != nullptr) return comm->allocate(nbytes, memory_class);
  auto memory = std::make_shared<Storage>(static_cast<size_t>(nbytes), compute.device());
  memory->materialize(memory_class);
  return memory;
}

Tensor Lanes::allocate_array(int64_t numel, DType dtype) const {
  return view_of_storage(allocate(nbytes_of(numel, dtype), MemoryScope::current()), 0, {numel},
                         dtype);
}

std::unique_ptr<SlotPool> Lanes::make_pool(const PoolPlan& plan) const {
  // What other ranks read is allocated by all of them now, the rest when it is first taken.
  const bool is_eager = plan.is_gathered && gather_comm != nullptr;
  return std::make_unique<SlotPool>(
      plan.nbytes, plan.num_slots,
      [this](int64_t nbytes) { return allocate(nbytes, MemoryClass::kGathered); }, is_eager);
}

void Lanes::make_scratch(const ScratchPlan& plan) {
  const MemoryScope scope(MemoryClass::kGathered);
  const auto make_staging = [this](int64_t nbytes) {  // on the CPU no other rank reads it
    return is_on_cpu() ? empty({nbytes}, kU8) : allocate_array(nbytes, kU8);
  };
  if (plan.staging_nbytes > 0) reduce_staging = make_staging(plan.staging_nbytes);
  if (plan.replicate_staging_nbytes > 0) {
    replicate_staging = make_staging(plan.replicate_staging_nbytes);
  }
  if (plan.wire_nbytes > 0) wire_buffer = allocate_array(plan.wire_nbytes, kU8);
  partial_numel_ = plan.partial_numel;
  if (plan.has_partial) partial_shard = allocate_array(partial_numel_, kF32);
}

const Tensor& Lanes::make_partial_shard() {
  if (partial_shard.is_defined()) return partial_shard;
  const MemoryScope scope(MemoryClass::kGathered);
  partial_shard = allocate_array(partial_numel_, kF32);
  partial_shard_free = compute.record();
  return partial_shard;
}

void Lanes::drain() const noexcept {
  if (offloader != nullptr) offloader->drain();
  for (const Stream* s : {&all_gather, &reduce_scatter, &all_reduce, &compute}) s->drain();
}

}  // namespace tessera::dist
