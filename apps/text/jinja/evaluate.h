#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/text/jinja/ast.h"
#include "apps/text/jinja/template.h"

namespace tessera::text::jinja {

/// The variables of a frame while it runs.
struct Scope {
  Scope(std::shared_ptr<Scope> outer, size_t num_variables)
      : parent(std::move(outer)),
        slots(num_variables),
        charge(static_cast<int64_t>(sizeof(Scope) + num_variables * sizeof(Value))) {}
  std::shared_ptr<Scope> parent;
  std::vector<Value> slots;
  Charge charge;
};
using ScopePtr = std::shared_ptr<Scope>;

/// Text that is written, with where generation blocks lie in it.
struct Output {
  std::string text;
  std::vector<MarkedSpan> spans;
  Charge charge{0};

  void write(const Value& value);
  Value take();  ///< as a string
};

/// One rendering of a template.
class Interpreter {
 public:
  Interpreter(const TemplateTree& tree, const Value& variables, const RenderOptions& options,
              Meter& meter);
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  Rendered render();

  Value evaluate(const Expr& node, const ScopePtr& scope);
  /// A frame's variables as they begin.
  ScopePtr enter(const FrameLayout& layout, const ScopePtr& outer);
  void assign(const Expr& target, const Value& value, const ScopePtr& scope);
  /// What a body writes, as a string.
  Value capture(const Block& body, const ScopePtr& scope);
  /// A for statement over `iterable`, at a depth of recursion.
  Value run_recursive(const Stmt& node, const Value& iterable, const ScopePtr& scope,
                      int64_t depth0);

  const RenderOptions& options() const { return options_; }
  int line() const { return line_; }
  Value make_namespace();
  Meter& meter() { return meter_; }

 private:
  enum class Flow : uint8_t { kNext, kBreak, kContinue };

  Flow run(const Block& block, const ScopePtr& scope);
  Flow run(const Stmt& node, const ScopePtr& scope);
  Flow run_if(const Stmt& node, const ScopePtr& scope);
  Flow run_for(const Stmt& node, const Value& iterable, const ScopePtr& scope, int64_t depth0);
  void run_set(const Stmt& node, const ScopePtr& scope);
  void run_call_block(const Stmt& node, const ScopePtr& scope);
  void run_generation(const Stmt& node, const ScopePtr& scope);
  void write_string(const Value& value);
  Flow run_capture(const Stmt& node, const ScopePtr& scope);
  Flow run_with(const Stmt& node, const ScopePtr& scope);
  Value make_macro(const Stmt& node, const ScopePtr& scope);
  /// What can come to hold itself, or a long chain of its like: emptied at the end, one by one.
  void keep(const ScopePtr& scope);
  void check_namespaces(const Expr& target, const ScopePtr& scope);

  Value evaluate_inner(const Expr& node, const ScopePtr& scope);
  Value evaluate_name(const Expr& node, const ScopePtr& scope);
  Value evaluate_compare(const Expr& node, const ScopePtr& scope);
  Value evaluate_item(const Expr& node, const ScopePtr& scope);
  Value evaluate_filter(const Expr& node, const ScopePtr& scope);
  Value evaluate_dict(const Expr& node, const ScopePtr& scope);
  std::vector<Value> evaluate_all(const std::vector<ExprPtr>& nodes, const ScopePtr& scope);
  void add_arguments(Args& args, const CallArguments& call, const ScopePtr& scope);

  const TemplateTree& tree_;
  const DictObject& variables_;
  const RenderOptions& options_;
  Meter& meter_;
  Output* out_ = nullptr;
  const Value* captured_ = nullptr;  ///< of a block that a filter reads
  int line_ = 1;
  int64_t num_blocks_ = 0;
  std::vector<ScopePtr> kept_scopes_;
  std::vector<std::shared_ptr<const NamespaceObject>> kept_namespaces_;
};

/// A variable of every template; missing if there is none of that name.
Value find_global(std::string_view name);

/// `loop`, which also steps through the items.
std::shared_ptr<LoopObject> make_loop(const Stmt& node, const Value& iterable,
                                      std::unique_ptr<Iterator> iterator, const ScopePtr& scope,
                                      int64_t depth0);
bool next_item(LoopObject& loop, Value& item);

}  // namespace tessera::text::jinja
