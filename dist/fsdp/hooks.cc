#include "dist/fsdp/hooks.h"

#include "core/autograd.h"
#include "core/recompute.h"

namespace tessera::dist {
namespace {

Order::Mode mode_of_call() {
  if (is_recomputing()) return Order::Mode::kReplay;
  return grad_mode() || is_checkpointing() ? Order::Mode::kTrain : Order::Mode::kEval;
}

}  // namespace

class Hooks::OfUnit final : public nn::ModuleHook {
 public:
  OfUnit(Hooks& hooks, int unit) : hooks_(hooks), unit_(unit) {}
  void pre_forward(nn::Module&, std::span<Tensor*> inputs) override {
    hooks_.begin_call(unit_, inputs);
  }
  void post_forward(nn::Module& module, std::span<Tensor*> outputs) override {
    const bool is_root = &module == &hooks_.root_;
    if (is_root) hooks_.cast_outputs(outputs);
    hooks_.end_call(unit_, outputs);
    if (is_root) hooks_.end_root_call();
  }
  void on_forward_error(nn::Module&) noexcept override { hooks_.fail_forward(); }

 private:
  Hooks& hooks_;
  const int unit_;
};

/// Around the calls of a root that is not a unit itself.
class Hooks::OfRoot final : public nn::ModuleHook {
 public:
  explicit OfRoot(Hooks& hooks) : hooks_(hooks) {}
  void pre_forward(nn::Module&, std::span<Tensor*>) override {}
  void post_forward(nn::Module&, std::span<Tensor*> outputs) override {
    hooks_.cast_outputs(outputs);
    hooks_.end_root_call();
  }
  void on_forward_error(nn::Module&) noexcept override {}

 private:
  Hooks& hooks_;
};

Hooks::Hooks(nn::Module& root, const std::vector<std::unique_ptr<Unit>>& units,
             const Policy& policy, Order& order, Values& values, std::shared_ptr<Life> life)
    : root_(root),
      units_(units),
      policy_(policy),
      order_(order),
      values_(values),
      life_(std::move(life)) {
  for (int u = 0; u < static_cast<int>(units.size()); ++u) {
    for (nn::Module* module : units[static_cast<size_t>(u)]->spec().modules) {
      TESSERA_CHECK_AS(ConfigError, module->hook() == nullptr,
                       "fully_shard: a module of unit {} is sharded already",
                       units[static_cast<size_t>(u)]->name());
      module->set_hook(std::make_shared<OfUnit>(*this, u));
      hooked_.emplace(module, u);
    }
  }
  if (root.hook() == nullptr) {
    root.set_hook(std::make_shared<OfRoot>(*this));
    has_root_hook_ = true;
  }
}

Hooks::~Hooks() {
  for (const auto& unit : units_) {
    for (nn::Module* module : unit->spec().modules) module->set_hook(nullptr);
  }
  if (has_root_hook_) root_.set_hook(nullptr);
}

std::string Hooks::unit_of(const nn::Module& module) const {
  const auto it = hooked_.find(&module);
  return it == hooked_.end() ? "" : units_[static_cast<size_t>(it->second)]->name();
}

// ---- forward

void Hooks::begin_call(int unit, std::span<Tensor*> inputs) {
  life_->check_open("forward");
  values_.check("forward");
  if (profiler::wants_spans()) {
    calls_.push_back(
        std::make_unique<profiler::HostSpan>(is_recomputing() ? "recompute" : "forward",
                                             units_[static_cast<size_t>(unit)]->static_name()));
  }
  const PrecisionOptions& precision = policy_.options.precision;
  if (precision.cast_forward_inputs) {
    for (Tensor* input : inputs) {
      if (is_floating(input->dtype()) && input->dtype() != kF64) {
        *input = input->to(precision.param_dtype);
      }
    }
  }
  const Order::Mode mode = mode_of_call();
  if (mode == Order::Mode::kReplay) begin_backward();
  order_.begin_call(unit, mode, recompute_region());
}

void Hooks::end_call(int unit, std::span<Tensor*> outputs) {
  const size_t call = order_.end_call(unit, mode_of_call());
  if (!calls_.empty()) calls_.pop_back();
  if (call != Order::kNoCall && grad_mode()) record_backward(unit, call, outputs);
}

void Hooks::end_root_call() {
  if (mode_of_call() == Order::Mode::kEval) order_.end_root_call();
}

void Hooks::cast_outputs(std::span<Tensor*> outputs) const {
  const std::optional<DType> dtype = policy_.options.precision.output_dtype;
  if (!dtype) return;
  for (Tensor* output : outputs) {
    // A scalar is a loss: it stays as precise as it is.
    if (is_floating(output->dtype()) && output->num_dims() > 0) *output = output->to(*dtype);
  }
}

void Hooks::fail_forward() noexcept {
  if (!calls_.empty()) calls_.pop_back();
  try {
    order_.end_forward(/*ok=*/false);
    // Whole gradients are those of earlier micro-batches, which are as good as before.
    if (order_.in_backward() || policy_.keeps_whole_gradients()) return;
    for (const auto& unit : units_) unit->gradients.discard();
  } catch (...) {  // a stream is poisoned; synchronize will say so
  }
}

// ---- backward

/// Puts a node on the tape that says when gradients have come to the outputs of a call.
void Hooks::record_backward(int unit, size_t call, std::span<Tensor*> outputs) {
  std::vector<Tensor> with_grad;
  for (const Tensor* output : outputs) {
    if (output->requires_grad()) with_grad.push_back(*output);
  }
  if (with_grad.empty()) return;
  const std::vector<Tensor> wrapped =
      record_multi("unit", with_grad, with_grad,
                   [this, life = life_, generation = order_.generation(), unit, call](
                       std::span<const Tensor> dys, Grads& g) {
                     life->check("backward");
                     begin_backward();
                     backward_ = nullptr;  // that of the unit before
                     if (profiler::wants_spans()) {
                       backward_ = std::make_unique<profiler::HostSpan>(
                           "backward", units_[static_cast<size_t>(unit)]->static_name());
                     }
                     order_.enter_backward(generation, call);
                     for (size_t i = 0; i < dys.size(); ++i) {
                       if (dys[i].is_defined()) g.add(static_cast<int>(i), dys[i]);
                     }
                   });
  size_t next = 0;
  for (Tensor* output : outputs) {
    if (output->requires_grad()) *output = wrapped[next++];
  }
}

/// What the first call that backward comes to does before its order hears of it.
void Hooks::begin_backward() {
  if (order_.in_backward()) return;
  life_->check_open("backward");
  life_->set_complete(false);
  on_backward_end([this](bool ok) { end_backward(ok); });
}

void Hooks::end_backward(bool ok) {
  backward_ = nullptr;
  if (!ok) {
    for (const auto& unit : units_) unit->gradients.discard();
  }
  order_.end_backward(ok);
  if (!ok) return;
  for (const auto& unit : units_) {
    const Gradients::Buffer buffer = unit->gradients.buffer();
    TESSERA_CHECK_AS(
        InternalError, buffer == Gradients::Buffer::kNone || buffer == Gradients::Buffer::kWhole,
        "fsdp: backward is over and the program has not reduced the gradients of unit \"{}\"",
        unit->name());
  }
}

}  // namespace tessera::dist
