#include "dist/comm/nccl_library.h"

#include <cstdlib>

#include "test/testing.h"

#if TESSERA_HAS_NCCL

using namespace tessera;

namespace {

/// What is wrong with the file that TESSERA_NCCL names.
std::string problem_of(const char* file) {
  setenv("TESSERA_NCCL", file, 1);
  const std::string problem = dist::open_nccl().problem;
  unsetenv("TESSERA_NCCL");
  return problem;
}

}  // namespace

TEST_CASE("nccl: the library is what TESSERA_NCCL names, and what is wrong with it is said",
          "[comm]") {
  CHECK(problem_of("/nowhere/libnccl.so.2") ==
        "/nowhere/libnccl.so.2 cannot be loaded (install it, or name its file in TESSERA_NCCL)");
  CHECK(problem_of("libm.so.6") == "libm.so.6 lacks ncclGetErrorString");
  CHECK(problem_of(TESSERA_OLD_NCCL) == "NCCL is 2.18, expected 2.26 or newer");
  CHECK(std::string(std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT")) == "1");
}

#else

#include "dist/comm/nccl.h"

TEST_CASE("nccl: a build without its header says so", "[comm]") {
  CHECK(tessera::dist::nccl_problem() == "this build has no NCCL");
}

#endif
