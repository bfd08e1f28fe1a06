#include <array>
#include <cstdio>
#include <optional>

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/ptx.cuh"
#include "core/runtime/cuda/reduce.cuh"
#include "core/runtime/cuda/vec.cuh"
#include "test/simt/simt_testing.h"

// Tests of the tests: kernels with one mistake each, beside the same kernel without it. The first
// must be caught, the second must pass.

namespace tessera::cuda {
namespace {

using simt::Order;

constexpr unsigned kBlock = 64;

/// What a test sees of a kernel in the three schedules, as the tests of the kernel families look.
struct Verdict {
  std::optional<std::string> error;  // of the emulator, in the first schedule that has one
  bool is_wrong = false;             // some value is not the expected one
  bool is_unstable = false;          // the schedules do not agree to the bit

  bool is_clean() const { return !error && !is_wrong && !is_unstable; }
};

/// Runs kernel(out, in) on one block; in[i] = i + 1, and out[i] must become expected(i).
template <class Kernel, class Expected>
Verdict judge(Kernel kernel, Expected expected) {
  Verdict verdict;
  std::vector<float> first;
  for (const Order order : {Order::kForward, Order::kReverse, Order::kRandom}) {
    const simt::Schedule schedule(order);
    std::vector<float> in(4 * kBlock), out(kBlock, 0.0f);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i + 1);
    try {
      launch("planted", kernel, LaunchConfig{1, kBlock, 4 * kBlock * sizeof(float), nullptr},
             out.data(), in.data());
    } catch (const simt::Error& error) {
      if (!verdict.error) verdict.error = error.what();
    }
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i] != static_cast<float>(expected(static_cast<int>(i)))) verdict.is_wrong = true;
    }
    if (first.empty()) first = out;
    if (std::memcmp(first.data(), out.data(), out.size() * sizeof(float)) != 0) {
      verdict.is_unstable = true;
    }
  }
  return verdict;
}

bool contains(const std::string& text, const std::string& part) {
  INFO(text);
  const bool is_there = text.find(part) != std::string::npos;
  CHECK(is_there);
  return is_there;
}

/// "test/simt/planted_faults_test.cc:<line>".
std::string here(int line) {
  return fmt::format("test/simt/planted_faults_test.cc:{}", line);
}

// ----- missing __syncthreads

template <bool kBroken>
__global__ void reverse_kernel(float* out, const float* in) {
  auto* s = dynamic_smem<float>();
  s[threadIdx.x] = in[threadIdx.x];
  if constexpr (!kBroken) __syncthreads();
  out[threadIdx.x] = s[kBlock - 1 - threadIdx.x];
}

TEST_CASE("planted: a missing __syncthreads after a write is caught", "[simt]") {
  const auto expected = [](int i) { return 64 - i; };
  CHECK(judge(reverse_kernel<false>, expected).is_clean());
  const Verdict verdict = judge(reverse_kernel<true>, expected);
  CHECK(verdict.is_wrong);
  CHECK(verdict.is_unstable);
}

template <bool kBroken>
__global__ void rotate_kernel(float* out, const float* in) {
  auto* s = dynamic_smem<float>();
  s[threadIdx.x] = in[threadIdx.x];
  for (int round = 0; round < 3; ++round) {
    __syncthreads();
    const float next = s[(threadIdx.x + 1) % kBlock];
    if constexpr (!kBroken) __syncthreads();
    s[threadIdx.x] = next;
  }
  out[threadIdx.x] = s[threadIdx.x];
}

TEST_CASE("planted: a missing __syncthreads before shared memory is used again is caught",
          "[simt]") {
  const auto expected = [](int i) { return (i + 3) % 64 + 1; };
  CHECK(judge(rotate_kernel<false>, expected).is_clean());
  const Verdict verdict = judge(rotate_kernel<true>, expected);
  CHECK(verdict.is_wrong);
  CHECK(verdict.is_unstable);
}

/// The write comes first in any fair order: the other warp reads after five shuffles.
template <bool kBroken>
__global__ void late_read_kernel(float* out, const float* in) {
  auto* s = dynamic_smem<float>();
  if (threadIdx.x == 0) s[0] = in[0];
  if constexpr (!kBroken) __syncthreads();
  const float largest = warp_max(in[threadIdx.x]);
  out[threadIdx.x] = largest + s[0];
}

TEST_CASE("planted: a missing __syncthreads is caught even if the reader is always late",
          "[simt]") {
  const auto expected = [](int i) { return i / 32 * 32 + 33; };
  CHECK(judge(late_read_kernel<false>, expected).is_clean());
  CHECK(judge(late_read_kernel<true>, expected).is_wrong);
}

// ----- missing __syncwarp

template <bool kBroken>
__global__ void exchange_kernel(float* out, const float* in) {
  auto* s = dynamic_smem<float>();
  s[threadIdx.x] = in[threadIdx.x];
  if constexpr (!kBroken) __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}

TEST_CASE("planted: a missing __syncwarp is caught", "[simt]") {
  const auto expected = [](int i) { return (i ^ 1) + 1; };
  CHECK(judge(exchange_kernel<false>, expected).is_clean());
  const Verdict verdict = judge(exchange_kernel<true>, expected);
  CHECK(verdict.is_wrong);
  CHECK(verdict.is_unstable);
}

// ----- missing cp.async wait

/// Two stages: the second copy is under way while the first one is used.
template <bool kBroken>
__global__ void stages_kernel(float* out, const float* in) {
  auto* s = dynamic_smem<float>();
  for (int stage = 0; stage < 2; ++stage) {
    if (threadIdx.x < kBlock / 4) {
      const auto at = kBlock * static_cast<unsigned>(stage) + 4 * threadIdx.x;
      cp_async_16(s + at, in + at);
    }
    cp_async_commit();
  }
  cp_async_wait<1>();
  __syncthreads();
  float sum = s[threadIdx.x];
  if constexpr (kBroken) {
    cp_async_wait<1>();
  } else {
    cp_async_wait<0>();
  }
  __syncthreads();
  sum += s[kBlock + threadIdx.x];
  out[threadIdx.x] = sum;
}

TEST_CASE("planted: a missing cp.async wait is caught", "[simt]") {
  const auto expected = [](int i) { return 2 * i + 66; };
  CHECK(judge(stages_kernel<false>, expected).is_clean());
  CHECK(judge(stages_kernel<true>, expected).is_wrong);
}

// ----- wrong mask

constexpr int kForeignMaskLine = __LINE__ + 5;
template <bool kBroken>
__global__ void foreign_mask_kernel(float* out, const float* in) {
  const unsigned mask = threadIdx.x % 32 < 16 || kBroken ? 0x0000ffffu : 0xffff0000u;
  float sum = in[threadIdx.x];
  for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(mask, sum, d);
  out[threadIdx.x] = sum;
}

constexpr int kMismatchLine = __LINE__ + 4;
template <bool kBroken>
__global__ void mismatched_mask_kernel(float* out, const float* in) {
  const unsigned mask = kBroken && threadIdx.x % 32 == 7 ? 0x000000ffu : kFullMask;
  out[threadIdx.x] = __shfl_xor_sync(mask, in[threadIdx.x], 1);
}

constexpr int kExitedLine = __LINE__ + 5;
template <bool kBroken>
__global__ void exited_lane_kernel(float* out, const float* in) {
  const float value = in[threadIdx.x];
  if (threadIdx.x % 32 == 31) return;
  out[threadIdx.x] = __shfl_sync(kBroken ? kFullMask : 0x7fffffffu, value, 0);
}

constexpr int kOtherPlaceLine = __LINE__ + 6;
template <bool kBroken>
__global__ void other_place_kernel(float* out, const float* in) {
  if (!kBroken || threadIdx.x % 2 == 0) {
    out[threadIdx.x] = __shfl_xor_sync(kFullMask, in[threadIdx.x], 2);
  } else {
    out[threadIdx.x] = __shfl_xor_sync(kFullMask, in[threadIdx.x], 2);
  }
}

TEST_CASE("planted: a wrong mask is caught, with its place", "[simt]") {
  const auto half_sum = [](int i) { return 16 * (i / 16 * 16) + 136; };
  CHECK(judge(foreign_mask_kernel<false>, half_sum).is_clean());
  contains(judge(foreign_mask_kernel<true>, half_sum).error.value_or(""),
           "planted: block [0, 0, 0] thread 16: __shfl_xor_sync with mask 0x0000ffff at " +
               here(kForeignMaskLine) + ", but the calling lane is not in it");

  const auto neighbour = [](int i) { return (i ^ 1) + 1; };
  CHECK(judge(mismatched_mask_kernel<false>, neighbour).is_clean());
  contains(judge(mismatched_mask_kernel<true>, neighbour).error.value_or(""),
           "thread 7: __shfl_xor_sync with mask 0x000000ff at " + here(kMismatchLine) +
               ", but lane 0 is in __shfl_xor_sync with mask 0xffffffff at " + here(kMismatchLine));

  const auto first = [](int i) { return i % 32 == 31 ? 0 : i / 32 * 32 + 1; };
  CHECK(judge(exited_lane_kernel<false>, first).is_clean());
  for (const Order order : {Order::kForward, Order::kReverse}) {  // it exits last, and first
    const simt::Schedule schedule(order);
    std::vector<float> out(32), in(32);
    std::string text;
    try {
      launch("planted", exited_lane_kernel<true>, LaunchConfig{1, 32}, out.data(), in.data());
    } catch (const simt::Error& error) {
      text = error.what();
    }
    contains(text, "__shfl_sync with mask 0xffffffff at " + here(kExitedLine) +
                       ", but lane 31 has exited");
  }

  const auto second = [](int i) { return (i ^ 2) + 1; };
  CHECK(judge(other_place_kernel<false>, second).is_clean());
  contains(judge(other_place_kernel<true>, second).error.value_or(""),
           "thread 1: __shfl_xor_sync with mask 0xffffffff at " + here(kOtherPlaceLine) +
               ", but lane 0 is in __shfl_xor_sync with mask 0xffffffff at " +
               here(kOtherPlaceLine - 2));
}

// ----- divergent barrier, deadlock

constexpr int kDivergentLine = __LINE__ + 4;
template <bool kBroken>
__global__ void divergent_kernel(float* out, const float* in) {
  out[threadIdx.x] = in[threadIdx.x];
  if (kBroken && threadIdx.x < 40) __syncthreads();
  __syncthreads();
}

constexpr int kDeadlockLine = __LINE__ + 6;
template <bool kBroken>
__global__ void deadlock_kernel(float* out, const float* in) {
  out[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  if (!kBroken || threadIdx.x != 3) {
    out[threadIdx.x] = __shfl_sync(kFullMask, out[threadIdx.x], static_cast<int>(threadIdx.x));
  } else {
    __syncthreads();
  }
}

TEST_CASE("planted: a divergent barrier is caught, with both places", "[simt]") {
  const auto identity = [](int i) { return i + 1; };
  CHECK(judge(divergent_kernel<false>, identity).is_clean());
  contains(judge(divergent_kernel<true>, identity).error.value_or(""),
           "planted: block [0, 0, 0] thread 40: divergent __syncthreads: at " +
               here(kDivergentLine + 1) + ", but thread 0 is at " + here(kDivergentLine));
}

TEST_CASE("planted: a deadlock is caught and says who waits where", "[simt]") {
  const auto identity = [](int i) { return i + 1; };
  CHECK(judge(deadlock_kernel<false>, identity).is_clean());
  contains(judge(deadlock_kernel<true>, identity).error.value_or(""),
           "deadlock: thread 0 waits in __shfl_sync at " + here(kDeadlockLine) +
               ", thread 3 waits in __syncthreads at " + here(kDeadlockLine + 2));
}

// ----- uninitialised shared memory, and too little of it

template <bool kBroken>
__global__ void uninitialised_kernel(float* out, const float* in) {
  auto* s = dynamic_smem<float>();
  if constexpr (!kBroken) {
    s[threadIdx.x] = 0;
    __syncthreads();
  }
  if (threadIdx.x % 2 == 0) s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x] + s[threadIdx.x ^ 1];
}

TEST_CASE("planted: uninitialised shared memory is caught", "[simt]") {
  const auto expected = [](int i) { return i / 2 * 2 + 1; };
  CHECK(judge(uninitialised_kernel<false>, expected).is_clean());
  CHECK(judge(uninitialised_kernel<true>, expected).is_wrong);
}

constexpr int kTooSmallLine = __LINE__ + 4;
template <bool kBroken>
__global__ void too_small_kernel(float* out, const float* in) {
  const size_t second_half = kBroken ? 4 * kBlock * sizeof(float) : kBlock * sizeof(float);
  auto* s = dynamic_smem<float>(static_cast<int64_t>(second_half));
  s[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = s[threadIdx.x];
}

TEST_CASE("planted: shared memory that is too small is caught, with the place", "[simt]") {
  const auto identity = [](int i) { return i + 1; };
  CHECK(judge(too_small_kernel<false>, identity).is_clean());
  contains(judge(too_small_kernel<true>, identity).error.value_or(""),
           "dynamic_smem at byte 1024 for an element of 4 bytes, but the launch has 1024 bytes of "
           "shared memory, at " +
               here(kTooSmallLine));
}

// ----- misaligned vector

constexpr int kMisalignedLine = __LINE__ + 3;
template <bool kBroken>
__global__ void misaligned_kernel(float* out, const float* in) {
  const auto vec = load_vec<4>(in + (kBroken ? 1 : 4) + 2 * (threadIdx.x / 2 * 2));
  out[threadIdx.x] = vec[0];
}

TEST_CASE("planted: a misaligned vector is caught, with the place", "[simt]") {
  const auto expected = [](int i) { return i / 2 * 4 + 5; };
  CHECK(judge(misaligned_kernel<false>, expected).is_clean());
  const std::string text = judge(misaligned_kernel<true>, expected).error.value_or("");
  contains(text, "planted: block [0, 0, 0] thread 0: vector access at 0x");
  contains(text, " is not aligned to 16 bytes, at " + here(kMisalignedLine));
}

// ----- what the sanitizers find, in a program that dies of it

struct Run {
  int status;
  std::string output;
};

Run run_program(const std::string& name, const std::string& variant) {
  const std::string command = fmt::format("{} {} {} 2>&1", TESSERA_PLANTED_FAULTS, name, variant);
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  Run run{0, {}};
  std::array<char, 4096> chunk;
  for (size_t count; (count = fread(chunk.data(), 1, chunk.size(), pipe)) > 0;) {
    run.output.append(chunk.data(), count);
  }
  run.status = pclose(pipe);
  return run;
}

/// The program names the line of the fault first; the sanitizer's report must name it too.
void check_reported(const std::string& name, const std::string& report) {
  const Run clean = run_program(name, "ok");
  INFO(clean.output);
  CHECK(clean.status == 0);
  const Run broken = run_program(name, "broken");
  INFO(broken.output);
  CHECK(broken.status != 0);
  const std::string prefix = "fault at ";
  REQUIRE(broken.output.substr(0, prefix.size()) == prefix);
  const size_t end = broken.output.find('\n');
  const std::string place = broken.output.substr(prefix.size(), end - prefix.size());
  CHECK(broken.output.find(report) != std::string::npos);
  CHECK(broken.output.find(place, end) != std::string::npos);
}

TEST_CASE("planted: a store one element too far is reported with its line", "[simt]") {
  check_reported("off_by_one", "heap-buffer-overflow");
}

TEST_CASE("planted: a use after free is reported with its line", "[simt]") {
  check_reported("use_after_free", "heap-use-after-free");
}

TEST_CASE("planted: a store behind shared memory is reported with its line", "[simt]") {
  check_reported("beyond_shared", "use-after-poison");
}

TEST_CASE("planted: a misaligned vector behind a cast is reported with its line", "[simt]") {
  check_reported("misaligned", "misaligned address");
}

}  // namespace
}  // namespace tessera::cuda
