#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nn/module.h"

namespace tessera::nn {

/// Knows which module of a model runs, by hooks around those that the modules have. Of the thread
/// that calls the model; it goes before the model, and before whoever set the hooks that were there.
class CurrentModule {
 public:
  explicit CurrentModule(Module& root);
  ~CurrentModule();
  CurrentModule(const CurrentModule&) = delete;
  CurrentModule& operator=(const CurrentModule&) = delete;

  const std::vector<NamedModule>& modules() const { return modules_; }
  /// The innermost call under way, as an index into `modules`; -1 outside of any.
  int index() const { return calls_.empty() ? -1 : calls_.back(); }

  /// What runs from here on belongs to a module that is not called: its backward.
  void enter(int index) { calls_.push_back(index); }
  void leave() { calls_.pop_back(); }

 private:
  class Hook;

  std::vector<NamedModule> modules_;
  std::vector<std::shared_ptr<ModuleHook>> hooks_;  // that were there before
  std::vector<int> calls_;
};

}  // namespace tessera::nn
