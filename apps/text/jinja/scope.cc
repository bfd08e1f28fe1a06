// Which variable a name means. Jinja decides that for a whole frame (the template, the body of a
// loop, macro, with, or of a block that captures) before it runs: a name that a frame sets is its
// own from the beginning, with the outer one's value to begin with, or undefined where the first
// thing that happens to it is that it is set.

#include <algorithm>
#include <map>
#include <set>

#include "apps/text/jinja/ast.h"
#include "apps/text/jinja/walk.h"

namespace tessera::text::jinja {
namespace {

enum class Load : uint8_t { kParameter, kResolve, kAlias, kUndefined };

/// The names of one frame, with what they begin as.
struct Symbols {
  const Symbols* parent = nullptr;
  std::map<std::string, Load> loads;
  std::set<std::string> stores;

  bool knows(const std::string& name) const {
    return loads.count(name) > 0 || (parent != nullptr && parent->knows(name));
  }
  bool is_outside(const std::string& name) const {
    return parent != nullptr && parent->knows(name);
  }
  void declare(const std::string& name) {
    stores.insert(name);
    loads[name] = Load::kParameter;
  }
  void store(const std::string& name) {
    stores.insert(name);
    if (loads.count(name) == 0) loads[name] = is_outside(name) ? Load::kAlias : Load::kUndefined;
  }
  void load(const std::string& name) {
    if (!knows(name)) loads[name] = Load::kResolve;
  }

  /// Joins the branches of an if: what only some of them set may keep its value from before.
  void join(const std::vector<Symbols>& branches) {
    std::set<std::string> set_in_some;
    for (const Symbols& branch : branches) {
      for (const std::string& name : branch.stores) {
        if (stores.count(name) == 0) set_in_some.insert(name);
      }
    }
    for (const Symbols& branch : branches) {
      for (const auto& [name, load] : branch.loads) loads[name] = load;
    }
    for (const std::string& name : set_in_some) {
      stores.insert(name);
      loads[name] = is_outside(name) ? Load::kAlias : Load::kResolve;
    }
  }
};

/// Reads what belongs to a frame; what has a frame of its own is left out.
class FrameReader {
 public:
  explicit FrameReader(Symbols& symbols) : symbols_(&symbols) {}

  void read(const Expr& node, bool is_parameter = false) {
    if (node.kind == ExprKind::kName) {
      if (is_parameter || node.is_parameter) {
        symbols_->declare(node.text);
      } else if (node.is_store) {
        symbols_->store(node.text);
      } else {
        symbols_->load(node.text);
      }
    }
    if (node.kind == ExprKind::kNamespace) symbols_->load(node.text);
    for_each_child(node, [&](const Expr& child) { read(child, is_parameter); });
  }

  void read(const Block& block) {
    for (const auto& stmt : block) read(*stmt);
  }

  void read(const Stmt& node) {
    switch (node.kind) {
      case StmtKind::kOutput:
        for (const ExprPtr& each : node.exprs) read(*each);
        break;
      case StmtKind::kSet:
        read(*node.value);
        read(*node.target);
        break;
      case StmtKind::kSetBlock:
        read(*node.target);
        break;
      case StmtKind::kIf:
        read_if(node);
        break;
      case StmtKind::kMacro:
        symbols_->store(node.text);
        break;
      case StmtKind::kFor:
      case StmtKind::kCallBlock:
      case StmtKind::kFilterBlock:
      case StmtKind::kLoader:
        read(*node.value);
        break;
      case StmtKind::kWith:
        for (size_t i = 1; i < node.exprs.size(); i += 2) read(*node.exprs[i]);
        break;
      case StmtKind::kGeneration:
      case StmtKind::kBreak:
      case StmtKind::kContinue:
        break;
    }
  }

 private:
  void read_if(const Stmt& node) {
    read(*node.value);
    Symbols* const whole = symbols_;
    std::vector<Symbols> branches;
    for (const Block* block : {&node.body, &node.elifs, &node.otherwise}) {
      Symbols branch = *whole;
      symbols_ = &branch;
      read(*block);
      branches.push_back(std::move(branch));
    }
    symbols_ = whole;
    whole->join(branches);
  }

  Symbols* symbols_;
};

/// Which of `names` a body reads before it sets them.
std::set<std::string> undeclared(const Block& body, std::set<std::string> names) {
  std::set<std::string> found;
  for_each_name(body, [&](const Expr& name) {
    if (name.is_store || name.is_parameter) {
      names.erase(name.text);
    } else if (names.count(name.text) > 0) {
      found.insert(name.text);
    }
  });
  return found;
}

struct Frame {
  Frame* parent = nullptr;
  Symbols symbols;
  std::map<std::string, int> slots;
};

ExprPtr clone_target(const Expr& node) {
  auto copy = std::make_unique<Expr>(node.kind, node.line);
  copy->text = node.text;
  copy->is_store = node.is_store;
  for (const ExprPtr& child : node.children) copy->children.push_back(clone_target(*child));
  return copy;
}

class Resolver {
 public:
  void run(TemplateTree& tree) {
    Frame frame;
    FrameReader(frame.symbols).read(tree.body);
    lay_out(frame, tree.frame);
    resolve(tree.body, frame, {});
  }

 private:
  /// What holds where a statement stands.
  struct Where {
    bool is_soft = false;  ///< in an if, where filters that there are not may stand unused
    bool is_in_loop = false;
  };

  static Frame inner(Frame& parent) {
    Frame frame;
    frame.parent = &parent;
    frame.symbols.parent = &parent.symbols;
    return frame;
  }

  /// Numbers the frame's variables.
  static void lay_out(Frame& frame, FrameLayout& layout) {
    for (const auto& [name, load] : frame.symbols.loads) {
      frame.slots[name] = static_cast<int>(layout.variables.size());
      VariableStart start;
      start.name = name;
      using StartKind = VariableStart::Kind;
      start.kind = load == Load::kParameter ? StartKind::kParameter
                   : load == Load::kResolve ? StartKind::kContext
                   : load == Load::kAlias   ? StartKind::kCopy
                                            : StartKind::kUndefined;
      if (load == Load::kAlias) start.copied = find(*frame.parent, name, 1);
      layout.variables.push_back(start);
    }
  }

  static Place find(const Frame& frame, const std::string& name, int num_out = 0) {
    for (const Frame* each = &frame; each != nullptr; each = each->parent, ++num_out) {
      const auto slot = each->slots.find(name);
      if (slot != each->slots.end()) return {num_out, slot->second};
    }
    fail("the name '{}' is not known where it stands", name);
  }

  void resolve(Expr& node, Frame& frame, bool is_soft) {
    if (node.kind == ExprKind::kName || node.kind == ExprKind::kNamespace) {
      node.place = find(frame, node.text);
    }
    if (node.kind == ExprKind::kFilter || node.kind == ExprKind::kTest) {
      const bool is_filter = node.kind == ExprKind::kFilter;
      node.callback = is_filter ? find_filter(node.text) : find_test(node.text);
      if (node.callback == nullptr && is_filter && is_unsupported_filter(node.text)) {
        fail("line {}: the filter '{}' is not supported", node.line, node.text);
      }
      if (node.callback == nullptr && !is_soft) {
        fail("line {}: No {} named '{}'.", node.line, is_filter ? "filter" : "test", node.text);
      }
    }
    const bool is_inner_soft = is_soft || node.kind == ExprKind::kCondition;
    for_each_child(
        node, [&](const Expr& child) { resolve(const_cast<Expr&>(child), frame, is_inner_soft); });
  }

  void resolve(Block& block, Frame& frame, Where where) {
    for (const auto& stmt : block) resolve(*stmt, frame, where);
  }

  void resolve(Stmt& node, Frame& frame, Where where) {
    switch (node.kind) {
      case StmtKind::kOutput:
        for (const ExprPtr& each : node.exprs) resolve(*each, frame, where.is_soft);
        break;
      case StmtKind::kSet:
        resolve(*node.value, frame, where.is_soft);
        resolve(*node.target, frame, where.is_soft);
        break;
      case StmtKind::kIf:
        resolve_if(node, frame, where);
        break;
      case StmtKind::kFor:
        resolve_for(node, frame, where);
        break;
      case StmtKind::kMacro:
        node.place = find(frame, node.text);
        resolve_macro(node, frame);
        break;
      case StmtKind::kCallBlock:
        resolve_macro(node, frame);
        resolve(*node.value, frame, where.is_soft);
        break;
      case StmtKind::kGeneration:
        resolve_macro(node, frame);
        break;
      case StmtKind::kSetBlock:
      case StmtKind::kFilterBlock:
      case StmtKind::kWith:
        resolve_capture(node, frame, where);
        break;
      case StmtKind::kLoader:
        resolve(*node.value, frame, where.is_soft);
        break;
      case StmtKind::kBreak:
      case StmtKind::kContinue:
        if (!where.is_in_loop) {
          fail("line {}: '{}' outside loop", node.line,
               node.kind == StmtKind::kBreak ? "break" : "continue");
        }
        break;
    }
  }

  void resolve_if(Stmt& node, Frame& frame, Where where) {
    where.is_soft = true;
    resolve(*node.value, frame, true);
    resolve(node.body, frame, where);
    resolve(node.elifs, frame, where);
    resolve(node.otherwise, frame, where);
  }

  void resolve_for(Stmt& node, Frame& frame, Where where) {
    for_each_name(node, [&](const Expr& name) {
      if (name.is_store && name.text == "loop") {
        fail("line {}: Can't assign to special loop variable in for-loop target", name.line);
      }
    });
    resolve(*node.value, frame, where.is_soft);

    Frame loop = inner(frame);
    const bool has_loop = node.is_recursive || !undeclared(node.body, {"loop"}).empty();
    if (has_loop) loop.symbols.declare("loop");
    FrameReader reader(loop.symbols);
    reader.read(*node.target, true);
    reader.read(node.body);
    lay_out(loop, node.frame);
    if (has_loop) node.loop_slot = loop.slots["loop"];
    resolve(*node.target, loop, false);
    resolve(node.body, loop, {false, true});

    if (node.test != nullptr) {
      Frame test = inner(frame);
      FrameReader test_reader(test.symbols);
      test_reader.read(*node.target, true);
      test_reader.read(*node.test);
      lay_out(test, node.test_frame);
      node.test_target = clone_target(*node.target);
      resolve(*node.test_target, test, false);
      resolve(*node.test, test, false);
    }
    Frame otherwise = inner(frame);
    FrameReader(otherwise.symbols).read(node.otherwise);
    lay_out(otherwise, node.else_frame);
    resolve(node.otherwise, otherwise, {false, where.is_in_loop && !node.is_recursive});
  }

  void resolve_macro(Stmt& node, Frame& outer) {
    MacroParts& macro = *node.macro;
    Frame frame = inner(outer);
    const auto read = [&] {
      FrameReader reader(frame.symbols);
      for (const ExprPtr& each : macro.parameters) reader.read(*each);
      for (const ExprPtr& each : macro.defaults) reader.read(*each);
      reader.read(node.body);
    };
    read();
    const auto used = undeclared(node.body, {"caller", "kwargs", "varargs"});
    const auto has_parameter = [&](std::string_view name) {
      return std::any_of(macro.parameters.begin(), macro.parameters.end(),
                         [&](const ExprPtr& each) { return each->text == name; });
    };
    macro.has_explicit_caller = has_parameter("caller");
    if (used.count("caller") > 0 && macro.has_explicit_caller) check_caller_default(node);
    for (const std::string& name : used) {
      if (!has_parameter(name)) frame.symbols.declare(name);
    }
    read();
    lay_out(frame, node.frame);
    for (const ExprPtr& each : macro.parameters) {
      macro.parameter_slots.push_back(frame.slots[each->text]);
      resolve(*each, frame, false);
    }
    const auto slot_of = [&](const std::string& name) {
      return used.count(name) > 0 && !has_parameter(name) ? frame.slots[name] : -1;
    };
    macro.caller_slot = slot_of("caller");
    macro.kwargs_slot = slot_of("kwargs");
    macro.varargs_slot = slot_of("varargs");
    for (const ExprPtr& each : macro.defaults) resolve(*each, frame, false);
    resolve(node.body, frame, {});
  }

  static void check_caller_default(const Stmt& node) {
    const size_t first = node.macro->parameters.size() - node.macro->defaults.size();
    for (size_t i = 0; i < first; ++i) {
      if (node.macro->parameters[i]->text == "caller") {
        fail("line {}: the special \"caller\" argument must be omitted or be given a default",
             node.line);
      }
    }
  }

  void resolve_capture(Stmt& node, Frame& outer, Where where) {
    Frame frame = inner(outer);
    FrameReader reader(frame.symbols);
    for (size_t i = 0; i < node.exprs.size(); i += 2) reader.read(*node.exprs[i]);
    reader.read(node.body);
    if (node.kind == StmtKind::kFilterBlock) reader.read(*node.value);
    lay_out(frame, node.frame);
    for (size_t i = 0; i < node.exprs.size(); i += 2) {
      resolve(*node.exprs[i], frame, false);
      resolve(*node.exprs[i + 1], outer, where.is_soft);
    }
    if (node.value != nullptr) resolve(*node.value, frame, false);
    if (node.target != nullptr) resolve(*node.target, outer, where.is_soft);
    resolve(node.body, frame, {false, where.is_in_loop});
  }
};

}  // namespace

void resolve(TemplateTree& tree) {
  Resolver().run(tree);
}

}  // namespace tessera::text::jinja
