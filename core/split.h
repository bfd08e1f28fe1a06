#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

namespace tessera {

/// Without spaces at its ends.
inline std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') + 1 - first);
}

/// What stands between separators, trimmed: of "a, b,," the four a, b and two that are empty; of an
/// empty text one that is empty.
inline std::vector<std::string_view> split(std::string_view text, char separator = ',') {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(trimmed(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return parts;
}

/// Those that are not empty.
inline std::vector<std::string_view> names_in(std::string_view list) {
  std::vector<std::string_view> names = split(list);
  std::erase(names, std::string_view());
  return names;
}

}  // namespace tessera
