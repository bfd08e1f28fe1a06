#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/runtime/allocator.h"
#include "dist/comm/transport.h"

// [Note: Memory that ranks of a node share]
// Each process has one range of addresses backed by an anonymous file, which the other ranks of the
// node map as well, all of it, once, when MPI starts. Pages come when they are touched and go when
// they are freed; a place in it is an offset, the same for everybody. The file has no name (peers
// open it through /proc), so nothing is left behind however a process ends. Ranks read each other's
// buffers where they lie: a gather costs one read and one write per byte.

namespace tessera::dist {

/// The memory of this process that others map, and theirs. Thread-safe.
class NodeMemory final : public MemoryBackend {
 public:
  /// How another process finds it.
  struct Handle {
    int64_t pid = 0, nbytes = 0;
    uint64_t token = 0;  ///< stands at its begin: whether it is the right file
    int fd = -1;
  };

  /// `num_ranks` on the node. Without memory (`handle().fd` is -1, `why_not`) if the system
  /// refuses.
  explicit NodeMemory(int num_ranks);
  ~NodeMemory() override;

  const Handle& handle() const { return handle_; }
  /// Maps the memory of rank `node_rank`; false if that is impossible.
  bool connect(int node_rank, const Handle& theirs);
  const std::string& why_not() const { return why_not_; }

  void* allocate(size_t nbytes) override;
  void free(void* data, size_t nbytes) noexcept override;
  /// Of own memory; -1 if `data` is none.
  int64_t offset_of(const void* data) const;
  /// Memory of a rank; the own one too once it is connected.
  char* at(int node_rank, int64_t offset) const {
    return bases_[static_cast<size_t>(node_rank)] + offset;
  }

 private:
  Handle handle_;
  char* own_ = nullptr;
  std::vector<char*> bases_;  // by node rank
  std::vector<int64_t> sizes_;
  std::string why_not_;
  std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset -> bytes
};

/// The meeting point of the ranks of one communicator that share a node. A collective is: publish
/// what the call is and where the own buffer lies, meet, read from the buffers of the others, meet
/// again. Little data travels with the call itself and needs no second meeting. Waiting ranks sleep
/// after some tens of microseconds of giving way to others.
class NodeBoard {
 public:
  /// Bytes that a call may carry.
  static constexpr int64_t kInlineNbytes = 32 * 1024;

  /// What a rank is about to do. Everything but the data has to agree.
  struct Call {
    const CallTag& tag;
    const char* op;
    int64_t nbytes = 0;
    int detail = 0;  ///< dtypes, root
    const void* data = nullptr;
    int64_t data_nbytes = 0;  ///< of `data`; carried along up to kInlineNbytes
  };

  /// A block of memory for a rank's part of a board; never freed, since others may still read it
  /// when this one is done with its communicator.
  static int64_t make_part(NodeMemory& memory);

  /// `ranks`: those of the communicator on this node, ascending; `node_ranks` and `parts` (what
  /// make_part returned to them) in the same order; `me`: the own place in it. `is_aborted` throws
  /// when the World is.
  NodeBoard(NodeMemory& memory, std::vector<int> ranks, std::vector<int> node_ranks,
            std::vector<int64_t> parts, int me, std::function<void()> throw_if_aborted);

  const std::vector<int>& ranks() const { return ranks_; }

  /// CommError if the ranks have come with different calls or the World is aborted.
  void enter(const Call& call);
  /// After `enter`: whether this call's data can be read: it was carried, or lies in shared memory.
  bool has_data(int place) const;
  bool all_have_data() const;
  bool none_has_data() const;
  const void* data(int place) const;
  void meet();

 private:
  struct Shared;
  struct Published;
  struct Part;

  const Part& part(int place) const { return *parts_[static_cast<size_t>(place)]; }
  void check_agreement(const Call& call) const;
  void sleep(uint32_t generation);

  NodeMemory& memory_;
  const std::vector<int> ranks_, node_ranks_;
  std::vector<Part*> parts_;
  const int me_;
  const std::function<void()> throw_if_aborted_;
  int turn_ = 0;  // which of the two places of a part this call uses
};

}  // namespace tessera::dist
