#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dist/comm/board.h"
#include "dist/comm/collective.h"
#include "dist/comm/watchdog.h"

namespace tessera::dist {

using kernels::tree_reduce;
using kernels::TreeReduce;

/// The calls of Control, for a rank that is told the hash of one it has not made.
inline constexpr const char* kControlCalls[] = {
    "barrier",           "control all_gather", "control all_gather of lengths",
    "control broadcast", "control all_agree",  "control max",
    "control min",       "control sum",        "control verdict",
    "end of the run",    "end of a step"};

/// How host memory moves between the ranks of one group: blocking calls, made by a stream's worker
/// (HostComm) or by the host itself (Control). Thread ranks meet at a board and need no messages
/// (local.cc); processes send them over MPI, to ranks whose memory they cannot read
/// (mpi_transport.h). A call waits for the others asleep; it throws CommError once the World is
/// aborted or when the ranks disagree about it.
class HostTransport : public Mover {
 public:
  /// `group` names the ranks in the world.
  HostTransport(int rank, CommGroup group) : rank_(rank), group_(std::move(group)) {}

  int rank() const final { return rank_; }
  int world_size() const final { return static_cast<int>(group_.world_ranks->size()); }
  const CommGroup& group() const { return group_; }
  /// The rank in the world of rank `r` of this group: what messages call it.
  int world_rank(int r) const { return (*group_.world_ranks)[static_cast<size_t>(r)]; }
  std::vector<int> world_ranks(const std::vector<int>& ranks) const;

  void run(const CallTag& tag, const Collective& collective);
  /// full = the bytes of all ranks in rank order.
  void all_gather(const CallTag& tag, void* full, const void* shard, int64_t shard_nbytes);
  void broadcast(const CallTag& tag, void* data, int64_t nbytes, int root);

  /// Memory that other ranks can read where it lies; null if there is none.
  virtual std::shared_ptr<MemoryBackend> shared_memory() const { return nullptr; }
  virtual bool is_shared(const void*) const { return false; }

  virtual std::shared_ptr<HostTransport> split(int color, int key) = 0;
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Why the World was aborted, or empty.
  virtual std::string abort_reason() const = 0;

 protected:
  /// Null where this rank can read the memory of no other.
  void set_board(std::unique_ptr<Board> board) { board_ = std::move(board); }
  /// Of the call in progress.
  const CallTag& tag() const { return tag_; }
  /// The group of a split's child: the ranks of this one, in the child's order. Once a split.
  CommGroup make_child_group(int color, const std::vector<int>& ranks, int child_rank);

 private:
  // What `run` has a collective done with.
  Board* board() const final { return board_.get(); }
  void start(const Messages&) override;
  void copy(void* dst, const void* src, int64_t nbytes) final;
  void reduce(const TreeReduce& sum) final { tree_reduce(sum); }

  const int rank_;
  const CommGroup group_;
  std::unique_ptr<Board> board_;
  int64_t num_splits_ = 0;
  CallTag tag_;
};

}  // namespace tessera::dist
