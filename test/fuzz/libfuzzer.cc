// One target for libFuzzer: TESSERA_FUZZ_TARGET is its name. With TESSERA_FUZZ_DICTIONARY=FILE in
// the environment the program writes the target's words there, as libFuzzer reads them, its good
// inputs into the folder TESSERA_FUZZ_SEEDS, and ends.

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

void write_seeds(const std::string& folder) {
  int i = 0;
  for (const std::string& seed : target().seeds()) {
    std::FILE* const file = std::fopen((folder + "/seed" + std::to_string(i++)).c_str(), "w");
    if (file == nullptr) std::abort();
    std::fwrite(seed.data(), 1, seed.size(), file);
    if (std::fclose(file) != 0) std::abort();
  }
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
  if (const char* const folder = std::getenv("TESSERA_FUZZ_SEEDS")) write_seeds(folder);
  std::exit(std::fclose(file));
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  tessera::fuzz::accepts(target(), {reinterpret_cast<const char*>(data), nbytes});
  return 0;
}
