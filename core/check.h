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
  static constexpr int kExitStatus = 1;
  /// Its cause is a program, which has the place of the check that failed; else what a user gave.
  static constexpr bool kHasPlace = true;
  explicit Error(const std::string& message) : std::runtime_error(message) {}
  virtual int exit_status() const noexcept { return kExitStatus; }
};

// Class, exit status, whether messages end in the place of the check.
//
//   ConfigError      command line or configuration
//   InputError       a bad input file: text, tokens, tokenizer, weights
//   CheckpointError  a damaged or unsuitable checkpoint
//   NumericsError    non-finite loss or gradient norm
//   CommError        a collective or another rank failed
//   IoError          reading or writing failed
#define TESSERA_ERROR_CLASSES(X) \
  X(ShapeError, 1, true)         \
  X(DtypeError, 1, true)         \
  X(CudaError, 1, true)          \
  X(UnimplementedError, 1, true) \
  X(InternalError, 1, true)      \
  X(OutOfMemoryError, 1, true)   \
  X(ConfigError, 2, false)       \
  X(InputError, 3, false)        \
  X(CheckpointError, 4, false)   \
  X(NumericsError, 5, false)     \
  X(CommError, 6, true)          \
  X(IoError, 7, false)
#define TESSERA_ERROR_CLASS(Name, status, has_place)                  \
  class Name : public Error {                                         \
   public:                                                            \
    static constexpr int kExitStatus = status;                        \
    static constexpr bool kHasPlace = has_place;                      \
    using Error::Error;                                               \
    int exit_status() const noexcept override { return kExitStatus; } \
  };
TESSERA_ERROR_CLASSES(TESSERA_ERROR_CLASS)
#undef TESSERA_ERROR_CLASS

/// Throws the class that has an exit status of its own, as which another process reported it, else
/// Error.
[[noreturn]] void throw_with_status(int status, const std::string& message);

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
  std::string message = fmt::format(format, std::forward<Args>(args)...);
  if constexpr (E::kHasPlace) message = locate(std::move(message), file, line);
  throw E(message);
}

template <class A, class B>
[[noreturn]] void fail_compare(const char* file, int line, const char* expression, const A& a,
                               const B& b, const std::string& message) {
  throw CheckError<A>(
      locate(fmt::format("{} ({}: {} vs {})", message, expression, a, b), file, line));
}

}  // namespace detail

/// A mistake of the caller; always checked. TESSERA_CHECK(cond, "op: expected ..., got {}", x). The
/// message ends in the place of the check, but for what a user gave (ConfigError, InputError, ...).
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
