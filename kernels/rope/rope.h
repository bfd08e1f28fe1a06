#pragma once

#include "core/enum_names.h"
#include "core/tensor.h"

namespace tessera {

/// How rotary angles are stretched for contexts longer than those of the training.
enum class RopeScaling : unsigned char { kNone, kLinear, kLlama3 };
constexpr auto enum_names(RopeScaling) {
  return std::to_array<EnumName<RopeScaling>>({{RopeScaling::kNone, "none"},
                                               {RopeScaling::kLinear, "linear"},
                                               {RopeScaling::kLlama3, "llama3"}});
}

/// Which elements a rotary embedding rotates and how fast.
struct RopeOptions {
  float theta = 10000.0f;    ///< frequency_i = theta^(-2 i / rotary_dim)
  int64_t rotary_dim = 0;    ///< leading elements of a head that are rotated; 0 = all of D
  bool interleaved = false;  ///< pairs (2 i, 2 i + 1); else (i, i + rotary_dim / 2)
  RopeScaling scaling = RopeScaling::kNone;
  float factor = 1.0f;  ///< kLinear: every frequency / factor; kLlama3: the low ones
  /// kLlama3: wavelengths below original_max_position / high_freq_factor stay, those above
  /// original_max_position / low_freq_factor are scaled by 1 / factor, between them smoothly.
  float low_freq_factor = 1.0f;
  float high_freq_factor = 4.0f;
  int64_t original_max_position = 8192;
};

/// Rotary position embedding (Su et al. 2021, arXiv:2104.09864): each pair of elements of a head
/// is rotated by position * frequency.
///   y_a = x_a cos - x_b sin,   y_b = x_b cos + x_a sin
/// Shapes   x [B, T, H, D], positions [T] or [B, T], undefined = 0 .. T - 1 -> y [B, T, H, D]
///          contiguous; x may be a slice of a packed qkv buffer (D contiguous), without a copy
/// Dtypes   x, y f32 | bf16 | f16 | f64; positions i32; angles always in f64, tables f32: the
///          error of cosine and sine is below 1e-6 at every position, whatever x's dtype
/// Saves    the table (4 * rotary_dim bytes per position); calls with the same positions 0 .. T - 1
///          share one while a graph holds it
/// Grads    dx: the inverse rotation of dy, straight into a strided destination
/// Streams  current stream; never synchronizes
/// Errors   ShapeError for shapes other than these, an odd or too large rotary_dim; DtypeError
///          unless x is floating and positions i32; ConfigError for impossible options
Tensor rope(const Tensor& x_BTHD, const Tensor& positions = {}, const RopeOptions& options = {});

/// The table of `rope` for given positions ([T] or [B, T], i32), f32 [..., 2, rotary_dim / 2], for
/// callers that rotate many tensors by the same positions. `head_dim` is D.
Tensor rope_table(const Tensor& positions, int64_t head_dim, const RopeOptions& options = {});
/// As above for positions 0 .. num_positions - 1.
Tensor rope_table(int64_t num_positions, int64_t head_dim, const RopeOptions& options = {});

/// `rope` with a table of T (or B x T, or more than T) positions from `rope_table`; of `options`
/// only rotary_dim and interleaved are read.
Tensor rope_with_table(const Tensor& x_BTHD, const Tensor& table, const RopeOptions& options = {});

}  // namespace tessera
