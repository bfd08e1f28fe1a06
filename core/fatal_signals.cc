#include "core/fatal_signals.h"

#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iterator>
#include <mutex>
#include <string_view>

#include "core/fault_guard.h"
#include "core/files.h"

namespace tessera {
namespace {

struct Fatal {
  int number;
  const char* why;
};
constexpr Fatal kFatal[] = {{SIGSEGV, "ended by SIGSEGV (invalid memory access)"},
                            {SIGBUS,
                             "ended by SIGBUS (memory that is not there: a mapped file that "
                             "was truncated, or a failing disk)"},
                            {SIGABRT, "ended by SIGABRT (an error without a handler)"},
                            {SIGFPE, "ended by SIGFPE (arithmetic error)"},
                            {SIGILL, "ended by SIGILL (invalid instruction)"}};
struct sigaction previous[std::size(kFatal)];

struct Prepared {
  FatalReport report;
  std::string temporary;
};
std::atomic<const Prepared*> prepared{nullptr};
std::atomic<bool> is_written{false}, is_dying{false};
static_assert(std::atomic<const Prepared*>::is_always_lock_free);
static_assert(std::atomic<int64_t>::is_always_lock_free);

// Async-signal-safe from here on.

bool write_number(int fd, int64_t value) {
  char digits[24];
  char* const end = std::end(digits);
  char* begin = end;
  for (uint64_t rest = value < 0 ? 0 : static_cast<uint64_t>(value); begin == end || rest > 0;
       rest /= 10) {
    *--begin = static_cast<char>('0' + rest % 10);
  }
  return write_all(fd, {begin, static_cast<size_t>(end - begin)}) == 0;
}

bool is_running(const char* path) {
  char text[4096];
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return false;
  const ssize_t nbytes = ::read(fd, text, sizeof(text));
  ::close(fd);
  return nbytes > 0 && std::string_view(text, static_cast<size_t>(nbytes)).find("\"running\"") !=
                           std::string_view::npos;
}

/// The report's text with what stands for the reason and the step filled in.
bool write_text(int fd, const FatalReport& report, const char* why) {
  constexpr std::string_view why_mark = FatalReport::kWhy, step_mark = FatalReport::kStep;
  std::string_view rest = report.text;
  for (;;) {
    const size_t why_at = rest.find(why_mark), step_at = rest.find(step_mark);
    const size_t next = std::min(why_at, step_at);
    if (write_all(fd, rest.substr(0, next)) != 0) return false;
    if (next == std::string_view::npos) return true;
    if (next == why_at) {
      if (write_all(fd, report.who) != 0 || write_all(fd, why) != 0) return false;
    } else if (!write_number(fd, report.step != nullptr ? report.step->load() : 0)) {
      return false;
    }
    rest.remove_prefix(next + (next == why_at ? why_mark : step_mark).size());
  }
}

bool replace_file(const Prepared& p, const char* why) {
  const char* const temporary = p.temporary.c_str();
  ::unlink(temporary);  // a link there would lead to somebody else's file
  const int fd = ::open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return false;
  const bool is_whole = write_text(fd, p.report, why);
  ::close(fd);
  if (is_whole && ::rename(temporary, p.report.path.c_str()) == 0) return true;
  ::unlink(temporary);
  return false;
}

/// On a full disk.
void overwrite_file(const Prepared& p, const char* why) {
  constexpr size_t kMaxStepNbytes = 20;
  const size_t nbytes =
      p.report.text.size() + p.report.who.size() + std::strlen(why) + kMaxStepNbytes;
  const int fd = open_to_overwrite(p.report.path.c_str(), nbytes);
  if (fd < 0) return;
  if (write_text(fd, p.report, why)) {
    [[maybe_unused]] const int cut = ::ftruncate(fd, ::lseek(fd, 0, SEEK_CUR));
  }
  ::close(fd);
}

void on_fatal(int number, siginfo_t* info, void*) {
  const bool is_fault = info != nullptr && info->si_code > 0;
  if (number == SIGBUS && is_fault && mend_mapped_fault(info->si_addr)) return;
  size_t i = 0;
  while (kFatal[i].number != number) ++i;
  if (is_dying.exchange(true)) {  // another thread is at it, and ends the process
    const timespec patience{2, 0};
    ::nanosleep(&patience, nullptr);
  } else {
    write_all(STDERR_FILENO, "error: ");
    write_all(STDERR_FILENO, kFatal[i].why);
    write_all(STDERR_FILENO, "\n");
    write_fatal_report(kFatal[i].why);
  }
  ::sigaction(number, &previous[i], nullptr);
  // What the processor found wrong, it finds again; what was sent has to be sent again.
  if (info == nullptr || info->si_code <= 0) ::raise(number);
}

}  // namespace

void write_fatal_report(const char* why) noexcept {
  const int saved_errno = errno;
  const Prepared* const p = prepared.load();
  if (p == nullptr || is_written.exchange(true)) return;
  if (!p->report.only_if_running || is_running(p->report.path.c_str())) {
    if (!replace_file(*p, why)) overwrite_file(*p, why);
  }
  errno = saved_errno;
}

void set_fatal_report(FatalReport report) {
  static std::mutex mutex;
  // Leaked, and kept for a while: a handler may be reading one on another thread.
  static auto* const kept = new std::deque<Prepared>;
  const std::lock_guard lock(mutex);
  if (report.text.empty()) {
    prepared = nullptr;
    return;
  }
  std::string temporary = report.path + ".died";
  kept->push_back({std::move(report), std::move(temporary)});
  prepared = &kept->back();
  is_written = false;
  if (constexpr size_t kNumKept = 16; kept->size() > kNumKept) kept->pop_front();
}

FatalSignalHandlers::FatalSignalHandlers() {
  // An overflow of the stack leaves none to handle it on; other threads have none of these.
  static char stack[64 * 1024];
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof(stack);
  ::sigaltstack(&alternative, nullptr);
  for (size_t i = 0; i < std::size(kFatal); ++i) {
    struct sigaction action = {};
    action.sa_sigaction = on_fatal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(kFatal[i].number, &action, &previous[i]);
  }
}

FatalSignalHandlers::~FatalSignalHandlers() {
  for (size_t i = 0; i < std::size(kFatal); ++i) {
    ::sigaction(kFatal[i].number, &previous[i], nullptr);
  }
}

}  // namespace tessera
