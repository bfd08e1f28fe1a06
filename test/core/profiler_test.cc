#include "core/profiler.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

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
  profiler::add({"all_gather", plain.id(), profiler::now_ns(), profiler::now_ns(), "blocks.3"});
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
  CHECK(std::count(tasks.begin(), tasks.end(), "all_gather blocks.3") == 1);
}

TEST_CASE("profiler: traces of ranks have process ids, names and one time", "[profiler]") {
  const Stream s = make_stream({}, "ranked");
  profiler::start();
  s.submit("task", [] {});
  s.synchronize();
  profiler::stop();
  const int64_t first = profiler::first_event_ns();
  CHECK(first == profiler::events()[0].begin_ns);
  const auto path =
      std::filesystem::temp_directory_path() / fmt::format("tessera_ranked_{}.json", ::getpid());
  profiler::write_chrome_trace(path, {.id = 3, .name = "rank 3", .origin_ns = first - 5000});
  std::ifstream file(path);
  const nlohmann::json trace = nlohmann::json::parse(file);
  std::filesystem::remove(path);
  int num_names = 0;
  for (const auto& event : trace) {
    CHECK(event["pid"] == 3);
    if (event["name"] == "process_name") {
      CHECK(event["args"]["name"] == "rank 3");
      ++num_names;
    }
    if (event["ph"] == "X") CHECK(event["ts"].get<double>() == 5.0);
  }
  CHECK(num_names == 1);
}

TEST_CASE("profiler: sources are collected from when it stops, and once more before it starts",
          "[profiler]") {
  static std::vector<TraceEvent> measured;
  profiler::add_source([] {
    for (const TraceEvent& e : std::exchange(measured, {})) profiler::add(e);
  });
  profiler::start();
  measured = {{"late", 0, 1, 2}, {"later", 0, 2, 3}};
  CHECK(profiler::events().empty());
  profiler::stop();
  REQUIRE(profiler::events().size() == 2);
  CHECK(std::string(profiler::events()[1].name) == "later");
  measured = {{"between", 0, 3, 4}};
  profiler::start();
  profiler::stop();
  CHECK(profiler::events().empty());
}

TEST_CASE("profiler: a trace that cannot be written is an error", "[profiler]") {
  CHECK_THROWS_AS(profiler::write_chrome_trace("/nowhere/trace.json"), IoError);
  CHECK(error_of([] {
          profiler::write_chrome_trace("/nowhere/trace.json");
        }).find("trace: cannot write /nowhere/trace.json") == 0);
}

}  // namespace
}  // namespace tessera
