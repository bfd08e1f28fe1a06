#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/runtime/allocator.h"

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

}  // namespace tessera::dist
