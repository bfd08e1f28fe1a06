#include "dist/fsdp/task_labels.h"

#include <algorithm>
#include <unordered_map>

#include "core/recompute.h"
#include "dist/fsdp/shard_view.h"

namespace tessera::dist {
namespace {

std::string shapes_text(std::span<const Tensor> tensors) {
  std::string text;
  for (const Tensor& t : tensors) {
    if (t.is_defined()) text += fmt::format("{}{}", text.empty() ? "" : ", ", t.shape());
  }
  return text;
}

}  // namespace

std::vector<std::string> units_of(const std::vector<nn::NamedModule>& modules, const Fsdp& fsdp) {
  const ShardView view(fsdp);
  std::unordered_map<std::string, std::string> of_path;  // parents come before children
  std::vector<std::string> units;
  for (const nn::NamedModule& m : modules) {
    const size_t dot = m.name.rfind('.');
    std::string unit = view.unit_of(*m.module);
    if (unit.empty() && !m.name.empty()) {
      unit = of_path[dot == std::string::npos ? "" : m.name.substr(0, dot)];
    }
    of_path[m.name] = unit;
    units.push_back(std::move(unit));
  }
  return units;
}

TaskLabels::TaskLabels(nn::Module& model, const Fsdp& fsdp, OpObserver* next)
    : current_(model), next_(next) {
  for (const nn::NamedModule& m : current_.modules()) modules_.push_back(profiler::lasting(m.name));
  for (const std::string& unit : units_of(current_.modules(), fsdp)) {
    units_.push_back(profiler::lasting(unit));
  }
}

void TaskLabels::begin(int64_t step, const char* phase) {
  base_ = {.step = step, .phase = phase};
  if (profiler::is_on()) profiler::set_label(base_);
}

profiler::TaskLabel TaskLabels::label(const char* op) const {
  profiler::TaskLabel label = base_;
  label.op = op;
  label.is_recomputed = is_recomputing();
  if (const int index = current_.index(); index >= 0) {
    label.module = modules_[static_cast<size_t>(index)];
    label.unit = units_[static_cast<size_t>(index)];
  }
  return label;
}

int64_t TaskLabels::on_op(const char* op, std::span<const Tensor> inputs,
                          std::span<const Tensor> outputs) {
  if (profiler::is_on()) {
    profiler::TaskLabel done = label(op);
    done.shapes = fmt::format("{} -> {}", shapes_text(inputs), shapes_text(outputs));
    profiler::update_label(profiler::current_label(), done);
  }
  if (next_ != nullptr) next_->on_op(op, inputs, outputs);
  if (profiler::is_on()) profiler::set_label(label(""));
  return current_.index() + 2;  // 0 and 1: not observed, of no module
}

void TaskLabels::begin_backward(const char* op, int64_t id) {
  current_.enter(static_cast<int>(std::max<int64_t>(id, 1)) - 2);
  if (next_ != nullptr) next_->begin_backward(op, id);
  if (profiler::is_on()) profiler::set_label(label(op));
}

void TaskLabels::end_backward() {
  current_.leave();
  if (next_ != nullptr) next_->end_backward();
  if (profiler::is_on()) profiler::set_label(label(""));
}

void TaskLabels::on_gradient(int input, const TensorImpl* leaf, const Tensor& gradient) {
  if (next_ != nullptr) next_->on_gradient(input, leaf, gradient);
}
void TaskLabels::on_early_gradient(const TensorImpl* leaf, const Tensor& gradient) {
  if (next_ != nullptr) next_->on_early_gradient(leaf, gradient);
}
std::function<void(const Tensor& piece)> TaskLabels::on_later_gradient(const TensorImpl* leaf) {
  return next_ != nullptr ? next_->on_later_gradient(leaf) : [](const Tensor&) {};
}

}  // namespace tessera::dist
