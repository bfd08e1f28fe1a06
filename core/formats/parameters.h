#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/shape.h"

// A model's parameters in a store, whatever its form: what reads them or writes them needs to know
// no format, and a format no reader or writer.

namespace tessera {

/// Parameters to read, by their full names in the model. Values are f32 whatever is stored.
class ParameterSource {
 public:
  virtual ~ParameterSource() = default;

  /// The file or directory, for errors.
  virtual const std::string& path() const = 0;
  /// Of all parameters, in the order of the store.
  virtual std::vector<std::string> names() const = 0;
  /// InputError with `path` if there is no such parameter, or its values are no floats.
  virtual Shape shape_of(std::string_view name) const = 0;
  /// Elements [begin, end) of the flattened parameter. Touches the bytes that they come from, and
  /// takes no memory beside `dst` that grows with them.
  /// Errors   as `shape_of`; InputError for elements that it has not; those of the store
  void read(std::string_view name, int64_t begin, int64_t end, float* dst) const;

 private:
  virtual void do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const = 0;
};

/// Where parameters are written to, one by one in any order, each once.
class ParameterSink {
 public:
  virtual ~ParameterSink() = default;

  /// The whole of one; the values are read before it returns.
  /// Errors   Error for a name that was not announced, another shape, one written before; IoError
  virtual void write(std::string_view name, const Shape& shape, const float* values) = 0;
  /// Makes what was written visible under its name, on the disk; without it nothing is left.
  /// Errors   Error if one is missing; IoError
  virtual void finish() = 0;
};

/// All parameters of `source` into `sink`, and `finish`: one is in memory at a time.
void copy_parameters(const ParameterSource& source, ParameterSink& sink);

/// dst[i] = element i * stride of `src`, which need not be aligned. DtypeError if not of floats.
void load_floats(float* dst, const void* src, DType dtype, int64_t count, int64_t stride = 1);

}  // namespace tessera
