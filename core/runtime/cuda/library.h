#pragma once

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <string>

// Libraries of CUDA that are opened when they are first asked for: a program that was built with
// them starts where they are not installed.

namespace tessera::cuda {

/// The file that the environment variable `variable` names, else `name` where the loader finds it
/// or where the toolkit installs itself. Null, and why not in `problem` (one clause), if there is
/// none.
inline void* open_library(const std::string& name, const char* variable, std::string* problem) {
  const char* file = std::getenv(variable);
  void* handle = dlopen(file != nullptr ? file : name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr && file == nullptr) {  // often without telling the loader
    handle = dlopen(("/usr/local/cuda/lib64/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (handle == nullptr) {
    *problem = fmt::format("{} cannot be loaded (install it, or name its file in {})",
                           file != nullptr ? file : name, variable);
  }
  return handle;
}

}  // namespace tessera::cuda
