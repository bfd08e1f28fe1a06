#include "apps/command_line.h"

#include "apps/bench/bench.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;

namespace {

struct Options {
  int64_t runs = 20;
  double rate = 0.5;
  std::string dir = "out";
};

/// What a program prints, and what its options are, or the error.
std::string read(Options& options, const std::vector<std::string>& arguments) {
  CommandLine app("Does something.", "tessera-something");
  app.add_option("--runs", options.runs, "runs of each case")->check(in_range<int64_t>(1, 100));
  app.add_option("--rate", options.rate, "a rate")->check(in_range(-1.0));
  app.add_option("--dir", options.dir, "a directory");
  std::FILE* out = std::tmpfile();
  const auto status = app.read(arguments, out);
  std::rewind(out);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), out));
  std::fclose(out);
  CHECK(status.has_value() == !text.empty());
  if (status) CHECK(*status == 0);
  return text;
}

}  // namespace

TEST_CASE("command_line: help has what each option is, its range and its default", "[apps]") {
  Options options;
  const std::string help = read(options, {"--help"});
  for (const char* text : {"Does something.", "--runs", "1 to 100", "=20", "runs of each case",
                           ">= -1", "=0.5", "=out", "--version", "-h,--help"}) {
    CAPTURE(help, text);
    CHECK(help.find(text) != std::string::npos);
  }
}

TEST_CASE("command_line: the version names the program and what is built in", "[apps]") {
  Options options;
  const std::string version = read(options, {"--runs=3", "--version"});
  CHECK(version == version_text("tessera-something"));
  CHECK(version.starts_with("tessera-something 0."));
  CHECK(version.find("oneDNN") != std::string::npos);
}

TEST_CASE("command_line: values of all forms arrive, negative ones too", "[apps]") {
  Options options;
  CHECK(read(options, {"--runs", "3", "--rate", "-0.25", "--dir=a b"}).empty());
  CHECK(options.runs == 3);
  CHECK(options.rate == -0.25);
  CHECK(options.dir == "a b");
}

TEST_CASE("command_line: what is wrong is a ConfigError in one style", "[apps]") {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--runz=3"},
       "command line: The following argument was not expected: --runz=3 (see --help)"},
      {{"word"}, "command line: The following argument was not expected: word (see --help)"},
      {{"--runs=0"}, "command line: --runs: Value 0 not in range 1 to 100 (see --help)"},
      {{"--runs=x"}, "command line: --runs: Value x not in range 1 to 100 (see --help)"},
      {{"--dir"}, "command line: --dir: 1 required TEXT missing (see --help)"},
  };
  for (const auto& [arguments, message] : cases) {
    Options options;
    CAPTURE(arguments);
    CHECK(error_of([&, &arguments = arguments] { read(options, arguments); }) == message);
  }
}

TEST_CASE("command_line: a word that is no subcommand is an error with the nearest", "[apps]") {
  CommandLine app("Does something.", "tessera-something");
  app.add_subcommand("export", "");
  app.add_subcommand("verify", "");
  CHECK(error_of([&] {
          app.read({"exprot", "x"}, nullptr);
        }) == "command line: exprot, expected one of export, verify (nearest: export)");
  CHECK(!app.read({"verify"}, nullptr));
  CHECK(app.got_subcommand("verify"));
}

TEST_CASE("bench: an estimate has the unit that people think in", "[apps]") {
  CHECK(estimate_text(0.01) == "about 1 s");
  CHECK(estimate_text(42) == "about 42 s");
  CHECK(estimate_text(200) == "about 3 min");
  CHECK(estimate_text(3 * 3600) == "about 3.0 h");
}
