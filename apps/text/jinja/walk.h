#pragma once

#include "apps/text/jinja/ast.h"

namespace tessera::text::jinja {

/// Calls f for the expressions directly in `node`, in the order in which they are written.
template <class F>
void for_each_child(const Expr& node, const F& f) {
  for (const ExprPtr& child : node.children) {
    if (child != nullptr) f(*child);
  }
  if (node.call == nullptr) return;
  for (const ExprPtr& argument : node.call->positional) f(*argument);
  for (const auto& [name, argument] : node.call->keyword) f(*argument);
  if (node.call->star != nullptr) f(*node.call->star);
  if (node.call->double_star != nullptr) f(*node.call->double_star);
}

/// Calls `on_name` for every name in an expression or statement and all that is in it, in the order
/// in which Jinja visits them.
template <class F>
void for_each_name(const Expr& node, const F& on_name) {
  if (node.kind == ExprKind::kName) on_name(node);
  for_each_child(node, [&](const Expr& child) { for_each_name(child, on_name); });
}

template <class F>
void for_each_name(const Block& block, const F& on_name);

template <class F>
void for_each_name(const Stmt& node, const F& on_name) {
  const auto visit = [&](const ExprPtr& expr) {
    if (expr != nullptr) for_each_name(*expr, on_name);
  };
  const bool is_macro = node.kind == StmtKind::kMacro;  // whose name is no name here
  const bool is_filter = node.kind == StmtKind::kFilterBlock;
  if (!is_macro) visit(node.target);
  if (!is_filter) visit(node.value);
  if (node.macro != nullptr) {
    for (const ExprPtr& each : node.macro->parameters) visit(each);
    for (const ExprPtr& each : node.macro->defaults) visit(each);
  }
  for (const ExprPtr& each : node.exprs) visit(each);
  for_each_name(node.body, on_name);
  if (is_filter) visit(node.value);
  for_each_name(node.elifs, on_name);
  for_each_name(node.otherwise, on_name);
  visit(node.test);
}

template <class F>
void for_each_name(const Block& block, const F& on_name) {
  for (const auto& stmt : block) for_each_name(*stmt, on_name);
}

}  // namespace tessera::text::jinja
