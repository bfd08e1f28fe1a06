#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/op_observer.h"
#include "core/profiler.h"
#include "dist/fsdp/fully_shard.h"
#include "nn/current_module.h"

namespace tessera::dist {

/// The unit of each module of a model: of the innermost one around it that has one; empty for modules
/// outside of all units.
std::vector<std::string> units_of(const std::vector<nn::NamedModule>& modules, const Fsdp& fsdp);

/// Labels the tasks of this thread ([Note: Labels of tasks] in core/profiler.h) with step, phase,
/// operation, module, unit and shapes while it is the thread's OpObserver.
class TaskLabels final : public OpObserver {
 public:
  /// `next`: another observer, of the same model, that is told the same; or null. All outlive this.
  TaskLabels(nn::Module& model, const Fsdp& fsdp, OpObserver* next);

  /// What follows is of this step and phase, whose name lives for ever.
  void begin(int64_t step, const char* phase);

  int64_t on_op(const char* op, std::span<const Tensor> inputs,
                std::span<const Tensor> outputs) override;
  void begin_backward(const char* op, int64_t id) override;
  void end_backward() override;
  void on_gradient(int input, const TensorImpl* leaf, const Tensor& gradient) override;
  void on_early_gradient(const TensorImpl* leaf, const Tensor& gradient) override;
  std::function<void(const Tensor& piece)> on_later_gradient(const TensorImpl* leaf) override;

 private:
  profiler::TaskLabel label(const char* op) const;

  nn::CurrentModule current_;
  OpObserver* const next_;
  std::vector<const char*> modules_, units_;  // names of current_.modules()
  profiler::TaskLabel base_;
};

}  // namespace tessera::dist
