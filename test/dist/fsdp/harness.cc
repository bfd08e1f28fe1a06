#include "test/dist/fsdp/harness.h"

#include <mutex>

#include "core/autograd.h"
#include "core/random.h"
#include "dist/comm/local.h"
#include "dist/fsdp/shard_view.h"
#include "optim/adamw.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

constexpr int64_t kTime = 16;
constexpr int32_t kIgnored = -100;

/// Sample `index` of step `step`: inputs and targets.
struct Sample {
  std::vector<int32_t> ids, targets;
};

Sample make_sample(int step, int index, int64_t vocab_size, bool ragged) {
  Sample s;
  const PhiloxKey key = make_key(17, static_cast<uint64_t>(step));
  for (int64_t t = 0; t <= kTime; ++t) {
    const auto bits = philox(key, static_cast<uint64_t>(index), static_cast<uint64_t>(t))[0];
    const auto id = static_cast<int32_t>(bits % static_cast<uint64_t>(vocab_size));
    if (t < kTime) s.ids.push_back(id);
    if (t > 0) s.targets.push_back(id);
  }
  // Sample 1 has no valid target at all, others lose between none and half of theirs.
  const int64_t num_valid = !ragged ? kTime : index == 1 ? 0 : kTime - (index * 3) % (kTime / 2);
  for (int64_t t = num_valid; t < kTime; ++t) s.targets[static_cast<size_t>(t)] = kIgnored;
  return s;
}

}  // namespace

nn::LlamaConfig FsdpRun::tiny_llama() {
  nn::LlamaConfig c;
  c.vocab_size = 67;
  c.context_length = kTime;
  c.num_layers = 3;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.width = 24;
  c.ffn_width = 40;
  c.init_stddev = 0.15;
  return c;
}

FsdpResult run_fsdp(dist::World& world, const FsdpRun& run) {
  FsdpResult result;
  std::unique_ptr<nn::LanguageModel> model;
  {
    nn::DeferredInit deferred;
    if (run.make_model) {
      model = run.make_model();
    } else {
      model = std::make_unique<nn::Llama>(run.model);
    }
  }
  if (run.prepare) run.prepare(*model);
  model->set_recompute(run.recompute);
  auto fsdp = dist::fully_shard(*model, world, run.fsdp);
  fsdp->initialize(5);
  result.summary = fsdp->summary();
  const std::unique_ptr<optim::Optimizer> optimizer =
      run.make_optimizer
          ? run.make_optimizer(fsdp->shards())
          : std::make_unique<optim::AdamW>(fsdp->shards(),
                                           optim::AdamWOptions{.rounding_seed = run.rounding_seed});
  dist::LossScaler scaler(
      run.loss_scale.value_or(dist::LossScaleOptions{.scaling = dist::LossScaling::kNone}));
  if (run.on_ready) run.on_ready(*fsdp, world);
  const dist::TrainingState state{model.get(), fsdp.get(), optimizer.get(),
                                  run.loss_scale ? &scaler : nullptr};
  if (run.on_state) run.on_state(state, world);

  const int num_ranks = world.world_size();
  const int per_micro_batch = run.samples_per_step / num_ranks / run.num_micro_batches;
  REQUIRE(per_micro_batch * num_ranks * run.num_micro_batches == run.samples_per_step);
  for (int step = run.first_step; step < run.num_steps; ++step) {
    int64_t num_valid = 0;
    for (int i = 0; i < run.samples_per_step; ++i) {
      for (const int32_t t : make_sample(step, i, run.model.vocab_size, run.ragged).targets) {
        num_valid += t != kIgnored;
      }
    }
    const Tensor scale = scaler.grad_scale(1.0 / static_cast<double>(num_valid));
    if (run.loss_scale) result.loss_scales.push_back(scaler.scale().item());
    std::vector<Tensor> losses;
    for (int a = 0; a < run.num_micro_batches; ++a) {
      std::vector<int32_t> ids, targets;
      const int first = (a * num_ranks + world.rank()) * per_micro_batch;
      for (int i = 0; i < per_micro_batch; ++i) {
        const Sample s = make_sample(step, first + i, run.model.vocab_size, run.ragged);
        ids.insert(ids.end(), s.ids.begin(), s.ids.end());
        targets.insert(targets.end(), s.targets.begin(), s.targets.end());
      }
      const Tensor ids_BT = from_values(ids, {per_micro_batch, kTime});
      const Tensor targets_BT = from_values(targets, {per_micro_batch, kTime});
      random_state() = {
          .seed = 3, .step = static_cast<uint64_t>(step), .op_index = 0, .sample_offset = first};
      if (run.with_eval && a > 0) {
        NoGrad no_grad;
        model->loss(ids_BT, targets_BT);
        random_state().op_index = 0;
      }
      fsdp->begin_micro_batch(a, run.num_micro_batches);
      const std::shared_ptr<void> scope = run.scope ? run.scope(a, *fsdp, *model) : nullptr;
      LossSum loss = model->loss(ids_BT, targets_BT, {}, {.grad_scale = scale});
      losses.push_back(loss.sum.detach());
      backward(loss.sum, scale);
      if (run.twice) {
        backward(model->loss(ids_BT, targets_BT, {}, {.grad_scale = scale}).sum, scale);
      }
    }
    const Tensor loss_sum = fsdp->sum_micro_batches(losses);
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(run.max_norm, run.norm_p, scaler.scale());
    if (step == 0) {
      const double held = scaler.scale().item() / *fsdp->options().precision.pre_divide;
      fsdp->for_each_full(dist::Fsdp::State::kGradient,
                          [&](const std::string& name, const Tensor& full) {
                            result.gradients[name] = full.to_vector();
                            for (double& g : result.gradients[name]) g /= held;
                          });
    }
    optimizer->step(run.lr, clip.factor, clip.found_inf);
    scaler.update(clip.found_inf);
    if (step == 1) result.program = dist::ShardView(*fsdp).program();
    if (run.on_step) run.on_step(step, *fsdp, world);
    fsdp->end_step();
    if (run.after_step) run.after_step(step, state, world);
    result.losses.push_back(loss_sum.item() / static_cast<double>(num_valid));
    result.grad_norms.push_back(clip.norm.item());
  }
  fsdp->for_each_full(dist::Fsdp::State::kMaster, [&](const std::string& name, const Tensor& full) {
    result.parameters[name] = full.to_vector();
  });
  return result;
}

FsdpResult run_fsdp_on_threads(int world_size, const FsdpRun& run) {
  std::vector<FsdpResult> results(static_cast<size_t>(world_size));
  dist::run_ranks(world_size, run.local, [&](dist::World& world) {
    results[static_cast<size_t>(world.rank())] = run_fsdp(world, run);
  });
  for (size_t r = 1; r < results.size(); ++r) {
    check_same(results[r], results[0], "rank " + std::to_string(r));
  }
  return results[0];
}

void check_same(const FsdpResult& actual, const FsdpResult& expected, const std::string& what) {
  INFO(what);
  CHECK(actual.losses == expected.losses);
  CHECK(actual.grad_norms == expected.grad_norms);
  CHECK(actual.gradients == expected.gradients);
  CHECK(actual.parameters == expected.parameters);
}

void check_near(const FsdpResult& actual, const FsdpResult& expected, double tolerance,
                const std::string& what) {
  INFO(what);
  REQUIRE(actual.losses.size() == expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    INFO("step " << i);
    CHECK(std::fabs(actual.losses[i] - expected.losses[i]) <= tolerance * expected.losses[i]);
    CHECK(std::fabs(actual.grad_norms[i] - expected.grad_norms[i]) <=
          tolerance * expected.grad_norms[i]);
  }
  for (const auto& [name, values] : expected.gradients) {
    REQUIRE(actual.gradients.count(name) == 1);
    double largest = 0, error = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      largest = std::max(largest, std::fabs(values[i]));
      error = std::max(error, std::fabs(values[i] - actual.gradients.at(name)[i]));
    }
    INFO(name << ": largest " << largest << ", error " << error);
    CHECK(error <= tolerance * largest);
  }
}

}  // namespace tessera::testing
