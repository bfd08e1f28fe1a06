// tessera-bench-host: what the host does in a step where the device has next to nothing to do: 96
// units of one element each. Host time until everything is submitted, by unit and phase (forward,
// backward, the end of the step), without waiting for the device, and allocations of device memory.

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "apps/bench/bench.h"
#include "apps/command_line.h"
#include "apps/program.h"
#include "core/autograd.h"
#include "core/profiler.h"
#include "dist/comm/local.h"
#include "dist/fsdp/fully_shard.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "nn/module.h"
#include "optim/adamw.h"

namespace tessera::apps {
namespace {

constexpr int kUnits = 96;

/// y = w x with a single w.
class Single : public nn::Module {
 public:
  Single() : weight_(register_parameter("weight", {1}, nn::Init::ones())) {}
  Tensor forward(const Tensor& x) { return mul(x, weight_); }

 private:
  Tensor& weight_;
};

class Chain : public nn::Module {
 public:
  Chain() : blocks_(this, "blocks") {
    for (int i = 0; i < kUnits; ++i) blocks_.emplace_back();
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (int64_t i = 0; i < blocks_.num_children(); ++i) y = blocks_[i](y);
    return sum(y);
  }

 private:
  nn::ChildList<Single> blocks_;
};

struct Result {
  double forward_us = 0, backward_us = 0, end_us = 0;  // a unit
  double plain_us = 0;                                 // a unit's forward and backward, unsharded
  int64_t device_allocations = 0;                      // bytes of the device, after the first steps
};

double us_since(int64_t begin) {
  return static_cast<double>(profiler::now_ns() - begin) * 1e-3 / kUnits;
}

double median(std::vector<double> values) {
  return summarize(std::move(values)).median_ms;  // of any unit
}

/// The same chain without FSDP: what tensors and autograd cost by themselves.
double plain_us(int steps) {
  Chain chain;
  chain.initialize(1);
  const Tensor x = full({1}, 1.0);
  std::vector<double> times;
  for (int i = 0; i < steps; ++i) {
    const int64_t begin = profiler::now_ns();
    backward(nn::call(chain, x));
    times.push_back(us_since(begin));
    current_stream().synchronize();
  }
  return median(times);
}

Result measure(dist::World& world, int steps) {
  Result result;
  result.plain_us = plain_us(steps);
  std::unique_ptr<Chain> chain;
  {
    const nn::DeferredInit deferred;
    chain = std::make_unique<Chain>();
  }
  const std::unique_ptr<dist::Fsdp> fsdp = dist::fully_shard(*chain, world);
  fsdp->initialize(1);
  optim::AdamW adamw(fsdp->shards(), optim::AdamWOptions{});
  const Tensor x = full({1}, 1.0);
  std::vector<double> forward, backward_times, end;
  int64_t reserved = 0;
  const int64_t start = profiler::now_ns();
  for (int i = -3; i < steps; ++i) {
    world.control().barrier();
    int64_t begin = profiler::now_ns();
    if (i == 0 && world.rank() == 0) {
      say_estimate(static_cast<double>(begin - start) * 1e-9 / 3 * steps);
    }
    const Tensor loss = nn::call(*chain, x);
    const double forward_us = us_since(begin);
    begin = profiler::now_ns();
    backward(loss);
    const double backward_us = us_since(begin);
    begin = profiler::now_ns();
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
    adamw.step(1e-3f, clip.factor, clip.found_inf);
    fsdp->end_step();
    const double end_us = us_since(begin);
    current_stream().synchronize();
    const int64_t now = Context::current()->allocator()->stats().reserved;
    if (i >= 0) {
      forward.push_back(forward_us);
      backward_times.push_back(backward_us);
      end.push_back(end_us);
      result.device_allocations += now - reserved;
    }
    reserved = now;
  }
  result.forward_us = median(forward);
  result.backward_us = median(backward_times);
  result.end_us = median(end);
  return result;
}

int run(int argc, char** argv) {
  CommandLine app(
      "Host time of the sharding manager. Exit status 1 if device memory was allocated.",
      "tessera-bench-host");
  int ranks = 1, steps = 50;
  bool as_json = false;
  app.add_option("--ranks", ranks, "thread ranks")->check(in_range(1, std::optional(64)));
  app.add_option("--steps", steps, "steps that are timed")
      ->check(in_range(1, std::optional(100000)));
  app.add_flag("--json", as_json, "one JSON object instead of text");
  if (const auto status = app.read(argc, argv)) return *status;
  dist::LocalOptions local;
  local.context.poison = local.context.order_check = false;
  Result r;
  dist::run_ranks(ranks, local, [&](dist::World& world) {
    const Result mine = measure(world, steps);
    if (world.rank() == 0) r = mine;
  });
  if (as_json) {
    fmt::print("{}\n", nlohmann::json{{"bench", "host"},
                                      {"units", kUnits},
                                      {"ranks", ranks},
                                      {"forward_us", r.forward_us},
                                      {"backward_us", r.backward_us},
                                      {"end_us", r.end_us},
                                      {"plain_us", r.plain_us},
                                      {"device_allocated_bytes", r.device_allocations}}
                           .dump());
  } else {
    fmt::print(
        "{} units of one element, {} ranks: host time a unit\n"
        "  forward {:.1f} us  backward {:.1f} us  end of the step {:.1f} us\n"
        "  the same operations without sharding: {:.1f} us forward and backward\n"
        "  device memory allocated in {} steps: {} bytes\n",
        kUnits, ranks, r.forward_us, r.backward_us, r.end_us, r.plain_us, steps,
        r.device_allocations);
  }
  return r.device_allocations == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::apps

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] { return tessera::apps::run(argc, argv); });
}
