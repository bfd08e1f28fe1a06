#include "core/check.h"

#include <algorithm>
#include <string_view>

namespace tessera {

void throw_with_status(int status, const std::string& message) {
#define TESSERA_THROW(Name, own, has_place) \
  if (own > 1 && status == own) throw Name(message);
  TESSERA_ERROR_CLASSES(TESSERA_THROW)
#undef TESSERA_THROW
  throw Error(message);
}

namespace detail {

std::string locate(std::string message, const char* file, int line) {
  // Compilers get paths relative to the build directory; a reader wants the path in the tree, whose
  // root is where this file's own path says.
  constexpr std::string_view own = __FILE__, name = "core/check.cc";
  static_assert(own.substr(own.size() - name.size()) == name);
  constexpr std::string_view root = own.substr(0, own.size() - name.size());
  // In a unity build that is behind the build directory's, and other files have it without.
  constexpr std::string_view relative = root.substr(std::min(root.find("../"), root.size()));
  std::string_view path = file;
  for (const std::string_view prefix : {root, relative}) {
    if (prefix.empty() || !path.starts_with(prefix)) continue;
    path.remove_prefix(prefix.size());
    break;
  }
  return fmt::format("{} {}:{}", message, path, line);
}

}  // namespace detail
}  // namespace tessera
