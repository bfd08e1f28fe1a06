#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "nn/module.h"

namespace tessera::dist {

/// The parameters that are gathered and reduced together, and the modules whose calls do it.
struct UnitSpec {
  std::string name;                            ///< "blocks.3", "embedding", "head", ...
  std::vector<nn::NamedParameter> parameters;  ///< in registration order
  std::vector<nn::Module*> modules;            ///< hooked: a call of one needs the parameters
  bool is_block = false;  ///< one of a sequence of units of like size, whose slots form the ring
  bool is_tied = false;   ///< a parameter has several uses: the unit is in use for longer
};

/// Splits a model into units, in the order in which a forward is expected to call them. Each
/// parameter (a tied one by its first name) is in exactly one unit.
using WrapPolicy = std::function<std::vector<UnitSpec>(nn::Module& root)>;

/// Selects the modules that become units: called with the full name and the module, parents first;
/// the modules below a selected one are not asked (pass `nested` to ask them too; a parameter then
/// belongs to the innermost unit).
using ModulePredicate = std::function<bool(const std::string& name, nn::Module& module)>;

namespace wrap {

/// Units where `predicate` says so, and two more: "embedding" for the parameters registered before
/// the first of them, "head" for those after; "root" for the rest or if nothing is selected.
WrapPolicy by_predicate(ModulePredicate predicate, bool nested = false);

/// The modules of class M.
template <class M>
WrapPolicy by_class(bool nested = false) {
  return by_predicate(
      [](const std::string&, nn::Module& m) { return dynamic_cast<M*>(&m) != nullptr; }, nested);
}

/// The blocks of a transformer: the children of the model's longest list of like modules.
WrapPolicy transformer_block();
/// `n` neighbouring blocks a unit.
WrapPolicy every_n_blocks(int n);
/// Modules with at least `num_params` parameters that no unit below them has taken.
WrapPolicy min_num_params(int64_t num_params);
/// One unit.
WrapPolicy whole_model();

}  // namespace wrap
}  // namespace tessera::dist
