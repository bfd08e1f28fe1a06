#include "kernels/shaping/shaping.h"

#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "kernels/shaping/kernel.h"
#include "test/kernels/op_testing.h"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("cat, stack: values along any dimension, any dtype", "[shaping]") {
  const Tensor a = from_values({1.0, 2.0, 3.0, 4.0}, {2, 2}, kF32),
               b = from_values({5.0, 6.0}, {2, 1}, kF32);
  check_close(cat({a, b}, 1).to_vector(), {1, 2, 5, 3, 4, 6}, 0);
  check_close(cat({b, a}, -1).to_vector(), {5, 1, 2, 6, 3, 4}, 0);
  check_close(cat({a, a.transpose(0, 1)}).to_vector(), {1, 2, 3, 4, 1, 3, 2, 4}, 0);
  CHECK(cat({empty({0, 2}), a}).shape() == Shape{2, 2});
  const Tensor i = from_values({1, 2}, {2}), j = from_values({3, 4}, {2});
  check_close(stack({i, j}).to_vector(), {1, 2, 3, 4}, 0);
  check_close(stack({i, j}, 1).to_vector(), {1, 3, 2, 4}, 0);
  check_close(stack({i, j}, -1).to_vector(), {1, 3, 2, 4}, 0);
  CHECK(stack({i, j}, -1).dtype() == kI32);
  CHECK(stack({full({}, 1), full({}, 2), full({}, 3)}).shape() == Shape{3});
}

TEST_CASE("cat, stack: backward matches finite differences", "[shaping]") {
  gradcheck(
      [](const Tensors& t) {
        return cat({t[0], t[1], t[0]}, 1);
      },
      {leaf({2, 3, 2}, kF64, 1), leaf({2, 1, 2}, kF64, 2)});
  gradcheck(
      [](const Tensors& t) {
        return cat({t[0].transpose(0, 1), t[1]}) * t[1];
      },
      {leaf({3, 2}, kF64, 1), leaf({1, 3}, kF64, 2)});
  gradcheck(
      [](const Tensors& t) {
        return stack({t[0], t[1]}, 1);
      },
      {leaf({2, 3}, kF64, 1), leaf({2, 3}, kF64, 2)});
  Tensor x = leaf({2, 3}, kBF16, 1);
  const Tensor unwanted = randn({2, 2}, kBF16), dx = full({2, 3}, 2);
  set_grad_sink(x, std::make_shared<BufferSink>(dx, true));
  backward(cat({unwanted, x}, 1), full({2, 5}, 3, kBF16));
  check_close(dx.to_vector(), std::vector<double>(6, 5), 0);
  CHECK(!unwanted.grad().is_defined());
}

TEST_CASE("gather: values along any dimension, any dtype", "[shaping]") {
  const Tensor x = from_values({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {2, 3}, kF32);
  const Tensor index = from_values({2, 0, 2, 2, 1, 1, 1, 0}, {2, 4});
  check_close(gather(x, 1, index).to_vector(), {3, 1, 3, 3, 5, 5, 5, 4}, 0);
  check_close(gather(x, -1, index.to(kI64)).to_vector(), {3, 1, 3, 3, 5, 5, 5, 4}, 0);
  check_close(gather(x, 0, from_values({1, 0, 1}, {1, 3})).to_vector(), {4, 2, 6}, 0);
  check_close(gather(x.transpose(0, 1), 1, from_values({1, 0, 1}, {3, 1})).to_vector(), {4, 2, 6},
              0);
  for (const DType dtype : {kBF16, kF16, kF64, kI32, kI64, kU8}) {
    const Tensor y = gather(x.to(dtype), 1, index);
    CHECK(y.dtype() == dtype);
    check_close(y.to_vector(), {3, 1, 3, 3, 5, 5, 5, 4}, 0);
  }
  CHECK(gather(x, 1, empty({2, 0}, kI32)).shape() == Shape{2, 0});
}

TEST_CASE("gather: places named often get the sum, the others zero", "[shaping]") {
  Tensor x = full({2, 3}, 1, kF64).set_requires_grad(true);
  backward(gather(x, 1, from_values({2, 0, 2, 2, 1, 1, 1, 0}, {2, 4})), full({2, 4}, 1, kF64));
  check_close(x.grad().to_vector(), {1, 0, 3, 1, 3, 0}, 0);
  gradcheck(
      [](const Tensors& t) {
        return gather(t[0], 1, randint(0, 3, {2, 7, 5}, kI64, 3));
      },
      {leaf({2, 3, 5})});
  gradcheck(
      [](const Tensors& t) {
        return gather(t[0], -1, randint(0, 5, {3, 9}, kI32, 3));
      },
      {leaf({3, 5})});
  gradcheck(
      [](const Tensors& t) {
        return gather(t[0].transpose(0, 1), 0, randint(0, 4, {6, 3}));
      },
      {leaf({3, 4})});
  // 4096 terms of 1 + 2^-7 in bf16, added in f32.
  Tensor narrow = full({1, 2}, 1, kBF16).set_requires_grad(true);
  const Tensor dx = full({1, 2}, 3);
  set_grad_sink(narrow, std::make_shared<BufferSink>(dx, true));
  backward(gather(narrow, 1, zeros({1, 4096}, kI32)), full({1, 4096}, 1.0078125, kBF16));
  check_close(dx.to_vector(), {3 + 4096 * 1.0078125, 3}, 1e-7);
  check_same_on_threads([] {
    return run(
        [](const Tensors& t) {
          return gather(t[0], 1, randint(0, 50, {70, 800}, kI32, 5));
        },
        {randn({70, 50}, kF32)}, kF32);
  });
}

TEST_CASE("shaping: errors name the op and what came", "[shaping]") {
  const Tensor f = full({2, 3}, 1), i = zeros({2, 3}, kI32);
  check_error([] { cat({}); }, {"cat: expected at least one tensor, got none"});
  check_error([] { stack({}); }, {"stack: expected at least one tensor, got none"});
  check_error(
      [&] {
        cat({f, full({3, 3}, 1)}, 1);
      },
      {"cat: the tensors must be alike but for dimension 1, got [2, 3] and [3, 3]"});
  check_error([&] { cat({f, i}); }, {"cat: the tensors must have one dtype", "i32 vs f32"});
  check_error(
      [&] {
        stack({f, full({3}, 1)});
      },
      {"stack: the tensors must have one shape", "[3] vs [2, 3]"});
  CHECK_THROWS_AS(cat({f}, 2), ShapeError);
  CHECK_THROWS_AS(stack({f}, 3), ShapeError);
  check_error([&] { gather(f, 1, f); }, {"gather: index must be i32 or i64, got f32"});
  check_error(
      [&] {
        gather(f, 1, zeros({3, 1}, kI32));
      },
      {"gather: x and index must be alike but for dimension 1, got [2, 3] and [3, 1]"});
  for (const int wrong : {-1, 3}) {
    const Context::Scope scope(
        std::make_shared<Context>(ContextOptions{}));  // a poisoned stream goes with it
    check_error(
        [&] {
          gather(f, 1, from_values({0, wrong}, {2, 1}));
          current_stream().synchronize();
        },
        {fmt::format("gather: index {} at position 1 is out of range [0, 3)", wrong)});
  }
}

TEST_CASE("shaping: costs", "[shaping]") {
  float dummy[1];
  const kernels::Gather gather{dummy, dummy, dummy, kBF16, kI32, 2, 5, 3, 4};
  CHECK(gather.cost().bytes_read() == 40 * 2 + 24 * 4);
  CHECK(gather.cost().bytes_written() == 24 * 2);
  const kernels::ScatterAdd scatter{dummy, dummy, dummy, kBF16, kI64, 2, 5, 3, 4};
  CHECK(scatter.cost().flops() == 24);
  CHECK(scatter.cost().bytes_read() == 24 * 2 + 24 * 8 + 40 * 4);
  CHECK(scatter.cost().bytes_written() == 40 * 4);
}
