#include "apps/text/chat.h"

#include <algorithm>
#include <filesystem>

#include "apps/text/jinja/function.h"
#include "core/check.h"
#include "core/files.h"
#include "core/text.h"

namespace tessera::text {
namespace {

using jinja::DictObject;
using jinja::Kind;
using jinja::Rendered;
using jinja::Span;
using jinja::Value;

std::string_view role_of(const Value& message) {
  return message.dict().find(std::string_view("role"))->text();
}

Value first_messages(const Value& messages, size_t count) {
  const auto& all = messages.items();
  return Value::list({all.begin(), all.begin() + static_cast<int64_t>(count)});
}

/// In order and apart.
std::vector<Span> merged(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), [](Span a, Span b) { return a.begin < b.begin; });
  std::vector<Span> result;
  for (const Span& span : spans) {
    if (!result.empty() && span.begin <= result.back().end) {
      result.back().end = std::max(result.back().end, span.end);
    } else {
      result.push_back(span);
    }
  }
  return result;
}

/// Where `what` stands in `text`, if exactly once.
size_t only_place(const std::string& text, const std::string& what) {
  const size_t at = text.find(what);
  return at != std::string::npos && text.find(what, at + 1) == std::string::npos
             ? at
             : std::string::npos;
}

/// A word that the text does not have.
std::string unused_word(const std::string& text) {
  std::string word = "Qz7xk";
  while (text.find(word) != std::string::npos) word += "Jw3";
  return word;
}

}  // namespace

ChatTemplate::ChatTemplate(std::string_view source, std::string name, Value variables,
                           jinja::RenderOptions options)
    : source_(source),
      name_(std::move(name)),
      template_([&] {
        try {
          return jinja::Template(source, options.limits);
        } catch (const InputError& error) {
          throw InputError(fmt::format("{}: {}", name_, error.what()));
        }
      }()),
      variables_(std::move(variables)),
      options_(std::move(options)) {}

void ChatTemplate::fail(const Conversation& conversation, const std::string& why) const {
  throw InputError(fmt::format("{}: {}; the conversation: {}", name_, why, describe(conversation)));
}

Rendered ChatTemplate::render_messages(const Value& messages, const Conversation& conversation,
                                       bool asks) const {
  auto variables = std::make_shared<DictObject>();
  for (const auto& [key, value] : variables_.dict().items) variables->set(key, value);
  variables->set("messages", messages);
  variables->set("tools", conversation.tools);
  variables->set("documents", Value::none());
  variables->set("add_generation_prompt", Value(asks));
  return template_.render(jinja::make_dict(std::move(variables)), options_);
}

std::string ChatTemplate::prompt(const Conversation& conversation) const {
  try {
    return render_messages(conversation.messages, conversation, true).text;
  } catch (const jinja::TemplateError& error) {
    fail(conversation, error.what());
  }
}

std::string ChatTemplate::identity() const {
  return jinja::to_json(variables_, {}) + source_;
}

std::string ChatTemplate::special_token(std::string_view name) const {
  const Value* token = variables_.dict().find(name);
  return token != nullptr && token->is_string() ? token->text() : std::string();
}

RenderedChat ChatTemplate::render(const Conversation& conversation, TrainOn train_on) const {
  RenderedChat result;
  try {
    Rendered whole = render_messages(conversation.messages, conversation, false);
    result.text = std::move(whole.text);
    if (train_on == TrainOn::kAll) {
      if (!result.text.empty()) result.trained = {{0, result.text.size()}};
    } else if (train_on == TrainOn::kCompletion) {
      result.trained = {find_completion(conversation, result.text)};
    } else if (template_.has_generation() && !whole.has_lost_generation) {
      const auto& messages = conversation.messages.items();
      const auto num_turns = std::count_if(messages.begin(), messages.end(), [](const Value& m) {
        return role_of(m) == "assistant";
      });
      if (whole.num_generation_blocks < num_turns) {
        fail(conversation, fmt::format("{} turns of the assistant, but {} generation blocks",
                                       num_turns, whole.num_generation_blocks));
      }
      result.trained = merged(std::move(whole.generation));
      if (train_on == TrainOn::kLast && !result.trained.empty()) {
        result.trained.erase(result.trained.begin(), result.trained.end() - 1);
      }
    } else {
      result.trained = find_turns(conversation, result.text, train_on == TrainOn::kLast);
    }
  } catch (const jinja::TemplateError& error) {
    fail(conversation, error.what());
  }
  std::erase_if(result.trained, [](const Span& span) { return span.begin >= span.end; });
  if (result.trained.empty()) fail(conversation, "nothing to learn in it");
  return result;
}

std::vector<Span> ChatTemplate::find_turns(const Conversation& conversation,
                                           const std::string& text, bool only_last) const {
  const auto& messages = conversation.messages.items();
  std::vector<Span> turns;
  for (size_t i = messages.size(); i-- > 0;) {
    if (role_of(messages[i]) != "assistant") continue;
    turns.insert(turns.begin(), find_turn(conversation, text, i));
    if (only_last) break;
  }
  for (size_t i = 1; i < turns.size(); ++i) {
    if (turns[i].begin < turns[i - 1].end) {
      fail(conversation, "two turns of the assistant are found at one place");
    }
  }
  return turns;
}

Span ChatTemplate::find_turn(const Conversation& conversation, const std::string& text,
                             size_t index) const {
  const Value& messages = conversation.messages;
  const std::string before =
      render_messages(first_messages(messages, index), conversation, true).text;
  if (!text.starts_with(before)) {
    fail(conversation,
         fmt::format("the turn of message {} is not found: the text that asks for it is no "
                     "beginning of the whole, and the template has no generation blocks",
                     index));
  }
  const std::string up_to =
      render_messages(first_messages(messages, index + 1), conversation, false).text;
  const bool is_found = text.starts_with(up_to) && up_to.size() > before.size();
  size_t end =
      is_found ? up_to.size() : end_of_changed_turn(conversation, text, index, before.size());
  // Some templates end a turn only where another message follows.
  if (const std::string token = special_token("eos_token"); !token.empty()) {
    const bool has_token =
        text.substr(before.size(), end - before.size()).find(token) != std::string::npos;
    if (!has_token && text.compare(end, token.size(), token) == 0) end += token.size();
  }
  if (end <= before.size()) {
    fail(conversation, fmt::format("the turn of message {} is empty", index));
  }
  return {before.size(), end};
}

size_t ChatTemplate::end_of_changed_turn(const Conversation& conversation, const std::string& text,
                                         size_t index, size_t begin) const {
  const std::string probe = unused_word(text);
  std::vector<Value> messages = conversation.messages.items();
  auto message = std::make_shared<DictObject>();
  message->set("role", *messages[index].dict().find(std::string_view("role")));
  message->set("content", Value(probe));
  messages[index] = jinja::make_dict(std::move(message));
  const Value changed = Value::list(std::move(messages));

  const std::string whole = render_messages(changed, conversation, false).text;
  const std::string alone =
      render_messages(first_messages(changed, index + 1), conversation, false).text;
  const size_t in_whole = only_place(whole, probe), in_alone = only_place(alone, probe);
  if (in_whole != std::string::npos && in_alone != std::string::npos) {
    const std::string behind = whole.substr(in_whole + probe.size());
    const std::string closing = alone.substr(in_alone + probe.size());
    if (behind.starts_with(closing) && text.ends_with(behind) &&
        text.size() - behind.size() >= begin) {
      return text.size() - behind.size() + closing.size();
    }
  }
  fail(conversation,
       fmt::format("the end of the turn of message {} is not found: the text up to it is no "
                   "beginning of the whole, and the template has no generation blocks",
                   index));
}

Span ChatTemplate::find_completion(const Conversation& conversation,
                                   const std::string& text) const {
  const auto& messages = conversation.messages.items();
  int64_t num_prompt = conversation.num_prompt_messages;
  if (num_prompt < 0) {
    num_prompt = static_cast<int64_t>(messages.size());
    while (num_prompt > 0 &&
           role_of(messages[static_cast<size_t>(num_prompt - 1)]) == "assistant") {
      --num_prompt;
    }
  }
  if (num_prompt == static_cast<int64_t>(messages.size())) {
    fail(conversation, "no completion: the last message is not the assistant's");
  }
  const std::string before =
      render_messages(first_messages(conversation.messages, static_cast<size_t>(num_prompt)),
                      conversation, true)
          .text;
  if (!text.starts_with(before)) {
    fail(conversation, "the prompt is no beginning of the whole");
  }
  return {before.size(), text.size()};
}

ChatTemplate load_chat_template(const std::string& dir, const std::string& path,
                                jinja::RenderOptions options) {
  constexpr int64_t kMaxNbytes = 64 << 20;
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!path.empty() && fs::is_directory(path, ignored)) {
    return load_chat_template(path, "", std::move(options));
  }
  const std::string config_path = dir + "/tokenizer_config.json";
  const std::string template_path = path.empty() ? dir + "/chat_template.jinja" : path;
  Value config = jinja::make_dict(std::make_shared<DictObject>());
  if (!dir.empty() && fs::exists(config_path, ignored)) {
    // transformers writes 10^30 there for a length without a limit.
    config = jinja::parse_json(config_path, read_regular_file(config_path, kMaxNbytes),
                               jinja::LargeIntegers::kRounded);
    if (!config.is(Kind::kDict)) {
      throw InputError(
          fmt::format("{}: {}, expected an object", config_path, jinja::type_name(config)));
    }
  }
  auto variables = std::make_shared<DictObject>();
  const auto add_token = [&](std::string_view name, const Value* value) {
    if (value != nullptr && value->is(Kind::kDict))
      value = value->dict().find(std::string_view("content"));
    if (value != nullptr && value->is_string()) variables->set(Value(name), *value);
  };
  for (const std::string_view name : {"bos_token", "eos_token", "unk_token", "sep_token",
                                      "pad_token", "cls_token", "mask_token"}) {
    add_token(name, config.dict().find(name));
  }
  for (const std::string_view group : {"extra_special_tokens", "model_specific_special_tokens"}) {
    const Value* tokens = config.dict().find(group);
    if (tokens == nullptr || !tokens->is(Kind::kDict)) continue;
    for (const auto& [name, value] : tokens->dict().items) add_token(name.text(), &value);
  }
  const Value all = jinja::make_dict(std::move(variables));
  if (!path.empty() || (!dir.empty() && fs::exists(template_path, ignored))) {
    return {read_regular_file(template_path, kMaxNbytes), template_path, all, std::move(options)};
  }
  const Value* source = config.dict().find(std::string_view("chat_template"));
  if (source != nullptr && source->is(Kind::kList)) {  // several by name
    const auto& list = source->items();
    source = nullptr;
    for (const Value& each : list) {
      if (!each.is(Kind::kDict)) continue;
      const Value* name = each.dict().find(std::string_view("name"));
      if (name != nullptr && jinja::equal(*name, Value("default"))) {
        source = each.dict().find(std::string_view("template"));
      }
    }
  }
  if (source == nullptr || !source->is_string()) {
    throw InputError(
        fmt::format("{}: no chat template, expected chat_template.jinja or a chat_template in "
                    "tokenizer_config.json",
                    dir.empty() ? "the byte tokenizer" : dir));
  }
  return {source->text(), config_path + ": chat_template", all, std::move(options)};
}

}  // namespace tessera::text
