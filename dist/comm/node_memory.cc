#include "dist/comm/node_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "core/check.h"

namespace tessera::dist {

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kMaxAddresses = int64_t{1} << 44;  // of the 2^47 of a process, for all ranks

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

}  // namespace tessera::dist
