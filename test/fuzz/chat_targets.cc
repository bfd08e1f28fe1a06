#include <cstdlib>

#include "apps/text/chat.h"
#include "apps/text/jinja/function.h"
#include "apps/text/jinja/template.h"
#include "core/check.h"
#include "test/fuzz/targets.h"

namespace tessera::fuzz {
namespace {

using namespace text::jinja;

const Value& conversation() {
  static const Value variables = parse_json("variables", R"({
      "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "h\u00e9 <b>"},
          {"role": "assistant", "content": null, "tool_calls": [
              {"function": {"name": "f", "arguments": {"x": 1, "y": [1.5, true, null]}}}]},
          {"role": "tool", "content": [{"type": "text", "text": "t"}]}],
      "tools": [{"type": "function", "function": {"name": "f"}}], "add_generation_prompt": true,
      "eos_token": "</s>", "n": 7, "x": 2.5, "d": {"b": 1, "a": 2}, "s": "a,b,,c"})");
  return variables;
}

/// A template with a conversation, in little time and memory: two renderings agree, and what
/// generation blocks wrote lies in the text.
void run_template(std::string_view bytes) {
  RenderOptions options;
  options.limits = {.max_steps = 5000, .max_nbytes = 12 << 10, .max_depth = 150};
  options.now = [] { return Now(); };
  const Template chat(bytes, options.limits);
  const Rendered rendered = chat.render(conversation(), options);
  for (const Span& span : rendered.generation) {
    if (span.begin >= span.end || span.end > rendered.text.size()) std::abort();
  }
  if (chat.render(conversation(), options).text != rendered.text) std::abort();
}

std::vector<std::string> seeds_template() {
  return {
      "{% for m in messages %}<|{{ m.role }}|>\n{% if m.content is string %}{{ m.content|trim }}"
      "{% elif m.content %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ eos_token }}"
      "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
      "{%- set ns = namespace(first=true, n=0) -%}{% for m in messages[1:] %}{% if loop.first and not "
      "loop.last %}{% set ns.first = false %}{% endif %}{% set ns.n = ns.n + loop.index0 * 2 %}"
      "{% generation %}{{ m.tool_calls|tojson(indent=2) if m.tool_calls }}{% endgeneration %}"
      "{% if ns.n > 5 %}{% break %}{% else %}{% continue %}{% endif %}{% endfor %}{{ ns.n }}",
      "{% macro show(t, depth=0) %}{% if t is mapping %}{% for k, v in t|dictsort %}{{ ' ' * depth }}"
      "{{ k }}: {{ show(v, depth + 1) }}{% endfor %}{% elif t is iterable and t is not string %}"
      "{{ t|map('string')|join(', ') }}{% else %}{{ t }}{{ varargs }}{{ kwargs }}{% endif %}"
      "{% endmacro %}{{ show(tools) }}{{ show(d, depth=1, k=2) }}",
      "{% set t %}a{{ n }}{% endset %}{% filter upper %}{{ t }}{% endfilter %}{% with a = 1, b = 2 %}"
      "{{ a ~ b }}{% endwith %}{% raw %}{{ x }}{% endraw %}{# c #}",
      "{% macro box() %}<{{ caller(1) }}>{% endmacro %}{% call(x) box() %}{{ x }}{% endcall %}",
      "{{ s.split(',', 1) }}{{ s[::-1] }}{{ s|replace(',', ';')|title }}{{ '%s-%05.1f' % (n, x) }}"
      "{{ '{:>5}{!r}'.format(n, s) }}{{ [3, 1]|sort(reverse=true) }}{{ range(1, 9, 3)|list }}",
      "{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% else %}e"
      "{% endfor %}{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list }}",
      "{{ (1 + 2) * 3 // 2 % 2 ** 2 - -n }}{{ 1 < n <= 7 and n not in [1] or none }}{{ x|round(1) }}",
      "{{ strftime_now('%Y') }}{{ d.get('z', d['a']) }}{{ d.items()|list }}{{ dict(a=1)|length }}"};
}

std::vector<std::string> words_template() {
  return {"{{ ",        " }}",           "{%- ",        " -%}",      "{# ",      " #}",
          "for ",       " in ",          "endfor",      "recursive", "loop",     "if ",
          "elif ",      "else",          "endif",       "set ",      "endset",   "macro m(a, b=1)",
          "endmacro",   "call ",         "endcall",     "caller",    "filter ",  "endfilter",
          "with ",      "endwith",       "raw",         "endraw",    "break",    "continue",
          "generation", "endgeneration", "namespace()", "ns.x",      "m(m)",     "messages",
          " is ",       " not ",         " and ",       "|map(",     "|select(", "|batch(2)",
          "|join(s)",   "|tojson",       "|sort",       "|list",     "|safe",    "|indent(9)",
          "range(99)",  "[0] * 99",      "'a' * 99",    "**",        "//",       "~",
          "[::-1]",     ".split()",      ".format(n)",  "% (n, x)",  "{'a': 1}", "loop.cycle",
          "cycler(n)",  "dict(d)",       "defined",     "1e308",     "\\x41",    "\xc3\x9f"};
}

RenderOptions small_limits() {
  RenderOptions options;
  options.limits = {.max_steps = 20000, .max_nbytes = 64 << 10, .max_depth = 150};
  options.now = [] { return Now(); };
  return options;
}

/// Turns that are found by rendering what comes before them, and ones between markers.
const std::vector<text::ChatTemplate>& templates() {
  static const auto all = [] {
    const auto source = [](const std::string& begin, const std::string& end) {
      return "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}" +
             begin +
             "{{ m.reasoning_content if loop.last }}{{ m.content }}{% for c in m.tool_calls "
             "or [] %}{{ c|tojson }}{% endfor %}{{ eos_token }}" +
             end +
             "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
             "{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
    };
    const Value tokens = parse_json("tokens", R"({"bos_token": "<s>", "eos_token": "</s>"})");
    std::vector<text::ChatTemplate> list;
    list.emplace_back(source("", ""), "plain", tokens, small_limits());
    list.emplace_back(source("{% generation %}", "{% endgeneration %}"), "marked", tokens,
                      small_limits());
    return list;
  }();
  return all;
}

/// A row of a file, whatever it is, to the tokens to learn: each part that is to be learned has some.
void run_chat(std::string_view bytes) {
  const Value row = parse_json("row", bytes);
  const std::string json = to_json(row, {});
  if (to_json(parse_json("again", json), {}) != json) std::abort();
  const text::Conversation conversation = text::parse_conversation(row);
  const text::ChatTokenizer tokenizer{text::make_byte_tokenizer()};
  // One of the ways, by the bytes.
  uint32_t drawn = 0;
  for (const char c : bytes) drawn = drawn * 31 + static_cast<unsigned char>(c);
  const auto on = static_cast<text::TrainOn>(drawn / 2 % 4);
  const text::RenderedChat rendered = templates()[drawn % 2].render(conversation, on);
  if (rendered.trained.empty()) std::abort();
  const text::TokenizedChat tokens = tokenizer.tokenize(rendered);
  if (tokens.ids.size() != rendered.text.size()) std::abort();
  size_t at = 0;
  for (const Span& span : rendered.trained) {
    if (span.begin < at || span.begin >= span.end || span.end > rendered.text.size()) std::abort();
    for (; at < span.end; ++at) {
      if ((tokens.is_trained[at] != 0) != (at >= span.begin)) std::abort();
    }
  }
}

std::vector<std::string> seeds_chat() {
  return {
      R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "h\u00e9 <b>"},
 {"role": "assistant", "content": "yes", "reasoning": "so"}, {"role": "user", "content": "?"},
 {"role": "assistant", "content": "no\n", "thinking": "r"}]})",
      R"({"messages": [{"role": "user", "content": null}, {"role": "assistant", "tool_calls":
 [{"function": {"name": "f", "arguments": {"x": [1, -2.5e3, true, null]}}}]},
 {"role": "tool", "content": [{"type": "text", "text": "t"}]},
 {"role": "assistant", "content": "ok"}], "tools": "[{\"name\": \"f\"}]"})",
      R"({"prompt": "a", "completion": "b"})",
      R"({"prompt": [{"role": "user", "content": "a"}], "completion":
 [{"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"},
 {"role": "assistant", "content": "d"}]})",
      R"({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
 "system": "S"})",
      R"({"instruction": "a", "input": "i", "output": "b", "history": [["c", "d"]], "system": ""})"};
}

std::vector<std::string> words_chat() {
  return {R"("messages")",
          R"("role": ")",
          R"("content": ")",
          R"("assistant")",
          R"("user")",
          R"("system")",
          R"("tool")",
          R"("prompt")",
          R"("completion")",
          R"("from": ")",
          R"("value": ")",
          R"("conversations")",
          R"("instruction")",
          R"("output")",
          R"("history")",
          R"("tools")",
          R"("tool_calls")",
          R"("thinking")",
          R"(\u0000)",
          R"(\ud83d\ude00)",
          R"(\ud83d)",
          "null",
          "true",
          "[[\"a\", \"b\"]]",
          R"(<|assistant|>\n)",
          R"(</s>)",
          "1e308",
          "9223372036854775808",
          "\xc3\x9f",
          R"({"role": "assistant", "content": ""})"};
}

}  // namespace

std::vector<Target> chat_targets() {
  return {{"jinja", run_template, seeds_template, words_template, 256 << 10},
          {"chat", run_chat, seeds_chat, words_chat, 1 << 20}};
}

}  // namespace tessera::fuzz
