// Kernels whose faults AddressSanitizer and UBSan find while the program dies of them. Usage:
// planted_faults NAME ok|broken. Prints the faulty line, runs the kernel.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "core/runtime/cuda/launch.cuh"

namespace tessera::cuda {
namespace {

constexpr unsigned kBlock = 64;

// Each fault is the line after its constant.

constexpr int kOffByOneLine = __LINE__ + 3;
__global__ void off_by_one_kernel(float* out, int64_t numel, bool is_broken) {
  const auto i = static_cast<int64_t>(threadIdx.x);
  if (is_broken ? i <= numel : i < numel) out[i] = 1;
}

constexpr int kUseAfterFreeLine = __LINE__ + 2;
__global__ void use_after_free_kernel(float* out, const float* in) {
  out[threadIdx.x] = in[threadIdx.x];
}

constexpr int kBeyondSharedLine = __LINE__ + 3;
__global__ void beyond_shared_kernel(bool is_broken) {
  auto* s = dynamic_smem<float>();
  s[threadIdx.x + (is_broken ? 1 : 0)] = 1;
}

constexpr int kMisalignedLine = __LINE__ + 2;
__global__ void misaligned_kernel(uint4* out, const float* in) {
  out[threadIdx.x] = *reinterpret_cast<const uint4*>(in + 4 * threadIdx.x);
}

int run(const std::string& name, bool is_broken) {
  const auto allocate = [](size_t numel) { return std::make_unique<float[]>(numel); };
  const LaunchConfig config{1, kBlock, kBlock * sizeof(float), nullptr};
  const auto say = [](int line) {
    std::printf("fault at test/simt/planted_faults.cc:%d\n", line);
    std::fflush(stdout);
  };
  if (name == "off_by_one") {
    say(kOffByOneLine);
    const auto out = allocate(kBlock - 1);
    launch("off_by_one", off_by_one_kernel, config, out.get(), kBlock - 1, is_broken);
  } else if (name == "use_after_free") {
    say(kUseAfterFreeLine);
    const auto out = allocate(kBlock);
    auto in = allocate(kBlock);
    const float* data = in.get();
    if (is_broken) in.reset();
    launch("use_after_free", use_after_free_kernel, config, out.get(), data);
  } else if (name == "beyond_shared") {
    say(kBeyondSharedLine);
    launch("beyond_shared", beyond_shared_kernel, config, is_broken);
  } else if (name == "misaligned") {
    say(kMisalignedLine);
    const auto out = std::make_unique<uint4[]>(kBlock);
    const auto in = allocate(4 * kBlock + 1);
    launch("misaligned", misaligned_kernel, config, out.get(), in.get() + (is_broken ? 1 : 0));
  } else {
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace tessera::cuda

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  return tessera::cuda::run(argv[1], std::strcmp(argv[2], "broken") == 0);
}
