#pragma once

#include <cstdint>
#include <string>

#include "core/check.h"

namespace tessera::text::jinja {

/// What is wrong with a template, or went wrong while it was rendered.
class TemplateError : public InputError {
 public:
  using InputError::InputError;
};

/// `raise_exception(message)`: the template refuses the conversation. `message()` is its own text.
class RaisedError : public TemplateError {
 public:
  RaisedError(const std::string& what, std::string message)
      : TemplateError(what), message_(std::move(message)) {}
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

/// What one rendering may use: templates come with models and are nobody's word.
struct Limits {
  int64_t max_steps = 8'000'000;  ///< operations; one for about 32 bytes of text
  int64_t max_nbytes = 32 << 20;  ///< of values and output that live at one time
  int max_depth = 1200;           ///< of expressions and statements in one another, in all calls
  int max_source_depth = 400;     ///< the same in the text of the template
  int64_t max_source_nbytes = 256 << 10;
};

/// Counts what a rendering uses. One is current on a thread while a template is rendered there;
/// without one nothing is limited.
class Meter {
 public:
  explicit Meter(const Limits& limits);
  ~Meter();
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

  static Meter* current();

  void step(int64_t count);
  /// An error if `nbytes` more would be too many.
  void expect(int64_t nbytes) const;
  void add(int64_t nbytes) { live_nbytes_ += nbytes; }
  const Limits& limits() const { return limits_; }

  int depth = 0;

 private:
  Limits limits_;
  int64_t num_steps_ = 0;
  int64_t live_nbytes_ = 0;
  Meter* previous_;
};

/// As long as it lives, what is made counts nowhere.
class Unmetered {
 public:
  Unmetered();
  ~Unmetered();
  Unmetered(const Unmetered&) = delete;
  Unmetered& operator=(const Unmetered&) = delete;

 private:
  Meter* meter_;
};

/// One level deeper, as long as it lives.
class Level {
 public:
  explicit Level(Meter& meter);
  ~Level() { --meter_.depth; }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;

 private:
  Meter& meter_;
};

/// Bytes that count as long as it lives.
class Charge {
 public:
  explicit Charge(int64_t nbytes);
  ~Charge();
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  void grow(int64_t nbytes);

 private:
  Meter* meter_;
  int64_t nbytes_;
};

/// Of the current meter, if any.
void count_steps(int64_t count);
/// Said before a text or list of `nbytes` is made: an error if it would be too large.
void expect_nbytes(int64_t nbytes);
/// Said while a text or list grows: it has `nbytes`, and may be moved to twice the place.
void expect_growing(size_t nbytes);
/// a * b, or a number that is too large for any limit.
int64_t product(int64_t a, int64_t b);

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw TemplateError(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tessera::text::jinja
