#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/enum_names.h"

namespace tessera::nn {

/// Which hidden states stand for a sequence: those of its first token (through the pooler of a model that
/// has one), of its last, or the mean over its tokens.
enum class Pooling : unsigned char { kCls, kLast, kMean };
constexpr auto enum_names(Pooling) {
  return std::to_array<EnumName<Pooling>>(
      {{Pooling::kCls, "cls"}, {Pooling::kLast, "last"}, {Pooling::kMean, "mean"}});
}

/// A model that classifies sequences in place of predicting tokens.
struct ClassifierConfig {
  std::vector<std::string> classes;  ///< their names, in the order of the logits
  Pooling pooling = Pooling::kLast;
  bool bias = false;  ///< of the layer that makes logits of pooled states
};

/// Whether a parameter of a model with classes, by its full name, is of a layer that models which
/// predict tokens need not have.
inline bool is_of_classifier(std::string_view parameter) {
  return parameter.starts_with("score.") || parameter.starts_with("pooler.");
}

}  // namespace tessera::nn
