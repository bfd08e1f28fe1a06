#include "dist/comm/local.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "core/runtime/order_check.h"
#include "dist/comm/backend.h"

// [Note: Collectives of thread ranks]
// A collective is: publish the address of the own buffer, meet, read from the buffers of the
// others, meet again. The first meeting ends early if the World is aborted: either all ranks pass
// it or none does. Ranks between the two meetings only copy, so the second always ends, and no rank
// gives up a buffer that another still reads.

namespace tessera::dist {

namespace {

class Board;

// What the communicators of one run share: the reason for their end.
class Domain {
 public:
  bool is_aborted() const { return is_aborted_.load(); }
  std::string reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
  }
  void add(const std::shared_ptr<Board>& board) {
    const std::lock_guard lock(mutex_);
    boards_.push_back(board);
  }
  void abort(const std::string& reason) noexcept;
  // The rank whose exception came first, although others may be through with theirs earlier.
  void set_culprit(int rank) {
    int none = -1;
    if (!is_aborted_) culprit_.compare_exchange_strong(none, rank);
  }
  int culprit() const { return culprit_; }

 private:
  mutable std::mutex mutex_;
  std::atomic<int> culprit_{-1};
  std::atomic<bool> is_aborted_{false};
  std::string reason_;
  std::vector<std::weak_ptr<Board>> boards_;
};

// What a rank publishes about the collective it is in.
struct Call {
  const char* op = "";
  int64_t nbytes = 0;
  int detail = 0;  // dtypes, root: whatever else has to agree
  const void* data = nullptr;
  CallTag tag = {};

  bool agrees_with(const Call& other) const {
    return std::strcmp(op, other.op) == 0 && nbytes == other.nbytes && detail == other.detail &&
           tag.agrees_with(other.tag);
  }
  std::string to_string() const {
    return fmt::format("{} ({} bytes)", tag.sequence < 0 ? op : tag.to_string(), nbytes);
  }
};

// The meeting point of one communicator.
class Board {
 public:
  Board(std::vector<int> world_ranks, std::shared_ptr<Domain> domain)
      : domain_(std::move(domain)),
        calls_(world_ranks.size()),
        world_ranks_(std::move(world_ranks)) {}

  // Publishes and meets. CommError if the World is aborted before all ranks have come, or if they
  // have come with different calls.
  void enter(int rank, const Call& call) {
    std::unique_lock lock(mutex_);
    throw_if_aborted();
    calls_[static_cast<size_t>(rank)] = call;
    const int64_t generation = generation_;
    arrive();
    changed_.wait(lock, [&] { return generation_ != generation || domain_->is_aborted(); });
    if (generation_ == generation) throw_if_aborted();
    lock.unlock();
    check_agreement();
  }

  // Meets again: everybody has read what it needs.
  void meet() {
    std::unique_lock lock(mutex_);
    const int64_t generation = generation_;
    arrive();
    changed_.wait(lock, [&] { return generation_ != generation; });
  }

  const void* data(int rank) const { return calls_[static_cast<size_t>(rank)].data; }
  // Synchronizes with waiting ranks, so that none misses an abort.
  void wake() {
    { const std::lock_guard lock(mutex_); }
    changed_.notify_all();
  }

 private:
  void arrive() {
    if (++num_arrived_ == calls_.size()) {
      num_arrived_ = 0;
      ++generation_;
      changed_.notify_all();
    }
  }
  void throw_if_aborted() const {
    if (domain_->is_aborted()) throw CommError(domain_->reason());
  }
  void check_agreement() const {
    for (size_t r = 1; r < calls_.size(); ++r) {
      const Call &a = calls_[0], &b = calls_[r];
      if (a.agrees_with(b)) continue;
      const std::string message = fmt::format(
          "{}: the ranks disagree: rank {} calls {}, rank {} calls {}{}", a.op, world_ranks_[0],
          a.to_string(), world_ranks_[r], b.to_string(),
          std::strcmp(a.op, b.op) == 0 && a.detail != b.detail ? "; dtypes or root differ" : "");
      domain_->abort(message);
      throw CommError(message);
    }
  }

  const std::shared_ptr<Domain> domain_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;
  const std::vector<int> world_ranks_;
  size_t num_arrived_ = 0;
  int64_t generation_ = 0;
};

void Domain::abort(const std::string& reason) noexcept {
  std::vector<std::weak_ptr<Board>> boards;
  {
    const std::lock_guard lock(mutex_);
    if (is_aborted_) return;
    reason_ = reason;
    is_aborted_ = true;
    boards.swap(boards_);
  }
  for (const auto& weak : boards) {
    if (const auto board = weak.lock()) board->wake();
  }
}

// A network to imitate and disturbances; see LocalOptions.
struct Imitation {
  double latency_us = 0, bandwidth_bytes_per_s = 0;
  int max_random_delay_us = 0;
  uint64_t delay_seed = 0;
};

// One communicator: `work` for its stream, `host` for splitting it.
struct Group {
  Group(const std::vector<int>& world_ranks, const std::shared_ptr<Domain>& shared_domain,
        const Imitation& imitate)
      : domain(shared_domain),
        imitation(imitate),
        work(std::make_shared<Board>(world_ranks, domain)),
        host(std::make_shared<Board>(world_ranks, domain)),
        children(world_ranks.size()) {
    domain->add(work);
    domain->add(host);
  }

  const std::shared_ptr<Domain> domain;
  const Imitation imitation;
  const std::shared_ptr<Board> work, host;
  std::vector<std::shared_ptr<Group>> children;  // of a split in progress, at the leader's place
};

class LocalTransport final : public HostTransport {
 public:
  LocalTransport(int rank, CommGroup ranks, std::shared_ptr<Group> group)
      : HostTransport(rank, std::move(ranks)),
        group_(std::move(group)),
        sources_(static_cast<size_t>(world_size())),
        delays_(group_->imitation.delay_seed * 1000003 + static_cast<uint64_t>(rank)) {}

  void all_gather(void* full, const void* shard, int64_t shard_nbytes) override {
    const auto end = enter({"all_gather", shard_nbytes, 0, shard}, shard_nbytes);
    for (int i = 0; i < world_size(); ++i) {
      const int r = (rank() + i) % world_size();  // each starts elsewhere: less contention
      copy(static_cast<std::byte*>(full) + r * shard_nbytes, board().data(r), shard_nbytes);
    }
    leave(end);
  }

  void reduce_scatter(const ReduceScatterCall& call) override {
    const int64_t chunk_nbytes = call.shard_numel * static_cast<int64_t>(size_of(call.wire));
    const auto end = enter({"reduce_scatter", chunk_nbytes, static_cast<int>(call.wire), call.full},
                           chunk_nbytes);
    reduce({.dst = call.shard,
            .sources = sources_.data(),
            .num_sources = world_size(),
            .numel = call.shard_numel,
            .src_dtype = call.wire,
            .dst_dtype = call.out,
            .accumulate = call.accumulate},
           rank() * chunk_nbytes);
    leave(end);
  }

  void all_reduce(const AllReduceCall& call) override {
    const int64_t item = static_cast<int64_t>(size_of(call.dtype));
    const int64_t chunk = (call.numel + world_size() - 1) / world_size();
    const auto end = enter({call.reduction == Reduction::kSum ? "all_reduce" : "all_reduce_max",
                            call.numel * item, static_cast<int>(call.dtype), call.data},
                           2 * chunk * item);
    const auto begin_of = [&](int r) { return std::min(r * chunk, call.numel); };
    // Rank r writes chunk r of its own data, which no other rank reads before the next meeting.
    const int64_t begin = begin_of(rank());
    reduce({.dst = static_cast<std::byte*>(call.data) + begin * item,
            .sources = sources_.data(),
            .num_sources = world_size(),
            .numel = begin_of(rank() + 1) - begin,
            .src_dtype = call.dtype,
            .dst_dtype = call.dtype,
            .reduction = call.reduction},
           begin * item);
    board().meet();
    for (int i = 1; i < world_size(); ++i) {
      const int r = (rank() + i) % world_size();
      const int64_t offset = begin_of(r) * item;
      copy(static_cast<std::byte*>(call.data) + offset,
           static_cast<const std::byte*>(board().data(r)) + offset,
           begin_of(r + 1) * item - offset);
    }
    leave(end);
  }

  void broadcast(void* data, int64_t nbytes, int root) override {
    const auto end = enter({"broadcast", nbytes, root, data}, nbytes);
    copy(data, board().data(root), nbytes);
    leave(end);
  }

  int64_t reduce_scatter_staging_nbytes(int64_t, DType, bool) const override { return 0; }
  int64_t all_reduce_staging_nbytes(int64_t, DType) const override { return 0; }

  std::shared_ptr<HostTransport> split(int color, int key) override {
    const std::pair<int, int> mine(color, key);
    Board& host = *group_->host;
    host.enter(rank(), {"split", 0, 0, &mine});
    std::vector<std::pair<int, int>> members;  // (key, rank)
    for (int r = 0; r < world_size(); ++r) {
      const auto& theirs = *static_cast<const std::pair<int, int>*>(host.data(r));
      if (theirs.first == color) members.emplace_back(theirs.second, r);
    }
    std::sort(members.begin(), members.end());
    const int leader = members.front().second;
    std::vector<int> ranks;
    for (const auto& [_, r] : members) ranks.push_back(r);
    const int me = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
    CommGroup names = make_child_group(color, ranks, me);
    auto& child = group_->children[static_cast<size_t>(leader)];
    if (leader == rank()) {
      child = std::make_shared<Group>(*names.world_ranks, group_->domain, group_->imitation);
    }
    host.meet();
    auto transport = std::make_shared<LocalTransport>(me, std::move(names), child);
    host.meet();
    if (leader == rank()) child.reset();
    return transport;
  }

  void abort(const std::string& reason) noexcept override { group_->domain->abort(reason); }
  std::string abort_reason() const override {
    return group_->domain->is_aborted() ? group_->domain->reason() : std::string();
  }

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  Board& board() { return *group_->work; }

  // Meets the others; returns when the imitated network would be done.
  TimePoint enter(const Call& call, int64_t nbytes_to_each) {
    const Imitation& imitation = group_->imitation;
    if (imitation.max_random_delay_us > 0) {
      std::uniform_int_distribution<int> delay(0, imitation.max_random_delay_us);
      std::this_thread::sleep_for(std::chrono::microseconds(delay(delays_)));
    }
    Call tagged = call;
    tagged.tag = tag();
    board().enter(rank(), tagged);
    double us = imitation.latency_us;
    if (imitation.bandwidth_bytes_per_s > 0) {
      const double nbytes = static_cast<double>(nbytes_to_each) * (world_size() - 1);
      us += 1e6 * nbytes / imitation.bandwidth_bytes_per_s;
    }
    return us > 0 ? std::chrono::steady_clock::now() +
                        std::chrono::nanoseconds(static_cast<int64_t>(1e3 * us))
                  : TimePoint();
  }

  void leave(TimePoint end) {
    if (end != TimePoint()) std::this_thread::sleep_until(end);
    board().meet();
  }

  // Reduces what all ranks have at `offset_bytes` of the buffers they published.
  void reduce(const TreeReduce& args, int64_t offset_bytes) {
    for (int r = 0; r < world_size(); ++r) {
      sources_[static_cast<size_t>(r)] =
          static_cast<const std::byte*>(board().data(r)) + offset_bytes;
    }
    tree_reduce(args);
  }

  static void copy(void* dst, const void* src, int64_t nbytes) {
    if (dst != src && nbytes > 0) std::memcpy(dst, src, static_cast<size_t>(nbytes));
  }

  const std::shared_ptr<Group> group_;
  std::vector<const void*> sources_;
  std::mt19937_64 delays_;
};

class LocalBackend final : public WorldBackend {
 public:
  LocalBackend(const WorldPlace& place, const std::shared_ptr<Group>& group,
               std::shared_ptr<Watchdog> watchdog)
      : domain_(group->domain) {
    place_ = place;
    watchdog_ = std::move(watchdog);
    base_ = std::make_shared<LocalTransport>(place.rank,
                                             CommGroup::world(place.rank, place.world_size), group);
  }
  void abort(int, const std::string& reason) noexcept override { domain_->abort(reason); }
  void give_up(const std::string& reason) noexcept override {
    domain_->set_culprit(place_.rank);
    domain_->abort(reason);
  }

 private:
  const std::shared_ptr<Domain> domain_;
};

std::shared_ptr<Watchdog> make_watchdog(std::chrono::milliseconds timeout,
                                        const std::shared_ptr<Domain>& domain) {
  return std::make_shared<Watchdog>(timeout,
                                    [domain](const std::string& reason) { domain->abort(reason); });
}

}  // namespace

std::unique_ptr<WorldBackend> make_solo_backend() {
  const auto domain = std::make_shared<Domain>();
  const auto group = std::make_shared<Group>(std::vector<int>{0}, domain, Imitation{});
  return std::make_unique<LocalBackend>(WorldPlace{}, group,
                                        make_watchdog(kDefaultTimeout, domain));
}

void run_ranks(int world_size, const LocalOptions& options,
               const std::function<void(World&)>& body) {
  TESSERA_CHECK(world_size >= 1, "run_ranks: expected at least one rank, got {}", world_size);
  const auto domain = std::make_shared<Domain>();
  const auto watchdog = make_watchdog(options.timeout, domain);
  const Imitation imitation{options.latency_us, options.bandwidth_bytes_per_s,
                            options.max_random_delay_us, options.delay_seed};
  const auto group =
      std::make_shared<Group>(*CommGroup::world(0, world_size).world_ranks, domain, imitation);
  std::mutex mutex;
  std::exception_ptr first_error;
  const auto fail = [&](int rank, const char* what) {
    {
      const std::lock_guard lock(mutex);
      if (first_error == nullptr || rank == domain->culprit()) {
        first_error = std::current_exception();
      }
    }
    domain->abort(fmt::format("rank {} failed: {}", rank, what));
  };
  const auto run_rank = [&](int rank) {
    // Outlives the report of an error: giving memory back to a device waits for what ranks that
    // share it have queued, and they may wait for us.
    std::shared_ptr<Context> context;
    try {
      ContextOptions context_options = options.context;
      if (context_options.device.type == DeviceType::kCuda)
        context_options.device = device_from_name("cuda", rank);
      context = std::make_shared<Context>(context_options);
      const Context::Scope scope(context);
      World world(std::make_unique<LocalBackend>(WorldPlace{.rank = rank,
                                                            .world_size = world_size,
                                                            .local_rank = rank,
                                                            .local_size = world_size,
                                                            .num_sharing = world_size,
                                                            .sharing_index = rank,
                                                            .default_threads = 1},
                                                 group, watchdog));
      body(world);
      context->compute().synchronize();
      if (context->order_check() != nullptr) context->order_check()->throw_if_conflicts();
    } catch (const std::exception& error) {
      fail(rank, error.what());
    } catch (...) {
      fail(rank, "an exception of unknown type");
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r) threads.emplace_back(run_rank, r);
  for (std::thread& thread : threads) thread.join();
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

}  // namespace tessera::dist
