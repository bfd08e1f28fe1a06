#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::text {

/// A text that comes in pieces, up to the first of some strings that is complete, which is no part of
/// it; of several that end together, the longest.
class StopStrings {
 public:
  /// Empty strings are none.
  explicit StopStrings(std::vector<std::string> stops);

  /// What is surely before a stop string; what may be the beginning of one waits for the rest.
  std::string add(std::string_view piece);
  /// What is left of a text without one.
  std::string finish();
  bool is_found() const { return is_found_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool is_found_ = false;
};

}  // namespace tessera::text
