#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/autograd.h"
#include "core/tensor.h"

// [Note: Assertions on several threads]
// Catch2's assertions and messages are for the thread that runs the test. Ranks are threads, and so
// are writers and helpers: there an assertion that fails throws an Error with its text, which
// `run_ranks` hands to the test's thread (and which ends a bare std::thread, and the test, loudly);
// one that holds touches nothing that is shared, and INFO and CAPTURE say nothing. So the macros
// are made again below, and no test includes Catch2 but through this header (test/assertions.sh).

namespace tessera::testing {

/// This is the thread on which Catch2 runs the tests.
bool is_test_thread();
/// Throws what an assertion on another thread has found.
[[noreturn]] void fail_on_thread(const char* macro, const char* text, const char* file, int line);

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

#define TESSERA_TEST_FAIL(macro, text) \
  ::tessera::testing::fail_on_thread(macro, text, __FILE__, __LINE__)
/// `catch2` on the test's thread, else a failure unless `holds`.
#define TESSERA_TEST_ASSERT(macro, text, holds, ...) \
  do {                                               \
    if (::tessera::testing::is_test_thread()) {      \
      __VA_ARGS__;                                   \
    } else if (!(holds)) {                           \
      TESSERA_TEST_FAIL(macro, text);                \
    }                                                \
  } while (false)

#undef CHECK
#undef CHECK_FALSE
#undef CHECK_NOTHROW
#undef CHECK_THAT
#undef CHECK_THROWS_AS
#undef CHECK_THROWS_WITH
#undef REQUIRE
#undef REQUIRE_FALSE
#undef REQUIRE_NOTHROW
#undef REQUIRE_THAT
#undef REQUIRE_THROWS_AS
#undef REQUIRE_THROWS_WITH
#undef INFO
#undef CAPTURE
#undef FAIL
#undef WARN
#define TESSERA_CATCH_CHECK Catch::ResultDisposition::ContinueOnFailure
#define TESSERA_CATCH_REQUIRE Catch::ResultDisposition::Normal
#define TESSERA_CATCH_FALSE Catch::ResultDisposition::FalseTest
#define CHECK(...)                                                           \
  TESSERA_TEST_ASSERT("CHECK", #__VA_ARGS__, static_cast<bool>(__VA_ARGS__), \
                      INTERNAL_CATCH_TEST("CHECK", TESSERA_CATCH_CHECK, __VA_ARGS__))
#define REQUIRE(...)                                                           \
  TESSERA_TEST_ASSERT("REQUIRE", #__VA_ARGS__, static_cast<bool>(__VA_ARGS__), \
                      INTERNAL_CATCH_TEST("REQUIRE", TESSERA_CATCH_REQUIRE, __VA_ARGS__))
#define CHECK_FALSE(...)                                            \
  TESSERA_TEST_ASSERT(                                              \
      "CHECK_FALSE", #__VA_ARGS__, !static_cast<bool>(__VA_ARGS__), \
      INTERNAL_CATCH_TEST("CHECK_FALSE", TESSERA_CATCH_CHECK | TESSERA_CATCH_FALSE, __VA_ARGS__))
#define REQUIRE_FALSE(...)                                                              \
  TESSERA_TEST_ASSERT(                                                                  \
      "REQUIRE_FALSE", #__VA_ARGS__, !static_cast<bool>(__VA_ARGS__),                   \
      INTERNAL_CATCH_TEST("REQUIRE_FALSE", TESSERA_CATCH_REQUIRE | TESSERA_CATCH_FALSE, \
                          __VA_ARGS__))
// An exception that is not expected passes through and so fails the test too.
#define CHECK_NOTHROW(...)                                                                   \
  TESSERA_TEST_ASSERT("CHECK_NOTHROW", #__VA_ARGS__, (static_cast<void>(__VA_ARGS__), true), \
                      INTERNAL_CATCH_NO_THROW("CHECK_NOTHROW", TESSERA_CATCH_CHECK, __VA_ARGS__))
#define REQUIRE_NOTHROW(...)                                                   \
  TESSERA_TEST_ASSERT(                                                         \
      "REQUIRE_NOTHROW", #__VA_ARGS__, (static_cast<void>(__VA_ARGS__), true), \
      INTERNAL_CATCH_NO_THROW("REQUIRE_NOTHROW", TESSERA_CATCH_REQUIRE, __VA_ARGS__))
#define TESSERA_TEST_THROWS(macro, disposition, expr, type)        \
  do {                                                             \
    if (::tessera::testing::is_test_thread()) {                    \
      INTERNAL_CATCH_THROWS_AS(macro, type, disposition, expr);    \
    } else {                                                       \
      bool has_thrown = false;                                     \
      try {                                                        \
        static_cast<void>(expr);                                   \
      } catch (const type&) {                                      \
        has_thrown = true;                                         \
      }                                                            \
      if (!has_thrown) TESSERA_TEST_FAIL(macro, #expr ", " #type); \
    }                                                              \
  } while (false)
#define CHECK_THROWS_AS(expr, type) \
  TESSERA_TEST_THROWS("CHECK_THROWS_AS", TESSERA_CATCH_CHECK, expr, type)
#define REQUIRE_THROWS_AS(expr, type) \
  TESSERA_TEST_THROWS("REQUIRE_THROWS_AS", TESSERA_CATCH_REQUIRE, expr, type)
// Matchers are for the test's thread.
#define CHECK_THAT(arg, matcher)                                              \
  TESSERA_TEST_ASSERT("CHECK_THAT", "not on the test's thread: " #arg, false, \
                      INTERNAL_CHECK_THAT("CHECK_THAT", matcher, TESSERA_CATCH_CHECK, arg))
#define REQUIRE_THAT(arg, matcher)                                              \
  TESSERA_TEST_ASSERT("REQUIRE_THAT", "not on the test's thread: " #arg, false, \
                      INTERNAL_CHECK_THAT("REQUIRE_THAT", matcher, TESSERA_CATCH_REQUIRE, arg))
#define CHECK_THROWS_WITH(expr, matcher)                              \
  TESSERA_TEST_ASSERT(                                                \
      "CHECK_THROWS_WITH", "not on the test's thread: " #expr, false, \
      INTERNAL_CATCH_THROWS_STR_MATCHES("CHECK_THROWS_WITH", TESSERA_CATCH_CHECK, matcher, expr))
#define REQUIRE_THROWS_WITH(expr, matcher)                                              \
  TESSERA_TEST_ASSERT("REQUIRE_THROWS_WITH", "not on the test's thread: " #expr, false, \
                      INTERNAL_CATCH_THROWS_STR_MATCHES("REQUIRE_THROWS_WITH",          \
                                                        TESSERA_CATCH_REQUIRE, matcher, expr))
#define TESSERA_TEST_MESSAGE(name, log)                                                       \
  std::optional<Catch::ScopedMessage> name;                                                   \
  if (::tessera::testing::is_test_thread())                                                   \
  name.emplace(                                                                               \
      Catch::MessageBuilder("INFO"_catch_sr, CATCH_INTERNAL_LINEINFO, Catch::ResultWas::Info) \
      << log)
#define INFO(log) TESSERA_TEST_MESSAGE(INTERNAL_CATCH_UNIQUE_NAME(scoped_message), log)
#define TESSERA_TEST_CAPTURE(name, ...)                                                   \
  std::optional<Catch::Capturer> name;                                                    \
  if (::tessera::testing::is_test_thread())                                               \
  name.emplace("CAPTURE", CATCH_INTERNAL_LINEINFO, Catch::ResultWas::Info, #__VA_ARGS__), \
      name->captureValues(0, __VA_ARGS__)
#define CAPTURE(...) TESSERA_TEST_CAPTURE(INTERNAL_CATCH_UNIQUE_NAME(capturer), __VA_ARGS__)
#define FAIL(...)                                                                        \
  do {                                                                                   \
    if (!::tessera::testing::is_test_thread()) TESSERA_TEST_FAIL("FAIL", #__VA_ARGS__);  \
    INTERNAL_CATCH_MSG("FAIL", Catch::ResultWas::ExplicitFailure, TESSERA_CATCH_REQUIRE, \
                       __VA_ARGS__);                                                     \
  } while (false)
#define WARN(log)                                                                      \
  do {                                                                                 \
    if (::tessera::testing::is_test_thread())                                          \
      INTERNAL_CATCH_MSG("WARN", Catch::ResultWas::Warning, TESSERA_CATCH_CHECK, log); \
  } while (false)
