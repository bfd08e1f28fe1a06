#include "nn/lora.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_set>

#include "core/glob.h"
#include "core/settings.h"
#include "core/split.h"
#include "core/text.h"
#include "nn/hf/config.h"
#include "nn/linear.h"

namespace tessera::nn {
namespace {

thread_local int off_depth = 0;

constexpr std::string_view kAllLinear = "all-linear";
constexpr std::string_view kTargets = "LoraOptions::targets";
constexpr std::string_view kSaved = "LoraOptions::modules_to_save";

Init a_init(int64_t num_inputs) {
  // Kaiming uniform with a = sqrt(5): +-sqrt(6 / ((1 + a^2) num_inputs)).
  const double bound = 1.0 / std::sqrt(static_cast<double>(num_inputs));
  return Init::uniform(-bound, bound);
}

int64_t num_rows(const std::vector<LoraPart>& parts) {
  int64_t count = 0;
  for (const LoraPart& part : parts) count += part.rows.count;
  return count;
}

std::string_view last_name(std::string_view path) {
  return path.substr(path.rfind('.') + 1);
}

std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

/// The whole of a name, its end behind a dot, or a pattern of it.
bool is_called(std::string_view name, std::string_view target) {
  if (name == target || matches_glob(name, target)) return true;
  return name.size() > target.size() && name.ends_with(target) &&
         name[name.size() - target.size() - 1] == '.';
}

/// A linear layer and those of its parts that get adapters.
struct Layer : LoraLayer {
  std::vector<LoraPart> chosen = {};
};

/// The parts that transformers has of a packed layer; else the layer is the one part.
std::vector<LoraPart> parts_of(const std::string& name, const Linear& linear,
                               const std::map<std::string, HfParameter>& hf) {
  const auto found = hf.find(name + ".weight");
  if (found == hf.end()) return {{name, {0, linear.num_outputs()}}};
  std::vector<LoraPart> parts;
  for (const HfTensor& source : found->second.sources) {
    int64_t first = linear.num_outputs(), end = 0, count = 0;
    for (const HfRows& run : source.rows) {
      first = std::min(first, run.row), end = std::max(end, run.row + run.num_rows);
      count += run.num_rows;
    }
    TESSERA_CHECK_AS(InternalError, end - first == count, "add_lora: rows of {} lie apart in {}",
                     source.name, name);
    parts.push_back({parent_of(source.name), {first, count}});
  }
  return parts;
}

/// "q_proj, k_proj, ...": the last components of all names that a target may be.
std::string known_names(const std::vector<Layer>& layers) {
  std::vector<std::string_view> names;
  for (const Layer& layer : layers) {
    for (const LoraPart& part : layer.parts) {
      const std::string_view name = last_name(part.name);
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  return join_few(names, ", ", /*max_items=*/16);
}

/// Full names of the parameters that `modules_to_save` keeps trained.
std::unordered_set<std::string> saved_parameters(Module& root, const LoraOptions& options,
                                                 const std::map<std::string, HfParameter>& hf) {
  std::unordered_set<std::string> saved;
  const auto is_in = [](const std::string& parameter, std::string_view target) {
    for (std::string module = parent_of(parameter); !module.empty(); module = parent_of(module)) {
      if (is_called(module, target)) return true;
    }
    return false;
  };
  const auto parameters = root.named_parameters(/*with_ties=*/true);
  for (const std::string_view target : names_in(options.modules_to_save)) {
    bool is_found = false;
    for (const NamedParameter& p : parameters) {
      const auto sources = hf.find(p.name);
      bool is_saved = is_in(p.name, target);
      if (!is_saved && sources != hf.end()) {
        const auto& all = sources->second.sources;
        const auto count = std::count_if(all.begin(), all.end(),
                                         [&](const HfTensor& t) { return is_in(t.name, target); });
        check_option(count == 0 || count == std::ssize(all), kSaved,
                     "{} is a part of {}, which is trained as one, expected all of its parts",
                     target, p.name);
        is_saved = count > 0;
      }
      if (!is_saved) continue;
      is_found = true;
      for (const NamedParameter& other : parameters) {
        if (other.parameter == p.parameter) saved.insert(other.name);
      }
    }
    check_option(is_found, kSaved, "no module is called \"{}\", expected a name such as {} or {}",
                 shorten(target), parent_of(parameters.front().name),
                 parent_of(parameters.back().name));
  }
  return saved;
}

void choose(std::vector<Layer>& layers, const LoraOptions& options,
            const std::unordered_set<std::string>& saved) {
  const std::vector<std::string_view> targets = names_in(options.targets);
  check_option(!targets.empty(), kTargets, "none, expected {} or some of {}", kAllLinear,
               known_names(layers));
  for (const std::string_view target : targets) {
    const bool is_all = target == kAllLinear;
    bool is_found = false;
    for (Layer& layer : layers) {
      const bool is_saved = saved.contains(layer.name + ".weight");
      if (is_all && is_saved) continue;
      const bool is_whole = is_all || is_called(layer.name, target);
      for (const LoraPart& part : layer.parts) {
        if (!is_whole && !is_called(part.name, target)) continue;
        is_found = true;
        check_option(!is_saved, kTargets, "{} is one of modules_to_save too, expected one of both",
                     part.name);
        const auto is_same = [&](const LoraPart& p) { return p.rows.first == part.rows.first; };
        if (std::none_of(layer.chosen.begin(), layer.chosen.end(), is_same)) {
          layer.chosen.push_back(part);
        }
      }
    }
    check_option(is_found, kTargets, "no linear layer is called \"{}\", expected {} or some of {}",
                 shorten(target), kAllLinear, known_names(layers));
  }
  for (Layer& layer : layers) {
    std::sort(layer.chosen.begin(), layer.chosen.end(),
              [](const LoraPart& a, const LoraPart& b) { return a.rows.first < b.rows.first; });
  }
}

}  // namespace

std::vector<LoraLayer> lora_layers(Module& root) {
  const std::map<std::string, HfParameter> hf = hf_parameters_of(root);
  std::vector<LoraLayer> layers;
  for (const NamedModule& entry : root.named_modules()) {
    if (auto* const linear = dynamic_cast<Linear*>(entry.module)) {
      layers.push_back({entry.name, linear, parts_of(entry.name, *linear, hf)});
    }
  }
  return layers;
}

double LoraOptions::scale() const {
  const auto r = static_cast<double>(rank);
  return alpha / (rslora ? std::sqrt(r) : r);
}

Lora::Lora(int64_t num_inputs, DType dtype, std::vector<LoraPart> parts, const LoraOptions& options)
    : parts_(std::move(parts)),
      options_(options),
      a_(register_parameter("A", {std::ssize(parts_) * options.rank, num_inputs},
                            a_init(num_inputs), {.dtype = dtype})),
      b_(register_parameter("B", {num_rows(parts_), options.rank}, Init::zeros(),
                            {.dtype = dtype})) {
  for (const LoraPart& part : parts_) columns_.push_back(part.rows);
}

Tensor Lora::forward(const Tensor& y, const Tensor& x) {
  return lora_add_(y, x, a_, b_, columns_,
                   {.rank = options_.rank,
                    .scale = options_.scale(),
                    .dropout = is_training() ? options_.dropout : 0});
}

std::string Lora::kind() const {
  std::string names;
  for (const LoraPart& part : parts_) names += fmt::format(", {}", last_name(part.name));
  return fmt::format("Lora(rank {}, scale {}{}{})", options_.rank, options_.scale(),
                     options_.dropout > 0 ? fmt::format(", dropout {}", options_.dropout) : "",
                     names);
}

LoraOff::LoraOff() {
  ++off_depth;
}
LoraOff::~LoraOff() {
  --off_depth;
}
bool LoraOff::is_active() {
  return off_depth > 0;
}

bool is_lora(const NamedParameter& parameter) {
  return dynamic_cast<const Lora*>(parameter.owner) != nullptr;
}

void add_lora(Module& root, const LoraOptions& options, uint64_t seed) {
  check_option(options.rank > 0, "LoraOptions::rank", "{}, expected at least 1", options.rank);
  check_option(options.alpha > 0 && std::isfinite(options.alpha), "LoraOptions::alpha",
               "{}, expected a positive number", options.alpha);
  check_option(options.dropout >= 0 && options.dropout < 1, "LoraOptions::dropout",
               "{}, expected a number in [0, 1)", options.dropout);
  const std::unordered_set<std::string> saved =
      saved_parameters(root, options, hf_parameters_of(root));
  std::vector<Layer> layers;
  for (LoraLayer& layer : lora_layers(root)) layers.push_back({std::move(layer)});
  choose(layers, options, saved);
  for (const NamedParameter& p : root.named_parameters()) {
    check_option(!is_lora(p), kTargets, "{} is there already, expected a model without adapters",
                 p.name);
    check_option(!p.parameter->is_sharded, kTargets,
                 "{} is sharded already, expected adapters before fully_shard", p.name);
    p.parameter->tensor.set_requires_grad(saved.contains(p.name));
  }
  for (const Layer& layer : layers) {
    if (!layer.chosen.empty()) layer.linear->add_lora(layer.chosen, options);
  }
  for (const NamedParameter& p : root.named_parameters()) {
    const Tensor& tensor = p.parameter->tensor;
    if (!is_lora(p) || !tensor.storage()->is_materialized()) continue;
    fill_init(tensor.detach(), p.parameter->init, seed, p.name);
  }
}

}  // namespace tessera::nn
