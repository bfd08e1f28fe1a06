#include "dist/fsdp/finite_check.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/autograd.h"
#include "core/recompute.h"
#include "dist/fsdp/shard_view.h"
#include "dist/fsdp/task_labels.h"
#include "kernels/reduce/reduce.h"
#include "kernels/rows.h"

namespace tessera::dist {

/// A flat buffer of values of parameters, or of states of theirs.
struct FiniteCheck::Flat {
  std::string unit, kind;  // "blocks.0", "parameter" or "exp_avg of"
  Tensor values;
  std::vector<optim::Segment> segments;  // in values
};

/// What one pass over new values has looked at.
struct FiniteCheck::Site {
  enum class Kind : unsigned char { kOutput, kGradient, kShard } kind;
  bool is_recomputed = false;
  const char* op = nullptr;
  int module = -1;
  int pass = 0;
  int input = -1;                     // of kGradient
  const std::string* leaf = nullptr;  // its name, if it is a parameter
  const Flat* flat = nullptr;         // of kShard
};

class FiniteCheck::Checked {
 public:
  static constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  Checked() : mark(zeros({1}, kI32)) {}
  Tensor mark;  // kMost - the first site's index; 0 without one
  HostCopy found;
  std::vector<Site> sites;
};

namespace {

bool can_look_at(const Tensor& t) {
  return t.is_defined() && t.numel() > 0 && is_floating(t.dtype()) &&
         t.storage()->is_materialized() &&
         (t.is_contiguous() || kernels::row_layout(t.shape(), t.strides()).has_value());
}

}  // namespace

FiniteCheck::FiniteCheck(nn::Module& model, Fsdp& fsdp, optim::Optimizer& optimizer, World& world)
    : current_(model), world_(world), units_(units_of(current_.modules(), fsdp)) {
  const ShardView view(fsdp);
  for (const nn::NamedParameter& p : model.named_parameters()) {
    leaves_.emplace(p.parameter->tensor.impl(), p.name);
  }
  const std::vector<optim::NamedState> states = optimizer.state();
  size_t shard = 0;
  for (const HeldGroup& g : view.groups()) {
    std::vector<optim::Segment> own = segments_in(g.layout, g.begin, g.begin + g.numel);
    if (g.coded != nullptr) {
      for (size_t i = 0; i < g.layout.placements.size(); ++i) {
        optim::Segment whole;
        whole.parameter = g.layout.placements[i].name, whole.end = g.coded->scales(i).numel();
        frozen_.push_back({g.name, "scales of parameter", g.coded->scales(i), {whole}});
      }
      continue;
    }
    std::vector<Flat>& flats = g.layout.is_trainable ? updated_ : frozen_;
    flats.push_back({g.name, "parameter", g.values, own});
    if (g.low.is_defined())
      flats.push_back({g.name, "low-precision copy of parameter", g.low, own});
    if (!g.layout.is_trainable) continue;
    for (const optim::NamedState& state : states) {
      if (state.tensors.empty() || !state.tensors[shard].is_defined()) continue;
      std::vector<optim::Segment> blocks = own;
      for (optim::Segment& s : blocks) {
        s.begin /= state.block, s.end = optim::state_numel(s.end, state.block);
      }
      flats.push_back({g.name, state.name + " of parameter", state.tensors[shard], blocks});
    }
    ++shard;
  }
  std::erase_if(updated_, [](const Flat& f) { return !is_floating(f.values.dtype()); });
  step_ = std::make_shared<Checked>();
}

FiniteCheck::~FiniteCheck() = default;

void FiniteCheck::look(const Tensor& values, const Site& site) {
  if (!can_look_at(values)) return;
  const NoGrad no_grad;
  step_->sites.push_back(site);
  const auto index = static_cast<int32_t>(step_->sites.size() - 1);
  mark_nonfinite(step_->mark, values, Checked::kMost - index);
}

int64_t FiniteCheck::on_op(const char* op, std::span<const Tensor> inputs,
                           std::span<const Tensor> outputs) {
  const int module = current_.index();
  for (const size_t i : std::exchange(unnamed_, {})) {
    step_->sites[i].op = op, step_->sites[i].module = module;
  }
  for (const Tensor& output : outputs) {
    const auto is_view_of = [&](const Tensor& input) {
      return input.is_defined() && input.storage() == output.storage();
    };
    if (!output.is_defined() || std::any_of(inputs.begin(), inputs.end(), is_view_of)) continue;
    look(output, {.kind = Site::Kind::kOutput,
                  .is_recomputed = is_recomputing(),
                  .op = op,
                  .module = module,
                  .pass = pass_});
  }
  return module + 2;  // 0 and 1: not observed, of no module
}

void FiniteCheck::begin_backward(const char* op, int64_t id) {
  ops_.push_back(op);
  current_.enter(static_cast<int>(std::max<int64_t>(id, 1)) - 2);
}

void FiniteCheck::end_backward() {
  ops_.pop_back();
  current_.leave();
}

FiniteCheck::Site FiniteCheck::gradient_site(int input, const TensorImpl* leaf) const {
  const auto name = leaf == nullptr ? leaves_.end() : leaves_.find(leaf);
  return {.kind = Site::Kind::kGradient,
          .op = ops_.empty() ? nullptr : ops_.back(),
          .module = current_.index(),
          .pass = pass_,
          .input = input,
          .leaf = name == leaves_.end() ? nullptr : &name->second};
}

void FiniteCheck::on_gradient(int input, const TensorImpl* leaf, const Tensor& gradient) {
  look(gradient, gradient_site(input, leaf));
}

void FiniteCheck::on_early_gradient(const TensorImpl* leaf, const Tensor& gradient) {
  unnamed_.push_back(step_->sites.size());
  look(gradient, gradient_site(-1, leaf));
  if (step_->sites.size() == unnamed_.back()) unnamed_.pop_back();
}

std::function<void(const Tensor& piece)> FiniteCheck::on_later_gradient(const TensorImpl* leaf) {
  return [this, site = gradient_site(-1, leaf)](const Tensor& piece) { look(piece, site); };
}

void FiniteCheck::after_update() {
  for (const Flat& flat : updated_) {
    look(flat.values, {.kind = Site::Kind::kShard, .flat = &flat});
  }
}

std::shared_ptr<const FiniteCheck::Checked> FiniteCheck::end_step() {
  step_->found = HostCopy(step_->mark);
  unnamed_.clear();
  return std::exchange(step_, std::make_shared<Checked>());
}

std::string FiniteCheck::place(const Site& site) const {
  std::string text;
  if (site.module >= 0) {
    const auto index = static_cast<size_t>(site.module);
    const nn::NamedModule& m = current_.modules()[index];
    text += fmt::format("{} ({}", m.name.empty() ? "the model" : m.name, m.module->kind());
    text += units_[index].empty() ? ")" : fmt::format(", unit {})", units_[index]);
  } else {
    text += "no module";
  }
  return text + fmt::format(", pass {}", site.pass);
}

std::string FiniteCheck::describe(const Site& site) const {
  const std::string op = site.op == nullptr ? "an operation" : site.op;
  if (site.kind == Site::Kind::kOutput) {
    return fmt::format("output of {} in forward{} of {}", op,
                       site.is_recomputed ? ", computed again for backward," : "", place(site));
  }
  if (site.kind == Site::Kind::kGradient) {
    const std::string what = site.leaf != nullptr ? "parameter " + *site.leaf
                             : site.input >= 0    ? fmt::format("input {}", site.input)
                                                  : "a parameter";
    return fmt::format("gradient of {} that {} writes in backward of {}", what, op, place(site));
  }
  // Which of the parameters there the host looks up: it is the end of the run, and the values stay.
  const Flat& flat = *site.flat;
  const NoGrad no_grad;
  const HostCopy copy(flat.values.to(kF32));
  const auto* const values = static_cast<const float*>(copy.data());
  std::vector<std::string> names;
  for (const optim::Segment& s : flat.segments) {
    const int64_t count = std::count_if(values + s.begin, values + s.end,
                                        [](float value) { return !std::isfinite(value); });
    if (count == 0) continue;
    names.push_back(
        fmt::format("{} ({} of the {} values here)", s.parameter, count, s.end - s.begin));
  }
  const std::string unit = fmt::format("unit {}", flat.unit);
  if (names.empty()) return fmt::format("{} of {}", flat.kind, unit);
  return fmt::format("{} {}{} in {}", flat.kind, names[0],
                     names.size() == 1 ? "" : fmt::format(" and {} more", names.size() - 1), unit);
}

std::optional<FiniteCheck::Found> FiniteCheck::find(const Checked& checked) {
  const int64_t mine = Checked::kMost - static_cast<int64_t>(checked.found.item());
  const int64_t first = world_.control().min(mine);
  if (first == Checked::kMost) return std::nullopt;
  Found found;
  if (mine == first) {
    const Site& site = checked.sites[static_cast<size_t>(mine)];
    found.is_update = site.kind == Site::Kind::kShard;
    found.text = describe(site);
  }
  const std::vector<std::string> texts = world_.control().all_gather(found.text);
  const auto rank = std::find_if(texts.begin(), texts.end(), [](auto& t) { return !t.empty(); });
  found.is_update = world_.control().max(found.is_update ? 1 : 0) != 0;
  found.text = *rank;
  if (texts.size() > 1) found.text += fmt::format(", rank {}", rank - texts.begin());
  return found;
}

std::optional<FiniteCheck::Found> FiniteCheck::find_in_parameters() {
  for (const std::vector<Flat>* flats : {&updated_, &frozen_}) {
    for (const Flat& flat : *flats) look(flat.values, {.kind = Site::Kind::kShard, .flat = &flat});
  }
  return find(*end_step());
}

}  // namespace tessera::dist
