#include "core/runtime/device.h"

#include "core/check.h"

namespace tessera {

std::string name_of(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

Device device_from_name(std::string_view name, int /*local_rank*/) {
  if (name == "cpu" || name == "auto") return {};
  if (name == "cuda")
    throw ConfigError("device: \"cuda\" is not available: this build has no CUDA");
  throw ConfigError(fmt::format("device: \"{}\" is not one of auto, cpu, cuda", name));
}

}  // namespace tessera
