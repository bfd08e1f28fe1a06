#include "dist/comm/collective.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/check.h"
#include "core/random.h"
#include "dist/comm/board.h"

namespace tessera::dist {

namespace {

// All-reduces of up to this many bytes over all ranks send everything to everybody: one hop.
constexpr int64_t kOneHopNbytes = 64 * 1024;

int64_t nbytes_of(int64_t numel, DType dtype) {
  return numel * static_cast<int64_t>(size_of(dtype));
}

bool is_one_hop(const Collective& c, int world_size) {
  return c.nbytes() * world_size <= kOneHopNbytes;
}
int64_t chunk_numel(const Collective& c, int world_size) {
  return (c.numel + world_size - 1) / world_size;
}

// One rank's part of one collective.
class Steps {
 public:
  Steps(Mover& mover, const CallTag& tag, const Collective& c)
      : mover_(mover),
        board_(mover.board()),
        tag_(tag),
        c_(c),
        rank_(mover.rank()),
        num_ranks_(mover.world_size()),
        dst_(static_cast<std::byte*>(c.dst)),
        src_(static_cast<const std::byte*>(c.src)),
        nbytes_(c.nbytes()) {}

  void all_gather() {
    const auto in = [&](int r) { return Piece{dst_ + r * nbytes_, nbytes_}; };
    const auto out = [&](int) { return ConstPiece{src_, nbytes_}; };
    start(Peers::kFar, in, out);  // under way while those who are near meet
    const bool by_memory = enter(nbytes_) && board_->all_have_data();
    if (!by_memory) start(Peers::kNear, in, out);
    mover_.copy(dst_ + rank_ * nbytes_, src_, nbytes_);
    if (by_memory) {
      for_each_near(
          [&](int r, int place) { mover_.copy(dst_ + r * nbytes_, board_->data(place), nbytes_); });
    }
    mover_.finish();
    if (by_memory) board_->leave(nbytes_);
  }

  void reduce_scatter() {
    const int64_t full_nbytes = nbytes_ * num_ranks_;
    const bool by_memory = enter(nbytes_) && board_->all_have_data();
    if (board_ != nullptr && !by_memory && !board_->none_has_data())
      throw CommError("reduce_scatter: `full` is memory of Comm::allocate on some ranks only");
    // Messages come to places in the staging buffer, in rank order without a gap.
    std::vector<const void*> sources(static_cast<size_t>(num_ranks_));
    int64_t staged_nbytes = 0;
    for (int r = 0; r < num_ranks_; ++r) {
      if (r == rank_ || (by_memory && is_near(r)) || nbytes_ == 0) continue;
      if (c_.staging == nullptr) {
        throw CommError("reduce_scatter: no staging, and `full` is not memory of Comm::allocate");
      }
      sources[static_cast<size_t>(r)] = static_cast<std::byte*>(c_.staging) + staged_nbytes;
      staged_nbytes += nbytes_;
    }
    start(
        by_memory ? Peers::kFar : Peers::kAll,
        [&](int r) {
          return Piece{const_cast<void*>(sources[static_cast<size_t>(r)]), nbytes_};
        },
        [&](int r) {
          return ConstPiece{src_ + r * nbytes_, nbytes_};
        });
    if (by_memory) {
      for_each_near([&](int r, int place) {
        sources[static_cast<size_t>(r)] =
            static_cast<const std::byte*>(board_->data(place)) + rank_ * nbytes_;
      });
    }
    sources[static_cast<size_t>(rank_)] = src_ + rank_ * nbytes_;
    mover_.finish();
    sum(sources, dst_, c_.numel);
    if (by_memory) board_->leave(full_nbytes);
  }

  void all_reduce() {
    if (num_ranks_ == 1) return;
    const int64_t chunk = chunk_numel(c_, num_ranks_);
    if (is_one_node()) {
      enter(2 * nbytes_of(chunk, c_.wire));
      if (board_->all_have_data()) return all_reduce_in_memory(chunk);
    }
    if (nbytes_ > 0 && c_.staging == nullptr) {
      throw CommError(fmt::format("all_reduce: expected {} bytes of staging, got none",
                                  c_.staging_nbytes(mover_, /*is_allocated=*/false)));
    }
    is_one_hop(c_, num_ranks_) ? all_reduce_in_one_hop() : reduce_and_gather(chunk);
  }

  // A binomial tree: after each round twice as many ranks have the bytes.
  void broadcast() {
    if (is_one_node()) {
      enter(nbytes_);
      const int root_place = board_->place_of(c_.root);
      if (board_->has_data(root_place)) {
        if (rank_ != c_.root) mover_.copy(dst_, board_->data(root_place), nbytes_);
        return board_->leave(nbytes_);
      }
    }
    const int place = (rank_ - c_.root + num_ranks_) % num_ranks_;
    const auto rank_of = [&](int p) { return (p + c_.root) % num_ranks_; };
    int reach = 1;  // the lowest set bit of place, or the first power of two beyond the world
    while (reach < num_ranks_ && (place & reach) == 0) reach *= 2;
    Messages messages;
    if (place != 0) {
      messages.receives.push_back({dst_, nbytes_, rank_of(place - reach)});
      start(messages);
      mover_.finish();
      messages.receives.clear();
    }
    for (int step = reach / 2; step >= 1; step /= 2) {
      if (place + step < num_ranks_)
        messages.sends.push_back({dst_, nbytes_, rank_of(place + step)});
    }
    start(messages);
    mover_.finish();
  }

 private:
  struct Piece {
    void* data;
    int64_t nbytes;
  };
  struct ConstPiece {
    const void* data;
    int64_t nbytes;
  };
  // Those whose memory may be read in place, the others, and both.
  enum class Peers { kNear, kFar, kAll };

  bool is_near(int r) const { return board_ != nullptr && board_->place_of(r) >= 0; }
  bool is_one_node() const { return board_ != nullptr && board_->size() == num_ranks_; }

  // Calls f(rank, place on the board) for the others on the board, each rank in another order: less
  // contention.
  template <class F>
  void for_each_near(const F& f) const {
    for (int i = 1; i < num_ranks_; ++i) {
      const int r = (rank_ + i) % num_ranks_;
      if (is_near(r)) f(r, board_->place_of(r));
    }
  }

  // Publishes this call and its source on the board, if there is one.
  bool enter(int64_t sent_nbytes) {
    if (board_ == nullptr) return false;
    const bool is_broadcast = c_.kind == Collective::Kind::kBroadcast;
    board_->enter({.tag = tag_,
                   .op = c_.op(),
                   .nbytes = nbytes_,
                   .detail = is_broadcast ? c_.root : static_cast<int>(c_.wire),
                   .data = src_,
                   .data_nbytes = is_broadcast && rank_ != c_.root ? 0 : c_.src_nbytes(num_ranks_),
                   .sent_nbytes = sent_nbytes});
    return true;
  }

  void start(const Messages& messages) {
    if (!messages.receives.empty() || !messages.sends.empty()) mover_.start(messages);
  }
  // Receives in(r) from, and sends out(r) to, other ranks.
  template <class In, class Out>
  void start(Peers peers, const In& in, const Out& out) {
    const auto is_meant = [&](int r) {
      return peers == Peers::kAll || is_near(r) == (peers == Peers::kNear);
    };
    Messages messages;
    for (int i = 1; i < num_ranks_; ++i) {
      const int from = (rank_ - i + num_ranks_) % num_ranks_, to = (rank_ + i) % num_ranks_;
      if (is_meant(from)) {
        const Piece piece = in(from);
        if (piece.nbytes > 0) messages.receives.push_back({piece.data, piece.nbytes, from});
      }
      if (is_meant(to)) {
        const ConstPiece piece = out(to);
        if (piece.nbytes > 0) messages.sends.push_back({piece.data, piece.nbytes, to});
      }
    }
    start(messages);
  }

  void sum(const std::vector<const void*>& sources, void* dst, int64_t numel) {
    mover_.reduce({.dst = dst,
                   .sources = sources.data(),
                   .num_sources = num_ranks_,
                   .numel = numel,
                   .src_dtype = c_.wire,
                   .dst_dtype = c_.out,
                   .accumulate = c_.accumulate});
  }

  // Where the bytes of rank r lie in the staging buffer, which has no place for the own ones.
  std::byte* staged(int r, int64_t nbytes) const {
    return static_cast<std::byte*>(c_.staging) + (r < rank_ ? r : r - 1) * nbytes;
  }
  void sum_staged(void* own, int64_t staged_nbytes, int64_t numel) {
    std::vector<const void*> sources(static_cast<size_t>(num_ranks_));
    for (int r = 0; r < num_ranks_; ++r)
      sources[static_cast<size_t>(r)] = r == rank_ ? own : staged(r, staged_nbytes);
    sum(sources, own, numel);
  }

  void all_reduce_in_memory(int64_t chunk) {
    std::vector<const void*> sources(static_cast<size_t>(num_ranks_));
    const auto sum_from = [&](int64_t offset, int64_t numel) {
      for (int r = 0; r < num_ranks_; ++r) {
        sources[static_cast<size_t>(r)] =
            static_cast<const std::byte*>(board_->data(board_->place_of(r))) + offset;
      }
      sum(sources, dst_ + offset, numel);
    };
    if (board_->is_carried(nbytes_)) return sum_from(0, c_.numel);
    // Rank r writes chunk r of its own data, which no other rank reads before the next meeting.
    const int64_t item = nbytes_of(1, c_.wire);
    const auto begin_of = [&](int r) { return std::min(r * chunk, c_.numel); };
    sum_from(begin_of(rank_) * item, begin_of(rank_ + 1) - begin_of(rank_));
    board_->meet();
    for_each_near([&](int r, int place) {
      const int64_t offset = begin_of(r) * item;
      mover_.copy(dst_ + offset, static_cast<const std::byte*>(board_->data(place)) + offset,
                  begin_of(r + 1) * item - offset);
    });
    board_->leave(nbytes_);
  }

  void all_reduce_in_one_hop() {
    start(
        Peers::kAll,
        [&](int r) {
          return Piece{staged(r, nbytes_), nbytes_};
        },
        [&](int) {
          return ConstPiece{dst_, nbytes_};
        });
    mover_.finish();
    sum_staged(dst_, nbytes_, c_.numel);
  }

  // Chunk r of everybody's data to rank r, its sum to everybody.
  void reduce_and_gather(int64_t chunk) {
    const int64_t item = nbytes_of(1, c_.wire);
    const auto begin_of = [&](int r) { return std::min(r * chunk, c_.numel) * item; };
    const auto piece_of = [&](int r) {
      return Piece{dst_ + begin_of(r), begin_of(r + 1) - begin_of(r)};
    };
    const auto const_piece_of = [&](int r) {
      return ConstPiece{dst_ + begin_of(r), begin_of(r + 1) - begin_of(r)};
    };
    const Piece own = piece_of(rank_);
    start(
        Peers::kAll,
        [&](int r) {
          return Piece{staged(r, chunk * item), own.nbytes};
        },
        const_piece_of);
    mover_.finish();
    sum_staged(own.data, chunk * item, own.nbytes / item);
    start(Peers::kAll, piece_of, [&](int) { return const_piece_of(rank_); });
    mover_.finish();
  }

  Mover& mover_;
  Board* const board_;
  const CallTag& tag_;
  const Collective& c_;
  const int rank_, num_ranks_;
  std::byte* const dst_;
  const std::byte* const src_;
  const int64_t nbytes_;
};

}  // namespace

CallTag::CallTag(int64_t sequence, const char* op, const CollectiveInfo& info)
    : sequence(sequence), op(op), phase(info.phase), unit(info.unit) {
  hash = hash_name(op) * 0x100000001b3u;
  hash = (hash ^ hash_name(phase)) * 0x100000001b3u;
  hash ^= hash_name(unit);
}

std::string CallTag::to_string() const {
  std::string text = op;
  if (*unit != '\0') text += fmt::format(" of {}", unit);
  if (*phase != '\0') text += fmt::format(", {}", phase);
  return text;
}

const char* Collective::op() const {
  switch (kind) {
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kBroadcast:
      return "broadcast";
  }
  return "";
}

int64_t Collective::nbytes() const {
  return nbytes_of(numel, wire);
}
int64_t Collective::src_nbytes(int world_size) const {
  return kind == Kind::kReduceScatter ? nbytes() * world_size : nbytes();
}
int64_t Collective::dst_nbytes(int world_size) const {
  return nbytes_of(kind == Kind::kAllGather ? numel * world_size : numel, out);
}
int64_t Collective::src_place_in_dst(int rank) const {
  if (kind == Kind::kReduceScatter) return -1;
  return kind == Kind::kAllGather ? rank * nbytes() : 0;
}

Cost Collective::cost(int world_size, int64_t staging_nbytes) const {
  const bool is_sum = kind == Kind::kReduceScatter || kind == Kind::kAllReduce;
  const int num_added = is_sum ? world_size - 1 + (accumulate ? 1 : 0) : 0;
  return Cost(static_cast<double>(numel) * num_added)
      .read(src, src_nbytes(world_size))
      .write(staging, staging_nbytes)
      .write_or_accumulate(dst, dst_nbytes(world_size), accumulate);
}

int64_t Collective::staging_nbytes(const Mover& mover, bool is_allocated) const {
  const int num_ranks = mover.world_size();
  const Board* const board = mover.board();
  const bool is_any = board != nullptr && board->reads_any_memory();
  int num_messages = num_ranks - 1;
  if (kind == Kind::kReduceScatter) {
    if (board != nullptr && (is_any || is_allocated)) num_messages = num_ranks - board->size();
    return num_messages * nbytes();
  }
  if (kind != Kind::kAllReduce || is_any) return 0;
  return num_messages *
         (is_one_hop(*this, num_ranks) ? nbytes() : nbytes_of(chunk_numel(*this, num_ranks), wire));
}

void run_collective(Mover& mover, const CallTag& tag, const Collective& collective) {
  Steps steps(mover, tag, collective);
  switch (collective.kind) {
    case Collective::Kind::kAllGather:
      return steps.all_gather();
    case Collective::Kind::kReduceScatter:
      return steps.reduce_scatter();
    case Collective::Kind::kAllReduce:
      return steps.all_reduce();
    case Collective::Kind::kBroadcast:
      return steps.broadcast();
  }
}

}  // namespace tessera::dist
