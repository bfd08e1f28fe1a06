#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "dist/comm/board.h"
#include "dist/comm/node_memory.h"

namespace tessera::dist {

/// The board of ranks that are processes of one node: data is read if it lies in the memory that
/// they share or was carried along. Waiting ranks sleep after some tens of microseconds of giving
/// way to others.
class NodeBoard final : public Board {
 public:
  /// Bytes that a call may carry.
  static constexpr int64_t kInlineNbytes = 32 * 1024;

  /// A block of memory for a rank's part of a board; never freed, since others may still read it
  /// when this one is done with its communicator.
  static int64_t make_part(NodeMemory& memory);

  /// Where the ranks of the communicator on this node are: `node_ranks` and `parts` (what make_part
  /// returned to them) in the order of `ranks`. `throw_if_aborted` throws when the World is.
  struct Members {
    std::vector<int> ranks, world_ranks, node_ranks;
    std::vector<int64_t> parts;
  };
  NodeBoard(NodeMemory& memory, const Members& members, int world_size, int me,
            std::function<void()> throw_if_aborted);

  bool is_carried(int64_t nbytes) const override { return nbytes <= kInlineNbytes; }
  bool reads_any_memory() const override { return false; }
  void meet() override;
  void leave(int64_t nbytes) override;

 private:
  struct Shared;
  struct Part;
  static constexpr int64_t kCarried = -2;  // where it is published

  void begin(const Call& call) override;
  Published& own_slot() override;
  const Published& published(int place) const override;
  int64_t publish_data(const Call& call) override;
  const void* data_at(int place, int64_t where) const override;
  void meet_first() override { meet(); }

  void sleep(uint32_t generation);

  NodeMemory& memory_;
  const std::vector<int> node_ranks_;
  std::vector<Part*> parts_;
  const std::function<void()> throw_if_aborted_;
  int turn_ = 0;  // which of the two places of a part this call uses
};

}  // namespace tessera::dist
