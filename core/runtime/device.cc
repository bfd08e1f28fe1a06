#include "core/runtime/device.h"

#include "core/check.h"
#include "core/log.h"
#include "core/runtime/cuda/cuda.h"

namespace tessera {

std::string name_of(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

Device device_from_name(std::string_view name, int local_rank) {
  if (name == "cpu") return {};
  if (name != "cuda" && name != "auto")
    throw ConfigError(fmt::format("device: \"{}\" is not one of auto, cpu, cuda", name));
  const CudaProbe cuda = probe_cuda();
  if (cuda.problem.empty()) return {DeviceType::kCuda, local_rank % cuda.num_devices};
  if (name == "cuda")
    throw ConfigError(fmt::format("device: \"cuda\" is not available: {}", cuda.problem));
  if (cuda.is_built && local_rank == 0) log_info("device: cpu, since {}", cuda.problem);
  return {};
}

}  // namespace tessera
