#include "core/formats/parameters.h"

#include <cstring>

#include "core/check.h"
#include "core/text.h"

namespace tessera {

void ParameterSource::read(std::string_view name, int64_t begin, int64_t end, float* dst) const {
  const int64_t numel = shape_of(name).numel();
  TESSERA_CHECK_AS(InputError, 0 <= begin && begin <= end && end <= numel,
                   "{}: elements [{}, {}) of {}, expected some of its {}", path(), begin, end,
                   shorten(name), numel);
  do_read(name, begin, end, dst);
}

void copy_parameters(const ParameterSource& source, ParameterSink& sink) {
  std::vector<float> values;
  for (const std::string& name : source.names()) {
    const Shape shape = source.shape_of(name);
    values.resize(static_cast<size_t>(shape.numel()));
    source.read(name, 0, shape.numel(), values.data());
    sink.write(name, shape, values.data());
  }
  sink.finish();
}

void load_floats(float* dst, const void* src, DType dtype, int64_t count, int64_t stride) {
  visit_float(dtype, "load_floats", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto load = [&](int64_t step) {
      const char* from = static_cast<const char*>(src);
      for (int64_t i = 0; i < count; ++i, from += step) {
        T value;
        std::memcpy(&value, from, sizeof(T));
        dst[i] = static_cast<float>(value);
      }
    };
    constexpr auto kWidth = static_cast<int64_t>(sizeof(T));
    if (stride == 1) {
      load(kWidth);  // vectorized
    } else {
      load(stride * kWidth);
    }
  });
}

}  // namespace tessera
