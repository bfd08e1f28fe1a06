#include "kernels/optimizer/dynamic_map.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace tessera::kernels {
namespace {

/// Middles of `count` equal parts of [0.1, 1], in the arithmetic of torch.linspace in f32.
std::vector<float> middles(int count) {
  const float begin = 0.1f, end = 1.0f;
  const float step = (end - begin) / static_cast<float>(count);
  std::vector<float> bounds;
  for (int i = 0; i <= count; ++i) {
    // From the nearer end.
    bounds.push_back(i < (count + 1) / 2 ? std::fma(step, static_cast<float>(i), begin)
                                         : std::fma(-step, static_cast<float>(count - i), end));
  }
  std::vector<float> all;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) all.push_back((bounds[i] + bounds[i + 1]) / 2.0f);
  return all;
}

/// The largest x for which `low` is as near as `high` or nearer, by differences in f32.
float threshold(float low, float high) {
  const auto is_low = [&](float x) { return x - low <= high - x; };
  float below = low, above = high;
  while (std::nextafter(below, above) < above) {
    const float middle = below + (above - below) / 2;
    const float next = middle > below && middle < above ? middle : std::nextafter(below, above);
    (is_low(next) ? below : above) = next;
  }
  return below;
}

DynamicMap make_map(bool is_signed) {
  constexpr int kDecades = 7;
  std::vector<float> values{0.0f, 1.0f};
  for (int i = 0; i < kDecades; ++i) {
    const auto scale = static_cast<float>(std::pow(10.0, i - (kDecades - 1)));
    for (const float middle : middles(1 << (is_signed ? i : i + 1))) {
      values.push_back(scale * middle);
      if (is_signed) values.push_back(-scale * middle);
    }
  }
  std::sort(values.begin(), values.end());
  DynamicMap map{};
  std::copy(values.begin(), values.end(), map.values.begin());
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    map.thresholds[i] = threshold(values[i], values[i + 1]);
  }
  map.thresholds.back() = std::numeric_limits<float>::infinity();
  return map;
}

}  // namespace

const DynamicMap& dynamic_map(bool is_signed) {
  static const DynamicMap kSigned = make_map(true), kUnsigned = make_map(false);
  return is_signed ? kSigned : kUnsigned;
}

std::vector<float> dynamic_maps() {
  std::vector<float> all;
  for (const bool is_signed : {true, false}) {
    const DynamicMap& map = dynamic_map(is_signed);
    all.insert(all.end(), map.values.begin(), map.values.end());
    all.insert(all.end(), map.thresholds.begin(), map.thresholds.end());
  }
  return all;
}

}  // namespace tessera::kernels
