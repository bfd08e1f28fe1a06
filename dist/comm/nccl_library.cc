#include "dist/comm/nccl_library.h"

#include "dist/comm/nccl.h"

#if TESSERA_HAS_NCCL

#include <cstdlib>

#if !defined(TESSERA_SIMT)
#include "core/runtime/cuda/library.h"
#endif

namespace tessera::dist {

NcclLibrary open_nccl() {
  NcclLibrary library;
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);  // see [Note: Collectives over NCCL]
#if defined(TESSERA_SIMT)
#define TESSERA_NCCL_LOAD(name) library.name = &::name;
#else
  void* handle = tessera::cuda::open_library("libnccl.so.2", "TESSERA_NCCL", &library.problem);
  if (handle == nullptr) return library;
  const char* const named = std::getenv("TESSERA_NCCL");
  const std::string file = named != nullptr ? named : "libnccl.so.2";
#define TESSERA_NCCL_LOAD(name)                                                  \
  library.name = reinterpret_cast<decltype(library.name)>(dlsym(handle, #name)); \
  if (library.name == nullptr && library.problem.empty())                        \
    library.problem = file +                                                     \
                      " lacks"                                                   \
                      " " #name;
#endif
  TESSERA_NCCL_FUNCTIONS(TESSERA_NCCL_LOAD)
#undef TESSERA_NCCL_LOAD
  if (!library.problem.empty()) return library;
  int version = 0;
  library.ncclGetVersion(&version);
  constexpr int kOldest = 22600;  // the first with an implicit launch order
  if (version < kOldest) {
    library.problem =
        fmt::format("NCCL is {}.{}, expected 2.26 or newer", version / 10000, version / 100 % 100);
  }
  return library;
}

const NcclLibrary& nccl() {
  static const NcclLibrary& library = *new NcclLibrary(open_nccl());
  return library;
}

const std::string& nccl_problem() {
  return nccl().problem;
}

void fail_nccl(ncclResult_t result, ncclComm_t comm, const char* call) {
  const char* details = nccl().ncclGetLastError(comm);
  throw CommError(fmt::format("{}: {}{}{}", call, nccl().ncclGetErrorString(result),
                              details != nullptr && *details != '\0' ? "; " : "",
                              details != nullptr ? details : ""));
}

}  // namespace tessera::dist

#else  // a build without NCCL's header

namespace tessera::dist {

const std::string& nccl_problem() {
  static const std::string problem = "this build has no NCCL";
  return problem;
}

}  // namespace tessera::dist

#endif
