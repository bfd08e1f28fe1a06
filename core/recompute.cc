#include "core/recompute.h"

#include "core/autograd.h"
#include "core/host_checkpoints.h"
#include "core/random.h"

namespace tessera {
namespace {

thread_local bool checkpointing = false, recomputing = false;
thread_local int64_t region = 0, last_region = 0;

/// Says which region runs, for a scope.
struct RegionScope {
  explicit RegionScope(int64_t id) : previous(std::exchange(region, id)) {}
  ~RegionScope() { region = previous; }
  int64_t previous;
};

struct FlagScope {
  explicit FlagScope(bool& f) : flag(f), previous(std::exchange(f, true)) {}
  ~FlagScope() { flag = previous; }
  bool& flag;
  bool previous;
};

/// Puts this thread's random numbers back to where a forward began, for a scope.
struct RandomScope {
  explicit RandomScope(const RandomState& replay)
      : current(std::exchange(random_state(), replay)) {}
  ~RandomScope() { random_state() = current; }
  RandomState current;
};

/// Gradients of a leaf of the second run go to where those of the first run's input go, in the same
/// order and by the same kernels as if there were one run.
class Passage final : public GradSink {
 public:
  Passage(Grads& g, int input) : g_(g), input_(input) {}
  GradDst destination(const Tensor&) override { return g_.destination(input_); }
  void written(const Tensor&) override { g_.written(input_); }

 private:
  Grads& g_;
  int input_;
};

/// What a second run starts from: the inputs of the first, and its random numbers. Values that have
/// bytes are with `host`, if given.
class Replay {
 public:
  Replay(const std::vector<Tensor>& inputs, const RandomState& start,
         HostCheckpoints* host = nullptr)
      : start_(start) {
    for (const Tensor& input : inputs) {
      const bool is_away = host != nullptr && input.is_defined() && input.numel() > 0;
      away_.push_back(is_away ? host->keep(input) : nullptr);
      inputs_.push_back(save(is_away ? Tensor{} : input));
      wanted_.push_back(input.is_defined() && input.requires_grad());
    }
  }

  /// `fn` on leaves that share the inputs' bytes, recorded.
  template <class F>
  auto run(std::vector<Tensor>& leaves, F&& fn) const {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Tensor& input = away_[i] != nullptr ? away_[i]->bring() : inputs_[i].get();
      leaves.push_back(input.is_defined() ? input.detach() : input);
      if (wanted_[i]) leaves.back().set_requires_grad(true);
    }
    FlagScope scope(recomputing);
    RandomScope random(start_);
    GradMode grad(true);
    return fn(leaves);
  }

  /// For the backward of the second run, which must not outlive `g`.
  void connect(const std::vector<Tensor>& leaves, Grads& g) const {
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (wanted_[i]) set_grad_sink(leaves[i], std::make_shared<Passage>(g, static_cast<int>(i)));
    }
  }

  /// Hands on the gradients that came to the leaves.
  void deliver(const std::vector<Tensor>& leaves, Grads& g) const {
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (wanted_[i] && leaves[i].grad().is_defined()) {
        g.add(static_cast<int>(i), leaves[i].grad());
      }
    }
  }

 private:
  RandomState start_;
  std::vector<Saved> inputs_;
  std::vector<std::shared_ptr<HostCheckpoint>> away_;
  std::vector<bool> wanted_;
};

}  // namespace

bool is_checkpointing() {
  return checkpointing;
}

bool is_recomputing() {
  return recomputing;
}

int64_t recompute_region() {
  return region;
}

Tensor recompute(const std::function<Tensor(const std::vector<Tensor>&)>& fn,
                 const std::vector<Tensor>& inputs, HostCheckpoints* host) {
  if (!grad_mode()) return fn(inputs);
  const RandomState start = random_state();
  const int64_t id = region != 0 ? region : ++last_region;
  Replay replay(inputs, start, host);
  Tensor output;
  {
    const RegionScope region_scope(id);
    NoGrad no_grad;
    FlagScope scope(checkpointing);
    output = fn(inputs);
  }
  auto outputs = record_multi_always(
      "recompute", inputs, {output},
      [fn, id, replay = std::move(replay)](std::span<const Tensor> dys, Grads& g) {
        std::vector<Tensor> leaves;
        Tensor again;
        {
          const RegionScope region_scope(id);
          again = replay.run(leaves, fn);
        }
        if (again.requires_grad()) backward(again, dys[0]);
        replay.deliver(leaves, g);
      });
  return outputs[0];
}

Tensor recompute_output(
    const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& produce,
    const std::function<Tensor(const std::vector<Tensor>&)>& consume,
    const std::vector<Tensor>& inputs) {
  if (!grad_mode()) return consume(produce(inputs));
  const RandomState start = random_state();
  std::vector<Tensor> outputs;
  {
    NoGrad no_grad;
    FlagScope scope(checkpointing);
    outputs = produce(inputs);
  }
  /// The second run, between the two nodes of the tape around what `consume` records.
  struct Again {
    std::vector<Tensor> leaves, outputs;
  };
  const auto again = std::make_shared<Again>();
  const std::shared_ptr<Storage> dropped = outputs[0].storage();
  const Replay replay(inputs, start);
  outputs = record_multi_always("recompute_output", inputs, outputs,
                                [again, dropped, replay](std::span<const Tensor> dys, Grads& g) {
                                  std::vector<Tensor> roots, grads;
                                  for (size_t i = 0; i < dys.size(); ++i) {
                                    const Tensor& root = again->outputs[i];
                                    if (!dys[i].is_defined() || !root.requires_grad()) continue;
                                    roots.push_back(root);
                                    grads.push_back(dys[i]);
                                  }
                                  replay.connect(again->leaves, g);
                                  if (!roots.empty()) backward(roots, grads);
                                  *again = {};
                                  dropped->release();
                                });
  const Tensor result = consume(outputs);
  TESSERA_CHECK(result.storage() != dropped,
                "recompute_output: consume must not return a view of what produce gave first");
  dropped->release();
  auto results =
      record_multi_always("recompute_again", {result}, {result},
                          [produce, again, dropped, replay](std::span<const Tensor> dys, Grads& g) {
                            again->leaves.clear();
                            again->outputs = replay.run(again->leaves, produce);
                            const Tensor& first = again->outputs[0];
                            dropped->attach(first.raw_data(), first.storage());
                            g.add(0, dys[0]);
                          });
  return results[0];
}

}  // namespace tessera
