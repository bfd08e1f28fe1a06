#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "dist/comm/comm.h"
#include "dist/comm/watchdog.h"
#include "kernels/rank_reduce/kernel.h"

// How host memory moves between ranks: blocking calls, made by a stream's worker (HostComm) or by
// the host itself (Control). One implementation for thread ranks (local.cc), one for MPI (mpi.cc).

namespace tessera::dist {

using kernels::Reduction;
using kernels::tree_reduce;
using kernels::TreeReduce;

struct ReduceScatterCall {
  void* shard;
  const void* full;
  int64_t shard_numel;
  DType wire, out;
  bool accumulate;
  void* staging;
};

struct AllReduceCall {
  void* data;
  int64_t numel;
  DType dtype;
  Reduction reduction;
  void* staging;
};

/// [Note: Tags of collectives]
/// Two ranks that are in different collectives of the same size would exchange each other's data
/// and go on. So every call of a Comm carries its place in the order and a hash of what it is for;
/// ranks whose tags differ end with an error that names both. Bytes and dtypes are compared apart
/// from it.
struct CallTag {
  int64_t sequence = -1;  ///< of its communicator; -1: no tag
  const char* op = "";
  const char* phase = "";
  const char* unit = "";
  uint64_t hash = 0;  ///< of op, phase and unit

  CallTag() = default;
  CallTag(int64_t sequence, const char* op, const CollectiveInfo& info);
  /// "all_gather of block3, forward".
  std::string to_string() const;
  bool agrees_with(const CallTag& other) const {
    return sequence == other.sequence && hash == other.hash;
  }
};

/// The calls of Control, for a rank that is told the hash of one it has not made.
inline constexpr const char* kControlCalls[] = {
    "barrier",           "control all_gather", "control all_gather of lengths",
    "control broadcast", "control all_agree",  "control max",
    "control min",       "control sum",        "control verdict",
    "end of the run",    "end of a step"};

/// One group of ranks. A blocking call waits for the others asleep; it throws CommError once the
/// World is aborted or when the ranks disagree about the call.
class HostTransport {
 public:
  /// `group` names the ranks in the world.
  HostTransport(int rank, CommGroup group) : rank_(rank), group_(std::move(group)) {}
  virtual ~HostTransport() = default;
  HostTransport(const HostTransport&) = delete;
  HostTransport& operator=(const HostTransport&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(group_.world_ranks->size()); }
  const CommGroup& group() const { return group_; }
  /// The rank in the world of rank `r` of this group: what messages call it.
  int world_rank(int r) const { return (*group_.world_ranks)[static_cast<size_t>(r)]; }
  /// Of the call that follows, on the same thread.
  void set_tag(const CallTag& tag) { tag_ = tag; }

  virtual void all_gather(void* full, const void* shard, int64_t shard_nbytes) = 0;
  virtual void reduce_scatter(const ReduceScatterCall& call) = 0;
  virtual void all_reduce(const AllReduceCall& call) = 0;
  virtual void broadcast(void* data, int64_t nbytes, int root) = 0;
  virtual int64_t reduce_scatter_staging_nbytes(int64_t shard_numel, DType wire,
                                                bool full_is_allocated) const = 0;
  virtual int64_t all_reduce_staging_nbytes(int64_t numel, DType dtype) const = 0;

  /// Memory that other ranks can read where it lies; null if there is none.
  virtual std::shared_ptr<MemoryBackend> shared_memory() const { return nullptr; }
  virtual bool is_shared(const void*) const { return false; }

  virtual std::shared_ptr<HostTransport> split(int color, int key) = 0;
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Why the World was aborted, or empty.
  virtual std::string abort_reason() const = 0;

 protected:
  const CallTag& tag() const { return tag_; }
  /// The group of a split's child: the ranks of this one, in the child's order. Once a split.
  CommGroup make_child_group(int color, const std::vector<int>& ranks, int child_rank);

 private:
  const int rank_;
  const CommGroup group_;
  int64_t num_splits_ = 0;
  CallTag tag_;
};

/// A Comm whose calls are tasks on a CPU stream that block its worker.
class HostComm final : public Comm {
 public:
  HostComm(std::shared_ptr<HostTransport> transport, std::shared_ptr<Watchdog> watchdog);

  int rank() const override { return transport_->rank(); }
  int world_size() const override { return transport_->world_size(); }
  void all_gather(const Stream& stream, void* full, const void* shard, int64_t shard_numel,
                  DType dtype, const CollectiveInfo& info) override;
  void reduce_scatter(const Stream& stream, void* shard, const void* full, int64_t shard_numel,
                      DType wire, DType out, bool accumulate, void* staging,
                      const CollectiveInfo& info) override;
  int64_t reduce_scatter_staging_nbytes(int64_t shard_numel, DType wire,
                                        bool full_is_allocated) const override;
  void all_reduce(const Stream& stream, void* data, int64_t numel, DType dtype, void* staging,
                  const CollectiveInfo& info) override;
  void all_reduce_max(const Stream& stream, void* data, int64_t numel, DType dtype, void* staging,
                      const CollectiveInfo& info) override;
  int64_t all_reduce_staging_nbytes(int64_t numel, DType dtype) const override;
  void broadcast(const Stream& stream, void* data, int64_t nbytes, int root,
                 const CollectiveInfo& info) override;
  std::shared_ptr<Storage> allocate(int64_t nbytes, MemoryClass memory_class) override;
  std::unique_ptr<Comm> split(int color, int key) override;
  std::unique_ptr<Comm> duplicate() override;
  void abort(const std::string& reason) noexcept override;

 private:
  template <class F>
  void enqueue(const Stream& stream, const char* op, int64_t nbytes, const CollectiveInfo& info,
               const Cost& cost, F call);
  void enqueue_all_reduce(const Stream& stream, const char* op, const AllReduceCall& call,
                          const CollectiveInfo& info);

  const std::shared_ptr<HostTransport> transport_;
  const std::shared_ptr<Watchdog> watchdog_;
  const std::shared_ptr<CollectiveLog> log_;
  int64_t next_sequence_ = 0;
};

}  // namespace tessera::dist
