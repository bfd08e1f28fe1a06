#include "core/fault_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <vector>

namespace tessera {

struct FaultGuard::Range {
  std::atomic<uintptr_t> begin{0}, end{0};  // equal: free
  std::atomic<bool> has_faulted{false};
  Range* next = nullptr;
};

/// All ranges there ever were: the handler walks the list without a lock, so none is freed.
struct FaultRanges {
  using Range = FaultGuard::Range;
  static inline std::atomic<Range*> first{nullptr};
  static inline struct sigaction previous {};
  static_assert(std::atomic<uintptr_t>::is_always_lock_free &&
                std::atomic<bool>::is_always_lock_free);

  static bool mend(uintptr_t address) {
    for (Range* r = first.load(); r != nullptr; r = r->next) {
      const uintptr_t begin = r->begin.load(), end = r->end.load();
      if (address < begin || address >= end) continue;
      // From the page on: what comes behind the end of a file is gone as well.
      const auto page_nbytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
      const uintptr_t page = address / page_nbytes * page_nbytes;
      const int error = errno;
      void* const mapped = ::mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
      errno = error;
      if (mapped == MAP_FAILED) return false;
      r->has_faulted = true;
      return true;
    }
    return false;
  }

  static void handle(int number, siginfo_t* info, void* context) {
    const bool is_of_kernel = info->si_code > 0;  // not of kill()
    if (is_of_kernel && mend(reinterpret_cast<uintptr_t>(info->si_addr))) return;
    if ((previous.sa_flags & SA_SIGINFO) != 0) return previous.sa_sigaction(number, info, context);
    if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
      return previous.sa_handler(number);
    }
    ::signal(number, SIG_DFL);  // the load, made again, ends the process as it would have
    if (!is_of_kernel) ::raise(number);
  }

  static std::vector<Range*>& free_ranges() {
    static auto* ranges = new std::vector<Range*>;  // leaked: guards may end at exit
    return *ranges;
  }
  static std::mutex& mutex() {
    static auto* m = new std::mutex;
    return *m;
  }
};

FaultGuard::FaultGuard(const void* data, int64_t nbytes) {
  const std::lock_guard lock(FaultRanges::mutex());
  if (FaultRanges::first.load() == nullptr) {
    struct sigaction action {};
    action.sa_sigaction = FaultRanges::handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(SIGBUS, &action, &FaultRanges::previous);
  }
  auto& free = FaultRanges::free_ranges();
  const bool is_new = free.empty();
  range_ = is_new ? new Range : free.back();
  if (!is_new) free.pop_back();
  range_->has_faulted = false;
  range_->begin = reinterpret_cast<uintptr_t>(data);
  range_->end = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(nbytes);
  if (!is_new) return;
  range_->next = FaultRanges::first.load();
  FaultRanges::first = range_;
}

FaultGuard::~FaultGuard() {
  const std::lock_guard lock(FaultRanges::mutex());
  range_->end = 0;
  range_->begin = 0;
  FaultRanges::free_ranges().push_back(range_);
}

bool FaultGuard::has_faulted() const {
  return range_->has_faulted;
}

bool mend_mapped_fault(const void* address) {
  return FaultRanges::mend(reinterpret_cast<uintptr_t>(address));
}

}  // namespace tessera
