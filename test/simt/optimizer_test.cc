#include "core/random.h"
#include "kernels/optimizer/dynamic_map.h"
#include "kernels/optimizer/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::AdamWStep;
using kernels::AdvanceStep;
using kernels::FlatUpdate;
using kernels::LionStep;
using kernels::SgdStep;
using testing::check_bitwise;
using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

struct Segments {
  std::vector<int64_t> bounds;
  std::vector<float> factors;
};

/// Of every length and at every offset from the 4-element vectors; padding between some of them;
/// the first ones lie before most pieces, the last ones behind.
const Segments kSegments = {
    {0, 1, 1, 6, 6, 6, 8, 40, 41, 43, 44, 1500, 1500, 1501, 1501, 9000, 9003, 9004, 9004, 20000},
    {1, 1, 2, 0, 1, 1, 0.5f, 1, 1, 2, 1, 0, 3, 1, 1, 1, 2, 2, 0.25f, 1}};

struct Case {
  DType grad_dtype = kF32, low_dtype = kBF16;
  int64_t first = 0, numel = 4001, offset = 0;
  bool has_low = true, has_scale = true;
  Segments segments = kSegments;
  bool is_stochastic = false;
  int64_t element_shift = 0;  // of the parameters' elements against the shard's
};

/// Memory of one update; every run starts from the same values.
class Shard {
 public:
  explicit Shard(const Case& c)
      : case_(c),
        master_(randn({c.numel}, kF32, 1), c.offset),
        grad_(randn({c.numel}, c.grad_dtype, 2), c.offset),
        low_(zeros({c.numel}, c.low_dtype), c.offset),
        m_(randn({c.numel}, kF32, 3), c.offset),
        v_(from_values(std::vector<double>(static_cast<size_t>(c.numel), 0.25), {c.numel}),
           c.offset),
        bounds_(from_values(std::span<const int64_t>(c.segments.bounds),
                            {static_cast<int64_t>(c.segments.bounds.size())}, kI64)),
        factors_(from_values(std::span<const float>(c.segments.factors),
                             {static_cast<int64_t>(c.segments.factors.size())}, kF32)),
        rounding_(rounding_of(c)) {}

  FlatUpdate flat() const {
    return {
        .master = master_.as<float>(),
        .low = case_.has_low ? low_.data() : nullptr,
        .grad = grad_.data(),
        .low_dtype = case_.low_dtype,
        .grad_dtype = case_.grad_dtype,
        .first = case_.first,
        .numel = case_.numel,
        .bounds = bounds_.as<int64_t>(),
        .factors = factors_.as<float>(),
        .num_segments = static_cast<int64_t>(case_.segments.bounds.size() / 2),
        .grad_scale = case_.has_scale ? scale_.as<float>() : nullptr,
        .skip = skip_.as<uint8_t>(),
        .lr = 0.01f,
        .weight_decay = 0.1f,
        .rounding = {case_.is_stochastic ? rounding_.as<int64_t>() : nullptr, step_.as<int64_t>()}};
  }
  AdamWStep adamw() const {
    return {flat(), m_.as<float>(), v_.as<float>(), step_.as<int64_t>(), 0.9, 0.95, 1e-8};
  }
  SgdStep sgd(float momentum, bool nesterov) const {
    return {flat(), momentum == 0 ? nullptr : m_.as<float>(), momentum, nesterov};
  }
  LionStep lion() const { return {flat(), m_.as<float>(), 0.9, 0.99}; }
  void set_skip(uint8_t value) const { *skip_.as<uint8_t>() = value; }

  std::vector<Tensor> state() const {
    return {master_.tensor(), low_.tensor(), m_.tensor(), v_.tensor()};
  }

 private:
  /// Every segment is a parameter of its own, with another key and first element.
  static Tensor rounding_of(const Case& c) {
    std::vector<int64_t> pairs;
    for (size_t s = 0; s < c.segments.bounds.size() / 2; ++s) {
      const PhiloxKey key = make_key(11, s);
      pairs.push_back(static_cast<int64_t>(key.k0 | uint64_t{key.k1} << 32));
      pairs.push_back(static_cast<int64_t>(256 * s) + c.element_shift);
    }
    return from_values(std::span<const int64_t>(pairs), {static_cast<int64_t>(pairs.size())}, kI64);
  }

  Case case_;
  DeviceBuffer master_, grad_, low_, m_, v_, bounds_, factors_, rounding_;
  DeviceBuffer scale_{from_values({0.5f}, {1})}, step_{from_values({int64_t{3}}, {1})};
  DeviceBuffer skip_{from_values({0}, {1}, kU8)};
};

template <class Cpu, class Cuda>
void check_update(const Case& c, Cpu cpu, Cuda cuda) {
  INFO(fmt::format("grad {}, low {}, first {}, numel {}, offset {}", c.grad_dtype, c.low_dtype,
                   c.first, c.numel, c.offset));
  const Shard reference(c);
  cpu(reference);
  const auto expected = reference.state();
  const auto actual = run_in_all_schedules([&] {
    const Shard shard(c);
    cuda(shard);
    return shard.state();
  });
  const char* names[] = {"master", "low", "m", "v"};
  for (size_t i = 0; i < expected.size(); ++i) {
    check_close(actual[i], expected[i], tol(expected[i].dtype()), names[i]);
  }
}

void check_adamw(const Case& c) {
  check_update(
      c, [](const Shard& s) { kernels::cpu::adamw_step(s.adamw()); },
      [](const Shard& s) { kernels::cuda::adamw_step(nullptr, s.adamw()); });
}

void check_sgd(const Case& c, float momentum, bool nesterov) {
  check_update(
      c, [&](const Shard& s) { kernels::cpu::sgd_step(s.sgd(momentum, nesterov)); },
      [&](const Shard& s) { kernels::cuda::sgd_step(nullptr, s.sgd(momentum, nesterov)); });
}

TEST_CASE("simt adamw_step: any gradient and low-precision dtype", "[optimizer][simt]") {
  for (const DType grad : {kF32, kBF16, kF16}) {
    for (const DType low : {kF32, kBF16, kF16}) {
      check_adamw({.grad_dtype = grad, .low_dtype = low, .numel = 1600});
    }
  }
}

TEST_CASE("simt adamw_step: pieces of a shard from any element on", "[optimizer][simt]") {
  for (const int64_t first : {0, 1, 7, 42, 1499, 8998, 19990}) {
    check_adamw({.first = first, .numel = 530});
  }
  for (const int64_t numel : {1, 3, 4, 5, 1023, 4097}) check_adamw({.numel = numel});
}

TEST_CASE("simt adamw_step: unaligned memory goes element by element", "[optimizer][simt]") {
  check_adamw({.numel = 1301, .offset = 1});
  check_adamw({.grad_dtype = kBF16, .numel = 1301, .offset = 3});
}

TEST_CASE("simt adamw_step: neither low nor grad_scale is needed", "[optimizer][simt]") {
  check_adamw({.numel = 900, .has_low = false, .has_scale = false});
}

TEST_CASE("simt adamw_step: padding is neither read nor written", "[optimizer][simt]") {
  // Segments only up to 1500 and from 9003: what is behind stays NaN, as DeviceBuffer leaves it.
  const Case c{.numel = 64, .segments = {{2, 5, 7, 8, 40, 64}, {1, 1, 1, 1, 1, 1}}};
  const Shard shard(c);
  const auto before = shard.state();
  for (const int64_t i : {0, 1, 5, 6, 8, 39}) shard.flat().master[i] = NAN;
  kernels::cuda::adamw_step(nullptr, shard.adamw());
  const auto values = shard.state()[0].to_vector(), old = before[0].to_vector();
  const auto low = shard.state()[1].to_vector();
  for (size_t i = 0; i < values.size(); ++i) {
    const bool is_padding = i < 2 || (i >= 5 && i < 7) || (i >= 8 && i < 40);
    const bool was_poisoned = i < 2 || i == 5 || i == 6 || i == 8 || i == 39;
    CAPTURE(i);
    if (was_poisoned) {
      CHECK(std::isnan(values[i]));
    } else {
      CHECK((values[i] == old[i]) == is_padding);
    }
    CHECK((low[i] == 0) == is_padding);
  }
}

TEST_CASE("simt adamw_step: stochastic rounding has the CPU's bits wherever masters agree",
          "[optimizer][simt]") {
  for (const DType low : {kBF16, kF16}) {
    for (const int64_t shift : {0, 1, 3}) {
      for (const int64_t offset : {0, 1}) {
        CAPTURE(shift, offset);
        const Case c{.grad_dtype = shift == 1 ? kBF16 : kF32,
                     .low_dtype = low,
                     .first = 40 * shift,
                     .numel = 1301,
                     .offset = offset,
                     .is_stochastic = true,
                     .element_shift = shift};
        const auto actual = run_in_all_schedules([&] {
          const Shard shard(c);
          kernels::cuda::adamw_step(nullptr, shard.adamw());
          return shard.state();
        });
        // The masters of the device, rounded by the CPU.
        const Shard reference(c);
        std::memcpy(reference.flat().master, actual[0].raw_data(),
                    static_cast<size_t>(actual[0].nbytes()));
        kernels::cpu::round_low({reference.flat()});
        check_bitwise(actual[1], reference.state()[1], "low");
        const Shard again(c);
        std::memcpy(again.flat().master, actual[0].raw_data(),
                    static_cast<size_t>(actual[0].nbytes()));
        kernels::cuda::round_low(nullptr, {again.flat()});
        check_bitwise(again.state()[1], actual[1], "round_low");
        Case nearest = c;
        nearest.is_stochastic = false;
        const Shard other(nearest);
        std::memcpy(other.flat().master, actual[0].raw_data(),
                    static_cast<size_t>(actual[0].nbytes()));
        kernels::cuda::round_low(nullptr, {other.flat()});
        CHECK(other.state()[1].to_vector() != actual[1].to_vector());
      }
    }
  }
}

TEST_CASE("simt round_low: infinities, NaN and the largest values as on the CPU, step 0 to nearest",
          "[optimizer][simt]") {
  const float values[] = {0.0f,        -0.0f,     INFINITY,      -INFINITY,   65504.0f,
                          65519.9f,    65520.0f,  -7e4f,         0x1.fep127f, 0x1.fe8p127f,
                          0x1.ffp127f, 0x1p-14f,  0x1.8p-15f,    0x1.7p-24f,  0x1p-26f,
                          0x1p-60f,    0x1p-140f, -0x1.234p-16f, 1.0f,        1.001f};
  constexpr int64_t kNumel = std::size(values);
  for (const DType low : {kBF16, kF16}) {
    const Case c{.low_dtype = low,
                 .numel = kNumel,
                 .segments = {{0, kNumel}, {1, 1}},
                 .is_stochastic = true};
    const auto round = [&](const auto& kernel, int64_t step) {
      const Shard shard(c);
      std::copy(std::begin(values), std::end(values), shard.flat().master);
      *const_cast<int64_t*>(shard.flat().rounding.step) = step;
      kernel(shard.flat());
      return shard.state()[1];
    };
    for (const int64_t step : {0, 1, 2, 3, 4, 5, 6, 7}) {
      const Tensor actual =
          round([](const FlatUpdate& p) { kernels::cuda::round_low(nullptr, {p}); }, step);
      check_bitwise(actual, round([](const FlatUpdate& p) { kernels::cpu::round_low({p}); }, step),
                    "low");
      if (step == 0) {
        check_bitwise(actual, from_values(std::span<const float>(values), {kNumel}, low),
                      "nearest");
      }
    }
    const Shard shard(c);
    shard.flat().master[3] = NAN;
    kernels::cuda::round_low(nullptr, {shard.flat()});
    CHECK(std::isnan(shard.state()[1].to_vector()[3]));
  }
}

TEST_CASE("simt sgd_step: plain, momentum, Nesterov", "[optimizer][simt]") {
  for (const DType grad : {kF32, kBF16, kF16}) {
    check_sgd({.grad_dtype = grad, .numel = 1700}, 0, false);
    check_sgd({.grad_dtype = grad, .first = 3, .numel = 1700}, 0.9f, false);
    check_sgd({.grad_dtype = grad, .numel = 1701, .offset = 1}, 0.9f, true);
  }
}

TEST_CASE("simt lion_step: any gradient, any piece, aligned or not", "[optimizer][simt]") {
  for (const DType grad : {kF32, kBF16, kF16}) {
    for (const Case& c : {Case{.grad_dtype = grad, .numel = 1700},
                          Case{.grad_dtype = grad, .first = 3, .numel = 1700},
                          Case{.grad_dtype = grad, .numel = 1701, .offset = 1}}) {
      check_update(
          c, [](const Shard& s) { kernels::cpu::lion_step(s.lion()); },
          [](const Shard& s) { kernels::cuda::lion_step(nullptr, s.lion()); });
    }
  }
}

TEST_CASE("simt optimizer: skip leaves everything as it was", "[optimizer][simt]") {
  const Shard shard({.numel = 700});
  const auto before = shard.state();
  shard.set_skip(1);
  kernels::cuda::adamw_step(nullptr, shard.adamw());
  kernels::cuda::sgd_step(nullptr, shard.sgd(0.9f, false));
  kernels::cuda::lion_step(nullptr, shard.lion());
  const auto after = shard.state();
  for (size_t i = 0; i < before.size(); ++i) check_bitwise(after[i], before[i], "state");
}

TEST_CASE("simt advance_step: counts unless skipped", "[optimizer][simt]") {
  const DeviceBuffer step(from_values({int64_t{1} << 40}, {1})), skip(zeros({1}, kU8));
  const AdvanceStep args{step.as<int64_t>(), skip.as<uint8_t>()};
  kernels::cuda::advance_step(nullptr, args);
  CHECK(*step.as<int64_t>() == (int64_t{1} << 40) + 1);
  *skip.as<uint8_t>() = 1;
  kernels::cuda::advance_step(nullptr, args);
  CHECK(*step.as<int64_t>() == (int64_t{1} << 40) + 1);
  kernels::cuda::advance_step(nullptr, {step.as<int64_t>(), nullptr});
  CHECK(*step.as<int64_t>() == (int64_t{1} << 40) + 2);
}

TEST_CASE("simt optimizer: nothing to update launches nothing, f64 is refused",
          "[optimizer][simt]") {
  const Shard shard({.numel = 16});
  AdamWStep args = shard.adamw();
  args.numel = 0;
  kernels::cuda::adamw_step(nullptr, args);
  args = shard.adamw();
  args.num_segments = 0;
  kernels::cuda::adamw_step(nullptr, args);
  args = shard.adamw();
  args.grad_dtype = kF64;
  CHECK_THAT(error_of([&] { kernels::cuda::adamw_step(nullptr, args); }),
             Catch::Matchers::Contains("adamw_step: no CUDA kernel for dtype f64"));
  args = shard.adamw();
  kernels::RoundLow round{args};
  round.low = nullptr;
  kernels::cuda::round_low(nullptr, round);
  round = {args};
  round.low_dtype = kF64;
  CHECK_THAT(error_of([&] { kernels::cuda::round_low(nullptr, round); }),
             Catch::Matchers::Contains("round_low: no CUDA kernel for dtype f64"));
  args.low_dtype = kF64;
  CHECK_THAT(error_of([&] { kernels::cuda::adamw_step(nullptr, args); }),
             Catch::Matchers::Contains("adamw_step: no CUDA kernel for dtype f64"));
}

TEST_CASE("simt optimizer: first and last block of a shard above 2^32 bytes", "[optimizer][simt]") {
  // Two segments of one element: what the grid strides over between them is padding.
  const simt::OnlyBlocks ends({0, -1});
  const int64_t numel = (int64_t{1} << 30) + 5;  // of f32; block 0 has the last vector too
  const simt::ReservedBuffer master(numel * 4), grad(numel * 2), m(numel * 4), v(numel * 4),
      low(numel * 2);
  const DeviceBuffer bounds(from_values({int64_t{0}, int64_t{1}, numel - 1, numel}, {4})),
      factors(from_values({1.0f, 1.0f, 1.0f, 1.0f}, {4})), step(from_values({int64_t{1}}, {1}));
  for (const int64_t i : {int64_t{0}, numel - 1}) {
    master.as<float>()[i] = 1;
    grad.as<BFloat16>()[i] = BFloat16(1.0f);
  }
  AdamWStep args{};
  args.master = master.as<float>(), args.low = low.data(), args.grad = grad.data();
  args.low_dtype = args.grad_dtype = kBF16, args.numel = numel;
  args.bounds = bounds.as<int64_t>(), args.factors = factors.as<float>(), args.num_segments = 2;
  args.exp_avg = m.as<float>(), args.exp_avg_sq = v.as<float>();
  args.step = step.as<int64_t>(), args.lr = 0.5f;
  args.beta1 = 0.9, args.beta2 = 0.999, args.eps = 1e-8;
  kernels::cuda::adamw_step(nullptr, args);
  for (const int64_t i : {int64_t{0}, numel - 1}) {
    CHECK(std::abs(master.as<float>()[i] - 0.5f) < 1e-6f);
    CHECK(static_cast<float>(low.as<BFloat16>()[i]) == 0.5f);
  }
}

/// Segments from multiples of 256 on, as eight-bit states and factors want them.
const Segments kBlockSegments = {{0, 1, 256, 700, 768, 1024, 1280, 1283, 1536, 2600},
                                 {1, 1, 2, 0, 1, 1, 0.5f, 1, 0.25f, 2}};

TEST_CASE(
    "simt adamw_8bit_step: any dtype, alignment and window: codes, scales and masters are the "
    "CPU's",
    "[optimizer][simt]") {
  const std::vector<float> maps = kernels::dynamic_maps();
  struct Window {
    int64_t first, numel, offset;
  };
  for (const auto& [first, numel, offset] :
       {Window{0, 2600, 0}, {512, 1100, 0}, {0, 1283, 1}, {2304, 296, 0}}) {
    for (const DType dtype : {kF32, kBF16}) {
      for (const bool is_stochastic : {false, true}) {
        CAPTURE(first, numel, offset, is_stochastic);
        const Case c{.grad_dtype = dtype,
                     .first = first,
                     .numel = numel,
                     .offset = offset,
                     .segments = kBlockSegments,
                     .is_stochastic = is_stochastic};
        const int64_t blocks = (numel + 255) / 256;
        std::vector<int64_t> codes;
        for (int64_t i = 0; i < numel; ++i) codes.push_back((i * 37) % 256);
        const auto run = [&](bool is_cuda) {
          const Shard shard(c);
          const DeviceBuffer m(from_values(std::span<const int64_t>(codes), {numel}, kU8), offset),
              v(from_values(std::span<const int64_t>(codes), {numel}, kU8), offset),
              m_absmax(full({blocks}, 0.75)), v_absmax(full({blocks}, 0.125)),
              tables(from_values(std::span<const float>(maps), {1024}, kF32)),
              step(from_values({int64_t{3}}, {1}));
          const kernels::AdamW8bitStep p{shard.flat(),
                                         m.as<uint8_t>(),
                                         v.as<uint8_t>(),
                                         m_absmax.as<float>(),
                                         v_absmax.as<float>(),
                                         tables.as<float>(),
                                         step.as<int64_t>(),
                                         0.9,
                                         0.95,
                                         1e-8};
          is_cuda ? kernels::cuda::adamw_8bit_step(nullptr, p) : kernels::cpu::adamw_8bit_step(p);
          return std::vector<Tensor>{shard.state()[0],  m.tensor(),        v.tensor(),
                                     m_absmax.tensor(), v_absmax.tensor(), shard.state()[1]};
        };
        const auto expected = run(false);
        const auto actual = run_in_all_schedules([&] { return run(true); });
        const char* names[] = {"master", "m", "v", "scales of m", "scales of v"};
        check_close(actual[0], expected[0], tol(kF32), names[0]);
        for (size_t i = 1; i < 5; ++i) check_bitwise(actual[i], expected[i], names[i]);
        if (!is_stochastic) check_close(actual[5], expected[5], tol(kBF16), "low");
      }
    }
  }
}

TEST_CASE("simt adamw_8bit_step: a skipped step changes nothing", "[optimizer][simt]") {
  const std::vector<float> maps = kernels::dynamic_maps();
  const Case c{.numel = 1024, .segments = kBlockSegments};
  const Shard shard(c);
  shard.set_skip(1);
  const auto before = shard.state()[0].to_vector();
  const DeviceBuffer m(zeros({1024}, kU8)), v(zeros({1024}, kU8)), scales(zeros({8})),
      tables(from_values(std::span<const float>(maps), {1024}, kF32)),
      step(from_values({int64_t{3}}, {1}));
  kernels::cuda::adamw_8bit_step(
      nullptr, {shard.flat(), m.as<uint8_t>(), v.as<uint8_t>(), scales.as<float>(),
                scales.as<float>() + 4, tables.as<float>(), step.as<int64_t>(), 0.9, 0.95, 1e-8});
  CHECK(shard.state()[0].to_vector() == before);
  CHECK(m.tensor().to_vector() == std::vector<double>(1024, 0.0));
}

TEST_CASE("simt muon_direction, muon_apply: the CPU's", "[optimizer][simt]") {
  for (const DType dtype : {kF32, kBF16}) {
    for (const bool nesterov : {false, true}) {
      for (const int64_t offset : {0, 1}) {
        const Case c{.grad_dtype = dtype, .first = 3, .numel = 1603, .offset = offset};
        std::vector<float> scales;
        for (size_t i = 0; i < c.segments.bounds.size() / 2; ++i) {
          scales.push_back(1 + static_cast<float>(i));
        }
        const auto run = [&](bool is_cuda) {
          const Shard shard(c);
          const DeviceBuffer b(randn({c.numel}, kF32, 7), offset),
              direction(zeros({c.numel}, kBF16), offset),
              orthogonal(randn({c.numel}, kBF16, 8), offset),
              factors(from_values(std::span<const float>(scales), {std::ssize(scales)}, kF32));
          const kernels::MuonDirection first{shard.flat(), b.as<float>(), direction.as<BFloat16>(),
                                             0.95f, nesterov};
          const kernels::MuonApply second{shard.flat(), orthogonal.as<BFloat16>(),
                                          factors.as<float>()};
          if (is_cuda) {
            kernels::cuda::muon_direction(nullptr, first);
            kernels::cuda::muon_apply(nullptr, second);
          } else {
            kernels::cpu::muon_direction(first);
            kernels::cpu::muon_apply(second);
          }
          return std::vector<Tensor>{b.tensor(), direction.tensor(), shard.state()[0],
                                     shard.state()[1]};
        };
        const auto expected = run(false);
        const auto actual = run_in_all_schedules([&] { return run(true); });
        for (size_t i = 0; i < expected.size(); ++i) {
          check_close(actual[i], expected[i], 4 * tol(expected[i].dtype()));
        }
      }
    }
  }
}

TEST_CASE("simt adafactor: the factors of matrices and vectors and their use are the CPU's",
          "[optimizer][simt]") {
  const Case c{.grad_dtype = kF32, .numel = 2600, .segments = kBlockSegments};
  // The last segment is a matrix, the one before it a vector; the others are vectors too.
  const int64_t rows = 28, cols = 38;
  for (const bool skips : {false, true}) {
    const auto run = [&](bool is_cuda) {
      const Shard shard(c);
      const DeviceBuffer scaled(zeros({c.numel})), squares(zeros({11})), values(full({2048}, 0.5)),
          next(zeros({2048})), workspace(zeros({256})), step(from_values({int64_t{5}}, {1})),
          skip(from_values({skips ? 1 : 0}, {1}, kU8));
      std::vector<int64_t> places;
      int64_t at = 0;
      for (size_t s = 0; s < c.segments.bounds.size() / 2; ++s) {
        const int64_t begin = c.segments.bounds[2 * s];
        const int64_t numel = c.segments.bounds[2 * s + 1] - begin;
        const bool is_matrix = numel == rows * cols;
        const int64_t R = is_matrix ? rows : 0, C = is_matrix ? cols : numel;
        places.insert(places.end(), {at, at + R, at + R + C, is_matrix ? C : 0, -begin});
        at += R + C + 2;
      }
      const DeviceBuffer where(
          from_values(std::span<const int64_t>(places), {std::ssize(places)}, kI64));
      const kernels::AdafactorCollect collect{shard.flat(), scaled.as<float>(),
                                              squares.as<float>()};
      is_cuda ? kernels::cuda::adafactor_collect(nullptr, collect)
              : kernels::cpu::adafactor_collect(collect);
      at = 0;
      for (size_t s = 0; s < c.segments.bounds.size() / 2; ++s) {
        const int64_t begin = c.segments.bounds[2 * s];
        const int64_t numel = c.segments.bounds[2 * s + 1] - begin;
        const bool is_matrix = numel == rows * cols;
        kernels::AdafactorFactors factors{};
        factors.next = next.as<float>() + at, factors.values = values.as<float>() + at;
        factors.g = scaled.as<float>() + begin, factors.squares = squares.as<float>() + begin / 256;
        factors.workspace = workspace.as<float>(), factors.step = step.as<int64_t>();
        factors.skip = skip.as<uint8_t>();
        factors.rows = is_matrix ? rows : 0, factors.cols = is_matrix ? cols : numel;
        factors.lr = 0.02, factors.beta2_decay = -0.8, factors.eps1 = 1e-7, factors.eps2 = 1e-3;
        factors.d = 1;
        is_cuda ? kernels::cuda::adafactor_factors(nullptr, factors)
                : kernels::cpu::adafactor_factors(factors);
        at += factors.rows + factors.cols + 2;
      }
      const kernels::AdafactorApply apply{shard.flat(), scaled.as<float>(),
                                          skips ? values.as<float>() : next.as<float>(),
                                          where.as<int64_t>(), 1e-14f};
      is_cuda ? kernels::cuda::adafactor_apply(nullptr, apply)
              : kernels::cpu::adafactor_apply(apply);
      return std::vector<Tensor>{shard.state()[0], next.tensor(), shard.state()[1]};
    };
    const auto expected = run(false);
    const auto actual = run_in_all_schedules([&] { return run(true); });
    CHECK((expected[1].to_vector()[0] == 0.5) == skips);
    check_close(actual[0], expected[0], 1e-5, "master");
    check_close(actual[1], expected[1], 1e-5, "factors");
    check_close(actual[2], expected[2], tol(kBF16), "low");
  }
}

}  // namespace
}  // namespace tessera
