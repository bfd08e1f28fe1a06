#include "dist/checkpoint/strict_json.h"

#include <set>
#include <vector>

#include "core/check.h"

namespace tessera::dist {

using nlohmann::json;

json parse_strict_json(std::string_view what, std::string_view text, int max_depth,
                       std::string_view expected) {
  struct Open {
    std::set<std::string> keys;  // of an object
    bool is_array = false;
    size_t num_elements = 0;
  };
  // An element costs an array 16 bytes, and twice that while it grows.
  const size_t max_elements = text.size() / 16 + 1024;
  std::vector<Open> open;
  using Event = json::parse_event_t;
  const auto check = [&](int depth, Event event, json& value) {
    if (depth > max_depth) {
      throw InputError(fmt::format("{} nested too deep, expected {}", what, max_depth));
    }
    if (event == Event::object_end || event == Event::array_end) open.pop_back();
    if (event == Event::key && !open.back().keys.insert(value.get<std::string>()).second) {
      throw InputError(fmt::format("{} has {} twice, expected each name once", what, value.dump()));
    }
    const bool is_complete =
        event == Event::value || event == Event::object_end || event == Event::array_end;
    if (is_complete && !open.empty() && open.back().is_array &&
        ++open.back().num_elements > max_elements) {
      throw InputError(
          fmt::format("{} of {} bytes has an array of more than {} elements, expected "
                      "fewer",
                      what, text.size(), max_elements));
    }
    if (event == Event::object_start) open.push_back({});
    if (event == Event::array_start) open.push_back({{}, true, 0});
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::exception&) {
    throw InputError(
        fmt::format("{} of {} bytes is not JSON, expected {}", what, text.size(), expected));
  }
}

int64_t json_size(const json& value) {
  if (!value.is_number_unsigned()) return -1;
  const uint64_t number = value.get<uint64_t>();
  return number > uint64_t{INT64_MAX} ? -1 : static_cast<int64_t>(number);
}

}  // namespace tessera::dist
