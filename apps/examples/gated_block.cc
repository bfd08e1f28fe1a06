// Blocks of one's own, and which of them are units is one's own rule: those from `--unit_width` on are
// gathered by themselves, narrow ones together with the rest of the model. Learns a smooth function of
// 16 numbers.
//
//   mpirun --bind-to none -n 2 gated_block --steps=100

#include <fmt/format.h>
#include <tessera/core/autograd.h>
#include <tessera/core/runtime/context.h>
#include <tessera/dist/fsdp/fully_shard.h>
#include <tessera/dist/fsdp/shard_view.h>
#include <tessera/kernels/loss/loss.h>
#include <tessera/kernels/pointwise/pointwise.h>
#include <tessera/kernels/reduce/reduce.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>
#include <tessera/optim/adamw.h>

#include "flags.h"

using namespace tessera;

/// y = x + sigmoid(gate(n)) * down(tanh(up(n))) with n = norm(x).
class GatedBlock : public nn::Module {
 public:
  GatedBlock(int64_t width, int64_t inner)
      : norm_(this, "norm", width),
        gate_(this, "gate", width, width),
        up_(this, "up", width, inner),
        down_(this, "down", inner, width),
        inner_(inner) {}

  Tensor forward(const Tensor& x) {
    const Tensor n = norm_(x);
    return x + sigmoid(gate_(n)) * down_(tanh(up_(n)));
  }
  int64_t inner_width() const { return inner_; }
  std::string kind() const override { return fmt::format("GatedBlock({})", inner_); }

 private:
  nn::Child<nn::RmsNorm> norm_;
  nn::Child<nn::Linear> gate_, up_, down_;
  int64_t inner_;
};

struct Net : nn::Module {
  nn::Child<nn::Linear> in{this, "in", 16, 32};
  nn::ChildList<GatedBlock> blocks{this, "blocks"};
  nn::Child<nn::Linear> out{this, "out", 32, 1};
  Net() {
    for (const int64_t inner : {16, 128, 16, 256}) blocks.emplace_back(32, inner);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = in(x);
    for (auto& block : blocks) h = block(h);
    return out(h);
  }
};

int train(dist::World& world, const Flags& flags) {
  const int64_t num_steps = flags.number("steps", 100), unit_width = flags.number("unit_width", 64);
  ContextOptions context{.device = world.device("auto"), .num_threads = world.num_threads()};
  Context::set_process_context(std::make_shared<Context>(context));

  std::unique_ptr<Net> net;
  {
    const nn::DeferredInit deferred;
    net = std::make_unique<Net>();
  }
  dist::FsdpOptions options;
  options.wrap = dist::wrap::by_predicate([&](const std::string&, nn::Module& module) {
    const auto* const block = dynamic_cast<GatedBlock*>(&module);
    return block != nullptr && block->inner_width() >= unit_width;
  });
  options.average_gradients = true;  // as PyTorch has it: each rank's loss is a mean
  const auto fsdp = dist::fully_shard(*net, world, options);
  fsdp->initialize(/*seed=*/1);
  optim::AdamW adamw(fsdp->shards(), {.weight_decay = 0});
  if (world.rank() == 0) {
    const dist::ShardView view(*fsdp);
    fmt::print("{}{}\n", nn::print_tree(*net, [&](const nn::Module& m) { return view.unit_of(m); }),
               fsdp->summary());
  }

  double first = 0, last = 0;
  for (int64_t step = 0; step < num_steps; ++step) {
    const uint64_t seed = static_cast<uint64_t>(step * world.world_size() + world.rank() + 1);
    const Tensor x = empty({64, 16});
    nn::fill_init(x, nn::Init::normal(0, 1), seed, "inputs");
    const Tensor target = tanh(sum(x, 1, /*keep_dim=*/true));
    const Tensor loss = mse_loss(nn::call(*net, x), target);
    backward(loss);
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
    adamw.step(3e-3f, clip.factor, clip.found_inf);
    fsdp->end_step();
    if (step % 20 != 0 && step + 1 != num_steps) continue;
    const Tensor total = fsdp->sum_micro_batches(std::vector{loss.detach().view({1})});
    last = total.item() / world.world_size();
    if (step == 0) first = last;
    if (world.rank() == 0) fmt::print("step {} loss {:.5f}\n", step + 1, last);
  }
  return last < 0.5 * first ? 0 : 1;
}

int main(int argc, char** argv) {
  const Flags flags(argc, argv, {"steps", "unit_width"});
  return dist::run_main(argc, argv, [&](dist::World& world) { return train(world, flags); });
}
