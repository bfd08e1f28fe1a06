#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/op_observer.h"
#include "core/runtime/staging.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "nn/current_module.h"
#include "optim/optimizer.h"

namespace tessera::dist {

// [Note: First value that is not finite]
// A NaN spreads: by the time that a loss shows it, every parameter of every rank may have it. So each
// result is looked at when it is new, by one pass over it in the order of the compute stream: outputs
// of operations, gradients that their backward writes, parameters and states that the optimizer has
// written. A pass that finds an infinity or a NaN marks its number, the first one wins, and the host
// reads one number a step, a step later. What the number stands for the host has noted when it
// submitted the pass.

/// Finds the first operation, of which module and unit, whose output or gradient is not finite, and
/// parameters that are not. One step:
///
///   { const OpObserverScope scope(&check); for (...) { check.begin_pass(i); backward(loss()); } }
///   optimizer.step(); check.after_update(); auto checked = check.end_step();
///   ... a step later: check.find(*checked) ...
///
/// Cost     a pass over each new value; 4 bytes of memory a step in flight
class FiniteCheck final : public OpObserver {
 public:
  /// `model` is the one that `fsdp` shards; all live longer than this.
  FiniteCheck(nn::Module& model, Fsdp& fsdp, optim::Optimizer& optimizer, World& world);
  ~FiniteCheck() override;

  /// What the passes of one step have found.
  class Checked;
  struct Found {
    /// "gradient of w that linear writes in backward of blocks.1.mlp.up (Linear, unit blocks.1), pass
    /// 0, rank 1"
    std::string text;
    bool is_update = false;  ///< by the optimizer: the model has it now
  };

  void begin_pass(int pass) { pass_ = pass; }
  /// After the optimizer: its parameters and states. Enqueues.
  void after_update();
  std::shared_ptr<const Checked> end_step();
  /// The first of all ranks; waits for the device if it is not there yet. Collective.
  std::optional<Found> find(const Checked& checked);
  /// Of the parameters as they are now, trainable or not, by name. Waits for the device. Collective.
  std::optional<Found> find_in_parameters();

  int64_t on_op(const char* op, std::span<const Tensor> inputs,
                std::span<const Tensor> outputs) override;
  void begin_backward(const char* op, int64_t id) override;
  void end_backward() override;
  void on_gradient(int input, const TensorImpl* leaf, const Tensor& gradient) override;
  void on_early_gradient(const TensorImpl* leaf, const Tensor& gradient) override;
  std::function<void(const Tensor& piece)> on_later_gradient(const TensorImpl* leaf) override;

 private:
  struct Site;
  struct Flat;
  void look(const Tensor& values, const Site& site);
  Site gradient_site(int input, const TensorImpl* leaf) const;
  std::string describe(const Site& site) const;
  std::string place(const Site& site) const;

  nn::CurrentModule current_;
  World& world_;
  std::vector<std::string> units_;                             // of current_.modules()
  std::unordered_map<const TensorImpl*, std::string> leaves_;  // names of parameters
  std::vector<Flat> updated_, frozen_;
  std::shared_ptr<Checked> step_;
  std::vector<const char*> ops_;  // whose backward runs, innermost last
  std::vector<size_t> unnamed_;   // sites of an operation that is observed next
  int pass_ = 0;
};

}  // namespace tessera::dist
