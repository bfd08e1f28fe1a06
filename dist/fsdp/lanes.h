#pragma once

#include <memory>

#include "core/tensor.h"
#include "dist/comm/comm.h"
#include "dist/fsdp/offload.h"
#include "dist/fsdp/plan.h"
#include "dist/fsdp/policy.h"
#include "dist/fsdp/waits.h"

namespace tessera::dist {

/// Streams, communicators and scratch that all units share. Each communicator has one stream.
struct Lanes {
  /// Collective: splits `everyone` in one fixed order. `policy` outlives this.
  Lanes(const Policy& policy, Comm& everyone);
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  const Policy& policy;
  Stream compute;
  Stream all_gather;      // gathers parameters while other units compute
  Stream reduce_scatter;  // reduces gradients of a finished unit while earlier ones compute
  Stream all_reduce;      // hybrid: the outer reduction while the next unit reduces inside
  std::unique_ptr<Comm> gather_comm;     // of the shard group; null if it has one rank
  std::unique_ptr<Comm> reduce_comm;     // of the shard group; null: gather_comm does both
  std::unique_ptr<Comm> part_comm;       // of part_size neighbours in the shard group; or null
  std::unique_ptr<Comm> replicate_comm;  // of the ranks with the same shard; null if there is one
  bool is_reduced_into_shards = false;   // by NCCL: gradient shards are memory of the communicators
  bool measures_exposure = false;        // on cuda, where it takes two events a wait
  int micro_batch = 0;                   // of the step
  Tensor nf4_map;  ///< what codes are dequantized by; undefined without a group of them
  Tensor reduce_staging, replicate_staging, wire_buffer;
  Tensor partial_shard;  // between the sums in the group and over replicas, see Gradients::reduce
  Event partial_shard_free;
  std::shared_ptr<Offloader> offloader;  // null: nothing in host memory
  Waits<WaitPoint> wait;

  bool is_on_cpu() const { return compute.device().type == DeviceType::kCpu; }
  Comm& reducing_comm() const { return reduce_comm != nullptr ? *reduce_comm : *gather_comm; }
  void* staging() const { return data_or_null(reduce_staging); }
  void* replicas_staging() const { return data_or_null(replicate_staging); }

  /// Memory that communicators send from or receive into, of theirs. All ranks call it in the same
  /// order.
  std::shared_ptr<Storage> allocate(int64_t nbytes, MemoryClass memory_class) const;
  /// The same as an array, of the class of the current scope.
  Tensor allocate_array(int64_t numel, DType dtype) const;
  std::unique_ptr<SlotPool> make_pool(const PoolPlan& plan) const;
  void make_scratch(const ScratchPlan& plan);
  /// `partial_shard`, which a backward out of turn may be the first to need.
  const Tensor& make_partial_shard();

  /// Waits, on the host, for all that was submitted.
  void drain() const noexcept;

 private:
  static void* data_or_null(const Tensor& t) { return t.is_defined() ? t.raw_data() : nullptr; }

  int64_t partial_numel_ = 0;
};

}  // namespace tessera::dist
