#include "core/profiler.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/runtime/stream.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::error_of;

TEST_CASE("profiler: records the tasks between start and stop", "[profiler]") {
  const Stream s = make_stream({}, "profiled");
  s.submit("before", [] {});
  s.synchronize();
  profiler::start();
  s.submit("inside", [] {});
  s.synchronize();
  profiler::stop();
  s.submit("after", [] {});
  s.synchronize();
  const std::vector<TraceEvent> events = profiler::events();
  REQUIRE(events.size() == 1);
  CHECK(std::string(events[0].name) == "inside");
  CHECK(events[0].stream_id == s.id());
  CHECK(events[0].end_ns >= events[0].begin_ns);
}

TEST_CASE("profiler: writes a Chrome trace that is JSON, whatever the names", "[profiler]") {
  const Stream quoted = make_stream({}, "a \"quoted\\\" name\n"), plain = make_stream({}, "plain");
  profiler::start();
  quoted.submit("task \"1\"", [] {});
  plain.wait(quoted.record());
  plain.submit("task2", [] {});
  plain.synchronize();
  profiler::stop();
  const auto path =
      std::filesystem::temp_directory_path() / fmt::format("tessera_trace_{}.json", ::getpid());
  profiler::write_chrome_trace(path);
  std::ifstream file(path);
  const nlohmann::json trace = nlohmann::json::parse(file);
  std::filesystem::remove(path);
  std::vector<std::string> rows, tasks;
  for (const auto& event : trace) {
    if (event["ph"] == "M" && event["name"] == "thread_name") rows.push_back(event["args"]["name"]);
    if (event["ph"] != "X") continue;
    tasks.push_back(event["name"]);
    CHECK(event["ts"].get<double>() >= 0);
    CHECK(event["dur"].get<double>() >= 0);
    CHECK((event["tid"] == quoted.id() || event["tid"] == plain.id()));
  }
  CHECK(std::count(rows.begin(), rows.end(), "a \"quoted\\\" name\n") == 1);
  CHECK(std::count(tasks.begin(), tasks.end(), "task \"1\"") == 1);
  CHECK(std::count(tasks.begin(), tasks.end(), "task2") == 1);
}

TEST_CASE("profiler: a trace that cannot be written is an error", "[profiler]") {
  CHECK_THROWS_AS(profiler::write_chrome_trace("/nowhere/trace.json"), IoError);
  CHECK(error_of([] {
          profiler::write_chrome_trace("/nowhere/trace.json");
        }).find("trace: cannot write /nowhere/trace.json") == 0);
}

}  // namespace
}  // namespace tessera
