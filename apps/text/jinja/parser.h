#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/text/jinja/ast.h"
#include "apps/text/jinja/lexer.h"

namespace tessera::text::jinja {

/// Expressions: the part of the parser below statements.
class ExprParser {
 public:
  ExprParser(std::deque<Token> tokens, int max_depth)
      : tokens_(std::move(tokens)), max_depth_(max_depth) {}

 protected:
  const Token& current() const { return tokens_[at_]; }
  const Token& look() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  bool at_operator(std::string_view text) const { return current().is(TokenType::kOperator, text); }
  bool at_name(std::string_view text) const { return current().is(TokenType::kName, text); }
  const Token& advance();
  bool skip_operator(std::string_view text);
  bool skip_name(std::string_view text);
  void expect_operator(std::string_view text);
  std::string expect_name();
  void expect_keyword(std::string_view text);
  void expect_type(TokenType type, std::string_view what);
  [[noreturn]] void fail_here(const std::string& message) const;

  ExprPtr expression(bool with_condition = true);
  /// `simple` takes names and literals only; `end` is a name that ends it.
  ExprPtr tuple(bool simple, bool with_condition, std::string_view end = "",
                bool has_parentheses = false, bool with_namespace = false);
  ExprPtr assign_target(bool with_namespace, std::string_view end = "");
  ExprPtr name_target();
  ExprPtr filters(ExprPtr node, bool is_first_given);

  /// One level deeper; an error beyond the limit.
  class Nested {
   public:
    explicit Nested(ExprParser& parser);
    ~Nested() { --parser_.depth_; }

   private:
    ExprParser& parser_;
  };

 private:
  ExprPtr make(ExprKind kind, int line);
  ExprPtr make(ExprKind kind, int line, ExprPtr a, ExprPtr b);
  ExprPtr condition();
  ExprPtr disjunction();
  ExprPtr conjunction();
  ExprPtr negation();
  ExprPtr comparison();
  ExprPtr sum();
  ExprPtr concat();
  ExprPtr product();
  ExprPtr power();
  ExprPtr unary(bool with_filter);
  ExprPtr primary(bool with_namespace);
  ExprPtr name(bool with_namespace);
  ExprPtr number();
  ExprPtr list();
  ExprPtr dict();
  ExprPtr postfix(ExprPtr node);
  ExprPtr filter_expr(ExprPtr node);
  ExprPtr subscript(ExprPtr node);
  ExprPtr subscript_key();
  ExprPtr test(ExprPtr node);
  ExprPtr call(ExprPtr node);
  std::unique_ptr<CallArguments> arguments();
  std::string dotted_name();
  bool at_tuple_end(std::string_view end) const;
  int chain_depth(int count);

  std::deque<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int max_depth_;
  int64_t num_nodes_ = 0;
};

}  // namespace tessera::text::jinja
