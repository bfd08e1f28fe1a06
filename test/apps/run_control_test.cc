#include "apps/run_control.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "apps/metrics.h"
#include "apps/run_dir.h"
#include "core/files.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::read_file;
using tessera::testing::TempDir;

namespace {

/// How a child process that does this ends, as waitpid says; it gets each signal once the one
/// before is handled. The child writes a byte when it is ready for the next.
template <class F>
int end_of_child(const std::vector<int>& signals, const F& body, int pause_ms = 0) {
  int ready[2], never[2];
  REQUIRE(::pipe(ready) == 0);
  REQUIRE(::pipe(never) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ready[0]);
    ::close(never[1]);
    ::signal(SIGHUP, SIG_DFL);  // ignored where the tests run under nohup
    const auto say_ready = [&] { return ::write(ready[1], "x", 1) == 1; };
    const auto block_in_read = [&] {
      char byte;
      return ::read(never[0], &byte, 1) == 0;
    };
    body(say_ready, block_in_read);
    ::_exit(0);
  }
  ::close(ready[1]);
  ::close(never[0]);
  char byte;
  for (const int number : signals) {
    REQUIRE(::read(ready[0], &byte, 1) == 1);
    if (pause_ms > 0) ::usleep(static_cast<useconds_t>(pause_ms) * 1000);
    ::kill(child, number);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(never[1]);
  ::close(ready[0]);
  return status;
}

void set_status_report(const TempDir& dir) {
  write_status(dir.path(), RunState::kRunning, 0);
  const auto step = std::make_shared<std::atomic<int64_t>>(41);
  set_fatal_report({.path = dir / "status.json",
                    .text = fatal_status_text(),
                    .step = step,
                    .who = "rank 1: ",
                    .only_if_running = true});
}

nlohmann::json status_in(const TempDir& dir) {
  return nlohmann::json::parse(read_file(dir / "status.json"));
}

struct Named {
  int number;
  const char* name;
};
constexpr Named kAsk[] = {{SIGTERM, "SIGTERM"},
                          {SIGINT, "SIGINT"},
                          {SIGHUP, "SIGHUP"},
                          {SIGUSR1, "SIGUSR1"},
                          {SIGXCPU, "SIGXCPU"}};

}  // namespace

TEST_CASE("run_control: each signal that asks for an end is a preemption, once steps have begun",
          "[run_control]") {
  for (const auto& [number, name] : kAsk) {
    CAPTURE(name);
    const int status = end_of_child({number}, [&](const auto& say_ready, const auto&) {
      const SignalHandlers handlers;
      SignalHandlers::begin_steps();
      say_ready();
      while (!is_preemption_requested()) ::usleep(1000);
      ::_exit(preemption_cause() == name ? 17 : 18);
    });
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 17);
  }
}

TEST_CASE("run_control: before the first step a signal ends a process that is blocked in a read",
          "[run_control]") {
  for (const auto& [number, name] : kAsk) {
    CAPTURE(name);
    const TempDir dir;
    const std::string other = dir.write("other", "of somebody else");
    REQUIRE(::symlink(other.c_str(), (dir / "status.json.died").c_str()) == 0);
    const int status =
        end_of_child({number}, [&](const auto& say_ready, const auto& block_in_read) {
          const SignalHandlers handlers;
          set_status_report(dir);
          say_ready();
          block_in_read();
        });
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == number);
    CHECK(status_in(dir)["state"] == "failed");
    CHECK(status_in(dir)["step"] == 41);
    CHECK(status_in(dir)["why"] == std::string("rank 1: ended before the first step by ") + name);
    CHECK(read_file(other) == "of somebody else");  // the link was replaced, not followed
  }
}

TEST_CASE("run_control: a signal that comes when the run is over changes nothing",
          "[run_control]") {
  for (const auto& [number, name] : kAsk) {
    CAPTURE(name);
    const int status = end_of_child({number}, [&](const auto& say_ready, const auto&) {
      {
        const SignalHandlers handlers;
        SignalHandlers::end_run();
      }
      say_ready();
      while (!is_preemption_requested()) ::usleep(1000);
      ::_exit(17);
    });
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 17);
  }
}

TEST_CASE(
    "run_control: the second of an impatient person ends at once, what repeats itself does not",
    "[run_control]") {
  const auto after = [](const std::vector<int>& signals, const TempDir& dir) {
    return end_of_child(
        signals,
        [&](const auto& say_ready, const auto& block_in_read) {
          const SignalHandlers handlers;
          SignalHandlers::begin_steps();
          set_status_report(dir);
          say_ready();
          while (!is_preemption_requested()) ::usleep(1000);
          say_ready();  // the first is handled
          block_in_read();
        },
        /*pause_ms=*/150);
  };
  for (const auto& [first, second, name] :
       std::vector<std::tuple<int, int, std::string>>{{SIGTERM, SIGTERM, "SIGTERM"},
                                                      {SIGINT, SIGINT, "SIGINT"},
                                                      {SIGTERM, SIGINT, "SIGINT"},
                                                      {SIGUSR1, SIGUSR1, "SIGUSR1"}}) {
    CAPTURE(name);
    const TempDir dir;
    const int status = after({first, second}, dir);
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == second);
    CHECK(status_in(dir)["why"] == "rank 1: ended by a second " + name);
  }
  // A closing terminal, a limit of processor time, and a warning before the request itself; then
  // timeout(1), which sends its signal twice.
  const std::vector<std::vector<int>> patient = {
      {SIGHUP, SIGHUP, SIGHUP}, {SIGXCPU, SIGXCPU}, {SIGUSR1, SIGTERM}, {SIGHUP, SIGTERM}};
  for (const auto& signals : patient) {
    CAPTURE(signals);
    const TempDir dir;
    const pid_t child = ::fork();
    if (child == 0) {
      const SignalHandlers handlers;
      SignalHandlers::begin_steps();
      set_status_report(dir);
      for (const int number : signals) {
        ::raise(number);
        ::usleep(120'000);
      }
      ::_exit(is_preemption_requested() ? 17 : 18);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 17);
    CHECK(status_in(dir)["state"] == "running");
  }
  const pid_t child = ::fork();
  if (child == 0) {
    const SignalHandlers handlers;
    SignalHandlers::begin_steps();
    ::raise(SIGTERM);
    ::raise(SIGTERM);
    ::_exit(17);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 17);
}

TEST_CASE("run_control: a SIGHUP that was ignored at the start stays ignored", "[run_control]") {
  const int status = end_of_child({}, [&](const auto&, const auto&) {
    ::signal(SIGHUP, SIG_IGN);
    const SignalHandlers handlers;
    ::raise(SIGHUP);  // before the first step: it would be the end
    SignalHandlers::begin_steps();
    ::raise(SIGHUP);
    ::_exit(is_preemption_requested() ? 18 : 17);
  });
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 17);
}

TEST_CASE("run_control: writes to a pipe without a reader, or beyond a limit, are errors",
          "[run_control]") {
  const TempDir dir;
  const int status = end_of_child({}, [&](const auto&, const auto&) {
    const SignalHandlers handlers;
    int ends[2];
    if (::pipe(ends) != 0) ::_exit(1);
    ::close(ends[0]);
    if (::write(ends[1], "x", 1) != -1 || errno != EPIPE) ::_exit(2);
    const rlimit limit{10, 10};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      write_file_atomically(dir / "file", std::string(100, 'x'));
      ::_exit(3);
    } catch (const IoError& error) {
      const bool is_named = std::string(error.what()).find("File too large") != std::string::npos;
      ::_exit(is_named ? 17 : 4);
    }
  });
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 17);
}

TEST_CASE("run_control: a limit of processor time warns before it ends", "[run_control]") {
  for (const auto& [seconds, expected] : {std::pair{100, 90}, {5, 4}, {3600, 3540}, {1, 1}}) {
    CAPTURE(seconds);
    const int status = end_of_child({}, [&, s = seconds, e = expected](const auto&, const auto&) {
      rlimit limit{static_cast<rlim_t>(s), static_cast<rlim_t>(s)};
      ::setrlimit(RLIMIT_CPU, &limit);
      const SignalHandlers handlers;
      ::getrlimit(RLIMIT_CPU, &limit);
      const bool is_right =
          limit.rlim_cur == static_cast<rlim_t>(e) && limit.rlim_max == static_cast<rlim_t>(s);
      ::_exit(is_right ? 17 : 18);
    });
    CHECK(WEXITSTATUS(status) == 17);
  }
}

TEST_CASE("run_control: death by a signal that can be caught leaves failed and why",
          "[run_control]") {
  for (const auto& [number, name] :
       {Named{SIGSEGV, "SIGSEGV"}, Named{SIGBUS, "SIGBUS"}, Named{SIGABRT, "SIGABRT"},
        Named{SIGFPE, "SIGFPE"}, Named{SIGILL, "SIGILL"}}) {
    CAPTURE(name);
    const TempDir dir;
    const auto die = [&](bool is_sent) {
      return end_of_child({}, [&](const auto&, const auto&) {
        for (const int n : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL}) ::signal(n, SIG_DFL);
        ::close(STDERR_FILENO);
        const rlimit no_core{0, 0};
        ::setrlimit(RLIMIT_CORE, &no_core);
        const SignalHandlers handlers;
        set_status_report(dir);
        volatile uintptr_t nowhere = 8;
        if (!is_sent && number == SIGSEGV) *reinterpret_cast<volatile int*>(nowhere) = 1;
        if (!is_sent && number == SIGABRT) std::abort();
        ::raise(number);
      });
    };
    for (const bool is_sent : {false, true}) {
      const int status = die(is_sent);
      CHECK(WIFSIGNALED(status));
      CHECK(WTERMSIG(status) == number);
      CHECK(status_in(dir)["state"] == "failed");
      CHECK(status_in(dir)["step"] == 41);
      const std::string why = status_in(dir)["why"];
      CHECK(why.find(std::string("rank 1: ended by ") + name + " (") == 0);
    }
  }
}

TEST_CASE("run_control: who died first has said why", "[run_control]") {
  const TempDir dir;
  const int status = end_of_child({}, [&](const auto&, const auto&) {
    ::signal(SIGABRT, SIG_DFL);
    ::close(STDERR_FILENO);
    const SignalHandlers handlers;
    set_status_report(dir);
    write_status(dir.path(), RunState::kFailed, 40, "a bad file");
    std::abort();
  });
  CHECK(WIFSIGNALED(status));
  CHECK(status_in(dir)["why"] == "a bad file");
  CHECK(status_in(dir)["step"] == 40);
}

TEST_CASE("run_control: a log that nobody reads any more asks for a preemption, once",
          "[run_control]") {
  const TempDir dir;
  for (const bool is_closed : {true, false}) {
    CAPTURE(is_closed);
    int num_calls = 0;
    const int status = end_of_child({}, [&](const auto&, const auto&) {
      const SignalHandlers handlers;
      int ends[2];
      if (::pipe(ends) != 0) ::_exit(1);
      ::close(ends[0]);
      ::close(STDERR_FILENO);
      std::FILE* const out = is_closed ? ::fdopen(ends[1], "w") : std::fopen("/dev/full", "w");
      {
        MetricsLog log(
            {.dir = dir.path(), .num_steps = 3, .out = out, .on_out_closed = [&] { ++num_calls; }});
        for (int step = 1; step <= 3; ++step) {
          StepMetrics m;
          m.step = step;
          log.add(m);
        }
        log.print("a line");
      }
      ::_exit(num_calls == (is_closed ? 1 : 0) ? 17 : 18);
    });
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 17);
    const std::string metrics = read_file(dir / "metrics.jsonl");
    CHECK(std::count(metrics.begin(), metrics.end(), '\n') == 3);
  }
}

TEST_CASE("run_control: the advice for a loss that is not finite names each cause that there is",
          "[run_control]") {
  Config config;
  config.optim.schedule.peak_lr = 0.01;
  config.optim.schedule.warmup_steps = 3;
  config.optim.clip = 1;
  const std::string rate =
      "more often than the data the cause is: a learning rate that is too high (0.005 in this step; "
      "lower optim.lr = 0.01 or raise optim.warmup_steps = 3)";
  CHECK(nonfinite_advice(config, 0.005) == rate);
  config.optim.clip = 0;
  const std::string clip = rate + ", gradients without a limit (set optim.clip = 1)";
  CHECK(nonfinite_advice(config, 0.005) == clip);
  config.precision.param_dtype = kF16;
  CHECK(nonfinite_advice(config, 0.005) ==
        clip + ", the range of f16 (set precision.param_dtype = bf16)");
}

TEST_CASE("run_control: a loss that does not fall is told from one that does", "[run_control]") {
  uint32_t noise = 1;
  const auto losses = [&](double slope, double spread) {
    std::vector<double> all;
    for (int i = 0; i < 50; ++i) {
      noise = noise * 1664525u + 1013904223u;
      all.push_back(4.0 + slope * i + spread * (static_cast<double>(noise) / 0x1p32 - 0.5));
    }
    return all;
  };
  CHECK(flat_loss(losses(-0.02, 0.2), true).empty());
  CHECK(flat_loss(losses(-0.001, 1e-3), true).empty());
  CHECK(flat_loss(losses(0, 0.2), true).starts_with("the loss stays flat: "));
  CHECK(flat_loss(losses(0.02, 0.2), true).starts_with("the loss rises: "));
  // Of a trained model only one that is a constant.
  CHECK(flat_loss(losses(0, 0.2), false).empty());
  const std::string constant =
      "the loss stays flat: 4.0000 (mean of steps 1 to 16), 4.0000 (of the last 16)";
  for (const bool is_new : {false, true}) CHECK(flat_loss(losses(0, 0), is_new) == constant);
  // Steps that were not finite are none.
  std::vector<double> some = losses(0, 0);
  some[3] = NAN, some[40] = INFINITY;
  CHECK(flat_loss(some, true) == constant);
  CHECK(flat_loss(std::vector<double>(8, 1.0), true).empty());
}

TEST_CASE("run_control: parameters that do not train, by group and by name", "[run_control]") {
  const std::vector<std::string> trained = {"a.w", "a.b", "b.w", "b.b", "head.w"};
  const std::vector<dist::ParameterGroup> groups = {{.match = "*.b"}, {.match = "head.*, b.w"}};
  using Texts = std::vector<std::string>;
  CHECK(dead_parameters({}, groups, trained).empty());
  CHECK(dead_parameters({.without_gradient = {"a.b", "b.b"}}, groups, trained) ==
        Texts{"no gradient comes to the group *.b (2 parameters)"});
  CHECK(dead_parameters({.without_gradient = {"a.b"}, .unchanged = {"b.w", "head.w", "a.w"}},
                        groups, trained) ==
        Texts{"no gradient comes to a.b",
              "updates do not change the group head.*, b.w (2 parameters)",
              "updates do not change a.w"});
}
