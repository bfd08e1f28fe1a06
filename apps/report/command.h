#pragma once

#include <string>
#include <vector>

namespace tessera::apps {

/// tessera-report: the exit status. Errors as those of the parts, ConfigError for the command line.
int report_command(const std::vector<std::string>& arguments);

}  // namespace tessera::apps
