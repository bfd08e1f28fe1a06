#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// --name=value of a command line; ends the program with status 2 for any other name.
class Flags {
 public:
  Flags(int argc, char** argv, const std::vector<std::string>& names) {
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      const size_t equals = argument.find('=');
      bool is_known = false;
      for (const std::string& name : names) is_known |= argument.substr(0, equals) == "--" + name;
      if (!is_known || equals == std::string::npos) {
        fmt::print(stderr, "{}: expected --NAME=VALUE with one of: {}\n", argument,
                   fmt::join(names, ", "));
        std::exit(2);
      }
      values_.push_back({argument.substr(2, equals - 2), argument.substr(equals + 1)});
    }
  }

  std::string text(std::string_view name, const std::string& otherwise) const {
    for (const auto& [known, value] : values_) {
      if (known == name) return value;
    }
    return otherwise;
  }
  int64_t number(std::string_view name, int64_t otherwise) const {
    return std::stoll(text(name, std::to_string(otherwise)));
  }
  std::vector<int64_t> numbers(std::string_view name, std::vector<int64_t> otherwise) const {
    const std::string list = text(name, "");
    if (list.empty()) return otherwise;
    std::vector<int64_t> result;
    for (size_t begin = 0; begin <= list.size();) {
      const size_t end = std::min(list.find(',', begin), list.size());
      result.push_back(std::stoll(list.substr(begin, end - begin)));
      begin = end + 1;
    }
    return result;
  }

 private:
  std::vector<std::pair<std::string, std::string>> values_;
};
