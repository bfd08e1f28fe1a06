#include "nn/module.h"

#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <typeinfo>
#include <unordered_set>

#include "core/autograd.h"
#include "core/random.h"
#include "core/runtime/allocator.h"
#include "kernels/random/random.h"

namespace tessera::nn {
namespace {

thread_local int deferred_depth = 0;
thread_local DType parameter_dtype = kF32;

std::string join_path(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

std::string with_commas(int64_t value) {
  const std::string digits = std::to_string(value);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

}  // namespace

void fill_init(const Tensor& x, const Init& init, uint64_t seed, std::string_view full_name,
               int64_t first_element) {
  NoGrad no_grad;
  Tensor target = x;
  const PhiloxKey key = make_key(seed, hash_name(full_name));
  switch (init.kind) {
    case Init::Kind::kZeros:
      target.fill_(0);
      return;
    case Init::Kind::kOnes:
      target.fill_(1);
      return;
    case Init::Kind::kNormal:
      fill_normal(target, init.a, init.b, key, first_element);
      return;
    case Init::Kind::kUniform:
      fill_uniform(target, init.a, init.b, key, first_element);
      return;
  }
}

DeferredInit::DeferredInit() {
  ++deferred_depth;
}
DeferredInit::~DeferredInit() {
  --deferred_depth;
}
bool DeferredInit::is_active() {
  return deferred_depth > 0;
}

ParameterDtype::ParameterDtype(DType dtype) : previous_(parameter_dtype) {
  TESSERA_CHECK_DTYPE(is_floating(dtype), "ParameterDtype: expected a floating dtype, got {}",
                      dtype);
  parameter_dtype = dtype;
}
ParameterDtype::~ParameterDtype() {
  parameter_dtype = previous_;
}
DType ParameterDtype::current() {
  return parameter_dtype;
}

std::string Module::kind() const {
  const char* const mangled = typeid(*this).name();
  int status = 0;
  char* const demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : mangled;
  std::free(demangled);
  const size_t scope = name.rfind("::");
  return scope == std::string::npos ? name : name.substr(scope + 2);
}

void Module::take_name(const std::string& name) {
  TESSERA_CHECK(!name.empty() && name.find('.') == std::string::npos,
                "Module: a name is not empty and has no '.', got '{}'", name);
  TESSERA_CHECK(names_.insert(name).second, "Module: '{}' is registered twice in {}", name, kind());
}

Tensor Module::new_tensor(const Shape& shape, DType dtype) {
  if (DeferredInit::is_active()) return empty_unmaterialized(shape, dtype);
  MemoryScope scope(MemoryClass::kParameters);
  return empty(shape, dtype);
}

Tensor& Module::register_parameter(std::string name, const Shape& shape, const Init& init,
                                   const ParameterOptions& options) {
  take_name(name);
  auto parameter = std::make_shared<Parameter>();
  parameter->name = name;
  parameter->init = init;
  parameter->is_norm = options.is_norm;
  parameter->decay = options.decay.value_or(shape.num_dims() >= 2 && !options.is_norm);
  parameter->tensor = new_tensor(shape, options.dtype.value_or(ParameterDtype::current()));
  parameter->tensor.set_requires_grad(true);
  parameter->registered = parameter->tensor.impl();
  parameters_.push_back({std::move(name), std::move(parameter)});
  return parameters_.back().parameter->tensor;
}

Tensor& Module::tie(std::string name, Module& owner, std::string_view parameter_name) {
  const auto use = std::find_if(owner.parameters_.begin(), owner.parameters_.end(),
                                [&](const Use& u) { return u.name == parameter_name; });
  TESSERA_CHECK(use != owner.parameters_.end(), "Module::tie: {} has no parameter '{}'",
                owner.kind(), parameter_name);
  std::shared_ptr<Parameter> parameter = use->parameter;
  take_name(name);
  parameters_.push_back({std::move(name), std::move(parameter)});
  return parameters_.back().parameter->tensor;
}

Tensor& Module::register_buffer(std::string name, const Tensor& tensor, bool persistent) {
  take_name(name);
  buffers_.push_back(std::make_unique<Buffer>(Buffer{std::move(name), tensor, persistent}));
  return buffers_.back()->tensor;
}

void Module::register_child(const std::string& name, Module* child) {
  take_name(name);
  children_.emplace_back(name, child);
}

void Module::for_each_child(const std::function<void(const std::string& name, Module& child)>& f) {
  for (const auto& child : children_) f(child.first, *child.second);
}

std::vector<NamedModule> Module::named_modules() {
  std::vector<NamedModule> modules;
  const std::function<void(const std::string&, Module&)> visit = [&](const std::string& path,
                                                                     Module& module) {
    modules.push_back({path, &module});
    module.for_each_child(
        [&](const std::string& name, Module& child) { visit(join_path(path, name), child); });
  };
  visit("", *this);
  return modules;
}

std::vector<NamedParameter> Module::named_parameters(bool with_ties) {
  std::vector<NamedParameter> parameters;
  std::unordered_set<const Parameter*> seen;
  for (const NamedModule& entry : named_modules()) {
    for (const Use& use : entry.module->parameters_) {
      if (!seen.insert(use.parameter.get()).second && !with_ties) continue;
      parameters.push_back({join_path(entry.name, use.name), use.parameter.get(), entry.module});
    }
  }
  return parameters;
}

std::vector<NamedBuffer> Module::named_buffers() {
  std::vector<NamedBuffer> buffers;
  for (const NamedModule& entry : named_modules()) {
    for (const auto& buffer : entry.module->buffers_) {
      buffers.push_back({join_path(entry.name, buffer->name), buffer.get(), entry.module});
    }
  }
  return buffers;
}

Parameter& Module::parameter(std::string_view full_name) {
  for (const NamedParameter& entry : named_parameters(/*with_ties=*/true)) {
    if (entry.name == full_name) return *entry.parameter;
  }
  TESSERA_CHECK(false, "Module: {} has no parameter '{}'", kind(), full_name);
  std::abort();  // not reached
}

int64_t Module::num_parameters() {
  int64_t numel = 0;
  for (const NamedParameter& entry : named_parameters()) numel += entry.parameter->tensor.numel();
  return numel;
}

void Module::train(bool training) {
  training_ = training;
  for (const auto& child : children_) child.second->train(training);
}

bool Parameter::has_values() const {
  if (!tensor.storage()->is_materialized()) return false;
  return tensor.impl() != registered || *tensor.impl()->version > 0 || tensor.numel() == 0;
}

void Module::materialize() {
  for (const NamedParameter& entry : named_parameters()) {
    TESSERA_CHECK(!entry.parameter->is_sharded,
                  "Module::materialize: parameter '{}' is sharded, expected none that is",
                  entry.name);
    Storage& storage = *entry.parameter->tensor.storage();
    if (!storage.is_materialized()) storage.materialize(MemoryClass::kParameters);
  }
  for (const NamedBuffer& entry : named_buffers()) {
    Storage& storage = *entry.buffer->tensor.storage();
    if (!storage.is_materialized()) storage.materialize(MemoryClass::kParameters);
  }
  for (const NamedModule& entry : named_modules()) entry.module->reset_buffers();
}

void Module::initialize(uint64_t seed) {
  for (const NamedParameter& entry : named_parameters()) {
    const Parameter& parameter = *entry.parameter;
    TESSERA_CHECK(!parameter.is_sharded,
                  "Module::initialize: parameter '{}' is sharded, expected Fsdp::initialize",
                  entry.name);
    if (!parameter.tensor.storage()->is_materialized()) continue;
    fill_init(parameter.tensor.detach(), parameter.init, seed, entry.name);
  }
}

namespace {

struct TreePrinter {
  const std::function<std::string(const Module&)>& annotate;

  /// The text after "(name): ", without a newline at the end.
  std::string describe(Module& module, int depth) const {
    std::string line = module.kind();
    std::vector<std::string> notes;
    // Parameters that belong to the module itself; those below are printed there.
    for (const NamedParameter& entry : module.named_parameters(/*with_ties=*/true)) {
      if (entry.owner != &module) continue;
      notes.push_back(fmt::format("{} {} {}", entry.name, entry.parameter->tensor.shape(),
                                  entry.parameter->tensor.dtype()));
    }
    const int64_t numel = module.num_parameters();
    if (numel > 0)
      notes.push_back(with_commas(numel) + (numel == 1 ? " parameter" : " parameters"));
    if (annotate != nullptr) {
      const std::string note = annotate(module);
      if (!note.empty()) notes.push_back(note);
    }
    if (!notes.empty()) line += fmt::format("  # {}", fmt::join(notes, ", "));
    for (const std::string& child : describe_children(module, depth + 1)) line += "\n" + child;
    return line;
  }

  /// Notes that differ by the child's own name only, such as the unit blocks.7 of block 7, are one
  /// of their kind: blocks.*.
  static std::string without_own_name(const std::string& text, const std::string& name) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
      const size_t end = i + 1 + name.size();
      const bool is_own = text[i] == '.' && text.compare(i + 1, name.size(), name) == 0 &&
                          (end == text.size() || std::strchr(".,\n", text[end]) != nullptr);
      out += is_own ? ".*" : std::string(1, text[i]);
      i = is_own ? end : i + 1;
    }
    return out;
  }

  std::vector<std::string> describe_children(Module& module, int depth) const {
    struct Run {
      std::string first, last, text, folded;
      int64_t count;
    };
    const bool is_list = dynamic_cast<ModuleList*>(&module) != nullptr;
    std::vector<Run> runs;
    module.for_each_child([&](const std::string& name, Module& child) {
      std::string text = describe(child, depth), folded = without_own_name(text, name);
      if (is_list && !runs.empty() && runs.back().folded == folded) {
        runs.back().last = name;
        ++runs.back().count;
      } else {
        runs.push_back({name, name, std::move(text), std::move(folded), 1});
      }
    });
    const std::string indent(static_cast<size_t>(2 * depth), ' ');
    std::vector<std::string> lines;
    for (const Run& run : runs) {
      lines.push_back(run.count == 1 ? fmt::format("{}({}): {}", indent, run.first, run.text)
                                     : fmt::format("{}({}-{}): {} x {}", indent, run.first,
                                                   run.last, run.count, run.folded));
    }
    return lines;
  }
};

}  // namespace

std::string print_tree(Module& root, const std::function<std::string(const Module&)>& annotate) {
  return TreePrinter{annotate}.describe(root, 0) + "\n";
}

}  // namespace tessera::nn
