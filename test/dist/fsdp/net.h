#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/autograd.h"
#include "core/recompute.h"
#include "dist/fsdp/shard_view.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "nn/linear.h"
#include "optim/adamw.h"
#include "test/dist/fsdp/harness.h"
#include "test/testing.h"

// Short trainings of models that a test makes up. The work of a step is a fixed number of parts;
// rank r of W runs the parts r, r + W, ..., one micro-batch each, so that one rank is the reference
// for any number of them.

namespace tessera::testing {

struct NetRun {
  dist::FsdpOptions fsdp;
  int num_steps = 3;
  int num_parts = 4;
  float lr = 1e-2f;
  float weight_decay = 0.01f;
  dist::LocalOptions local;
  /// Before and after a step's passes (the program and the gradients are there).
  std::function<void(int step, dist::Fsdp&, dist::World&)> on_step;
};

/// Forward and backward of one part with the loss as result: sums over parts are what is trained.
template <class Net>
using PartFn = std::function<Tensor(Net&, int step, int part)>;

template <class Net>
FsdpResult train_net(dist::World& world, const NetRun& run,
                     const std::function<std::unique_ptr<Net>()>& make, const PartFn<Net>& pass) {
  FsdpResult result;
  std::unique_ptr<Net> net;
  {
    nn::DeferredInit deferred;
    net = make();
  }
  auto fsdp = dist::fully_shard(*net, world, run.fsdp);
  fsdp->initialize(5);
  result.summary = fsdp->summary();
  optim::AdamWOptions options;
  options.weight_decay = run.weight_decay;
  optim::AdamW adamw(fsdp->shards(), options);
  const int num_passes = run.num_parts / world.world_size();
  REQUIRE(num_passes * world.world_size() == run.num_parts);
  for (int step = 0; step < run.num_steps; ++step) {
    Tensor loss_sum = zeros({}, kF32);
    for (int a = 0; a < num_passes; ++a) {
      fsdp->begin_micro_batch(a, num_passes);
      loss_sum.add_(pass(*net, step, a * world.world_size() + world.rank()).detach());
    }
    fsdp->all_reduce_scalars(loss_sum);
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
    if (step == 0) {
      fsdp->for_each_full(dist::Fsdp::State::kGradient,
                          [&](const std::string& name, const Tensor& full) {
                            result.gradients[name] = full.to_vector();
                          });
    }
    adamw.step(run.lr, clip.factor, clip.found_inf);
    if (step == 1) result.program = dist::ShardView(*fsdp).program();
    if (run.on_step) run.on_step(step, *fsdp, world);
    fsdp->end_step();
    result.losses.push_back(loss_sum.item());
    result.grad_norms.push_back(clip.norm.item());
  }
  fsdp->for_each_full(dist::Fsdp::State::kMaster, [&](const std::string& name, const Tensor& full) {
    result.parameters[name] = full.to_vector();
  });
  return result;
}

template <class Net>
FsdpResult train_net_on_threads(int world_size, const NetRun& run,
                                const std::function<std::unique_ptr<Net>()>& make,
                                const PartFn<Net>& pass) {
  std::vector<FsdpResult> results(static_cast<size_t>(world_size));
  dist::run_ranks(world_size, run.local, [&](dist::World& world) {
    results[static_cast<size_t>(world.rank())] = train_net<Net>(world, run, make, pass);
  });
  for (size_t r = 1; r < results.size(); ++r) {
    check_same(results[r], results[0], "rank " + std::to_string(r));
  }
  return results[0];
}

/// Occurrences of the line `what` in a program.
inline int count_lines(const std::string& program, const std::string& what) {
  int count = 0;
  size_t begin = 0;
  while (begin < program.size()) {
    const size_t end = program.find('\n', begin);
    count += program.substr(begin, end - begin) == what;
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  return count;
}

}  // namespace tessera::testing
