#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/log.h"
#include "core/runtime/affinity.h"
#include "dist/comm/backend.h"
#include "dist/comm/control.h"
#include "dist/comm/launcher.h"
#include "dist/comm/node_memory.h"
#include "dist/comm/world.h"

// [Note: Collectives over MPI]
// Ranks of one node read each other's buffers in memory that they share ([Note: Memory that ranks
// of a node share]); the rest are messages: to ranks of other nodes, and of buffers that are too
// large to be carried along and lie elsewhere.
//
// Messages between pairs of ranks as raw bytes (MPI has no bf16) and sums of our own
// ([Note: Tree over ranks]): the same bits as thread ranks. Each communicator has an MPI
// communicator of its own, on which messages of successive collectives match in order. MPI waits by
// spinning; a rank's processors are needed by its compute stream, so we poll: a short spin for
// small messages, then sleeps that grow with the time already waited, which bounds both the
// processor time of a waiting rank and the delay relative to the wait.
//
// The MPI tag of a message holds the call's tag ([Note: Tags of collectives]): some bits of its
// sequence and some of its hash. A message of another collective so matches no receive. A rank that
// has waited for a while looks at what has arrived and matches nothing: with its own sequence bits
// it is from a rank that is in another collective, with others from one that is ahead.

namespace tessera::dist {

namespace {

[[noreturn]] void fail_mpi(int code, const char* call) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommError(fmt::format("{}: {}", call, std::string_view(text, static_cast<size_t>(length))));
}

#define TESSERA_MPI_CHECK(call)                               \
  do {                                                        \
    const int mpi_code_ = (call);                             \
    if (mpi_code_ != MPI_SUCCESS) fail_mpi(mpi_code_, #call); \
  } while (0)

constexpr int64_t kMaxMessage = int64_t{1} << 30;  // bytes; an MPI count is an int
// All-reduces of up to this many bytes over all ranks send everything to everybody: one hop.
constexpr int64_t kOneHopBytes = 64 * 1024;

constexpr int kSequenceBits = 6;
constexpr std::chrono::milliseconds kMismatchPeriod{20};  // between looks at what has arrived

// What the communicators of the process share.
class MpiDomain {
 public:
  bool is_aborted() const { return is_aborted_.load(std::memory_order_relaxed); }
  std::string reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
  }
  void abort(const std::string& reason) noexcept {
    const std::lock_guard lock(mutex_);
    if (is_aborted_) return;
    reason_ = reason;
    is_aborted_ = true;
  }
  // Freed together at the end, since freeing is collective and a Comm may die on any thread.
  void add(MPI_Comm comm) {
    const std::lock_guard lock(mutex_);
    comms_.push_back(comm);
  }
  // The memory that ranks of this node share, if they do, and which nodes all ranks are on.
  void set_node(std::shared_ptr<NodeMemory> memory, int node_rank, std::vector<int> node_of) {
    memory_ = std::move(memory);
    node_rank_ = node_rank;
    node_of_ = std::move(node_of);
  }
  const std::shared_ptr<NodeMemory>& memory() const { return memory_; }
  int node_rank() const { return node_rank_; }
  int node_of(int world_rank) const { return node_of_[static_cast<size_t>(world_rank)]; }
  void throw_if_aborted() const {
    if (is_aborted()) throw CommError(reason());
  }

  void free_comms() {
    std::vector<MPI_Comm> comms;
    {
      const std::lock_guard lock(mutex_);
      comms.swap(comms_);
    }
    for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);  // collective: it may wait
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_aborted_{false};
  std::string reason_;
  std::vector<MPI_Comm> comms_;
  std::shared_ptr<NodeMemory> memory_;
  int node_rank_ = 0;
  std::vector<int> node_of_;  // by rank of the world
};

using Clock = std::chrono::steady_clock;

// Decides between spinning, yielding and sleeping while something does not happen.
class Backoff {
 public:
  Backoff() : begin_(Clock::now()) {
    // The kernel may add its timer slack (50 us by default) to each sleep.
    static thread_local const int slack = prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
    (void)slack;
  }
  void pause() {
    const auto waited = Clock::now() - begin_;
    if (waited < std::chrono::microseconds(20)) {
      sched_yield();
      return;
    }
    const auto sleep = std::clamp<Clock::duration>(waited / 8, std::chrono::microseconds(10),
                                                   std::chrono::microseconds(500));
    std::this_thread::sleep_for(sleep);
  }

 private:
  const Clock::time_point begin_;
};

// How many bits of a tag are for the hash: MPI grants 15 bits of tags, most grant 31.
int num_hash_bits(MPI_Comm comm) {
  int* largest = nullptr;
  int is_set = 0;
  MPI_Comm_get_attr(comm, MPI_TAG_UB, &largest, &is_set);
  const unsigned bound = is_set != 0 ? static_cast<unsigned>(*largest) : 32767U;
  return static_cast<int>(std::bit_width(bound + 1)) - 1 - kSequenceBits;
}

class MpiTransport final : public HostTransport {
 public:
  MpiTransport(MPI_Comm comm, int rank, CommGroup group, std::shared_ptr<MpiDomain> domain)
      : HostTransport(rank, std::move(group)),
        comm_(comm),
        num_hash_bits_(num_hash_bits(comm)),
        domain_(std::move(domain)),
        sources_(static_cast<size_t>(world_size())) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    domain_->add(comm_);
    for (const char* name : kControlCalls) names_.emplace(hash_bits({0, name, {}}), name);
    meet_node();
  }

  void all_gather(void* full, const void* shard, int64_t shard_nbytes) override {
    std::byte* const out = static_cast<std::byte*>(full);
    const auto in_piece = [&](int r) { return Piece{out + r * shard_nbytes, shard_nbytes}; };
    const auto out_piece = [&](int) { return ConstPiece{shard, shard_nbytes}; };
    exchange(Peers::kFar, in_piece, out_piece);
    bool by_memory = false;
    if (board_ != nullptr) {
      board_->enter({tag(), "all_gather", shard_nbytes, 0, shard, shard_nbytes});
      by_memory = board_->all_have_data();
      if (!by_memory) exchange(Peers::kNear, in_piece, out_piece);
    }
    copy(out + rank() * shard_nbytes, shard, shard_nbytes);
    if (by_memory) {
      for_each_near([&](int r, int place) {  // each starts elsewhere: less contention
        copy(out + r * shard_nbytes, board_->data(place), shard_nbytes);
      });
    }
    wait_all();
    if (by_memory) end_reading(shard_nbytes);
  }

  void reduce_scatter(const ReduceScatterCall& call) override {
    const int64_t nbytes = call.shard_numel * static_cast<int64_t>(size_of(call.wire));
    const int64_t full_nbytes = nbytes * world_size();
    const std::byte* const full = static_cast<const std::byte*>(call.full);
    bool by_memory = false;
    if (board_ != nullptr) {
      board_->enter(
          {tag(), "reduce_scatter", nbytes, static_cast<int>(call.wire), full, full_nbytes});
      by_memory = board_->all_have_data();
      if (!by_memory && !board_->none_has_data()) {
        throw CommError("reduce_scatter: `full` is memory of Comm::allocate on some ranks only");
      }
    }
    // Messages come to places in the staging buffer, in rank order without a gap.
    const auto is_message = [&](int r) { return r != rank() && !(by_memory && is_near(r)); };
    int64_t staged_nbytes = 0;
    for (int r = 0; r < world_size(); ++r) {
      if (!is_message(r) || nbytes == 0) continue;
      if (call.staging == nullptr) {
        throw CommError("reduce_scatter: no staging, and `full` is not memory of Comm::allocate");
      }
      sources_[static_cast<size_t>(r)] = static_cast<std::byte*>(call.staging) + staged_nbytes;
      staged_nbytes += nbytes;
    }
    exchange(
        by_memory ? Peers::kFar : Peers::kAll,
        [&](int r) {
          return Piece{const_cast<void*>(sources_[static_cast<size_t>(r)]), nbytes};
        },
        [&](int r) {
          return ConstPiece{full + r * nbytes, nbytes};
        });
    if (by_memory) {
      for_each_near([&](int r, int near) {
        sources_[static_cast<size_t>(r)] =
            static_cast<const std::byte*>(board_->data(near)) + rank() * nbytes;
      });
    }
    wait_all();
    sources_[static_cast<size_t>(rank())] = full + rank() * nbytes;
    tree_reduce({.dst = call.shard,
                 .sources = sources_.data(),
                 .num_sources = world_size(),
                 .numel = call.shard_numel,
                 .src_dtype = call.wire,
                 .dst_dtype = call.out,
                 .accumulate = call.accumulate});
    if (by_memory) end_reading(full_nbytes);
  }

  void all_reduce(const AllReduceCall& call) override {
    const int64_t item = static_cast<int64_t>(size_of(call.dtype));
    std::byte* const data = static_cast<std::byte*>(call.data);
    TreeReduce args{.dst = data,
                    .sources = sources_.data(),
                    .num_sources = world_size(),
                    .numel = call.numel,
                    .src_dtype = call.dtype,
                    .dst_dtype = call.dtype,
                    .reduction = call.reduction};
    if (is_one_node()) {
      const int64_t nbytes = call.numel * item;
      board_->enter({tag(), call.reduction == Reduction::kSum ? "all_reduce" : "all_reduce_max",
                     nbytes, static_cast<int>(call.dtype), data, nbytes});
      if (board_->all_have_data()) return reduce_in_memory(args, item);
    }
    if (is_one_hop(call.numel * item)) {
      const int64_t nbytes = call.numel * item;
      exchange(
          Peers::kAll, [&](int r) { return staged(call.staging, r, nbytes); },
          [&](int) {
            return ConstPiece{data, nbytes};
          });
      wait_all();
      reduce(args, data, call.staging, nbytes);
      return;
    }
    const int64_t chunk = chunk_numel(call.numel);
    const auto begin_of = [&](int r) { return std::min(r * chunk, call.numel) * item; };
    const auto nbytes_of = [&](int r) { return begin_of(r + 1) - begin_of(r); };
    exchange(
        Peers::kAll,
        [&](int r) {
          return Piece{staged(call.staging, r, chunk * item).data, nbytes_of(rank())};
        },
        [&](int r) {
          return ConstPiece{data + begin_of(r), nbytes_of(r)};
        });
    wait_all();
    args.dst = data + begin_of(rank());
    args.numel = nbytes_of(rank()) / item;
    reduce(args, args.dst, call.staging, chunk * item);
    exchange(
        Peers::kAll,
        [&](int r) {
          return Piece{data + begin_of(r), nbytes_of(r)};
        },
        [&](int) {
          return ConstPiece{data + begin_of(rank()), nbytes_of(rank())};
        });
    wait_all();
  }

  // A binomial tree: after each round twice as many ranks have the bytes.
  void broadcast(void* data, int64_t nbytes, int root) override {
    if (is_one_node()) {
      board_->enter({tag(), "broadcast", nbytes, root, data, rank() == root ? nbytes : 0});
      if (board_->has_data(root)) {
        if (rank() != root) copy(data, board_->data(root), nbytes);
        return end_reading(nbytes);
      }
    }
    const int place = (rank() - root + world_size()) % world_size();
    const auto rank_of = [&](int p) { return (p + root) % world_size(); };
    int reach = 1;  // the lowest set bit of place, or the first power of two beyond the world
    while (reach < world_size() && (place & reach) == 0) reach *= 2;
    if (place != 0) {
      receive({data, nbytes}, rank_of(place - reach));
      wait_all();
    }
    for (int step = reach / 2; step >= 1; step /= 2) {
      if (place + step < world_size()) send({data, nbytes}, rank_of(place + step));
    }
    wait_all();
  }

  int64_t reduce_scatter_staging_nbytes(int64_t shard_numel, DType wire,
                                        bool full_is_allocated) const override {
    const bool by_memory = full_is_allocated && board_ != nullptr;
    const int num_others =
        world_size() - (by_memory ? static_cast<int>(board_->ranks().size()) : 1);
    return num_others * shard_numel * static_cast<int64_t>(size_of(wire));
  }

  int64_t all_reduce_staging_nbytes(int64_t numel, DType dtype) const override {
    const int64_t item = static_cast<int64_t>(size_of(dtype));
    const int64_t staged_numel = is_one_hop(numel * item) ? numel : chunk_numel(numel);
    return (world_size() - 1) * staged_numel * item;
  }

  std::shared_ptr<HostTransport> split(int color, int key) override {
    // Asleep until all have come; then the collective itself, which spins, is short.
    MPI_Request request;
    TESSERA_MPI_CHECK(MPI_Ibarrier(comm_, &request));
    requests_.assign(1, request);
    expected_.assign(1, kNotReceived);
    wait_all();
    MPI_Comm comm;
    TESSERA_MPI_CHECK(MPI_Comm_split(comm_, color, key, &comm));
    int rank = 0;
    TESSERA_MPI_CHECK(MPI_Comm_rank(comm, &rank));
    return std::make_shared<MpiTransport>(
        comm, rank, make_child_group(color, ranks_of_child(comm), rank), domain_);
  }

  std::shared_ptr<MemoryBackend> shared_memory() const override { return domain_->memory(); }
  bool is_shared(const void* data) const override {
    return domain_->memory() != nullptr && domain_->memory()->offset_of(data) >= 0;
  }

  void abort(const std::string& reason) noexcept override { domain_->abort(reason); }
  std::string abort_reason() const override {
    return domain_->is_aborted() ? domain_->reason() : std::string();
  }

 private:
  static constexpr int64_t kNotReceived = -1;
  struct Piece {
    void* data;
    int64_t nbytes;
  };
  struct ConstPiece {
    const void* data;
    int64_t nbytes;
  };

  enum class Peers { kNear, kFar, kAll };

  // By rank of `child`: the rank here. Local.
  std::vector<int> ranks_of_child(MPI_Comm child) const {
    MPI_Group mine, theirs;
    TESSERA_MPI_CHECK(MPI_Comm_group(comm_, &mine));
    TESSERA_MPI_CHECK(MPI_Comm_group(child, &theirs));
    int size = 0;
    TESSERA_MPI_CHECK(MPI_Group_size(theirs, &size));
    std::vector<int> places(static_cast<size_t>(size)), ranks(places.size());
    for (int i = 0; i < size; ++i) places[static_cast<size_t>(i)] = i;
    TESSERA_MPI_CHECK(MPI_Group_translate_ranks(theirs, size, places.data(), mine, ranks.data()));
    MPI_Group_free(&mine);
    MPI_Group_free(&theirs);
    return ranks;
  }

  // Finds the ranks on this node that share memory and makes the board they meet at. Collective.
  void meet_node() {
    if (domain_->memory() == nullptr) {
      near_place_.assign(static_cast<size_t>(world_size()), -1);
      return;
    }
    struct Place {
      int node, node_rank;
      int64_t part;
    };
    NodeMemory& memory = *domain_->memory();
    int world_rank = 0;
    TESSERA_MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank));
    const Place mine{domain_->node_of(world_rank), domain_->node_rank(),
                     NodeBoard::make_part(memory)};
    std::vector<Place> all(static_cast<size_t>(world_size()));
    TESSERA_MPI_CHECK(
        MPI_Allgather(&mine, sizeof mine, MPI_BYTE, all.data(), sizeof mine, MPI_BYTE, comm_));
    std::vector<int> ranks, node_ranks;
    std::vector<int64_t> parts;
    for (int r = 0; r < world_size(); ++r) {
      const Place& place = all[static_cast<size_t>(r)];
      near_place_.push_back(place.node == mine.node ? static_cast<int>(ranks.size()) : -1);
      if (place.node != mine.node) continue;
      ranks.push_back(r);
      node_ranks.push_back(place.node_rank);
      parts.push_back(place.part);
    }
    if (ranks.size() < 2) {
      near_place_.assign(static_cast<size_t>(world_size()), -1);
      return;
    }
    const int me = near_place_[static_cast<size_t>(rank())];
    board_ = std::make_unique<NodeBoard>(memory, std::move(ranks), std::move(node_ranks),
                                         std::move(parts), me,
                                         [domain = domain_] { domain->throw_if_aborted(); });
  }

  bool is_near(int r) const { return near_place_[static_cast<size_t>(r)] >= 0; }
  bool is_one_node() const {
    return board_ != nullptr && static_cast<int>(board_->ranks().size()) == world_size();
  }

  // Calls f(rank, place on the board) for the others on this node.
  template <class F>
  void for_each_near(const F& f) const {
    for (int i = 1; i < world_size(); ++i) {
      const int r = (rank() + i) % world_size();
      if (is_near(r)) f(r, near_place_[static_cast<size_t>(r)]);
    }
  }

  // Others may change their buffers once all have read. What was carried may be read on.
  void end_reading(int64_t data_nbytes) {
    if (data_nbytes > NodeBoard::kInlineNbytes) board_->meet();
  }

  static void copy(void* dst, const void* src, int64_t nbytes) {
    if (dst != src && nbytes > 0) std::memcpy(dst, src, static_cast<size_t>(nbytes));
  }

  // All ranks are on this node, and their data can be read.
  void reduce_in_memory(TreeReduce& args, int64_t item) {
    const int64_t numel = args.numel;
    std::byte* const data = static_cast<std::byte*>(args.dst);
    const auto set_sources = [&](int64_t offset) {
      for (int r = 0; r < world_size(); ++r) {
        sources_[static_cast<size_t>(r)] = static_cast<const std::byte*>(board_->data(r)) + offset;
      }
    };
    if (numel * item <= NodeBoard::kInlineNbytes) {
      set_sources(0);
      return tree_reduce(args);
    }
    // Rank r writes chunk r of its own data, which no other rank reads before the next meeting.
    const int64_t chunk = chunk_numel(numel);
    const auto begin_of = [&](int r) { return std::min(r * chunk, numel); };
    const int64_t begin = begin_of(rank());
    set_sources(begin * item);
    args.dst = data + begin * item;
    args.numel = begin_of(rank() + 1) - begin;
    tree_reduce(args);
    board_->meet();
    for_each_near([&](int r, int place) {
      const int64_t offset = begin_of(r) * item;
      copy(data + offset, static_cast<const std::byte*>(board_->data(place)) + offset,
           begin_of(r + 1) * item - offset);
    });
    board_->meet();
  }

  int64_t chunk_numel(int64_t numel) const { return (numel + world_size() - 1) / world_size(); }
  bool is_one_hop(int64_t nbytes) const { return nbytes * world_size() <= kOneHopBytes; }

  // Where the bytes of rank r lie in the staging buffer, which has no place for the own ones.
  Piece staged(void* staging, int r, int64_t nbytes) const {
    return {static_cast<std::byte*>(staging) + (r < rank() ? r : r - 1) * nbytes, nbytes};
  }

  void reduce(const TreeReduce& args, const void* own, void* staging, int64_t staged_nbytes) {
    for (int r = 0; r < world_size(); ++r) {
      sources_[static_cast<size_t>(r)] = r == rank() ? own : staged(staging, r, staged_nbytes).data;
    }
    tree_reduce(args);
  }

  // Starts receiving from, and sending to, other ranks.
  template <class In, class Out>
  void exchange(Peers peers, const In& in, const Out& out) {
    const auto is_meant = [&](int r) {
      return peers == Peers::kAll || is_near(r) == (peers == Peers::kNear);
    };
    for (int i = 1; i < world_size(); ++i) {
      const int from = (rank() - i + world_size()) % world_size();
      if (is_meant(from)) receive(in(from), from);
    }
    for (int i = 1; i < world_size(); ++i) {
      const int to = (rank() + i) % world_size();
      if (is_meant(to)) send(out(to), to);
    }
  }

  void receive(Piece piece, int from) {
    for (int64_t done = 0; done < piece.nbytes; done += kMaxMessage) {
      const int64_t nbytes = std::min(kMaxMessage, piece.nbytes - done);
      MPI_Request request;
      TESSERA_MPI_CHECK(MPI_Irecv(static_cast<std::byte*>(piece.data) + done,
                                  static_cast<int>(nbytes), MPI_BYTE, from, message_tag(), comm_,
                                  &request));
      requests_.push_back(request);
      expected_.push_back(nbytes);
    }
  }

  void send(ConstPiece piece, int to) {
    for (int64_t done = 0; done < piece.nbytes; done += kMaxMessage) {
      const int64_t nbytes = std::min(kMaxMessage, piece.nbytes - done);
      MPI_Request request;
      TESSERA_MPI_CHECK(MPI_Isend(static_cast<const std::byte*>(piece.data) + done,
                                  static_cast<int>(nbytes), MPI_BYTE, to, message_tag(), comm_,
                                  &request));
      requests_.push_back(request);
      expected_.push_back(kNotReceived);
    }
  }

  // Waits for everything that was started. CommError if the World is aborted meanwhile (the
  // process is about to end, so what is still in flight is left alone) or if sizes differ.
  void wait_all() {
    const int count = static_cast<int>(requests_.size());
    statuses_.resize(requests_.size());
    Backoff backoff;
    Clock::time_point next_look;
    for (;;) {
      int is_done = 0;
      const int code = MPI_Testall(count, requests_.data(), &is_done, statuses_.data());
      if (code != MPI_SUCCESS) fail_exchange(code);
      if (is_done != 0) break;
      if (domain_->is_aborted()) throw CommError(domain_->reason());
      const auto now = Clock::now();
      if (tag().sequence >= 0 && now >= next_look) {
        if (next_look != Clock::time_point()) throw_if_mismatch();
        next_look = now + kMismatchPeriod;
      }
      backoff.pause();
    }
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (expected_[i] == kNotReceived) continue;
      int nbytes = 0;
      MPI_Get_count(&statuses_[i], MPI_BYTE, &nbytes);
      if (nbytes != expected_[i]) {
        throw CommError(fmt::format(
            "{}: the ranks disagree: expected {} bytes from rank {}, got {}", tag().to_string(),
            expected_[i], world_rank(statuses_[i].MPI_SOURCE), nbytes));
      }
    }
    requests_.clear();
    expected_.clear();
  }

  int message_tag() {
    if (tag().sequence == tagged_sequence_) return message_tag_;
    const int hash = hash_bits(tag());
    const int sequence = static_cast<int>(tag().sequence & ((1 << kSequenceBits) - 1));
    if (names_.find(hash) == names_.end()) names_.emplace(hash, tag().to_string());
    tagged_sequence_ = tag().sequence;
    return message_tag_ = (sequence << num_hash_bits_) | hash;
  }

  int hash_bits(const CallTag& call) const {
    return static_cast<int>(call.hash & ((uint64_t{1} << num_hash_bits_) - 1));
  }

  void throw_if_mismatch() {
    const int mine = message_tag();
    for (int r = 0; r < world_size(); ++r) {
      int has_message = 0;
      MPI_Status status;
      TESSERA_MPI_CHECK(MPI_Iprobe(r, MPI_ANY_TAG, comm_, &has_message, &status));
      if (has_message == 0 || status.MPI_TAG == mine ||
          status.MPI_TAG >> num_hash_bits_ != mine >> num_hash_bits_) {
        continue;
      }
      // All ranks have the same units: most likely this one has done the same at another time.
      const auto known = names_.find(status.MPI_TAG & ((1 << num_hash_bits_) - 1));
      throw CommError(fmt::format("{}: the ranks disagree: rank {} calls {}, rank {} calls {}",
                                  tag().op, world_rank(rank()), tag().to_string(), world_rank(r),
                                  known != names_.end() ? known->second : "another"));
    }
  }

  [[noreturn]] void fail_exchange(int code) {
    if (code == MPI_ERR_IN_STATUS) {
      for (size_t i = 0; i < statuses_.size(); ++i) {
        int error_class = MPI_SUCCESS;
        MPI_Error_class(statuses_[i].MPI_ERROR, &error_class);
        if (error_class != MPI_ERR_TRUNCATE) continue;
        throw CommError(
            fmt::format("{}: the ranks disagree: expected {} bytes from rank {}, got more",
                        tag().to_string(), expected_[i], world_rank(statuses_[i].MPI_SOURCE)));
      }
    }
    fail_mpi(code, "MPI_Testall");
  }

  const MPI_Comm comm_;
  const int num_hash_bits_;
  const std::shared_ptr<MpiDomain> domain_;
  std::unique_ptr<NodeBoard> board_;  // null where nobody shares memory
  std::vector<int> near_place_;       // by rank: the place on the board, or -1
  int64_t tagged_sequence_ = -1;      // whose message tag follows
  int message_tag_ = 0;
  std::map<int, std::string> names_;  // of the calls so far, by the bits of their hashes
  std::vector<MPI_Request> requests_;
  std::vector<int64_t> expected_;  // bytes to receive, or kNotReceived
  std::vector<MPI_Status> statuses_;
  std::vector<const void*> sources_;
};

// The messages of watchdogs, on a communicator of their own; made by their thread alone.
class MpiWatchChannel final : public WatchChannel {
 public:
  MpiWatchChannel(MPI_Comm comm, int rank, int world_size)
      : WatchChannel(rank, world_size), comm_(comm) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  }
  ~MpiWatchChannel() override {
    for (auto& sent : sent_) {  // nobody may take it any more: MPI keeps what it has not sent
      int is_done = 0;
      if (MPI_Test(&sent->request, &is_done, MPI_STATUS_IGNORE) != MPI_SUCCESS || is_done == 0)
        (void)sent.release();
    }
  }

  void send(int to, std::string text) override {
    std::erase_if(sent_, [](const std::unique_ptr<Sent>& sent) {
      int is_done = 0;
      return MPI_Test(&sent->request, &is_done, MPI_STATUS_IGNORE) != MPI_SUCCESS || is_done != 0;
    });
    sent_.push_back(std::make_unique<Sent>());
    sent_.back()->text = std::move(text);
    const std::string& kept = sent_.back()->text;
    if (MPI_Isend(kept.data(), static_cast<int>(kept.size()), MPI_BYTE, to, 0, comm_,
                  &sent_.back()->request) != MPI_SUCCESS) {
      sent_.pop_back();
    }
  }

  bool receive(int* from, std::string* text) override {
    int has_message = 0, nbytes = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, 0, comm_, &has_message, &status) != MPI_SUCCESS ||
        has_message == 0) {
      return false;
    }
    MPI_Get_count(&status, MPI_BYTE, &nbytes);
    text->assign(static_cast<size_t>(nbytes), '\0');
    *from = status.MPI_SOURCE;
    return MPI_Recv(text->data(), nbytes, MPI_BYTE, status.MPI_SOURCE, 0, comm_,
                    MPI_STATUS_IGNORE) == MPI_SUCCESS;
  }

 private:
  struct Sent {
    std::string text;
    MPI_Request request;
  };
  const MPI_Comm comm_;
  std::vector<std::unique_ptr<Sent>> sent_;
};

class MpiBackend final : public WorldBackend {
 public:
  MpiBackend(int argc, char** argv) : domain_(std::make_shared<MpiDomain>()) {
    int provided = 0;
    TESSERA_MPI_CHECK(MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided));
    TESSERA_CHECK_AS(CommError, provided == MPI_THREAD_MULTIPLE,
                     "World: MPI must provide MPI_THREAD_MULTIPLE, got level {}", provided);
    TESSERA_MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &place_.rank));
    TESSERA_MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &place_.world_size));
    place_.is_launched = true;
    const int ranks_per_node = agree_on_ranks_per_node();
    MPI_Comm comm;
    TESSERA_MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
    find_place_on_node(ranks_per_node);
    watchdog_ = std::make_shared<Watchdog>(kDefaultTimeout, [end = end_](const std::string&) {
      // Time for the watchdogs of the other processes, which are about as late, to say their part.
      std::this_thread::sleep_for(std::chrono::seconds(1));
      const std::lock_guard lock(end->mutex);
      if (end->is_finalized) return;  // it came through after all, and so did all that followed
      MPI_Abort(MPI_COMM_WORLD, CommError("").exit_status());
    });
    base_ = std::make_shared<MpiTransport>(
        comm, place_.rank, CommGroup::world(place_.rank, place_.world_size), domain_);
    if (place_.world_size > 1) {
      MPI_Comm watch;
      TESSERA_MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &watch));
      domain_->add(watch);
      watchdog_->set_channel(
          std::make_unique<MpiWatchChannel>(watch, place_.rank, place_.world_size));
    }
  }

  void abort(int status, const std::string& reason) noexcept override {
    domain_->abort(reason);
    MPI_Abort(MPI_COMM_WORLD, status);
  }

  void give_up(const std::string& reason) noexcept override { domain_->abort(reason); }

  void finalize(Control& control) override {
    if (domain_->is_aborted()) return;
    // Asleep, and under the watchdog, until all ranks are done: finalizing spins.
    control.barrier("end of the run");
    watchdog_->set_channel(nullptr);
    {
      const std::lock_guard lock(end_->mutex);  // MPI may not be aborted any more
      end_->is_finalized = true;
    }
    domain_->free_comms();
    MPI_Finalize();
  }

 private:
  // What TESSERA_RANKS_PER_NODE says, for tests: 0 if it is not set. On some ranks only, or with
  // other values, ranks would wait for others that never come: it is compared before it is used.
  int agree_on_ranks_per_node() const {
    constexpr const char* kName = "TESSERA_RANKS_PER_NODE";
    constexpr size_t kMaxNbytes = 24;
    const char* const text = std::getenv(kName);
    std::array<char, kMaxNbytes> mine{};  // '=' and the beginning of the value
    if (text != nullptr) fmt::format_to_n(mine.data(), kMaxNbytes - 1, "={}", text);
    std::vector<std::array<char, kMaxNbytes>> all(static_cast<size_t>(place_.world_size));
    TESSERA_MPI_CHECK(MPI_Allgather(mine.data(), kMaxNbytes, MPI_BYTE, all.data(), kMaxNbytes,
                                    MPI_BYTE, MPI_COMM_WORLD));
    const auto fail = [&](int reporter, const std::string& message) {
      MPI_Finalize();
      throw StartError(message, place_.rank == reporter);
    };
    const auto value_of = [](const std::array<char, kMaxNbytes>& value) {
      return value[0] == '\0' ? "not set" : fmt::format("\"{}\"", &value[1]);
    };
    for (int r = 0; r < place_.world_size; ++r) {
      const auto& theirs = all[static_cast<size_t>(r)];
      if (theirs[0] != '\0' && !parse_integer(&theirs[1], 1, 1'000'000)) {
        fail(r, fmt::format("{}: {} on rank {}, expected an integer in [1, 1000000]", kName,
                            value_of(theirs), r));
      }
      if (theirs != all[0]) {
        fail(0, fmt::format("{}: {} on rank 0, {} on rank {}, expected the same on all ranks",
                            kName, value_of(all[0]), value_of(theirs), r));
      }
    }
    return text == nullptr ? 0 : static_cast<int>(*parse_integer(text, 1, 1'000'000));
  }

  // Ranks of the same node, or `ranks_per_node` of them that pretend to be alone; with 1 nobody
  // shares memory.
  static MPI_Comm split_node(int ranks_per_node) {
    MPI_Comm node;
    TESSERA_MPI_CHECK(
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node));
    if (ranks_per_node < 1) return node;
    int rank = 0;
    TESSERA_MPI_CHECK(MPI_Comm_rank(node, &rank));
    MPI_Comm part;
    TESSERA_MPI_CHECK(MPI_Comm_split(node, rank / ranks_per_node, rank, &part));
    MPI_Comm_free(&node);
    return part;
  }

  // Maps the memory of all ranks of the node into each of them; if one cannot, none does.
  void share_memory(MPI_Comm node) {
    int first = place_.rank;  // the node's name
    TESSERA_MPI_CHECK(MPI_Bcast(&first, 1, MPI_INT, 0, node));
    std::vector<int> node_of(static_cast<size_t>(place_.world_size));
    TESSERA_MPI_CHECK(
        MPI_Allgather(&first, 1, MPI_INT, node_of.data(), 1, MPI_INT, MPI_COMM_WORLD));
    auto memory = std::make_shared<NodeMemory>(place_.local_size);
    std::vector<NodeMemory::Handle> handles(static_cast<size_t>(place_.local_size));
    TESSERA_MPI_CHECK(MPI_Allgather(&memory->handle(), sizeof(NodeMemory::Handle), MPI_BYTE,
                                    handles.data(), sizeof(NodeMemory::Handle), MPI_BYTE, node));
    int is_connected = 1;
    for (int r = 0; r < place_.local_size && is_connected != 0; ++r) {
      is_connected = memory->connect(r, handles[static_cast<size_t>(r)]) ? 1 : 0;
    }
    if (is_connected == 0) {
      log_warning("ranks of this node exchange messages, since they cannot share memory: {}",
                  memory->why_not());
    }
    // All ranks of the world decide alike: making communicators is collective.
    TESSERA_MPI_CHECK(
        MPI_Allreduce(MPI_IN_PLACE, &is_connected, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD));
    if (is_connected == 0) memory = nullptr;
    domain_->set_node(std::move(memory), place_.local_rank, std::move(node_of));
  }

  void find_place_on_node(int ranks_per_node) {
    MPI_Comm node = split_node(ranks_per_node);
    TESSERA_MPI_CHECK(MPI_Comm_rank(node, &place_.local_rank));
    TESSERA_MPI_CHECK(MPI_Comm_size(node, &place_.local_size));
    if (place_.world_size > 1) share_memory(node);
    cpu_set_t mine;
    CPU_ZERO(&mine);
    sched_getaffinity(0, sizeof(mine), &mine);
    std::vector<cpu_set_t> all(static_cast<size_t>(place_.local_size));
    TESSERA_MPI_CHECK(
        MPI_Allgather(&mine, sizeof(mine), MPI_BYTE, all.data(), sizeof(mine), MPI_BYTE, node));
    const uint64_t my_group = cpu_quota().group_id;
    std::vector<uint64_t> groups(static_cast<size_t>(place_.local_size));
    TESSERA_MPI_CHECK(
        MPI_Allgather(&my_group, 1, MPI_UINT64_T, groups.data(), 1, MPI_UINT64_T, node));
    MPI_Comm_free(&node);
    place_.num_sharing_quota = static_cast<int>(std::count(groups.begin(), groups.end(), my_group));
    place_.num_sharing = place_.sharing_index = 0;
    bool is_same = true;
    for (int i = 0; i < place_.local_size; ++i) {
      const cpu_set_t& theirs = all[static_cast<size_t>(i)];
      cpu_set_t common;
      CPU_AND(&common, &mine, &theirs);
      if (CPU_COUNT(&common) == 0) continue;
      if (CPU_EQUAL(&mine, &theirs) == 0) is_same = false;
      if (i < place_.local_rank) ++place_.sharing_index;
      ++place_.num_sharing;
    }
    if (!is_same) place_.sharing_index = -1;
  }

  struct End {
    std::mutex mutex;
    bool is_finalized = false;
  };

  const std::shared_ptr<MpiDomain> domain_;
  const std::shared_ptr<End> end_ = std::make_shared<End>();  // the watchdog may outlive this
};

}  // namespace

std::unique_ptr<WorldBackend> make_mpi_backend(int argc, char** argv) {
  return std::make_unique<MpiBackend>(argc, argv);
}

}  // namespace tessera::dist
