#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "apps/text/jinja/parser.h"

namespace tessera::text::jinja {
namespace {

constexpr int64_t kMaxNodes = 100'000;
constexpr int kMaxChain = 190;  ///< a + b + c ...: each operator is one level of the tree

bool is_one_of(const Token& token, std::initializer_list<std::string_view> texts) {
  for (const std::string_view text : texts) {
    if (token.is(TokenType::kOperator, text)) return true;
  }
  return false;
}

/// Makes a target of what was read as an expression; false if it cannot be one.
bool make_store(Expr& target) {
  if (target.kind == ExprKind::kNamespace) return true;
  if (target.kind == ExprKind::kName) {
    target.is_store = true;
    return true;
  }
  if (target.kind != ExprKind::kTuple) return false;
  for (const ExprPtr& child : target.children) {
    if (!make_store(*child)) return false;
  }
  return true;
}

}  // namespace

ExprParser::Nested::Nested(ExprParser& parser) : parser_(parser) {
  if (parser.depth_ >= parser.max_depth_) {
    parser.fail_here(
        fmt::format("nests deeper than {} levels, which is the limit", parser.max_depth_));
  }
  ++parser.depth_;
}

const Token& ExprParser::advance() {
  const Token& token = tokens_[at_];
  if (at_ + 1 < tokens_.size()) ++at_;
  return token;
}

bool ExprParser::skip_operator(std::string_view text) {
  if (!at_operator(text)) return false;
  advance();
  return true;
}

bool ExprParser::skip_name(std::string_view text) {
  if (!at_name(text)) return false;
  advance();
  return true;
}

void ExprParser::fail_here(const std::string& message) const {
  fail("line {}: {}", current().line, message);
}

void ExprParser::expect_operator(std::string_view text) {
  if (skip_operator(text)) return;
  fail_here(fmt::format("expected token '{}', got '{}'", text, describe(current())));
}

std::string ExprParser::expect_name() {
  if (current().type != TokenType::kName) {
    fail_here(fmt::format("expected token 'name', got '{}'", describe(current())));
  }
  return advance().text;
}

void ExprParser::expect_keyword(std::string_view text) {
  if (skip_name(text)) return;
  fail_here(fmt::format("expected token '{}', got '{}'", text, describe(current())));
}

void ExprParser::expect_type(TokenType type, std::string_view what) {
  if (current().type != type) {
    fail_here(fmt::format("expected {}, got '{}'", what, describe(current())));
  }
  advance();
}

ExprPtr ExprParser::make(ExprKind kind, int line) {
  if (++num_nodes_ > kMaxNodes) {
    fail_here(fmt::format("has more than {} expressions, which is the limit", kMaxNodes));
  }
  return std::make_unique<Expr>(kind, line);
}

ExprPtr ExprParser::make(ExprKind kind, int line, ExprPtr a, ExprPtr b) {
  ExprPtr node = make(kind, line);
  node->children.push_back(std::move(a));
  if (b != nullptr) node->children.push_back(std::move(b));
  return node;
}

int ExprParser::chain_depth(int count) {
  if (count > kMaxChain) {
    fail_here(fmt::format("has more than {} operators in a row, which is the limit", kMaxChain));
  }
  return count + 1;
}

ExprPtr ExprParser::expression(bool with_condition) {
  const Nested level(*this);
  return with_condition ? condition() : disjunction();
}

ExprPtr ExprParser::condition() {
  const Nested level(*this);
  ExprPtr node = disjunction();
  for (int count = 0; skip_name("if"); count = chain_depth(count)) {
    ExprPtr result = make(ExprKind::kCondition, current().line);
    result->children.push_back(disjunction());
    result->children.push_back(std::move(node));
    result->children.push_back(skip_name("else") ? condition() : nullptr);
    node = std::move(result);
  }
  return node;
}

ExprPtr ExprParser::disjunction() {
  ExprPtr node = conjunction();
  for (int count = 0; skip_name("or"); count = chain_depth(count)) {
    node = make(ExprKind::kOr, current().line, std::move(node), conjunction());
  }
  return node;
}

ExprPtr ExprParser::conjunction() {
  ExprPtr node = negation();
  for (int count = 0; skip_name("and"); count = chain_depth(count)) {
    node = make(ExprKind::kAnd, current().line, std::move(node), negation());
  }
  return node;
}

ExprPtr ExprParser::negation() {
  if (!at_name("not")) return comparison();
  const Nested level(*this);
  const int line = advance().line;
  return make(ExprKind::kNot, line, negation(), nullptr);
}

ExprPtr ExprParser::comparison() {
  ExprPtr node = make(ExprKind::kCompare, current().line);
  node->children.push_back(sum());
  for (;;) {
    constexpr std::pair<std::string_view, CompareOp> kOps[] = {
        {"==", CompareOp::kEq}, {"!=", CompareOp::kNe}, {"<", CompareOp::kLt},
        {"<=", CompareOp::kLe}, {">", CompareOp::kGt},  {">=", CompareOp::kGe}};
    const auto* op = std::find_if(std::begin(kOps), std::end(kOps),
                                  [&](const auto& each) { return at_operator(each.first); });
    if (op != std::end(kOps)) {
      advance();
      node->ops.push_back(op->second);
    } else if (skip_name("in")) {
      node->ops.push_back(CompareOp::kIn);
    } else if (at_name("not") && look().is(TokenType::kName, "in")) {
      advance();
      advance();
      node->ops.push_back(CompareOp::kNotIn);
    } else {
      break;
    }
    node->children.push_back(sum());
  }
  return node->ops.empty() ? std::move(node->children[0]) : std::move(node);
}

ExprPtr ExprParser::sum() {
  ExprPtr node = concat();
  for (int count = 0; is_one_of(current(), {"+", "-"}); count = chain_depth(count)) {
    const Token& token = advance();
    const BinaryOp op = token.text == "+" ? BinaryOp::kAdd : BinaryOp::kSub;
    node = make(ExprKind::kBinary, token.line, std::move(node), concat());
    node->op = op;
  }
  return node;
}

ExprPtr ExprParser::concat() {
  ExprPtr node = product();
  if (!at_operator("~")) return node;
  ExprPtr all = make(ExprKind::kConcat, current().line, std::move(node), nullptr);
  while (skip_operator("~")) all->children.push_back(product());
  return all;
}

ExprPtr ExprParser::product() {
  ExprPtr node = power();
  for (int count = 0; is_one_of(current(), {"*", "/", "//", "%"}); count = chain_depth(count)) {
    const Token& token = advance();
    const BinaryOp op = token.text == "*"    ? BinaryOp::kMul
                        : token.text == "/"  ? BinaryOp::kDiv
                        : token.text == "//" ? BinaryOp::kFloorDiv
                                             : BinaryOp::kMod;
    node = make(ExprKind::kBinary, token.line, std::move(node), power());
    node->op = op;
  }
  return node;
}

/// From left to right, and a sign before it binds more: both other than Python's.
ExprPtr ExprParser::power() {
  ExprPtr node = unary(true);
  for (int count = 0; at_operator("**"); count = chain_depth(count)) {
    const int line = advance().line;
    node = make(ExprKind::kBinary, line, std::move(node), unary(true));
    node->op = BinaryOp::kPow;
  }
  return node;
}

ExprPtr ExprParser::unary(bool with_filter) {
  const Nested level(*this);
  ExprPtr node;
  if (is_one_of(current(), {"-", "+"})) {
    const Token& token = advance();
    const ExprKind kind = token.text == "-" ? ExprKind::kNegate : ExprKind::kPlus;
    node = make(kind, token.line, unary(false), nullptr);
  } else {
    node = primary(false);
  }
  node = postfix(std::move(node));
  return with_filter ? filter_expr(std::move(node)) : std::move(node);
}

ExprPtr ExprParser::name(bool with_namespace) {
  const Token& token = advance();
  ExprPtr node;
  if (token.text == "true" || token.text == "True" || token.text == "false" ||
      token.text == "False") {
    node = make(ExprKind::kConst, token.line);
    node->value = Value(token.text == "true" || token.text == "True");
  } else if (token.text == "none" || token.text == "None") {
    node = make(ExprKind::kConst, token.line);
  } else if (with_namespace && at_operator(".")) {
    advance();
    node = make(ExprKind::kNamespace, token.line);
    node->text = token.text;
    node->attribute = expect_name();
  } else {
    node = make(ExprKind::kName, token.line);
    node->text = token.text;
  }
  return node;
}

ExprPtr ExprParser::number() {
  const Token& token = advance();
  ExprPtr node = make(ExprKind::kConst, token.line);
  if (token.type == TokenType::kFloat) {
    node->value = Value(std::strtod(token.text.c_str(), nullptr));
    return node;
  }
  const bool has_base = token.text.size() > 2 && token.text[0] == '0' && token.text[1] > '9';
  const char kind = has_base ? static_cast<char>(token.text[1] | 0x20) : 'd';
  const int base = kind == 'b' ? 2 : kind == 'o' ? 8 : kind == 'x' ? 16 : 10;
  int64_t value = 0;
  const char* const end = token.text.data() + token.text.size();
  const auto result = std::from_chars(token.text.data() + (has_base ? 2 : 0), end, value, base);
  if (result.ec != std::errc() || result.ptr != end) {
    fail("line {}: the integer {} has more than 64 bits", token.line, describe(token));
  }
  node->value = Value(value);
  return node;
}

ExprPtr ExprParser::primary(bool with_namespace) {
  switch (current().type) {
    case TokenType::kName:
      return name(with_namespace);
    case TokenType::kInteger:
    case TokenType::kFloat:
      return number();
    case TokenType::kString: {
      ExprPtr node = make(ExprKind::kConst, current().line);
      std::string text;
      while (current().type == TokenType::kString) text += advance().text;
      node->value = Value(std::move(text));
      return node;
    }
    default:
      break;
  }
  if (skip_operator("(")) {
    ExprPtr node = tuple(false, true, "", true);
    expect_operator(")");
    return node;
  }
  if (at_operator("[")) return list();
  if (at_operator("{")) return dict();
  fail_here(fmt::format("unexpected '{}'", describe(current())));
}

bool ExprParser::at_tuple_end(std::string_view end) const {
  return current().type == TokenType::kVariableEnd || current().type == TokenType::kBlockEnd ||
         at_operator(")") || (!end.empty() && at_name(end));
}

ExprPtr ExprParser::tuple(bool simple, bool with_condition, std::string_view end,
                          bool has_parentheses, bool with_namespace) {
  const Nested level(*this);
  ExprPtr node = make(ExprKind::kTuple, current().line);
  bool is_tuple = false;
  for (;;) {
    if (!node->children.empty()) expect_operator(",");
    if (at_tuple_end(end)) break;
    node->children.push_back(simple ? primary(with_namespace) : expression(with_condition));
    if (!at_operator(",")) break;
    is_tuple = true;
  }
  if (is_tuple) return node;
  if (!node->children.empty()) return std::move(node->children[0]);
  if (!has_parentheses) {
    fail_here(fmt::format("Expected an expression, got '{}'", describe(current())));
  }
  return node;
}

ExprPtr ExprParser::assign_target(bool with_namespace, std::string_view end) {
  ExprPtr target = tuple(true, true, end, false, with_namespace);
  if (!make_store(*target)) fail_here("can't assign to what is no name");
  return target;
}

ExprPtr ExprParser::name_target() {
  const int line = current().line;
  ExprPtr target = make(ExprKind::kName, line);
  target->text = expect_name();
  target->is_store = true;
  for (const std::string_view constant : {"true", "True", "false", "False", "none", "None"}) {
    if (target->text == constant) fail_here("can't assign to " + target->text);
  }
  return target;
}

ExprPtr ExprParser::list() {
  ExprPtr node = make(ExprKind::kList, current().line);
  expect_operator("[");
  while (!at_operator("]")) {
    if (!node->children.empty()) expect_operator(",");
    if (at_operator("]")) break;
    node->children.push_back(expression());
  }
  expect_operator("]");
  return node;
}

ExprPtr ExprParser::dict() {
  ExprPtr node = make(ExprKind::kDict, current().line);
  expect_operator("{");
  while (!at_operator("}")) {
    if (!node->children.empty()) expect_operator(",");
    if (at_operator("}")) break;
    node->children.push_back(expression());
    expect_operator(":");
    node->children.push_back(expression());
  }
  expect_operator("}");
  return node;
}

ExprPtr ExprParser::postfix(ExprPtr node) {
  for (int count = 0;; count = chain_depth(count)) {
    if (is_one_of(current(), {".", "["})) {
      node = subscript(std::move(node));
    } else if (at_operator("(")) {
      node = call(std::move(node));
    } else {
      return node;
    }
  }
}

ExprPtr ExprParser::filter_expr(ExprPtr node) {
  for (int count = 0;; count = chain_depth(count)) {
    if (at_operator("|")) {
      node = filters(std::move(node), false);
    } else if (at_name("is")) {
      node = test(std::move(node));
    } else if (at_operator("(")) {
      node = call(std::move(node));
    } else {
      return node;
    }
  }
}

ExprPtr ExprParser::subscript(ExprPtr node) {
  const Token& token = advance();
  if (token.text == ".") {
    const Token& key = advance();
    if (key.type == TokenType::kName) {
      ExprPtr result = make(ExprKind::kAttribute, token.line, std::move(node), nullptr);
      result->text = key.text;
      return result;
    }
    if (key.type != TokenType::kInteger) {
      fail("line {}: expected name or number", key.line);
    }
    --at_;
    return make(ExprKind::kItem, token.line, std::move(node), number());
  }
  ExprPtr keys = make(ExprKind::kTuple, token.line);
  while (!at_operator("]")) {
    if (!keys->children.empty()) expect_operator(",");
    keys->children.push_back(subscript_key());
  }
  expect_operator("]");
  if (keys->children.size() == 1) keys = std::move(keys->children[0]);
  if (keys->kind == ExprKind::kTuple) {
    for (const ExprPtr& key : keys->children) {
      if (key->kind == ExprKind::kSlice) fail_here("a slice among several keys");
    }
  }
  return make(ExprKind::kItem, token.line, std::move(node), std::move(keys));
}

ExprPtr ExprParser::subscript_key() {
  ExprPtr parts[3];
  const int line = current().line;
  if (!at_operator(":")) {
    parts[0] = expression();
    if (!at_operator(":")) return std::move(parts[0]);
  }
  expect_operator(":");
  const auto is_end = [&] { return at_operator("]") || at_operator(","); };
  if (!at_operator(":") && !is_end()) parts[1] = expression();
  if (skip_operator(":") && !is_end()) parts[2] = expression();
  ExprPtr node = make(ExprKind::kSlice, line);
  for (ExprPtr& part : parts) node->children.push_back(std::move(part));
  return node;
}

std::string ExprParser::dotted_name() {
  std::string text = expect_name();
  while (skip_operator(".")) text += "." + expect_name();
  return text;
}

ExprPtr ExprParser::filters(ExprPtr node, bool is_first_given) {
  for (int count = 0; is_first_given || at_operator("|"); count = chain_depth(count)) {
    if (!is_first_given) advance();
    is_first_given = false;
    ExprPtr result = make(ExprKind::kFilter, current().line);
    result->text = dotted_name();
    result->children.push_back(std::move(node));
    result->call = at_operator("(") ? arguments() : std::make_unique<CallArguments>();
    node = std::move(result);
  }
  return node;
}

ExprPtr ExprParser::test(ExprPtr node) {
  const int line = advance().line;
  const bool is_negated = skip_name("not");
  ExprPtr result = make(ExprKind::kTest, line);
  result->text = dotted_name();
  result->children.push_back(std::move(node));
  result->call = std::make_unique<CallArguments>();
  const TokenType type = current().type;
  const bool is_operand = type == TokenType::kName || type == TokenType::kString ||
                          type == TokenType::kInteger || type == TokenType::kFloat ||
                          is_one_of(current(), {"[", "{"});
  if (at_operator("(")) {
    result->call = arguments();
  } else if (is_operand && !at_name("else") && !at_name("or") && !at_name("and")) {
    if (at_name("is")) fail_here("You cannot chain multiple tests with is");
    result->call->positional.push_back(postfix(primary(false)));
  }
  return is_negated ? make(ExprKind::kNot, line, std::move(result), nullptr) : std::move(result);
}

ExprPtr ExprParser::call(ExprPtr node) {
  ExprPtr result = make(ExprKind::kCall, current().line, std::move(node), nullptr);
  result->call = arguments();
  return result;
}

std::unique_ptr<CallArguments> ExprParser::arguments() {
  auto call = std::make_unique<CallArguments>();
  const auto ensure = [&](bool holds) {
    if (!holds) fail_here("invalid syntax for function call expression");
  };
  expect_operator("(");
  for (bool needs_comma = false; !at_operator(")"); needs_comma = true) {
    if (needs_comma) {
      expect_operator(",");
      if (at_operator(")")) break;
    }
    if (skip_operator("*")) {
      ensure(call->star == nullptr && call->double_star == nullptr);
      call->star = expression();
    } else if (skip_operator("**")) {
      ensure(call->double_star == nullptr);
      call->double_star = expression();
    } else if (current().type == TokenType::kName && look().is(TokenType::kOperator, "=")) {
      ensure(call->double_star == nullptr);
      std::string key = advance().text;
      advance();
      for (const auto& [other, value] : call->keyword) {
        if (other == key) fail_here("keyword argument repeated: " + key);
      }
      call->keyword.emplace_back(std::move(key), expression());
    } else {
      ensure(call->star == nullptr && call->double_star == nullptr && call->keyword.empty());
      call->positional.push_back(expression());
    }
  }
  expect_operator(")");
  return call;
}

}  // namespace tessera::text::jinja
