#include "dist/fsdp/wrap.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "core/settings.h"

namespace tessera::dist {
namespace {

using nn::Module;
using nn::NamedModule;
using nn::NamedParameter;

struct Chosen {
  std::string name;
  std::vector<Module*> roots;  // the modules whose parameters the unit takes
};

constexpr int64_t kLargeUnit = 2;  // times the median: no block, it would make every slot as large

int64_t numel_of(const UnitSpec& unit) {
  int64_t sum = 0;
  for (const NamedParameter& p : unit.parameters) sum += p.parameter->tensor.numel();
  return sum;
}

/// Of chosen units, those like the others share a ring of slots; an embedding among layers does
/// not.
void mark_blocks(std::vector<UnitSpec>& units) {
  std::vector<int64_t> numels;
  for (const UnitSpec& unit : units) {
    if (!unit.parameters.empty()) numels.push_back(numel_of(unit));
  }
  if (numels.empty()) return;
  std::sort(numels.begin(), numels.end());
  const int64_t median = numels[numels.size() / 2];
  for (UnitSpec& unit : units) unit.is_block = numel_of(unit) <= kLargeUnit * median;
}

bool is_below(const std::string& name, const std::string& ancestor) {
  return name.size() > ancestor.size() && name.compare(0, ancestor.size(), ancestor) == 0 &&
         (ancestor.empty() || name[ancestor.size()] == '.');
}

/// Turns chosen modules into units: parameters go to the innermost chosen module above them, the
/// rest to "embedding" (before the first chosen one), "head" (after it) or "root" (none chosen).
std::vector<UnitSpec> make_units(Module& root, const std::vector<Chosen>& chosen) {
  std::vector<UnitSpec> units(chosen.size());
  std::map<const Module*, size_t> unit_of_root;
  std::set<const Module*> is_root_of_unit;
  for (size_t i = 0; i < chosen.size(); ++i) {
    units[i].name = chosen[i].name;
    for (Module* m : chosen[i].roots) {
      units[i].modules.push_back(m);
      unit_of_root[m] = i;
    }
  }
  // The unit of a module: its own, or that of the module above it, which comes before it.
  std::map<const Module*, size_t> unit_of_module;
  std::unordered_map<std::string, size_t> unit_of_name;
  for (const NamedModule& m : root.named_modules()) {
    const size_t dot = m.name.rfind('.');
    const auto own = unit_of_root.find(m.module);
    const auto above =
        m.name.empty() ? unit_of_name.end()
                       : unit_of_name.find(dot == std::string::npos ? "" : m.name.substr(0, dot));
    if (own == unit_of_root.end() && above == unit_of_name.end()) continue;
    const size_t unit = own != unit_of_root.end() ? own->second : above->second;
    unit_of_module[m.module] = unit_of_name[m.name] = unit;
  }

  UnitSpec before, after;
  before.name = chosen.empty() ? "root" : "embedding";
  after.name = "head";
  std::map<const nn::Parameter*, UnitSpec*> unit_of_parameter;
  bool is_after = false;
  for (const NamedParameter& p : root.named_parameters()) {
    const auto it = unit_of_module.find(p.owner);
    UnitSpec* unit = it != unit_of_module.end() ? &units[it->second] : is_after ? &after : &before;
    is_after = is_after || it != unit_of_module.end();
    unit->parameters.push_back(p);
    unit_of_parameter[p.parameter] = unit;
  }
  // Outside of chosen modules, the very modules that use a parameter are hooked; also inside one
  // if it uses a tied parameter of another unit.
  std::set<const nn::Parameter*> seen;
  for (const NamedParameter& use : root.named_parameters(/*with_ties=*/true)) {
    UnitSpec* unit = unit_of_parameter.at(use.parameter);
    unit->is_tied = unit->is_tied || !seen.insert(use.parameter).second;
    const auto it = unit_of_module.find(use.owner);
    const bool is_inside = it != unit_of_module.end() && unit == &units[it->second];
    auto& hooked = unit->modules;
    if (!is_inside && std::find(hooked.begin(), hooked.end(), use.owner) == hooked.end()) {
      check_option(it == unit_of_module.end() || use.owner->hook() == nullptr, "FsdpOptions::wrap",
                   "{} uses a parameter of unit {} inside another unit", use.name, unit->name);
      hooked.push_back(use.owner);
    }
  }
  mark_blocks(units);
  std::vector<UnitSpec> all;
  if (!before.parameters.empty()) all.push_back(std::move(before));
  for (UnitSpec& unit : units) {
    if (!unit.parameters.empty()) all.push_back(std::move(unit));
  }
  if (!after.parameters.empty()) all.push_back(std::move(after));
  return all;
}

/// The children of the list with the most children ("blocks"), by name; empty if there is none.
std::vector<NamedModule> blocks_of(Module& root) {
  std::vector<NamedModule> best;
  for (const NamedModule& m : root.named_modules()) {
    if (dynamic_cast<nn::ModuleList*>(m.module) == nullptr) continue;
    std::vector<NamedModule> children;
    m.module->for_each_child([&](const std::string& name, Module& child) {
      children.push_back({m.name + "." + name, &child});
    });
    if (children.size() > best.size()) best = std::move(children);
  }
  return best;
}

}  // namespace

namespace wrap {

WrapPolicy by_predicate(ModulePredicate predicate, bool nested) {
  return [predicate = std::move(predicate), nested](Module& root) {
    std::vector<Chosen> chosen;
    for (const NamedModule& m : root.named_modules()) {
      // What is below a module comes right after it.
      const bool is_inside = !chosen.empty() && is_below(m.name, chosen.back().name);
      if (m.name.empty() || (is_inside && !nested)) continue;
      if (predicate(m.name, *m.module)) chosen.push_back({m.name, {m.module}});
    }
    return make_units(root, chosen);
  };
}

WrapPolicy transformer_block() {
  return every_n_blocks(1);
}

WrapPolicy every_n_blocks(int n) {
  TESSERA_CHECK_AS(ConfigError, n >= 1, "every_n_blocks: n is {}, expected at least 1", n);
  return [n](Module& root) {
    std::vector<Chosen> chosen;
    const std::vector<NamedModule> blocks = blocks_of(root);
    for (size_t i = 0; i < blocks.size(); i += static_cast<size_t>(n)) {
      const size_t end = std::min(blocks.size(), i + static_cast<size_t>(n));
      Chosen c;
      c.name = blocks[i].name;
      if (end - i > 1) c.name += fmt::format("-{}", end - 1);
      for (size_t k = i; k < end; ++k) c.roots.push_back(blocks[k].module);
      chosen.push_back(std::move(c));
    }
    return make_units(root, chosen);
  };
}

WrapPolicy min_num_params(int64_t num_params) {
  return [num_params](Module& root) {
    // Children before parents: a module counts what no unit below it has taken.
    std::vector<NamedModule> modules = root.named_modules();
    std::map<const nn::Parameter*, bool> is_taken;
    std::vector<Chosen> chosen;
    for (auto m = modules.rbegin(); m != modules.rend(); ++m) {
      if (m->name.empty() || dynamic_cast<nn::ModuleList*>(m->module) != nullptr) continue;
      int64_t count = 0;
      const auto parameters = m->module->named_parameters();
      for (const NamedParameter& p : parameters) {
        if (!is_taken[p.parameter]) count += p.parameter->tensor.numel();
      }
      if (count < num_params) continue;
      for (const NamedParameter& p : parameters) is_taken[p.parameter] = true;
      chosen.push_back({m->name, {m->module}});
    }
    std::reverse(chosen.begin(), chosen.end());
    return make_units(root, chosen);
  };
}

WrapPolicy whole_model() {
  return [](Module& root) {
    UnitSpec unit;
    unit.name = "root";
    unit.parameters = root.named_parameters();
    unit.modules = {&root};
    return std::vector<UnitSpec>{std::move(unit)};
  };
}

}  // namespace wrap
}  // namespace tessera::dist
