#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace tessera {

/// Where tensors live and tasks run.
enum class DeviceType : unsigned char { kCpu, kCuda };

/// A device of this process: a type and, for CUDA, the ordinal. The default is the CPU.
struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu", "cuda:0".
std::string name_of(Device device);

/// "cpu", "cuda" (ordinal `local_rank` modulo the number of devices) or "auto" (CUDA if there is a
/// usable device, else the CPU; a CUDA build logs why, on local rank 0). ConfigError if the name is
/// unknown, if the build has no CUDA, or if no driver or device answers; it says which.
Device device_from_name(std::string_view name, int local_rank = 0);

}  // namespace tessera

template <>
struct fmt::formatter<tessera::Device> : fmt::formatter<std::string> {
  auto format(tessera::Device device, fmt::format_context& ctx) const {
    return fmt::formatter<std::string>::format(tessera::name_of(device), ctx);
  }
};
