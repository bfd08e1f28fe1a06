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

class CollectiveLog;
class HostTransport;
class Watchdog;
struct CallTag;
struct Collective;

/// What a collective is for; the watchdog and logs quote it. The strings must live
/// until the collective is done.
struct CollectiveInfo {
  const char* phase = "";
  const char* unit = "";
  int64_t step = -1;
};

// Sums follow [Note: Tree over ranks] (kernels/rank_reduce/kernel.h) on every transport.

/// One group of ranks. Counts are elements; buffers are memory of the stream's device.
/// The public calls check their arguments, say what they cost and are numbered here, once for all
/// ways to move bytes, which are the `do_...` of subclasses.
/// Errors   Error for a count or color that is negative; UnimplementedError for a stream of another
///          kind of device than the communicator's, and for a sum of f64 into another dtype (or of
///          one into f64) on CUDA
class Comm {
 public:
  virtual ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  int rank() const;
  int world_size() const;

  /// full = the shards of all ranks in rank order. `shard` may be its own place in `full`.
  void all_gather(const Stream& stream, void* full, const void* shard, int64_t shard_numel,
                  DType dtype, const CollectiveInfo& info = {});

  /// shard = sum over ranks of chunk rank() of `full` (world_size * shard_numel elements of dtype
  /// `wire`), see [Note: Tree over ranks]; rounded once to `out`. With `accumulate`, shard += sum
  /// (added before the rounding). `shard` may be chunk rank() of `full` if out == wire, unless it
  /// accumulates.
  /// Errors   DtypeError unless wire and out are floating
  void reduce_scatter(const Stream& stream, void* shard, const void* full, int64_t shard_numel,
                      DType wire, DType out, bool accumulate, void* staging,
                      const CollectiveInfo& info = {});
  /// Bytes of scratch that `reduce_scatter` needs at `staging` (null if 0), less if `full` is
  /// memory of `allocate`, which it then has to be on all ranks.
  int64_t reduce_scatter_staging_nbytes(int64_t shard_numel, DType wire,
                                        bool full_is_allocated = false) const;

  /// data = sum over ranks in the tree of reduce_scatter, the same bits on every rank.
  /// Errors   DtypeError unless dtype is floating
  void all_reduce(const Stream& stream, void* data, int64_t numel, DType dtype, void* staging,
                  const CollectiveInfo& info = {});
  /// Bytes of scratch that `all_reduce` needs at `staging` (null if 0).
  int64_t all_reduce_staging_nbytes(int64_t numel, DType dtype) const;

  /// Memory for ring slots and shards that the communicators of this World move best: on the CPU,
  /// memory that the ranks of a node share and read in place (own bytes of the current stream).
  /// Collective: all ranks call it in the same order with the same `nbytes`.
  std::shared_ptr<Storage> allocate(int64_t nbytes, MemoryClass memory_class);

  /// The ranks with the same color (>= 0), ordered by (key, rank). Collective.
  std::unique_ptr<Comm> split(int color, int key);
  /// The same ranks with traffic of their own, for another stream. Collective.
  std::unique_ptr<Comm> duplicate();

  /// Ends this and all other communicators of the rank's World: pending and later calls throw
  /// CommError with `reason`, on all ranks that share the process. Any thread.
  void abort(const std::string& reason) noexcept;

 protected:
  /// Its streams are of `device_type`.
  Comm(std::shared_ptr<HostTransport> transport, std::shared_ptr<Watchdog> watchdog,
       DeviceType device_type);

  /// A call that has been checked and declared.
  struct Call {
    const Stream& stream;
    const Collective& collective;
    const CallTag& tag;  ///< the operation is `tag.op`
    const CollectiveInfo& info;
    int64_t nbytes;  ///< for the watchdog and logs
  };

  const std::shared_ptr<HostTransport>& transport() const { return transport_; }
  const std::shared_ptr<Watchdog>& watchdog() const { return watchdog_; }
  /// What the watchdog reads of this communicator.
  const std::shared_ptr<CollectiveLog>& log() const { return log_; }

 private:
  void run(const Stream& stream, const Collective& collective, const CollectiveInfo& info);

  virtual void do_run(const Call& call) = 0;
  /// Bytes of device memory; `is_allocated`: the source is memory of `allocate`.
  virtual int64_t do_staging_nbytes(const Collective& collective, bool is_allocated) const = 0;
  /// The memory that `allocate` gives `nbytes` > 0 of; null: ordinary memory.
  virtual std::shared_ptr<MemoryBackend> do_memory(int64_t nbytes) = 0;
  /// `transport` is that of the child.
  virtual std::unique_ptr<Comm> do_split(std::shared_ptr<HostTransport> transport, int color,
                                         int key) = 0;
  /// The transport has been aborted.
  virtual void do_abort() noexcept {}

  const std::shared_ptr<HostTransport> transport_;
  const std::shared_ptr<Watchdog> watchdog_;
  const std::shared_ptr<CollectiveLog> log_;
  const DeviceType device_type_;
  int64_t next_sequence_ = 0;
};

}  // namespace tessera::dist
