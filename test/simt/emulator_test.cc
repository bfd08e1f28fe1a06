#include <algorithm>
#include <numeric>

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/ptx.cuh"
#include "core/runtime/cuda/reduce.cuh"
#include "core/runtime/cuda/vec.cuh"
#include "test/simt/simt_testing.h"

// The emulator itself, and the helpers of core/runtime/cuda on it. That it finds what kernels do
// wrong: planted_faults_test.cc.

namespace tessera::cuda {
namespace {

using simt::Order;

constexpr Order kOrders[] = {Order::kForward, Order::kReverse, Order::kRandom};

/// One warp, unless told otherwise.
LaunchConfig config(unsigned num_threads = 32, size_t smem_bytes = 0, unsigned num_blocks = 1) {
  return {num_blocks, num_threads, smem_bytes, nullptr};
}

template <class F>
std::string simt_error_of(F&& f) {
  try {
    f();
  } catch (const simt::Error& error) {
    return error.what();
  }
  FAIL("no simt::Error");
  return {};
}

// ----- indices, orders, blocks

__global__ void index_kernel(unsigned* out) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}

TEST_CASE("emulator: every thread of a three-dimensional grid runs once", "[simt]") {
  for (const Order order : kOrders) {
    const simt::Schedule schedule(order);
    std::vector<unsigned> out(2 * 3 * 4 * 64, 0);
    launch("index", index_kernel, {dim3(2, 3, 4), dim3(8, 4, 2)}, out.data());
    for (unsigned i = 0; i < out.size(); ++i) REQUIRE(out[i] == i / 64 * 1000 + i % 64);
  }
}

__global__ void log_kernel(std::vector<unsigned>* log) {
  log->push_back(blockIdx.x * blockDim.x + threadIdx.x);
}

std::vector<unsigned> order_of_threads(Order order, uint64_t seed = 1) {
  const simt::Schedule schedule(order, seed);
  std::vector<unsigned> log;
  launch("log", log_kernel, config(32, 0, 3), &log);
  return log;
}

TEST_CASE("emulator: schedules run threads and blocks forward, in reverse and shuffled", "[simt]") {
  std::vector<unsigned> expected(96);
  std::iota(expected.begin(), expected.end(), 0u);
  CHECK(order_of_threads(Order::kForward) == expected);
  const auto random = order_of_threads(Order::kRandom, 1);
  CHECK(random == order_of_threads(Order::kRandom, 1));
  CHECK(random != order_of_threads(Order::kRandom, 2));
  CHECK(random != expected);
  std::reverse(expected.begin(), expected.end());
  CHECK(order_of_threads(Order::kReverse) == expected);
  auto sorted = random;
  std::sort(sorted.begin(), sorted.end());
  CHECK(std::vector<unsigned>(expected.rbegin(), expected.rend()) == sorted);
}

TEST_CASE("emulator: a scope ends its schedule and its choice of blocks", "[simt]") {
  { const simt::Schedule schedule(Order::kReverse); }
  CHECK(order_of_threads(Order::kForward).front() == 0);
  std::vector<unsigned> log;
  {
    const simt::OnlyBlocks ends({0, -1});
    launch("log", log_kernel, config(32, 0, 1u << 30), &log);
    CHECK(log.size() == 64);
    CHECK(log.back() == (1u << 30) * 32u - 1);
    CHECK(simt_error_of([&] {
            launch("log", log_kernel, config(), &log);
            const simt::OnlyBlocks beyond({1});
            launch("log", log_kernel, config(), &log);
          }) == "log: OnlyBlocks: block 1 of a grid of 1");
  }
  log.clear();
  launch("log", log_kernel, config(32, 0, 3), &log);
  CHECK(log.size() == 96);
}

TEST_CASE("emulator: a reserved buffer is zero and costs what is touched", "[simt]") {
  const simt::ReservedBuffer buffer(int64_t{1} << 36);
  CHECK(buffer.as<char>()[buffer.nbytes() - 1] == 0);
  buffer.as<char>()[buffer.nbytes() - 1] = 1;
  CHECK(buffer.as<char>()[0] == 0);
}

TEST_CASE("emulator: a geometry that no device takes is an error that says the limit", "[simt]") {
  std::vector<unsigned> log;
  const auto error_of_geometry = [&](dim3 grid, dim3 block, size_t smem_bytes) {
    return simt_error_of([&] {
      launch("log", log_kernel, {grid, block, smem_bytes, nullptr}, &log);
    });
  };
  CHECK(error_of_geometry(0, 32, 0) ==
        "log: grid [0, 1, 1], block [32, 1, 1], 0 bytes of shared memory: expected at least one "
        "block");
  CHECK(error_of_geometry(1u << 31, 32, 0).find("expected at most 2147483647 blocks along x") !=
        std::string::npos);
  CHECK(error_of_geometry({1, 65536}, 32, 0).find("at most 65535 blocks along y and z") !=
        std::string::npos);
  CHECK(error_of_geometry({1, 1, 65536}, 32, 0).find("at most 65535 blocks along y and z") !=
        std::string::npos);
  CHECK(error_of_geometry(1, 1056, 0).find("expected 1 to 1024 threads") != std::string::npos);
  CHECK(error_of_geometry(1, 0, 0).find("expected 1 to 1024 threads") != std::string::npos);
  CHECK(error_of_geometry(1, 48, 0).find("expected whole warps of 32 threads") !=
        std::string::npos);
  CHECK(error_of_geometry(1, 32, 232449).find("expected at most 232448 bytes of shared memory") !=
        std::string::npos);
  CHECK(log.empty());
}

__global__ void nested_kernel() {
  launch("inner", nested_kernel, config());
}

TEST_CASE("emulator: a kernel cannot launch", "[simt]") {
  CHECK(simt_error_of([] { launch("outer", nested_kernel, config()); }) ==
        "inner: a launch from inside a kernel");
  launch("log", log_kernel, config(), std::make_unique<std::vector<unsigned>>().get());
}

TEST_CASE("emulator: launches go to whoever runs the streams", "[simt]") {
  std::vector<unsigned> log;
  std::vector<std::pair<cudaStream_t, std::function<void()>>> queue;
  struct Restore {
    ~Restore() { simt::set_launcher({}); }
  } restore;
  simt::set_launcher([&](cudaStream_t stream, std::function<void()> work) {
    queue.emplace_back(stream, std::move(work));
  });
  const auto stream = reinterpret_cast<cudaStream_t>(&log);
  {
    const simt::Schedule schedule(Order::kReverse);
    launch("log", log_kernel, {1, 32, 0, stream}, &log);
  }
  simt::enqueue(stream, [&] { log.push_back(99); });
  REQUIRE(queue.size() == 2);
  CHECK(queue[0].first == stream);
  CHECK(log.empty());
  for (auto& [unused, work] : queue) work();
  CHECK(log.size() == 33);
  CHECK(log.front() == 31);  // in the schedule under which it was launched
}

// ----- barriers and warps

__global__ void exited_kernel(int* out, int num_alive) {
  if (static_cast<int>(threadIdx.x) >= num_alive) return;
  out[threadIdx.x] = __syncthreads_count(threadIdx.x % 2 == 0);
  if (__syncthreads_or(threadIdx.x == 3) != 1) out[threadIdx.x] = -1;
  if (__syncthreads_and(threadIdx.x != 3) != 0) out[threadIdx.x] = -1;
}

TEST_CASE("emulator: a barrier waits for the threads that have not exited", "[simt]") {
  for (const Order order : kOrders) {
    const simt::Schedule schedule(order);
    std::vector<int> out(64, 0);
    launch("exited", exited_kernel, config(64), out.data(), 40);
    for (size_t i = 0; i < out.size(); ++i) REQUIRE(out[i] == (i < 40 ? 20 : 0));
  }
}

__global__ void shuffle_kernel(double* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const double value = lane + 0.5;
  out[0 * 32 + lane] = __shfl_sync(kFullMask, value, 3, 16);
  out[1 * 32 + lane] = __shfl_xor_sync(kFullMask, value, 5);
  out[2 * 32 + lane] = __shfl_up_sync(kFullMask, value, 2, 8);
  out[3 * 32 + lane] = __shfl_down_sync(kFullMask, value, 3);
  out[4 * 32 + lane] = __shfl_sync(kFullMask, value, lane + 1);
}

TEST_CASE("emulator: shuffles read the lane that CUDA names", "[simt]") {
  for (const Order order : kOrders) {
    const simt::Schedule schedule(order);
    std::vector<double> out(5 * 32);
    launch("shuffle", shuffle_kernel, config(), out.data());
    for (int lane = 0; lane < 32; ++lane) {
      const auto i = static_cast<size_t>(lane);
      REQUIRE(out[i] == lane / 16 * 16 + 3 + 0.5);
      REQUIRE(out[32 + i] == (lane ^ 5) + 0.5);
      REQUIRE(out[64 + i] == (lane % 8 < 2 ? lane : lane - 2) + 0.5);
      REQUIRE(out[96 + i] == (lane + 3 < 32 ? lane + 3 : lane) + 0.5);
      REQUIRE(out[128 + i] == (lane + 1) % 32 + 0.5);
    }
  }
}

__global__ void vote_kernel(unsigned* out) {
  const unsigned lane = threadIdx.x % 32;
  unsigned result = __ballot_sync(kFullMask, lane % 2 == 0);
  if (lane < 16) {  // the halves of a warp vote apart
    result ^= __ballot_sync(0x0000ffffu, 1);
    result += __any_sync(0x0000ffffu, lane == 3) ? 1 : 0;
  } else {
    result += __all_sync(0xffff0000u, lane == 3) ? 1 : 0;
    __syncwarp(0xffff0000u);
  }
  out[threadIdx.x] = result;
}

TEST_CASE("emulator: votes, also of a part of the warp", "[simt]") {
  for (const Order order : kOrders) {
    const simt::Schedule schedule(order);
    std::vector<unsigned> out(64);
    launch("vote", vote_kernel, config(64), out.data());
    for (size_t i = 0; i < out.size(); ++i) {
      REQUIRE(out[i] == (i % 32 < 16 ? (0x55555555u ^ 0xffffu) + 1 : 0x55555555u));
    }
  }
}

__global__ void regroup_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  int value = lane;
  if (lane == 0) value += __shfl_sync(1u, value, 0);  // lanes 1 to 31 wait for it meanwhile
  out[lane] = __shfl_sync(kFullMask, value + 7, 0);
}

TEST_CASE("emulator: a lane that meets others first does not disturb those who wait", "[simt]") {
  for (const Order order : kOrders) {
    const simt::Schedule schedule(order);
    std::vector<int> out(32);
    launch("regroup", regroup_kernel, config(), out.data());
    CHECK(out == std::vector<int>(32, 7));
  }
}

// ----- shared memory, cp.async

__global__ void stale_kernel(float* out) {
  float* s = dynamic_smem<float>();
  if (blockIdx.x == 0) s[threadIdx.x] = 1;
  out[blockIdx.x * blockDim.x + threadIdx.x] = s[threadIdx.x];
}

TEST_CASE("emulator: shared memory does not survive a block", "[simt]") {
  std::vector<float> out(64);
  launch("stale", stale_kernel, config(32, 128, 2), out.data());
  CHECK(out[0] == 1);
  for (size_t i = 32; i < 64; ++i) REQUIRE(std::isnan(out[i]));
}

__global__ void carve_kernel(int64_t byte_offset) {
  dynamic_smem<float>(byte_offset)[0] = 1;
}

TEST_CASE("emulator: carving beyond or across shared memory is an error with its place", "[simt]") {
  launch("carve", carve_kernel, config(32, 128), 124);
  const std::string text =
      simt_error_of([] { launch("carve", carve_kernel, config(32, 128), 128); });
  INFO(text);
  CHECK(text.find("carve: block [0, 0, 0] thread 0: dynamic_smem at byte 128 for an element of 4 "
                  "bytes, but the launch has 128 bytes of shared memory, at "
                  "test/simt/emulator_test.cc:") == 0);
  CHECK(simt_error_of([] {
          launch("carve", carve_kernel, config(32, 128), -4);
        }).find("dynamic_smem at byte -4") != std::string::npos);
  CHECK(simt_error_of([] {
          launch("carve", carve_kernel, config(32, 128), 2);
        }).find("is not aligned to 4 bytes, at test/simt/emulator_test.cc:") != std::string::npos);
}

__global__ void copy_kernel(float* out, const float* in, int num_valid) {
  const auto lane = static_cast<int>(threadIdx.x);
  float* s = dynamic_smem<float>() + 4 * lane;
  for (int stage = 0; stage < 3; ++stage) {
    cp_async_16(s + 128 * stage, in + 128 * stage + 4 * lane, lane < num_valid);
    cp_async_commit();
  }
  const auto log = [&](int row) {
    for (int stage = 0; stage < 3; ++stage) out[(3 * row + stage) * 32 + lane] = s[128 * stage];
  };
  log(0);
  cp_async_wait<3>();
  log(1);
  cp_async_wait<1>();
  log(2);
  cp_async_wait<0>();
  log(3);
}

TEST_CASE("emulator: cp.async lands at the wait for its group and not before", "[simt]") {
  std::vector<float> in(3 * 128), out(4 * 3 * 32);
  std::iota(in.begin(), in.end(), 1.0f);
  launch("copy", copy_kernel, config(32, 3 * 512), out.data(), in.data(), 30);
  for (int row = 0; row < 4; ++row) {
    const int num_landed = row < 2 ? 0 : row == 2 ? 2 : 3;
    for (int stage = 0; stage < 3; ++stage) {
      for (int lane = 0; lane < 32; ++lane) {
        const float value = out[static_cast<size_t>((3 * row + stage) * 32 + lane)];
        if (stage >= num_landed) {
          REQUIRE(std::isnan(value));
        } else {
          REQUIRE(value == (lane < 30 ? in[static_cast<size_t>(128 * stage + 4 * lane)] : 0.0f));
        }
      }
    }
  }
}

__global__ void uncommitted_kernel(float* out, const float* in) {
  float* s = dynamic_smem<float>();
  cp_async_16(s, in);
  cp_async_wait<0>();
  out[threadIdx.x] = s[0];
}

TEST_CASE("emulator: a copy that was never committed is not waited for", "[simt]") {
  std::vector<float> in(4, 1.0f), out(32, 1.0f);
  launch("uncommitted", uncommitted_kernel, config(32, 16), out.data(), in.data());
  CHECK(std::isnan(out[0]));
}

__global__ void copy_to_kernel(void* to, const void* from) {
  cp_async_16(to == nullptr ? dynamic_smem<char>() : to, from);
}

TEST_CASE("emulator: cp.async checks both addresses", "[simt]") {
  alignas(16) char global[64] = {};
  const auto error_of_copy = [&](void* to, const void* from) {
    return simt_error_of([&] { launch("copy_to", copy_to_kernel, config(32, 64), to, from); });
  };
  CHECK(error_of_copy(global + 1, global).find("thread 0: cp.async to shared memory at ") !=
        std::string::npos);
  CHECK(error_of_copy(global, global)
            .find(", outside the 64 bytes of shared memory, at "
                  "test/simt/emulator_test.cc:") != std::string::npos);
  CHECK(error_of_copy(nullptr, global + 8).find("cp.async from global memory at ") !=
        std::string::npos);
  const auto freed = std::make_unique<char[]>(64);
  const char* behind = freed.get() + 64;
  CHECK(error_of_copy(nullptr, behind)
            .find("out of bounds or after they were freed, at "
                  "test/simt/emulator_test.cc:") != std::string::npos);
}

// ----- matrices

template <bool kTransposed>
__global__ void ldmatrix_kernel(uint32_t* out, const uint16_t* in) {
  auto* s = dynamic_smem<uint16_t>();
  const auto lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 8; ++i) s[8 * lane + i] = in[8 * lane + i];
  __syncwarp();
  uint32_t four[4], two[2];
  // Row r of matrix m lies at row 8 m + (r + m) % 8: a swizzle.
  const auto row = [&](int l) { return s + 8 * (l / 8 * 8 + (l % 8 + l / 8) % 8); };
  if constexpr (kTransposed) {
    ldmatrix_x4_trans(four, row(lane));
    ldmatrix_x2_trans(two, lane < 16 ? row(lane) : nullptr);
  } else {
    ldmatrix_x4(four, row(lane));
    ldmatrix_x2(two, lane < 16 ? row(lane) : nullptr);
  }
  for (int i = 0; i < 4; ++i) out[lane * 6 + i] = four[i];
  for (int i = 0; i < 2; ++i) out[lane * 6 + 4 + i] = two[i];
}

TEST_CASE("emulator: ldmatrix deals out rows, or columns when transposed", "[simt]") {
  std::vector<uint16_t> in(256);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i * 257);
  const auto element = [&](int matrix, int row, int column) -> uint32_t {
    return in[static_cast<size_t>(8 * (8 * matrix + (row + matrix) % 8) + column)];
  };
  for (const bool transposed : {false, true}) {
    std::vector<uint32_t> out(32 * 6);
    launch("ldmatrix", transposed ? ldmatrix_kernel<true> : ldmatrix_kernel<false>, config(32, 512),
           out.data(), in.data());
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 6; ++i) {
        const int matrix = i % 4, g = lane / 4, t = lane % 4;
        const uint32_t lo = transposed ? element(matrix, 2 * t, g) : element(matrix, g, 2 * t);
        const uint32_t hi =
            transposed ? element(matrix, 2 * t + 1, g) : element(matrix, g, 2 * t + 1);
        REQUIRE(out[static_cast<size_t>(lane * 6 + i)] == (lo | hi << 16));
      }
    }
  }
}

__global__ void ldmatrix_at_kernel(int64_t byte_offset) {
  uint32_t r[4];
  ldmatrix_x4(r, dynamic_smem<char>() + byte_offset);
}

TEST_CASE("emulator: ldmatrix checks its row addresses", "[simt]") {
  CHECK(simt_error_of([] {
          launch("ldmatrix", ldmatrix_at_kernel, config(32, 64), 8);
        }).find("thread 0: ldmatrix row at ") != std::string::npos);
  CHECK(simt_error_of([] {
          launch("ldmatrix", ldmatrix_at_kernel, config(32, 64), 64);
        }).find(", outside the 64 bytes of shared memory, at test/simt/emulator_test.cc:") !=
        std::string::npos);
}

__global__ void rows_kernel(int64_t stride_bytes) {
  uint32_t r[4];
  ldmatrix_x4(r, dynamic_smem<char>() + stride_bytes * static_cast<int64_t>(threadIdx.x % 8));
}

TEST_CASE("emulator: ldmatrix counts the rows that share banks", "[simt]") {
  for (const auto& [stride_bytes, num_conflicts] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 0}, {16, 0}, {80, 0}, {144, 0}, {32, 4}, {64, 12}, {128, 28}}) {
    const simt::MatrixLoads loads;
    launch("rows", rows_kernel, config(64, 1024, 3), stride_bytes);
    CHECK(loads.num_reads() == 2 * 3 * 4);
    CHECK(loads.num_conflicts() == 2 * 3 * num_conflicts);
  }
}

/// One 16 x 8 tile from row-major a [16, 16] and b [16, 8] by the formulas of ptx.cuh.
template <class T>
__global__ void mma_kernel(float* d, const T* a, const T* b, const float* c) {
  const auto lane = static_cast<int>(threadIdx.x);
  const int g = lane / 4, t = lane % 4;
  uint32_t ra[4], rb[2];
  float acc[4];
  for (int i = 0; i < 4; ++i) {
    const T* from = a + (g + 8 * (i % 2)) * 16 + 2 * t + 8 * (i / 2);
    ra[i] = pack2<T>(to_float(from[0]), to_float(from[1]));
    acc[i] = c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
  }
  for (int i = 0; i < 2; ++i) {
    const T* from = b + (2 * t + 8 * i) * 8 + g;
    rb[i] = pack2<T>(to_float(from[0]), to_float(from[8]));
  }
  mma_m16n8k16<T>(acc, ra, rb, acc);
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = acc[i];
}

template <class T>
void check_mma() {
  std::vector<T> a(256), b(128);
  std::vector<float> c(128), d(128);
  for (size_t i = 0; i < 256; ++i) a[i] = T(static_cast<float>(i * 7 % 23) - 11.5f);
  for (size_t i = 0; i < 128; ++i) b[i] = T(static_cast<float>(i * 5 % 19) - 9.25f);
  for (size_t i = 0; i < 128; ++i) c[i] = static_cast<float>(i);
  for (const Order order : kOrders) {
    const simt::Schedule schedule(order);
    launch("mma", mma_kernel<T>, config(), d.data(), a.data(), b.data(), c.data());
    for (size_t row = 0; row < 16; ++row) {
      for (size_t column = 0; column < 8; ++column) {
        double sum = c[row * 8 + column];
        for (size_t k = 0; k < 16; ++k) sum += double{a[row * 16 + k]} * b[k * 8 + column];
        REQUIRE(d[row * 8 + column] == sum);  // every sum is exact in f32
      }
    }
  }
}

TEST_CASE("emulator: mma.m16n8k16 multiplies a tile of bf16 or f16 in place", "[simt]") {
  check_mma<BFloat16>();
  check_mma<Float16>();
}

// ----- launch, vec, reduce

TEST_CASE("cuda launch: geometry helpers", "[simt]") {
  static_assert(ceil_div(10, 4) == 3);
  CHECK(ceil_div((int64_t{1} << 40) + 1, 256) == (int64_t{1} << 32) + 1);
  CHECK(grid_blocks(2147483647) == 2147483647u);
  CHECK(testing::error_of([] {
          grid_blocks(2147483648);
        }).find("grid_blocks: expected 0 to 2147483647 blocks, got 2147483648") == 0);
  CHECK(num_multiprocessors() == 4);
}

TEST_CASE("cuda vec: conversions are those of the dtypes on the host", "[simt]") {
  for (const float value : {0.0f, -0.0f, 1.00390625f, 1.01171875f, 65519.9f, 65520.0f, 6e-8f, 1e30f,
                            -3.3895314e38f, 3.4e38f, INFINITY, -INFINITY}) {
    CHECK(from_float<float>(value) == value);
    CHECK(from_float<BFloat16>(value).bits == BFloat16(value).bits);
    CHECK(from_float<Float16>(value).bits == Float16(value).bits);
    CHECK(to_float(BFloat16(value)) == static_cast<float>(BFloat16(value)));
    CHECK(to_float(Float16(value)) == static_cast<float>(Float16(value)));
    CHECK(pack2<BFloat16>(value, 2.0f) == (uint32_t{BFloat16(value).bits} | 0x40000000u));
    CHECK(pack2<Float16>(2.0f, value) == (uint32_t{Float16(value).bits} << 16 | 0x4000u));
  }
  CHECK(std::isnan(to_float(from_float<BFloat16>(NAN))));
  CHECK(std::isnan(to_float(from_float<Float16>(NAN))));
  CHECK(exp2_approx(3.0f) == 8.0f);
  CHECK(log2_approx(8.0f) == 3.0f);
  CHECK(rcp_approx(8.0f) == 0.125f);
}

template <class T, int N>
__global__ void vec_kernel(T* out, const T* in, bool is_streaming) {
  const int64_t at = static_cast<int64_t>(threadIdx.x) * N;
  Vec<T, N> vec = is_streaming ? load_streaming<N>(in + at) : load_vec<N>(in + at);
  std::reverse(vec.values, vec.values + N);
  if (is_streaming) {
    store_streaming(out + at, vec);
  } else {
    store_vec(out + at, vec);
  }
}

template <class T, int N>
void check_vec() {
  static_assert(sizeof(Vec<T, N>) == N * sizeof(T));
  static_assert(alignof(Vec<T, N>) == std::min<size_t>(16, N * sizeof(T)));
  for (const bool is_streaming : {false, true}) {
    std::vector<T> in(32 * N + 1), out(32 * N);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<T>(i);
    launch("vec", vec_kernel<T, N>, config(), out.data(), in.data(), is_streaming);
    for (size_t i = 0; i < out.size(); ++i) REQUIRE(out[i] == in[i / N * N + (N - 1 - i % N)]);
    if (N == 1) continue;
    CHECK(simt_error_of([&] {
            launch("vec", vec_kernel<T, N>, config(), out.data(), in.data() + 1, is_streaming);
          })
              .find(fmt::format("vector access at {} is not aligned to {} bytes, at "
                                "test/simt/emulator_test.cc:",
                                fmt::ptr(in.data() + 1), alignof(Vec<T, N>))) != std::string::npos);
  }
}

TEST_CASE("cuda vec: vectors of 1 to 32 bytes; a misaligned one is an error", "[simt]") {
  static_assert(kVec<float> == 4 && kVec<BFloat16> == 8 && kVec<Float16> == 8);
  check_vec<uint8_t, 1>();
  check_vec<uint16_t, 1>();
  check_vec<uint16_t, 2>();
  check_vec<uint16_t, 4>();
  check_vec<uint16_t, 8>();
  check_vec<float, 4>();
  check_vec<float, 8>();
  alignas(16) char bytes[32];
  CHECK(is_aligned16(bytes + 16));
  CHECK_FALSE(is_aligned16(bytes + 8));
}

TEST_CASE("cuda vec: a dtype without CUDA kernels is an error that names op and dtype", "[simt]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    visit_device_float(dtype, "rope",
                       [&](auto tag) { CHECK(dtype_of<typename decltype(tag)::type> == dtype); });
  }
  for (const DType dtype : {kF64, kI32}) {
    CHECK(testing::error_of([&] {
            visit_device_float(dtype, "rope", [](auto) {});
          }).find(fmt::format("rope: no CUDA kernel for dtype {}", dtype)) == 0);
  }
}

template <class T, int kBlock>
__global__ void reduce_kernel(T* out, const T* in) {
  T* s = dynamic_smem<T>();
  const T value = in[threadIdx.x];
  const T warp = warp_sum(value);
  const T sum = block_sum<kBlock>(value, s);
  const T largest = block_max<kBlock>(value, s);  // at once, with the same memory
  const bool is_same = sum == block_sum<kBlock>(value, s);
  T* row = out + 4 * threadIdx.x;
  row[0] = warp;
  row[1] = warp_max(value);
  row[2] = sum;
  row[3] = is_same ? largest : T{0};
}

template <class T, int kBlock>
void check_reduce() {
  std::vector<T> in(kBlock), out(4 * kBlock), first;
  for (size_t i = 0; i < kBlock; ++i) in[i] = static_cast<T>(-1) / static_cast<T>(i * 37 % 101 + 1);
  const auto sum = [&](size_t begin, size_t end) {
    return std::accumulate(in.begin() + static_cast<ptrdiff_t>(begin),
                           in.begin() + static_cast<ptrdiff_t>(end), 0.0);
  };
  for (const Order order : kOrders) {
    const simt::Schedule schedule(order);
    launch("reduce", reduce_kernel<T, kBlock>, config(kBlock, kBlock / 32 * sizeof(T)), out.data(),
           in.data());
    for (size_t i = 0; i < kBlock; ++i) {
      const size_t warp = i / 32 * 32;
      REQUIRE(out[4 * i] == Approx(sum(warp, warp + 32)).epsilon(1e-5));
      REQUIRE(out[4 * i + 1] == *std::max_element(&in[warp], &in[warp] + 32));
      REQUIRE(out[4 * i + 2] == Approx(sum(0, kBlock)).epsilon(1e-5));
      REQUIRE(out[4 * i + 2] == out[2]);
      REQUIRE(out[4 * i + 3] == *std::max_element(in.begin(), in.end()));
    }
    if (first.empty()) first = out;
    REQUIRE(first == out);
  }
}

TEST_CASE("cuda reduce: sums and maxima of warp and block, in one order, in all threads",
          "[simt]") {
  check_reduce<float, 32>();
  check_reduce<float, 96>();
  check_reduce<float, 1024>();
  check_reduce<double, 256>();
}

__global__ void ticket_kernel(unsigned* counter, unsigned* out) {
  const unsigned ticket = atomicAdd(counter, 1u);
  out[ticket] = 1;
  atomicMax(counter + 1, ticket);
  atomicOr(counter + 2, 1u << (ticket % 32));
  if (ticket == 5) atomicExch(counter + 3, 77u);
}

TEST_CASE("emulator: integer atomics", "[simt]") {
  std::vector<unsigned> counter(4), out(96);
  launch("ticket", ticket_kernel, config(32, 0, 3), counter.data(), out.data());
  CHECK(counter == std::vector<unsigned>{96, 95, 0xffffffffu, 77});
  CHECK(out == std::vector<unsigned>(96, 1));
}

}  // namespace
}  // namespace tessera::cuda
