#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

// [Note: Death by a signal]
// A process that dies of SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL can do little more than write
// bytes that were prepared before: neither allocate nor lock. So a report is a text with places for
// the reason and the step, kept ready while the process works, which replaces a file at death.

/// A file that says why the process died.
struct FatalReport {
  /// Stand in the text for the reason, and, with its quotes, for the step.
  static constexpr const char* kWhy = "@why@";
  static constexpr const char* kStep = "\"@step@\"";

  std::string path, text;
  std::shared_ptr<const std::atomic<int64_t>> step;
  std::string who;  ///< before the reason: "rank 1: "; or empty
  /// Only replaces a file in which `"running"` occurs: one of several processes, others of which
  /// may have said why before.
  bool only_if_running = false;
};

/// From now on, or, without a text, none.
void set_fatal_report(FatalReport report);
/// Writes it now, if there is one, with `why` and at most once. Async-signal-safe; the arguments of
/// a handler's signal and its name do well: "ended by SIGTERM".
void write_fatal_report(const char* why) noexcept;

/// While alive, the process writes its report and one line on stderr when it dies of one of these
/// signals, and then dies as it would have. One at a time.
class FatalSignalHandlers {
 public:
  FatalSignalHandlers();
  ~FatalSignalHandlers();
  FatalSignalHandlers(const FatalSignalHandlers&) = delete;
  FatalSignalHandlers& operator=(const FatalSignalHandlers&) = delete;
};

}  // namespace tessera
