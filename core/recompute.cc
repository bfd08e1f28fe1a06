#include "core/recompute.h"

#include "core/autograd.h"
#include "core/random.h"

namespace tessera {
namespace {

thread_local bool checkpointing = false, recomputing = false;

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

}  // namespace

bool is_checkpointing() {
  return checkpointing;
}

bool is_recomputing() {
  return recomputing;
}

Tensor recompute(const std::function<Tensor(const std::vector<Tensor>&)>& fn,
                 const std::vector<Tensor>& inputs) {
  if (!grad_mode()) return fn(inputs);
  const RandomState start = random_state();
  Tensor output;
  {
    NoGrad no_grad;
    FlagScope scope(checkpointing);
    output = fn(inputs);
  }
  std::vector<Saved> saved;
  for (const Tensor& input : inputs) saved.push_back(save(input));
  std::vector<bool> wanted;
  for (const Tensor& input : inputs) wanted.push_back(input.is_defined() && input.requires_grad());
  auto outputs =
      record_multi_always("recompute", inputs, {output},
                          [fn, start, saved = std::move(saved), wanted = std::move(wanted)](
                              std::span<const Tensor> dys, Grads& g) {
                            std::vector<Tensor> again;
                            for (size_t i = 0; i < saved.size(); ++i) {
                              const Tensor& input = saved[i];
                              again.push_back(input.is_defined() ? input.detach() : input);
                              if (wanted[i]) again.back().set_requires_grad(true);
                            }
                            Tensor result;
                            {
                              FlagScope scope(recomputing);
                              RandomScope random(start);
                              GradMode grad(true);
                              result = fn(again);
                            }
                            if (result.requires_grad()) backward(result, dys[0]);
                            for (size_t i = 0; i < again.size(); ++i) {
                              if (wanted[i] && again[i].grad().is_defined())
                                g.add(static_cast<int>(i), again[i].grad());
                            }
                          });
  return outputs[0];
}

}  // namespace tessera
