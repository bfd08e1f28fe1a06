#include "kernels/rank_reduce/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::RankReduce;
using kernels::Reduction;
using testing::check_bitwise;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randint;
using testing::randn;
using testing::run_in_all_schedules;

struct Case {
  int num_ranks = 2, rank = 0;
  int64_t numel = 256;
  DType src = kF32, dst = kF32;
  bool accumulate = false;
  Reduction reduction = Reduction::kSum;
  bool in_place = false;  // the own array is the destination
  int64_t offset = 0;     // of the buffers, in elements
};

Tensor values(const Shape& shape, DType dtype, uint64_t seed) {
  return is_floating(dtype) ? randn(shape, dtype, seed) : randint(0, 200, shape, dtype, seed);
}

/// The emulator in all schedules has the bits of the CPU kernel: the tree is the same.
void check(const Case& c) {
  INFO(
      fmt::format("{} ranks, rank {}, {} elements, {} to {}, accumulate {}, in place {}, offset {}",
                  c.num_ranks, c.rank, c.numel, c.src, c.dst, c.accumulate, c.in_place, c.offset));
  const Tensor own = values({c.numel}, c.src, 1), old = values({c.numel}, c.dst, 2);
  const Tensor others = values({std::max(1, c.num_ranks - 1), c.numel}, c.src, 3);
  const auto run = [&](auto fn) {
    const DeviceBuffer own_buffer(own, c.offset), others_buffer(others, c.offset);
    const DeviceBuffer dst(old, c.offset);
    const void* dst_data = c.in_place ? own_buffer.data() : dst.data();
    fn(RankReduce{.dst = const_cast<void*>(dst_data),
                  .own = own_buffer.data(),
                  .others = c.num_ranks > 1 ? others_buffer.data() : nullptr,
                  .others_stride = c.numel * static_cast<int64_t>(size_of(c.src)),
                  .rank = c.rank,
                  .num_ranks = c.num_ranks,
                  .numel = c.numel,
                  .src_dtype = c.src,
                  .dst_dtype = c.dst,
                  .accumulate = c.accumulate,
                  .reduction = c.reduction});
    return std::vector<Tensor>{c.in_place ? own_buffer.tensor() : dst.tensor()};
  };
  const auto expected = run([](const RankReduce& a) { kernels::cpu::rank_reduce(a); });
  const auto actual = run_in_all_schedules(
      [&] { return run([](const RankReduce& a) { kernels::cuda::rank_reduce(nullptr, a); }); });
  check_bitwise(actual[0], expected[0], "dst");
}

TEST_CASE("simt rank_reduce: any number of ranks, any of them, has the CPU's bits",
          "[rank_reduce][simt]") {
  for (const int num_ranks : {1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 33}) {
    for (const int rank : {0, num_ranks / 2, num_ranks - 1}) {
      check({.num_ranks = num_ranks, .rank = rank, .numel = 261});
    }
  }
}

TEST_CASE("simt rank_reduce: all dtypes, also accumulating, one rounding at the end",
          "[rank_reduce][simt]") {
  for (const DType src : {kF32, kBF16, kF16}) {
    for (const DType dst : {kF32, kBF16, kF16}) {
      for (const bool accumulate : {false, true}) {
        for (const int num_ranks : {3, 4}) {
          check({num_ranks, 1, 256, src, dst, accumulate});
        }
      }
    }
  }
}

TEST_CASE("simt rank_reduce: f64 adds in f64", "[rank_reduce][simt]") {
  for (const bool accumulate : {false, true}) {
    for (const int num_ranks : {1, 2, 3, 4, 5, 8, 17}) {
      check({num_ranks, num_ranks / 2, 261, kF64, kF64, accumulate});
    }
    check({4, 1, 33, kF64, kF64, accumulate, Reduction::kSum, false, 1});
  }
}

TEST_CASE("simt rank_reduce: in place, unaligned, short and long arrays", "[rank_reduce][simt]") {
  for (const int num_ranks : {2, 3}) {
    check({.num_ranks = num_ranks, .rank = 1, .numel = 1000, .in_place = true});
    check({.num_ranks = num_ranks, .rank = 1, .numel = 64, .src = kBF16, .offset = 1});
    for (const int64_t numel : {0, 1, 3, 5000}) check({.num_ranks = num_ranks, .numel = numel});
  }
}

TEST_CASE("simt rank_reduce: maxima, and NaN of one rank wins", "[rank_reduce][simt]") {
  for (const DType dtype : {kF32, kI32, kU8}) {
    for (const int num_ranks : {2, 3, 8}) {
      check({num_ranks, 1, 77, dtype, dtype, false, Reduction::kMax});
    }
  }
  for (const int num_ranks : {2, 3}) {
    const DeviceBuffer own(full({4}, 1)), others({num_ranks - 1, 4}, kF32);  // NaN
    kernels::cuda::rank_reduce(nullptr, {own.data(), own.data(), others.data(), 16, 0, num_ranks, 4,
                                         kF32, kF32, false, Reduction::kMax});
    const auto result = own.tensor().to_vector();
    CHECK(result[0] != result[0]);
  }
}

TEST_CASE("simt rank_reduce: the last element above 2^32 bytes", "[rank_reduce][simt]") {
  const int64_t numel = (int64_t{1} << 30) + 8;  // 4 GiB and 32 bytes of f32
  const simt::ReservedBuffer own(numel * 4), others(numel * 4), dst(numel * 4);
  own.as<float>()[0] = 1, others.as<float>()[0] = 2;
  own.as<float>()[numel - 1] = 3, others.as<float>()[numel - 1] = 4;
  const simt::OnlyBlocks only({0, -1});
  kernels::cuda::rank_reduce(
      nullptr, {dst.data(), own.data(), others.data(), numel * 4, 0, 2, numel, kF32, kF32});
  CHECK(dst.as<float>()[0] == 3);
  CHECK(dst.as<float>()[numel - 1] == 7);
  CHECK(dst.as<float>()[numel / 2] == 0);
}

TEST_CASE("simt rank_reduce: dtypes that it does not add are named", "[rank_reduce][simt]") {
  RankReduce a{};
  a.num_ranks = 1, a.numel = 1, a.src_dtype = kF64, a.dst_dtype = kF32;
  CHECK(error_of([&] {
          kernels::cuda::rank_reduce(nullptr, a);
        }).find("rank_reduce: no CUDA kernel for dtype f64") == 0);
  a.src_dtype = kI32;
  CHECK(error_of([&] {
          kernels::cuda::rank_reduce(nullptr, a);
        }).find("tree_reduce: a sum is of floating dtypes, got i32 and f32") == 0);
  a.reduction = Reduction::kMax;
  CHECK(error_of([&] {
          kernels::cuda::rank_reduce(nullptr, a);
        }).find("tree_reduce: a maximum stays i32, got f32") == 0);
  a.src_dtype = a.dst_dtype = kF16;
  CHECK(error_of([&] {
          kernels::cuda::rank_reduce(nullptr, a);
        }).find("tree_reduce: a maximum is f32, i32 or u8, got f16") == 0);
}

}  // namespace
}  // namespace tessera
