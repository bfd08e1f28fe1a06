#include "apps/text/jinja/parser.h"

namespace tessera::text::jinja {
namespace {

using StmtPtr = std::unique_ptr<Stmt>;

class Parser : public ExprParser {
 public:
  using ExprParser::ExprParser;

  TemplateTree run() {
    TemplateTree tree;
    tree.body = block({});
    tree.has_generation = has_generation_;
    return tree;
  }

 private:
  bool at_end_of(const std::vector<std::string_view>& ends) const {
    return std::any_of(ends.begin(), ends.end(),
                       [&](std::string_view end) { return at_name(end); });
  }

  /// Statements up to a tag of `ends`, which is current then. Without `ends` to the end of the text.
  Block block(const std::vector<std::string_view>& ends) {
    const Nested level(*this);
    Block body;
    StmtPtr output;
    const auto flush = [&] {
      if (output != nullptr) body.push_back(std::move(output));
      output = nullptr;
    };
    const auto add = [&](ExprPtr node) {
      if (output == nullptr) output = std::make_unique<Stmt>(StmtKind::kOutput, node->line);
      output->exprs.push_back(std::move(node));
    };
    for (;;) {
      if (current().type == TokenType::kData) {
        auto text = std::make_unique<Expr>(ExprKind::kText, current().line);
        text->value = Value(advance().text);
        add(std::move(text));
      } else if (current().type == TokenType::kVariableBegin) {
        advance();
        add(tuple(false, true));
        expect_type(TokenType::kVariableEnd, "the end of print statement");
      } else if (current().type == TokenType::kBlockBegin) {
        flush();
        advance();
        if (at_end_of(ends)) return body;
        body.push_back(statement());
        expect_type(TokenType::kBlockEnd, "the end of statement block");
      } else {
        flush();
        if (!ends.empty()) {
          fail_here(fmt::format("Unexpected end of template. Expected '{}'", ends[0]));
        }
        return body;
      }
    }
  }

  /// The body of a statement: behind the rest of its tag.
  Block statements(const std::vector<std::string_view>& ends) {
    skip_operator(":");
    expect_type(TokenType::kBlockEnd, "the end of statement block");
    return block(ends);
  }

  Block statements_and_end(std::string_view end) {
    Block body = statements({end});
    advance();
    return body;
  }

  StmtPtr statement() {
    if (current().type != TokenType::kName) fail_here("tag name expected");
    const int line = current().line;
    const std::string tag = advance().text;
    if (tag == "set") return set(line);
    if (tag == "if") return condition(line);
    if (tag == "for") return loop(line);
    if (tag == "macro") return macro(line);
    if (tag == "call") return call_block(line);
    if (tag == "generation") return generation(line);
    if (tag == "filter") return filter_block(line);
    if (tag == "with") return with(line);
    if (tag == "print") return print(line);
    if (tag == "break") return std::make_unique<Stmt>(StmtKind::kBreak, line);
    if (tag == "continue") return std::make_unique<Stmt>(StmtKind::kContinue, line);
    if (tag == "include" || tag == "extends") return loader(line, tag);
    for (const std::string_view other : {"block", "import", "from", "autoescape"}) {
      if (tag == other) fail("line {}: the tag '{}' is not supported", line, tag);
    }
    fail("line {}: Encountered unknown tag '{}'.", line, tag);
  }

  StmtPtr set(int line) {
    auto node = std::make_unique<Stmt>(StmtKind::kSet, line);
    node->target = assign_target(true);
    if (skip_operator("=")) {
      node->value = tuple(false, true);
      return node;
    }
    node->kind = StmtKind::kSetBlock;
    if (at_operator("|")) node->value = filters(nullptr, false);
    node->body = statements_and_end("endset");
    return node;
  }

  StmtPtr condition(int line) {
    auto node = std::make_unique<Stmt>(StmtKind::kIf, line);
    const auto branch = [&](Stmt& at) {
      at.value = tuple(false, false);
      at.body = statements({"elif", "else", "endif"});
    };
    branch(*node);
    for (;;) {
      const Token& end = advance();
      if (end.text == "elif") {
        auto other = std::make_unique<Stmt>(StmtKind::kIf, end.line);
        branch(*other);
        node->elifs.push_back(std::move(other));
        continue;
      }
      if (end.text == "else") node->otherwise = statements_and_end("endif");
      return node;
    }
  }

  StmtPtr loop(int line) {
    auto node = std::make_unique<Stmt>(StmtKind::kFor, line);
    node->target = assign_target(false, "in");
    expect_keyword("in");
    node->value = tuple(false, false, "recursive");
    if (skip_name("if")) node->test = expression();
    node->is_recursive = skip_name("recursive");
    node->body = statements({"endfor", "else"});
    if (advance().text == "else") node->otherwise = statements_and_end("endfor");
    return node;
  }

  void signature(Stmt& node) {
    expect_operator("(");
    MacroParts& macro = *node.macro;
    while (!at_operator(")")) {
      if (!macro.parameters.empty()) expect_operator(",");
      ExprPtr parameter = name_target();
      parameter->is_parameter = true;
      for (const ExprPtr& other : macro.parameters) {
        if (other->text == parameter->text) {
          fail_here("duplicate argument '" + parameter->text + "' in a macro");
        }
      }
      if (skip_operator("=")) {
        macro.defaults.push_back(expression());
      } else if (!macro.defaults.empty()) {
        fail_here("non-default argument follows default argument");
      }
      macro.parameters.push_back(std::move(parameter));
    }
    expect_operator(")");
  }

  StmtPtr macro(int line) {
    auto node = std::make_unique<Stmt>(StmtKind::kMacro, line);
    node->macro = std::make_unique<MacroParts>();
    node->target = name_target();
    node->text = node->target->text;
    signature(*node);
    node->body = statements_and_end("endmacro");
    return node;
  }

  StmtPtr call_block(int line) {
    auto node = std::make_unique<Stmt>(StmtKind::kCallBlock, line);
    node->macro = std::make_unique<MacroParts>();
    if (at_operator("(")) signature(*node);
    node->value = expression();
    if (node->value->kind != ExprKind::kCall) fail("line {}: expected call", line);
    node->body = statements_and_end("endcall");
    return node;
  }

  StmtPtr generation(int line) {
    auto node = std::make_unique<Stmt>(StmtKind::kGeneration, line);
    node->macro = std::make_unique<MacroParts>();
    node->body = statements_and_end("endgeneration");
    has_generation_ = true;
    return node;
  }

  StmtPtr filter_block(int line) {
    auto node = std::make_unique<Stmt>(StmtKind::kFilterBlock, line);
    node->value = filters(nullptr, true);
    node->body = statements_and_end("endfilter");
    return node;
  }

  StmtPtr with(int line) {
    auto node = std::make_unique<Stmt>(StmtKind::kWith, line);
    while (current().type != TokenType::kBlockEnd) {
      if (!node->exprs.empty()) expect_operator(",");
      ExprPtr target = assign_target(false);
      mark_parameter(*target);
      node->exprs.push_back(std::move(target));
      expect_operator("=");
      node->exprs.push_back(expression());
    }
    node->body = statements_and_end("endwith");
    return node;
  }

  static void mark_parameter(Expr& target) {
    target.is_parameter = true;
    for (const ExprPtr& child : target.children) mark_parameter(*child);
  }

  StmtPtr print(int line) {
    auto node = std::make_unique<Stmt>(StmtKind::kOutput, line);
    while (current().type != TokenType::kBlockEnd) {
      if (!node->exprs.empty()) expect_operator(",");
      node->exprs.push_back(expression());
    }
    return node;
  }

  StmtPtr loader(int line, const std::string& tag) {
    auto node = std::make_unique<Stmt>(StmtKind::kLoader, line);
    node->text = tag;
    node->value = expression();
    while (current().type == TokenType::kName) advance();  // ignore missing, with context
    return node;
  }

  bool has_generation_ = false;
};

}  // namespace

TemplateTree parse(std::string_view source, const Limits& limits) {
  if (static_cast<int64_t>(source.size()) > limits.max_source_nbytes) {
    fail("has {} bytes, expected at most {}", source.size(), limits.max_source_nbytes);
  }
  TemplateTree tree = Parser(tokenize(source), limits.max_source_depth).run();
  resolve(tree);
  return tree;
}

}  // namespace tessera::text::jinja
