#include "dist/comm/mpi_transport.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <string_view>
#include <thread>
#include <utility>

#include "core/check.h"
#include "dist/comm/node_board.h"

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

constexpr int64_t kMaxMessage = int64_t{1} << 30;  // bytes; an MPI count is an int
constexpr int kSequenceBits = 6;
constexpr std::chrono::milliseconds kMismatchPeriod{20};  // between looks at what has arrived

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

}  // namespace

void fail_mpi(int code, const char* call) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommError(fmt::format("{}: {}", call, std::string_view(text, static_cast<size_t>(length))));
}

// ----- what the process shares

std::string MpiDomain::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void MpiDomain::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_aborted_) return;
  reason_ = reason;
  is_aborted_ = true;
}

void MpiDomain::throw_if_aborted() const {
  if (is_aborted()) throw CommError(reason());
}

void MpiDomain::add(MPI_Comm comm) {
  const std::lock_guard lock(mutex_);
  comms_.push_back(comm);
}

void MpiDomain::free_comms() {
  std::vector<MPI_Comm> comms;
  {
    const std::lock_guard lock(mutex_);
    comms.swap(comms_);
  }
  for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);  // collective: it may wait
}

void MpiDomain::set_node(std::shared_ptr<NodeMemory> memory, int node_rank,
                         std::vector<int> node_of) {
  memory_ = std::move(memory);
  node_rank_ = node_rank;
  node_of_ = std::move(node_of);
}

// ----- the ranks of one communicator

MpiTransport::MpiTransport(MPI_Comm comm, int rank, CommGroup group,
                           std::shared_ptr<MpiDomain> domain)
    : HostTransport(rank, std::move(group)),
      comm_(comm),
      num_hash_bits_(num_hash_bits(comm)),
      domain_(std::move(domain)) {
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  domain_->add(comm_);
  for (const char* name : kControlCalls) names_.emplace(hash_bits({0, name, {}}), name);
  meet_node();
}

void MpiTransport::start(const Messages& messages) {
  for (const Messages::Receive& r : messages.receives) receive(r.data, r.nbytes, r.from);
  for (const Messages::Send& s : messages.sends) send(s.data, s.nbytes, s.to);
}

std::shared_ptr<HostTransport> MpiTransport::split(int color, int key) {
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

// By rank of `child`: the rank here. Local.
std::vector<int> MpiTransport::ranks_of_child(MPI_Comm child) const {
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
void MpiTransport::meet_node() {
  if (domain_->memory() == nullptr) return;
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
  NodeBoard::Members members;
  int me = 0;
  for (int r = 0; r < world_size(); ++r) {
    const Place& place = all[static_cast<size_t>(r)];
    if (place.node != mine.node) continue;
    if (r == rank()) me = static_cast<int>(members.ranks.size());
    members.ranks.push_back(r);
    members.node_ranks.push_back(place.node_rank);
    members.parts.push_back(place.part);
  }
  if (members.ranks.size() < 2) return;
  members.world_ranks = world_ranks(members.ranks);
  set_board(std::make_unique<NodeBoard>(memory, members, world_size(), me,
                                        [domain = domain_] { domain->throw_if_aborted(); }));
}

void MpiTransport::receive(void* data, int64_t nbytes, int from) {
  for (int64_t done = 0; done < nbytes; done += kMaxMessage) {
    const int64_t part = std::min(kMaxMessage, nbytes - done);
    MPI_Request request;
    TESSERA_MPI_CHECK(MPI_Irecv(static_cast<std::byte*>(data) + done, static_cast<int>(part),
                                MPI_BYTE, from, message_tag(), comm_, &request));
    requests_.push_back(request);
    expected_.push_back(part);
  }
}

void MpiTransport::send(const void* data, int64_t nbytes, int to) {
  for (int64_t done = 0; done < nbytes; done += kMaxMessage) {
    const int64_t part = std::min(kMaxMessage, nbytes - done);
    MPI_Request request;
    TESSERA_MPI_CHECK(MPI_Isend(static_cast<const std::byte*>(data) + done, static_cast<int>(part),
                                MPI_BYTE, to, message_tag(), comm_, &request));
    requests_.push_back(request);
    expected_.push_back(kNotReceived);
  }
}

// Waits for everything that was started. CommError if the World is aborted meanwhile (the process
// is about to end, so what is still in flight is left alone) or if sizes differ.
void MpiTransport::wait_all() {
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
      throw CommError(fmt::format("{}: the ranks disagree: expected {} bytes from rank {}, got {}",
                                  tag().to_string(), expected_[i],
                                  world_rank(statuses_[i].MPI_SOURCE), nbytes));
    }
  }
  requests_.clear();
  expected_.clear();
}

int MpiTransport::message_tag() {
  if (tag().sequence == tagged_sequence_) return message_tag_;
  const int hash = hash_bits(tag());
  const int sequence = static_cast<int>(tag().sequence & ((1 << kSequenceBits) - 1));
  if (names_.find(hash) == names_.end()) names_.emplace(hash, tag().to_string());
  tagged_sequence_ = tag().sequence;
  return message_tag_ = (sequence << num_hash_bits_) | hash;
}

int MpiTransport::hash_bits(const CallTag& call) const {
  return static_cast<int>(call.hash & ((uint64_t{1} << num_hash_bits_) - 1));
}

void MpiTransport::throw_if_mismatch() {
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

void MpiTransport::fail_exchange(int code) {
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

}  // namespace tessera::dist
