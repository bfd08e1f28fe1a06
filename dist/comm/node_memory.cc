#include "dist/comm/node_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <random>

namespace tessera::dist {

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kMaxAddresses = int64_t{1} << 44;  // of the 2^47 of a process, for all ranks
// As long as waking a thread that sleeps takes: whoever comes a little late would otherwise cost
// the others that, which then come late to the next meeting.
constexpr std::chrono::microseconds kSpin{50};
constexpr timespec kAbortPeriod{0, 20'000'000};  // between looks for an end of the World

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

char* map_shared(int fd, int64_t nbytes) {
  void* data = mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, static_cast<size_t>(nbytes), MADV_HUGEPAGE);
  madvise(data, static_cast<size_t>(nbytes), MADV_DONTDUMP);
  return static_cast<char*>(data);
}

}  // namespace

NodeMemory::NodeMemory(int num_ranks)
    : bases_(static_cast<size_t>(num_ranks)), sizes_(static_cast<size_t>(num_ranks)) {
  // Addresses only: enough for whatever a rank may ask for, with room for fragments.
  const int64_t physical = sysconf(_SC_PHYS_PAGES) * int64_t{sysconf(_SC_PAGESIZE)};
  const int64_t nbytes = std::min(2 * round_up(physical, kHugePage),
                                  kMaxAddresses / num_ranks / kHugePage * kHugePage);
  const char* failed = nullptr;
  handle_.fd = memfd_create("tessera", MFD_CLOEXEC);
  if (handle_.fd < 0) failed = "memfd_create";
  if (failed == nullptr && ftruncate(handle_.fd, nbytes) != 0) failed = "ftruncate";
  if (failed == nullptr && (own_ = map_shared(handle_.fd, nbytes)) == nullptr) failed = "mmap";
  if (failed != nullptr) {
    why_not_ = fmt::format("{}: {}", failed, std::strerror(errno));
    if (handle_.fd >= 0) close(handle_.fd);
    handle_.fd = -1;
    return;
  }
  handle_.pid = getpid();
  handle_.nbytes = nbytes;
  std::random_device random;
  handle_.token = (uint64_t{random()} << 32) | random();
  std::memcpy(own_, &handle_.token, sizeof handle_.token);
  free_.emplace(kPage, nbytes - kPage);
}

NodeMemory::~NodeMemory() {
  for (size_t r = 0; r < bases_.size(); ++r) {
    if (bases_[r] != nullptr && bases_[r] != own_) {
      munmap(bases_[r], static_cast<size_t>(sizes_[r]));
    }
  }
  if (own_ != nullptr) munmap(own_, static_cast<size_t>(handle_.nbytes));
  if (handle_.fd >= 0) close(handle_.fd);
}

bool NodeMemory::connect(int node_rank, const Handle& theirs) {
  const auto r = static_cast<size_t>(node_rank);
  if (theirs.fd < 0) return false;
  if (theirs.token == handle_.token) {
    bases_[r] = own_;
    return own_ != nullptr;
  }
  const std::string path = fmt::format("/proc/{}/fd/{}", theirs.pid, theirs.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat status = {};
  // Ranks in containers of their own may see another process under this number.
  if (fd < 0 || fstat(fd, &status) != 0 || status.st_size != theirs.nbytes) {
    why_not_ = fmt::format("{}: {}", path, fd < 0 ? std::strerror(errno) : "another file");
    if (fd >= 0) close(fd);
    return false;
  }
  char* base = map_shared(fd, theirs.nbytes);
  if (base == nullptr) why_not_ = fmt::format("mmap: {}", std::strerror(errno));
  close(fd);
  if (base == nullptr) return false;
  bases_[r] = base;
  sizes_[r] = theirs.nbytes;
  if (std::memcmp(base, &theirs.token, sizeof theirs.token) == 0) return true;
  why_not_ = fmt::format("{}: another file", path);
  return false;
}

void* NodeMemory::allocate(size_t nbytes) {
  const auto count = static_cast<int64_t>(nbytes);
  const int64_t alignment = count >= kHugePage ? kHugePage : kPage;
  const int64_t rounded = round_up(std::max<int64_t>(count, 1), kPage);
  const std::lock_guard lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [begin, size] = *it;
    const int64_t place = round_up(begin, alignment), end = begin + size;
    if (place + rounded > end) continue;
    free_.erase(it);
    if (place > begin) free_.emplace(begin, place - begin);
    if (place + rounded < end) free_.emplace(place + rounded, end - place - rounded);
    return own_ + place;
  }
  return nullptr;
}

void NodeMemory::free(void* data, size_t nbytes) noexcept {
  int64_t begin = static_cast<char*>(data) - own_;
  int64_t end = begin + round_up(std::max<int64_t>(static_cast<int64_t>(nbytes), 1), kPage);
  // Gives the pages back, though peers have them mapped.
  fallocate(handle_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, end - begin);
  const std::lock_guard lock(mutex_);
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == end) {
    end += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      previous->second = end - previous->first;
      return;
    }
  }
  free_.emplace(begin, end - begin);
}

int64_t NodeMemory::offset_of(const void* data) const {
  const auto address = reinterpret_cast<uintptr_t>(data), base = reinterpret_cast<uintptr_t>(own_);
  if (own_ == nullptr || address < base) return -1;
  const auto offset = static_cast<int64_t>(address - base);
  return offset < handle_.nbytes ? offset : -1;
}

// What all ranks write; in the part of the first.
struct alignas(64) NodeBoard::Shared {
  std::atomic<uint32_t> generation{0};  // the word that ranks sleep on
  std::atomic<uint32_t> num_sleeping{0};
  alignas(64) std::atomic<uint32_t> num_arrived{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

struct NodeBoard::Published {
  static constexpr int64_t kNowhere = -1, kCarried = -2;

  int64_t sequence = -1;
  uint64_t hash = 0;
  int64_t nbytes = 0;
  int detail = 0;
  int64_t place = kNowhere;  // offset in the memory of its rank
  char name[160] = {};       // for messages
};

// Of one rank. Two places in turn: who is in the next call has read the one before, and nobody is
// in the one after that.
struct NodeBoard::Part {
  Shared shared;
  Published published[2];
  alignas(64) std::byte carried[2][kInlineNbytes];
};

int64_t NodeBoard::make_part(NodeMemory& memory) {
  void* data = memory.allocate(sizeof(Part));
  if (data == nullptr) throw CommError("World: no shared memory left for a communicator");
  auto* part = new (data) Part;  // the carried bytes are not touched
  return memory.offset_of(part);
}

NodeBoard::NodeBoard(NodeMemory& memory, std::vector<int> ranks, std::vector<int> node_ranks,
                     std::vector<int64_t> parts, int me, std::function<void()> throw_if_aborted)
    : memory_(memory),
      ranks_(std::move(ranks)),
      node_ranks_(std::move(node_ranks)),
      me_(me),
      throw_if_aborted_(std::move(throw_if_aborted)) {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    parts_.push_back(reinterpret_cast<Part*>(memory_.at(node_ranks_[i], parts[i])));
  }
}

void NodeBoard::enter(const Call& call) {
  turn_ ^= 1;
  Part& mine = *parts_[static_cast<size_t>(me_)];
  Published& p = mine.published[turn_];
  p.sequence = call.tag.sequence;
  p.hash = call.tag.hash;
  p.nbytes = call.nbytes;
  p.detail = call.detail;
  if (call.data_nbytes <= kInlineNbytes) {
    p.place = Published::kCarried;
    if (call.data_nbytes > 0) {
      std::memcpy(mine.carried[turn_], call.data, static_cast<size_t>(call.data_nbytes));
    }
  } else {
    const int64_t offset = memory_.offset_of(call.data);
    p.place = offset >= 0 ? offset : Published::kNowhere;
  }
  const std::string name = call.tag.sequence < 0 ? call.op : call.tag.to_string();
  const size_t length = name.copy(p.name, sizeof p.name - 1);
  p.name[length] = '\0';
  meet();
  check_agreement(call);
}

void NodeBoard::check_agreement(const Call& call) const {
  const Published& mine = part(me_).published[turn_];
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Published& p = part(static_cast<int>(i)).published[turn_];
    const bool is_same = p.sequence == mine.sequence && p.hash == mine.hash;
    if (!is_same || (mine.sequence < 0 && std::strcmp(p.name, mine.name) != 0)) {
      throw CommError(fmt::format("{}: the ranks disagree: rank {} calls {}, rank {} calls {}",
                                  call.op, ranks_[static_cast<size_t>(me_)], mine.name, ranks_[i],
                                  p.name));
    }
    if (p.nbytes != mine.nbytes) {
      throw CommError(fmt::format("{}: the ranks disagree: expected {} bytes from rank {}, got {}",
                                  mine.name, mine.nbytes, ranks_[i], p.nbytes));
    }
    if (p.detail != mine.detail) {
      throw CommError(fmt::format("{}: the ranks disagree: dtypes or root of rank {} and {} differ",
                                  call.op, ranks_[static_cast<size_t>(me_)], ranks_[i]));
    }
  }
}

bool NodeBoard::has_data(int place) const {
  return part(place).published[turn_].place != Published::kNowhere;
}

bool NodeBoard::all_have_data() const {
  for (int i = 0; i < static_cast<int>(parts_.size()); ++i) {
    if (!has_data(i)) return false;
  }
  return true;
}

bool NodeBoard::none_has_data() const {
  for (int i = 0; i < static_cast<int>(parts_.size()); ++i) {
    if (has_data(i)) return false;
  }
  return true;
}

const void* NodeBoard::data(int place) const {
  const Part& theirs = part(place);
  const int64_t where = theirs.published[turn_].place;
  if (where == Published::kCarried) return theirs.carried[turn_];
  return memory_.at(node_ranks_[static_cast<size_t>(place)], where);
}

void NodeBoard::meet() {
  Shared& shared = parts_.front()->shared;
  const uint32_t generation = shared.generation.load(std::memory_order_relaxed);
  if (shared.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == parts_.size()) {
    shared.num_arrived.store(0, std::memory_order_relaxed);
    shared.generation.store(generation + 1);
    if (shared.num_sleeping.load() > 0) {
      syscall(SYS_futex, &shared.generation, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }
    return;
  }
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    if (shared.generation.load(std::memory_order_acquire) != generation) return;
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  sleep(generation);
}

void NodeBoard::sleep(uint32_t generation) {
  Shared& shared = parts_.front()->shared;
  shared.num_sleeping.fetch_add(1);
  while (shared.generation.load() == generation) {
    throw_if_aborted_();  // which leaves num_sleeping too high: wakes for nobody, in a dying World
    syscall(SYS_futex, &shared.generation, FUTEX_WAIT, generation, &kAbortPeriod, nullptr, 0);
  }
  shared.num_sleeping.fetch_sub(1);
}

}  // namespace tessera::dist
