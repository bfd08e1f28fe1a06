#include "apps/text/jinja/template.h"

#include <nlohmann/json.hpp>

#include "apps/text/jinja/ast.h"
#include "apps/text/jinja/evaluate.h"
#include "core/text.h"

namespace tessera::text::jinja {
namespace {

/// Values of a JSON text as they come, without a tree of another kind in between.
class JsonBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonBuilder(std::string_view what, LargeIntegers large) : what_(what), large_(large) {}

  bool null() override { return add(Value::none()); }
  bool boolean(bool value) override { return add(Value(value)); }
  bool number_integer(number_integer_t value) override { return add(Value(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<uint64_t>(INT64_MAX)) {
      return add_large(static_cast<double>(value), std::to_string(value));
    }
    return add(Value(static_cast<int64_t>(value)));
  }
  bool number_float(number_float_t value, const string_t& text) override {
    // What has no point and no exponent is an integer that is too large for one.
    if (text.find_first_of(".eE") == std::string::npos) return add_large(value, text);
    return add(Value(value));
  }
  bool string(string_t& value) override { return add(Value(std::move(value))); }
  bool binary(binary_t&) override { return false; }

  bool start_array(size_t) override { return open(false); }
  bool end_array() override {
    Level level = std::move(levels_.back());
    levels_.pop_back();
    return add(Value::list(std::move(level.items)));
  }
  bool start_object(size_t) override { return open(true); }
  bool key(string_t& value) override {
    levels_.back().key = Value(std::move(value));
    return true;
  }
  bool end_object() override {
    Level level = std::move(levels_.back());
    levels_.pop_back();
    return add(make_dict(std::move(level.dict)));
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    error_ = fmt::format("no JSON (at byte {})", position);
    return false;
  }

  Value take() {
    if (!error_.empty()) throw InputError(fmt::format("{}: {}", what_, error_));
    return std::move(root_);
  }

 private:
  struct Level {
    std::shared_ptr<DictObject> dict;  ///< null for an array
    std::vector<Value> items;
    Value key;
  };

  bool open(bool is_object) {
    constexpr size_t kMaxDepth = 200;
    if (levels_.size() >= kMaxDepth) {
      error_ = fmt::format("JSON nests deeper than {} levels", kMaxDepth);
      return false;
    }
    levels_.push_back({is_object ? std::make_shared<DictObject>() : nullptr, {}, {}});
    return true;
  }

  bool add(Value value) {
    if (levels_.empty()) {
      root_ = std::move(value);
    } else if (levels_.back().dict != nullptr) {
      levels_.back().dict->set(levels_.back().key, std::move(value));
    } else {
      levels_.back().items.push_back(std::move(value));
    }
    return true;
  }

  bool add_large(double value, const std::string& text) {
    if (large_ == LargeIntegers::kRounded) return add(Value(value));
    error_ = fmt::format("the integer {} has more than 64 bits", shorten(text));
    return false;
  }

  std::string what_, error_;
  LargeIntegers large_;
  std::vector<Level> levels_;
  Value root_;
};

}  // namespace

Value parse_json(std::string_view what, std::string_view text, LargeIntegers large) {
  JsonBuilder builder(what, large);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

Template::Template(std::string_view source, const Limits& limits) {
  const Unmetered outlives_every_rendering;
  tree_ = std::make_unique<TemplateTree>(parse(source, limits));
}

Template::~Template() = default;
Template::Template(Template&&) noexcept = default;
Template& Template::operator=(Template&&) noexcept = default;

bool Template::has_generation() const {
  return tree_->has_generation;
}

Rendered Template::render(const Value& variables, const RenderOptions& options) const {
  if (!variables.is(Kind::kDict)) fail("the variables of a template are no dict");
  Meter meter(options.limits);
  Interpreter interpreter(*tree_, variables, options, meter);
  return interpreter.render();
}

}  // namespace tessera::text::jinja
