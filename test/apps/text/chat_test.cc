#include "apps/text/chat.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "apps/text/jinja/function.h"
#include "core/text.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::text;
using jinja::Span;
using jinja::Value;

namespace {

const std::string kHeader =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}";
const std::string kTail =
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
const std::string kPlain = kHeader + "{{ m.content }}<|im_end|>{{ '\n' }}" + kTail;
const std::string kMarked =
    kHeader + "{% generation %}{{ m.content }}<|im_end|>{{ '\n' }}{% endgeneration %}" + kTail;

/// Reasoning of all turns but the last is left out, as Qwen3's template does it.
const std::string kThinking =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

const std::string kTwoTurns = R"({"messages": [
    {"role": "system", "content": "Brief."}, {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "greet"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Bye", "reasoning_content": "part"}]})";

Conversation conversation_of(const std::string& row, ChatShape shape = ChatShape::kAuto) {
  return parse_conversation(jinja::parse_json("row", row), shape);
}

ChatTemplate template_of(const std::string& source,
                         const std::string& variables = R"({"eos_token": "<|im_end|>"})") {
  return {source, "chat_template.jinja", jinja::parse_json("variables", variables)};
}

std::vector<std::string> trained_texts(const RenderedChat& chat) {
  std::vector<std::string> texts;
  for (const Span& span : chat.trained) {
    texts.push_back(chat.text.substr(span.begin, span.end - span.begin));
  }
  return texts;
}

std::vector<std::string> trained(const std::string& source, const std::string& row, TrainOn on) {
  return trained_texts(template_of(source).render(conversation_of(row), on));
}

template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

using Texts = std::vector<std::string>;

}  // namespace

TEST_CASE("chat: the four shapes are the same conversation", "[chat]") {
  const std::string expected =
      "[{'role': 'system', 'content': 'S'}, {'role': 'user', 'content': 'Q\\nI'}, "
      "{'role': 'assistant', 'content': 'A'}]";
  const std::pair<std::string, int64_t> kRows[] = {
      {R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q\nI"},
           {"role": "assistant", "content": "A", "name": null}]})",
       -1},
      {R"({"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q\nI"}],
           "completion": "A"})",
       2},
      {R"({"conversations": [{"from": "human", "value": "Q\nI"}, {"from": "gpt", "value": "A"}],
           "system": "S"})",
       -1},
      {R"({"instruction": "Q", "input": "I", "output": "A", "system": "S"})", -1},
  };
  for (const auto& [row, num_prompt] : kRows) {
    INFO(row);
    const Conversation conversation = conversation_of(row);
    CHECK(jinja::to_repr(conversation.messages) == expected);
    CHECK(conversation.num_prompt_messages == num_prompt);
    CHECK(conversation.tools.is_none());
  }
  CHECK(jinja::to_repr(conversation_of(R"({"instruction": "Q", "input": "", "output": "A",
      "history": [["a", "b"]]})")
                           .messages) ==
        "[{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}, "
        "{'role': 'user', 'content': 'Q'}, {'role': 'assistant', 'content': 'A'}]");
  CHECK(jinja::to_repr(conversation_of(R"({"conversation": [{"from": "system", "value": "S"},
      {"role": "tool", "content": "t"}]})")
                           .messages) ==
        "[{'role': 'system', 'content': 'S'}, {'role': 'tool', 'content': 't'}]");
}

TEST_CASE("chat: messages and tools reach the template as transformers gives them", "[chat]") {
  // Null keys are left out; reasoning has each of its names.
  const Conversation conversation = conversation_of(
      R"({"messages": [{"role": "assistant", "content": null, "reasoning": "r",
          "tool_calls": [{"function": {"name": "f"}}]}], "tools": "[{\"name\": \"f\"}]"})");
  CHECK(jinja::to_repr(conversation.messages) ==
        "[{'thinking': 'r', 'role': 'assistant', 'reasoning': 'r', "
        "'tool_calls': [{'function': {'name': 'f'}}], 'reasoning_content': 'r'}]");
  CHECK(jinja::to_repr(conversation.tools) == "[{'name': 'f'}]");
  CHECK(template_of("{{ tools|tojson }}{{ documents }}{{ eos_token }}{{ add_generation_prompt }}")
            .prompt(conversation) == "[{\"name\": \"f\"}]None<|im_end|>True");
  CHECK(conversation_of(R"({"messages": [{"role": "user", "content": "a"}], "tools": []})")
            .tools.is_none());
}

TEST_CASE("chat: a row that is no conversation is named", "[chat]") {
  const std::pair<std::string, std::string> kCases[] = {
      {"[]", "list is no conversation, expected an object"},
      {R"({"text": "a", "id": 1})",
       "no conversation: the keys are text, id, expected \"messages\", \"prompt\" and "
       "\"completion\", \"conversations\", or \"instruction\" and \"output\""},
      {R"({"messages": "a"})", "\"messages\" is str, expected a list of messages"},
      {R"({"messages": []})", "a conversation without messages"},
      {R"({"messages": ["a"]})", "message 0 is str, expected an object"},
      {R"({"messages": [{"content": "a"}]})", "message 0: expected the key \"role\" with a text"},
      {R"({"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "a"}]})",
       "message 1: unknown role \"bot\", expected one of system, user, assistant, tool, developer, "
       "function, ipython"},
      {R"({"messages": [{"role": "user", "content": 5}]})",
       "message 0: \"content\" is int, expected a text or a list"},
      {R"({"conversations": [{"from": "alien", "value": "a"}]})",
       "message 0: unknown role \"alien\", expected one of human, user, gpt, assistant, model, "
       "chatgpt, system, tool, observation, developer, function_call"},
      {R"({"conversations": [{"from": "gpt"}]})", "message 0: expected the key \"value\""},
      {R"({"conversations": 1})", "\"conversations\" is int, expected a list of messages"},
      {R"({"instruction": "a"})", "expected the key \"output\""},
      {R"({"instruction": ["a"], "output": "b"})", "\"instruction\" is list, expected a text"},
      {R"({"instruction": "a", "output": "b", "history": [["c"]]})",
       "\"history\" has ['c'], expected two texts"},
      {R"({"prompt": "a", "completion": []})", "\"completion\" has no messages"},
      {R"({"messages": [{"role": "user", "content": "a"}], "tools": "[1"})",
       "\"tools\": no JSON (at byte 3)"},
      {R"({"messages": [{"role": "user", "content": "a"}], "tools": {"a": 1}})",
       "\"tools\" is dict, expected a list"},
      {R"({"messages": [{"role": "user", "content": "a"}], "tools": ["f"]})",
       "\"tools\" has 'f', expected objects"},
  };
  for (const auto& [row, expected] : kCases) {
    INFO(row);
    CHECK(error_of([&, &text = row] { conversation_of(text); }) == expected);
  }
  CHECK(error_of([] {
          conversation_of(R"({"prompt": "a", "completion": "b"})", ChatShape::kMessages);
        }) == "expected the key \"messages\"");
}

TEST_CASE(
    "chat: without generation blocks the turns are found, from their first token to the end "
    "of turn",
    "[chat]") {
  for (const std::string& source : {kPlain, kMarked}) {
    INFO(source);
    CHECK(trained(source, kTwoTurns, TrainOn::kAssistant) ==
          Texts{"Hello<|im_end|>\n", "Bye<|im_end|>\n"});
    CHECK(trained(source, kTwoTurns, TrainOn::kLast) == Texts{"Bye<|im_end|>\n"});
    CHECK(trained(source, kTwoTurns, TrainOn::kCompletion) == Texts{"Bye<|im_end|>\n"});
    const RenderedChat all = template_of(source).render(conversation_of(kTwoTurns), TrainOn::kAll);
    CHECK(trained_texts(all) == Texts{all.text});
  }
  CHECK(
      template_of(kPlain).prompt(conversation_of(R"({"prompt": "a", "completion": "b"})")) ==
      "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\n");
}

TEST_CASE("chat: a completion is all that follows its prompt", "[chat]") {
  const std::string row = R"({"prompt": "q", "completion": [{"role": "assistant", "content": "a"},
      {"role": "tool", "content": "t"}, {"role": "assistant", "content": "b"}]})";
  CHECK(trained(kPlain, row, TrainOn::kCompletion) ==
        Texts{"a<|im_end|>\n<|im_start|>tool\nt<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"});
  CHECK(trained(kPlain, row, TrainOn::kAssistant) == Texts{"a<|im_end|>\n", "b<|im_end|>\n"});
}

TEST_CASE("chat: turns that later messages change are found", "[chat]") {
  CHECK(trained(kThinking, kTwoTurns, TrainOn::kAssistant) ==
        Texts{"Hello<|im_end|>\n", "<think>\npart\n</think>\nBye<|im_end|>\n"});
  // An answer whose end is like the beginning of what follows, and one that looks like the mark.
  const std::string row = R"({"messages": [{"role": "user", "content": "a"},
      {"role": "assistant", "content": "x<|im_end|>", "reasoning": "r"},
      {"role": "user", "content": "Qz7xk"}, {"role": "assistant", "content": "Qz7xkJw3"}]})";
  CHECK(trained(kThinking, row, TrainOn::kAssistant) ==
        Texts{"x<|im_end|><|im_end|>\n", "<think>\n\n</think>\nQz7xkJw3<|im_end|>\n"});
}

TEST_CASE("chat: the end-of-turn token is learned also where only a next message brings it",
          "[chat]") {
  const std::string source =
      "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
      "{{ ' ' + m.content }}{{ eos_token if not loop.last }}{% endif %}{% endfor %}";
  const std::string row = R"({"messages": [{"role": "user", "content": "a"},
      {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
      {"role": "assistant", "content": "d"}]})";
  const ChatTemplate chat = template_of(source, R"({"eos_token": "</s>", "pad_token": "</s>"})");
  CHECK(trained_texts(chat.render(conversation_of(row), TrainOn::kAssistant)) ==
        Texts{" b</s>", " d"});
}

TEST_CASE("chat: a turn that is not found is an error that shows the conversation", "[chat]") {
  const std::string shown =
      "; the conversation: system: 'Brief.', user: 'Hi?', assistant: 'Hello', user: 'And?', "
      "assistant: 'Bye'";
  const auto error = [](const std::string& source, const std::string& row, TrainOn on) {
    return error_of([&] { trained(source, row, on); });
  };
  // What comes first depends on what comes last.
  const std::string counted = "{{ messages|length }}\n" + kPlain;
  CHECK(error(counted, kTwoTurns, TrainOn::kAssistant) ==
        "chat_template.jinja: the turn of message 4 is not found: the text that asks for it is no "
        "beginning of the whole, and the template has no generation blocks" +
            shown);
  CHECK(error(counted, kTwoTurns, TrainOn::kCompletion) ==
        "chat_template.jinja: the prompt is no beginning of the whole" + shown);
  // The answer is written twice: no place is its.
  const std::string twice =
      "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.content if loop.last and m.role == 'assistant' }}|{% endfor %}"
      "{% if add_generation_prompt %}assistant:{% endif %}";
  CHECK(error(twice, kTwoTurns, TrainOn::kAssistant) ==
        "chat_template.jinja: the end of the turn of message 2 is not found: the text up to it is "
        "no beginning of the whole, and the template has no generation blocks" +
            shown);
  // Blocks around some turns only.
  const std::string some =
      "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}"
      "{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
      "{{ m.content }}{% endif %}{% endfor %}";
  CHECK(error(some, kTwoTurns, TrainOn::kAssistant) ==
        "chat_template.jinja: 2 turns of the assistant, but 1 generation blocks" + shown);
  // The template leaves the answers out.
  const std::string silent =
      "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}";
  CHECK(error(silent, kTwoTurns, TrainOn::kAssistant).find("is not found") != std::string::npos);
  const std::string question = R"({"messages": [{"role": "user", "content": "a\nb"}]})";
  for (const std::string& source : {kPlain, kMarked}) {
    CHECK(error(source, question, TrainOn::kAssistant) ==
          "chat_template.jinja: nothing to learn in it; the conversation: user: 'a\\nb'");
    CHECK(error(source, question, TrainOn::kCompletion) ==
          "chat_template.jinja: no completion: the last message is not the assistant's; "
          "the conversation: user: 'a\\nb'");
  }
  CHECK(error("\n{{ raise_exception('no system') }}", question, TrainOn::kAll) ==
        "chat_template.jinja: line 2: no system; the conversation: user: 'a\\nb'");
  CHECK(error("", question, TrainOn::kAll) ==
        "chat_template.jinja: nothing to learn in it; the conversation: user: 'a\\nb'");
  CHECK(error_of([] { template_of("{% if %}"); }) ==
        "chat_template.jinja: line 1: Expected an expression, got 'end of statement block'");
}

TEST_CASE("chat: blocks whose text is changed before it is written are not believed", "[chat]") {
  const std::string filtered = "{% filter upper %}" + kMarked + "{% endfilter %}";
  CHECK(trained(filtered, kTwoTurns, TrainOn::kAssistant) ==
        Texts{"HELLO<|IM_END|>\n", "BYE<|IM_END|>\n"});
}

TEST_CASE("chat: tokens are trained that have a byte that is", "[chat]") {
  RenderedChat chat;
  chat.text = "user:hi bot:yes</s>user:ok";
  chat.trained = {{12, 19}};
  // One for each word, the end of turn, and one without bytes of its own.
  const std::vector<Span> offsets = {{0, 5},   {5, 8},   {8, 11}, {11, 15},
                                     {15, 15}, {15, 19}, {19, 26}};
  const TokenizedChat tokens =
      tokenize(chat, [&](std::string_view text, std::vector<int32_t>& ids, std::vector<Span>& to) {
        CHECK(text == chat.text);
        ids = {10, 11, 12, 13, 14, 2, 15};
        to = offsets;
      });
  CHECK(tokens.ids == std::vector<int32_t>{10, 11, 12, 13, 14, 2, 15});
  CHECK(tokens.is_trained == std::vector<uint8_t>{0, 0, 0, 1, 1, 1, 0});

  const auto shorter = [](std::string_view, std::vector<int32_t>& ids, std::vector<Span>& to) {
    ids = {10};
    to = {{0, 5}};
  };
  CHECK(error_of([&] { tokenize(chat, shorter); }) ==
        "bytes 12 to 19 of a conversation are to be learned, but no token has any of them");
}

TEST_CASE("chat: offsets come from the bytes of the ids", "[chat]") {
  const std::map<int32_t, std::string> pieces = {
      {1, "<s>"}, {2, "</s>"}, {3, "Hi"}, {4, "\xc3"}, {5, "\xa9 you"}, {6, "you"}, {7, ""}};
  const auto offsets_of = [&](const std::string& text, std::vector<int32_t> of) {
    std::vector<int32_t> ids;
    std::vector<Span> offsets;
    with_offsets([&](std::string_view) { return of; }, [&](int32_t id) { return pieces.at(id); })(
        text, ids, offsets);
    CHECK(ids == of);
    return offsets;
  };
  // Half a character each, and a token that is written with its space.
  CHECK(offsets_of("<s>Hi\xc3\xa9 you</s>", {1, 3, 4, 5, 2}) ==
        std::vector<Span>{{0, 3}, {3, 5}, {5, 6}, {6, 11}, {11, 15}});
  // Without: the space belongs to the word behind it, or to a token that is nothing but one.
  CHECK(offsets_of("Hi  you ", {3, 7, 6}) == std::vector<Span>{{0, 2}, {2, 2}, {2, 8}});
  CHECK(error_of([&] {
          offsets_of("hi you", {3, 6});
        }) ==
        "id 3 at place 0 is Hi, expected hi you from byte 0 on: the tokenizer changes the text, so "
        "what is to be learned cannot be found in it");
  CHECK(error_of([&] { offsets_of("Hi you</s>", {3, 6}); }) == "</s> from byte 6 on has no ids");
}

TEST_CASE("chat: the end of turn is learned where it is the padding token as well", "[chat]") {
  // One id a byte, the end of turn one of its own, which is also what pads.
  const ChatTemplate chat = template_of(
      "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
      "{% endfor %}",
      R"({"eos_token": "</s>", "pad_token": "</s>"})");
  const RenderedChat rendered =
      chat.render(conversation_of(R"({"prompt": "ab", "completion": "c"})"), TrainOn::kAssistant);
  constexpr int32_t kEnd = 1000;
  const auto encode = with_offsets(
      [](std::string_view text) {
        std::vector<int32_t> ids;
        for (size_t i = 0; i < text.size(); ++i) {
          const bool is_end = text.substr(i).starts_with("</s>");
          ids.push_back(is_end ? kEnd : text[i]);
          if (is_end) i += 3;
        }
        return ids;
      },
      [](int32_t id) { return id == kEnd ? "</s>" : std::string(1, static_cast<char>(id)); });
  const TokenizedChat tokens = tokenize(rendered, encode);
  CHECK(tokens.ids == std::vector<int32_t>{'a', 'b', 'c', kEnd});
  CHECK(tokens.is_trained == std::vector<uint8_t>{0, 0, 1, 1});
}

TEST_CASE("chat: a terminal shows what is learned and what is not", "[chat]") {
  const RenderedChat chat = {"user: a\x1b\nbot: b</s>\n", {{14, 20}}};
  CHECK(show(chat, false) == "user: a\\x1b\nbot: [[b</s>\n]]");
  CHECK(show(chat, true) == "\x1b[2muser: a\\x1b\nbot: \x1b[0m\x1b[32mb</s>\n\x1b[0m");
}

TEST_CASE("chat: a model's directory gives its template and special tokens", "[chat]") {
  const testing::TempDir dir;
  const Conversation chat = conversation_of(R"({"prompt": "a", "completion": "b"})");
  CHECK(error_of([&] { load_chat_template(dir.path()); }) ==
        dir.path() +
            ": no chat template, expected chat_template.jinja or a chat_template in "
            "tokenizer_config.json");
  dir.write("tokenizer_config.json",
            R"({"model_max_length": 1000000000000000019884624838656, "bos_token": "<s>",
                "eos_token": {"content": "</s>", "lstrip": false},
                "extra_special_tokens": {"image_token": "<img>"},
                "chat_template": [{"name": "tool_use", "template": "t"},
                                  {"name": "default", "template": "{{ bos_token }}d"}]})");
  CHECK(load_chat_template(dir.path()).prompt(chat) == "<s>d");
  dir.write("chat_template.jinja", "{{ eos_token }}{{ image_token }}{{ messages|length }}");
  CHECK(load_chat_template(dir.path()).prompt(chat) == "</s><img>2");
  dir.write("chat_template.jinja", "{{");
  CHECK(error_of([&] {
          load_chat_template(dir.path());
        }).starts_with(dir / "chat_template.jinja" + ": line 1: "));
  dir.write("tokenizer_config.json", "[");
  CHECK(error_of([&] { load_chat_template(dir.path()); }) ==
        dir / "tokenizer_config.json" + ": no JSON (at byte 2)");
}

TEST_CASE("chat: ids and masks are those of transformers where templates have markers", "[chat]") {
  const nlohmann::ordered_json golden =
      nlohmann::ordered_json::parse(std::ifstream(TESSERA_GOLDEN_DIR "/chat_masks.json"));
  std::map<std::string, ChatTokenizer> tokenizers;
  for (const auto& [name, text] : golden["tokenizers"].items()) {
    tokenizers.emplace(name, parse_tokenizer(text.get<std::string>(), name));
  }
  REQUIRE(golden["cases"].size() == 96);
  for (const auto& one : golden["cases"]) {
    INFO(one.dump());
    const ChatTemplate chat =
        template_of(golden["templates"][one[1].get<std::string>()],
                    R"({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"})");
    const nlohmann::ordered_json row = {
        {"messages", golden["conversations"][one[2].get<size_t>()]}};
    const TokenizedChat tokens = tokenizers.at(one[0]).tokenize(
        chat.render(conversation_of(row.dump()), TrainOn::kAssistant));
    std::string mask;
    for (const uint8_t is_trained : tokens.is_trained) mask += is_trained == 0 ? '0' : '1';
    CHECK(tokens.ids == one[3].get<std::vector<int32_t>>());
    CHECK(mask == one[4].get<std::string>());
  }
}

TEST_CASE(
    "chat: without markers the first token of an answer and its end are learned, in each turn",
    "[chat]") {
  const nlohmann::ordered_json golden =
      nlohmann::ordered_json::parse(std::ifstream(TESSERA_GOLDEN_DIR "/chat_masks.json"));
  const std::string marked = golden["templates"]["im"];
  std::string plain = marked;
  for (const std::string tag : {"{% generation %}", "{% endgeneration %}"}) {
    plain.erase(plain.find(tag), tag.size());
  }
  // transformers gives nothing but zeros here, after a warning.
  for (const auto& [name, json] : golden["tokenizers"].items()) {
    const ChatTokenizer tokenizer(parse_tokenizer(json.get<std::string>(), name));
    for (const auto& messages : golden["conversations"]) {
      const Conversation conversation =
          conversation_of(nlohmann::ordered_json{{"messages", messages}}.dump());
      INFO(name << " " << messages.dump());
      const auto tokens_of = [&](const std::string& source) {
        return tokenizer.tokenize(template_of(source).render(conversation, TrainOn::kAssistant));
      };
      const TokenizedChat expected = tokens_of(marked), found = tokens_of(plain);
      CHECK(found.ids == expected.ids);
      CHECK(found.is_trained == expected.is_trained);
    }
  }
}

TEST_CASE("chat: a tokenizer that changes the text says where", "[chat]") {
  const std::string json =
      R"({"normalizer": {"type": "Lowercase"}, "pre_tokenizer": null, "decoder": {"type": "Fuse"},
      "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})";
  const ChatTokenizer tokenizer(parse_tokenizer(json, "t.json"));
  const ChatTemplate chat = template_of("{{ messages[0].content }}{{ messages[1].content }}");
  const auto tokens_of = [&](const std::string& row) {
    return tokenizer.tokenize(chat.render(conversation_of(row), TrainOn::kAll)).ids;
  };
  CHECK(tokens_of(R"({"prompt": "ab", "completion": "b"})") == std::vector<int32_t>{0, 1, 1});
  CHECK(error_of([&] { tokens_of(R"({"prompt": "aB", "completion": "b"})"); }) ==
        "id 1 at place 1 is b, expected Bb from byte 1 on: the tokenizer changes the text, so what "
        "is to be learned cannot be found in it");
}
