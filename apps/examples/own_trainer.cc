// All parts of a training are the program's own: the model, the data, the loss, the optimizer and a
// callback. The trainer does the rest: ranks, sharding, steps, checkpoints, resume, metrics, signals.
//
//   mpirun --bind-to none -n 2 own_trainer --train.steps=200 --train.eval_every=50 --output.dir=out/spirals
//   mpirun --bind-to none -n 2 own_trainer ... --resume=auto     after Ctrl-C or a crash: the same bits

#include <fmt/format.h>
#include <tessera/apps/trainer.h>
#include <tessera/core/autograd.h>
#include <tessera/kernels/elementwise/elementwise.h>
#include <tessera/kernels/pointwise/pointwise.h>
#include <tessera/kernels/reduce/reduce.h>
#include <tessera/nn/linear.h>

#include <cmath>

using namespace tessera;

/// Points of the plane -> how much a point is of the second spiral.
struct Net : nn::Module {
  nn::Child<nn::Linear> in, hidden, out;
  explicit Net(int64_t width)
      : in(this, "in", 2, width),
        hidden(this, "hidden", width, width),
        out(this, "out", width, 1) {}
  Tensor forward(const Tensor& points) { return out(tanh(hidden(tanh(in(points))))); }
};

/// Points of two spirals and -1 or 1 for the one that each is on.
struct Points {
  std::vector<float> xy, side;
};

apps::Batch read_points(std::span<const int64_t> indices) {
  Points points;
  for (const int64_t i : indices) {
    const double turn = static_cast<double>(i / 2) / 100, angle = 6 * turn + (i % 2) * M_PI;
    points.xy.push_back(static_cast<float>((0.2 + turn) * std::cos(angle)));
    points.xy.push_back(static_cast<float>((0.2 + turn) * std::sin(angle)));
    points.side.push_back(i % 2 == 0 ? -1 : 1);
  }
  apps::Batch batch;
  batch.own = std::move(points);
  return batch;
}

/// The squared hinge loss of each point: max(0, 1 - y t)^2, added up.
LossSum hinge_loss(Net& net, const apps::Batch& batch) {
  const auto& points = std::any_cast<const Points&>(batch.own);
  const Tensor x = from_values(std::span<const float>(points.xy), {batch.B, 2});
  const Tensor target = from_values(std::span<const float>(points.side), {batch.B, 1});
  const Tensor miss = relu(1 - nn::call(net, x) * target);
  return {.sum = sum(miss * miss), .count = {}};
}

/// Descent by the sign of a moving average of gradients, softened: p -= lr m / (|m| + 1e-4).
class SoftSign final : public optim::Optimizer {
 public:
  explicit SoftSign(std::vector<optim::FlatShard> shards) : Optimizer(std::move(shards), 1e-3, 0) {}
  std::vector<optim::NamedState> state() const override { return {average_}; }  // in checkpoints

 private:
  void update_shard(const FlatUpdate& u, std::span<const Tensor> states) override {
    const Tensor grad = u.grad.to(kF32) * u.grad_scale;  // clipped
    const Tensor average = 0.9 * states[0] + 0.1 * grad;
    const Tensor next = u.master - static_cast<double>(u.lr) * average / (abs(average) + 1e-4);
    // A step that is skipped, since a number is not finite, changes nothing: the device knows.
    const auto set = [&](Tensor now, const Tensor& then) {
      now.copy_(u.skip.is_defined() ? where(u.skip, now, then) : then);
    };
    set(states[0], average), set(u.master, next);
    if (u.low.is_defined()) Tensor(u.low).copy_(u.master);
  }

  optim::NamedState average_ = make_state("average");
};

/// Ends the run when the validation is good enough.
class EndWhenGood : public apps::Callback {
 public:
  void on_step(const apps::StepMetrics& m) override {
    if (m.val_loss && *m.val_loss < 0.05) apps::Trainer::request_end();
  }
};

int main(int argc, char** argv) {
  return dist::run_main(argc, argv, [&](dist::World& world) {
    apps::Config defaults;
    defaults.train.steps = 200, defaults.train.micro_batch = 16;
    defaults.optim.schedule.peak_lr = 1e-2;
    apps::Trainer trainer(apps::own_config({argv + 1, argv + argc}, defaults), world);
    Net& net = trainer.make_model<Net>(/*width=*/64);
    trainer.set_wrap(dist::wrap::by_class<nn::Linear>());
    trainer.set_samples(std::make_unique<apps::OwnSamples>(400, read_points, /*shuffle_seed=*/1),
                        std::make_unique<apps::OwnSamples>(400, read_points), "spirals");
    trainer.set_loss([&](const apps::Batch& batch) { return hinge_loss(net, batch); });
    trainer.set_optimizer([](const std::vector<optim::FlatShard>& shards) {
      return std::make_unique<SoftSign>(shards);
    });
    trainer.add_callback(std::make_unique<EndWhenGood>());
    trainer.run();
    return 0;
  });
}
