// Built for the baseline instruction set and run before every other constructor, so that an older
// processor gets a sentence and not an illegal instruction.
#include "core/runtime/cpu/check.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace tessera {
namespace {

void fail(const char* feature) {
  const char* parts[] = {"error: this build needs a processor with ", feature,
                         "; configure with -Dsimd=portable (x86-64-v3: AVX2, FMA, BMI2, F16C) or "
                         "build on this machine\n"};
  for (const char* part : parts) {
    if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  }
  _exit(2);
}

__attribute__((constructor(101))) void check_at_start() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) fail("AVX2");
  if (!__builtin_cpu_supports("fma")) fail("FMA");
  if (!__builtin_cpu_supports("bmi2")) fail("BMI2");
#ifdef TESSERA_NEEDS_AVX512
  if (!__builtin_cpu_supports("avx512f")) fail("AVX-512");
  if (!__builtin_cpu_supports("avx512bw")) fail("AVX-512BW");
#endif
}

}  // namespace

void check_processor() {}

}  // namespace tessera
