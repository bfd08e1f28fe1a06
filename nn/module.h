#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/tensor.h"

// Modules: a tree of named parameters, and the hooks by which sharding gets between them.
//
//   struct Net : nn::Module {
//     nn::Child<nn::Linear> in{this, "in", 784, 100};
//     nn::ChildList<Block> blocks{this, "blocks"};
//     explicit Net(int depth) { for (int i = 0; i < depth; ++i) blocks.emplace_back(100); }
//     Tensor forward(const Tensor& x) {
//       Tensor h = in(x);
//       for (auto& block : blocks) h = block(h);
//       return h;
//     }
//   };
//   Net net(4);
//   net.initialize(seed);
//   Tensor y = nn::call(net, x);
//
// Calling a child by operator() (or the root by `call`) runs its hook around `forward`; calling
// `forward` itself does not. A module and its parents live on one thread.

namespace tessera::nn {

class Module;

/// How a parameter starts. Random values depend only on (seed, full name, element).
struct Init {
  /// Constants and distributions.
  enum class Kind { kZeros, kOnes, kNormal, kUniform };
  Kind kind = Kind::kZeros;
  double a = 0;  ///< kNormal: mean; kUniform: low
  double b = 0;  ///< kNormal: standard deviation; kUniform: high (excluded)

  static Init zeros() { return {Kind::kZeros, 0, 0}; }
  static Init ones() { return {Kind::kOnes, 0, 0}; }
  /// The normal distribution.
  static Init normal(double mean, double stddev) { return {Kind::kNormal, mean, stddev}; }
  /// Uniform in [low, high).
  static Init uniform(double low, double high) { return {Kind::kUniform, low, high}; }
};

/// Fills `x` (contiguous) with elements [first_element, first_element + numel) of what `init` gives
/// the parameter of that full name: a shard gets the same values as the whole would.
void fill_init(const Tensor& x, const Init& init, uint64_t seed, std::string_view full_name,
               int64_t first_element = 0);

/// One trainable tensor. `tensor` may be replaced (by a view into gathered memory); modules read it
/// through the reference that `register_parameter` returned.
struct Parameter {
  std::string name;  ///< within its module
  Tensor tensor;
  Init init;
  bool decay = true;        ///< weight decay applies; by default to matrices only
  bool is_norm = false;     ///< belongs to a norm: may be kept in f32 beside bf16 activations
  bool is_sharded = false;  ///< `fully_shard` gives `tensor` its bytes
  const TensorImpl* registered = nullptr;  ///< `tensor` as it was made

  /// Somebody has given it bytes and written them: by `initialize`, in place, or with a tensor of
  /// their own (not seen: writing through a raw pointer).
  bool has_values() const;
};

/// A parameter, where it hangs and whose it is.
struct NamedParameter {
  std::string name;  ///< full path: "blocks.0.attn.qkv.weight"
  Parameter* parameter;
  Module* owner;
};

/// A tensor that is no parameter. A non-persistent one is not saved; `reset_buffers` recomputes it.
struct Buffer {
  std::string name;
  Tensor tensor;
  bool persistent = true;
};

/// The same of a buffer.
struct NamedBuffer {
  std::string name;
  Buffer* buffer;
  Module* owner;
};

/// The same of a module.
struct NamedModule {
  std::string name;  ///< full path; empty for the root
  Module* module;
};

/// What is special about a parameter.
struct ParameterOptions {
  std::optional<DType> dtype = {};  ///< default: ParameterDtype::current()
  std::optional<bool> decay = {};   ///< default: two or more dimensions and not of a norm
  bool is_norm = false;
};

/// While one lives on this thread, new parameters and buffers have shapes but no bytes.
class DeferredInit {
 public:
  DeferredInit();
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;
  static bool is_active();
};

/// While one lives on this thread, new parameters have this dtype (f32 outside of any).
class ParameterDtype {
 public:
  explicit ParameterDtype(DType dtype);
  ~ParameterDtype();
  ParameterDtype(const ParameterDtype&) = delete;
  ParameterDtype& operator=(const ParameterDtype&) = delete;
  static DType current();

 private:
  DType previous_;
};

/// What runs around the forward of one module; set by `fully_shard`. The tensors are local copies
/// of the arguments and results in order, without undefined ones; a hook may replace them (by
/// identity nodes of the tape, by casts).
class ModuleHook {
 public:
  virtual ~ModuleHook() = default;
  /// Before the forward: may replace its inputs.
  virtual void pre_forward(Module& module, std::span<Tensor*> inputs) = 0;
  /// After the forward: may replace its outputs.
  virtual void post_forward(Module& module, std::span<Tensor*> outputs) = 0;
  /// The forward, or `post_forward`, threw.
  virtual void on_forward_error(Module& module) noexcept = 0;
};

/// Base of all modules: parameters, buffers and children under names, in registration order.
/// Not copyable; children are members of their parent (Child, ChildList).
class Module {
 public:
  Module() = default;
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// One line for `print_tree`: "Linear(768 -> 2304)". By default the name of the class.
  virtual std::string kind() const;
  /// Recomputes the non-persistent buffers (which have their bytes by now).
  virtual void reset_buffers() {}

  /// Own parameters first, then those of the children, depth first. A tied tensor comes once, under
  /// the name of its first use; with `with_ties` under every name.
  std::vector<NamedParameter> named_parameters(bool with_ties = false);
  std::vector<NamedBuffer> named_buffers();
  /// This module under "" and all below it, parents before children.
  std::vector<NamedModule> named_modules();
  /// Calls `f` with each child, in the order of registration.
  void for_each_child(const std::function<void(const std::string& name, Module& child)>& f);
  /// The parameter of that full name (also a tied one's second). Error that names it if missing.
  Parameter& parameter(std::string_view full_name);
  int64_t num_parameters();  ///< elements, tied ones once

  /// Training or evaluation (dropout), for this module and all below it.
  void train(bool training = true);
  bool is_training() const { return training_; }

  /// Gives bytes to every parameter and buffer that has none, and resets the buffers. Error if a
  /// parameter is sharded.
  void materialize();
  /// Fills every parameter that has bytes by (seed, full name, element). Error if one is sharded:
  /// then `Fsdp::initialize` does it.
  void initialize(uint64_t seed);

  /// Whom calls of this module tell; null: nobody.
  void set_hook(std::shared_ptr<ModuleHook> hook) { hook_ = std::move(hook); }
  ModuleHook* hook() const { return hook_.get(); }
  const std::shared_ptr<ModuleHook>& shared_hook() const { return hook_; }

 protected:
  /// The reference stays valid as long as the module.
  Tensor& register_parameter(std::string name, const Shape& shape, const Init& init,
                             const ParameterOptions& options = {});
  /// Registers `parameter_name` of `owner` here as well: one Parameter, two names.
  Tensor& tie(std::string name, Module& owner, std::string_view parameter_name);
  /// A tensor that moves and is saved (if `persistent`) with the module, and is not trained.
  Tensor& register_buffer(std::string name, const Tensor& tensor, bool persistent);
  /// Memory for a parameter or a buffer; without bytes under DeferredInit.
  static Tensor new_tensor(const Shape& shape, DType dtype);

 private:
  template <class M>
  friend class Child;
  struct Use {
    std::string name;
    std::shared_ptr<Parameter> parameter;
  };
  void register_child(const std::string& name, Module* child);
  void take_name(const std::string& name);

  std::vector<Use> parameters_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::pair<std::string, Module*>> children_;
  std::unordered_set<std::string> names_;  // of all of them
  std::shared_ptr<ModuleHook> hook_;
  bool training_ = true;
};

/// The tree as PyTorch users know it, one line a module: name, kind, shapes of its parameters,
/// number of parameters, and what `annotate` says (the unit it belongs to). Neighbours in a list
/// that print the same are folded: "(0-11): 12 x Block(...)".
std::string print_tree(Module& root,
                       const std::function<std::string(const Module&)>& annotate = nullptr);

namespace detail {

inline void collect(Tensor& tensor, std::vector<Tensor*>& out) {
  if (tensor.is_defined()) out.push_back(&tensor);
}
inline void collect(std::vector<Tensor>& tensors, std::vector<Tensor*>& out) {
  for (Tensor& tensor : tensors) collect(tensor, out);
}

template <class T>
constexpr bool is_tensors = std::is_same_v<std::remove_cvref_t<T>, Tensor> ||
                            std::is_same_v<std::remove_cvref_t<T>, std::vector<Tensor>>;

/// Tensors are copied, so that a hook may replace them; everything else is passed on.
template <class T>
using HeldArgument = std::conditional_t<is_tensors<T>, std::remove_cvref_t<T>, T&&>;

template <class T>
void collect_argument(T& argument, std::vector<Tensor*>& out) {
  if constexpr (is_tensors<T>) collect(argument, out);
}

template <class R>
void collect_result(R& result, std::vector<Tensor*>& out) {
  const auto add = [&out](Tensor& tensor) { collect(tensor, out); };
  if constexpr (is_tensors<R>) {
    collect(result, out);
  } else if constexpr (requires { result.for_each_tensor(add); }) {
    result.for_each_tensor(add);
  } else {
    for_each_tensor(result, add);  // found beside the type
  }
}

}  // namespace detail

/// body(module, args...) with the module's hook around it. The hook sees every argument that is a
/// Tensor or a vector of them, and every Tensor of the result: a Tensor, a vector of them, or a
/// struct with `for_each_tensor(f)` as a member or beside it.
template <class M, class F, class... Args>
auto run(M& module, F&& body, Args&&... args) {
  ModuleHook* const hook = module.hook();
  if (hook == nullptr) return body(module, std::forward<Args>(args)...);
  std::tuple<detail::HeldArgument<Args>...> held(std::forward<Args>(args)...);
  std::vector<Tensor*> tensors;
  std::apply([&tensors](auto&... a) { (detail::collect_argument(a, tensors), ...); }, held);
  hook->pre_forward(module, tensors);
  try {
    auto result =
        std::apply([&](auto&&... a) { return body(module, std::forward<decltype(a)>(a)...); },
                   std::move(held));
    tensors.clear();
    detail::collect_result(result, tensors);
    hook->post_forward(module, tensors);
    return result;
  } catch (...) {
    hook->on_forward_error(module);
    throw;
  }
}

/// module.forward(args...) with its hook around it.
template <class M, class... Args>
auto call(M& module, Args&&... args) {
  return run(
      module, [](M& m, auto&&... a) { return m.forward(std::forward<decltype(a)>(a)...); },
      std::forward<Args>(args)...);
}

/// A child module, owned; constructed with the parent and its name there.
template <class M>
class Child {
 public:
  /// None: for a child that some configurations lack (see `emplace`).
  Child() = default;
  template <class... Args>
  Child(Module* parent, const std::string& name, Args&&... args) {
    emplace(parent, name, std::forward<Args>(args)...);
  }

  /// Makes the child; once.
  template <class... Args>
  M& emplace(Module* parent, const std::string& name, Args&&... args) {
    TESSERA_CHECK(module_ == nullptr, "Child: '{}' exists already", name);
    auto module = std::make_unique<M>(std::forward<Args>(args)...);
    parent->register_child(name, module.get());
    module_ = std::move(module);
    return *module_;
  }

  explicit operator bool() const { return module_ != nullptr; }
  M& operator*() const { return *module_; }
  M* operator->() const { return module_.get(); }
  M* get() const { return module_.get(); }

  /// forward(args...) with the hook around it.
  template <class... Args>
  auto operator()(Args&&... args) const {
    return call(*module_, std::forward<Args>(args)...);
  }

 private:
  std::unique_ptr<M> module_;
};

/// What a ChildList is in the tree.
class ModuleList : public Module {
 public:
  std::string kind() const override { return "ModuleList"; }
};

/// Children "name.0", "name.1", ... of the parent.
template <class M>
class ChildList {
 public:
  ChildList(Module* parent, const std::string& name) : list_(parent, name) {}

  /// Makes the next child of these arguments.
  template <class... Args>
  M& emplace_back(Args&&... args) {
    children_.emplace_back(list_.get(), std::to_string(children_.size()),
                           std::forward<Args>(args)...);
    return *children_.back();
  }

  int64_t num_children() const { return static_cast<int64_t>(children_.size()); }
  const Child<M>& operator[](int64_t i) const { return children_[static_cast<size_t>(i)]; }
  auto begin() const { return children_.begin(); }
  auto end() const { return children_.end(); }

 private:
  Child<ModuleList> list_;
  std::vector<Child<M>> children_;
};

}  // namespace tessera::nn
