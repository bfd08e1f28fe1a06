#pragma once

#if __has_include(<nccl.h>)
#define TESSERA_HAS_NCCL 1
#include <nccl.h>

#include <string>

#include "core/check.h"

// NCCL's functions, opened when they are first needed: the build needs the header only, and a
// program with NCCL starts where it is not installed.

namespace tessera::dist {

// clang-format off
#define TESSERA_NCCL_FUNCTIONS(X)                                                                \
  X(ncclGetErrorString) X(ncclGetLastError) X(ncclGetVersion) X(ncclGetUniqueId)                 \
  X(ncclCommInitRankConfig) X(ncclCommSplit) X(ncclCommDestroy) X(ncclCommAbort)                 \
  X(ncclCommGetAsyncError) X(ncclMemAlloc) X(ncclMemFree) X(ncclCommRegister)                    \
  X(ncclCommDeregister) X(ncclGroupStart) X(ncclGroupEnd) X(ncclAllGather) X(ncclReduceScatter)  \
  X(ncclSend) X(ncclRecv)
// clang-format on

struct NcclLibrary {
#define TESSERA_NCCL_FIELD(name) decltype(&::name) name = nullptr;
  TESSERA_NCCL_FUNCTIONS(TESSERA_NCCL_FIELD)
#undef TESSERA_NCCL_FIELD
  std::string problem;  ///< why it cannot be used, one clause; empty if it can
};

/// The library that TESSERA_NCCL names, or that the loader finds.
NcclLibrary open_nccl();
/// The same, opened once.
const NcclLibrary& nccl();

[[noreturn]] void fail_nccl(ncclResult_t result, ncclComm_t comm, const char* call);

#define TESSERA_NCCL_CHECK(comm, call)                                     \
  do {                                                                     \
    const ncclResult_t nccl_result_ = nccl().call;                         \
    if (nccl_result_ != ncclSuccess) fail_nccl(nccl_result_, comm, #call); \
  } while (0)

}  // namespace tessera::dist

#endif
