#include "core/shape.h"

#include "test/testing.h"

namespace tessera {
namespace {

using testing::error_of;

TEST_CASE("shape: dimensions from the front and from the end", "[shape]") {
  const Shape s{2, 3, 5};
  CHECK(s.num_dims() == 3);
  CHECK(s.numel() == 30);
  CHECK(s.dim(0) == 2);
  CHECK(s.dim(-1) == 5);
  CHECK(s.wrap(-3) == 0);
  CHECK(s.with(-2, 7) == Shape{2, 7, 5});
  CHECK(error_of([&] { s.dim(3); }) == "Shape: dimension 3 is out of range for [2, 3, 5]");
  CHECK(error_of([&] { s.dim(-4); }) == "Shape: dimension -4 is out of range for [2, 3, 5]");
}

TEST_CASE("shape: a scalar has one element, an empty dimension none", "[shape]") {
  CHECK(Shape{}.numel() == 1);
  CHECK(Shape{4, 0, 3}.numel() == 0);
  CHECK(fmt::format("{} {}", Shape{}, Shape{4, 0}) == "[] [4, 0]");
  CHECK(error_of([] { Shape{}.dim(-1); }) == "Shape: dimension -1 is out of range for []");
}

TEST_CASE("shape: equality needs the same number of dimensions", "[shape]") {
  CHECK(Shape{2, 3} == Shape{2, 3});
  CHECK_FALSE(Shape{2, 3} == Shape{2, 3, 1});
  CHECK_FALSE(Shape{2, 3} == Shape{3, 2});
}

TEST_CASE("shape: at most eight dimensions", "[shape]") {
  Shape s{1, 2, 3, 4, 5, 6, 7, 8};
  CHECK(error_of([&] { s.push_back(9); }).find("Shape: at most 8 dimensions") == 0);
  CHECK(error_of([] {
          Shape{1, 2, 3, 4, 5, 6, 7, 8, 9};
        }).find("Shape: at most 8 dimensions, got 9") == 0);
}

TEST_CASE("shape: contiguous strides are row-major", "[shape]") {
  CHECK(contiguous_strides({2, 3, 5}) == Strides{15, 5, 1});
  CHECK(contiguous_strides({}) == Strides{});
}

TEST_CASE("shape: broadcasting follows numpy", "[shape]") {
  CHECK(broadcast_shapes({2, 3}, {3}, "add") == Shape{2, 3});
  CHECK(broadcast_shapes({2, 1, 4}, {3, 1}, "add") == Shape{2, 3, 4});
  CHECK(broadcast_shapes({}, {5}, "add") == Shape{5});
  CHECK(broadcast_shapes({1}, {0}, "add") == Shape{0});
  CHECK(error_of([] {
          broadcast_shapes({2, 3}, {2}, "add");
        }).find("add: [2, 3] and [2] do not broadcast") == 0);
}

}  // namespace
}  // namespace tessera
