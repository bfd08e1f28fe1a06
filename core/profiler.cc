#include "core/profiler.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "core/check.h"

namespace tessera::profiler {
namespace {

struct NamedStream {
  std::string name;
  int owner;
};

/// All that is recorded; leaked, since workers may outlive statics.
struct Records {
  std::mutex mutex;
  std::vector<TraceEvent> events;
  std::vector<TraceCounter> counters;
  std::vector<TaskLabel> labels;
  std::map<int, NamedStream> streams;
  std::set<int> claimed;  // owners that are ranks
  std::vector<void (*)()> sources;
  std::set<std::string> texts;
  SpanSink sink;
  int num_started = 0;
};
Records& records() {
  static auto* all = new Records;
  return *all;
}

std::atomic<bool> on{false}, has_sink{false};
std::atomic<int> num_owners{0};
std::atomic<uint32_t> generation{0};  // of labels: `start` forgets them

struct OwnLabel {
  uint32_t generation = 0;
  int32_t label = 0;
};
thread_local OwnLabel own_label;

void collect_all() {
  std::vector<void (*)()> all;
  {
    std::lock_guard lock(records().mutex);
    all = records().sources;
  }
  for (const auto collect : all) collect();
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
  }
  return out;
}

bool is_of(int event_owner, int owner) {
  return owner < 0 || event_owner == owner || records().claimed.count(event_owner) == 0;
}

}  // namespace

void start() {
  collect_all();
  Records& r = records();
  std::lock_guard lock(r.mutex);
  if (r.num_started++ > 0) return;  // another rank of this process records already
  r.events.clear();
  r.counters.clear();
  r.labels.clear();
  generation.fetch_add(1, std::memory_order_relaxed);
  on.store(true, std::memory_order_relaxed);
}

void stop() {
  {
    Records& r = records();
    std::lock_guard lock(r.mutex);
    r.num_started = std::max(0, r.num_started - 1);
    if (r.num_started == 0) on.store(false, std::memory_order_relaxed);
  }
  collect_all();
}

void add_source(void (*collect)()) {
  std::lock_guard lock(records().mutex);
  records().sources.push_back(collect);
}

bool is_on() {
  return on.load(std::memory_order_relaxed);
}

void add(const TraceEvent& event) {
  std::lock_guard lock(records().mutex);
  records().events.push_back(event);
}

int thread_owner() {
  thread_local const int owner = num_owners.fetch_add(1);
  return owner;
}

void claim_thread() {
  std::lock_guard lock(records().mutex);
  records().claimed.insert(thread_owner());
}

void name_stream(int stream_id, const std::string& name) {
  std::lock_guard lock(records().mutex);
  records().streams[stream_id] = {name, thread_owner()};
}

std::string stream_name(int stream_id) {
  std::lock_guard lock(records().mutex);
  const auto it = records().streams.find(stream_id);
  return it == records().streams.end() ? "" : it->second.name;
}

std::vector<TraceEvent> events() {
  std::lock_guard lock(records().mutex);
  return records().events;
}

int host_row(int owner) {
  return -1 - owner;
}

std::vector<TraceEvent> events_of(int owner) {
  Records& r = records();
  std::vector<TraceEvent> all;
  {
    std::lock_guard lock(r.mutex);
    for (const TraceEvent& e : r.events) {
      const auto stream = r.streams.find(e.stream_id);
      const int of = e.stream_id < 0             ? -1 - e.stream_id
                     : stream == r.streams.end() ? -1
                                                 : stream->second.owner;
      if (is_of(of, owner)) all.push_back(e);
    }
  }
  // What contains another comes before it, also where both begin at once.
  std::stable_sort(all.begin(), all.end(), [](const TraceEvent& a, const TraceEvent& b) {
    return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns;
  });
  return all;
}

// ---- labels

int32_t set_label(const TaskLabel& label) {
  std::lock_guard lock(records().mutex);
  records().labels.push_back(label);
  own_label = {generation.load(std::memory_order_relaxed),
               static_cast<int32_t>(records().labels.size())};
  return own_label.label;
}

int32_t current_label() {
  return own_label.generation == generation.load(std::memory_order_relaxed) ? own_label.label : 0;
}

void use_label(int32_t label) {
  own_label = {generation.load(std::memory_order_relaxed), label};
}

void update_label(int32_t label, const TaskLabel& more) {
  std::lock_guard lock(records().mutex);
  if (label <= 0 || static_cast<size_t>(label) > records().labels.size()) return;
  records().labels[static_cast<size_t>(label) - 1] = more;
}

TaskLabel label_of(int32_t label) {
  std::lock_guard lock(records().mutex);
  if (label <= 0 || static_cast<size_t>(label) > records().labels.size()) return {};
  return records().labels[static_cast<size_t>(label) - 1];
}

const char* lasting(const std::string& text) {
  std::lock_guard lock(records().mutex);
  return records().texts.insert(text).first->c_str();
}

// ---- spans and counters

void set_span_sink(const SpanSink& sink) {
  std::lock_guard lock(records().mutex);
  records().sink = sink;
  has_sink.store(sink.push != nullptr, std::memory_order_relaxed);
}

bool wants_spans() {
  return is_on() || has_sink.load(std::memory_order_relaxed);
}

void HostSpan::begin(const char* name, const char* unit) {
  name_ = name, unit_ = unit;
  if (is_on()) begin_ns_ = now_ns();
  if (!has_sink.load(std::memory_order_relaxed)) return;
  SpanSink sink;
  {
    std::lock_guard lock(records().mutex);
    sink = records().sink;
  }
  if (sink.push == nullptr) return;
  sink.push(*unit == '\0' ? name : fmt::format("{} {}", name, unit).c_str());
  is_pushed_ = true;
}

void HostSpan::finish() noexcept {
  try {
    if (begin_ns_ >= 0) add({name_, host_row(thread_owner()), begin_ns_, now_ns(), unit_});
    if (is_pushed_) {
      SpanSink sink;
      {
        std::lock_guard lock(records().mutex);
        sink = records().sink;
      }
      if (sink.pop != nullptr) sink.pop();
    }
  } catch (...) {  // out of memory for a line of the timeline: it is missing there
  }
  name_ = nullptr;
}

void add_counter(const TraceCounter& counter) {
  std::lock_guard lock(records().mutex);
  records().counters.push_back(counter);
}

int64_t first_event_ns() {
  const std::vector<TraceEvent> all = events();
  int64_t first = all.empty() ? now_ns() : all.front().begin_ns;
  for (const TraceEvent& e : all) first = std::min(first, e.begin_ns);
  return first;
}

// ---- Chrome trace

namespace {

constexpr int kHostRow = 1000000, kStepsRow = 2000000;  // above any stream's

/// Writes the lines of one process.
class ChromeEvents {
 public:
  ChromeEvents(const TraceProcess& process, int64_t origin_ns)
      : process_(process), origin_ns_(origin_ns) {}

  void row_name(int row, const std::string& name, int order) {
    line(
        fmt::format("{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{},\"tid\":{},\"args\":{{"
                    "\"name\":\"{}\"}}}}",
                    process_.id, row, escaped(name)));
    line(
        fmt::format("{{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":{},\"tid\":{},\"args\":"
                    "{{\"sort_index\":{}}}}}",
                    process_.id, row, order));
  }
  void span(const std::string& name, int row, int64_t begin_ns, int64_t end_ns,
            const std::string& args = "") {
    line(
        fmt::format("{{\"ph\":\"X\",\"name\":\"{}\",\"pid\":{},\"tid\":{},\"ts\":{:.3f},\"dur\":"
                    "{:.3f}{}}}",
                    escaped(name), process_.id, row, us(begin_ns - origin_ns_),
                    us(end_ns - begin_ns), args.empty() ? "" : ",\"args\":{" + args + "}"));
  }
  void counter(const TraceCounter& c) {
    std::string values;
    for (size_t i = 0; i < c.values.size(); ++i) {
      if (process_.counters[i] == nullptr) continue;
      values +=
          fmt::format("{}\"{}\":{}", values.empty() ? "" : ",", process_.counters[i], c.values[i]);
    }
    line(
        fmt::format("{{\"ph\":\"C\",\"name\":\"memory, bytes\",\"pid\":{},\"ts\":{:.3f},\"args\":"
                    "{{{}}}}}",
                    process_.id, us(c.at_ns - origin_ns_), values));
  }
  void process_name() {
    line(
        fmt::format("{{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":{0},\"args\":{{"
                    "\"sort_index\":{0}}}}}",
                    process_.id));
    line(
        fmt::format("{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{},\"args\":{{\"name\":"
                    "\"{}\"}}}}",
                    process_.id, escaped(process_.name)));
  }
  std::string take() { return std::move(text_); }

 private:
  static double us(int64_t ns) { return static_cast<double>(ns) * 1e-3; }
  void line(const std::string& event) { text_ += (text_.empty() ? "" : ",\n") + event; }

  const TraceProcess& process_;
  const int64_t origin_ns_;
  std::string text_;
};

std::string args_of(const TaskLabel& label) {
  std::string args;
  const auto add_text = [&](const char* name, std::string_view value) {
    if (value.empty()) return;
    args += fmt::format("{}\"{}\":\"{}\"", args.empty() ? "" : ",", name, escaped(value));
  };
  add_text("op", label.op);
  add_text("module", label.module);
  add_text("unit", label.unit);
  add_text("phase", label.phase);
  add_text("shapes", label.shapes);
  if (label.is_recomputed) add_text("recomputed", "yes");
  if (label.step >= 0) args += fmt::format("{}\"step\":{}", args.empty() ? "" : ",", label.step);
  return args;
}

/// Steps, phases in them and units in those, as a stream goes through them: runs of tasks that have
/// the same.
class StepRows {
 public:
  StepRows(ChromeEvents& out, int row) : out_(out), row_(row) {}
  ~StepRows() { close(0); }

  void add(const TraceEvent& e, const TaskLabel& label) {
    if (label.step < 0) return close(0);
    const std::string unit =
        label.is_recomputed ? fmt::format("{} (recompute)", label.unit) : std::string(label.unit);
    const std::string names[kLevels] = {fmt::format("step {}", label.step), label.phase, unit};
    int level = 0;
    while (level < kLevels && is_open_[level] && open_[level].name == names[level]) ++level;
    close(level);
    for (; level < kLevels && !names[level].empty(); ++level) {
      open_[level] = {names[level], e.begin_ns, e.end_ns};
      is_open_[level] = true;
    }
    for (int i = 0; i < kLevels; ++i) open_[i].end_ns = std::max(open_[i].end_ns, e.end_ns);
  }

 private:
  static constexpr int kLevels = 3;
  struct Open {
    std::string name;
    int64_t begin_ns = 0, end_ns = 0;
  };
  /// Those from `level` on; the outermost first, so that a reader meets parents before children.
  void close(int level) {
    for (int i = level; i < kLevels; ++i) {
      if (std::exchange(is_open_[i], false)) {
        out_.span(open_[i].name, row_, open_[i].begin_ns, open_[i].end_ns);
      }
    }
  }

  ChromeEvents& out_;
  const int row_;
  Open open_[kLevels];
  bool is_open_[kLevels] = {};
};

}  // namespace

std::string chrome_events(const TraceProcess& process) {
  const std::vector<TraceEvent> all = events_of(process.owner);
  const int64_t origin = process.origin_ns >= 0 ? process.origin_ns : first_event_ns();
  ChromeEvents out(process, origin);
  std::map<int, std::string> names;
  std::vector<TraceCounter> counters;
  {
    Records& r = records();
    std::lock_guard lock(r.mutex);
    for (const auto& [id, stream] : r.streams) {
      if (is_of(stream.owner, process.owner)) names[id] = stream.name;
    }
    for (const TraceCounter& c : r.counters) {
      if (is_of(c.owner, process.owner)) counters.push_back(c);
    }
  }
  std::set<int> rows;
  std::map<int, StepRows> steps;
  for (const TraceEvent& e : all) {
    if (e.stream_id < 0) {
      const int row = kHostRow - 1 - e.stream_id;
      if (rows.insert(row).second) out.row_name(row, "host", 0);
      out.span(*e.unit == '\0' ? e.name : fmt::format("{} {}", e.name, e.unit), row, e.begin_ns,
               e.end_ns);
      continue;
    }
    const auto name = names.find(e.stream_id);
    if (rows.insert(e.stream_id).second) {
      out.row_name(e.stream_id, name == names.end() ? "?" : name->second, e.stream_id + 2);
    }
    const TaskLabel label = label_of(e.label);
    out.span(*e.unit == '\0' ? e.name : fmt::format("{} {}", e.name, e.unit), e.stream_id,
             e.begin_ns, e.end_ns, args_of(label));
    if (e.label == 0 || name == names.end() || name->second != "compute") continue;
    const int row = kStepsRow + e.stream_id;
    if (rows.insert(row).second) {
      out.row_name(row, "steps of compute", 1);
      steps.emplace(std::piecewise_construct, std::forward_as_tuple(row),
                    std::forward_as_tuple(out, row));
    }
    steps.at(row).add(e, label);
  }
  steps.clear();
  if (process.counters[0] != nullptr) {
    for (const TraceCounter& c : counters) out.counter(c);
  }
  out.process_name();
  return out.take();
}

void write_chrome_trace(const std::string& path, const TraceProcess& process) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "w"), std::fclose);
  TESSERA_CHECK_AS(IoError, file != nullptr, "trace: cannot write {}", path);
  const std::string text = "[\n" + chrome_events(process) + "\n]\n";
  const bool written = std::fwrite(text.data(), 1, text.size(), file.get()) == text.size();
  TESSERA_CHECK_AS(IoError, written && std::fflush(file.get()) == 0, "trace: cannot write {}",
                   path);
}

}  // namespace tessera::profiler
