#include "kernels/embedding/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::EmbeddingBwd;
using kernels::EmbeddingFwd;
using testing::check_bitwise;
using testing::check_close;
using testing::DeviceBuffer;
using testing::randint;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

int64_t order_numel(int64_t vocab, int64_t rows) {
  return EmbeddingBwd::order_numel(DeviceType::kCuda, vocab, rows);
}

/// The rows of a table by both kernels: the same bits.
void check_forward(const Tensor& ids, int64_t vocab, int64_t cols, DType dtype,
                   int64_t offset = 0) {
  INFO(fmt::format("{} ids of {}, weight [{}, {}] {}, offset {}", ids.numel(), ids.dtype(), vocab,
                   cols, dtype, offset));
  const DeviceBuffer id_buffer(ids), weight(randn({vocab, cols}, dtype, 2), offset);
  const auto run = [&](auto fn) {
    const DeviceBuffer y({ids.numel(), cols}, dtype, offset);
    fn(EmbeddingFwd{y.data(), id_buffer.data(), weight.data(), dtype, ids.dtype(), ids.numel(),
                    cols, vocab});
    return std::vector<Tensor>{y.tensor()};
  };
  const auto expected = run([](const EmbeddingFwd& a) { kernels::cpu::embedding_fwd(a); });
  const auto actual = run_in_all_schedules(
      [&] { return run([](const EmbeddingFwd& a) { kernels::cuda::embedding_fwd(nullptr, a); }); });
  check_bitwise(actual[0], expected[0], "y");
}

TEST_CASE("simt embedding: rows of any width and dtype", "[embedding][simt]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const int64_t cols : {1, 7, 8, 64, 257, 640}) {
      check_forward(randint(0, 11, {13}, kI32), 11, cols, dtype);
    }
    check_forward(randint(0, 11, {9}, kI64), 11, 16, dtype);
    check_forward(randint(0, 11, {9}, kI64), 11, 16, dtype, 1);
  }
  check_forward(randint(0, 3, {100}, kI32), 3, 8, kBF16);
}

struct Gradient {
  DType dtype = kF32, dw_dtype = kF32;
  bool accumulate = false;
  int64_t dw_stride = 0;  // 0 = cols
  int64_t offset = 0;     // of dw and dy
};

/// dw by both kernels, from the same dw; the bytes between its rows must stay.
void check_backward(const Tensor& ids, int64_t vocab, int64_t cols, const Gradient& g,
                    int64_t longest_run) {
  INFO(fmt::format("{} ids, dw [{}, {}] {} from {}, accumulate {}, stride {}, offset {}",
                   ids.numel(), vocab, cols, g.dw_dtype, g.dtype, g.accumulate, g.dw_stride,
                   g.offset));
  const int64_t rows = ids.numel(), stride = g.dw_stride == 0 ? cols : g.dw_stride;
  const DeviceBuffer id_buffer(ids), dy(randn({rows, cols}, g.dtype, 3), g.offset);
  const Tensor before = randn({vocab, stride}, g.dw_dtype, 4);
  const auto run = [&](auto fn) {
    const DeviceBuffer dw(before, g.offset), order({order_numel(vocab, rows)}, kI32);
    fn(EmbeddingBwd{dw.data(), order.as<int32_t>(), dy.data(), id_buffer.data(), g.dw_dtype,
                    g.dtype, ids.dtype(), rows, cols, vocab, stride, g.accumulate});
    return std::vector<Tensor>{dw.tensor()};
  };
  const auto expected = run([](const EmbeddingBwd& a) { kernels::cpu::embedding_bwd(a); });
  const auto actual = run_in_all_schedules(
      [&] { return run([](const EmbeddingBwd& a) { kernels::cuda::embedding_bwd(nullptr, a); }); });
  check_close(actual[0], expected[0], tol(g.dw_dtype, longest_run), "dw");
}

TEST_CASE("simt embedding: gradients of all dtypes, widths and destinations", "[embedding][simt]") {
  const Tensor ids = randint(0, 9, {23}, kI32);  // some rows are never named
  for (const bool accumulate : {false, true}) {
    for (const DType dtype : {kF32, kBF16, kF16}) {
      for (const int64_t cols : {1, 7, 8, 260}) {
        check_backward(ids, 11, cols, {dtype, dtype, accumulate}, 8);
        check_backward(ids, 11, cols, {dtype, kF32, accumulate}, 8);
      }
      check_backward(ids, 11, 16, {dtype, kF32, accumulate, 24}, 8);
      check_backward(ids, 11, 16, {dtype, kF32, accumulate, 17}, 8);
      check_backward(ids, 11, 16, {dtype, dtype, accumulate, 0, 1}, 8);
    }
  }
  check_backward(randint(0, 9, {23}, kI64), 11, 8, {}, 8);
}

TEST_CASE("simt embedding: a token of many positions is shared by the warps of a block",
          "[embedding][simt]") {
  std::vector<double> ids(700, 2.0);
  for (size_t i = 0; i < ids.size(); i += 5) ids[i] = static_cast<double>(i / 5 % 4);
  const Tensor tokens = from_values(ids, {700}, kI32);
  check_backward(tokens, 5, 40, {kBF16, kF32, false}, 600);
  check_backward(tokens, 5, 40, {kF32, kF32, true}, 600);
  check_backward(tokens, 5, 3, {kF32, kF32, true}, 600);
}

TEST_CASE("simt embedding: ids that need one to five passes of the sort", "[embedding][simt]") {
  for (const int64_t vocab : {1, 15, 16, 255, 256, 4096}) {
    check_backward(randint(0, vocab, {1100}, kI32, 7), vocab, 2, {}, 1100);
  }
  // Five passes; of the other kernels' blocks the first and the last.
  const int64_t vocab = 248320, rows = 40;
  Tensor ids = randint(0, vocab, {rows}, kI32, 8);
  const DeviceBuffer id_buffer(ids), dy(randn({rows, 8}, kBF16, 9));
  id_buffer.as<int32_t>()[3] = id_buffer.as<int32_t>()[17] = vocab - 1;
  id_buffer.as<int32_t>()[5] = 0;
  const simt::ReservedBuffer order(order_numel(vocab, rows) * 4), dw(vocab * 8 * 4);
  const simt::OnlyBlocks ends({0, -1});
  const EmbeddingBwd args{dw.data(), order.as<int32_t>(),
                          dy.data(), id_buffer.data(),
                          kF32,      kBF16,
                          kI32,      rows,
                          8,         vocab,
                          8,         false};
  dw.as<float>()[7] = 99;
  kernels::cuda::embedding_bwd(nullptr, args);
  const auto value = [&](int64_t row) {
    return static_cast<float>(dy.as<BFloat16>()[row * 8 + 7]);
  };
  CHECK(dw.as<float>()[7] == value(5));
  CHECK(dw.as<float>()[(vocab - 1) * 8 + 7] == value(3) + value(17));
}

TEST_CASE("simt embedding: ids outside of the table read nothing", "[embedding][simt]") {
  const Tensor ids = from_values({1, -1, 4, 0, 1}, {5}, kI64);
  const DeviceBuffer id_buffer(ids), weight(randn({4, 8}, kF32)), y({5, 8}, kF32);
  kernels::cuda::embedding_fwd(nullptr,
                               {y.data(), id_buffer.data(), weight.data(), kF32, kI64, 5, 8, 4});
  CHECK(y.as<float>()[0] == weight.as<float>()[8]);
  CHECK(std::isnan(y.as<float>()[8]));
  CHECK(std::isnan(y.as<float>()[2 * 8 + 7]));
  CHECK(y.as<float>()[3 * 8] == weight.as<float>()[0]);

  const DeviceBuffer dy(randn({5, 8}, kF32)), dw({4, 8}, kF32), order({order_numel(4, 5)}, kI32);
  kernels::cuda::embedding_bwd(nullptr, {dw.data(), order.as<int32_t>(), dy.data(),
                                         id_buffer.data(), kF32, kF32, kI64, 5, 8, 4, 8, false});
  CHECK(dw.as<float>()[8] == dy.as<float>()[0] + dy.as<float>()[4 * 8]);
  CHECK(dw.as<float>()[0] == dy.as<float>()[3 * 8]);
  CHECK(dw.as<float>()[2 * 8] == 0);
  CHECK(dw.as<float>()[3 * 8] == 0);
}

TEST_CASE("simt embedding: no ids, and dtypes without a kernel", "[embedding][simt]") {
  const DeviceBuffer dw(randn({3, 4}, kF32)), order({order_numel(3, 0)}, kI32);
  kernels::cuda::embedding_fwd(nullptr, {nullptr, nullptr, nullptr, kF32, kI32, 0, 4, 3});
  const EmbeddingBwd args{
      dw.data(), order.as<int32_t>(), nullptr, nullptr, kF32, kF32, kI32, 0, 4, 3, 4, false};
  kernels::cuda::embedding_bwd(nullptr, args);
  for (int i = 0; i < 12; ++i) CHECK(dw.as<float>()[i] == 0);
  CHECK_THAT(
      testing::error_of([] {
        kernels::cuda::embedding_fwd(nullptr, {nullptr, nullptr, nullptr, kF64, kI32, 1, 4, 3});
      }),
      Catch::Contains("embedding: no CUDA kernel for dtype f64"));
}

TEST_CASE("simt embedding: first and last block above 2^32 bytes", "[embedding][simt]") {
  const simt::OnlyBlocks ends({0, -1});
  const int64_t cols = 8192, vocab = (int64_t{1} << 32) / (cols * 2) + 8, rows = vocab;
  const simt::ReservedBuffer weight(vocab * cols * 2), y(rows * cols * 2), ids(rows * 4);
  ids.as<int32_t>()[0] = static_cast<int32_t>(vocab - 1);
  ids.as<int32_t>()[rows - 1] = static_cast<int32_t>(vocab - 2);
  weight.as<uint16_t>()[vocab * cols - 1] = 5;
  weight.as<uint16_t>()[(vocab - 1) * cols - 1] = 6;
  kernels::cuda::embedding_fwd(
      nullptr, {y.data(), ids.data(), weight.data(), kBF16, kI32, rows, cols, vocab});
  CHECK(y.as<uint16_t>()[cols - 1] == 5);
  CHECK(y.as<uint16_t>()[rows * cols - 1] == 6);
  // Two positions add into the last row of dw.
  const simt::ReservedBuffer order(order_numel(vocab, 2) * 4);
  const simt::ReservedBuffer& dw = weight;
  const simt::ReservedBuffer far_ids(2 * 4);
  far_ids.as<int32_t>()[0] = far_ids.as<int32_t>()[1] = static_cast<int32_t>(vocab - 1);
  y.as<uint16_t>()[cols - 1] = BFloat16(1.5f).bits;
  y.as<uint16_t>()[2 * cols - 1] = BFloat16(2.0f).bits;
  kernels::cuda::embedding_bwd(nullptr, {dw.data(), order.as<int32_t>(), y.data(), far_ids.data(),
                                         kBF16, kBF16, kI32, 2, cols, vocab, cols, false});
  CHECK(dw.as<uint16_t>()[vocab * cols - 1] == BFloat16(3.5f).bits);
}

}  // namespace
}  // namespace tessera
