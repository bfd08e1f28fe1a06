#include "core/dtype.h"

namespace tessera {

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case kF32:
      return "f32";
    case kBF16:
      return "bf16";
    case kF16:
      return "f16";
    case kF64:
      return "f64";
    case kI32:
      return "i32";
    case kI64:
      return "i64";
    case kU8:
      return "u8";
  }
  return "?";
}

DType dtype_from_name(std::string_view name) {
  for (DType dtype : {kF32, kBF16, kF16, kF64, kI32, kI64, kU8}) {
    if (name_of(dtype) == name) return dtype;
  }
  throw ConfigError(
      fmt::format("dtype: \"{}\" is not one of f32, bf16, f16, f64, i32, i64, u8", name));
}

}  // namespace tessera
