// Training curves of PyTorch's FSDP2 (test/golden/make_fsdp2.py) on the same numbers of ranks.

#include "core/autograd.h"
#include "dist/comm/local.h"
#include "dist/fsdp/fully_shard.h"
#include "optim/adamw.h"
#include "test/golden/golden.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

/// Relative, of losses and gradient norms. In bf16 another order of the same sums moves them by
/// 5e-4 and 5e-3; halving one parameter's gradient moves the norm by 2.8e-2.
struct Tolerance {
  double loss, grad_norm;
};
constexpr Tolerance kToleranceF32{5e-6, 5e-6}, kToleranceBF16{1e-3, 1.5e-2};

struct Curve {
  std::vector<double> loss, grad_norm;
};

Curve train(dist::World& world, const Golden& golden, const Fsdp2Run& run,
            dist::Strategy strategy) {
  const std::unique_ptr<nn::LanguageModel> model = golden.make_model();
  golden.load_initial(*model);
  dist::FsdpOptions fsdp_options;
  fsdp_options.strategy = strategy;
  fsdp_options.precision.param_dtype = run.param_dtype;
  fsdp_options.precision.reduce_dtype = kF32;
  auto fsdp = dist::fully_shard(*model, world, fsdp_options);
  optim::AdamW adamw(fsdp->shards(), golden.adamw_options());
  const int64_t rows = golden.batch / world.world_size() / run.grad_accum_steps;
  Curve curve;
  for (size_t i = 0; i < run.loss.size(); ++i) {
    const auto step = static_cast<int64_t>(i);
    const auto num_valid = static_cast<double>(golden.num_valid(step));
    const Tensor scale = full({}, 1 / num_valid);
    Tensor loss_sum = zeros({});
    for (int pass = 0; pass < run.grad_accum_steps; ++pass) {
      const int64_t first = (pass * world.world_size() + world.rank()) * rows;
      fsdp->begin_micro_batch(pass, run.grad_accum_steps);
      const LossSum loss =
          model->loss(golden.ids_BT(step, first, rows), golden.targets_BT(step, first, rows), {},
                      {.grad_scale = scale});
      backward(loss.sum, scale);
      loss_sum.add_(loss.sum.detach());
    }
    fsdp->all_reduce_scalars(loss_sum);
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(golden.clip);
    adamw.step(static_cast<float>(golden.lr[i]), clip.factor, clip.found_inf);
    fsdp->end_step();
    curve.loss.push_back(loss_sum.item() / num_valid);
    curve.grad_norm.push_back(clip.norm.item());
  }
  return curve;
}

TEST_CASE("fsdp2: PyTorch's curves on 2 and 4 ranks, f32 and bf16, with accumulation",
          "[golden][fsdp]") {
  const Golden golden = load_golden("llama");
  const std::vector<Fsdp2Run> runs = load_fsdp2_runs();
  REQUIRE(runs.size() == 8);
  for (const Fsdp2Run& run : runs) {
    REQUIRE(run.loss.size() == 20);
    const Tolerance tolerance = run.param_dtype == kF32 ? kToleranceF32 : kToleranceBF16;
    for (const dist::Strategy strategy :
         {dist::Strategy::kFullShard, dist::Strategy::kShardGradOp}) {
      std::vector<Curve> curves(static_cast<size_t>(run.world_size));
      dist::run_ranks(run.world_size, [&](dist::World& world) {
        curves[static_cast<size_t>(world.rank())] = train(world, golden, run, strategy);
      });
      double loss_error = 0, norm_error = 0;
      for (size_t i = 0; i < run.loss.size(); ++i) {
        loss_error = std::max(loss_error, std::fabs(curves[0].loss[i] / run.loss[i] - 1));
        norm_error = std::max(norm_error, std::fabs(curves[0].grad_norm[i] / run.grad_norm[i] - 1));
      }
      INFO(run.world_size << " ranks, " << std::string(name_of(run.param_dtype)) << ", "
                          << run.grad_accum_steps << " passes, " << std::string(name_of(strategy))
                          << ": loss " << loss_error << ", gradient norm " << norm_error);
      CHECK(loss_error <= tolerance.loss);
      CHECK(norm_error <= tolerance.grad_norm);
    }
  }
}

}  // namespace
}  // namespace tessera::testing
