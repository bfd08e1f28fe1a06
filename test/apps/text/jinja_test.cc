#include <sys/resource.h>

#include <nlohmann/json.hpp>

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/template.h"
#include "core/files.h"
#include "core/text.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::text::jinja;

namespace {

/// Of test/golden/make_jinja.py.
Now golden_time() {
  Now now;
  now.local.tm_year = 126;
  now.local.tm_mon = 2;
  now.local.tm_mday = 4;
  now.local.tm_hour = 5;
  now.local.tm_min = 6;
  now.local.tm_sec = 7;
  now.local.tm_wday = 3;
  now.local.tm_yday = 62;
  now.microsecond = 890;
  return now;
}

Rendered render(const std::string& source, const std::string& variables = "{}") {
  return Template(source).render(parse_json("variables", variables));
}

std::string error_of(const std::string& source, const std::string& variables = "{}") {
  try {
    render(source, variables);
  } catch (const TemplateError& error) {
    return error.what();
  }
  return "no error";
}

std::string repeated(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

int64_t peak_nbytes() {
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

}  // namespace

TEST_CASE("jinja: every construct gives what jinja2 gives in transformers", "[jinja]") {
  const std::string path = TESSERA_GOLDEN_DIR "/jinja.json";
  const Value golden = parse_json(path, read_regular_file(path, 1 << 20));
  const Value variables = get_item(golden, Value("variables"));
  RenderOptions options;
  options.now = golden_time;
  int num_texts = 0, num_errors = 0, num_raised = 0;
  for (const Value& each : get_item(golden, Value("cases")).items()) {
    const std::string source = each.dict().find(std::string_view("template"))->text();
    const Value* text = each.dict().find(std::string_view("text"));
    INFO(source);
    try {
      const Rendered rendered = Template(source).render(variables, options);
      REQUIRE(text != nullptr);
      CHECK(rendered.text == text->text());
      std::vector<Value> spans;
      for (const Span& span : rendered.generation) {
        spans.push_back(Value::list(
            {Value(static_cast<int64_t>(span.begin)), Value(static_cast<int64_t>(span.end))}));
      }
      CHECK(to_repr(Value::list(spans)) == to_repr(*each.dict().find(std::string_view("spans"))));
      ++num_texts;
    } catch (const TemplateError& error) {
      INFO(error.what());
      REQUIRE(text == nullptr);
      CHECK(std::string(error.what()).find('\n') == std::string::npos);
      const Value raised = *each.dict().find(std::string_view("raised"));
      const auto* own = dynamic_cast<const RaisedError*>(&error);
      CHECK((own == nullptr ? "None" : own->message()) == to_string(raised));
      ++num_errors;
      num_raised += own != nullptr ? 1 : 0;
    }
  }
  CHECK(num_texts > 150);
  CHECK(num_errors > 100);
  CHECK(num_raised == 3);
}

TEST_CASE("jinja: an error says the line and what was wrong", "[jinja]") {
  const std::pair<std::string, std::string> kCases[] = {
      {"a\n{{ 1 + }}", "line 2: unexpected 'end of print statement'"},
      {"\n\n{% iff x %}", "line 3: Encountered unknown tag 'iff'."},
      {"{% if x %}", "line 1: Unexpected end of template. Expected 'elif'"},
      {"{{ x|nothing }}", "line 1: No filter named 'nothing'."},
      {"{{ x is nothing }}", "line 1: No test named 'nothing'."},
      {"{{ x|pprint }}", "line 1: the filter 'pprint' is not supported"},
      {"{% block a %}{% endblock %}", "line 1: the tag 'block' is not supported"},
      {"a\n{{ x.y }}", "line 2: 'x' is undefined"},
      {"{{ {}.a.b }}", "line 1: 'dict object' has no attribute 'a'"},
      {"\n{{ 'a' + 1 }}", "line 2: unsupported operand type(s) for +: 'str' and 'int'"},
      {"{{ 1 < 'a' }}", "line 1: '<' not supported between instances of 'int' and 'str'"},
      {"{{ 9223372036854775807 + 1 }}", "line 1: an integer beyond 64 bits"},
      {"{{ 9223372036854775808 }}",
       "line 1: the integer 9223372036854775808 has more than 64 bits"},
      {"{% break %}", "line 1: 'break' outside loop"},
      {"{{ range(100001) }}",
       "line 1: Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000)."},
      {"{{ [].append(1) }}", "line 1: access to attribute 'append' of 'list' object is unsafe."},
      {"{{ ''.__class__.x }}",
       "line 1: access to attribute '__class__' of 'str' object is unsafe."},
      {"{{ 'a'.encode() }}", "line 1: a method of str that is not supported"},
      {"{{ raise_exception('two\nlines') }}", "line 1: two\nlines"},
      {"\xff", "byte 0 is not UTF-8"},
  };
  for (const auto& [source, expected] : kCases) {
    INFO(source);
    CHECK(error_of(source) == expected);
  }
}

TEST_CASE("jinja: hostile templates end in one line and within their memory", "[jinja]") {
  const std::string steps = "takes more than 8000000 operations, which is the limit";
  const std::string memory = "needs more than 33554432 bytes of memory, which is the limit";
  const std::string depth = "nests deeper than 1200 levels, which is the limit";
  const std::string source_depth = "nests deeper than 400 levels, which is the limit";
  const std::string nested_loops =
      "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
  const std::pair<std::string, std::string> kCases[] = {
      {"{{ 'a' * 1000000000 }}", memory},
      {"{{ [0] * 1000000000 }}", memory},
      {"{{ range(1000000000) }}", "MAX_RANGE"},
      {"{{ range(100000)|list * 100 }}", memory},
      {"{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}"
       "{% endfor %}",
       memory},
      {"{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}"
       "{% endfor %}{{ ns.l }}",
       ""},
      {"{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}"
       "{% endfor %}{{ ns.l|tojson }}",
       ""},
      {"{% set ns = namespace(l=[1], m=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}"
       "{% set ns.m = [ns.m, ns.m] %}{% endfor %}{{ ns.l == ns.m }}",
       steps},
      {"{% set ns = namespace(l=[1]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}",
       "values nest deeper than 250 levels"},
      {"{% set ns = namespace(c=1) %}{% for i in range(99999) %}{% set ns.c = cycler(ns.c) %}{% endfor %}",
       "values nest deeper than 250 levels"},
      {"{% set ns = namespace(c=[]) %}{% for i in range(99999) %}{% set ns.c = ns.c|map('upper') %}"
       "{% endfor %}",
       "values nest deeper than 250 levels"},
      {"{% set ns = namespace(c=[]) %}{% for i in range(99999) %}{% for j in [ns.c] %}"
       "{% set ns.c = loop %}{% endfor %}{% endfor %}",
       "values nest deeper than 250 levels"},
      {"{% set ns = namespace() %}{% macro m() %}{% set ns.f = caller %}{% endmacro %}"
       "{% for i in range(99999) %}{% with p = ns.f %}{% call m() %}{{ p }}{% endcall %}{% endwith %}"
       "{% endfor %}{{ ns.f() * 1000000000 }}",
       ""},
      {"{% set ns = namespace() %}{% for i in range(99999) %}{% set n = namespace(p=ns.p) %}"
       "{% set ns.p = n %}{% endfor %}{{ 1 + 'a' }}",
       ""},
      {"{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}", memory},
      {"{{ '%1000000000d' % 1 }}", memory},
      {"{{ 'a'.center(1000000000) }}", memory},
      {"{{ '{:1000000000}'.format(1) }}", memory},
      {"{{ ('a' * 100000).replace('a', 'b' * 100000) }}", memory},
      {"{{ ('a,' * 1000000)|replace(',', '\n')|indent(100) }}", memory},
      {"{{ range(99999)|join('a' * 100000) }}", memory},
      {"{{ [1]|batch(1000000000, 0)|list }}", memory},
      {nested_loops, steps},
      {"{% set x = 'a' * 1000000 %}{% set y = 'a' * 500000 ~ 'b' %}{% set z = 'b' ~ 'a' * 500000 %}"
       "{% for i in range(9999) %}{{ y in x }}{{ x.find(y) }}{{ x.rfind(z) }}{% endfor %}",
       steps},
      {"{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ x is lower }}{{ x|wordcount }}"
       "{{ x|int }}{% endfor %}",
       steps},
      {"{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x|upper %}{% endfor %}",
       steps},
      {"{% set x = '\xce\xa3' * 500000 %}{% for i in range(99) %}{% set y = x|lower %}{% endfor %}",
       steps},
      {"{% set x = '\xce\xa3' * 500000 %}{% for i in range(99) %}{{ x.swapcase()|length }}"
       "{{ x.isalpha() }}{% endfor %}",
       steps},
      {"{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", depth},
      {"{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", depth},
      {"{% macro m() %}{{ caller }}{% call m() %}{% endcall %}{% endmacro %}{{ m() }}", depth},
      {"{{ " + repeated("(", 10000) + "1" + repeated(")", 10000) + " }}", source_depth},
      {"{{ " + repeated("[", 10000) + repeated("]", 10000) + " }}", source_depth},
      {"{{ " + repeated("-", 10000) + "1 }}", source_depth},
      {"{{ " + repeated("not ", 10000) + "1 }}", source_depth},
      {repeated("{% if 1 %}", 10000) + repeated("{% endif %}", 10000), source_depth},
      {repeated("{% for i in [1] %}", 8000) + repeated("{% endfor %}", 8000), source_depth},
      {"{{ 1" + repeated(" + 1", 10000) + " }}", "has more than 190 operators in a row"},
      {"{{ x" + repeated(".x", 10000) + " }}", "has more than 190 operators in a row"},
      {"{{ x" + repeated("|upper", 10000) + " }}", "has more than 190 operators in a row"},
      {"{{ [" + repeated("1,", 120000) + "] }}", "has more than 100000 expressions"},
      {repeated("x", 300000), "has 300000 bytes, expected at most 262144"},
      {"{% set ns = namespace() %}{% for i in range(9999) %}{% set n = namespace(p=ns.p) %}"
       "{% set ns.p = n %}{% endfor %}{{ ns }}",
       depth},
      {"{% macro f() %}{{ f }}{% endmacro %}{% set ns = namespace(m=f) %}{% set ns.ns = ns %}"
       "{{ 'a' * 1000000000 }}",
       memory},
  };
  const int64_t before = peak_nbytes();
  for (const auto& [source, expected] : kCases) {
    INFO(shorten(source));
    const std::string error = error_of(source);
    INFO(error);
    CHECK(error != "no error");
    CHECK(error.find(expected) != std::string::npos);
    CHECK(error.find('\n') == std::string::npos);
    CHECK(error.size() < 300);
    CHECK(peak_nbytes() - before <= 64 << 20);
  }
}

TEST_CASE("jinja: what a generation block wrote is found where it stands", "[jinja]") {
  const Rendered whole = render("\xc3\xa9{% generation %}ab{% endgeneration %}c");
  CHECK(whole.text ==
        "\xc3\xa9"
        "abc");
  CHECK(whole.generation == std::vector<Span>{{2, 4}});
  CHECK_FALSE(whole.has_lost_generation);

  // Through a macro, a set block and a call block, in which the text is made somewhere else.
  const Rendered macro = render(
      "{% macro turn(x) %}<{% generation %}{{ x }}{% endgeneration %}>{% endmacro %}"
      "{% set kept %}[{{ turn('b') }}]{% endset %}"
      "{% macro around() %}({{ caller() }}){% endmacro %}"
      "{{ turn('a') }}{{ kept }}{% call around() %}{{ turn('c') }}{% endcall %}");
  CHECK(macro.text == "<a>[<b>](<c>)");
  CHECK(macro.generation == std::vector<Span>{{1, 2}, {5, 6}, {10, 11}});
  CHECK_FALSE(macro.has_lost_generation);

  // Changed or never written.
  const std::string block = "{% generation %} b {% endgeneration %}";
  for (const std::string& source : {"{% filter trim %}" + block + "{% endfilter %}",
                                    "{% set x %}" + block + "{% endset %}{{ x + 'c' }}",
                                    "{% set x %}" + block + "{% endset %}a"}) {
    INFO(source);
    const Rendered lost = render(source);
    CHECK(lost.generation.empty());
    CHECK(lost.has_lost_generation);
  }
  CHECK(Template(block).has_generation());
  CHECK_FALSE(Template("generation").has_generation());
}

TEST_CASE("jinja: objects of JSON keep their order and its errors are named", "[jinja]") {
  CHECK(render("{{ v|tojson }}", R"({"v": {"z": 1, "a": [null, 1.50, "\u00e9"], "z": 2}})").text ==
        "{\"z\": 2, \"a\": [null, 1.5, \"\xc3\xa9\"]}");
  CHECK(render("{{ v }}", R"({"v": 9223372036854775807})").text == "9223372036854775807");
  const auto error = [](const std::string& text) {
    try {
      parse_json("chat.jsonl: line 3", text);
    } catch (const InputError& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  CHECK(error("{\"a\": }") == "chat.jsonl: line 3: no JSON (at byte 7)");
  CHECK(error("9223372036854775808") ==
        "chat.jsonl: line 3: the integer 9223372036854775808 has more than 64 bits");
  CHECK(error("-9223372036854775809") ==
        "chat.jsonl: line 3: the integer -9223372036854775809 has more than 64 bits");
  CHECK(error(repeated("[", 300)) == "chat.jsonl: line 3: JSON nests deeper than 200 levels");
  CHECK(error("\"\xff\"").find("no JSON") != std::string::npos);
}
