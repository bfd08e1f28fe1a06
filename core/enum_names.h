#pragma once

#include <fmt/format.h>

#include <array>
#include <string_view>
#include <type_traits>

#include "core/check.h"

// The names of an enum stand once, in a table beside it:
//
//   enum class Gelu { kTanh, kExact };
//   constexpr auto enum_names(Gelu) {
//     return std::to_array<EnumName<Gelu>>({{Gelu::kTanh, "tanh"}, {Gelu::kExact, "exact"}});
//   }
//
// Settings, messages and what is read from a file all take it from there.

namespace tessera {

template <class E>
struct EnumName {
  E value;
  std::string_view name;
};

/// An enum with such a table, which argument-dependent lookup finds.
template <class E>
concept NamedEnum = std::is_enum_v<E> && requires {
  enum_names(E{});
};

template <NamedEnum E>
inline constexpr auto kEnumNames = enum_names(E{});

template <NamedEnum E>
constexpr std::string_view name_of(E value) {
  for (const EnumName<E>& entry : kEnumNames<E>) {
    if (entry.value == value) return entry.name;
  }
  return "?";
}

/// The inverse of `name_of`. ConfigError, which begins with `what` and lists the names, if there is
/// none.
template <NamedEnum E>
E enum_from_name(std::string_view name, std::string_view what) {
  std::string known;
  for (const EnumName<E>& entry : kEnumNames<E>) {
    if (entry.name == name) return entry.value;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", entry.name);
  }
  throw ConfigError(fmt::format("{}: unknown name \"{}\", expected one of {}", what, name, known));
}

}  // namespace tessera
