#include "apps/metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/random.h"
#include "test/core/formats/event_reader.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::read_file;

namespace {

StepMetrics example() {
  StepMetrics m;
  m.step = 100;
  m.loss = 2.45312;
  m.grad_norm = 0.81234;
  m.lr = 1e-3;
  m.tokens_per_second = 12345;
  m.peak_bytes = int64_t{1} << 27;
  return m;
}

}  // namespace

TEST_CASE("metrics: numbers in JSON read back bit by bit", "[metrics]") {
  for (uint32_t i = 0; i < 2000; ++i) {
    const auto bits = philox(make_key(1, 2), 0, i);
    StepMetrics m = example();
    m.loss = std::bit_cast<float>(bits[0] & 0xbfffffffu);  // any finite f32
    if (!std::isfinite(m.loss)) continue;
    m.grad_norm = std::bit_cast<double>((uint64_t{bits[1] & 0xbfffffffu} << 32) | bits[2]);
    if (!std::isfinite(m.grad_norm)) continue;
    m.val_loss = m.loss;
    const auto object = nlohmann::json::parse(to_json(m));
    REQUIRE(object["loss"].get<double>() == m.loss);
    REQUIRE(object["loss"].get<float>() == static_cast<float>(m.loss));
    REQUIRE(object["grad_norm"].get<double>() == m.grad_norm);
    REQUIRE(object["val_loss"].get<double>() == *m.val_loss);
  }
}

TEST_CASE("metrics: JSON has the promised keys, val_loss only where evaluated", "[metrics]") {
  const auto object = nlohmann::json::parse(to_json(example()));
  for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens_per_second", "peak_bytes"}) {
    CAPTURE(key);
    CHECK(object.contains(key));
  }
  CHECK(object["step"] == 100);
  CHECK(object["peak_bytes"] == 134217728);
  for (const char* key : {"val_loss", "mfu", "loss_scale", "skipped"}) {
    CAPTURE(key);
    CHECK_FALSE(object.contains(key));
  }
  StepMetrics scaled = example();
  scaled.loss_scale = 1024;
  scaled.skipped = 2;
  CHECK(nlohmann::json::parse(to_json(scaled))["loss_scale"] == 1024);
  CHECK(nlohmann::json::parse(to_json(scaled))["skipped"] == 2);
  StepMetrics bad = example();
  bad.loss = std::numeric_limits<double>::quiet_NaN();
  CHECK(nlohmann::json::parse(to_json(bad))["loss"].is_null());
}

TEST_CASE("metrics: the printed line", "[metrics]") {
  StepMetrics m = example();
  CHECK(to_line(m, 2000) ==
        "step  100/2000  loss 2.4531  grad_norm 0.812  lr 1.00e-03  12.3k tok/s  peak 0.12 GiB");
  m.mfu = 0.456;
  m.val_loss = 2.5;
  m.tokens_per_second = 2345678;
  CHECK(to_line(m, 100) ==
        "step 100/100  loss 2.4531  grad_norm 0.812  lr 1.00e-03  2.35M tok/s  peak 0.12 GiB  "
        "mfu 45.6%  val_loss 2.5000");
  m.figures = {{"val_f1", 0.25}, {"eval.piqa.acc", 0.5}, {"eval.piqa.acc_stderr", 0.125}};
  CHECK(to_line(m, 100).ends_with("mfu 45.6%  val_loss 2.5000  val_f1 0.2500"));  // tasks: apart
  const auto object = nlohmann::json::parse(to_json(m));
  for (const auto& [name, value] : m.figures) CHECK(object[name] == value);
  m = example();
  m.loss_scale = 32768;
  m.skipped = 0;
  CHECK(to_line(m, 100).ends_with("peak 0.12 GiB  loss_scale 32768"));
  m.skipped = 3;
  CHECK(to_line(m, 100).ends_with("peak 0.12 GiB  loss_scale 32768  skipped 3"));
  m = example();
  m.loss = m.grad_norm = -std::numeric_limits<double>::quiet_NaN();
  CHECK(to_line(m, 100).starts_with("step 100/100  loss nan  grad_norm nan  lr"));
  CHECK(progress_bar(m, 200, 42, 70).find("loss nan") != std::string::npos);
  m.exposed = 0.03;
  CHECK(to_line(m, 100).ends_with("peak 0.12 GiB  exposed 3.0%"));
}

TEST_CASE("metrics: rate and exposed time average over the same steps", "[metrics]") {
  const StepRate::TimePoint start{};
  const auto at = [&](int ms) { return start + std::chrono::milliseconds(ms); };
  StepRate rate;
  rate.restart(at(0));
  rate.add(at(10), 1.0);
  CHECK(rate.step_ms() == 10);
  CHECK(*rate.exposed() == Approx(0.1));
  // Two steps that the host sees at once: 25 ms of the last one's wait are not 250 % of a step.
  rate.add(at(50), 2.0);
  rate.add(at(50), 25.0);
  CHECK(rate.step_ms() == Approx(50.0 / 3));
  CHECK(*rate.exposed() == Approx(28.0 / 50));
  // What came before a restart does not count.
  rate.restart(at(1000));
  rate.add(at(1010), 3.0);
  CHECK(rate.step_ms() == 10);
  CHECK(*rate.exposed() == Approx(0.3));
  rate.add(at(1011), 100.0);
  CHECK(*rate.exposed() == 1.0);
  // The last 16 steps.
  rate.restart(at(0));
  for (int i = 1; i <= 40; ++i) rate.add(at(i <= 24 ? i : 24 + 2 * (i - 24)), i <= 24 ? 1.0 : 0.5);
  CHECK(rate.step_ms() == 2);
  CHECK(*rate.exposed() == Approx(0.25));
  StepRate alone;
  alone.restart(at(0));
  alone.add(at(5), std::nullopt);
  CHECK_FALSE(alone.exposed().has_value());
}

TEST_CASE("metrics: the slowest rank is told, and printed when it stays it", "[metrics]") {
  StepMetrics m = example();
  m.step_ms = 80;
  CHECK_FALSE(nlohmann::json::parse(to_json(m)).contains("slowest_rank"));
  m.slowest_rank = 2;
  m.slowest_behind_ms = 20;
  const auto object = nlohmann::json::parse(to_json(m));
  CHECK(object["slowest_rank"] == 2);
  CHECK(object["slowest_behind_ms"] == 20);
  CHECK(to_line(m, 200).find("slow rank") == std::string::npos);
  m.is_slow = true;
  CHECK(to_line(m, 200).ends_with("  slow rank 2 (the others wait 25% of a step for it)"));
}

TEST_CASE("metrics: the progress bar keeps its width", "[metrics]") {
  StepMetrics m = example();
  CHECK(progress_bar(m, 200, 42, 70) ==
        "[============>            ]  50%  step 100/200  loss 2.4531  0:42 left");
  CHECK(progress_bar(m, 100, 0, 70).starts_with("[=========================] 100%"));
  CHECK(progress_bar(m, 1000, 3723, 80).ends_with("1:02:03 left"));
  for (int width = 0; width < 90; ++width) {
    CHECK(progress_bar(m, 200, 42, width).size() <= static_cast<size_t>(width));
  }
  // Narrow: without the loss, then without the time.
  CHECK(progress_bar(m, 200, 42, 44) == "[======>     ]  50%  step 100/200  0:42 left");
  CHECK(progress_bar(m, 200, 42, 25) == "[==> ]  50%  step 100/200");
}

TEST_CASE("metrics: the terminal's width is that of COLUMNS where there is no terminal",
          "[metrics]") {
  if (::isatty(STDOUT_FILENO) == 1) return;  // then it is the terminal's
  ::unsetenv("OMPI_COMM_WORLD_SIZE");
  ::setenv("COLUMNS", "44", 1);
  CHECK(terminal_width() == 44);
  ::setenv("COLUMNS", "wide", 1);
  CHECK(terminal_width() == 80);
  ::unsetenv("COLUMNS");
  CHECK(terminal_width() == 80);
}

TEST_CASE("metrics: the log has a JSON line a step and prints every n-th", "[metrics]") {
  const testing::TempDir dir;
  dir.write("metrics.jsonl", "old\n");
  std::FILE* out = std::tmpfile();
  {
    MetricsLog log(
        {.dir = dir.path(), .num_steps = 5, .log_every = 3, .progress_bar = false, .out = out});
    for (int64_t step = 1; step <= 5; ++step) {
      StepMetrics m = example();
      m.step = step;
      if (step == 4) m.val_loss = 2;
      log.add(m);
    }
  }
  const std::string lines = read_file(dir / "metrics.jsonl");
  CHECK(std::count(lines.begin(), lines.end(), '\n') == 5);
  CHECK(lines.starts_with("{\"step\":1,"));
  std::rewind(out);
  std::string printed(4096, '\0');
  printed.resize(std::fread(printed.data(), 1, printed.size(), out));
  std::fclose(out);
  CHECK(std::count(printed.begin(), printed.end(), '\n') == 4);  // steps 1, 3, 4 (evaluated), 5
  CHECK(printed.find("step 2/5") == std::string::npos);
  CHECK(printed.find('\r') == std::string::npos);
}

TEST_CASE("metrics: a recorded line is completed with its validation loss", "[metrics]") {
  const testing::TempDir dir;
  std::FILE* out = std::tmpfile();
  const auto lines = [&] { return read_file(dir / "metrics.jsonl"); };
  StepMetrics first = example(), last = example();
  first.step = 1, last.step = 2;
  std::string open, whole;
  {
    MetricsLog log({.dir = dir.path(), .num_steps = 2, .out = out});
    log.add(first);
    log.record(last);
    open = lines();
    CHECK(open == to_json(first) + "\n" + to_json(last) + "\n");
    last.val_loss = 0.1;
    log.add(last);
    whole = lines();
    CHECK(whole == to_json(first) + "\n" + to_json(last) + "\n");
  }
  {  // a rewind comes to the same step again, with a line of its own
    MetricsLog log({.dir = dir.path(), .num_steps = 2, .out = out});
    log.add(first);
    log.add(first);
    CHECK(lines() == to_json(first) + "\n" + to_json(first) + "\n");
  }
  // Ended before the evaluation, and gone on with.
  dir.write("metrics.jsonl", open);
  MetricsLog log({.dir = dir.path(), .num_steps = 2, .out = out, .first_step = 2});
  CHECK(lines() == open);
  log.add_evaluation(2, 0.1);
  CHECK(lines() == whole);
  log.add_evaluation(2, 0.5);  // it has one
  CHECK(lines() == whole);
  std::fclose(out);
  // Figures of tasks alone are an evaluation too.
  const Figures figures = {{"eval.piqa.acc", 0.5}, {"eval.piqa.acc_stderr", 0.25}};
  dir.write("metrics.jsonl", open);
  last.val_loss.reset(), last.figures = figures;
  for (int life = 0; life < 2; ++life) {
    std::FILE* const quiet = std::tmpfile();
    MetricsLog again({.dir = dir.path(), .num_steps = 2, .out = quiet, .first_step = 2});
    again.add_evaluation(2, std::nullopt, figures);
    CHECK(lines() == to_json(first) + "\n" + to_json(last) + "\n");
    CHECK(std::ftell(quiet) == 0);  // which are printed apart
    std::fclose(quiet);
  }
}

namespace {

/// All that a line may have.
StepMetrics full_example(int64_t step) {
  StepMetrics m = example();
  m.step = step, m.tokens = 4096 * step, m.step_ms = 12.5, m.reserved_bytes = 1 << 28;
  m.peak_by_class = {6, 5, 4, 3, 2, 1};
  m.mfu = 0.5, m.loss_scale = 1024, m.skipped = 2;
  m.exposed_gather_ms = 1.5, m.exposed_reduce_ms = 2.5;
  m.exposed_units = {{"blocks.0", 1, 2}, {"head", 0.5, 0.25}};
  m.slowest_rank = 3, m.slowest_behind_ms = 4;
  MemoryTimeline::Result timeline{{{1, 2, 3, 4, 5, 6}}, {{0, "forward"}}};
  m.memory_over_step = std::make_shared<MemoryTimeline::Result>(std::move(timeline));
  m.unit_norms = {{"blocks.0", 0.25}, {"head", 0.5}};
  m.val_loss = 2.25;
  m.rewards = StepMetrics::Rewards{0.5, 0.125, 0.75};
  m.figures = {{"val_f1", 0.375}, {"eval.piqa.acc", 0.625}};
  return m;
}

}  // namespace

TEST_CASE("metrics: each number of a line has a tag in the event file", "[metrics]") {
  const testing::TempDir dir;
  std::FILE* out = std::tmpfile();
  {
    MetricsLog log({.dir = dir.path(), .num_steps = 2, .out = out, .has_events = true});
    log.add_config("a = 1", {{"optim.lr", 1e-3}});
    for (int64_t step : {1, 2}) log.add(full_example(step));
    log.add_sample(2, "a text");
  }
  std::fclose(out);
  const std::map<std::string, float> expected = {{"loss/train", 2.45312f},
                                                 {"loss/validation", 2.25f},
                                                 {"optimizer/grad_norm", 0.81234f},
                                                 {"optimizer/lr", 1e-3f},
                                                 {"optimizer/loss_scale", 1024},
                                                 {"optimizer/skipped", 2},
                                                 {"speed/tokens_per_second", 12345},
                                                 {"speed/step_ms", 12.5f},
                                                 {"speed/tokens", 8192},
                                                 {"speed/mfu", 0.5f},
                                                 {"memory/peak_bytes", 1 << 27},
                                                 {"memory/reserved_bytes", 1 << 28},
                                                 {"memory/parameters", 6},
                                                 {"memory/gradients", 5},
                                                 {"memory/optimizer", 4},
                                                 {"memory/gathered", 3},
                                                 {"memory/activations", 2},
                                                 {"memory/other", 1},
                                                 {"exposed/gather_ms", 1.5f},
                                                 {"exposed/reduce_ms", 2.5f},
                                                 {"exposed_units/blocks.0/gather_ms", 1},
                                                 {"exposed_units/blocks.0/reduce_ms", 2},
                                                 {"exposed_units/head/gather_ms", 0.5f},
                                                 {"exposed_units/head/reduce_ms", 0.25f},
                                                 {"slow_ranks/slowest_rank", 3},
                                                 {"slow_ranks/behind_ms", 4},
                                                 {"unit_norms/blocks.0", 0.25f},
                                                 {"unit_norms/head", 0.5f},
                                                 {"preference/chosen", 0.5f},
                                                 {"preference/rejected", 0.125f},
                                                 {"preference/margin", 0.375f},
                                                 {"preference/accuracy", 0.75f},
                                                 {"validation/f1", 0.375f},
                                                 {"eval/piqa.acc", 0.625f}};
  std::map<std::string, float> shown;
  for (const auto& [tag, steps] : testing::shown_scalars(dir.path())) {
    CAPTURE(tag);
    CHECK(steps.size() == 2);
    shown[tag] = steps.at(2);
  }
  CHECK(shown == expected);
  const auto events = testing::read_events(testing::event_files(dir.path()).at(0));
  CHECK(events.at(1).step == 1);
  CHECK(events.at(2).texts.at("config") == "    a = 1");
  CHECK(std::get<double>(events.at(3).settings.at("optim.lr")) == 1e-3);
  CHECK(events.back().step == 2);
  CHECK(events.back().texts.at("sample") == "    a text");
}

TEST_CASE("metrics: a resume, a rewind and a late validation loss are told to the event file",
          "[metrics]") {
  const testing::TempDir dir;
  std::FILE* out = std::tmpfile();
  const auto of_step = [](int64_t step, double loss) {
    StepMetrics m = example();
    m.step = step, m.loss = loss;
    return m;
  };
  const auto shown = [&](const char* tag) { return testing::shown_scalars(dir.path())[tag]; };
  const auto log_of = [&](int64_t first_step) {
    return std::make_unique<MetricsLog>(MetricsLog::Options{.dir = dir.path(),
                                                            .num_steps = 9,
                                                            .out = out,
                                                            .first_step = first_step,
                                                            .has_events = true});
  };
  {
    const auto log = log_of(0);
    for (int64_t step = 1; step <= 4; ++step) log->add(of_step(step, 1));
    log->add(of_step(3, 2));  // after a rewind
    CHECK(shown("loss/train") == std::map<int64_t, float>{{1, 1}, {2, 1}, {3, 2}});
    StepMetrics last = of_step(4, 2);
    log->record(last);
    last.val_loss = 5;
    log->add(last);
    CHECK(shown("loss/train").size() == 4);
    CHECK(shown("loss/validation") == std::map<int64_t, float>{{4, 5}});
  }
  const auto log = log_of(2);
  CHECK(shown("loss/train") == std::map<int64_t, float>{{1, 1}, {2, 1}});
  CHECK(shown("loss/validation").empty());
  log->add_evaluation(2, 6, {{"val_f1", 0.5}});
  log->add(of_step(3, 3));
  CHECK(shown("loss/train") == std::map<int64_t, float>{{1, 1}, {2, 1}, {3, 3}});
  CHECK(shown("loss/validation") == std::map<int64_t, float>{{2, 6}});
  CHECK(shown("validation/f1") == std::map<int64_t, float>{{2, 0.5}});
  std::fclose(out);
}

TEST_CASE("metrics: an event file that cannot be begun is an error before the first step",
          "[metrics]") {
  const testing::TempDir dir;
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto old_action = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{40, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  const std::string error = error_of([&] { MetricsLog({.dir = dir.path(), .has_events = true}); });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_action);
  CHECK(error.starts_with(dir / "events.out.tfevents."));
  CHECK(error.ends_with(": cannot be written: File too large"));
  CHECK(testing::event_files(dir.path()).empty());
}

TEST_CASE("metrics: what is printed cannot steer the terminal", "[metrics]") {
  const testing::TempDir dir;
  std::FILE* out = std::tmpfile();
  {
    MetricsLog log({.dir = dir.path(), .out = out});
    log.print("model: a\x1b[2J\x07/b\nnext\rline " + std::string(10'000, 'x'));
    log.print_text("sample:\n\tone\x1b]0;title\x07 \xff\n" + std::string(10'000, 'y'));
  }
  std::rewind(out);
  std::string printed(32768, '\0');
  printed.resize(std::fread(printed.data(), 1, printed.size(), out));
  std::fclose(out);
  CHECK(printed.starts_with("model: a\\x1b[2J\\x07/b\nnext\\rline xxx"));
  CHECK(std::count(printed.begin(), printed.end(), 'x') < 4200);
  CHECK(printed.find("\nsample:\n\tone\\x1b]0;title\\x07 \\xff\nyyy") != std::string::npos);
  CHECK(printed.ends_with("\n" + std::string(10'000, 'y') + "\n"));  // a text is not cut
}

TEST_CASE("metrics: what cannot be written is an error, and the file keeps whole lines",
          "[metrics]") {
  const testing::TempDir dir;
  CHECK(error_of([&] { MetricsLog({.dir = dir / "none"}); }) ==
        dir / "none/metrics.jsonl: cannot be written: No such file or directory");
  // Of a run that goes on, the lines up to its step stay; half a line at the end does not.
  StepMetrics m = example();
  m.step = 1;
  const std::string first = to_json(m) + "\n";
  dir.write("metrics.jsonl", first + first.substr(0, first.size() / 2));
  std::FILE* out = std::tmpfile();
  MetricsLog log({.dir = dir.path(), .num_steps = 3, .out = out, .first_step = 1});
  CHECK(read_file(dir / "metrics.jsonl") == first);
  // A file may be no longer than this line and half of the next: as on a full disk.
  m.step = 2;
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto old_action = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{first.size() * 3 / 2, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  const std::string error = error_of([&] { log.add(m); });
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK(error == dir / "metrics.jsonl: cannot be written: File too large");
  CHECK(read_file(dir / "metrics.jsonl") == first);
  log.add(m);
  CHECK(read_file(dir / "metrics.jsonl") == first + to_json(m) + "\n");
  std::signal(SIGXFSZ, old_action);
  std::fclose(out);
}
