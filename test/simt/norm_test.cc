#include "kernels/norm/kernel.h"
#include "test/simt/simt_testing.h"

// R rows, C columns; H heads.

namespace tessera {
namespace {

using kernels::contiguous_rows;
using kernels::NormBwd;
using kernels::NormFwd;
using kernels::RowLayout;
using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

enum class Kind { kLayer, kRms };

struct Case {
  DType dtype = kF32, w_dtype = kF32;
  int64_t rows = 3, cols = 64, offset = 0;
  RowLayout layout = {};  // of x; contiguous if outer_stride is 0
  bool has_residual = false, has_b = true;

  RowLayout x_rows() const { return layout.outer_stride == 0 ? contiguous_rows(cols) : layout; }
  int64_t x_numel() const { return rows == 0 ? 0 : x_rows().offset(rows - 1) + cols; }
  std::string text(Kind kind) const {
    return fmt::format("{} {} w {}, {} x {}, offset {}, residual {}",
                       kind == Kind::kLayer ? "layer_norm" : "rms_norm", dtype, w_dtype, rows, cols,
                       offset, has_residual);
  }
};

/// The inputs of a case, with a common offset in each row that a one-pass variance would not stand.
struct Inputs {
  explicit Inputs(const Case& c)
      : x(randn({c.x_numel()}, c.dtype, 1), c.offset),
        residual(randn({c.rows, c.cols}, c.dtype, 2), c.offset),
        w(randn({c.cols}, c.w_dtype, 3), c.offset),
        b(randn({c.cols}, c.w_dtype, 4), c.offset),
        dy(randn({c.rows, c.cols}, c.dtype, 5), c.offset),
        d_sum(randn({c.rows, c.cols}, c.dtype, 6), c.offset) {}
  DeviceBuffer x, residual, w, b, dy, d_sum;
};

NormFwd fwd_args(Kind kind, const Case& c, const Inputs& in) {
  NormFwd a{};
  a.x = in.x.data(), a.w = in.w.data();
  a.residual = c.has_residual ? in.residual.data() : nullptr;
  a.b = c.has_b && kind == Kind::kLayer ? in.b.data() : nullptr;
  a.dtype = c.dtype, a.w_dtype = c.w_dtype;
  a.rows = c.rows, a.cols = c.cols, a.x_rows = c.x_rows();
  a.residual_rows = contiguous_rows(c.cols);
  a.eps = 1e-5f;
  return a;
}

template <class Fn>
std::vector<Tensor> run_fwd(Kind kind, const Case& c, const Inputs& in, Fn fn) {
  const DeviceBuffer y({c.rows, c.cols}, c.dtype, c.offset),
      sum({c.rows, c.cols}, c.dtype, c.offset), mean({c.rows}, kF32), rstd({c.rows}, kF32);
  NormFwd a = fwd_args(kind, c, in);
  a.y = y.data(), a.rstd = rstd.data();
  if (c.has_residual) a.sum = sum.data();
  if (kind == Kind::kLayer) a.mean = mean.data();
  fn(a);
  std::vector<Tensor> outputs = {y.tensor(), rstd.tensor()};
  if (c.has_residual) outputs.push_back(sum.tensor());
  if (kind == Kind::kLayer) outputs.push_back(mean.tensor());
  return outputs;
}

void check_fwd(Kind kind, const Case& c) {
  INFO(c.text(kind));
  const Inputs in(c);
  const auto expected = run_fwd(kind, c, in, [&](const NormFwd& a) {
    kind == Kind::kLayer ? kernels::cpu::layer_norm_fwd(a) : kernels::cpu::rms_norm_fwd(a);
  });
  const auto actual = run_in_all_schedules([&] {
    return run_fwd(kind, c, in, [&](const NormFwd& a) {
      kind == Kind::kLayer ? kernels::cuda::layer_norm_fwd(nullptr, a)
                           : kernels::cuda::rms_norm_fwd(nullptr, a);
    });
  });
  for (size_t i = 0; i < expected.size(); ++i) {
    check_close(actual[i], expected[i], tol(expected[i].dtype(), c.cols),
                fmt::format("output {}", i));
  }
}

struct BwdCase : Case {
  bool has_d_sum = false, accumulate = false, has_dx = true, has_dw = true;
  DType dw_dtype = kF32;
  int64_t num_partials = 0;  // 0: NormBwd::num_chunks of CUDA
};

template <class Fn>
std::vector<Tensor> run_bwd(Kind kind, const BwdCase& c, const Inputs& in, const Tensor& mean_rstd,
                            int64_t num_partials, Fn fn) {
  const bool is_layer = kind == Kind::kLayer;
  const DeviceBuffer dx(randn({c.x_numel()}, c.dtype, 7), c.offset),
      dw(randn({c.cols}, c.dw_dtype, 8)), db(randn({c.cols}, kBF16, 9)), stats(mean_rstd),
      partials({num_partials, is_layer ? 2 : 1, c.cols}, kF32);
  NormBwd a{};
  if (c.has_dx) a.dx = dx.data();
  if (c.has_dw) a.dw = dw.data(), a.partials = partials.data();
  if (c.has_dw && is_layer) a.db = db.data();
  a.dy = in.dy.data(), a.x = in.x.data(), a.w = in.w.data();
  a.d_sum = c.has_d_sum ? in.d_sum.data() : nullptr;
  a.mean = is_layer ? stats.as<float>() : nullptr, a.rstd = stats.as<float>() + c.rows;
  a.dtype = c.dtype, a.w_dtype = c.w_dtype, a.dw_dtype = c.dw_dtype, a.db_dtype = kBF16;
  a.accumulate_dx = a.accumulate_dw = a.accumulate_db = c.accumulate;
  a.rows = c.rows, a.cols = c.cols, a.x_rows = a.dx_rows = c.x_rows();
  a.num_partials = num_partials;
  fn(a);
  return {dx.tensor(), dw.tensor(), db.tensor()};
}

void check_bwd(Kind kind, const BwdCase& c) {
  INFO(c.text(kind) << fmt::format(", d_sum {}, accumulate {}, dx {}, dw {} {}, partials {}",
                                   c.has_d_sum, c.accumulate, c.has_dx, c.has_dw, c.dw_dtype,
                                   c.num_partials));
  const Inputs in(c);
  Tensor stats = empty({2, c.rows}, kF32);
  {
    Case forward = c;
    forward.has_residual = false;
    NormFwd a = fwd_args(kind, forward, in);
    const DeviceBuffer y({c.rows, c.cols}, c.dtype), buffer({2, c.rows}, kF32);
    a.y = y.data(), a.rstd = buffer.as<float>() + c.rows;
    a.mean = kind == Kind::kLayer ? buffer.as<float>() : nullptr;
    kind == Kind::kLayer ? kernels::cpu::layer_norm_fwd(a) : kernels::cpu::rms_norm_fwd(a);
    stats = buffer.tensor();
  }
  const auto expected =
      run_bwd(kind, c, in, stats, NormBwd::num_chunks(c.rows), [&](const NormBwd& a) {
        kind == Kind::kLayer ? kernels::cpu::layer_norm_bwd(a) : kernels::cpu::rms_norm_bwd(a);
      });
  const int64_t num_partials =
      c.num_partials > 0 ? c.num_partials : NormBwd::num_chunks(c.rows, DeviceType::kCuda);
  const auto actual = run_in_all_schedules([&] {
    return run_bwd(kind, c, in, stats, num_partials, [&](const NormBwd& a) {
      kind == Kind::kLayer ? kernels::cuda::layer_norm_bwd(nullptr, a)
                           : kernels::cuda::rms_norm_bwd(nullptr, a);
    });
  });
  check_close(actual[0], expected[0], tol(c.dtype, c.cols), "dx");
  check_close(actual[1], expected[1], tol(c.dw_dtype, c.rows), "dw");
  check_close(actual[2], expected[2], tol(kBF16, c.rows), "db");
}

constexpr Kind kKinds[] = {Kind::kLayer, Kind::kRms};

TEST_CASE("simt norm: forward in every dtype, with and without residual and bias", "[norm][simt]") {
  for (const Kind kind : kKinds) {
    for (const auto& [dtype, w_dtype] : std::vector<std::pair<DType, DType>>{
             {kF32, kF32}, {kBF16, kBF16}, {kBF16, kF32}, {kF16, kF16}, {kF16, kF32}}) {
      for (const bool residual : {false, true}) {
        Case c;
        c.dtype = dtype, c.w_dtype = w_dtype, c.rows = 5, c.cols = 72;
        c.has_residual = residual, c.has_b = !residual;
        check_fwd(kind, c);
      }
    }
  }
}

TEST_CASE("simt norm: forward of rows from one vector to more than a block's registers",
          "[norm][simt]") {
  for (const Kind kind : kKinds) {
    for (const int64_t cols : {8, 16, 40, 128, 256, 768, 1024, 1600, 2048, 8200}) {
      Case c;
      c.dtype = kBF16, c.w_dtype = kBF16, c.rows = cols < 100 ? 37 : 3, c.cols = cols;
      check_fwd(kind, c);
    }
    Case c;  // f32 fits 16384 in registers
    c.rows = 2, c.cols = 16388;
    check_fwd(kind, c);
  }
}

TEST_CASE("simt norm: rows that are no vectors", "[norm][simt]") {
  for (const Kind kind : kKinds) {
    for (const bool residual : {false, true}) {
      for (const int64_t cols : {1, 3, 37, 301}) {
        Case c;
        c.dtype = kBF16, c.rows = 3, c.cols = cols, c.has_residual = residual;
        check_fwd(kind, c);
      }
      Case c;
      c.offset = 1, c.has_residual = residual;
      check_fwd(kind, c);
    }
  }
}

TEST_CASE("simt norm: heads of a packed buffer, aligned and not", "[norm][simt]") {
  for (const Kind kind : kKinds) {
    for (const int64_t outer_stride : {96, 97}) {
      BwdCase c;
      c.dtype = kF16, c.rows = 12, c.cols = 16;
      c.layout = {3, 16, outer_stride};
      check_fwd(kind, c);
      check_bwd(kind, c);
    }
  }
}

TEST_CASE("simt norm: a large common offset does not cancel in the variance", "[norm][simt]") {
  Case c;
  c.rows = 2, c.cols = 512;
  const Inputs in(c);
  for (int64_t i = 0; i < 1024; ++i) in.x.as<float>()[i] += 4096.0f;
  const auto run = [&](auto fn) { return run_fwd(Kind::kLayer, c, in, fn); };
  const auto expected = run([](const NormFwd& a) { kernels::cpu::layer_norm_fwd(a); });
  const auto actual = run([](const NormFwd& a) { kernels::cuda::layer_norm_fwd(nullptr, a); });
  check_close(actual[0], expected[0], tol(kF32, 512), "y");
  check_close(actual[1], expected[1], tol(kF32, 512), "rstd");
}

TEST_CASE("simt norm: backward in every dtype", "[norm][simt]") {
  for (const Kind kind : kKinds) {
    for (const auto& [dtype, w_dtype] : std::vector<std::pair<DType, DType>>{
             {kF32, kF32}, {kBF16, kBF16}, {kBF16, kF32}, {kF16, kF16}, {kF16, kF32}}) {
      for (const bool accumulate : {false, true}) {
        BwdCase c;
        c.dtype = dtype, c.w_dtype = w_dtype, c.rows = 19, c.cols = 72;
        c.accumulate = accumulate, c.has_d_sum = accumulate;
        c.dw_dtype = accumulate ? w_dtype : kF32;
        check_bwd(kind, c);
      }
    }
  }
}

TEST_CASE("simt norm: backward of any row length, few and many rows", "[norm][simt]") {
  for (const Kind kind : kKinds) {
    for (const int64_t cols : {8, 64, 256, 768, 4096, 4104, 8200}) {
      BwdCase c;
      c.dtype = kBF16, c.w_dtype = kBF16, c.rows = cols > 4000 ? 3 : 40, c.cols = cols;
      c.has_d_sum = true;
      check_bwd(kind, c);
    }
    for (const int64_t cols : {1, 37, 301}) {
      BwdCase c;
      c.dtype = kBF16, c.rows = 15, c.cols = cols, c.accumulate = true, c.has_d_sum = true;
      check_bwd(kind, c);
    }
    BwdCase c;
    c.rows = 300, c.cols = 32;
    check_bwd(kind, c);
  }
}

TEST_CASE("simt norm: backward with outputs that nobody wants, with few partials", "[norm][simt]") {
  for (const Kind kind : kKinds) {
    for (const int64_t cols : {64, 65}) {
      BwdCase c;
      c.rows = 21, c.cols = cols;
      c.has_dx = false;
      check_bwd(kind, c);
      c.has_dx = true, c.has_dw = false;
      check_bwd(kind, c);
      c.has_dw = true, c.num_partials = 1;
      check_bwd(kind, c);
    }
  }
}

TEST_CASE("simt norm: no rows: sums are zero or as before", "[norm][simt]") {
  for (const Kind kind : kKinds) {
    BwdCase c;
    c.rows = 0;
    check_fwd(kind, c);
    check_bwd(kind, c);
    c.accumulate = true;
    check_bwd(kind, c);
  }
}

TEST_CASE("simt norm: f64 is for the CPU", "[norm][simt]") {
  NormFwd fwd{};
  fwd.dtype = fwd.w_dtype = kF64, fwd.rows = fwd.cols = 1;
  CHECK_THAT(error_of([&] { kernels::cuda::rms_norm_fwd(nullptr, fwd); }),
             Catch::Matchers::Contains("rms_norm_fwd: no CUDA kernel for dtype f64"));
}

TEST_CASE("simt norm: more rows than grid.y could count", "[norm][simt]") {
  BwdCase c;
  c.dtype = c.w_dtype = kBF16, c.rows = 70000, c.cols = 8;
  check_fwd(Kind::kRms, c);
  check_bwd(Kind::kRms, c);
}

TEST_CASE("simt norm: first and last rows of more than 2^32 bytes", "[norm][simt]") {
  constexpr int64_t kRows = 17, kStride = int64_t{1} << 28, kCols = 1024;  // bf16
  const simt::ReservedBuffer x(((kRows - 1) * kStride + kCols) * 2),
      dx(((kRows - 1) * kStride + kCols) * 2);
  for (int64_t c = 0; c < kCols; ++c) {
    x.as<BFloat16>()[c] = BFloat16(2.0f);
    x.as<BFloat16>()[(kRows - 1) * kStride + c] = BFloat16(c % 2 == 0 ? 1.0f : -1.0f);
  }
  const DeviceBuffer y({kRows, kCols}, kBF16), rstd({kRows}, kF32), w(full({kCols}, 1, kF32)),
      dy(full({kRows, kCols}, 1, kBF16));
  NormFwd fwd{};
  fwd.y = y.data(), fwd.rstd = rstd.data(), fwd.x = x.data(), fwd.w = w.data();
  fwd.dtype = kBF16, fwd.w_dtype = kF32, fwd.rows = kRows, fwd.cols = kCols, fwd.eps = 0;
  fwd.x_rows = {1, 0, kStride};
  kernels::cuda::rms_norm_fwd(nullptr, fwd);
  CHECK(rstd.as<float>()[0] == 0.5f);
  CHECK(rstd.as<float>()[kRows - 1] == 1.0f);
  CHECK(static_cast<float>(y.as<BFloat16>()[kRows * kCols - 1]) == -1.0f);
  NormBwd bwd{};
  bwd.dx = dx.data(), bwd.dy = dy.data(), bwd.x = x.data(), bwd.w = w.data();
  for (int64_t r = 1; r < kRows - 1; ++r) rstd.as<float>()[r] = 0;
  bwd.rstd = rstd.data(), bwd.dtype = kBF16, bwd.w_dtype = kF32;
  bwd.rows = kRows, bwd.cols = kCols, bwd.x_rows = bwd.dx_rows = fwd.x_rows;
  kernels::cuda::rms_norm_bwd(nullptr, bwd);
  // dx = rstd (dy - xhat mean(dy xhat)): 0 where xhat is constant, rstd dy where its mean is 0.
  CHECK(static_cast<float>(dx.as<BFloat16>()[kCols - 1]) == 0.0f);
  CHECK(static_cast<float>(dx.as<BFloat16>()[(kRows - 1) * kStride + kCols - 1]) == 1.0f);
}

}  // namespace
}  // namespace tessera
