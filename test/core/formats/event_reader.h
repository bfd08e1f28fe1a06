#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/formats/event_file.h"
#include "test/temp_dir.h"
#include "test/testing.h"

// Reads event files back, every checksum and every field: what it does not know is a failure.

namespace tessera::testing {

struct ReadEvent {
  double wall_time = 0;
  int64_t step = 0;
  std::string file_version;
  bool is_start = false;
  std::vector<std::pair<std::string, float>> scalars;
  std::map<std::string, std::string> texts;  // by tag
  std::map<std::string, std::variant<bool, double, std::string>> settings;
};

/// Calls f(field, number, bytes) for each field of a message of Protocol Buffers.
template <class F>
void for_each_field(std::string_view message, F f) {
  const auto varint = [&message] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      if (message.empty() || shift > 63) throw Error("a varint without an end");
      const auto byte = static_cast<unsigned char>(message.front());
      message.remove_prefix(1);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
  };
  const auto take = [&message](uint64_t nbytes) {
    if (nbytes > message.size()) throw Error("a field behind the end of its message");
    const std::string_view bytes = message.substr(0, nbytes);
    message.remove_prefix(nbytes);
    return bytes;
  };
  while (!message.empty()) {
    const uint64_t key = varint();
    const auto field = static_cast<int>(key >> 3);
    uint64_t number = 0;
    std::string_view bytes;
    switch (key & 7) {
      case 0:
        number = varint();
        break;
      case 1:
      case 5:
        bytes = take((key & 7) == 1 ? 8 : 4);
        std::memcpy(&number, bytes.data(), bytes.size());  // little endian, as are we
        break;
      case 2:
        bytes = take(varint());
        break;
      default:
        throw Error("a wire type that is none");
    }
    f(field, number, bytes);
  }
}

inline std::string_view field_of(std::string_view message, int wanted) {
  std::string_view found;
  for_each_field(message, [&](int field, uint64_t, std::string_view bytes) {
    if (field == wanted) found = bytes;
  });
  return found;
}

inline void read_hparams(std::string_view content, ReadEvent& event) {
  const std::string_view start = field_of(content, 3);
  for_each_field(start, [&](int, uint64_t, std::string_view entry) {
    const std::string name(field_of(entry, 1));
    for_each_field(field_of(entry, 2), [&](int field, uint64_t number, std::string_view bytes) {
      if (field == 2) event.settings[name] = std::bit_cast<double>(number);
      if (field == 3) event.settings[name] = std::string(bytes);
      if (field == 4) event.settings[name] = number != 0;
    });
  });
}

inline void read_summary_value(std::string_view value, ReadEvent& event) {
  const std::string tag(field_of(value, 1));
  bool is_scalar = false;
  for_each_field(value, [&](int field, uint64_t number, std::string_view) {
    if (field != 2) return;
    is_scalar = true;
    event.scalars.emplace_back(tag, std::bit_cast<float>(static_cast<uint32_t>(number)));
  });
  if (is_scalar) return;
  const std::string_view plugin = field_of(field_of(value, 9), 1);
  const std::string_view name = field_of(plugin, 1);
  if (name == "text") {
    event.texts[tag] = std::string(field_of(field_of(value, 8), 8));
  } else if (name == "hparams") {
    read_hparams(field_of(plugin, 2), event);
  } else {
    throw Error("a value that is neither a scalar nor a text: " + tag);
  }
}

inline ReadEvent read_event(std::string_view message) {
  ReadEvent event;
  for_each_field(message, [&](int field, uint64_t number, std::string_view bytes) {
    if (field == 1) {
      event.wall_time = std::bit_cast<double>(number);
    } else if (field == 2) {
      event.step = static_cast<int64_t>(number);
    } else if (field == 3) {
      event.file_version = std::string(bytes);
    } else if (field == 5) {
      for_each_field(bytes,
                     [&](int, uint64_t, std::string_view v) { read_summary_value(v, event); });
    } else if (field == 7) {
      for_each_field(bytes,
                     [&](int, uint64_t status, std::string_view) { event.is_start = status == 1; });
    } else {
      throw Error("an event with a field that is not known");
    }
  });
  return event;
}

/// Error for a record whose length or bytes are not those of their checksum, and half a record.
inline std::vector<ReadEvent> read_events(const std::string& path) {
  const std::string bytes = read_file(path);
  std::string_view rest = bytes;
  std::vector<ReadEvent> events;
  const auto u32_at = [&rest](size_t offset) {
    uint32_t value = 0;
    std::memcpy(&value, rest.data() + offset, sizeof(value));
    return value;
  };
  while (!rest.empty()) {
    uint64_t length = 0;
    if (rest.size() < 12) throw Error("half a record");
    std::memcpy(&length, rest.data(), sizeof(length));
    if (u32_at(8) != masked_crc32c(rest.substr(0, 8))) throw Error("a length that is damaged");
    if (rest.size() - 12 < length + 4) throw Error("half a record");
    const std::string_view message = rest.substr(12, length);
    if (u32_at(12 + length) != masked_crc32c(message)) throw Error("a record that is damaged");
    events.push_back(read_event(message));
    rest.remove_prefix(length + 16);
  }
  return events;
}

/// Of a directory, in the order in which TensorBoard reads them.
inline std::vector<std::string> event_files(const std::string& dir) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    if (entry.path().filename().string().find("tfevents") != std::string::npos) {
      paths.push_back(entry.path().string());
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// The values of all tags by step that TensorBoard shows of a directory: a later session takes back
/// what earlier ones say of its first step and later ones.
inline std::map<std::string, std::map<int64_t, float>> shown_scalars(const std::string& dir) {
  std::map<std::string, std::map<int64_t, float>> shown;
  for (const std::string& path : event_files(dir)) {
    for (const ReadEvent& event : read_events(path)) {
      if (event.is_start) {
        for (auto& [_, steps] : shown) steps.erase(steps.lower_bound(event.step), steps.end());
      }
      for (const auto& [tag, value] : event.scalars) shown[tag][event.step] = value;
    }
  }
  std::erase_if(shown, [](const auto& tag) { return tag.second.empty(); });
  return shown;
}

}  // namespace tessera::testing
