#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "core/check.h"

namespace tessera {

/// Up to 8 dimensions, stored in place. Used for shapes and, as `Strides`, for element strides.
class Shape {
 public:
  static constexpr int kMaxDims = 8;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const int64_t> dims) {
    TESSERA_CHECK_AS(ShapeError, dims.size() <= kMaxDims, "Shape: at most 8 dimensions, got {}",
                     dims.size());
    num_dims_ = static_cast<int>(dims.size());
    std::copy(dims.begin(), dims.end(), dims_.begin());
  }

  int num_dims() const { return num_dims_; }
  int64_t& operator[](int i) { return dims_[static_cast<size_t>(i)]; }
  int64_t operator[](int i) const { return dims_[static_cast<size_t>(i)]; }
  /// Dimension i; negative i counts from the end. ShapeError if out of range.
  int64_t dim(int i) const { return (*this)[wrap(i)]; }
  /// i in [-num_dims, num_dims) as an index in [0, num_dims).
  int wrap(int i) const {
    const int wrapped = i < 0 ? i + num_dims_ : i;
    if (wrapped < 0 || wrapped >= num_dims_) [[unlikely]]
      fail_index(i);
    return wrapped;
  }
  int64_t numel() const {
    int64_t product = 1;
    for (int i = 0; i < num_dims_; ++i) product *= (*this)[i];
    return product;
  }
  const int64_t* begin() const { return dims_.data(); }
  const int64_t* end() const { return dims_.data() + num_dims_; }
  void push_back(int64_t dim);  ///< one more, the last
  /// Same dimensions with dimension i (may be negative) replaced.
  Shape with(int i, int64_t dim) const {
    Shape s = *this;
    s[wrap(i)] = dim;
    return s;
  }

  friend bool operator==(const Shape& a, const Shape& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  [[noreturn]] void fail_index(int i) const;

  int num_dims_ = 0;
  std::array<int64_t, kMaxDims> dims_{};
};

/// Elements from one index of a dimension to the next.
using Strides = Shape;

/// Row-major strides in elements.
Strides contiguous_strides(const Shape& shape);
/// The numpy broadcast of two shapes; ShapeError that names `op` and both shapes if there is none.
Shape broadcast_shapes(const Shape& a, const Shape& b, const char* op);

}  // namespace tessera

template <>
struct fmt::formatter<tessera::Shape> {
  constexpr auto parse(fmt::format_parse_context& ctx) { return ctx.begin(); }
  auto format(const tessera::Shape& shape, fmt::format_context& ctx) const {
    return fmt::format_to(ctx.out(), "[{}]", fmt::join(shape.begin(), shape.end(), ", "));
  }
};
template <>
struct fmt::is_range<tessera::Shape, char> : std::false_type {};
