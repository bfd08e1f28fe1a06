#include "apps/text/jinja/function.h"

#include <algorithm>

namespace tessera::text::jinja {
namespace {

struct CallbackObject : FunctionObject {
  CallbackObject(std::string of, Callback to) : FunctionObject(std::move(of)), callback(to) {}
  Value call(Interpreter& interpreter, Args args) const override {
    return callback(interpreter, args);
  }
  Callback callback;
};

}  // namespace

std::string FunctionObject::describe() const {
  return fmt::format("<{} {} at 0x0>", type(), name);
}

Value make_function(std::string name, Callback callback) {
  return {Kind::kFunction, std::make_shared<CallbackObject>(std::move(name), callback)};
}

Value call(Interpreter& interpreter, const Value& function, Args args) {
  count_steps(2);
  if (function.is(Kind::kFunction) && function.as<FunctionObject>().is_callable()) {
    return function.as<FunctionObject>().call(interpreter, std::move(args));
  }
  if (function.is(Kind::kLoop)) {
    return function.as<LoopObject>().call(interpreter, std::move(args));
  }
  if (function.is_undefined()) throw TemplateError(function.as<UndefinedObject>().message);
  fail("'{}' object is not callable", type_name(function));
}

bool is_callable(const Value& value) {
  if (value.is(Kind::kFunction)) return value.as<FunctionObject>().is_callable();
  return value.is(Kind::kLoop) || value.is_undefined();
}

ArgReader::ArgReader(const Args& args, std::string_view function)
    : args_(args), function_(function), is_used_(args.keyword.size(), false) {}

const Value* ArgReader::take(std::string_view parameter) {
  const Value* found = nullptr;
  if (num_taken_ < args_.positional.size()) found = &args_.positional[num_taken_];
  ++num_taken_;
  for (size_t i = 0; i < args_.keyword.size(); ++i) {
    if (parameter.empty() || args_.keyword[i].first != parameter) continue;
    if (found != nullptr) fail("{}() got multiple values for argument '{}'", function_, parameter);
    is_used_[i] = true;
    found = &args_.keyword[i].second;
  }
  return found;
}

const Value& ArgReader::required(std::string_view parameter) {
  const Value* value = take(parameter);
  if (value == nullptr) {
    fail("{}() missing required positional argument: '{}'", function_, parameter);
  }
  return *value;
}

const Value& ArgReader::required_positional() {
  const Value* value = take("");
  if (value == nullptr) {
    fail("{}() takes at least {} arguments ({} given)", function_, num_taken_,
         args_.positional.size());
  }
  return *value;
}

Value ArgReader::optional(std::string_view parameter, Value otherwise) {
  const Value* value = take(parameter);
  return value == nullptr ? std::move(otherwise) : *value;
}

Value ArgReader::positional_only(Value otherwise) {
  const Value* value = take("");
  return value == nullptr ? std::move(otherwise) : *value;
}

Value ArgReader::keyword_only(std::string_view parameter, Value otherwise) {
  for (size_t i = 0; i < args_.keyword.size(); ++i) {
    if (args_.keyword[i].first != parameter) continue;
    is_used_[i] = true;
    return args_.keyword[i].second;
  }
  return otherwise;
}

void ArgReader::finish() const {
  if (args_.positional.size() > num_taken_) {
    fail("{}() takes {} positional arguments but {} were given", function_, num_taken_,
         args_.positional.size());
  }
  for (size_t i = 0; i < args_.keyword.size(); ++i) {
    if (!is_used_[i]) {
      fail("{}() got an unexpected keyword argument '{}'", function_, args_.keyword[i].first);
    }
  }
}

int64_t to_index(const Value& value, std::string_view what) {
  if (value.is_undefined()) throw TemplateError(value.as<UndefinedObject>().message);
  if (!value.is_integral()) {
    fail("{}: '{}' object cannot be interpreted as an integer", what, type_name(value));
  }
  return value.integer();
}

const std::string& to_text(const Value& value, std::string_view what) {
  if (value.is_undefined()) throw TemplateError(value.as<UndefinedObject>().message);
  if (!value.is_string()) fail("{}: expected str, got {}", what, type_name(value));
  return value.text();
}

}  // namespace tessera::text::jinja
