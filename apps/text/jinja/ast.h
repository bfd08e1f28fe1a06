#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/value.h"

// What a template is parsed to. Names are resolved to variables of frames (scope.h) before it is
// rendered.

namespace tessera::text::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

/// Where a variable lies: so many frames out, and which of that frame's.
struct Place {
  int num_out = -1, slot = -1;
};

struct CallArguments {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> keyword;
  ExprPtr star, double_star;
};

enum class ExprKind : uint8_t {
  kConst,      ///< value
  kText,       ///< value: text of the template itself
  kName,       ///< text, place
  kNamespace,  ///< an attribute of a namespace as target: text, attribute
  kTuple,      ///< children
  kList,
  kDict,       ///< children: key, value, key, value ...
  kCondition,  ///< children: test, then, else or null
  kOr,
  kAnd,
  kNot,
  kCompare,  ///< children, ops between them
  kBinary,   ///< children, op
  kNegate,
  kPlus,
  kConcat,
  kAttribute,  ///< child, text
  kItem,       ///< children: object, key
  kSlice,      ///< as key of kItem; children: start, stop, step or null
  kFilter,     ///< text; child or null (the text of the block), call
  kTest,
  kCall,  ///< child, call
};

enum class CompareOp : uint8_t { kEq, kNe, kLt, kLe, kGt, kGe, kIn, kNotIn };

struct Expr {
  Expr(ExprKind of, int at) : kind(of), line(at) {}
  ExprKind kind;
  int line;
  bool is_store = false;      ///< of a name: a target
  bool is_parameter = false;  ///< of a name: of a macro or with
  BinaryOp op = BinaryOp::kAdd;
  std::string text, attribute;
  Value value = Value::none();
  std::vector<ExprPtr> children;
  std::vector<CompareOp> ops;
  std::unique_ptr<CallArguments> call;
  Callback callback = nullptr;  ///< of a filter or test; null if there is none of that name
  Place place;
};

struct Stmt;
using Block = std::vector<std::unique_ptr<Stmt>>;

/// What happens to a frame's variable when the frame begins.
struct VariableStart {
  enum class Kind : uint8_t { kParameter, kContext, kCopy, kUndefined } kind = Kind::kParameter;
  std::string name;
  Place copied;
};
/// The variables of a frame: what a body may set without changing what is outside.
struct FrameLayout {
  std::vector<VariableStart> variables;
};

enum class StmtKind : uint8_t {
  kOutput,       ///< exprs
  kSet,          ///< target, value
  kSetBlock,     ///< target, filter or null in value, body
  kIf,           ///< value (test), body, elifs, otherwise
  kFor,          ///< target, value (iterable), test or null, body, otherwise
  kMacro,        ///< text, parameters, defaults, body
  kCallBlock,    ///< value (call), parameters, defaults, body
  kGeneration,   ///< body: what the assistant has written
  kFilterBlock,  ///< value (filter), body
  kWith,         ///< exprs: target, value, ...; body
  kBreak,
  kContinue,
  kLoader,  ///< needs other templates, which there are none of
};

/// What macros and call blocks have.
struct MacroParts {
  std::vector<ExprPtr> parameters;
  std::vector<ExprPtr> defaults;  ///< of the last ones
  std::vector<int> parameter_slots;
  int caller_slot = -1, kwargs_slot = -1, varargs_slot = -1;  ///< if the body uses them
  bool has_explicit_caller = false;
};

struct Stmt {
  Stmt(StmtKind of, int at) : kind(of), line(at) {}
  StmtKind kind;
  int line;
  std::string text;
  ExprPtr target, value, test;
  std::vector<ExprPtr> exprs;
  Block body, elifs, otherwise;
  bool is_recursive = false;
  std::unique_ptr<MacroParts> macro;
  Place place;                         ///< of a macro's name
  int loop_slot = -1;                  ///< of `loop`, if the body uses it
  FrameLayout frame;                   ///< of the body
  FrameLayout test_frame, else_frame;  ///< of a for statement
  /// The targets of a for statement are the same variables in the frame of its test.
  ExprPtr test_target;
};

struct TemplateTree {
  Block body;
  FrameLayout frame;
  bool has_generation = false;
};

/// TemplateError with the line.
TemplateTree parse(std::string_view source, const Limits& limits);

/// Finds the variables that names mean. TemplateError for what Jinja refuses at that point, such as
/// filters that there are not.
void resolve(TemplateTree& tree);

}  // namespace tessera::text::jinja
