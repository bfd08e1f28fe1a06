// A loop of one's own with checkpoints: written beside the training, on any number of ranks, and resumed
// on any other; with the same number the bits are those of a run that did not stop.
//
//   mpirun --bind-to none -n 2 own_loop --dir=out/loop --steps=40 --every=10
//   mpirun --bind-to none -n 2 own_loop --dir=out/loop --steps=80 --every=10      goes on from step 40

#include <fmt/format.h>
#include <tessera/core/autograd.h>
#include <tessera/core/runtime/context.h>
#include <tessera/dist/checkpoint/choose.h>
#include <tessera/dist/checkpoint/state.h>
#include <tessera/dist/checkpoint/writer.h>
#include <tessera/dist/comm/control.h>
#include <tessera/dist/fsdp/fully_shard.h>
#include <tessera/nn/llama/llama.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/schedule.h>

#include <filesystem>

#include "flags.h"

using namespace tessera;

/// Row r of the data: numbers that count up by r mod 7 + 1, of 64.
std::vector<int32_t> row(int64_t r, int64_t length) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < length; ++t)
    ids.push_back(static_cast<int32_t>((r + t * (r % 7 + 1)) % 64));
  return ids;
}

int train(dist::World& world, const Flags& flags) {
  const std::string dir = flags.text("dir", "out/loop");
  const int64_t num_steps = flags.number("steps", 40), every = flags.number("every", 10);
  constexpr int64_t kRows = 8, kContext = 16;
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
  }
  const auto fsdp = dist::fully_shard(*model, world);
  fsdp->initialize(/*seed=*/1);
  optim::AdamW adamw(fsdp->shards());
  const optim::Schedule schedule({.kind = optim::ScheduleKind::kConstant, .peak_lr = 3e-3});

  // What is saved, and what of it there is already.
  const dist::TrainingState state{.model = model.get(), .fsdp = fsdp.get(), .optimizer = &adamw};
  dist::Progress progress;
  progress.seed = 1, progress.data_id = "counting";
  world.control().verdict([&] { std::filesystem::create_directories(dir); });
  if (const auto chosen = dist::choose_checkpoint(world, dir, "own_loop");
      chosen.reader != nullptr) {
    world.control().verdict([&] {
      dist::check_tensors(*chosen.reader, state);
      dist::load_state(*chosen.reader, state);
    });
    progress = chosen.reader->manifest().progress;
    if (world.rank() == 0) fmt::print("on from step {}\n", progress.step);
  }
  dist::CheckpointWriter writer(world, state, {.dir = dir, .run = "own_loop"});
  const auto report = [&](const std::optional<dist::SaveResult>& saved) {
    if (!saved || world.rank() != 0) return;
    fmt::print("checkpoint of step {}: {}\n", saved->step,
               saved->error.empty() ? "complete" : saved->error);
  };

  while (progress.step < num_steps) {
    std::vector<int32_t> inputs, targets;
    for (int64_t r = 0; r < kRows; ++r) {
      // The same rows in the same step on any number of ranks that divides kRows.
      if (r % world.world_size() != world.rank()) continue;
      const std::vector<int32_t> ids = row(progress.next_sample + r, kContext + 1);
      inputs.insert(inputs.end(), ids.begin(), ids.end() - 1);
      targets.insert(targets.end(), ids.begin() + 1, ids.end());
    }
    const Shape shape{std::ssize(inputs) / kContext, kContext};
    const LossSum loss = model->loss(from_values(std::span<const int32_t>(inputs), shape),
                                     from_values(std::span<const int32_t>(targets), shape));
    backward(loss.sum, full({}, 1.0 / (kRows * kContext)));  // the mean over all ranks
    const Tensor total = fsdp->sum_micro_batches(std::vector{loss.sum.detach().view({1})});
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
    progress.lr = schedule.lr(progress.step);
    adamw.step(static_cast<float>(progress.lr), clip.factor, clip.found_inf);
    fsdp->end_step();
    ++progress.step;
    progress.next_sample += kRows;
    report(writer.poll());  // of a save that goes on beside the steps
    if (progress.step % every == 0 || progress.step == num_steps) {
      report(writer.begin(progress));
      const double mean = total.item() / (kRows * kContext);
      if (world.rank() == 0) fmt::print("step {} loss {}\n", progress.step, mean);
    }
  }
  report(writer.finish());
  return 0;
}

int main(int argc, char** argv) {
  const Flags flags(argc, argv, {"dir", "steps", "every"});
  return dist::run_main(argc, argv, [&](dist::World& world) { return train(world, flags); });
}
