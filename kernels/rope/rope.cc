#include "kernels/rope/rope.h"

#include <algorithm>

#include "core/autograd.h"
#include "kernels/destination.h"
#include "kernels/rope/kernel.h"

namespace tessera {
namespace kernels {

namespace {

/// Bytes of a [batch, time, heads, head_dim] view from its first to its last element.
int64_t span_nbytes(const Rope& a, const int64_t (&strides)[3]) {
  if (a.batch * a.time * a.heads * a.head_dim == 0) return 0;
  const int64_t last = (a.batch - 1) * strides[0] + (a.time - 1) * strides[1] +
                       (a.heads - 1) * strides[2] + a.head_dim;
  return last * static_cast<int64_t>(size_of(a.dtype));
}

}  // namespace

Cost RopeTable::cost() const {
  const int64_t numel = rows * rotary_dim;
  return Cost(15.0 * static_cast<double>(numel))
      .read(positions, rows * 4)
      .write(table, numel * static_cast<int64_t>(sizeof(float)));
}

Cost Rope::cost() const {
  const int64_t positions = (table_batch_stride != 0 ? batch : 1) * time;
  return Cost(3.0 * static_cast<double>(batch * time * heads * rotary_dim))
      .read(x, span_nbytes(*this, x_strides))
      .read(table, positions * rotary_dim * static_cast<int64_t>(sizeof(float)))
      .write_or_accumulate(y, span_nbytes(*this, y_strides), accumulate);
}

TESSERA_DEFINE_KERNEL(rope_table, RopeTable);
TESSERA_DEFINE_KERNEL(rope, Rope);

}  // namespace kernels

namespace {

int64_t rotary_dim_of(const RopeOptions& options, int64_t head_dim) {
  const int64_t rotary_dim = options.rotary_dim == 0 ? head_dim : options.rotary_dim;
  TESSERA_CHECK_SHAPE(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= head_dim,
                      "rope: rotary_dim must be even, from 2 to the head width {}, got {}",
                      head_dim, rotary_dim);
  return rotary_dim;
}

void check_frequencies(const RopeOptions& options) {
  TESSERA_CHECK_AS(ConfigError, options.theta > 0, "rope: theta must be positive, got {}",
                   options.theta);
  if (options.scaling == RopeScaling::kNone) return;
  TESSERA_CHECK_AS(ConfigError, options.factor > 0, "rope: factor must be positive, got {}",
                   options.factor);
  if (options.scaling == RopeScaling::kLinear) return;
  TESSERA_CHECK_AS(ConfigError, options.low_freq_factor < options.high_freq_factor,
                   "rope: low_freq_factor must be less than high_freq_factor, got {} and {}",
                   options.low_freq_factor, options.high_freq_factor);
  TESSERA_CHECK_AS(ConfigError, options.original_max_position > 0,
                   "rope: original_max_position must be positive, got {}",
                   options.original_max_position);
}

/// `positions` may be undefined: 0 .. numel - 1.
Tensor make_table(const Tensor& positions, const Shape& shape, int64_t rotary_dim,
                  const RopeOptions& options) {
  check_frequencies(options);
  Shape table_shape = shape;
  table_shape.push_back(2);
  table_shape.push_back(rotary_dim / 2);
  Tensor table = empty(table_shape, kF32);
  kernels::RopeTable a{};
  a.table = table.data<float>();
  a.positions = positions.is_defined() ? positions.data<int32_t>() : nullptr;
  a.rows = shape.numel(), a.rotary_dim = rotary_dim;
  a.theta = options.theta;
  switch (options.scaling) {
    case RopeScaling::kNone:
      a.scaling = kernels::RopeTable::Scaling::kNone;
      break;
    case RopeScaling::kLinear:
      a.scaling = kernels::RopeTable::Scaling::kLinear;
      break;
    case RopeScaling::kLlama3:
      a.scaling = kernels::RopeTable::Scaling::kLlama3;
      break;
  }
  a.factor = options.factor;
  a.low_freq_factor = options.low_freq_factor, a.high_freq_factor = options.high_freq_factor;
  a.original_max_position = static_cast<double>(options.original_max_position);
  kernels::rope_table(current_stream(), a);
  return table;
}

/// What tables of positions 0 .. T - 1 this thread made last. Weak: the graph that saved a table
/// keeps it, so that all layers of a forward share one and nothing outlives the graph's memory.
struct CachedTable {
  std::weak_ptr<Storage> table;
  int stream_id;
  int64_t num_positions, rotary_dim;
  RopeOptions options;
};
constexpr size_t kMaxCachedTables = 4;

bool same_frequencies(const RopeOptions& a, const RopeOptions& b) {
  return a.theta == b.theta && a.scaling == b.scaling && a.factor == b.factor &&
         a.low_freq_factor == b.low_freq_factor && a.high_freq_factor == b.high_freq_factor &&
         a.original_max_position == b.original_max_position;
}

Tensor shared_table(int64_t num_positions, int64_t rotary_dim, const RopeOptions& options) {
  thread_local std::vector<CachedTable> cache;
  std::erase_if(cache, [](const CachedTable& entry) { return entry.table.expired(); });
  const int stream_id = current_stream().id();
  for (const CachedTable& entry : cache) {
    if (entry.stream_id == stream_id && entry.rotary_dim == rotary_dim &&
        entry.num_positions >= num_positions && same_frequencies(entry.options, options)) {
      return view_of_storage(entry.table.lock(), 0, {num_positions, 2, rotary_dim / 2}, kF32);
    }
  }
  Tensor table = make_table({}, {num_positions}, rotary_dim, options);
  if (cache.size() == kMaxCachedTables) cache.erase(cache.begin());
  cache.push_back({table.storage(), stream_id, num_positions, rotary_dim, options});
  return table;
}

void check_x(const Tensor& x) {
  TESSERA_CHECK_SHAPE(x.num_dims() == 4, "rope: x must be [B, T, H, D], got {}", x.shape());
  TESSERA_CHECK_DTYPE(is_floating(x.dtype()), "rope: x must be floating, got {}", x.dtype());
}

bool has_contiguous_heads(const Tensor& x) {
  return x.dim(3) == 1 || x.strides()[3] == 1;
}

void run(const Tensor& y, const Tensor& x, const Tensor& table, int64_t rotary_dim,
         bool interleaved, bool inverse, bool accumulate) {
  kernels::Rope a{};
  a.y = y.raw_data(), a.x = x.raw_data(), a.table = table.data<float>();
  a.dtype = x.dtype(), a.interleaved = interleaved, a.inverse = inverse;
  a.accumulate = accumulate;
  a.batch = x.dim(0), a.time = x.dim(1), a.heads = x.dim(2), a.head_dim = x.dim(3);
  a.rotary_dim = rotary_dim;
  for (int i = 0; i < 3; ++i) a.x_strides[i] = x.strides()[i], a.y_strides[i] = y.strides()[i];
  a.table_batch_stride = table.num_dims() == 4 ? table.dim(1) * rotary_dim : 0;
  kernels::rope(current_stream(), a);
}

Tensor apply(const Tensor& x_in, const Tensor& table, int64_t rotary_dim, bool interleaved) {
  const Tensor x = has_contiguous_heads(x_in) ? x_in : x_in.contiguous();
  Tensor y = empty(x.shape(), x.dtype());
  run(y, x, table, rotary_dim, interleaved, false, false);
  return record(
      "rope", {x}, y,
      [dtype = x.dtype(), table = save(table), rotary_dim, interleaved](const Tensor& dy_in,
                                                                        Grads& g) {
        const Tensor dy = has_contiguous_heads(dy_in) ? dy_in : dy_in.contiguous();
        kernels::Destination dx(g, 0);
        const GradDst& slot = dx.claim(
            [&](const Tensor& t) { return t.dtype() == dtype && has_contiguous_heads(t); }, dtype);
        run(slot.view, dy, table, rotary_dim, interleaved, true, slot.accumulate);
        dx.finish();
      });
}

void check_positions(const Tensor& positions) {
  TESSERA_CHECK_EQ(positions.dtype(), kI32, "rope: positions must be i32");
}

}  // namespace

Tensor rope_table(const Tensor& positions, int64_t head_dim, const RopeOptions& options) {
  check_positions(positions);
  TESSERA_CHECK_SHAPE(positions.num_dims() == 1 || positions.num_dims() == 2,
                      "rope: positions must be [T] or [B, T], got {}", positions.shape());
  return make_table(positions.contiguous(), positions.shape(), rotary_dim_of(options, head_dim),
                    options);
}

Tensor rope_table(int64_t num_positions, int64_t head_dim, const RopeOptions& options) {
  TESSERA_CHECK_SHAPE(num_positions >= 0, "rope: the number of positions is negative: {}",
                      num_positions);
  return make_table({}, {num_positions}, rotary_dim_of(options, head_dim), options);
}

Tensor rope_with_table(const Tensor& x_BTHD, const Tensor& table, const RopeOptions& options) {
  check_x(x_BTHD);
  const int64_t rotary_dim = rotary_dim_of(options, x_BTHD.dim(3)), time = x_BTHD.dim(1);
  const int n = table.num_dims();
  const bool fits = (n == 3 || (n == 4 && table.dim(0) == x_BTHD.dim(0))) &&
                    table.dim(-3) >= time && table.dim(-2) == 2 && table.dim(-1) == rotary_dim / 2;
  TESSERA_CHECK_SHAPE(fits,
                      "rope: table must be [T or more, 2, {}], with or without B, for x {}; "
                      "got {}",
                      rotary_dim / 2, x_BTHD.shape(), table.shape());
  TESSERA_CHECK_EQ(table.dtype(), kF32, "rope: table must be f32");
  return apply(x_BTHD, table.contiguous(), rotary_dim, options.interleaved);
}

Tensor rope(const Tensor& x_BTHD, const Tensor& positions, const RopeOptions& options) {
  check_x(x_BTHD);
  const int64_t batch = x_BTHD.dim(0), time = x_BTHD.dim(1);
  const int64_t rotary_dim = rotary_dim_of(options, x_BTHD.dim(3));
  if (!positions.is_defined()) {
    return apply(x_BTHD, shared_table(time, rotary_dim, options), rotary_dim, options.interleaved);
  }
  check_positions(positions);
  const Shape& shape = positions.shape();
  TESSERA_CHECK_SHAPE(shape == Shape{time} || shape == (Shape{batch, time}),
                      "rope: positions must be [T] or [B, T] for x {}, got {}", x_BTHD.shape(),
                      shape);
  const Tensor table = make_table(positions.contiguous(), shape, rotary_dim, options);
  return apply(x_BTHD, table, rotary_dim, options.interleaved);
}

}  // namespace tessera
