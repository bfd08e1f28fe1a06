#include <cmath>

#include "kernels/loss/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::CrossEntropyBwd;
using kernels::CrossEntropyFused;
using kernels::CrossEntropyFwd;
using kernels::LossTotal;
using kernels::Targets;
using testing::check_bitwise;
using testing::check_close;
using testing::DeviceBuffer;
using testing::randint;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

constexpr int64_t kIgnore = -100;

/// Random classes, the second of them ignored.
Tensor make_targets(int64_t rows, int64_t vocab, DType dtype = kI32) {
  std::vector<double> targets = randint(0, vocab, {rows}, dtype, 5).to_vector();
  if (rows > 1) targets[1] = kIgnore;
  return from_values(targets, {rows}, dtype);
}
Targets targets_of(const DeviceBuffer& targets) {
  return {targets.data(), targets.dtype(), kIgnore, 0, "cross_entropy"};
}

struct Rows {
  int64_t rows, vocab;
  int64_t stride = 0;  // 0 = vocab
  int64_t offset = 0;  // elements
  float softcap = 0;
  float z_loss = 0, label_smoothing = 0;
  bool has_row_scales = false;

  int64_t row_stride() const { return stride == 0 ? vocab : stride; }
};

/// Lengths around vectors, warps, steps of a block and the columns that stay in shared memory.
const std::vector<Rows> kShapes = {{3, 1},    {3, 7},          {2, 8},     {3, 33},
                                   {2, 257},  {2, 1000, 1008}, {2, 2051},  {2, 2052, 2056, 1},
                                   {2, 4096}, {2, 9001, 9008}, {1, 24577}, {2, 26000},
                                   {1, 50257}};

/// Losses and statistics by both kernels.
void check_forward(const Rows& r, DType dtype, DType target_dtype = kI32) {
  INFO(fmt::format("{} rows of {} {}, stride {}, offset {}, softcap {}", r.rows, r.vocab, dtype,
                   r.row_stride(), r.offset, r.softcap));
  const DeviceBuffer logits(randn({r.rows, r.row_stride()}, dtype, 1, 3.0), r.offset);
  const DeviceBuffer targets(make_targets(r.rows, r.vocab, target_dtype));
  const auto run = [&](auto fn) {
    const DeviceBuffer losses({r.rows}, kF32), stats({r.rows, 2}, kF32);
    fn(CrossEntropyFwd{losses.data(), stats.data(), logits.data(), targets_of(targets), dtype,
                       r.rows, r.vocab, r.row_stride(), r.softcap, r.z_loss, r.label_smoothing});
    return std::vector<Tensor>{losses.tensor(), stats.tensor()};
  };
  const auto expected = run([](const CrossEntropyFwd& a) { kernels::cpu::cross_entropy_fwd(a); });
  const auto actual = run_in_all_schedules([&] {
    return run([](const CrossEntropyFwd& a) { kernels::cuda::cross_entropy_fwd(nullptr, a); });
  });
  check_close(actual[0], expected[0], tol(kF32, r.vocab), "losses");
  check_close(actual[1], expected[1], tol(kF32, r.vocab), "statistics");
}

TEST_CASE("simt cross_entropy: losses of rows of any length", "[loss][simt]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const Rows& shape : kShapes) check_forward(shape, dtype);
  }
  check_forward({5, 40}, kF32, kI64);
}

/// How the gradient lies: the logits' memory or its own.
enum class Place { kOwn, kOwnAccumulated, kInPlace };

void check_backward(const Rows& r, DType dtype, DType dlogits_dtype, Place place) {
  INFO(fmt::format("{} rows of {} {} into {}, stride {}, offset {}, softcap {}, place {}", r.rows,
                   r.vocab, dtype, dlogits_dtype, r.row_stride(), r.offset, r.softcap,
                   static_cast<int>(place)));
  const Tensor values = randn({r.rows, r.row_stride()}, dtype, 1, 2.0);
  const DeviceBuffer targets(make_targets(r.rows, r.vocab));
  const DeviceBuffer scale(r.has_row_scales ? randn({r.rows}, kF32, 7)
                                            : from_values({0.25}, {}, kF32));
  const DeviceBuffer stats({r.rows, 2}, kF32), losses({r.rows}, kF32);
  {
    const DeviceBuffer logits(values);
    kernels::cpu::cross_entropy_fwd({losses.data(), stats.data(), logits.data(),
                                     targets_of(targets), dtype, r.rows, r.vocab, r.row_stride(),
                                     r.softcap});
  }
  const bool is_in_place = place == Place::kInPlace;
  const auto ratio = static_cast<int64_t>(size_of(dtype) / size_of(dlogits_dtype));
  const Tensor before = randn({r.rows, r.row_stride()}, dlogits_dtype, 6);
  const auto run = [&](auto fn) {
    const DeviceBuffer logits(values, r.offset), own(before, r.offset);
    CrossEntropyBwd args{};
    args.dlogits = is_in_place ? logits.data() : own.data(), args.logits = logits.data();
    args.stats = stats.data(), args.targets = targets_of(targets), args.scale = scale.data();
    args.dtype = dtype, args.dlogits_dtype = dlogits_dtype;
    args.accumulate = place == Place::kOwnAccumulated, args.softcap = r.softcap;
    args.z_loss = r.z_loss, args.label_smoothing = r.label_smoothing;
    args.scale_stride = r.has_row_scales ? 1 : 0;
    args.rows = r.rows, args.vocab = r.vocab, args.row_stride = r.row_stride();
    args.dlogits_row_stride = r.row_stride() * (is_in_place ? ratio : 1);
    fn(args);
    if (!is_in_place) return std::vector<Tensor>{own.tensor()};
    Tensor gradient = empty({r.rows, r.vocab}, dlogits_dtype);
    const auto row_nbytes = static_cast<size_t>(r.vocab) * size_of(dlogits_dtype);
    for (int64_t row = 0; row < r.rows; ++row) {
      std::memcpy(static_cast<char*>(gradient.raw_data()) + static_cast<size_t>(row) * row_nbytes,
                  static_cast<char*>(logits.data()) +
                      static_cast<size_t>(row * r.row_stride()) * size_of(dtype),
                  row_nbytes);
    }
    return std::vector<Tensor>{gradient};
  };
  const auto expected = run([](const CrossEntropyBwd& a) { kernels::cpu::cross_entropy_bwd(a); });
  const auto actual = run_in_all_schedules([&] {
    return run([](const CrossEntropyBwd& a) { kernels::cuda::cross_entropy_bwd(nullptr, a); });
  });
  check_close(actual[0], expected[0], tol(dlogits_dtype, 4), "dlogits");
}

TEST_CASE("simt cross_entropy: gradients in their own memory, in place and narrower in place",
          "[loss][simt]") {
  for (const Rows& shape : kShapes) {
    if (shape.vocab > 10000) continue;
    for (const Place place : {Place::kOwn, Place::kOwnAccumulated, Place::kInPlace}) {
      for (const DType dtype : {kF32, kBF16, kF16}) check_backward(shape, dtype, dtype, place);
    }
    check_backward(shape, kF32, kBF16, Place::kInPlace);
    check_backward(shape, kF32, kF16, Place::kInPlace);
    check_backward(shape, kF32, kBF16, Place::kOwn);
  }
}

TEST_CASE("simt cross_entropy: logits under a soft-cap", "[loss][simt]") {
  for (Rows shape : kShapes) {
    if (shape.vocab > 10000) continue;
    for (const float softcap : {1.0f, 30.0f}) {
      shape.softcap = softcap;
      for (const DType dtype : {kF32, kBF16}) check_forward(shape, dtype);
      check_backward(shape, kF32, kF32, Place::kOwnAccumulated);
      check_backward(shape, kF32, kBF16, Place::kInPlace);
      check_backward(shape, kF16, kF16, Place::kOwn);
    }
  }
}

TEST_CASE("simt cross_entropy: z-loss, label smoothing and a scale of each row", "[loss][simt]") {
  for (Rows shape : kShapes) {
    if (shape.vocab > 10000) continue;
    shape.z_loss = 0.01f, shape.label_smoothing = 0.2f, shape.has_row_scales = true;
    for (const float softcap : {0.0f, 10.0f}) {
      shape.softcap = softcap;
      for (const DType dtype : {kF32, kBF16}) check_forward(shape, dtype);
      check_backward(shape, kF32, kF32, Place::kOwnAccumulated);
      check_backward(shape, kF32, kBF16, Place::kInPlace);
    }
  }
}

void check_fused(const Rows& r, DType dlogits_dtype) {
  INFO(fmt::format("{} rows of {} into {}, stride {}, offset {}", r.rows, r.vocab, dlogits_dtype,
                   r.row_stride(), r.offset));
  const Tensor values = randn({r.rows, r.row_stride()}, kF32, 1, 2.0);
  const DeviceBuffer targets(make_targets(r.rows, r.vocab));
  const DeviceBuffer scale(from_values({0.25}, {}, kF32));
  const auto run = [&](auto fn) {
    const DeviceBuffer logits(values, r.offset), losses({r.rows}, kF32);
    fn(CrossEntropyFused{losses.data(), logits.data(), targets_of(targets), scale.data(), kF32,
                         dlogits_dtype, r.rows, r.vocab, r.row_stride()});
    Tensor gradient = empty({r.rows, r.vocab}, dlogits_dtype);
    const auto row_nbytes = static_cast<size_t>(r.vocab) * size_of(dlogits_dtype);
    for (int64_t row = 0; row < r.rows; ++row) {
      std::memcpy(static_cast<char*>(gradient.raw_data()) + static_cast<size_t>(row) * row_nbytes,
                  logits.as<float>() + row * r.row_stride(), row_nbytes);
    }
    return std::vector<Tensor>{losses.tensor(), gradient};
  };
  const auto expected =
      run([](const CrossEntropyFused& a) { kernels::cpu::cross_entropy_fused(a); });
  const auto actual = run_in_all_schedules([&] {
    return run([](const CrossEntropyFused& a) { kernels::cuda::cross_entropy_fused(nullptr, a); });
  });
  check_close(actual[0], expected[0], tol(kF32, r.vocab), "losses");
  check_close(actual[1], expected[1], tol(dlogits_dtype, 4), "dlogits");
}

TEST_CASE("simt cross_entropy: losses and gradients in one call", "[loss][simt]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const Rows& shape : kShapes) check_fused(shape, dtype);
  }
}

TEST_CASE("simt cross_entropy: infinite logits as on the CPU", "[loss][simt]") {
  constexpr double kInf = INFINITY;
  const std::vector<double> values = {-kInf, 1,     -kInf, -kInf, -kInf, 2,     -kInf, -kInf,
                                      -kInf, -kInf, -kInf, -kInf, 3,     -kInf, 4,     5};
  const DeviceBuffer logits(from_values(values, {2, 8}, kF32));
  const DeviceBuffer targets(from_values({5, 7}, {2}, kI32));
  const DeviceBuffer losses({2}, kF32), expected({2}, kF32);
  CrossEntropyFwd args{losses.data(), nullptr, logits.data(), targets_of(targets), kF32, 2, 8, 8};
  kernels::cuda::cross_entropy_fwd(nullptr, args);
  args.losses = expected.data();
  kernels::cpu::cross_entropy_fwd(args);
  check_close(losses.tensor(), expected.tensor(), tol(kF32, 8), "losses");
}

TEST_CASE("simt cross_entropy: a target that is no class makes loss and gradient NaN",
          "[loss][simt]") {
  for (const double wrong : {-1.0, 9.0}) {
    const DeviceBuffer targets(from_values({wrong, 2.0}, {2}, kI64));
    const DeviceBuffer scale(from_values({1.0}, {}, kF32));
    const DeviceBuffer logits(randn({2, 9}, kF32)), losses({2}, kF32), stats({2, 2}, kF32);
    kernels::cuda::cross_entropy_fwd(
        nullptr, {losses.data(), stats.data(), logits.data(), targets_of(targets), kF32, 2, 9, 9});
    CHECK(std::isnan(losses.as<float>()[0]));
    CHECK(std::isfinite(losses.as<float>()[1]));
    kernels::cuda::cross_entropy_fused(nullptr, {losses.data(), logits.data(), targets_of(targets),
                                                 scale.data(), kF32, kF32, 2, 9, 9});
    CHECK(std::isnan(losses.as<float>()[0]));
    CHECK(std::isnan(logits.as<float>()[0]));
    CHECK(std::isfinite(losses.as<float>()[1]));
    CHECK(std::isfinite(logits.as<float>()[9]));
  }
}

TEST_CASE("simt loss_total: sums in f64, counts what is not ignored", "[loss][simt]") {
  for (const int64_t rows : {0, 1, 2, 1023, 5000}) {
    const DeviceBuffer losses(randn({rows}, kF32, 4, 1e4)), targets(make_targets(rows, 7, kI64));
    const auto run = [&](auto fn) {
      const DeviceBuffer sum({}, kF32), count({}, kF32);
      fn(LossTotal{sum.data(), count.data(), losses.data(), targets_of(targets), kF32, rows});
      return std::vector<Tensor>{sum.tensor(), count.tensor()};
    };
    const auto expected = run([](const LossTotal& a) { kernels::cpu::loss_total(a); });
    const auto actual = run_in_all_schedules(
        [&] { return run([](const LossTotal& a) { kernels::cuda::loss_total(nullptr, a); }); });
    check_bitwise(actual[0], expected[0], "sum");
    check_bitwise(actual[1], expected[1], "count");
  }
}

TEST_CASE("simt loss: dtypes without a kernel", "[loss][simt]") {
  const Targets targets{nullptr, kI32, kIgnore, 0, "cross_entropy"};
  const auto text = [](auto&& f) { return testing::error_of(f); };
  const std::string expected = "cross_entropy: no CUDA kernel for dtype f64";
  CHECK_THAT(text([&] {
               kernels::cuda::cross_entropy_fwd(
                   nullptr, {nullptr, nullptr, nullptr, targets, kF64, 1, 4, 4});
             }),
             Catch::Contains(expected));
  CHECK_THAT(text([&] {
               kernels::cuda::cross_entropy_fused(
                   nullptr, {nullptr, nullptr, targets, nullptr, kF64, kF64, 1, 4, 4});
             }),
             Catch::Contains(expected));
  CHECK_THAT(text([&] {
               kernels::cuda::loss_total(nullptr, {nullptr, nullptr, nullptr, targets, kF64, 1});
             }),
             Catch::Contains(expected));
}

TEST_CASE("simt loss: more than 65,535 rows, the last block above 2^32 bytes", "[loss][simt]") {
  const simt::OnlyBlocks ends({0, -1});
  const int64_t rows = 70000, vocab = 13, stride = 15664;  // rows * stride * 4 > 2^32
  const simt::ReservedBuffer logits(rows * stride * 4), losses(rows * 4), stats(rows * 8);
  const simt::ReservedBuffer targets(rows * 4);
  const Targets classes{targets.data(), kI32, kIgnore, 0, "cross_entropy"};
  const DeviceBuffer scale(from_values({1.0}, {}, kF32));
  float* const last = logits.as<float>() + (rows - 1) * stride;
  REQUIRE((rows - 1) * stride * 4 > int64_t{1} << 32);
  last[0] = 3;
  const auto probability = std::exp(3.0f) / (std::exp(3.0f) + 12.0f);
  kernels::cuda::cross_entropy_fwd(
      nullptr, {losses.data(), stats.data(), logits.data(), classes, kF32, rows, vocab, stride});
  CHECK(losses.as<float>()[0] == Approx(std::log(13.0f)));
  CHECK(losses.as<float>()[rows - 1] == Approx(-std::log(probability)));
  CrossEntropyBwd bwd{};
  bwd.dlogits = logits.data(), bwd.logits = logits.data(), bwd.stats = stats.data();
  bwd.targets = classes, bwd.scale = scale.data(), bwd.dtype = bwd.dlogits_dtype = kF32;
  bwd.rows = rows, bwd.vocab = vocab, bwd.row_stride = bwd.dlogits_row_stride = stride;
  kernels::cuda::cross_entropy_bwd(nullptr, bwd);
  CHECK(last[0] == Approx(probability - 1));
  last[0] = 3;
  std::fill_n(last + 1, 12, 0.0f);
  kernels::cuda::cross_entropy_fused(nullptr, {losses.data(), logits.data(), classes, scale.data(),
                                               kF32, kF32, rows, vocab, stride});
  CHECK(last[0] == Approx(probability - 1));
  CHECK(losses.as<float>()[rows - 1] == Approx(-std::log(probability)));
}

}  // namespace
}  // namespace tessera
