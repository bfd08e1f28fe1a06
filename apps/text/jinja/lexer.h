#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

namespace tessera::text::jinja {

enum class TokenType : uint8_t {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenType type;
  int line;
  std::string text;  ///< of a string literal what it stands for; of a number without underscores
  bool is(TokenType of, std::string_view with) const { return type == of && text == with; }
};

/// The tokens of a template, with an environment's trim_blocks and lstrip_blocks. TemplateError with
/// the line.
std::deque<Token> tokenize(std::string_view source);

/// The token in a message.
std::string describe(const Token& token);

}  // namespace tessera::text::jinja
