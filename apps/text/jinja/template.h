#pragma once

#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/text/jinja/value.h"

// Templates of Jinja as chat templates use them: what jinja2's ImmutableSandboxedEnvironment gives
// with trim_blocks, lstrip_blocks, loop controls and the tag `generation`, and the tojson,
// raise_exception, strftime_now, dict and namespace that Hugging Face puts there.
//
// Not there, and an error that says so: inheritance and imports (a chat template is one file),
// autoescape, the filters pprint, random, striptags, urlize and wordwrap, bytes, integers beyond 64
// bits, \N{...} in strings, lipsum.

namespace tessera::text::jinja {

struct TemplateTree;

/// What `strftime_now` sees.
struct Now {
  std::tm local = {};
  int microsecond = 0;
};
Now system_now();

struct RenderOptions {
  Limits limits;
  std::function<Now()> now = system_now;
};

/// Bytes [begin, end) of a rendered text.
struct Span {
  size_t begin = 0, end = 0;
  friend bool operator==(const Span&, const Span&) = default;
};

struct Rendered {
  std::string text;
  std::vector<Span> generation;       ///< what generation blocks have written, in order, not empty
  int64_t num_generation_blocks = 0;  ///< that ran, also those that wrote nothing
  /// A block's text that was changed (by a filter, for example) before it was written: it is in no
  /// span.
  bool has_lost_generation = false;
};

class Template {
 public:
  /// TemplateError with the line for what is no template, or one that is too large.
  explicit Template(std::string_view source, const Limits& limits = {});
  ~Template();
  Template(Template&&) noexcept;
  Template& operator=(Template&&) noexcept;

  /// With the variables of a dict. May be called from several threads at once. TemplateError with
  /// the line; RaisedError for raise_exception.
  Rendered render(const Value& variables, const RenderOptions& options = {}) const;

  bool has_generation() const;

 private:
  std::unique_ptr<TemplateTree> tree_;
};

enum class LargeIntegers { kRefused, kRounded };  ///< beyond 64 bits: an error, or a float

/// The value of a JSON text, objects in its order; of a key that comes twice the last. InputError
/// that begins with `what`.
Value parse_json(std::string_view what, std::string_view text,
                 LargeIntegers large = LargeIntegers::kRefused);

}  // namespace tessera::text::jinja
