#include "core/profiler.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>
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

/// The events of a trace by phase of Chrome's format.
std::vector<nlohmann::json> trace_events(const profiler::TraceProcess& process, const char* kind) {
  const auto all = nlohmann::json::parse("[" + profiler::chrome_events(process) + "]");
  std::vector<nlohmann::json> some;
  for (const auto& event : all) {
    if (event["ph"] == kind) some.push_back(event);
  }
  return some;
}

TEST_CASE("profiler: a task has the label that its thread had when it was submitted",
          "[profiler]") {
  const Stream s = make_stream({}, "labelled");
  profiler::start();
  CHECK(profiler::current_label() == 0);
  s.submit("none", [] {});
  const int32_t first = profiler::set_label({.step = 3, .phase = "forward"});
  s.submit("op's", [] {});
  profiler::update_label(first, {.step = 3,
                                 .phase = "forward",
                                 .op = "norm",
                                 .module = "a.b",
                                 .unit = "a",
                                 .shapes = "[2] -> [\"2\"]"});
  profiler::set_label({.step = 3, .phase = "backward"});
  s.submit("later", [] {});
  profiler::use_label(first);
  s.submit("op's too", [] {});
  s.synchronize();
  profiler::stop();
  const auto tasks = trace_events({}, "X");
  REQUIRE(tasks.size() == 4);
  CHECK_FALSE(tasks[0].contains("args"));
  for (const size_t i : {1u, 3u}) {
    CHECK(tasks[i]["args"] == nlohmann::json{{"op", "norm"},
                                             {"module", "a.b"},
                                             {"unit", "a"},
                                             {"phase", "forward"},
                                             {"shapes", "[2] -> [\"2\"]"},
                                             {"step", 3}});
  }
  CHECK(tasks[2]["args"]["phase"] == "backward");
  // Another recording knows nothing of them.
  profiler::start();
  CHECK(profiler::current_label() == 0);
  CHECK(std::string(profiler::label_of(first).op).empty());
  profiler::stop();
}

TEST_CASE("profiler: steps, phases and units of compute are rows that nest", "[profiler]") {
  const Stream s = make_stream({}, "compute");
  profiler::start();
  auto add = [&, at = int64_t{1000}](profiler::TaskLabel label) mutable {
    profiler::add({"task", s.id(), at, at + 700, "", profiler::set_label(label)});
    at += 1000;
  };
  for (const int64_t step : {4, 5}) {
    for (const char* unit : {"a", "a", "b"}) add({.step = step, .phase = "forward", .unit = unit});
    add({.step = step, .phase = "backward", .unit = "b"});
    add({.step = step, .phase = "backward", .unit = "b", .is_recomputed = true});
    add({.step = step, .phase = "optimizer"});
  }
  profiler::stop();
  std::vector<std::string> spans;
  for (const auto& e : trace_events({.origin_ns = 0}, "X")) {
    if (e["tid"] == s.id()) continue;
    spans.push_back(fmt::format("{} {:.1f}+{:.1f}", e["name"].get<std::string>(),
                                e["ts"].get<double>(), e["dur"].get<double>()));
  }
  for (const char* span :
       {"step 4 1.0+5.7", "step 5 7.0+5.7", "forward 1.0+2.7", "a 1.0+1.7", "b 3.0+0.7",
        "backward 4.0+1.7", "b (recompute) 5.0+0.7", "optimizer 6.0+0.7", "optimizer 12.0+0.7"}) {
    CAPTURE(span);
    CHECK(std::count(spans.begin(), spans.end(), span) == 1);
  }
  CHECK(spans.size() == 2 * 8);
}

TEST_CASE("profiler: ranks that are threads have their own streams, spans and counters",
          "[profiler]") {
  std::vector<std::string> texts(2);
  profiler::start();
  for (int rank = 0; rank < 2; ++rank) {
    std::thread([&, rank] {
      profiler::claim_thread();
      const Stream s = make_stream({}, fmt::format("stream of {}", rank));
      s.submit(rank == 0 ? "task of 0" : "task of 1", [] {});
      s.synchronize();
      { const profiler::HostSpan span("work", rank == 0 ? "zero" : "one"); }
      profiler::add_counter({profiler::thread_owner(), profiler::now_ns(), {rank + 1}});
      profiler::TraceProcess process{.id = rank, .owner = profiler::thread_owner()};
      process.counters[0] = "parameters";
      texts[static_cast<size_t>(rank)] = profiler::chrome_events(process);
    }).join();
  }
  profiler::stop();
  for (int rank = 0; rank < 2; ++rank) {
    const std::string& text = texts[static_cast<size_t>(rank)];
    CAPTURE(rank, text);
    const auto has = [&](const char* what) { return text.find(what) != std::string::npos; };
    CHECK(has("task of 0") == (rank == 0));
    CHECK(has("stream of 1") == (rank == 1));
    CHECK(has("work zero") == (rank == 0));
    CHECK(has("\"parameters\":2") == (rank == 1));
  }
}

TEST_CASE("profiler: spans are told to a sink, nested and balanced", "[profiler]") {
  static std::vector<std::string> told;
  profiler::set_span_sink({[](const char* name) { told.push_back(std::string("+") + name); },
                           [] { told.push_back("-"); }});
  {
    const profiler::HostSpan step("step");
    profiler::HostSpan unit("forward", "blocks.0");
    unit.end();
    const profiler::HostSpan other("backward", "blocks.0");
  }
  profiler::set_span_sink({});
  { const profiler::HostSpan nobody("listens"); }
  CHECK(told == std::vector<std::string>{"+step", "+forward blocks.0", "-", "+backward blocks.0",
                                         "-", "-"});
}

TEST_CASE("profiler: a trace that cannot be written is an error", "[profiler]") {
  CHECK_THROWS_AS(profiler::write_chrome_trace("/nowhere/trace.json"), IoError);
  CHECK(error_of([] {
          profiler::write_chrome_trace("/nowhere/trace.json");
        }).find("trace: cannot write /nowhere/trace.json") == 0);
}

}  // namespace
}  // namespace tessera
