#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/runtime/cost.h"
#include "dist/comm/comm.h"
#include "kernels/rank_reduce/kernel.h"

// [Note: Collectives as data]
// A collective is a value: which one, and the buffers and sizes of one rank. Whatever does not
// depend on how bytes move is said of it here, once: what it reads and writes, which the checker
// and the copies through host memory follow, and its steps (`run_collective`) in terms of a Mover:
// messages between ranks, memory of others that can be read in place, a copy and a sum. So another
// collective is a kind with its buffers here, its steps in collective.cc, and its public call in
// comm.h and comm.cc; no transport changes.

namespace tessera::dist {

class Board;

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
};

class Mover;

/// One collective on one rank.
struct Collective {
  enum class Kind : unsigned char { kAllGather, kReduceScatter, kAllReduce, kBroadcast };

  Kind kind;
  void* dst = nullptr;
  const void* src = nullptr;  ///< `dst` where the data stays in place
  int64_t numel = 0;          ///< of a shard; of all data where there are no shards
  DType wire = kU8;           ///< of `src`
  DType out = kU8;            ///< of `dst`
  bool accumulate = false;
  int root = 0;
  void* staging = nullptr;

  const char* op() const;
  /// Of `numel` elements on the wire: what has to be the same on all ranks.
  int64_t nbytes() const;
  int64_t src_nbytes(int world_size) const;
  int64_t dst_nbytes(int world_size) const;
  /// Where `src` may lie in `dst`, in bytes; -1: apart from it.
  int64_t src_place_in_dst(int rank) const;
  /// `staging_nbytes` of it are at `staging`.
  Cost cost(int world_size, int64_t staging_nbytes) const;
  /// Bytes that `run_collective` needs at `staging`; `is_allocated`: `src` is memory that the ranks
  /// of a node share.
  int64_t staging_nbytes(const Mover& mover, bool is_allocated) const;
};

/// What one rank receives from, and sends to, others; at most one of each a rank.
struct Messages {
  struct Receive {
    void* data;
    int64_t nbytes;
    int from;
  };
  struct Send {
    const void* data;
    int64_t nbytes;
    int to;
  };
  std::vector<Receive> receives;
  std::vector<Send> sends;
};

/// How the bytes of one group of ranks move and add up.
class Mover {
 public:
  Mover() = default;
  virtual ~Mover() = default;
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// Where ranks meet whose memory this one may read in place; null: nowhere.
  virtual Board* board() const { return nullptr; }
  /// Starts them, all at once. What is sent may be waited for by what is received.
  virtual void start(const Messages& messages) = 0;
  /// What has been started is done for whatever follows.
  virtual void finish() {}
  virtual void copy(void* dst, const void* src, int64_t nbytes) = 0;
  /// The source of this rank is a buffer of the caller, those of others lie in `staging` in rank
  /// order and equally far apart, unless they are memory of the board.
  virtual void reduce(const kernels::TreeReduce& sum) = 0;
};

/// Carries out this rank's part; all ranks call it with the same kind, sizes and dtypes.
/// Errors   CommError if they do not, as far as the mover can see it, or without the staging that
///          is needed
void run_collective(Mover& mover, const CallTag& tag, const Collective& collective);

}  // namespace tessera::dist
