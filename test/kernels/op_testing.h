#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/runtime/context.h"
#include "test/testing.h"

// For tests of differentiable ops on the CPU.

namespace tessera::testing {

using Tensors = std::vector<Tensor>;
using Function = std::function<Tensor(const Tensors&)>;

/// f throws an error whose text contains all of `parts`.
inline void check_error(const std::function<void()>& f, const std::vector<std::string>& parts) {
  const std::string text = error_of(f);
  INFO(text);
  for (const std::string& part : parts) CHECK(text.find(part) != std::string::npos);
}

inline Tensor leaf(const Shape& shape, DType dtype = kF64, uint64_t seed = 1) {
  return randn(shape, dtype, seed).set_requires_grad(true);
}

inline Tensor leaf_of(std::initializer_list<double> values) {
  return from_values(values, {static_cast<int64_t>(values.size())}, kF64).set_requires_grad(true);
}

struct Run {
  Tensor y;
  Tensors grads;
};

/// y = fn(inputs in `dtype`) and the gradients of sum(y * fixed weights).
inline Run run(const Function& fn, const Tensors& inputs, DType dtype) {
  Run r;
  Tensors leaves;
  for (const Tensor& x : inputs) {
    leaves.push_back(x.detach().to(dtype).clone().set_requires_grad(true));
  }
  r.y = fn(leaves);
  backward(r.y, randn(r.y.shape(), kF16, 77).to(dtype));
  for (const Tensor& x : leaves) r.grads.push_back(x.grad());
  return r;
}

/// Values and gradients in each dtype against f64, from inputs that all dtypes represent.
inline void check_dtypes(const Function& fn, const std::vector<Shape>& shapes, double factor = 1) {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    CAPTURE(name_of(dtype));
    Tensors inputs;
    for (size_t i = 0; i < shapes.size(); ++i) {
      inputs.push_back(randn(shapes[i], dtype, i + 1));
    }
    const Run expected = run(fn, inputs, kF64), actual = run(fn, inputs, dtype);
    CHECK(actual.y.dtype() == dtype);
    check_close(actual.y, expected.y, factor * tol(dtype), "y");
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_close(actual.grads[i], expected.grads[i], factor * tol(dtype), "gradient");
    }
  }
}

inline Run run_on_threads(int num_threads, const std::function<Run()>& f) {
  Context::Scope scope(std::make_shared<Context>(
      ContextOptions{.device = {}, .num_threads = num_threads, .poison = true}));
  Run r = f();
  current_stream().synchronize();
  return r;
}

inline void check_same_on_threads(const std::function<Run()>& f) {
  const Run one = run_on_threads(1, f), two = run_on_threads(2, f);
  check_bitwise(two.y, one.y, "y");
  for (size_t i = 0; i < one.grads.size(); ++i) check_bitwise(two.grads[i], one.grads[i]);
}

/// A sink with a destination of a dtype of its own.
class BufferSink : public GradSink {
 public:
  BufferSink(const Tensor& buffer, bool accumulate) : buffer_(buffer), accumulate_(accumulate) {}
  GradDst destination(const Tensor&) override { return {buffer_, accumulate_}; }
  void written(const Tensor&) override { accumulate_ = true; }

 private:
  Tensor buffer_;
  bool accumulate_;
};

}  // namespace tessera::testing
