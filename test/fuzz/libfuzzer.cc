// One target for libFuzzer: TESSERA_FUZZ_TARGET is its name. With TESSERA_FUZZ_DICTIONARY=FILE in
// the environment the program writes the target's words there, as libFuzzer reads them, and ends.

#include <cstdio>
#include <cstdlib>

#include "test/fuzz/targets.h"

namespace {

const tessera::fuzz::Target& target() {
  for (const tessera::fuzz::Target& each : tessera::fuzz::targets()) {
    if (each.name == TESSERA_FUZZ_TARGET) return each;
  }
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* const path = std::getenv("TESSERA_FUZZ_DICTIONARY");
  if (path == nullptr) return 0;
  std::FILE* const file = std::fopen(path, "w");
  if (file == nullptr) std::abort();
  for (const std::string& word : target().words()) {
    std::fputc('"', file);
    for (const unsigned char c : word) std::fprintf(file, "\\x%02x", c);
    std::fputs("\"\n", file);
  }
  std::exit(std::fclose(file));
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  tessera::fuzz::accepts(target(), {reinterpret_cast<const char*>(data), nbytes});
  return 0;
}
