#include "core/check.h"

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
  std::string_view path = file;
  if (path.substr(0, root.size()) == root) path.remove_prefix(root.size());
  return fmt::format("{} {}:{}", message, path, line);
}

}  // namespace detail
}  // namespace tessera
