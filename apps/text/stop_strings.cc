#include "apps/text/stop_strings.h"

#include <algorithm>
#include <utility>

namespace tessera::text {

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase(stops_, "");
}

std::string StopStrings::add(std::string_view piece) {
  if (is_found_) return "";
  held_ += piece;
  size_t begin = std::string::npos, end = std::string::npos;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos || at + stop.size() > end) continue;
    begin = at + stop.size() == end ? std::min(begin, at) : at;
    end = at + stop.size();
  }
  if (begin != std::string::npos) {
    is_found_ = true;
    held_.resize(begin);
    return std::exchange(held_, "");
  }
  size_t num_sure = held_.size();
  for (const std::string& stop : stops_) {
    for (size_t length = std::min(stop.size() - 1, held_.size()); length > 0; --length) {
      if (!std::string_view(held_).ends_with(std::string_view(stop).substr(0, length))) continue;
      num_sure = std::min(num_sure, held_.size() - length);
      break;
    }
  }
  std::string sure = held_.substr(0, num_sure);
  held_.erase(0, num_sure);
  return sure;
}

std::string StopStrings::finish() {
  return std::exchange(held_, "");
}

}  // namespace tessera::text
