// A libnccl.so.2 that is too old: it has all functions, and only says which version it is.

#define TESSERA_NO_OP(name) \
  extern "C" int name() {   \
    return 1;               \
  }

TESSERA_NO_OP(ncclGetErrorString)
TESSERA_NO_OP(ncclGetLastError)
TESSERA_NO_OP(ncclGetUniqueId)
TESSERA_NO_OP(ncclCommInitRankConfig)
TESSERA_NO_OP(ncclCommSplit)
TESSERA_NO_OP(ncclCommDestroy)
TESSERA_NO_OP(ncclCommAbort)
TESSERA_NO_OP(ncclCommGetAsyncError)
TESSERA_NO_OP(ncclMemAlloc)
TESSERA_NO_OP(ncclMemFree)
TESSERA_NO_OP(ncclCommRegister)
TESSERA_NO_OP(ncclCommDeregister)
TESSERA_NO_OP(ncclGroupStart)
TESSERA_NO_OP(ncclGroupEnd)
TESSERA_NO_OP(ncclAllGather)
TESSERA_NO_OP(ncclReduceScatter)
TESSERA_NO_OP(ncclSend)
TESSERA_NO_OP(ncclRecv)

extern "C" int ncclGetVersion(int* version) {
  *version = 21805;
  return 0;
}
