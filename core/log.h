#pragma once

#include <fmt/format.h>

#include <string_view>

namespace tessera {

/// One line on stderr, prefixed "[rank r] " once a rank is set; written by a single call, so that
/// lines of several ranks do not mix. Names in the message may be anybody's: control characters and
/// what is not UTF-8 are escaped and long ones cut (see core/text.h), so that they can neither
/// steer a terminal nor look like further lines of ours.
void log_line(std::string_view level, std::string_view message);
/// For what all ranks see alike, perhaps several times: once a process, and by rank 0 alone.
void log_once(std::string_view level, std::string_view message);
void set_log_rank(int rank);

/// Opens those of the descriptors 0 to 2 that are closed, on /dev/null: the next file that is
/// opened would otherwise have the number of stdout or stderr, and what is meant for a terminal
/// would land in it. Every program that links this library does so before `main`.
void open_standard_descriptors();

/// A line with the rank, formatted as by fmt.
template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_line("info", fmt::format(format, std::forward<Args>(args)...));
}
/// The same after "warning: ".
template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log_line("warning", fmt::format(format, std::forward<Args>(args)...));
}
/// The same after "error: ".
template <class... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  log_line("error", fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tessera
