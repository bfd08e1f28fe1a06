#pragma once

#include <span>
#include <string_view>
#include <utility>

#include "apps/text/jinja/function.h"

namespace tessera::text::jinja {

using NamedCallback = std::pair<std::string_view, Callback>;

/// The filters of texts and numbers, and those of sequences.
std::span<const NamedCallback> text_filters();
std::span<const NamedCallback> sequence_filters();

}  // namespace tessera::text::jinja
