// Renders templates for comparisons with other implementations: each line of stdin is a JSON object
// {"template": text, "variables": {...}}, each line of stdout is {"text": ..., "spans": [[begin,
// end], ...], "lost": bool} or {"error": ..., "raised": what raise_exception was given}. A template
// that comes again is not parsed again.

#include <cstdio>
#include <iostream>
#include <map>
#include <string>

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/template.h"

namespace {

using namespace tessera;
using namespace tessera::text::jinja;

std::string quoted(const std::string& text) {
  return to_json(Value(text), {});
}

std::string answer(const Value& input, std::map<std::string, Template>& templates) {
  RenderOptions options;
  options.now = [] {
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
  };
  try {
    const std::string source = get_item(input, Value("template")).text();
    auto found = templates.find(source);
    if (found == templates.end()) found = templates.emplace(source, Template(source)).first;
    const Rendered rendered = found->second.render(get_item(input, Value("variables")), options);
    std::string spans;
    for (const Span& span : rendered.generation) {
      spans += (spans.empty() ? "" : ",") + fmt::format("[{},{}]", span.begin, span.end);
    }
    return fmt::format(R"({{"text":{},"spans":[{}],"lost":{}}})", quoted(rendered.text), spans,
                       rendered.has_lost_generation);
  } catch (const RaisedError& error) {
    return fmt::format(R"({{"error":{},"raised":{}}})", quoted(error.what()),
                       quoted(error.message()));
  } catch (const Error& error) {
    return fmt::format(R"({{"error":{},"raised":null}})", quoted(error.what()));
  }
}

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  std::map<std::string, Template> templates;
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << answer(parse_json("stdin", line), templates) << std::endl;
    } catch (const Error& error) {
      std::cout << R"({"input":)" << quoted(error.what()) << "}" << std::endl;
    }
  }
  return 0;
}
