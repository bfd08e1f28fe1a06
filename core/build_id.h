#pragma once

#include <string>

namespace tessera {

/// What the linker has called this build of the running program (the GNU build id), in hexadecimal:
/// the same for the same bytes only. "unknown" if it has no name.
std::string build_id();

}  // namespace tessera
