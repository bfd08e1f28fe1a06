#pragma once

#include <array>
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
  int32_t label = 0;      // of `profiler::label_of`: what it was submitted for
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
/// Of a stream that the calling thread makes.
void name_stream(int stream_id, const std::string& name);
std::vector<TraceEvent> events();

// [Note: Labels of tasks]
// A task knows its kernel's name; what it is for, the host knows when it submits it. So while the
// profiler is on each thread has a label, every task that it submits has the label's number, and
// what is only known afterwards (the shapes of an operation's outputs) is written into the label
// then: the number stays.

/// What tasks are submitted for. Texts live for ever.
struct TaskLabel {
  /// What a wait is for: nothing, a unit's gather, or its reduce.
  enum class Wait : uint8_t { kNone, kGather, kReduce };
  int64_t step = -1;        ///< of a training, counted from 1; -1: none
  const char* phase = "";   ///< "forward", "backward", "optimizer", ...
  const char* op = "";      ///< operation on the tape
  const char* module = "";  ///< full path
  const char* unit = "";    ///< of sharding
  bool is_recomputed = false;
  Wait wait = Wait::kNone;  ///< what a wait is for
  std::string shapes = "";  ///< "[2, 8, 64], [64, 64] -> [2, 8, 64]"
};
/// From now on tasks of this thread have this label; its number.
int32_t set_label(const TaskLabel& label);
/// That of this thread; 0 without one.
int32_t current_label();
/// One that it had before, or 0 for none.
void use_label(int32_t label);
/// Says more of a label of this thread.
void update_label(int32_t label, const TaskLabel& more);
/// Empty for 0.
TaskLabel label_of(int32_t label);
/// A copy of `text` that lives for ever.
const char* lasting(const std::string& text);

/// Where hosts' own spans are told, beside the timeline: NVTX. Both are called by the thread whose
/// span it is, nested. Null: nobody.
struct SpanSink {
  void (*push)(const char* name) = nullptr;
  void (*pop)() = nullptr;
};
/// One for the process; null members: none.
void set_span_sink(const SpanSink& sink);
/// Somebody wants spans: the timeline or a sink.
bool wants_spans();

/// What the host does in this scope, as a row of its own in the timeline, and for the sink. Names
/// live for ever; `unit` may be "".
class HostSpan {
 public:
  explicit HostSpan(const char* name, const char* unit = "") {
    if (wants_spans()) [[unlikely]]
      begin(name, unit);
  }
  ~HostSpan() { end(); }
  HostSpan(const HostSpan&) = delete;
  HostSpan& operator=(const HostSpan&) = delete;
  /// Before the scope ends.
  void end() {
    if (name_ != nullptr) [[unlikely]]
      finish();
  }

 private:
  void begin(const char* name, const char* unit);
  void finish() noexcept;

  const char* name_ = nullptr;
  const char* unit_ = nullptr;
  int64_t begin_ns_ = -1;  // -1: not for the timeline
  bool is_pushed_ = false;
};

/// Bytes of a thread's rank at one time, by class: a counter of the timeline.
inline constexpr int kNumCounters = 6;
/// The counters of one rank at one time.
struct TraceCounter {
  int owner;  ///< of `thread_owner`
  int64_t at_ns;
  std::array<int64_t, kNumCounters> values;
};
/// A point of the timeline's counters.
void add_counter(const TraceCounter& counter);
/// Several ranks may share a process, a thread each: which of them made a stream or a counter.
int thread_owner();

/// Where a trace stands among those of other ranks, which one timeline can show together.
struct TraceProcess {
  int id = 0;
  std::string name = "tessera";
  int64_t origin_ns = -1;  ///< the steady clock's time that becomes 0; -1: the first event's
  /// What is `thread_owner`'s of another thread that has said it is a rank's is left out.
  int owner = -1;  ///< -1: everything
  /// Names of the counters.
  std::array<const char*, kNumCounters> counters = {};
};
/// The calling thread is a rank of its own in this process.
void claim_thread();
/// Events of the streams that a rank's thread made, or that no rank's did, in the order in which
/// they began.
std::vector<TraceEvent> events_of(int owner);
/// The stream's name; "" if it has none.
std::string stream_name(int stream_id);
/// Row of the host spans of a thread's owner.
int host_row(int owner);

/// When the first event began; now, if there is none.
int64_t first_event_ns();
/// The events of Chrome trace JSON (opens in Perfetto), a line each, without the brackets around
/// them: a row a stream, one for the host, one of steps, phases and units on the stream "compute",
/// counters of memory.
std::string chrome_events(const TraceProcess& process);
/// A file of those of one process. IoError if it cannot be written.
void write_chrome_trace(const std::string& path, const TraceProcess& process = {});

/// Nanoseconds of a steady clock.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace profiler
}  // namespace tessera
