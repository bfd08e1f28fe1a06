#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// One task of one stream; times in nanoseconds of the steady clock. The names live for ever.
struct TraceEvent {
  const char* name;
  int stream_id;
  int64_t begin_ns, end_ns;
  const char* unit = "";  // that a collective, or a wait for one, is for
};

/// Timeline of all streams of the process. Off by default (then it costs one relaxed load a task).
namespace profiler {

void start();  ///< forgets earlier events and records from now on
/// Waits for the tasks of streams that learn their times later.
void stop();
bool is_on();
/// `collect` adds what a kind of stream has measured since it was last called; `stop` calls it.
void add_source(void (*collect)());
void add(const TraceEvent& event);
void name_stream(int stream_id, const std::string& name);
std::vector<TraceEvent> events();
/// Chrome trace JSON (opens in Perfetto): one row a stream. IoError if it cannot be written.
void write_chrome_trace(const std::string& path);

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace profiler
}  // namespace tessera
