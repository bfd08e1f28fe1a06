#include "core/profiler.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>

#include "core/check.h"

namespace tessera::profiler {
namespace {

std::atomic<bool> on{false};
std::mutex mutex;
std::vector<TraceEvent>& recorded() {
  static auto* events = new std::vector<TraceEvent>;  // leaked: workers may outlive statics
  return *events;
}
std::map<int, std::string>& stream_names() {
  static auto* names = new std::map<int, std::string>;
  return *names;
}

std::vector<void (*)()>& sources() {
  static auto* all = new std::vector<void (*)()>;
  return *all;
}

void collect_all() {
  std::vector<void (*)()> all;
  {
    std::lock_guard lock(mutex);
    all = sources();
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

}  // namespace

void start() {
  collect_all();
  std::lock_guard lock(mutex);
  recorded().clear();
  on.store(true, std::memory_order_relaxed);
}

void stop() {
  on.store(false, std::memory_order_relaxed);
  collect_all();
}

void add_source(void (*collect)()) {
  std::lock_guard lock(mutex);
  sources().push_back(collect);
}

bool is_on() {
  return on.load(std::memory_order_relaxed);
}

void add(const TraceEvent& event) {
  std::lock_guard lock(mutex);
  recorded().push_back(event);
}

void name_stream(int stream_id, const std::string& name) {
  std::lock_guard lock(mutex);
  stream_names()[stream_id] = name;
}

std::vector<TraceEvent> events() {
  std::lock_guard lock(mutex);
  return recorded();
}

int64_t first_event_ns() {
  const std::vector<TraceEvent> all = events();
  int64_t first = all.empty() ? now_ns() : all.front().begin_ns;
  for (const TraceEvent& e : all) first = std::min(first, e.begin_ns);
  return first;
}

void write_chrome_trace(const std::string& path, const TraceProcess& process) {
  const std::vector<TraceEvent> all = events();
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "w"), std::fclose);
  TESSERA_CHECK_AS(IoError, file != nullptr, "trace: cannot write {}", path);
  std::string text = "[\n";
  {
    std::lock_guard lock(mutex);
    for (const auto& [id, name] : stream_names()) {
      text += fmt::format(
          "{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":"
          "\"{}\"}}}},\n",
          process.id, id, escaped(name));
    }
  }
  const int64_t origin = process.origin_ns >= 0 ? process.origin_ns : first_event_ns();
  for (const TraceEvent& e : all) {
    text += fmt::format(
        "{{\"ph\":\"X\",\"name\":\"{}{}{}\",\"pid\":{},\"tid\":{},\"ts\":{:.3f},\"dur\":{:.3f}}},"
        "\n",
        escaped(e.name), *e.unit == '\0' ? "" : " ", escaped(e.unit), process.id, e.stream_id,
        static_cast<double>(e.begin_ns - origin) * 1e-3,
        static_cast<double>(e.end_ns - e.begin_ns) * 1e-3);
  }
  text += fmt::format(
      "{{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":{0},\"args\":{{\"sort_index\":{0}}}}}"
      ",\n"
      "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{0},\"args\":{{\"name\":\"{1}\"}}}}\n]\n",
      process.id, escaped(process.name));
  const bool written = std::fwrite(text.data(), 1, text.size(), file.get()) == text.size();
  TESSERA_CHECK_AS(IoError, written && std::fflush(file.get()) == 0, "trace: cannot write {}",
                   path);
}

}  // namespace tessera::profiler
