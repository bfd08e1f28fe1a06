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
/// Where a trace stands among those of other ranks, which one timeline can show together.
struct TraceProcess {
  int id = 0;
  std::string name = "tessera";
  int64_t origin_ns = -1;  ///< the steady clock's time that becomes 0; -1: the first event's
};
/// When the first event began; now, if there is none.
int64_t first_event_ns();
/// Chrome trace JSON (opens in Perfetto): one row a stream. IoError if it cannot be written.
void write_chrome_trace(const std::string& path, const TraceProcess& process = {});

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace profiler
}  // namespace tessera
