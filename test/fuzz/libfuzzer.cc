// One target for libFuzzer: TESSERA_FUZZ_TARGET is its name.

#include <cstdlib>

#include "test/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  for (const tessera::fuzz::Target& target : tessera::fuzz::targets()) {
    if (target.name != TESSERA_FUZZ_TARGET) continue;
    tessera::fuzz::accepts(target, {reinterpret_cast<const char*>(data), nbytes});
    return 0;
  }
  std::abort();
}
