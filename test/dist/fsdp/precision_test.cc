#include <limits>

#include "core/autograd.h"
#include "core/random.h"
#include "dist/fsdp/parts.h"
#include "dist/fsdp/scaler.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "kernels/rope/rope.h"
#include "nn/attention.h"
#include "nn/linear.h"
#include "optim/adamw.h"
#include "test/dist/fsdp/harness.h"
#include "test/testing.h"

namespace tessera {
namespace {

using dist::GradSync;
using dist::LossScaleOptions;
using dist::LossScaling;
using dist::Strategy;
using testing::check_near;
using testing::check_same;
using testing::error_of;
using testing::FsdpResult;
using testing::FsdpRun;
using testing::kStrategies;
using testing::run_fsdp_on_threads;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

dist::FsdpOptions options_of(Strategy strategy, int world, dist::PrecisionOptions precision = {}) {
  dist::FsdpOptions options;
  options.strategy = strategy;
  options.precision = precision;
  if (strategy >= Strategy::kHybridShard) options.shard_size = world % 2 == 0 ? world / 2 : world;
  return options;
}

struct Mode {
  std::string name;
  dist::PrecisionOptions precision;
  std::optional<LossScaleOptions> loss_scale;
};

dist::PrecisionOptions precision_of(DType param, DType reduce, DType wire, bool norm_fp32 = false) {
  dist::PrecisionOptions p;
  p.param_dtype = param;
  p.reduce_dtype = reduce;
  p.wire_dtype = wire;
  p.norm_fp32 = norm_fp32;
  return p;
}

LossScaleOptions scale_from(double init, int64_t interval = 2000) {
  LossScaleOptions options;
  options.init = init;
  options.rule.interval = interval;
  return options;
}

std::vector<Mode> modes() {
  return {{"bf16", precision_of(kBF16, kBF16, kBF16), {}},
          {"bf16, reduced in f32", precision_of(kBF16, kF32, kF32), {}},
          {"bf16, f32 reduce over a bf16 wire, f32 norms",
           precision_of(kBF16, kF32, kBF16, /*norm_fp32=*/true),
           {}},
          {"f16", precision_of(kF16, kF16, kF16), scale_from(4096)},
          {"f16, f32 norms, f32 reduce over an f16 wire",
           precision_of(kF16, kF32, kF16, /*norm_fp32=*/true), scale_from(4096)}};
}

// ---- training ----------------------------------------------------------------------------------

TEST_CASE("precision: every strategy gives the same bits in bf16 and f16", "[fsdp]") {
  for (const Mode& mode : modes()) {
    for (const int world : {1, 2, 4}) {
      for (const int micro_batches : {1, 2}) {
        FsdpRun run;
        run.num_micro_batches = micro_batches;
        run.ragged = true;
        run.loss_scale = mode.loss_scale;
        // Who keeps full gradients keeps them in f32, so it is compared with its like.
        for (const GradSync sync : {GradSync::kEveryMicroBatch, GradSync::kLast}) {
          run.fsdp = options_of(Strategy::kNoShard, world, mode.precision);
          run.fsdp.sync_every_micro_batch = sync;
          const FsdpResult expected = run_fsdp_on_threads(world, run);
          for (const Strategy strategy : kStrategies) {
            if (strategy == Strategy::kShardOptim && sync != GradSync::kLast) continue;
            if (strategy == Strategy::kNoShard) continue;
            run.fsdp = options_of(strategy, world, mode.precision);
            run.fsdp.sync_every_micro_batch = sync;
            const FsdpResult actual = run_fsdp_on_threads(world, run);
            check_same(actual, expected,
                       fmt::format("{} {} world {} micro-batches {} sync {}", mode.name,
                                   name_of(strategy), world, micro_batches, name_of(sync)));
            CHECK(actual.loss_scales == expected.loss_scales);
          }
        }
      }
    }
  }
}

TEST_CASE("precision: mixed training follows f32", "[fsdp]") {
  FsdpRun run;
  run.num_steps = 20;
  run.ragged = true;
  const FsdpResult expected = run_fsdp_on_threads(1, run);
  for (const Mode& mode : modes()) {
    for (const int world : {1, 2, 4}) {
      run.fsdp = options_of(Strategy::kFullShard, world, mode.precision);
      run.loss_scale = mode.loss_scale;
      const FsdpResult actual = run_fsdp_on_threads(world, run);
      const double ulp = mode.precision.param_dtype == kBF16 ? 0x1p-8 : 0x1p-11;
      INFO(mode.name << " world " << world);
      // Rounding errors grow from step to step.
      for (size_t i = 0; i < expected.losses.size(); ++i) {
        INFO("step " << i);
        const double tolerance = (i == 0 ? 1 : 8) * ulp * expected.losses[i];
        CHECK(std::fabs(actual.losses[i] - expected.losses[i]) <= tolerance);
      }
      CHECK(std::fabs(actual.grad_norms[0] - expected.grad_norms[0]) <=
            4 * ulp * expected.grad_norms[0]);
      for (const auto& [name, values] : expected.gradients) {
        double largest = 0, error = 0;
        for (size_t i = 0; i < values.size(); ++i) {
          largest = std::max(largest, std::fabs(values[i]));
          error = std::max(error, std::fabs(values[i] - actual.gradients.at(name)[i]));
        }
        INFO(name << ": largest " << largest << ", error " << error);
        CHECK(error <= 16 * ulp * largest);
      }
    }
  }
}

TEST_CASE("precision: the loss scale keeps gradients that f16 alone would lose", "[fsdp]") {
  FsdpRun run;
  run.num_steps = 1;
  run.samples_per_step = 64;
  const FsdpResult f32 = run_fsdp_on_threads(1, run);
  const auto error_with = [&](std::optional<LossScaleOptions> scale) {
    run.fsdp = options_of(Strategy::kFullShard, 2, precision_of(kF16, kF16, kF16));
    run.loss_scale = scale;
    const FsdpResult actual = run_fsdp_on_threads(2, run);
    double error = 0, squares = 0;
    for (const auto& [name, values] : f32.gradients) {
      for (size_t i = 0; i < values.size(); ++i) {
        error += std::pow(values[i] - actual.gradients.at(name)[i], 2);
        squares += values[i] * values[i];
      }
    }
    return std::sqrt(error / squares);
  };
  // Unscaled gradients of a batch 64 times as large are as small as these.
  const double with = error_with(scale_from(4096)), without = error_with(scale_from(0x1p-6));
  CAPTURE(with, without);
  CHECK(with < 0.25 * without);
}

// ---- sums over ranks and micro-batches ----------------------------------------------------------

/// One vector; the loss is its product with the coefficients, so they are its gradient.
class Vector : public nn::Module {
 public:
  explicit Vector(int64_t numel)
      : w_(register_parameter("w", {numel}, nn::Init::ones(), {.decay = true})) {}
  Tensor forward(const Tensor& coefficients) { return sum(mul(w_, coefficients)); }
  const Tensor& weight() const { return w_; }

 private:
  Tensor& w_;
};

/// The gradient that FSDP sums where rank r's micro-batch a has `of(r, a)`, as each rank holds it.
std::vector<double> sum_over_ranks(const dist::FsdpOptions& options, int world_size, int count,
                                   const std::function<double(int, int)>& of,
                                   double* norm = nullptr) {
  std::vector<double> sums(static_cast<size_t>(world_size));
  dist::run_ranks(world_size, [&](dist::World& world) {
    Vector net(3);
    dist::FsdpOptions o = options;
    o.wrap = dist::wrap::whole_model();
    const auto fsdp = dist::fully_shard(net, world, o);
    fsdp->initialize(1);
    for (int a = 0; a < count; ++a) {
      fsdp->begin_micro_batch(a, count);
      backward(nn::call(net, full({3}, of(world.rank(), a), o.precision.param_dtype)));
    }
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(0);
    if (world.rank() == 0 && norm != nullptr) *norm = clip.norm.item();
    fsdp->for_each_full(dist::Fsdp::State::kGradient, [&](const std::string&, const Tensor& g) {
      sums[static_cast<size_t>(world.rank())] =
          g.to_vector()[2] * *fsdp->options().precision.pre_divide;
    });
    fsdp->end_step();
  });
  return sums;
}

TEST_CASE("precision: 64 ranks of one and one of 2^-9 over a bf16 wire add up exactly", "[fsdp]") {
  for (const DType reduce : {kF32, kBF16}) {
    for (const Strategy strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
      const std::vector<double> sums =
          sum_over_ranks(options_of(strategy, 65, precision_of(kBF16, reduce, kBF16)), 65, 1,
                         [](int rank, int) { return rank == 7 ? 0x1p-9 : 1.0; });
      CHECK(sums == std::vector<double>(65, 64 + 0x1p-9));
    }
  }
}

TEST_CASE("precision: hybrid accumulation of bf16 gradients rounds once and not every micro-batch",
          "[fsdp]") {
  // After the first micro-batch bf16 could not add another one: 256 + 1 is 256.
  for (const GradSync sync : {GradSync::kShard, GradSync::kEveryMicroBatch, GradSync::kLast}) {
    dist::FsdpOptions options =
        options_of(Strategy::kHybridShard, 4, precision_of(kBF16, kBF16, kBF16));
    options.sync_every_micro_batch = sync;
    const std::vector<double> sums =
        sum_over_ranks(options, 4, 8, [](int, int a) { return a == 0 ? 256.0 : 1.0; });
    INFO(name_of(sync));
    // kLast adds in f32 and rounds 263 once, to 264, on its way.
    CHECK(sums == std::vector<double>(4, sync == GradSync::kLast ? 4 * 264.0 : 4 * 263.0));
  }
}

TEST_CASE("precision: f16 sums over many ranks do not overflow", "[fsdp]") {
  for (const Strategy strategy :
       {Strategy::kFullShard, Strategy::kShardOptim, Strategy::kNoShard, Strategy::kHybridShard}) {
    INFO(name_of(strategy));
    double norm = 0;
    const auto options = options_of(strategy, 32, precision_of(kF16, kF16, kF16));
    const std::vector<double> sums = sum_over_ranks(
        options, 32, 1, [](int, int) { return 30000.0; }, &norm);
    CHECK(sums == std::vector<double>(32, 32 * 30000.0));
    CHECK(norm == Approx(32 * 30000.0 * std::sqrt(3.0)).epsilon(1e-6));
  }
  // What travels and what a sum on the way could reach fits into f16.
  std::vector<double> held;
  dist::run_ranks(8, [&](dist::World& world) {
    Vector net(3);
    const auto fsdp = dist::fully_shard(
        net, world, options_of(Strategy::kFullShard, 8, precision_of(kF16, kF16, kF16)));
    fsdp->initialize(1);
    if (world.rank() == 0) CHECK(*fsdp->options().precision.pre_divide == 8);
    backward(nn::call(net, full({3}, 60000.0, kF16)));
    fsdp->clip_grad_norm(0);
    fsdp->for_each_full(dist::Fsdp::State::kGradient, [&](const std::string&, const Tensor& g) {
      if (world.rank() == 0) held = g.to_vector();
    });
    fsdp->end_step();
  });
  CHECK(held == std::vector<double>(3, 60000.0));
}

// ---- skipped steps ------------------------------------------------------------------------------

enum class Poison { kNone, kShardOfRank1, kBackwardOfRank1 };

struct SkipRun {
  dist::FsdpOptions fsdp;
  std::vector<Poison> steps;  ///< the poisoned ones repeat the data of their predecessor
  int num_micro_batches = 1;
  LossScaleOptions scale = scale_from(1024);
};

struct SkipResult {
  std::vector<double> scales, found_inf;
  std::vector<std::vector<double>> parameters;  // after each step
  std::vector<std::vector<double>> states;      // of this rank after each step, with the count
  double num_skipped = 0;
};

SkipResult train_with_skips(dist::World& world, const SkipRun& run) {
  SkipResult result;
  nn::Llama model(FsdpRun::tiny_llama());
  const auto fsdp = dist::fully_shard(model, world, run.fsdp);
  fsdp->initialize(5);
  optim::AdamW adamw(fsdp->shards(), {});
  dist::LossScaler scaler(run.scale);
  int data = 0;
  for (const Poison poison : run.steps) {
    result.scales.push_back(scaler.scale().item());
    const Tensor start = scaler.grad_scale(1.0 / 64);
    for (int a = 0; a < run.num_micro_batches; ++a) {
      const auto seed = static_cast<uint64_t>(100 * data + 10 * a + world.rank());
      const Tensor ids = testing::randint(0, 67, {1, 16}, kI32, seed + 1);
      const bool is_bad =
          poison == Poison::kBackwardOfRank1 && world.rank() == 1 && a + 1 == run.num_micro_batches;
      const Tensor gradient = is_bad ? full({}, kInfinity) : start;
      fsdp->begin_micro_batch(a, run.num_micro_batches);
      const LossSum loss = model.loss(ids, ids, {}, {.grad_scale = gradient});
      backward(loss.sum, gradient);
    }
    if (poison == Poison::kShardOfRank1) {
      fsdp->clip_grad_norm(0);  // the sums are complete
      if (world.rank() == 1) {
        auto& unit = *parts_of(*fsdp).units[1];
        auto& group = unit.groups()[0];
        group.grad.narrow(0, unit.own_begin(group), 1).fill_(kInfinity);
      }
    }
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0, 2.0, scaler.scale());
    adamw.step(1e-2f, clip.factor, clip.found_inf);
    scaler.update(clip.found_inf);
    fsdp->end_step();
    result.found_inf.push_back(clip.found_inf.item());
    std::vector<double>& parameters = result.parameters.emplace_back();
    fsdp->for_each_full(dist::Fsdp::State::kMaster, [&](const std::string&, const Tensor& full) {
      const std::vector<double> values = full.to_vector();
      parameters.insert(parameters.end(), values.begin(), values.end());
    });
    std::vector<double>& states = result.states.emplace_back();
    states.push_back(adamw.step_count().item());
    const bool is_offloaded = run.fsdp.offload != dist::Offload::kNone;  // states are on their way
    for (const optim::NamedState& state : adamw.state()) {
      for (const Tensor& t : state.tensors) {
        if (is_offloaded) continue;
        const std::vector<double> values = t.to_vector();
        states.insert(states.end(), values.begin(), values.end());
      }
    }
    for (const optim::FlatShard& shard : fsdp->shards()) {
      if (!shard.low.is_defined() || is_offloaded) continue;
      const std::vector<double> values = shard.low.to_vector();
      states.insert(states.end(), values.begin(), values.end());
    }
    if (poison == Poison::kNone) ++data;
  }
  result.num_skipped = scaler.state().num_skipped.item();
  return result;
}

std::vector<SkipResult> train_with_skips_on_threads(int world_size, const SkipRun& run) {
  std::vector<SkipResult> results(static_cast<size_t>(world_size));
  dist::run_ranks(world_size, [&](dist::World& world) {
    results[static_cast<size_t>(world.rank())] = train_with_skips(world, run);
  });
  return results;
}

TEST_CASE("scaler: infinity on one rank's shard makes every rank skip the step", "[fsdp]") {
  for (const Poison poison : {Poison::kShardOfRank1, Poison::kBackwardOfRank1}) {
    for (const Strategy strategy : kStrategies) {
      // At world 8 most units leave some ranks without an element.
      for (const int world : {2, 4, 8}) {
        for (const int micro_batches : {1, 2}) {
          INFO(name_of(strategy) << " world " << world << " poison " << static_cast<int>(poison)
                                 << " micro-batches " << micro_batches);
          SkipRun run;
          run.fsdp = options_of(strategy, world, precision_of(kF16, kF16, kF16));
          run.num_micro_batches = micro_batches;
          run.steps = {Poison::kNone, poison, Poison::kNone};
          const auto results = train_with_skips_on_threads(world, run);
          for (const SkipResult& r : results) {
            CHECK(r.found_inf == std::vector<double>{0, 1, 0});
            CHECK(r.scales == std::vector<double>{1024, 1024, 512});
            CHECK(r.num_skipped == 1);
            CHECK(r.parameters[1] == r.parameters[0]);  // of all ranks
            CHECK(r.states[1] == r.states[0]);
            CHECK(r.parameters[2] != r.parameters[1]);
            CHECK(r.states[2][0] == 2);
            CHECK(r.parameters == results[0].parameters);
          }
          // As if the step had not been: a power of two more or less in the scale changes no bit of
          // gradients that are not as small as f16 can be.
          SkipRun without = run;
          without.steps = {Poison::kNone, Poison::kNone};
          const auto expected = train_with_skips_on_threads(world, without);
          testing::check_close(results[0].parameters[2], expected[0].parameters[1], 2e-3);
        }
      }
    }
  }
}

TEST_CASE("scaler: in f32 a skipped step leaves no trace at all", "[fsdp]") {
  SkipRun run;
  run.fsdp = options_of(Strategy::kFullShard, 2);
  run.steps = {Poison::kNone, Poison::kBackwardOfRank1, Poison::kShardOfRank1, Poison::kNone};
  const auto results = train_with_skips_on_threads(2, run);
  run.steps = {Poison::kNone, Poison::kNone};
  const auto expected = train_with_skips_on_threads(2, run);
  for (size_t r = 0; r < results.size(); ++r) {
    CHECK(results[r].parameters[3] == expected[r].parameters[1]);
    CHECK(results[r].states[3] == expected[r].states[1]);
    CHECK(results[r].num_skipped == 2);
  }
}

TEST_CASE("scaler: a skipped step leaves no trace in offloaded states", "[fsdp]") {
  for (const dist::Offload offload :
       {dist::Offload::kOptimizer, dist::Offload::kParamsAndOptimizer}) {
    for (const DType dtype : {kF32, kBF16}) {
      INFO(name_of(offload) << " " << name_of(dtype));
      SkipRun run;
      run.fsdp = options_of(Strategy::kFullShard, 2, precision_of(dtype, dtype, dtype));
      run.steps = {Poison::kNone, Poison::kNone, Poison::kNone};
      const auto expected = train_with_skips_on_threads(2, run);
      run.fsdp.offload = offload;
      run.steps = {Poison::kNone, Poison::kBackwardOfRank1, Poison::kNone, Poison::kNone};
      for (const SkipResult& result : train_with_skips_on_threads(2, run)) {
        CHECK(result.found_inf == std::vector<double>{0, 1, 0, 0});
        CHECK(result.scales == std::vector<double>{1024, 1024, 512, 512});
        CHECK(result.parameters[1] == result.parameters[0]);
        CHECK(result.states[3][0] == 3);
        CHECK(result.parameters[3] == expected[0].parameters[2]);
      }
    }
  }
}

TEST_CASE("scaler: goes on after saving and loading as it would have", "[fsdp]") {
  const Tensor inf = full({}, 1, kU8), fine = zeros({}, kU8);
  const auto advance = [&](dist::LossScaler& scaler, int from, int to) {
    std::vector<double> scales;
    for (int i = from; i < to; ++i) {
      scaler.update(i == 4 ? inf : fine);
      scales.push_back(scaler.scale().item());
    }
    return scales;
  };
  dist::LossScaler whole(scale_from(64, 3)), first(scale_from(64, 3)), second(scale_from(1, 3));
  advance(whole, 0, 5);
  const std::vector<double> expected = advance(whole, 5, 12);
  advance(first, 0, 5);
  second.state().scale.copy_(first.state().scale);
  second.state().num_good.copy_(first.state().num_good);
  second.state().num_skipped.copy_(first.state().num_skipped);
  CHECK(advance(second, 5, 12) == expected);
  CHECK(expected == std::vector<double>{64, 64, 128, 128, 128, 256, 256});
  CHECK(second.state().num_skipped.item() == 1);
}

TEST_CASE("scaler: none and static scales stay but count what is skipped", "[fsdp]") {
  LossScaleOptions options = scale_from(8);
  options.scaling = LossScaling::kStatic;
  dist::LossScaler fixed(options);
  options.scaling = LossScaling::kNone;
  dist::LossScaler none(options);
  for (const double found : {1.0, 0.0, 1.0}) {
    fixed.update(full({}, found, kU8));
    none.update(full({}, found, kU8));
  }
  CHECK(fixed.scale().item() == 8);
  CHECK(none.scale().item() == 1);
  CHECK(fixed.state().num_skipped.item() == 2);
  CHECK(none.grad_scale(0.25).item() == 0.25);
  const Tensor start = fixed.grad_scale(0.25);
  CHECK(start.item() == 2);
  CHECK(start.dtype() == kF32);
}

TEST_CASE("scaler: options out of range are named", "[fsdp]") {
  CHECK_THROWS_WITH(dist::LossScaler(scale_from(0)),
                    Catch::Contains("LossScaleOptions::init: 0, expected more than 0"));
  CHECK_THROWS_WITH(dist::LossScaler(scale_from(8, 0)),
                    Catch::Contains("LossScaleRule::interval: 0, expected at least 1"));
  dist::LossScaler each_step(scale_from(8, 1));  // the smallest interval
  each_step.update(full({}, 0, kU8));
  CHECK(each_step.scale().item() == 16);
  LossScaleOptions options;
  options.rule.backoff = 1;
  CHECK_THROWS_AS(dist::LossScaler(options), ConfigError);
  options = {};
  options.rule.min_scale = 0;
  CHECK_THROWS_AS(dist::LossScaler(options), ConfigError);
}

// ---- small steps --------------------------------------------------------------------------------

TEST_CASE("precision: steps below half an ulp of bf16 move a parameter by what they add up to",
          "[fsdp]") {
  // lr x g = 1e-5 where a parameter is 1 and the next bf16 number below is 1 - 2^-8.
  constexpr int kNumSteps = 600;
  constexpr double kLr = 1e-5;
  for (const Strategy strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    dist::run_ranks(2, [&](dist::World& world) {
      Vector net(3);
      dist::FsdpOptions options = options_of(strategy, 2, precision_of(kBF16, kBF16, kBF16));
      options.wrap = dist::wrap::whole_model();
      const auto fsdp = dist::fully_shard(net, world, options);
      fsdp->initialize(1);
      optim::AdamWOptions adamw_options;
      adamw_options.weight_decay = 0;
      optim::AdamW adamw(fsdp->shards(), adamw_options);
      double loss = 0;
      for (int step = 0; step <= kNumSteps; ++step) {
        const Tensor y = nn::call(net, full({3}, 1, kBF16));
        loss = y.item();  // 3 x what was gathered
        backward(y);
        const dist::ClippedNorm clip = fsdp->clip_grad_norm(0);
        if (step < kNumSteps) adamw.step(kLr, clip.factor, clip.found_inf);
        fsdp->end_step();
      }
      fsdp->for_each_full(dist::Fsdp::State::kMaster, [&](const std::string&, const Tensor& w) {
        if (world.rank() != 0) return;  // one thread at a time checks
        for (const double x : w.to_vector()) {
          CHECK(x == Approx(1 - kNumSteps * kLr).margin(1e-5));
        }
      });
      if (world.rank() != 0) return;
      // 1 - 0.006 rounded to bf16: two numbers below one, and the moments are f32.
      CHECK(loss == Approx(3 * (1 - 2 * 0x1p-8)).margin(3 * 0x1p-9));
      for (const optim::NamedState& state : adamw.state()) {
        for (const Tensor& t : state.tensors) CHECK(t.dtype() == kF32);
      }
    });
  }
}

// ---- dtypes of what goes in and out -------------------------------------------------------------

TEST_CASE("precision: norm_fp32 keeps the norms and nothing else in f32", "[fsdp]") {
  dist::run_ranks(2, [](dist::World& world) {
    nn::Llama model(FsdpRun::tiny_llama());
    const auto fsdp = dist::fully_shard(
        model, world, options_of(Strategy::kFullShard, 2, precision_of(kBF16, kBF16, kBF16, true)));
    if (world.rank() != 0) return;
    int num_norms = 0;
    for (const nn::NamedParameter& p : model.named_parameters()) {
      INFO(p.name);
      const bool is_norm = p.name.find("norm") != std::string::npos;
      CHECK(p.parameter->tensor.dtype() == (is_norm ? kF32 : kBF16));
      num_norms += is_norm;
    }
    CHECK(num_norms == 7);
    for (const auto& unit : parts_of(*fsdp).units) {
      for (const dist::Group& g : unit->groups()) {
        CHECK(g.grad_dtype == g.layout.dtype);
        CHECK(g.master.dtype() == kF32);
      }
    }
  });
}

TEST_CASE("precision: output_dtype is that of the root's results while losses stay f32", "[fsdp]") {
  for (const bool whole : {false, true}) {
    for (const DType dtype : {kF32, kBF16}) {
      dist::run_ranks(2, [&](dist::World& world) {
        nn::Llama model(FsdpRun::tiny_llama());
        const Tensor ids = testing::randint(0, 67, {1, 16});
        dist::FsdpOptions options =
            options_of(Strategy::kFullShard, 2, precision_of(kBF16, kBF16, kBF16));
        if (whole) options.wrap = dist::wrap::whole_model();
        const auto hidden_of = [&](dist::Fsdp& fsdp) {
          fsdp.initialize(5);
          NoGrad no_grad;
          const Tensor hidden = nn::call(model, ids);
          fsdp.end_forward();
          return hidden;
        };
        Tensor plain;
        {
          const auto fsdp = dist::fully_shard(model, world, options);
          plain = hidden_of(*fsdp);
        }
        nn::Llama other(FsdpRun::tiny_llama());
        options.precision.output_dtype = dtype;
        const auto fsdp = dist::fully_shard(other, world, options);
        fsdp->initialize(5);
        const Tensor hidden = nn::call(other, ids);
        fsdp->end_forward();
        const LossSum loss = other.loss(ids, ids);
        backward(loss.sum);  // goes through the casts
        const double norm = fsdp->clip_grad_norm(0).norm.item();
        fsdp->end_step();
        if (world.rank() != 0) return;
        CHECK(plain.dtype() == kBF16);
        CHECK(hidden.dtype() == dtype);
        CHECK(hidden.to(kF32).to_vector() == plain.to(kF32).to_vector());
        CHECK(loss.sum.dtype() == kF32);
        CHECK(norm > 0);
      });
    }
  }
}

class Head : public nn::Module {
 public:
  nn::Child<nn::Linear> linear{this, "linear", 4, 3};
  Tensor forward(const Tensor& x) { return linear(x); }
};

TEST_CASE("precision: cast_forward_inputs makes a unit's inputs param_dtype or leaves them",
          "[fsdp]") {
  dist::run_ranks(2, [](dist::World& world) {
    dist::FsdpOptions options =
        options_of(Strategy::kFullShard, 2, precision_of(kBF16, kBF16, kBF16));
    options.wrap = dist::wrap::whole_model();
    Tensor x = testing::randn({2, 4});
    x.set_requires_grad(true);
    Tensor expected;
    for (const bool casts : {true, false}) {
      Head net;
      options.precision.cast_forward_inputs = casts;
      const auto fsdp = dist::fully_shard(net, world, options);
      fsdp->initialize(2);
      if (casts) {
        const Tensor y = nn::call(net, x);
        backward(sum(y));
        fsdp->clip_grad_norm(0);
        fsdp->end_step();
        expected = y.detach().clone();
        if (world.rank() != 0) continue;
        CHECK(y.dtype() == kBF16);
        CHECK(x.grad().dtype() == kF32);  // through the cast
      } else {
        NoGrad no_grad;
        bool has_thrown = false;
        try {
          nn::call(net, x);
        } catch (const DtypeError&) {
          has_thrown = true;
        }
        fsdp->end_forward();
        const Tensor y = nn::call(net, x.detach().to(kBF16));
        fsdp->end_forward();
        if (world.rank() != 0) continue;
        CHECK(has_thrown);
        testing::check_bitwise(y, expected);
      }
    }
  });
}

/// Has a buffer that bf16 would round, one that is saved and one of integers.
class Tables : public nn::Module {
 public:
  static constexpr double kValue = 1.0 / 3;
  Tables() {
    if (table_.storage()->is_materialized()) reset_buffers();
  }
  void reset_buffers() override { table_.copy_(full({4}, kValue)); }
  Tensor forward(const Tensor& x) { return mul(w_, x); }

 private:
  Tensor& w_ = register_parameter("w", {4}, nn::Init::ones());
  Tensor& table_ = register_buffer("table", new_tensor({4}, kF32), /*persistent=*/false);
  Tensor& count_ = register_buffer("count", new_tensor({4}, kI64), /*persistent=*/false);
};

TEST_CASE("precision: buffers are computed on every rank and cast only if asked", "[fsdp]") {
  for (const bool is_deferred : {false, true}) {
    for (const std::optional<DType> dtype : {std::optional<DType>{}, std::optional<DType>{kBF16}}) {
      std::vector<std::vector<double>> tables(4);
      dist::run_ranks(4, [&](dist::World& world) {
        std::unique_ptr<Tables> net;
        if (is_deferred) {
          const nn::DeferredInit deferred;
          net = std::make_unique<Tables>();
        } else {
          net = std::make_unique<Tables>();
        }
        dist::FsdpOptions options =
            options_of(Strategy::kFullShard, 4, precision_of(kBF16, kBF16, kBF16));
        options.precision.buffer_dtype = dtype;
        const auto fsdp = dist::fully_shard(*net, world, options);
        const auto buffers = net->named_buffers();
        const Tensor& table = buffers[0].buffer->tensor;
        tables[static_cast<size_t>(world.rank())] = table.to_vector();
        if (world.rank() != 0) return;
        CHECK(table.dtype() == dtype.value_or(kF32));
        CHECK(buffers[1].buffer->tensor.dtype() == kI64);
      });
      const std::vector<double> expected =
          full({4}, Tables::kValue).to(dtype.value_or(kF32)).to_vector();
      for (const std::vector<double>& table : tables) CHECK(table == expected);
    }
  }
}

TEST_CASE("precision: deferred initialization gives the same model on any ranks", "[fsdp]") {
  nn::Llama eager(FsdpRun::tiny_llama());
  eager.initialize(9);
  std::map<std::string, std::vector<double>> expected;
  for (const nn::NamedParameter& p : eager.named_parameters()) {
    expected[p.name] = p.parameter->tensor.to_vector();
  }
  for (const Strategy strategy : kStrategies) {
    for (const int world_size : {1, 2, 3, 4}) {
      dist::run_ranks(world_size, [&](dist::World& world) {
        std::unique_ptr<nn::Llama> model;
        {
          const nn::DeferredInit deferred;
          model = std::make_unique<nn::Llama>(FsdpRun::tiny_llama());
        }
        const auto fsdp = dist::fully_shard(*model, world, options_of(strategy, world_size));
        fsdp->initialize(9);
        std::map<std::string, std::vector<double>> actual;
        fsdp->for_each_full(
            dist::Fsdp::State::kMaster,
            [&](const std::string& name, const Tensor& full) { actual[name] = full.to_vector(); });
        if (world.rank() != 0) return;
        INFO(name_of(strategy) << " world " << world_size);
        CHECK(actual == expected);
      });
    }
  }
}

/// Rotates its input at the positions it is given.
class Rotary : public nn::Module {
 public:
  Tensor forward(const Tensor& x_BTHD, const Tensor& positions) {
    return rope(mul(x_BTHD, w_), positions, {.theta = 500000});
  }

 private:
  Tensor& w_ = register_parameter("w", {64}, nn::Init::ones());
};

TEST_CASE("precision: rotary angles are exact in a bf16 model up to position 131071", "[fsdp]") {
  constexpr int64_t kHalf = 32;
  const std::vector<int32_t> positions = {0, 1, 2048, 32767, 65537, 100003, 131071};
  const auto T = static_cast<int64_t>(positions.size());
  dist::run_ranks(2, [&](dist::World& world) {
    Rotary net;
    const auto fsdp = dist::fully_shard(
        net, world, options_of(Strategy::kFullShard, 2, precision_of(kBF16, kBF16, kBF16)));
    fsdp->initialize(1);
    // (1, 0) rotated is (cos, sin), rounded to bf16.
    std::vector<double> unit(64, 0.0);
    std::fill_n(unit.begin(), kHalf, 1.0);
    Tensor x = empty({1, T, 1, 2 * kHalf}, kBF16);
    for (int64_t t = 0; t < T; ++t) {
      x.select(1, t).copy_(from_values(std::span<const double>(unit), {1, 1, 2 * kHalf}));
    }
    NoGrad no_grad;
    const std::vector<double> y =
        nn::call(net, x, from_values(std::span<const int32_t>(positions), {T})).to_vector();
    fsdp->end_forward();
    if (world.rank() != 0) return;
    const Tensor table = rope_table(from_values(std::span<const int32_t>(positions), {T}),
                                    2 * kHalf, {.theta = 500000});
    CHECK(table.dtype() == kF32);
    double error = 0, table_error = 0;
    const std::vector<double> values = table.to_vector();
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i < kHalf; ++i) {
        const double angle =
            positions[static_cast<size_t>(t)] * std::pow(500000.0, -static_cast<double>(i) / kHalf);
        const auto at = static_cast<size_t>(t * 2 * kHalf + i);
        error = std::max({error, std::fabs(y[at] - std::cos(angle)),
                          std::fabs(y[at + kHalf] - std::sin(angle))});
        table_error = std::max({table_error, std::fabs(values[at] - std::cos(angle)),
                                std::fabs(values[at + kHalf] - std::sin(angle))});
      }
    }
    CHECK(table_error < 1e-3);
    CHECK(error <= 0x1p-9 + 1e-6);  // half an ulp of bf16 below one
  });
}

TEST_CASE("precision: options that make no sense are named", "[fsdp]") {
  const auto error_with = [](const dist::PrecisionOptions& precision) {
    std::string text;
    dist::run_ranks(1, [&](dist::World& world) {
      Vector net(3);
      text = error_of(
          [&] { dist::fully_shard(net, world, options_of(Strategy::kFullShard, 1, precision)); });
    });
    return text;
  };
  dist::PrecisionOptions p;
  p.pre_divide = 3;
  CHECK_THAT(error_with(p),
             Catch::Contains("PrecisionOptions::pre_divide: 3, expected a power of two"));
  p = {};
  p.output_dtype = kI32;
  CHECK_THAT(error_with(p),
             Catch::Contains("PrecisionOptions::output_dtype: i32, expected f32, bf16"));
  p = {};
  p.buffer_dtype = kF64;
  CHECK_THAT(error_with(p),
             Catch::Contains("PrecisionOptions::buffer_dtype: f64, expected f32, bf16"));
  p = {};
  p.wire_dtype = kI64;
  CHECK_THAT(error_with(p),
             Catch::Contains("PrecisionOptions::wire_dtype: i64, expected f32, bf16"));
}

}  // namespace
}  // namespace tessera
