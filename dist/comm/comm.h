#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/dtype.h"
#include "core/runtime/stream.h"
#include "core/storage.h"

// Collectives between ranks.
//
// Order: one communicator is used from one stream; every rank issues the same calls in the same
// order from one host thread. Calls enqueue and return at once; an error (another rank failed, a
// timeout, sizes that differ) poisons the stream as CommError and appears at `synchronize()`.
// Lifetime: buffers belong to the caller until an event recorded after the call is done. A Comm may
// be destroyed while its calls are still queued. Creating (`split`, `duplicate`) and `allocate` are
// collective on the host and block.

namespace tessera::dist {

/// What a collective is for; the watchdog and logs quote it. The strings must live
/// until the collective is done.
struct CollectiveInfo {
  const char* phase = "";
  const char* unit = "";
  int64_t step = -1;
};

// Sums follow [Note: Tree over ranks] (kernels/rank_reduce/kernel.h) on every transport.

/// One group of ranks. Counts are elements; buffers are memory of the stream's device.
class Comm {
 public:
  Comm() = default;
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// full = the shards of all ranks in rank order. `shard` may be its own place in `full`.
  virtual void all_gather(const Stream& stream, void* full, const void* shard, int64_t shard_numel,
                          DType dtype, const CollectiveInfo& info = {}) = 0;

  /// shard = sum over ranks of chunk rank() of `full` (world_size * shard_numel elements of dtype
  /// `wire`), see [Note: Tree over ranks]; rounded once to `out`. With `accumulate`, shard += sum
  /// (added before the rounding). `shard` may be chunk rank() of `full` if out == wire, unless it
  /// accumulates.
  /// Errors   DtypeError unless wire and out are floating
  virtual void reduce_scatter(const Stream& stream, void* shard, const void* full,
                              int64_t shard_numel, DType wire, DType out, bool accumulate,
                              void* staging, const CollectiveInfo& info = {}) = 0;
  /// Bytes of scratch that `reduce_scatter` needs at `staging` (null if 0), less if `full` is
  /// memory of `allocate`, which it then has to be on all ranks.
  virtual int64_t reduce_scatter_staging_nbytes(int64_t shard_numel, DType wire,
                                                bool full_is_allocated = false) const = 0;

  /// data = sum over ranks in the tree of reduce_scatter, the same bits on every rank.
  virtual void all_reduce(const Stream& stream, void* data, int64_t numel, DType dtype,
                          void* staging, const CollectiveInfo& info = {}) = 0;
  /// data = maximum over ranks, f32, i32 or u8; NaN on one rank is NaN on all.
  virtual void all_reduce_max(const Stream& stream, void* data, int64_t numel, DType dtype,
                              void* staging, const CollectiveInfo& info = {}) = 0;
  /// Bytes of scratch that `all_reduce` and `all_reduce_max` need (null if 0).
  virtual int64_t all_reduce_staging_nbytes(int64_t numel, DType dtype) const = 0;

  /// data = the bytes of rank `root`.
  virtual void broadcast(const Stream& stream, void* data, int64_t nbytes, int root,
                         const CollectiveInfo& info = {}) = 0;

  /// Memory for ring slots and shards that the communicators of this World move best: on the CPU,
  /// memory that the ranks of a node share and read in place (own bytes of the current stream).
  /// Collective: all ranks call it in the same order with the same `nbytes`.
  virtual std::shared_ptr<Storage> allocate(int64_t nbytes, MemoryClass memory_class) = 0;

  /// The ranks with the same color (>= 0), ordered by (key, rank). Collective.
  virtual std::unique_ptr<Comm> split(int color, int key) = 0;
  /// The same ranks with traffic of their own, for another stream. Collective.
  virtual std::unique_ptr<Comm> duplicate() = 0;

  /// Ends this and all other communicators of the rank's World: pending and later calls throw
  /// CommError with `reason`, on all ranks that share the process. Any thread.
  virtual void abort(const std::string& reason) noexcept = 0;
};

}  // namespace tessera::dist
