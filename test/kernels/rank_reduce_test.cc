#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/random.h"
#include "kernels/rank_reduce/kernel.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::kernels;
using tessera::testing::error_of;

namespace {

/// Any bits: NaN, infinities and subnormal numbers among them.
template <class T>
std::vector<T> any_bits(int rank, int64_t numel) {
  std::vector<T> values(static_cast<size_t>(numel));
  uint64_t state = static_cast<uint64_t>(rank) * 1000003 + 17;
  for (T& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    uint64_t bits = state >> 8;
    if (state % 3 == 0) bits &= sizeof(T) == 2 ? 0x80ffu : 0x80ffffffu;  // subnormal or nearly
    std::memcpy(static_cast<void*>(&value), &bits, sizeof value);
  }
  return values;
}

/// The definition of the tree over ranks [begin, end).
template <class T>
ComputeType<T> tree_sum(const std::vector<std::vector<T>>& arrays, size_t begin, size_t end,
                        size_t i) {
  if (end - begin == 1) return static_cast<ComputeType<T>>(arrays[begin][i]);
  const size_t middle = begin + (end - begin + 1) / 2;
  return tree_sum(arrays, begin, middle, i) + tree_sum(arrays, middle, end, i);
}

template <class T>
bool has_same_bits(T a, T b) {
  if (static_cast<double>(a) != static_cast<double>(a)) {
    return static_cast<double>(b) != static_cast<double>(b);
  }
  return std::memcmp(&a, &b, sizeof a) == 0;
}

template <class T>
std::vector<const void*> pointers(const std::vector<std::vector<T>>& arrays) {
  std::vector<const void*> sources;
  for (const auto& array : arrays) sources.push_back(array.data());
  return sources;
}

template <class T, class Out>
void check_sum(int num_ranks, int64_t numel, bool accumulate) {
  CAPTURE(num_ranks, numel, accumulate, dtype_of<T>, dtype_of<Out>);
  std::vector<std::vector<T>> arrays;
  for (int r = 0; r < num_ranks; ++r) arrays.push_back(any_bits<T>(r, numel));
  const std::vector<const void*> sources = pointers(arrays);
  const std::vector<Out> old = any_bits<Out>(99, numel);
  std::vector<Out> dst = old;
  tree_reduce({.dst = dst.data(),
               .sources = sources.data(),
               .num_sources = num_ranks,
               .numel = numel,
               .src_dtype = dtype_of<T>,
               .dst_dtype = dtype_of<Out>,
               .accumulate = accumulate});
  size_t num_wrong = 0;
  for (size_t i = 0; i < dst.size(); ++i) {
    using C = std::conditional_t<std::is_same_v<Out, double>, double, ComputeType<T>>;
    C sum = tree_sum(arrays, 0, arrays.size(), i);
    if (accumulate) sum = static_cast<C>(old[i]) + sum;
    const Out expected = static_cast<Out>(static_cast<ComputeType<Out>>(sum));
    num_wrong += !has_same_bits(dst[i], expected);
  }
  REQUIRE(num_wrong == 0);
}

template <class T>
void check_max(int num_ranks, int64_t numel) {
  CAPTURE(num_ranks, numel, dtype_of<T>);
  std::vector<std::vector<T>> arrays;
  for (int r = 0; r < num_ranks; ++r) arrays.push_back(any_bits<T>(r, numel));
  const std::vector<const void*> sources = pointers(arrays);
  std::vector<T> dst(static_cast<size_t>(numel));
  tree_reduce({.dst = dst.data(),
               .sources = sources.data(),
               .num_sources = num_ranks,
               .numel = numel,
               .src_dtype = dtype_of<T>,
               .dst_dtype = dtype_of<T>,
               .reduction = Reduction::kMax});
  size_t num_wrong = 0;
  for (size_t i = 0; i < dst.size(); ++i) {
    T expected = arrays[0][i];
    for (const auto& array : arrays) {
      if (array[i] > expected || array[i] != array[i]) expected = array[i];
    }
    num_wrong += static_cast<double>(expected) == 0 ? static_cast<double>(dst[i]) != 0
                                                    : !has_same_bits(dst[i], expected);
  }
  REQUIRE(num_wrong == 0);
}

}  // namespace

TEST_CASE("rank_reduce: sums of all dtypes have the bits of the tree, whatever is added",
          "[rank_reduce]") {
  for (const int num_ranks : {1, 2, 3, 4, 5, 8, 13}) {
    for (const int64_t numel : {0, 1, 31, 1024, 2500}) {
      for (const bool accumulate : {false, true}) {
        check_sum<float, float>(num_ranks, numel, accumulate);
        check_sum<float, BFloat16>(num_ranks, numel, accumulate);
        check_sum<float, double>(num_ranks, numel, accumulate);
        check_sum<BFloat16, BFloat16>(num_ranks, numel, accumulate);
        check_sum<BFloat16, float>(num_ranks, numel, accumulate);
        check_sum<Float16, Float16>(num_ranks, numel, accumulate);
        check_sum<Float16, float>(num_ranks, numel, accumulate);
        check_sum<double, double>(num_ranks, numel, accumulate);
        check_sum<double, float>(num_ranks, numel, accumulate);
      }
    }
  }
}

TEST_CASE("rank_reduce: a maximum is exact and keeps NaN", "[rank_reduce]") {
  for (const int num_ranks : {1, 2, 3, 5, 9}) {
    for (const int64_t numel : {1, 7, 1025}) {
      check_max<float>(num_ranks, numel);
      check_max<int32_t>(num_ranks, numel);
      check_max<uint8_t>(num_ranks, numel);
    }
  }
}

TEST_CASE("rank_reduce: dtypes that cannot be reduced", "[rank_reduce]") {
  const auto reduce = [](Reduction reduction, DType src, DType dst, bool accumulate) {
    return error_of([&] {
      tree_reduce({.dst = nullptr,
                   .sources = nullptr,
                   .num_sources = 0,
                   .numel = 0,
                   .src_dtype = src,
                   .dst_dtype = dst,
                   .accumulate = accumulate,
                   .reduction = reduction});
    });
  };
  const auto begins = [](const std::string& text, const char* with) {
    return text.rfind(with) == 0;
  };
  REQUIRE(begins(reduce(Reduction::kSum, kI32, kF32, false),
                 "tree_reduce: a sum is of floating dtypes, got i32 and f32"));
  REQUIRE(begins(reduce(Reduction::kMax, kBF16, kBF16, false),
                 "tree_reduce: a maximum is f32, i32 or u8, got bf16"));
  REQUIRE(begins(reduce(Reduction::kMax, kF32, kBF16, false),
                 "tree_reduce: a maximum stays f32, got bf16"));
  REQUIRE(begins(reduce(Reduction::kMax, kI32, kI32, true),
                 "tree_reduce: a maximum stays i32, got i32"));
}
