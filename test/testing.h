#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "core/autograd.h"
#include "core/tensor.h"

namespace tessera::testing {

/// Relative tolerance for a value of `dtype` after a sum over `reduce_length` terms: a few units in
/// the last place of the dtype, plus f32 rounding growing with the square root of the length.
double tol(DType dtype, int64_t reduce_length = 1);

/// Reproducible normal values (std 1) for a test; already rounded to `dtype`.
Tensor randn(const Shape& shape, DType dtype = kF32, uint64_t seed = 1, double scale = 1.0);
/// Reproducible integers in [low, high).
Tensor randint(int64_t low, int64_t high, const Shape& shape, DType dtype = kI32,
               uint64_t seed = 1);

/// Fails the test (with index, expected, actual) unless |actual - expected| <=
/// tolerance * max(1, largest |expected|) for every element; NaN never matches.
void check_close(const std::vector<double>& actual, const std::vector<double>& expected,
                 double tolerance, const std::string& what = "values");
void check_close(const Tensor& actual, const Tensor& expected, double tolerance,
                 const std::string& what = "values");
void check_bitwise(const Tensor& actual, const Tensor& expected,
                   const std::string& what = "values");

/// Compares the analytic gradient of sum(fn(inputs) * fixed random weights) with central
/// differences in f64, for each input that requires a gradient; on failure prints input, index,
/// numeric and analytic value.
void gradcheck(const std::function<Tensor(const std::vector<Tensor>&)>& fn,
               const std::vector<Tensor>& inputs, double tolerance = 1e-6, double step = 1e-5);

/// Runs f and returns the text of the tessera::Error it throws; fails the test if it throws none.
std::string error_of(const std::function<void()>& f);

}  // namespace tessera::testing
