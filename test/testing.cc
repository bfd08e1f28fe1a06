#include "test/testing.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/random.h"

namespace tessera::testing {
namespace {

std::string index_of(int64_t flat, const Shape& shape) {
  Shape index = shape;
  for (int i = shape.num_dims() - 1; i >= 0; --i) {
    index[i] = flat % shape[i];
    flat /= shape[i];
  }
  return fmt::format("{}", index);
}

/// A test may use its inputs on other streams, in other Contexts: they are there when it gets them.
Tensor ready(Tensor tensor) {
  current_stream().synchronize();
  return tensor;
}

}  // namespace

double tol(DType dtype, int64_t reduce_length) {
  const double root = std::sqrt(static_cast<double>(std::max<int64_t>(reduce_length, 1)));
  switch (dtype) {
    case kF64:
      return 1e-13 * root;
    case kF32:
      return 2e-6 * root;
    case kBF16:
      return 1e-2 + 2e-6 * root;  // 8 bits: half an ulp is 2^-9, and a few of them
    case kF16:
      return 1.5e-3 + 2e-6 * root;
    default:
      return 0;
  }
}

Tensor randn(const Shape& shape, DType dtype, uint64_t seed, double scale) {
  std::vector<double> values(static_cast<size_t>(shape.numel()));
  const PhiloxKey key = make_key(seed, 0x7e57);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto bits = philox(key, 0, i);
    const double u = (static_cast<double>(bits[0]) + 0.5) * 0x1p-32;
    const double v = static_cast<double>(bits[1]) * 0x1p-32;
    values[i] = scale * std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v);
  }
  return ready(from_values(values, shape, dtype));
}

Tensor randint(int64_t low, int64_t high, const Shape& shape, DType dtype, uint64_t seed) {
  std::vector<int64_t> values(static_cast<size_t>(shape.numel()));
  const PhiloxKey key = make_key(seed, 0x1d5);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        low + static_cast<int64_t>(philox(key, 0, i)[0] % static_cast<uint64_t>(high - low));
  }
  return ready(from_values(values, shape, dtype));
}

namespace {
const std::thread::id test_thread = std::this_thread::get_id();  // static objects: main's thread
}

bool is_test_thread() {
  return std::this_thread::get_id() == test_thread;
}

void fail_on_thread(const char* macro, const char* text, const char* file, int line) {
  throw Error(fmt::format("{}:{}: {}( {} ) failed", file, line, macro, text));
}

void check_close(const std::vector<double>& actual, const std::vector<double>& expected,
                 double tolerance, const std::string& what) {
  INFO(what);
  REQUIRE(actual.size() == expected.size());
  double scale = 1;
  for (const double e : expected) scale = std::max(scale, std::fabs(e));
  size_t worst = 0;
  double worst_error = -1;
  for (size_t i = 0; i < expected.size(); ++i) {
    // Equal infinities match; NaN gives NaN, which is not <= anything.
    const double error = actual[i] == expected[i] ? 0 : std::fabs(actual[i] - expected[i]);
    if (!(error <= worst_error)) worst = i, worst_error = error;
    if (std::isnan(error)) break;
  }
  if (expected.empty()) return;
  INFO("index " << worst << ": actual " << actual[worst] << ", expected " << expected[worst]
                << ", error " << worst_error << " > " << tolerance * scale);
  if (!is_test_thread() && !(worst_error <= tolerance * scale)) {  // which says no INFO
    throw Error(fmt::format("{}: index {}: actual {}, expected {}, error {} > {}", what, worst,
                            actual[worst], expected[worst], worst_error, tolerance * scale));
  }
  CHECK(worst_error <= tolerance * scale);
}

void check_close(const Tensor& actual, const Tensor& expected, double tolerance,
                 const std::string& what) {
  {
    INFO(what);
    REQUIRE(fmt::format("{}", actual.shape()) == fmt::format("{}", expected.shape()));
  }
  check_close(actual.to_vector(), expected.to_vector(), tolerance, what);
}

void check_bitwise(const Tensor& actual, const Tensor& expected, const std::string& what) {
  const std::vector<double> a = actual.to_vector(), e = expected.to_vector();
  INFO(what);
  REQUIRE(fmt::format("{} {}", actual.dtype(), actual.shape()) ==
          fmt::format("{} {}", expected.dtype(), expected.shape()));
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &e[i], sizeof(double)) == 0) continue;
    INFO("index " << index_of(static_cast<int64_t>(i), actual.shape()) << ": actual " << a[i]
                  << ", expected " << e[i]);
    REQUIRE(a[i] == e[i]);
    REQUIRE(std::signbit(a[i]) == std::signbit(e[i]));
  }
}

void gradcheck(const std::function<Tensor(const std::vector<Tensor>&)>& fn,
               const std::vector<Tensor>& inputs, double tolerance, double step) {
  const Shape out_shape = fn(inputs).shape();
  const Tensor weights = randn(out_shape, kF64, 99);
  const std::vector<double> w = weights.to_vector();
  const auto weighted_sum = [&](const std::vector<Tensor>& in) {
    NoGrad no_grad;
    const std::vector<double> y = fn(in).to_vector();
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * w[i];
    return sum;
  };
  for (const Tensor& input : inputs) {
    if (input.is_defined() && input.requires_grad()) Tensor(input).zero_grad();
  }
  backward(fn(inputs), weights);
  for (size_t k = 0; k < inputs.size(); ++k) {
    const Tensor& input = inputs[k];
    if (!input.is_defined() || !input.requires_grad()) continue;
    REQUIRE(input.dtype() == kF64);
    INFO("input " << k);
    REQUIRE(input.grad().is_defined());
    const std::vector<double> analytic = input.grad().to_vector();
    std::vector<double> x = input.to_vector();
    double scale = 1;
    for (const double a : analytic) scale = std::max(scale, std::fabs(a));
    for (size_t i = 0; i < x.size(); ++i) {
      const auto at = [&](double value) {
        std::vector<double> moved = x;
        moved[i] = value;
        std::vector<Tensor> in = inputs;
        in[k] = from_values(moved, input.shape(), kF64);
        return weighted_sum(in);
      };
      const double numeric = (at(x[i] + step) - at(x[i] - step)) / (2 * step);
      INFO("input " << k << ", index " << index_of(static_cast<int64_t>(i), input.shape())
                    << ": numeric " << numeric << ", analytic " << analytic[i]);
      CHECK(std::fabs(numeric - analytic[i]) <= tolerance * scale);
    }
  }
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  FAIL("expected a tessera::Error, got none");
  return "";
}

}  // namespace tessera::testing
