#include "dist/comm/local.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/runtime/order_check.h"
#include "dist/comm/backend.h"
#include "dist/comm/thread_board.h"

namespace tessera::dist {

namespace {

// One communicator: a meeting for its stream, and one for hosts that split it.
struct Group {
  Group(int num_ranks, const std::shared_ptr<ThreadDomain>& shared_domain, const Imitation& imitate)
      : domain(shared_domain),
        imitation(imitate),
        work(ThreadBoard::make_meeting(num_ranks, domain)),
        host(ThreadBoard::make_meeting(num_ranks, domain)),
        children(static_cast<size_t>(num_ranks)) {}

  const std::shared_ptr<ThreadDomain> domain;
  const Imitation imitation;
  const std::shared_ptr<ThreadMeeting> work, host;
  std::vector<std::shared_ptr<Group>> children;  // of a split in progress, at the leader's place
};

class LocalTransport final : public HostTransport {
 public:
  LocalTransport(int rank, CommGroup ranks, std::shared_ptr<Group> group)
      : HostTransport(rank, std::move(ranks)),
        group_(std::move(group)),
        host_board_(group_->host, *this->group().world_ranks, rank, {}) {
    set_board(std::make_unique<ThreadBoard>(group_->work, *this->group().world_ranks, rank,
                                            group_->imitation));
  }

  std::shared_ptr<HostTransport> split(int color, int key) override {
    const std::pair<int, int> mine(color, key);
    const CallTag untagged;
    host_board_.enter({.tag = untagged, .op = "split", .data = &mine});
    std::vector<std::pair<int, int>> members;  // (key, rank)
    for (int r = 0; r < world_size(); ++r) {
      const auto& theirs = *static_cast<const std::pair<int, int>*>(host_board_.data(r));
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
      child = std::make_shared<Group>(static_cast<int>(ranks.size()), group_->domain,
                                      group_->imitation);
    }
    host_board_.meet();
    auto transport = std::make_shared<LocalTransport>(me, std::move(names), child);
    host_board_.leave(sizeof mine);
    if (leader == rank()) child.reset();
    return transport;
  }

  void abort(const std::string& reason) noexcept override { group_->domain->abort(reason); }
  std::string abort_reason() const override { return group_->domain->reason(); }

 private:
  const std::shared_ptr<Group> group_;
  ThreadBoard host_board_;
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
  const std::shared_ptr<ThreadDomain> domain_;
};

std::shared_ptr<Watchdog> make_watchdog(std::chrono::milliseconds timeout,
                                        const std::shared_ptr<ThreadDomain>& domain) {
  return std::make_shared<Watchdog>(timeout,
                                    [domain](const std::string& reason) { domain->abort(reason); });
}

}  // namespace

std::unique_ptr<WorldBackend> make_solo_backend() {
  const auto domain = std::make_shared<ThreadDomain>();
  const auto group = std::make_shared<Group>(1, domain, Imitation{});
  return std::make_unique<LocalBackend>(WorldPlace{}, group,
                                        make_watchdog(kDefaultTimeout, domain));
}

void run_ranks(int world_size, const LocalOptions& options,
               const std::function<void(World&)>& body) {
  TESSERA_CHECK(world_size >= 1, "run_ranks: expected at least one rank, got {}", world_size);
  const auto domain = std::make_shared<ThreadDomain>();
  const auto watchdog = make_watchdog(options.timeout, domain);
  const Imitation imitation{options.latency_us, options.bandwidth_bytes_per_s,
                            options.max_random_delay_us, options.delay_seed};
  const auto group = std::make_shared<Group>(world_size, domain, imitation);
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
