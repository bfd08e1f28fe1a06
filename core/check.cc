#include "core/check.h"

#include <string_view>

namespace tessera::detail {

std::string locate(std::string message, const char* file, int line) {
  // Meson passes sources relative to the build directory; a reader wants the path in the tree.
  std::string_view path = file;
  while (path.substr(0, 3) == "../") path.remove_prefix(3);
  return fmt::format("{} {}:{}", message, path, line);
}

}  // namespace tessera::detail
