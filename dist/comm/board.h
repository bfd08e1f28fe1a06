#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dist/comm/collective.h"

namespace tessera::dist {

/// [Note: Meeting at a board]
/// The meeting point of the ranks of one communicator that can read each other's memory. A
/// collective is: publish what the call is and where the own data lies, meet, read from the data of
/// the others, meet again. The first meeting ends early if the World is aborted. Little data may
/// be carried along with the call, and then needs no second meeting. The protocol and what ranks
/// say of each other is here; the two kinds of memory are those of threads (thread_board.h) and
/// of processes of a node (node_board.h). Each rank has an object of its own.
class Board {
 public:
  /// What a rank is about to do. Everything but the data has to agree.
  struct Call {
    const CallTag& tag;
    const char* op;      ///< for a call without a tag
    int64_t nbytes = 0;  ///< of one shard, or of all
    int detail = 0;      ///< dtype, root
    const void* data = nullptr;
    int64_t data_nbytes = 0;
    int64_t sent_nbytes = 0;  ///< that a network would carry to each of the others
  };

  virtual ~Board() = default;
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  /// By rank of the communicator: its place on the board, or -1.
  int place_of(int rank) const { return places_[static_cast<size_t>(rank)]; }

  /// CommError, the same on all, if the ranks have come with different calls; or if the World is
  /// aborted.
  void enter(const Call& call);
  /// After `enter`: whether this rank's data can be read; it may lie in memory of its own.
  bool has_data(int place) const { return published(place).where != kNowhere; }
  bool all_have_data() const;
  bool none_has_data() const;
  const void* data(int place) const { return data_at(place, published(place).where); }
  /// Whether so much data was carried along: it may be read for as long as the call lasts, whatever
  /// becomes of the buffer.
  virtual bool is_carried(int64_t nbytes) const = 0;
  /// Whether any memory can be read, not only that of `Comm::allocate`.
  virtual bool reads_any_memory() const = 0;
  /// Meets again, within a collective.
  virtual void meet() = 0;
  /// The end of a collective whose data was `nbytes` a rank: then all have read it.
  virtual void leave(int64_t nbytes) = 0;

 protected:
  static constexpr int64_t kNowhere = -1;

  /// In the memory of the board, one a rank.
  struct Published {
    int64_t sequence = -1;
    uint64_t hash = 0;
    int64_t nbytes = 0;
    int detail = 0;
    int64_t where = kNowhere;  ///< the data, in terms of the kind of memory
    char name[160] = {};       ///< for messages; begins with the operation
    size_t op_length = 0;
  };

  /// `ranks` of the communicator, which has `world_size`, ascending; `world_ranks`: their ranks in
  /// the world; `me`: the own place among them.
  Board(std::vector<int> ranks, std::vector<int> world_ranks, int world_size, int me);

  int me() const { return me_; }

 private:
  /// Before anything of the call is published: the slots of the call before may be in use.
  virtual void begin(const Call& call) = 0;
  virtual Published& own_slot() = 0;
  virtual const Published& published(int place) const = 0;
  /// Makes the data readable for the others: its `where`.
  virtual int64_t publish_data(const Call& call) = 0;
  virtual const void* data_at(int place, int64_t where) const = 0;
  /// The first meeting of a call.
  virtual void meet_first() = 0;
  /// The ranks have come with different calls: all of them are about to throw `message`.
  virtual void on_disagreement(const std::string& message) { (void)message; }

  void check_agreement();

  const std::vector<int> ranks_, world_ranks_;
  std::vector<int> places_;
  const int me_;
};

}  // namespace tessera::dist
