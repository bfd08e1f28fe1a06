// The shapes of conversations.

#include <algorithm>

#include "apps/text/chat.h"
#include "apps/text/jinja/function.h"
#include "core/check.h"
#include "core/text.h"

namespace tessera::text {
namespace {

using jinja::DictObject;
using jinja::Kind;
using jinja::Value;

constexpr std::string_view kRoles[] = {"system",    "user",     "assistant", "tool",
                                       "developer", "function", "ipython"};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw InputError(fmt::format(format, std::forward<Args>(args)...));
}

/// The value under a key, or null if it is not there or is None.
const Value* find(const Value& row, std::string_view key) {
  const Value* value = row.dict().find(key);
  return value == nullptr || value->is_none() ? nullptr : value;
}

const Value& require(const Value& row, std::string_view key) {
  const Value* value = find(row, key);
  if (value == nullptr) fail("expected the key \"{}\"", key);
  return *value;
}

std::string text_of(const Value& row, std::string_view key) {
  const Value& value = require(row, key);
  if (!value.is_string()) fail("\"{}\" is {}, expected a text", key, jinja::type_name(value));
  return value.text();
}

Value make_message(std::string_view role, Value content) {
  auto message = std::make_shared<DictObject>();
  message->set("role", Value(role));
  message->set("content", std::move(content));
  return jinja::make_dict(std::move(message));
}

/// A message as transformers hands it to templates.
Value normalized_message(const Value& message, size_t index) {
  if (!message.is(Kind::kDict)) {
    fail("message {} is {}, expected an object", index, jinja::type_name(message));
  }
  const std::string where = fmt::format("message {}: ", index);
  const Value* role = find(message, "role");
  if (role == nullptr || !role->is_string()) fail("{}expected the key \"role\" with a text", where);
  if (std::find(std::begin(kRoles), std::end(kRoles), role->text()) == std::end(kRoles)) {
    fail("{}unknown role \"{}\", expected one of {}", where, shorten(role->text()),
         join_few(kRoles));
  }
  const Value* content = find(message, "content");
  if (content != nullptr && !content->is_string() && !content->is(Kind::kList)) {
    fail("{}\"content\" is {}, expected a text or a list", where, jinja::type_name(*content));
  }
  const Value* reasoning = nullptr;
  for (const std::string_view key : {"reasoning_content", "thinking", "reasoning"}) {
    if (reasoning == nullptr) reasoning = find(message, key);
  }
  auto result = std::make_shared<DictObject>();
  if (reasoning != nullptr) result->set("thinking", *reasoning);
  for (const auto& [key, value] : message.dict().items) {
    if (!value.is_none()) result->set(key, value);
  }
  if (reasoning != nullptr) result->set("reasoning_content", *reasoning);
  return jinja::make_dict(std::move(result));
}

std::vector<Value> messages_of(const Value& list, std::string_view key) {
  if (!list.is(Kind::kList)) {
    fail("\"{}\" is {}, expected a list of messages", key, jinja::type_name(list));
  }
  std::vector<Value> messages;
  for (const Value& each : list.items()) {
    messages.push_back(normalized_message(each, messages.size()));
  }
  return messages;
}

/// A list of messages, or a text as the message of `role`.
std::vector<Value> messages_or_text(const Value& value, std::string_view key,
                                    std::string_view role) {
  if (value.is_string()) return {make_message(role, value)};
  return messages_of(value, key);
}

std::string_view role_of_sharegpt(const std::string& from) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"human", "user"},
      {"user", "user"},
      {"gpt", "assistant"},
      {"assistant", "assistant"},
      {"model", "assistant"},
      {"chatgpt", "assistant"},
      {"system", "system"},
      {"tool", "tool"},
      {"observation", "tool"},
      {"developer", "developer"},
      {"function_call", "assistant"}};
  for (const auto& [name, role] : kNames) {
    if (name == from) return role;
  }
  std::vector<std::string_view> names;
  for (const auto& [name, role] : kNames) names.push_back(name);
  fail("unknown role \"{}\", expected one of {}", shorten(from), join_few(names, ", ", 20));
}

std::vector<Value> sharegpt_messages(const Value& row) {
  const bool is_short = find(row, "conversation") != nullptr;
  const std::string_view key = is_short ? "conversation" : "conversations";
  const Value& list = require(row, key);
  if (!list.is(Kind::kList)) {
    fail("\"{}\" is {}, expected a list of messages", key, jinja::type_name(list));
  }
  std::vector<Value> messages;
  if (const Value* system = find(row, "system"); system != nullptr && jinja::is_true(*system)) {
    messages.push_back(make_message("system", Value(text_of(row, "system"))));
  }
  for (size_t i = 0; i < list.items().size(); ++i) {
    const Value& each = list.items()[i];
    if (!each.is(Kind::kDict)) {
      fail("message {} is {}, expected an object", i, jinja::type_name(each));
    }
    try {
      if (find(each, "from") == nullptr && find(each, "role") != nullptr) {
        messages.push_back(normalized_message(each, i));
      } else {
        const std::string from = text_of(each, "from");
        messages.push_back(make_message(role_of_sharegpt(from), Value(text_of(each, "value"))));
      }
    } catch (const InputError& error) {
      const std::string_view what = error.what();
      if (what.starts_with("message ")) throw;
      fail("message {}: {}", i, what);
    }
  }
  return messages;
}

std::vector<Value> alpaca_messages(const Value& row) {
  std::vector<Value> messages;
  if (const Value* system = find(row, "system"); system != nullptr && jinja::is_true(*system)) {
    messages.push_back(make_message("system", Value(text_of(row, "system"))));
  }
  if (const Value* history = find(row, "history")) {
    if (!history->is(Kind::kList)) {
      fail("\"history\" is {}, expected a list of pairs", jinja::type_name(*history));
    }
    for (const Value& pair : history->items()) {
      const bool is_pair = pair.is(Kind::kList) && pair.items().size() == 2 &&
                           pair.items()[0].is_string() && pair.items()[1].is_string();
      if (!is_pair) fail("\"history\" has {}, expected two texts", shorten(jinja::to_repr(pair)));
      messages.push_back(make_message("user", pair.items()[0]));
      messages.push_back(make_message("assistant", pair.items()[1]));
    }
  }
  std::string question = text_of(row, "instruction");
  if (const Value* input = find(row, "input"); input != nullptr && jinja::is_true(*input)) {
    question += "\n" + text_of(row, "input");
  }
  messages.push_back(make_message("user", Value(std::move(question))));
  messages.push_back(make_message("assistant", Value(text_of(row, "output"))));
  return messages;
}

/// Messages of an answer: a list, one message of either kind, or a text.
std::vector<Value> answer_of(const Value& row, std::string_view key) {
  const Value* value = find(row, key);
  if (value == nullptr) {
    fail("no \"{}\", expected a prompt with \"chosen\" and \"rejected\"", key);
  }
  std::vector<Value> messages;
  if (value->is(Kind::kDict) && find(*value, "from") != nullptr) {
    messages.push_back(
        make_message(role_of_sharegpt(text_of(*value, "from")), Value(text_of(*value, "value"))));
  } else if (value->is(Kind::kDict)) {
    messages.push_back(normalized_message(*value, 0));
  } else {
    messages = messages_or_text(*value, key, "assistant");
  }
  const bool is_empty = messages.empty() || (value->is_string() && value->text().empty());
  if (is_empty) fail("\"{}\" is empty, expected an answer", key);
  return messages;
}

ChatShape shape_of(const Value& row) {
  if (find(row, "messages") != nullptr) return ChatShape::kMessages;
  if (find(row, "prompt") != nullptr && find(row, "completion") != nullptr) {
    return ChatShape::kPromptCompletion;
  }
  if (find(row, "conversations") != nullptr || find(row, "conversation") != nullptr) {
    return ChatShape::kSharegpt;
  }
  if (find(row, "instruction") != nullptr) return ChatShape::kAlpaca;
  std::vector<std::string> keys;
  for (const auto& [key, value] : row.dict().items) keys.push_back(jinja::to_string(key));
  fail(
      "no conversation: the keys are {}, expected \"messages\", \"prompt\" and \"completion\", "
      "\"conversations\", or \"instruction\" and \"output\"",
      keys.empty() ? "none" : join_few(keys));
}

Value tools_of(const Value& row) {
  const Value* tools = find(row, "tools");
  if (tools == nullptr) return Value::none();
  Value list = *tools;
  if (list.is_string()) {
    if (list.text().empty()) return Value::none();
    list = jinja::parse_json("\"tools\"", list.text());
  }
  if (!list.is(Kind::kList)) fail("\"tools\" is {}, expected a list", jinja::type_name(list));
  for (const Value& tool : list.items()) {
    if (!tool.is(Kind::kDict)) {
      fail("\"tools\" has {}, expected objects", shorten(jinja::to_repr(tool)));
    }
  }
  return list.items().empty() ? Value::none() : list;
}

}  // namespace

Conversation parse_conversation(const Value& row, ChatShape shape) {
  if (!row.is(Kind::kDict))
    fail("{} is no conversation, expected an object", jinja::type_name(row));
  if (shape == ChatShape::kAuto) shape = shape_of(row);
  Conversation result;
  std::vector<Value> messages;
  switch (shape) {
    case ChatShape::kPromptCompletion: {
      messages = messages_or_text(require(row, "prompt"), "prompt", "user");
      result.num_prompt_messages = static_cast<int64_t>(messages.size());
      const auto more = messages_or_text(require(row, "completion"), "completion", "assistant");
      messages.insert(messages.end(), more.begin(), more.end());
      if (more.empty()) fail("\"completion\" has no messages");
      break;
    }
    case ChatShape::kSharegpt:
      messages = sharegpt_messages(row);
      break;
    case ChatShape::kAlpaca:
      messages = alpaca_messages(row);
      break;
    default:
      messages = messages_of(require(row, "messages"), "messages");
  }
  if (messages.empty()) fail("a conversation without messages");
  result.messages = Value::list(std::move(messages));
  result.tools = tools_of(row);
  return result;
}

Preference parse_preference(const Value& row) {
  if (!row.is(Kind::kDict)) fail("{} is no pair, expected an object", jinja::type_name(row));
  std::vector<Value> chosen = answer_of(row, "chosen"), rejected = answer_of(row, "rejected");
  std::vector<Value> prompt;
  if (const Value* given = find(row, "prompt")) {
    prompt = messages_or_text(*given, "prompt", "user");
    if (given->is_string() && given->text().empty()) prompt.clear();
    // Some have the prompt in the answers as well.
    const auto has_prompt = [&](const std::vector<Value>& answer) {
      return answer.size() > prompt.size() &&
             std::equal(prompt.begin(), prompt.end(), answer.begin(),
                        [](const Value& a, const Value& b) { return jinja::equal(a, b); });
    };
    if (has_prompt(chosen) && has_prompt(rejected)) {
      for (auto* answer : {&chosen, &rejected}) {
        answer->erase(answer->begin(), answer->begin() + static_cast<int64_t>(prompt.size()));
      }
    }
  } else if (find(row, "conversations") != nullptr || find(row, "conversation") != nullptr) {
    prompt = sharegpt_messages(row);
  } else {
    size_t shared = 0;
    while (shared < std::min(chosen.size(), rejected.size()) &&
           jinja::equal(chosen[shared], rejected[shared])) {
      ++shared;
    }
    if (shared < chosen.size() || shared < rejected.size()) {
      const auto begin = static_cast<int64_t>(shared);
      prompt.assign(chosen.begin(), chosen.begin() + begin);
      chosen.erase(chosen.begin(), chosen.begin() + begin);
      rejected.erase(rejected.begin(), rejected.begin() + begin);
    }
  }
  const bool is_equal =
      chosen.size() == rejected.size() &&
      std::equal(chosen.begin(), chosen.end(), rejected.begin(),
                 [](const Value& a, const Value& b) { return jinja::equal(a, b); });
  if (is_equal) fail("\"chosen\" and \"rejected\" are equal, expected two answers");
  if (prompt.empty()) {
    fail(
        "an empty prompt, expected \"prompt\", or messages that \"chosen\" and \"rejected\" both "
        "begin with");
  }
  if (chosen.empty() || rejected.empty()) {
    fail("\"{}\" is the beginning of \"{}\", expected an answer of its own",
         chosen.empty() ? "chosen" : "rejected", chosen.empty() ? "rejected" : "chosen");
  }
  const auto with = [&](std::vector<Value>& answer) {
    Conversation result;
    result.num_prompt_messages = static_cast<int64_t>(prompt.size());
    answer.insert(answer.begin(), prompt.begin(), prompt.end());
    result.messages = Value::list(std::move(answer));
    result.tools = tools_of(row);
    return result;
  };
  return {with(chosen), with(rejected)};
}

Conversation question(std::string_view text) {
  Conversation result;
  result.messages = Value::list({make_message("user", Value(text))});
  return result;
}

std::string describe(const Conversation& conversation) {
  constexpr size_t kMaxContent = 80;
  std::vector<std::string> parts;
  for (const Value& message : conversation.messages.items()) {
    const Value* content = message.dict().find(std::string_view("content"));
    std::string text = jinja::to_string(*message.dict().find(std::string_view("role"))) + ": ";
    text += content == nullptr
                ? "nothing"
                : jinja::repr_of_string(shorten(jinja::to_string(*content), kMaxContent));
    parts.push_back(printable(text));
  }
  return join_few(parts, ", ", 12, 1500, 200);
}

}  // namespace tessera::text
