// Tests on a device. Arguments are Catch2's. Without a device all of them are skipped (exit status
// 77), which is said, but --list-tests.
#define CATCH_CONFIG_RUNNER
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <cstdio>
#include <string_view>

#include "core/runtime/cuda/cuda.h"

int main(int argc, char** argv) {
  const tessera::CudaProbe probe = tessera::probe_cuda();
  const bool is_list = argc > 1 && std::string_view(argv[1]).starts_with("--list");
  if (!probe.problem.empty() && !is_list) {
    std::printf("skipped: %s\n", probe.problem.c_str());
    return 77;
  }
  const char* all[] = {argv[0], "~*bank conflicts*"};
  return argc > 1 ? Catch::Session().run(argc, argv) : Catch::Session().run(2, all);
}
