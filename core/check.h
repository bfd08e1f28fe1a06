#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace tessera {

/// Base of all errors. `what()` names the operation, what was expected and what came.
/// `exit_status()` is what `main` ends with (1 unless a subclass says otherwise).
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
  virtual int exit_status() const noexcept { return 1; }
};

#define TESSERA_ERROR_CLASS(Name, status)                        \
  class Name : public Error {                                    \
   public:                                                       \
    using Error::Error;                                          \
    int exit_status() const noexcept override { return status; } \
  }
TESSERA_ERROR_CLASS(ShapeError, 1);
TESSERA_ERROR_CLASS(DtypeError, 1);
TESSERA_ERROR_CLASS(CudaError, 1);
TESSERA_ERROR_CLASS(UnimplementedError, 1);
TESSERA_ERROR_CLASS(InternalError, 1);
TESSERA_ERROR_CLASS(OutOfMemoryError, 1);
TESSERA_ERROR_CLASS(ConfigError, 2);      ///< command line or configuration
TESSERA_ERROR_CLASS(InputError, 3);       ///< a bad input file: text, tokens, tokenizer, weights
TESSERA_ERROR_CLASS(CheckpointError, 4);  ///< a damaged or unsuitable checkpoint
TESSERA_ERROR_CLASS(NumericsError, 5);    ///< non-finite loss or gradient norm
TESSERA_ERROR_CLASS(CommError, 6);        ///< a collective or another rank failed
TESSERA_ERROR_CLASS(IoError, 7);          ///< reading or writing failed
#undef TESSERA_ERROR_CLASS

class Shape;
enum class DType : unsigned char;

namespace detail {

/// A failed comparison of shapes is a ShapeError, of dtypes a DtypeError, else an Error.
template <class T>
using CheckError =
    std::conditional_t<std::is_same_v<T, Shape>, ShapeError,
                       std::conditional_t<std::is_same_v<T, DType>, DtypeError, Error>>;

[[nodiscard]] std::string locate(std::string message, const char* file, int line);

template <class E, class... Args>
[[noreturn]] void fail(const char* file, int line, fmt::format_string<Args...> format,
                       Args&&... args) {
  throw E(locate(fmt::format(format, std::forward<Args>(args)...), file, line));
}

template <class A, class B>
[[noreturn]] void fail_compare(const char* file, int line, const char* expression, const A& a,
                               const B& b, const std::string& message) {
  throw CheckError<A>(
      locate(fmt::format("{} ({}: {} vs {})", message, expression, a, b), file, line));
}

}  // namespace detail

/// A mistake of the caller; always checked. TESSERA_CHECK(cond, "op: expected ..., got {}", x).
#define TESSERA_CHECK_AS(ErrorType, cond, ...)                             \
  do {                                                                     \
    if (!(cond)) [[unlikely]]                                              \
      ::tessera::detail::fail<ErrorType>(__FILE__, __LINE__, __VA_ARGS__); \
  } while (0)
#define TESSERA_CHECK(cond, ...) TESSERA_CHECK_AS(::tessera::Error, cond, __VA_ARGS__)
#define TESSERA_CHECK_SHAPE(cond, ...) TESSERA_CHECK_AS(::tessera::ShapeError, cond, __VA_ARGS__)
#define TESSERA_CHECK_DTYPE(cond, ...) TESSERA_CHECK_AS(::tessera::DtypeError, cond, __VA_ARGS__)

#define TESSERA_CHECK_COMPARE(a, op, b, ...)                                                     \
  do {                                                                                           \
    const auto& check_a_ = (a);                                                                  \
    const auto& check_b_ = (b);                                                                  \
    if (!(check_a_ op check_b_)) [[unlikely]]                                                    \
      ::tessera::detail::fail_compare(__FILE__, __LINE__, #a " " #op " " #b, check_a_, check_b_, \
                                      ::fmt::format(__VA_ARGS__));                               \
  } while (0)
#define TESSERA_CHECK_EQ(a, b, ...) TESSERA_CHECK_COMPARE(a, ==, b, __VA_ARGS__)
#define TESSERA_CHECK_NE(a, b, ...) TESSERA_CHECK_COMPARE(a, !=, b, __VA_ARGS__)
#define TESSERA_CHECK_LT(a, b, ...) TESSERA_CHECK_COMPARE(a, <, b, __VA_ARGS__)
#define TESSERA_CHECK_LE(a, b, ...) TESSERA_CHECK_COMPARE(a, <=, b, __VA_ARGS__)

/// An invariant of our own; checked in debug builds only (no NDEBUG).
#ifdef NDEBUG
#define TESSERA_DCHECK(cond) \
  do {                       \
    (void)sizeof(cond);      \
  } while (0)
#else
#define TESSERA_DCHECK(cond) \
  TESSERA_CHECK_AS(::tessera::InternalError, cond, "invariant violated: {}", #cond)
#endif

#define TESSERA_UNIMPLEMENTED(...) \
  ::tessera::detail::fail<::tessera::UnimplementedError>(__FILE__, __LINE__, __VA_ARGS__)

}  // namespace tessera
