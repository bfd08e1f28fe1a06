#include "apps/report/command.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "apps/command_line.h"
#include "apps/report/page.h"
#include "core/check.h"
#include "core/files.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

/// A file that is no report of ours stays.
void check_report_target(const std::string& path) {
  std::error_code ignored;
  const auto fail = [&](const char* what) {
    throw ConfigError(
        fmt::format("command line: --output={}: {}, expected a new file, or a report to replace",
                    shorten(path), what));
  };
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, ignored))) return;
  if (!std::filesystem::is_regular_file(path, ignored)) fail("no regular file");
  const std::string mark = kReportMark;
  std::string begin(mark.size(), '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(begin.data(), std::ssize(begin));
  if (begin != mark) fail("a file that no tessera-report has made");
}

}  // namespace

int report_command(const std::vector<std::string>& arguments) {
  std::vector<std::string> dirs;
  std::string output = "report.html", x = "auto";
  CommandLine app(
      "Draws what runs of tessera-train have left in their directories: one page of HTML, which "
      "needs nothing from elsewhere. Several runs are drawn into the same charts, with what "
      "differs in their configurations.",
      "tessera-report");
  app.add_option("run", dirs, "directory of a run (output.dir), one or several")
      ->required()
      ->default_str("");
  app.add_option("--output", output, "the file of the page");
  app.add_option("--x", x,
                 "what the charts run over: step, tokens, or auto: tokens where the runs take "
                 "different numbers of them a step")
      ->check(CLI::IsMember({"auto", "step", "tokens"}));
  if (const std::optional<int> status = app.read(arguments)) return *status;
  check_report_target(output);
  std::vector<RunLog> runs;
  for (const std::string& dir : dirs) {
    runs.push_back(read_run_log(dir));
    std::error_code ignored;
    for (size_t i = 0; i + 1 < runs.size(); ++i) {
      if (!std::filesystem::equivalent(dir, runs[i].dir, ignored)) continue;
      throw ConfigError(
          fmt::format("command line: {}: given twice, expected different runs", shorten(dir)));
    }
  }
  set_labels(runs);
  const ReportAxis axis = x == "auto"   ? ReportAxis::kAuto
                          : x == "step" ? ReportAxis::kStep
                                        : ReportAxis::kTokens;
  write_file_atomically(output, report_html(runs, axis));
  fmt::print("{}\n", printable(output));
  return 0;
}

}  // namespace tessera::apps
