#pragma once

#include <memory>

#include "apps/workload.h"

namespace tessera::apps {

/// The model and the data that a configuration describes.
std::unique_ptr<Workload> make_language_workload();

}  // namespace tessera::apps
