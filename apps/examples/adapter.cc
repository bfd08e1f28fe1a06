// Adapters on some children of nn::Llama: low-rank ones beside the second projection of each MLP and
// beside the queries of attention; all else is frozen, and neither gathered in f32 nor optimized.
//
//   mpirun --bind-to none -n 2 adapter --steps=40

#include <fmt/format.h>
#include <tessera/core/autograd.h>
#include <tessera/core/runtime/context.h>
#include <tessera/dist/fsdp/fully_shard.h>
#include <tessera/nn/llama/llama.h>
#include <tessera/nn/lora.h>
#include <tessera/optim/adamw.h>

#include <map>

#include "flags.h"

using namespace tessera;

int train(dist::World& world, const Flags& flags) {
  const int64_t num_steps = flags.number("steps", 40);
  constexpr int64_t kRows = 4, kContext = 16;
  ContextOptions context{.device = world.device("auto"), .num_threads = world.num_threads()};
  Context::set_process_context(std::make_shared<Context>(context));

  std::unique_ptr<nn::Llama> model;
  {
    const nn::DeferredInit deferred;
    model = std::make_unique<nn::Llama>(nn::LlamaConfig{.vocab_size = 64,
                                                        .context_length = kContext,
                                                        .num_layers = 2,
                                                        .num_heads = 2,
                                                        .width = 32});
    nn::add_lora(*model, {.targets = "mlp.down,q_proj", .rank = 4, .alpha = 8});
  }
  int64_t num_trained = 0;
  for (const nn::NamedParameter& p : model->named_parameters()) {
    if (p.parameter->tensor.requires_grad()) num_trained += p.parameter->tensor.numel();
  }
  const auto fsdp = dist::fully_shard(*model, world);
  fsdp->initialize(/*seed=*/1);  // a real one: dist::load_parameters (checkpoint/state.h)
  optim::AdamW adamw(fsdp->shards(), {.weight_decay = 0});
  if (world.rank() == 0) {
    fmt::print("{} of {} parameters are trained\n", num_trained, model->num_parameters());
  }

  const auto values = [&] {
    std::map<std::string, std::vector<double>> all;
    fsdp->for_each_full(
        dist::Fsdp::State::kMaster,
        [&](const std::string& name, const Tensor& full) { all[name] = full.to_vector(); });
    return all;
  };
  const auto before = values();
  double first = 0, last = 0;
  for (int64_t step = 0; step < num_steps; ++step) {
    std::vector<int32_t> inputs, targets;
    for (int64_t r = 0; r < kRows; ++r) {  // 3, 6, 9, ... from another number in each row
      const int64_t begin = (step * world.world_size() + world.rank()) * kRows + r;
      for (int64_t t = 0; t < kContext; ++t) {
        inputs.push_back(static_cast<int32_t>((begin + 3 * t) % 64));
        targets.push_back(static_cast<int32_t>((begin + 3 * t + 3) % 64));
      }
    }
    const LossSum loss =
        model->loss(from_values(std::span<const int32_t>(inputs), {kRows, kContext}),
                    from_values(std::span<const int32_t>(targets), {kRows, kContext}));
    const double num_targets = static_cast<double>(kRows * kContext * world.world_size());
    backward(loss.sum, full({}, 1 / num_targets));
    const Tensor total = fsdp->sum_micro_batches(std::vector{loss.sum.detach().view({1})});
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
    adamw.step(1e-2f, clip.factor, clip.found_inf);
    fsdp->end_step();
    last = total.item() / num_targets;
    if (step == 0) first = last;
  }
  int changed = 0, changed_base = 0;
  for (const auto& [name, now] : values()) {
    const bool is_changed = now != before.at(name);
    (name.find(".lora.") != std::string::npos ? changed : changed_base) += is_changed ? 1 : 0;
  }
  if (world.rank() == 0) {
    fmt::print("loss {:.4f} -> {:.4f}; {} tensors of adapters changed, {} of the model\n", first,
               last, changed, changed_base);
  }
  return last < first && changed > 0 && changed_base == 0 ? 0 : 1;
}

int main(int argc, char** argv) {
  const Flags flags(argc, argv, {"steps"});
  return dist::run_main(argc, argv, [&](dist::World& world) { return train(world, flags); });
}
