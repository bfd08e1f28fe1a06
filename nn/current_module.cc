#include "nn/current_module.h"

namespace tessera::nn {

class CurrentModule::Hook final : public ModuleHook {
 public:
  Hook(CurrentModule& owner, int index, std::shared_ptr<ModuleHook> inner)
      : owner_(owner), index_(index), inner_(std::move(inner)) {}

  void pre_forward(Module& module, std::span<Tensor*> inputs) override {
    owner_.enter(index_);
    if (inner_ == nullptr) return;
    try {
      inner_->pre_forward(module, inputs);
    } catch (...) {  // no call has begun: nobody will say that it failed
      owner_.leave();
      throw;
    }
  }
  void post_forward(Module& module, std::span<Tensor*> outputs) override {
    if (inner_ != nullptr) inner_->post_forward(module, outputs);
    owner_.leave();
  }
  void on_forward_error(Module& module) noexcept override {
    if (inner_ != nullptr) inner_->on_forward_error(module);
    owner_.leave();
  }

 private:
  CurrentModule& owner_;
  const int index_;
  const std::shared_ptr<ModuleHook> inner_;
};

CurrentModule::CurrentModule(Module& root) : modules_(root.named_modules()) {
  hooks_.resize(modules_.size());
  for (size_t i = 0; i < modules_.size(); ++i) {
    Module& module = *modules_[i].module;
    hooks_[i] = module.shared_hook();
    module.set_hook(std::make_shared<Hook>(*this, static_cast<int>(i), hooks_[i]));
  }
}

CurrentModule::~CurrentModule() {
  for (size_t i = modules_.size(); i-- > 0;) {
    auto* const mine = dynamic_cast<Hook*>(modules_[i].module->hook());
    if (mine != nullptr) modules_[i].module->set_hook(hooks_[i]);
  }
}

}  // namespace tessera::nn
