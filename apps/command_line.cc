#include "apps/command_line.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "apps/config.h"
#include "apps/version.h"
#include "core/check.h"
#include "core/settings.h"
#include "core/text.h"

namespace tessera::apps {

std::string version_text(const std::string& program) {
  const std::string_view commit = TESSERA_COMMIT;
  return fmt::format("{} {}{}\n{}\n", program, TESSERA_VERSION,
                     commit.empty() ? "" : fmt::format(" (commit {})", commit), TESSERA_BUILD);
}

CommandLine::CommandLine(const std::string& what, const std::string& program)
    : CLI::App(what, program) {
  option_defaults()->always_capture_default();
  set_help_flag("-h,--help", "print this text and exit");
  set_version_flag("--version", version_text(program), "print version and build, and exit");
}

std::optional<int> CommandLine::read(const std::vector<std::string>& arguments, std::FILE* out) {
  const auto print = [&](const std::string& text) {
    if (out == nullptr) return 0;
    fmt::print(out, "{}", text);
    std::fflush(out);
    return 0;
  };
  // CLI11 would miss a wrong subcommand among what it does not expect.
  const auto commands = get_subcommands([](CLI::App*) { return true; });
  if (!commands.empty() && !arguments.empty() && !arguments.front().starts_with("-")) {
    std::vector<std::string> names;
    for (const CLI::App* command : commands) names.push_back(command->get_name());
    if (std::find(names.begin(), names.end(), arguments.front()) == names.end()) {
      const std::vector<std::string_view> views(names.begin(), names.end());
      throw ConfigError(fmt::format("command line: {}, expected one of {} (nearest: {})",
                                    shorten(arguments.front()), fmt::join(names, ", "),
                                    nearest_name(arguments.front(), views)));
    }
  }
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // as CLI11 wants them
  try {
    parse(reversed);
  } catch (const CLI::CallForHelp&) {
    const auto parsed = get_subcommands();
    return print(parsed.empty() ? help("", CLI::AppFormatMode::All) : parsed.front()->help());
  } catch (const CLI::CallForVersion&) {
    return print(version_text(get_name()));
  } catch (const CLI::ParseError& error) {
    constexpr size_t kMaxNbytes = 600;  // it lists choices, and may have the argument
    throw ConfigError(
        fmt::format("command line: {} (see --help)", shorten(error.what(), kMaxNbytes)));
  }
  return std::nullopt;
}

}  // namespace tessera::apps
