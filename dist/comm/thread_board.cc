#include "dist/comm/thread_board.h"

#include <bit>
#include <thread>
#include <utility>

#include "core/check.h"

namespace tessera::dist {

/// Where the threads of one communicator meet, and what they publish.
class ThreadMeeting {
 public:
  ThreadMeeting(int num_ranks, std::shared_ptr<ThreadDomain> domain)
      : domain_(std::move(domain)), published_(static_cast<size_t>(num_ranks)) {}

  ThreadDomain& domain() const { return *domain_; }
  ThreadBoard::Published& slot(int place) { return published_[static_cast<size_t>(place)]; }

  // CommError if the World is aborted before all ranks have come.
  void meet_or_abort() {
    std::unique_lock lock(mutex_);
    domain_->throw_if_aborted();
    const int64_t generation = generation_;
    arrive();
    changed_.wait(lock, [&] { return generation_ != generation || domain_->is_aborted(); });
    if (generation_ == generation) domain_->throw_if_aborted();
  }
  void meet() {
    std::unique_lock lock(mutex_);
    const int64_t generation = generation_;
    arrive();
    changed_.wait(lock, [&] { return generation_ != generation; });
  }
  // Synchronizes with waiting ranks, so that none misses an abort.
  void wake() {
    { const std::lock_guard lock(mutex_); }
    changed_.notify_all();
  }

 private:
  void arrive() {
    if (++num_arrived_ == published_.size()) {
      num_arrived_ = 0;
      ++generation_;
      changed_.notify_all();
    }
  }

  const std::shared_ptr<ThreadDomain> domain_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ThreadBoard::Published> published_;
  size_t num_arrived_ = 0;
  int64_t generation_ = 0;
};

std::string ThreadDomain::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void ThreadDomain::add(const std::shared_ptr<ThreadMeeting>& meeting) {
  const std::lock_guard lock(mutex_);
  meetings_.push_back(meeting);
}

void ThreadDomain::abort(const std::string& reason) noexcept {
  std::vector<std::weak_ptr<ThreadMeeting>> meetings;
  {
    const std::lock_guard lock(mutex_);
    if (is_aborted_) return;
    reason_ = reason;
    is_aborted_ = true;
    meetings.swap(meetings_);
  }
  for (const auto& weak : meetings) {
    if (const auto meeting = weak.lock()) meeting->wake();
  }
}

void ThreadDomain::throw_if_aborted() const {
  if (is_aborted()) throw CommError(reason());
}

void ThreadDomain::set_culprit(int rank) {
  int none = -1;
  if (!is_aborted_) culprit_.compare_exchange_strong(none, rank);
}

std::shared_ptr<ThreadMeeting> ThreadBoard::make_meeting(
    int num_ranks, const std::shared_ptr<ThreadDomain>& domain) {
  auto meeting = std::make_shared<ThreadMeeting>(num_ranks, domain);
  domain->add(meeting);
  return meeting;
}

namespace {

std::vector<int> all_ranks(size_t num_ranks) {
  std::vector<int> ranks;
  for (size_t r = 0; r < num_ranks; ++r) ranks.push_back(static_cast<int>(r));
  return ranks;
}

}  // namespace

ThreadBoard::ThreadBoard(std::shared_ptr<ThreadMeeting> meeting, std::vector<int> world_ranks,
                         int me, const Imitation& imitation)
    : Board(all_ranks(world_ranks.size()), world_ranks, static_cast<int>(world_ranks.size()), me),
      meeting_(std::move(meeting)),
      imitation_(imitation),
      delays_(imitation.delay_seed * 1000003 + static_cast<uint64_t>(me)) {}

void ThreadBoard::begin(const Call& call) {
  if (imitation_.max_random_delay_us > 0) {
    std::uniform_int_distribution<int> delay(0, imitation_.max_random_delay_us);
    std::this_thread::sleep_for(std::chrono::microseconds(delay(delays_)));
  }
  sent_nbytes_ = call.sent_nbytes;
  meeting_->domain()
      .throw_if_aborted();  // others may be reading the slot of the call that ended it
}

ThreadBoard::Published& ThreadBoard::own_slot() {
  return meeting_->slot(me());
}
const ThreadBoard::Published& ThreadBoard::published(int place) const {
  return meeting_->slot(place);
}
int64_t ThreadBoard::publish_data(const Call& call) {
  return std::bit_cast<int64_t>(call.data);
}
const void* ThreadBoard::data_at(int, int64_t where) const {
  return std::bit_cast<const void*>(where);
}

void ThreadBoard::meet_first() {
  meeting_->meet_or_abort();
  double us = imitation_.latency_us;
  if (imitation_.bandwidth_bytes_per_s > 0) {
    const double nbytes = static_cast<double>(sent_nbytes_) * (size() - 1);
    us += 1e6 * nbytes / imitation_.bandwidth_bytes_per_s;
  }
  end_ = us > 0 ? std::chrono::steady_clock::now() +
                      std::chrono::nanoseconds(static_cast<int64_t>(1e3 * us))
                : std::chrono::steady_clock::time_point();
}

void ThreadBoard::meet() {
  meeting_->meet();
}

void ThreadBoard::leave(int64_t) {
  if (end_ != std::chrono::steady_clock::time_point()) std::this_thread::sleep_until(end_);
  meeting_->meet();
}

void ThreadBoard::on_disagreement(const std::string& message) {
  meeting_->domain().abort(message);
}

}  // namespace tessera::dist
