#include "optim/muon.h"

#include "kernels/orthogonalize/kernel.h"
#include "test/optim/states.h"
#include "test/testing.h"

namespace tessera {
namespace {

using optim::FlatShard;
using optim::Muon;
using optim::MuonScale;
using testing::curved_tensor;
using testing::error_of;
using testing::formula_tensor;
using testing::golden_states;

/// |a - b|_F / |b|_F.
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

using Matrix = std::vector<double>;
Matrix times(const Matrix& a, const Matrix& b, int64_t m, int64_t k, int64_t n) {
  Matrix c(static_cast<size_t>(m * n), 0.0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t l = 0; l < k; ++l) {
      for (int64_t j = 0; j < n; ++j) {
        c[static_cast<size_t>(i * n + j)] +=
            a[static_cast<size_t>(i * k + l)] * b[static_cast<size_t>(l * n + j)];
      }
    }
  }
  return c;
}

/// The formula in f64, for [m, n] with m <= n.
Matrix newton_schulz(Matrix x, int64_t m, int64_t n, MuonCoefficients coefficients) {
  const bool is_express = coefficients == MuonCoefficients::kPolarExpress;
  const double express[5][3] = {{8.156554524902461, -22.48329292557795, 15.878769915207462},
                                {4.042929935166739, -2.808917465908714, 0.5000178451051316},
                                {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
                                {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
                                {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
  double norm = 0;
  for (const double value : x) norm += value * value;
  norm = std::max(std::sqrt(norm) * (is_express ? 1.02 : 1), 1e-7);
  for (double& value : x) value /= norm;
  for (const auto& polynomial : express) {
    const double a = is_express ? polynomial[0] : 3.4445, b = is_express ? polynomial[1] : -4.775,
                 c = is_express ? polynomial[2] : 2.0315;
    Matrix transposed(x.size());
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        transposed[static_cast<size_t>(j * m + i)] = x[static_cast<size_t>(i * n + j)];
      }
    }
    const Matrix gram = times(x, transposed, m, n, m);
    Matrix update = times(gram, gram, m, m, m);
    for (size_t i = 0; i < update.size(); ++i) update[i] = b * gram[i] + c * update[i];
    const Matrix product = times(update, x, m, m, n);
    for (size_t i = 0; i < x.size(); ++i) x[i] = a * x[i] + product[i];
  }
  return x;
}

TEST_CASE(
    "orthogonalize: in f32 it is the formula in f64, to within twice what PyTorch's products give",
    "[optim]") {
  const int64_t m = 150,
                n = 200;  // as in `newton_schulz` of the script, which has PyTorch's errors
  const Tensor full = curved_tensor(m * n, 1, 0).view({m, n});
  // Rank 3, and noise of a millionth.
  Matrix low = curved_tensor(m * n, 4, 0).to_vector();
  for (double& value : low) value *= 1e-6;
  for (int64_t k = 0; k < 3; ++k) {
    const Matrix product =
        times(curved_tensor(m, 2, k).to_vector(), curved_tensor(n, 3, k).to_vector(), m, 1, n);
    for (size_t i = 0; i < low.size(); ++i) low[i] += product[i];
  }
  const Tensor low_rank =
      from_values(std::span<const double>(low), {m, n}, kF64).to(kF32).contiguous();
  for (const MuonCoefficients c : {MuonCoefficients::kOriginal, MuonCoefficients::kPolarExpress}) {
    const auto& golden = golden_states()["newton_schulz"][std::string(name_of(c))];
    for (const auto& [kind, g] : {std::pair{"full", full}, {"low_rank", low_rank}}) {
      const Matrix expected = newton_schulz(g.to_vector(), m, n, c);
      const double theirs = golden[kind].get<double>();
      const double ours = distance(orthogonalize(g, c).to_vector(), expected);
      INFO(name_of(c) << ", " << kind << ": " << ours << ", PyTorch " << theirs);
      CHECK(ours <= 2 * theirs);
      CHECK(ours <= 1e-4);
      // A tall matrix is the transposed wide one.
      const Tensor tall = orthogonalize(g.transpose(0, 1).contiguous(), c);
      CHECK(tall.shape() == Shape{n, m});
      CHECK(distance(tall.transpose(0, 1).contiguous().to_vector(), expected) <= 2 * theirs);
      CHECK(distance(orthogonalize(g.to(kF64), c).to_vector(), expected) <= 1e-6);
    }
    // bf16 is as near as bf16 is: what the formula makes of it is in [0.7, 1.2] anyway.
    const Matrix expected = newton_schulz(full.to_vector(), m, n, c);
    CHECK(distance(orthogonalize(full.to(kBF16), c).to_vector(), expected) <= 0.05);
  }
  CHECK(orthogonalize(zeros({4, 6}), MuonCoefficients::kOriginal).to_vector() == Matrix(24, 0.0));
}

TEST_CASE("orthogonalize: rows wider than what is summed at once have all of their squares",
          "[optim]") {
  const int64_t rows = 3, cols = 2500;
  std::vector<float> x(rows * cols);
  std::vector<double> expected(rows, 0.0);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int64_t small = i * 7919 % 13 - 6;  // sums of squares that f32 holds
    x[static_cast<size_t>(i)] = static_cast<float>(small);
    expected[static_cast<size_t>(i / cols)] += static_cast<double>(small * small);
  }
  std::vector<float> sums(rows);
  kernels::cpu::row_squares({sums.data(), x.data(), kF32, rows, cols});
  CHECK(std::vector<double>(sums.begin(), sums.end()) == expected);
}

TEST_CASE("orthogonalize: symmetry saves 7 in 16 of the symmetric products", "[optim]") {
  const OrthogonalizeFlops flops = orthogonalize_flops(1024, 1024);
  const double product = 5 * 2 * 1024.0 * 1024 * 1024;
  CHECK(flops.whole == 3 * product);
  CHECK(flops.computed == (2 * 9.0 / 16 + 1) * product);
  CHECK(orthogonalize_flops(300, 100).computed == orthogonalize_flops(100, 300).computed);
}

TEST_CASE("Muon: ten steps equal PyTorch's as far as bf16 goes", "[optim]") {
  for (const MuonScale scale : {MuonScale::kOriginal, MuonScale::kMatchRmsAdamW}) {
    const auto& golden = golden_states()["muon"][std::string(name_of(scale))];
    FlatShard shard{.name = "golden",
                    .master = zeros({2048}),
                    .grad = zeros({2048}),
                    .low = {},
                    .segments = {{"a", 0, 960}, {"b", 1024, 1984}},
                    .parameters = {{"a", {24, 40}, 0}, {"b", {40, 24}, 1024}}};
    for (int64_t k = 0; k < 2; ++k) {
      shard.master.narrow(0, 1024 * k, 960).copy_(formula_tensor(960, 0, k + 1));
    }
    Muon muon({shard}, {.weight_decay = 0.1, .scale = scale});
    for (int64_t step = 1; step <= 10; ++step) {
      for (int64_t k = 0; k < 2; ++k) {
        shard.grad.narrow(0, 1024 * k, 960).copy_(curved_tensor(960, step, k));
      }
      muon.step(0.02f);
    }
    for (int64_t k = 0; k < 2; ++k) {
      const auto expected = golden["parameters"][static_cast<size_t>(k)].get<std::vector<double>>();
      const auto start = formula_tensor(960, 0, k + 1).to_vector();
      std::vector<double> moved = shard.master.narrow(0, 1024 * k, 960).to_vector();
      std::vector<double> wanted = expected;
      for (size_t i = 0; i < moved.size(); ++i) moved[i] -= start[i], wanted[i] -= start[i];
      INFO(name_of(scale) << " " << distance(moved, wanted));
      CHECK(distance(moved, wanted) <= 0.02);  // one step of bf16 alone is 0.014 off
    }
  }
}

TEST_CASE("Muon: blocks of rows are matrices of their own", "[optim]") {
  // Two blocks in one parameter move as two parameters do.
  const auto run = [](std::vector<optim::WholeParameter> parameters,
                      std::vector<optim::Segment> segments) {
    FlatShard shard{.name = "s",
                    .master = formula_tensor(1536, 0, 1),
                    .grad = formula_tensor(1536, 1),
                    .low = {},
                    .segments = std::move(segments),
                    .parameters = std::move(parameters)};
    Muon muon({shard}, {.scale = MuonScale::kOriginal});
    muon.step(0.02f);
    return shard.master.to_vector();
  };
  const auto fused = run({{"qk", {48, 32}, 0, {16, 32}}}, {{"qk", 0, 1536}});
  const auto apart =
      run({{"q", {16, 32}, 0}, {"k", {32, 32}, 512}}, {{"q", 0, 512}, {"k", 512, 1536}});
  CHECK(fused == apart);
  CHECK(fused != run({{"qk", {48, 32}, 0}}, {{"qk", 0, 1536}}));
}

TEST_CASE("Muon: mistakes are named", "[optim]") {
  const auto of = [](Shape shape, std::vector<int64_t> blocks) {
    return FlatShard{.name = "s",
                     .master = zeros({256}),
                     .grad = zeros({256}),
                     .low = {},
                     .segments = {},
                     .parameters = {{"blocks.0.norm1.weight", shape, 0, blocks}}};
  };
  CHECK(
      error_of([&] { Muon({of({64}, {})}); })
          .starts_with("Muon: blocks.0.norm1.weight is [64], expected a matrix; another optimizer "
                       "can update it"));
  CHECK(error_of([&] {
          Muon({of({8, 8}, {4, 3})});
        }).starts_with("Muon: the blocks of blocks.0.norm1.weight have 7 rows, expected 8"));
  CHECK(error_of([] {
          Muon({}, {.momentum = 1});
        }).starts_with("Muon: momentum must be in [0, 1), got 1"));
}

}  // namespace
}  // namespace tessera
