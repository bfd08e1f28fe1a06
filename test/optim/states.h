#pragma once

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/tensor.h"

// What test/golden/make_states.py computes with, and what it wrote.

namespace tessera::testing {

inline const nlohmann::json& golden_states() {
  static const nlohmann::json kStates =
      nlohmann::json::parse(std::ifstream(std::string(TESSERA_GOLDEN_DIR) + "/states.json"));
  return kStates;
}

/// `formula` of the script.
inline std::vector<float> formula(int64_t count, int64_t step, int64_t salt = 0) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t top = (i * 7919 + step * 104729 + salt * 1299709) % 2003 - 1001;
    values.push_back(
        static_cast<float>(static_cast<double>(top) / 1001 * (i % 5 == 0 ? 1.0 / 1024 : 1.0)));
  }
  return values;
}

/// `curved` of the script.
inline Tensor curved_tensor(int64_t count, int64_t step, int64_t salt) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t top =
        (i * i * 31 + i * 7919 + i / 7 * step * 1009 + step * 104729 + salt * 1299709) % 2003;
    values.push_back(static_cast<float>(static_cast<double>(top - 1001) / 1001));
  }
  return from_values(std::span<const float>(values), {count}, kF32);
}

inline Tensor formula_tensor(int64_t count, int64_t step, int64_t salt = 0) {
  const std::vector<float> values = formula(count, step, salt);
  return from_values(std::span<const float>(values), {count}, kF32);
}

}  // namespace tessera::testing
