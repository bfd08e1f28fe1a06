#include <cmath>
#include <limits>

#include "dist/fsdp/scaler.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "test/dist/fsdp/harness.h"
#include "test/testing.h"

namespace tessera {
namespace {

using dist::Strategy;
using testing::check_close;
using testing::check_near;
using testing::check_same;
using testing::FsdpResult;
using testing::FsdpRun;
using testing::kStrategies;
using testing::run_fsdp_on_threads;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Vectors of the given lengths; the loss is sum_i coefficients_i . w_i, so the gradients are the
/// coefficients.
class Weights : public nn::Module {
 public:
  explicit Weights(const std::vector<int64_t>& sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      tensors_.push_back(
          &register_parameter("w" + std::to_string(i), {sizes[i]}, nn::Init::zeros()));
    }
  }
  Tensor forward(const std::vector<Tensor>& coefficients) {
    Tensor loss;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor term = sum(mul(*tensors_[i], coefficients[i]));
      loss = loss.is_defined() ? add(loss, term) : term;
    }
    return loss;
  }

 private:
  std::vector<Tensor*> tensors_;
};

dist::FsdpOptions options_of(Strategy strategy, int world) {
  dist::FsdpOptions options;
  options.strategy = strategy;
  options.wrap = dist::wrap::whole_model();
  if (strategy >= Strategy::kHybridShard) options.shard_size = world % 2 == 0 ? world / 2 : world;
  return options;
}

struct Clipped {
  double norm, factor;
};

/// What clipping says on each rank where the ranks' gradients add up to `gradients`.

std::vector<Clipped> clip_everywhere(Strategy strategy, int world_size,
                                     const std::vector<std::vector<double>>& gradients,
                                     double max_norm, double p) {
  std::vector<Clipped> results(static_cast<size_t>(world_size));
  dist::run_ranks(world_size, [&](dist::World& world) {
    std::vector<int64_t> sizes;
    std::vector<Tensor> coefficients;
    for (const std::vector<double>& g : gradients) {
      sizes.push_back(static_cast<int64_t>(g.size()));
      coefficients.push_back(from_values(std::span<const double>(g), {sizes.back()}));
    }
    Weights net(sizes);
    const auto fsdp = dist::fully_shard(net, world, options_of(strategy, world_size));
    fsdp->initialize(1);
    backward(nn::call(net, coefficients), full({}, 1.0 / world_size));
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(max_norm, p);
    Clipped& result = results[static_cast<size_t>(world.rank())];
    result.norm = clip.norm.item();
    result.factor = clip.factor.item();
    fsdp->end_step();
  });
  return results;
}

TEST_CASE("clip: a norm of 5 is reported as 5 and clipped to 1 by a factor of 0.2", "[fsdp]") {
  for (const Strategy strategy : kStrategies) {
    for (const int world : {1, 2, 4}) {
      for (const Clipped& c : clip_everywhere(strategy, world, {{3}, {0, 0, 4}}, 1.0, 2.0)) {
        INFO(name_of(strategy) << " world " << world);
        CHECK(c.norm == 5);
        CHECK(c.factor == Approx(0.2).epsilon(1e-6));
      }
      for (const Clipped& c : clip_everywhere(strategy, world, {{3}, {0, 0, 4}}, 0, 2.0)) {
        CHECK(c.norm == 5);
        CHECK(c.factor == 1);
      }
    }
  }
}

namespace {

/// Two units: of gradients 2, 2, 2 and of 300 ones.
class TwoUnits : public nn::Module {
 public:
  Tensor forward() {
    const std::vector<Tensor> twos = {full({3}, 2)}, ones = {full({300}, 1)};
    return add(first_(twos), second_(ones));
  }

 private:
  nn::Child<Weights> first_{this, "first", std::vector<int64_t>{3}};
  nn::Child<Weights> second_{this, "second", std::vector<int64_t>{300}};
};

}  // namespace

TEST_CASE("clip: the norms of units are those of their parameters, under a loss scale too",
          "[fsdp]") {
  for (const Strategy strategy : kStrategies) {
    for (const int world_size : {1, 2, 4}) {
      dist::run_ranks(world_size, [&](dist::World& world) {
        TwoUnits net;
        dist::FsdpOptions options = options_of(strategy, world_size);
        options.wrap = dist::wrap::by_class<Weights>();
        const auto fsdp = dist::fully_shard(net, world, options);
        fsdp->initialize(1);
        backward(nn::call(net), full({}, 8.0 / world_size));
        const Tensor scale = full({}, 8);
        for (const auto& [p, first, second] : {std::tuple{1.0, 6.0, 300.0},
                                               {2.0, std::sqrt(12.0), std::sqrt(300.0)},
                                               {kInfinity, 2.0, 1.0}}) {
          const dist::ClippedNorm clip = fsdp->clip_grad_norm(1e-3, p, scale);
          const dist::UnitNorms of_units = fsdp->unit_norms(clip, p, scale);
          INFO(name_of(strategy) << " world " << world_size << " p " << p);
          CHECK(of_units.units == std::vector<std::string>{"first", "second"});
          const std::vector<double> norms = of_units.norms.to_vector();
          REQUIRE(norms.size() == 2);
          CHECK(norms[0] == Approx(first).epsilon(1e-6));
          CHECK(norms[1] == Approx(second).epsilon(1e-6));
        }
        fsdp->end_step();
      });
    }
  }
}

TEST_CASE("clip: a step without a backward has gradients of zero, whatever the last one had",
          "[fsdp]") {
  for (const Strategy strategy : kStrategies) {
    for (const int world_size : {1, 2}) {
      for (const dist::Offload offload :
           {dist::Offload::kNone, dist::Offload::kParamsAndOptimizer}) {
        if (offload != dist::Offload::kNone && strategy != Strategy::kFullShard) continue;
        dist::run_ranks(world_size, [&](dist::World& world) {
          Weights net({3, 300});
          dist::FsdpOptions options = options_of(strategy, world_size);
          options.offload = offload;
          const auto fsdp = dist::fully_shard(net, world, options);
          fsdp->initialize(1);
          const std::vector<Tensor> coefficients = {full({3}, 2), full({300}, 1)};
          backward(nn::call(net, coefficients), full({}, 1.0 / world_size));
          const double norm = fsdp->clip_grad_norm(0, 2.0).norm.item();
          fsdp->end_step();
          const double norm_without = fsdp->clip_grad_norm(0, 2.0).norm.item();
          fsdp->end_step();
          INFO(name_of(strategy) << " world " << world_size);
          if (world.rank() == 0) {
            CHECK(norm == Approx(std::sqrt(12.0 + 300.0)).epsilon(1e-6));
            CHECK(norm_without == 0);
          }
        });
      }
    }
  }
}

TEST_CASE("clip: each element counts once in shards of any size", "[fsdp]") {
  // Gradients of one: the 1-norm is the number of elements, whatever they are divided into.
  const std::vector<int64_t> sizes = {1, 7, 8 * 128, 31 * 37, 1, 5 * 256};
  std::vector<std::vector<double>> ones;
  int64_t count = 0;
  for (const int64_t n : sizes) {
    ones.emplace_back(static_cast<size_t>(n), 1.0);
    count += n;
  }
  for (const Strategy strategy : kStrategies) {
    for (const int world : {1, 2, 3, 4, 8, 32}) {
      if (world == 32 && strategy != Strategy::kFullShard && strategy != Strategy::kHybridShard) {
        continue;
      }
      INFO(name_of(strategy) << " world " << world);
      const Clipped one = clip_everywhere(strategy, world, ones, 0, 1.0)[0];
      CHECK(one.norm == Approx(static_cast<double>(count)).epsilon(1e-6));
      const Clipped max = clip_everywhere(strategy, world, ones, 0, kInfinity)[0];
      CHECK(max.norm == Approx(1.0).epsilon(1e-6));
    }
  }
}

TEST_CASE("clip: every norm agrees with one rank and has the same bits under every strategy",
          "[fsdp]") {
  for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
    FsdpRun run;
    run.norm_p = p;
    run.max_norm = p == kInfinity ? 0.02 : p == 1 ? 10 : 0.5;
    run.num_steps = 2;
    run.fsdp.strategy = Strategy::kNoShard;
    const FsdpResult one_rank = run_fsdp_on_threads(1, run);
    CHECK(one_rank.grad_norms[0] > run.max_norm);  // it does clip
    for (const int world : {2, 4}) {
      run.fsdp = {};
      run.fsdp.strategy = Strategy::kNoShard;
      const FsdpResult expected = run_fsdp_on_threads(world, run);
      check_near(expected, one_rank, 1e-5, fmt::format("p {} world {}", p, world));
      for (const Strategy strategy : kStrategies) {
        run.fsdp = {};
        run.fsdp.strategy = strategy;
        if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = world == 4 ? 2 : world;
        check_same(run_fsdp_on_threads(world, run), expected,
                   fmt::format("p {} {} world {}", p, name_of(strategy), world));
      }
    }
  }
}

TEST_CASE("clip: the norm of each p is that of the definition", "[fsdp]") {
  const std::vector<std::vector<double>> gradients = {{1, -2, 3}, {-4}, {0.5, 0}};
  for (const auto& [p, expected] : std::vector<std::pair<double, double>>{
           {1.0, 10.5}, {2.0, std::sqrt(30.25)}, {3.0, std::cbrt(100.125)}, {kInfinity, 4.0}}) {
    for (const Strategy strategy : kStrategies) {
      INFO("p " << p << " " << name_of(strategy));
      CHECK(clip_everywhere(strategy, 2, gradients, 0, p)[1].norm ==
            Approx(expected).epsilon(1e-6));
    }
  }
}

TEST_CASE("clip: gradients on the cpu are clipped there by scalars that nothing waits for",
          "[fsdp]") {
  dist::run_ranks(2, [](dist::World& world) {
    Weights net({3, 1});
    const auto fsdp = dist::fully_shard(net, world, options_of(Strategy::kFullShard, 2));
    fsdp->initialize(1);
    backward(nn::call(net, std::vector<Tensor>{from_values({6.0, 0.0, 0.0}, {3}, kF32),
                                               from_values({8.0}, {1}, kF32)}),
             full({}, 0.5));
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
    // The same from what each rank can see as a whole.
    double squares = 0;
    fsdp->for_each_full(dist::Fsdp::State::kGradient, [&](const std::string&, const Tensor& g) {
      for (const double x : g.to_vector()) squares += x * x;
    });
    fsdp->end_step();
    if (world.rank() != 0) return;  // one thread at a time checks
    for (const Tensor* scalar : {&clip.norm, &clip.factor, &clip.found_inf}) {
      CHECK(scalar->device().type == DeviceType::kCpu);
      CHECK(scalar->numel() == 1);
    }
    CHECK(clip.norm.item() == 10);
    CHECK(clip.norm.item() == std::sqrt(squares));
  });
}

TEST_CASE("clip: a loss scale changes no bit of norm or gradients or parameters", "[fsdp]") {
  for (const int world : {1, 2}) {
    FsdpRun run;
    run.max_norm = 0.5;
    const FsdpResult expected = run_fsdp_on_threads(world, run);
    run.loss_scale = dist::LossScaleOptions{.init = 4096};
    const FsdpResult scaled = run_fsdp_on_threads(world, run);
    check_same(scaled, expected, fmt::format("world {}", world));
    CHECK(scaled.loss_scales == std::vector<double>(3, 4096));
    run.loss_scale.reset();
    run.fsdp.precision.pre_divide = 8;
    check_same(run_fsdp_on_threads(world, run), expected, fmt::format("world {} divided", world));
  }
}

}  // namespace
}  // namespace tessera
