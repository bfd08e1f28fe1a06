#pragma once

#include <string>

#include "core/runtime/device.h"

namespace tessera {

/// "NVIDIA H200 (9.0)": what the driver calls a CUDA device, and its compute capability; the name of
/// the kind of any other device.
std::string cuda_device_name(Device device);

}  // namespace tessera
