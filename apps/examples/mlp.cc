// An MLP of three linear layers, sharded by size: a layer with at least a tenth of the parameters is
// gathered by itself, the others together. It learns what a fixed MLP of random weights says.
//
//   mpirun --bind-to none -n 4 mlp                                  10000-5000-2000-1000, 62 M parameters
//   mpirun --bind-to none -n 2 mlp --widths=100,50,20,10 --steps=50

#include <fmt/format.h>
#include <tessera/core/autograd.h>
#include <tessera/core/runtime/context.h>
#include <tessera/dist/fsdp/fully_shard.h>
#include <tessera/kernels/elementwise/elementwise.h>
#include <tessera/kernels/loss/loss.h>
#include <tessera/kernels/pointwise/pointwise.h>
#include <tessera/nn/linear.h>
#include <tessera/optim/adamw.h>

#include "flags.h"

using namespace tessera;

struct Mlp : nn::Module {
  nn::Child<nn::Linear> in, hidden, out;

  explicit Mlp(const std::vector<int64_t>& widths)
      : in(this, "in", widths[0], widths[1]),
        hidden(this, "hidden", widths[1], widths[2]),
        out(this, "out", widths[2], widths[3]) {}
  Tensor forward(const Tensor& x) { return out(relu(hidden(relu(in(x))))); }
};

int train(dist::World& world, const Flags& flags) {
  const std::vector<int64_t> widths = flags.numbers("widths", {10000, 5000, 2000, 1000});
  const int64_t num_steps = flags.number("steps", 100), batch = flags.number("batch", 32);
  ContextOptions context{.device = world.device("auto"), .num_threads = world.num_threads()};
  Context::set_process_context(std::make_shared<Context>(context));

  Mlp teacher(widths);
  teacher.initialize(/*seed=*/7);
  std::unique_ptr<Mlp> model;
  {
    const nn::DeferredInit deferred;  // shapes, no bytes: no rank ever holds the whole model
    model = std::make_unique<Mlp>(widths);
  }
  dist::FsdpOptions options;
  options.wrap = dist::wrap::min_num_params(model->num_parameters() / 10);
  const auto fsdp = dist::fully_shard(*model, world, options);
  fsdp->initialize(/*seed=*/1);
  optim::AdamW adamw(fsdp->shards(), {.weight_decay = 0});
  if (world.rank() == 0) fmt::print("{}\n", fsdp->summary());

  double first = 0, last = 0;
  for (int64_t step = 0; step < num_steps; ++step) {
    // Each rank draws samples of its own: by the step and its place in it.
    const uint64_t seed = static_cast<uint64_t>(step * world.world_size() + world.rank() + 1);
    const Tensor x = empty({batch, widths[0]});
    nn::fill_init(x, nn::Init::normal(0, 1), seed, "inputs");
    Tensor target;
    {
      const NoGrad no_grad;
      target = nn::call(teacher, x);
    }
    // Gradients are summed over ranks: the mean over all of them is the sum of their means / ranks.
    const Tensor loss = mse_loss(nn::call(*model, x), target) / world.world_size();
    backward(loss);
    const Tensor total = fsdp->sum_micro_batches(std::vector{loss.detach().view({1})});
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
    adamw.step(1e-3f, clip.factor, clip.found_inf);
    fsdp->end_step();
    if (step % 10 != 0 && step + 1 != num_steps) continue;  // reading a number waits for the device
    last = total.item();
    if (step == 0) first = last;
    if (world.rank() == 0) fmt::print("step {} loss {:.6f}\n", step + 1, last);
  }
  return last < first ? 0 : 1;
}

int main(int argc, char** argv) {
  const Flags flags(argc, argv, {"widths", "steps", "batch"});
  return dist::run_main(argc, argv, [&](dist::World& world) { return train(world, flags); });
}
