#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/profiler.h"
#include "dist/fsdp/life.h"
#include "dist/fsdp/order.h"
#include "dist/fsdp/unit.h"
#include "dist/fsdp/values.h"
#include "nn/module.h"

namespace tessera::dist {

/// Ties an Order to a model: hooks of the modules and nodes on the tape tell it of calls, ends and
/// gradients. All on the host thread of the rank; nothing waits for the device.
class Hooks {
 public:
  /// Installs them. What is given outlives this, but for the tape, which holds `life`.
  Hooks(nn::Module& root, const std::vector<std::unique_ptr<Unit>>& units, const Policy& policy,
        Order& order, Values& values, std::shared_ptr<Life> life);
  /// Takes them away.
  ~Hooks();
  Hooks(const Hooks&) = delete;
  Hooks& operator=(const Hooks&) = delete;

  /// The unit whose parameters a call of `module` needs; empty if none.
  std::string unit_of(const nn::Module& module) const;

 private:
  class OfUnit;
  class OfRoot;

  void begin_call(int unit, std::span<Tensor*> inputs);
  void end_call(int unit, std::span<Tensor*> outputs);
  void end_root_call();
  void cast_outputs(std::span<Tensor*> outputs) const;
  void fail_forward() noexcept;
  void record_backward(int unit, size_t call, std::span<Tensor*> outputs);
  void begin_backward();
  void end_backward(bool ok);

  nn::Module& root_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  const Policy& policy_;
  Order& order_;
  Values& values_;
  const std::shared_ptr<Life> life_;
  std::unordered_map<const nn::Module*, int> hooked_;  // and their units
  bool has_root_hook_ = false;
  // For who looks at what the host does: calls under way, and the unit whose backward runs.
  std::vector<std::unique_ptr<profiler::HostSpan>> calls_;
  std::unique_ptr<profiler::HostSpan> backward_;
};

}  // namespace tessera::dist
