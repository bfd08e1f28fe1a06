#include "kernels/loss/loss.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/autograd.h"
#include "core/row_gradients.h"
#include "kernels/destination.h"
#include "kernels/loss/kernel.h"
#include "kernels/matmul/kernel.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"

namespace tessera {
namespace kernels {

namespace {

int64_t span_nbytes(int64_t rows, int64_t cols, int64_t row_stride, DType dtype) {
  return rows == 0 ? 0 : ((rows - 1) * row_stride + cols) * static_cast<int64_t>(size_of(dtype));
}
int64_t stat_size(DType dtype) {
  return dtype == kF64 ? 8 : 4;
}
int64_t nbytes_of(const Targets& targets, int64_t rows) {
  return rows * static_cast<int64_t>(size_of(targets.dtype));
}

}  // namespace

Cost CrossEntropyFwd::cost() const {
  const double flops = (softcap > 0 ? 7.0 : 4.0) + (label_smoothing > 0 ? 1.0 : 0.0);
  return Cost(flops * static_cast<double>(rows * vocab))
      .read(logits, span_nbytes(rows, vocab, row_stride, dtype))
      .read(targets.data, nbytes_of(targets, rows))
      .write(losses, rows * stat_size(dtype))
      .write(stats, 2 * rows * stat_size(dtype));
}

Cost CrossEntropyBwd::cost() const {
  const double flops = (softcap > 0 ? 10.0 : 4.0) + (label_smoothing > 0 ? 1.0 : 0.0);
  return Cost(flops * static_cast<double>(rows * vocab))
      .read(logits, span_nbytes(rows, vocab, row_stride, dtype))
      .read(targets.data, nbytes_of(targets, rows))
      .read(stats, rows * stats_stride * stat_size(dtype))
      .read(scale, (scale_stride > 0 ? rows : 1) * stat_size(dtype))
      .write_or_accumulate(dlogits, span_nbytes(rows, vocab, dlogits_row_stride, dlogits_dtype),
                           accumulate);
}

Cost CrossEntropyFused::cost() const {
  return Cost(6.0 * static_cast<double>(rows * vocab))
      .read(logits, span_nbytes(rows, vocab, row_stride, dtype))
      .read(targets.data, nbytes_of(targets, rows))
      .read(scale, stat_size(dtype))
      .write(logits, span_nbytes(rows, vocab, row_stride, dtype))
      .write(losses, rows * stat_size(dtype))
      .write(stats, rows * stats_stride * stat_size(dtype));
}

Cost LossTotal::cost() const {
  const int64_t size = static_cast<int64_t>(size_of(dtype));
  return Cost(static_cast<double>(rows))
      .read(losses, rows * size)
      .read(targets.data, nbytes_of(targets, rows))
      .write(sum, size)
      .write(count, size);
}

TESSERA_DEFINE_KERNEL(cross_entropy_fwd, CrossEntropyFwd);
TESSERA_DEFINE_KERNEL(cross_entropy_bwd, CrossEntropyBwd);
TESSERA_DEFINE_KERNEL(cross_entropy_fused, CrossEntropyFused);
TESSERA_DEFINE_KERNEL(loss_total, LossTotal);

}  // namespace kernels

namespace {

using kernels::Destination;
using kernels::Targets;

DType stats_dtype(DType dtype) {
  return dtype == kF64 ? kF64 : kF32;
}

void check_targets(const char* op, const Tensor& x, const char* x_name, const Tensor& targets) {
  TESSERA_CHECK_SHAPE(x.num_dims() >= 1 && x.dim(-1) >= 1,
                      "{}: {} must have a last dimension, got {}", op, x_name, x.shape());
  TESSERA_CHECK_DTYPE(is_floating(x.dtype()), "{}: {} must be floating, got {}", op, x_name,
                      x.dtype());
  const Shape leading(std::span(x.shape().begin(), x.shape().end() - 1));
  TESSERA_CHECK_EQ(targets.shape(), leading, "{}: targets must have the leading shape of {}", op,
                   x_name);
  TESSERA_CHECK_DTYPE(targets.dtype() == kI32 || targets.dtype() == kI64,
                      "{}: targets must be i32 or i64, got {}", op, targets.dtype());
}

Targets targets_from(const char* op, const Tensor& targets, int64_t ignore_index,
                     int64_t first_row = 0) {
  const char* data = static_cast<const char*>(targets.raw_data());
  return {data + first_row * static_cast<int64_t>(size_of(targets.dtype())), targets.dtype(),
          ignore_index, first_row, op};
}

LossSum add_up(const Tensor& losses, const Targets& targets) {
  LossSum loss{empty({}, losses.dtype()), empty({}, losses.dtype())};
  kernels::loss_total(current_stream(),
                      {loss.sum.raw_data(), loss.count.raw_data(), losses.raw_data(), targets,
                       losses.dtype(), losses.numel()});
  return loss;
}

// ---- linear_cross_entropy

/// One call's operands (contiguous, without history) and how its rows are cut.
struct LinearLoss {
  Tensor x, w, targets;
  int64_t ignore_index;
  float softcap = 0, z_loss = 0, label_smoothing = 0;
  int64_t rows = 0, width = 0, vocab = 0, chunk_rows = 0;
  int64_t stride = 0;  ///< elements between rows of logits
  // w and dw are rows [first, first + vocab) of a matrix of num_classes.
  int64_t first_class = 0, num_classes = 0;

  static constexpr const char* kOp = "linear_cross_entropy";

  /// The fused kernel has neither: what it puts in place of the logits are exponentials, which do not
  /// give the slope of the cap back, and it makes gradients of exponentials alone.
  bool can_fuse() const { return softcap == 0 && z_loss == 0 && label_smoothing == 0; }
  DType logits_dtype() const { return stats_dtype(x.dtype()); }
  int64_t num_chunks() const { return (rows + chunk_rows - 1) / chunk_rows; }
  /// f(first row, rows) for each chunk.
  template <class F>
  void for_each_chunk(F&& f) const {
    for (int64_t first = 0; first < rows; first += chunk_rows) {
      f(first, std::min(chunk_rows, rows - first));
    }
  }
  /// The same for rows [begin, begin + count) of w alone. Its chunks are those of the whole.
  LinearLoss rows_of_w(int64_t begin, int64_t count) const {
    LinearLoss part = *this;
    part.w = w.narrow(0, begin, count);
    part.vocab = count, part.first_class = begin, part.num_classes = vocab;
    part.stride = choose_stride(count, x.device().type);
    return part;
  }
  /// On CUDA rows of logits, and of gradients in their place, start at 256 bytes whatever the
  /// vocabulary: vectors for the loss, and layouts that the products' fastest kernels accept.
  static int64_t choose_stride(int64_t vocab, DeviceType device) {
    constexpr int64_t kMultiple = 64;
    return device == DeviceType::kCuda ? (vocab + kMultiple - 1) / kMultiple * kMultiple : vocab;
  }
  Tensor make_buffer() const { return empty({std::min(chunk_rows, rows), stride}, logits_dtype()); }
  const void* x_row(int64_t row) const { return at(x, row * width); }
  Targets targets_at(int64_t row) const { return targets_from(kOp, targets, ignore_index, row); }
  static char* at(const Tensor& t, int64_t element) {
    return static_cast<char*>(t.raw_data()) + element * static_cast<int64_t>(size_of(t.dtype()));
  }
  /// Elements of x's dtype between rows of gradients that lie in a buffer of logits.
  int64_t dlogits_stride() const {
    return stride * static_cast<int64_t>(size_of(logits_dtype()) / size_of(x.dtype()));
  }

  void make_logits(const Tensor& buffer, int64_t first, int64_t count) const {
    kernels::Matmul a{};
    a.c = buffer.raw_data(), a.a = x_row(first), a.b = w.raw_data();
    a.dtype = x.dtype(), a.c_dtype = logits_dtype(), a.trans_b = true;
    a.m = count, a.n = vocab, a.k = width;
    a.lda = width, a.ldb = width, a.ldc = stride;
    kernels::matmul(current_stream(), a);
  }
  /// dx[first ...] (+)= dlogits w.
  void make_dx(const GradDst& dx, const Tensor& buffer, int64_t first, int64_t count) const {
    kernels::Matmul a{};
    a.c = at(dx.view, first * width), a.a = buffer.raw_data(), a.b = w.raw_data();
    a.dtype = x.dtype(), a.c_dtype = dx.view.dtype(), a.accumulate = dx.accumulate;
    a.m = count, a.n = width, a.k = vocab;
    a.lda = dlogits_stride(), a.ldb = width, a.ldc = width;
    kernels::matmul(current_stream(), a);
  }
  /// dw (+)= dlogits^T x[first ...].
  void make_dw(const GradDst& dw, const Tensor& buffer, int64_t first, int64_t count) const {
    kernels::Matmul a{};
    a.c = dw.view.raw_data(), a.a = buffer.raw_data(), a.b = x_row(first);
    a.dtype = x.dtype(), a.c_dtype = dw.view.dtype(), a.accumulate = dw.accumulate;
    a.trans_a = true;
    a.m = vocab, a.n = width, a.k = count;
    a.lda = dlogits_stride(), a.ldb = width, a.ldc = width;
    a.first_row = first_class, a.num_rows = num_classes;
    kernels::matmul(current_stream(), a);
  }
};

/// Where the chunks of dw add up: the destination itself if the product can be added there without
/// losing bits from chunk to chunk, else f32 (f64) memory that `finish` adds to it.
class WeightGradient {
 public:
  WeightGradient(const LinearLoss& loss, GradDst destination)
      : destination_(std::move(destination)), slot_(destination_) {
    if (!destination_) return;
    const DType dtype = destination_.view.dtype();
    const bool is_exact =
        dtype == loss.logits_dtype() || (dtype == loss.x.dtype() && loss.num_chunks() <= 1);
    is_direct_ = is_exact && destination_.view.is_contiguous();
    if (!is_direct_) slot_ = {empty({loss.vocab, loss.width}, loss.logits_dtype()), false};
    if (loss.rows == 0 && !slot_.accumulate) slot_.view.fill_(0);
  }
  void add_chunk(const LinearLoss& loss, const Tensor& buffer, int64_t first, int64_t count) {
    if (!slot_) return;
    loss.make_dw(slot_, buffer, first, count);
    slot_.accumulate = true;
  }
  void finish() {
    if (is_direct_ || !destination_) return;
    if (destination_.accumulate) {
      destination_.view.add_(slot_.view);
    } else {
      destination_.view.copy_(slot_.view);
    }
  }

 private:
  GradDst destination_, slot_;
  bool is_direct_ = true;
};

/// What gradients are made of beside the logits: [rows, stride], left by the kernel that had the whole
/// rows of logits.
struct RowStats {
  Tensor values;
  bool of_fused = false;
  int64_t stride = 2;

  static RowStats make(const LinearLoss& loss, int64_t rows, bool of_fused = false) {
    RowStats stats{{}, of_fused};
    if (of_fused) {
      stats.stride = kernels::CrossEntropyFused::num_stats(loss.x.device().type, loss.vocab);
    }
    stats.values = empty({rows, stats.stride}, loss.logits_dtype());
    return stats;
  }
  void* at(int64_t row) const {
    return values.is_defined() ? LinearLoss::at(values, stride * row) : nullptr;
  }
};

/// losses[first ...] and statistics (if they are wanted, `stats` of `stats_row` on) of the rows whose
/// logits are in `buffer`.
void lose_rows(const LinearLoss& loss, const Tensor& losses, const RowStats& stats,
               int64_t stats_row, const Tensor& buffer, int64_t first, int64_t count) {
  kernels::CrossEntropyFwd a{};
  a.losses = LinearLoss::at(losses, first), a.logits = buffer.raw_data();
  a.stats = stats.at(stats_row);
  a.targets = loss.targets_at(first), a.dtype = loss.logits_dtype();
  a.rows = count, a.vocab = loss.vocab, a.row_stride = loss.stride, a.softcap = loss.softcap;
  a.z_loss = loss.z_loss, a.label_smoothing = loss.label_smoothing;
  kernels::cross_entropy_fwd(current_stream(), a);
}

/// Turns the logits in `buffer` into their gradients. `scale`: one for all rows, or [rows].
void differentiate_rows(const LinearLoss& loss, const RowStats& stats, int64_t stats_row,
                        const Tensor& scale, const Tensor& buffer, int64_t first, int64_t count) {
  kernels::CrossEntropyBwd a{};
  a.dlogits = buffer.raw_data(), a.logits = buffer.raw_data();
  a.stats = stats.at(stats_row), a.stats_stride = stats.stride, a.of_fused = stats.of_fused;
  a.scale_stride = scale.num_dims();
  a.scale = LinearLoss::at(scale, a.scale_stride * first);
  a.z_loss = loss.z_loss, a.label_smoothing = loss.label_smoothing;
  a.targets = loss.targets_at(first);
  a.dtype = loss.logits_dtype(), a.dlogits_dtype = loss.x.dtype();
  a.rows = count, a.vocab = loss.vocab, a.row_stride = loss.stride;
  a.dlogits_row_stride = loss.dlogits_stride(), a.softcap = loss.softcap;
  a.first = loss.first_class, a.num_classes = loss.num_classes;
  kernels::cross_entropy_bwd(current_stream(), a);
}

Tensor losses_of_rows(const LinearLoss& loss, const RowStats& stats) {
  const Tensor losses = empty({loss.rows}, loss.logits_dtype());
  const Tensor buffer = loss.make_buffer();
  loss.for_each_chunk([&](int64_t first, int64_t count) {
    loss.make_logits(buffer, first, count);
    lose_rows(loss, losses, stats, first, buffer, first, count);
  });
  return losses;
}

/// The backward of `losses_of_rows`: each chunk's logits once more.
void gradients_again(const LinearLoss& loss, const RowStats& stats, const Tensor& scale,
                     const GradDst& dx, WeightGradient& dw) {
  const Tensor buffer = loss.make_buffer();
  loss.for_each_chunk([&](int64_t first, int64_t count) {
    loss.make_logits(buffer, first, count);
    differentiate_rows(loss, stats, first, scale, buffer, first, count);
    if (dx) loss.make_dx(dx, buffer, first, count);
    dw.add_chunk(loss, buffer, first, count);
  });
  dw.finish();
}

/// Rows [begin, end) of dw, of a block of rows of w that `dst` begins or ends in or lies in.
void weight_block(const LinearLoss& loss, const RowStats& stats, const Tensor& scale, int64_t begin,
                  int64_t end, const GradDst& dst, int64_t dst_begin) {
  const int64_t first = std::max(begin, dst_begin);
  const int64_t count = std::min(end, dst_begin + dst.view.dim(0)) - first;
  const Tensor wanted = dst.view.narrow(0, first - dst_begin, count);
  GradDst block{wanted, dst.accumulate};
  const bool is_whole = count == end - begin;
  if (!is_whole) {
    block.view = zeros({end - begin, loss.width}, dst.view.dtype());
    if (dst.accumulate) block.view.narrow(0, first - begin, count).copy_(wanted);
  }
  const LinearLoss part = loss.rows_of_w(begin, end - begin);
  WeightGradient dw(part, block);
  gradients_again(part, stats, scale, {}, dw);
  if (!is_whole) Tensor(wanted).copy_(block.view.narrow(0, first - begin, count));
}

/// dw by rows, when somebody wants them: the logits of the blocks that they lie in again. Whatever rows are asked for, they
/// are computed in the same blocks, since a row's bits may depend on how many are beside it.
GradRows weight_rows(const LinearLoss& loss, const RowStats& stats, const Tensor& scale) {
  return [loss, stats, scale, x = save(loss.x), w = save(loss.w), targets = save(loss.targets)](
             const GradDst& dst, int64_t begin) {
    x.get(), w.get(), targets.get();              // unchanged since
    constexpr int64_t kBlock = 512, kLeast = 64;  // rows
    const int64_t last = begin + dst.view.dim(0);
    // The last block has the rest if that is little.
    const int64_t num_blocks = std::max<int64_t>(1, (loss.vocab + kBlock - kLeast) / kBlock);
    for (int64_t k = std::min(begin / kBlock, num_blocks - 1); k < num_blocks && k * kBlock < last;
         ++k) {
      const int64_t end = k + 1 == num_blocks ? loss.vocab : (k + 1) * kBlock;
      weight_block(loss, stats, scale, k * kBlock, end, dst, begin);
    }
  };
}

/// Losses and gradients in one pass over the chunks. `kept`: statistics of all rows, or null.
LossSum losses_and_gradients(const LinearLoss& loss, const Tensor& scale, const GradDst& dx,
                             WeightGradient& dw, const RowStats* kept) {
  const Tensor losses = empty({loss.rows}, loss.logits_dtype());
  const Tensor buffer = loss.make_buffer();
  RowStats of_chunk;
  if (!loss.can_fuse() && kept == nullptr) of_chunk = RowStats::make(loss, buffer.dim(0));
  loss.for_each_chunk([&](int64_t first, int64_t count) {
    loss.make_logits(buffer, first, count);
    if (!loss.can_fuse()) {
      const RowStats& stats = kept != nullptr ? *kept : of_chunk;
      const int64_t row = kept != nullptr ? first : 0;
      lose_rows(loss, losses, stats, row, buffer, first, count);
      differentiate_rows(loss, stats, row, scale, buffer, first, count);
    } else {
      kernels::CrossEntropyFused a{};
      a.losses = LinearLoss::at(losses, first), a.logits = buffer.raw_data();
      a.targets = loss.targets_at(first), a.scale = scale.raw_data();
      a.dtype = loss.logits_dtype(), a.dlogits_dtype = loss.x.dtype();
      a.rows = count, a.vocab = loss.vocab, a.row_stride = loss.stride;
      if (kept != nullptr) a.stats = kept->at(first), a.stats_stride = kept->stride;
      kernels::cross_entropy_fused(current_stream(), a);
    }
    if (dx) loss.make_dx(dx, buffer, first, count);
    dw.add_chunk(loss, buffer, first, count);
  });
  dw.finish();
  return add_up(losses, loss.targets_at(0));
}

int64_t choose_chunk_rows(const LinearLoss& loss, int64_t requested) {
  if (requested > 0) return requested;
  // A chunk costs a pass over w and dw. On the CPU their products are slow enough to hide it.
  const bool is_cuda = loss.x.device().type == DeviceType::kCuda;
  const int64_t buffer_nbytes = int64_t{is_cuda ? 512 : 64} << 20, min_rows = is_cuda ? 1024 : 128;
  const int64_t row_nbytes = loss.stride * static_cast<int64_t>(size_of(loss.logits_dtype()));
  const int64_t limit = std::max(min_rows, buffer_nbytes / row_nbytes);
  const int64_t num_chunks = std::max<int64_t>(1, (loss.rows + limit - 1) / limit);
  return std::max<int64_t>(1, (loss.rows + num_chunks - 1) / num_chunks);  // of equal length
}

void check_terms(const char* op, float z_loss, float label_smoothing) {
  TESSERA_CHECK(std::isfinite(z_loss) && z_loss >= 0,
                "{}: z_loss must be finite and not negative, got {}", op, z_loss);
  TESSERA_CHECK(label_smoothing >= 0 && label_smoothing <= 1,
                "{}: label_smoothing must be in [0, 1], got {}", op, label_smoothing);
}

LinearLoss make_linear_loss(const Tensor& x, const Tensor& w, const Tensor& targets,
                            const LinearCrossEntropyOptions& options) {
  const char* op = LinearLoss::kOp;
  check_targets(op, x, "x", targets);
  TESSERA_CHECK_SHAPE(w.num_dims() == 2 && w.dim(1) == x.dim(-1) && w.dim(0) >= 1,
                      "{}: w must be [V, {}], got {}", op, x.dim(-1), w.shape());
  TESSERA_CHECK_EQ(w.dtype(), x.dtype(), "{}: w must have x's dtype", op);
  TESSERA_CHECK_SHAPE(options.chunk_rows >= 0, "{}: chunk_rows must not be negative, got {}", op,
                      options.chunk_rows);
  TESSERA_CHECK(std::isfinite(options.softcap) && options.softcap >= 0,
                "{}: softcap must be finite and not negative, got {}", op, options.softcap);
  check_terms(op, options.z_loss, options.label_smoothing);
  if (options.grad_scale.is_defined()) {
    TESSERA_CHECK_EQ(options.grad_scale.shape(), Shape{}, "{}: grad_scale must be a scalar", op);
    TESSERA_CHECK_EQ(options.grad_scale.dtype(), stats_dtype(x.dtype()),
                     "{}: grad_scale must have the loss's dtype", op);
  }
  NoGrad no_grad;  // copies, if any, are not part of the graph: gradients go to x and w
  LinearLoss loss{x.contiguous().detach(), w.contiguous().detach(), targets.contiguous(),
                  options.ignore_index,    options.softcap,         options.z_loss,
                  options.label_smoothing};
  loss.width = x.dim(-1), loss.vocab = w.dim(0), loss.rows = x.numel() / loss.width;
  loss.stride = LinearLoss::choose_stride(loss.vocab, x.device().type);
  loss.chunk_rows = choose_chunk_rows(loss, options.chunk_rows);
  return loss;
}

LossSum with_early_gradients(const LinearLoss& loss, const Tensor& x, const Tensor& w,
                             const Tensor& scale) {
  GradDst dx, dw;
  if (x.requires_grad()) dx.view = empty(x.shape(), x.dtype());
  const bool is_leaf = w.is_leaf();
  RowGradSink* const sink = w.requires_grad() ? row_sink(w) : nullptr;
  std::optional<RowStats> stats;
  if (sink != nullptr) {
    stats = RowStats::make(loss, loss.rows, /*of_fused=*/loss.can_fuse());
  } else if (w.requires_grad()) {
    dw = is_leaf ? leaf_destination(w) : GradDst{empty(w.shape(), w.dtype()), false};
  }
  LossSum result;
  {
    NoGrad no_grad;
    WeightGradient weight_gradient(loss, dw);
    result = losses_and_gradients(loss, scale, dx, weight_gradient, stats ? &*stats : nullptr);
  }
  if (sink != nullptr) sink->add_rows(w, weight_rows(loss, *stats, scale));
  if (dw && is_leaf) leaf_written(w), dw = {};
  result.sum = record(LinearLoss::kOp, {x, w}, result.sum,
                      [dx = dx.view, dw = dw.view](const Tensor&, Grads& g) {
                        if (dx.is_defined()) g.add(0, dx);
                        if (dw.is_defined()) g.add(1, dw);
                      });
  return result;
}

/// `y` of the forward, a sum or losses of rows, with a backward that makes the logits again.
Tensor record_again(const LinearLoss& loss, const Tensor& x, const Tensor& w, const RowStats& stats,
                    const Tensor& y) {
  const Tensor leaf = w.is_leaf() ? w : Tensor{};
  return record(
      LinearLoss::kOp, {x, w}, y,
      [loss, x_saved = save(loss.x), w_saved = save(loss.w), targets_saved = save(loss.targets),
       stats, leaf](const Tensor& dy, Grads& g) {
        x_saved.get(), w_saved.get(), targets_saved.get();  // unchanged since the forward
        Tensor scale = dy.to(loss.logits_dtype());
        if (dy.num_dims() > 0) scale = scale.contiguous().view({loss.rows});
        RowGradSink* const sink = g.wanted(1) ? row_sink(leaf) : nullptr;
        if (sink == nullptr || g.wanted(0)) {
          Destination dx(g, 0);
          const GradDst& dx_slot = dx.claim(
              [&](const Tensor& t) { return t.dtype() == loss.x.dtype() && t.is_contiguous(); },
              loss.x.dtype());
          WeightGradient dw(loss, sink == nullptr ? g.destination(1) : GradDst{});
          gradients_again(loss, stats, scale, dx_slot, dw);
          dx.finish();
        }
        if (sink != nullptr) {
          sink->add_rows(leaf, weight_rows(loss, stats, scale));
        } else if (g.wanted(1)) {
          g.written(1);
        }
      });
}

}  // namespace

LossSum cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index) {
  return cross_entropy(logits, targets, CrossEntropyOptions{.ignore_index = ignore_index});
}

LossSum cross_entropy(const Tensor& logits_in, const Tensor& targets_in,
                      const CrossEntropyOptions& options) {
  static constexpr const char* kOp = "cross_entropy";
  check_terms(kOp, options.z_loss, options.label_smoothing);
  check_targets(kOp, logits_in, "logits", targets_in);
  const Tensor logits = logits_in.is_row_strided() ? logits_in : logits_in.contiguous();
  const Tensor targets = targets_in.contiguous();
  const int64_t vocab = logits.dim(-1), rows = logits.numel() / vocab;
  const DType dtype = stats_dtype(logits.dtype());
  const Tensor losses = empty({rows}, dtype);
  const Tensor stats = needs_grad({logits}) ? empty({rows, 2}, dtype) : Tensor{};

  kernels::CrossEntropyFwd a{};
  a.losses = losses.raw_data(), a.logits = logits.raw_data();
  a.stats = stats.is_defined() ? stats.raw_data() : nullptr;
  a.targets = targets_from(kOp, targets, options.ignore_index), a.dtype = logits.dtype();
  a.z_loss = options.z_loss, a.label_smoothing = options.label_smoothing;
  a.rows = rows, a.vocab = vocab, a.row_stride = logits.row_stride();
  kernels::cross_entropy_fwd(current_stream(), a);

  LossSum loss = add_up(losses, a.targets);
  loss.sum = record(
      kOp, {logits}, loss.sum,
      [logits = save(logits), targets = save(targets), stats = save(stats), options, rows, vocab,
       dtype](const Tensor& dy_in, Grads& g) {
        const Tensor dy = dy_in.to(dtype);
        Destination dlogits(g, 0);
        const GradDst& slot = dlogits.claim(
            [&](const Tensor& t) { return t.dtype() == logits->dtype() && t.is_row_strided(); },
            logits->dtype());
        kernels::CrossEntropyBwd b{};
        b.dlogits = slot.view.raw_data(), b.logits = logits->raw_data();
        b.stats = stats->raw_data(), b.scale = dy.raw_data();
        b.targets = targets_from(kOp, targets, options.ignore_index);
        b.z_loss = options.z_loss, b.label_smoothing = options.label_smoothing;
        b.dtype = b.dlogits_dtype = logits->dtype(), b.accumulate = slot.accumulate;
        b.rows = rows, b.vocab = vocab;
        b.row_stride = logits->row_stride(), b.dlogits_row_stride = slot.view.row_stride();
        kernels::cross_entropy_bwd(current_stream(), b);
        dlogits.finish();
      });
  return loss;
}

LossSum linear_cross_entropy(const Tensor& x, const Tensor& w, const Tensor& targets,
                             const LinearCrossEntropyOptions& options) {
  const LinearLoss loss = make_linear_loss(x, w, targets, options);
  const bool needs_gradients = needs_grad({x, w});
  if (needs_gradients && options.grad_scale.is_defined()) {
    return with_early_gradients(loss, x, w, options.grad_scale);
  }
  RowStats stats;
  if (needs_gradients) stats = RowStats::make(loss, loss.rows);
  LossSum result = add_up(losses_of_rows(loss, stats), loss.targets_at(0));
  result.sum = record_again(loss, x, w, stats, result.sum);
  return result;
}

Tensor linear_cross_entropy_rows(const Tensor& x, const Tensor& w, const Tensor& targets,
                                 const LinearCrossEntropyOptions& options) {
  TESSERA_CHECK(!options.grad_scale.is_defined(),
                "linear_cross_entropy_rows: a grad_scale, expected none: rows have their own");
  const LinearLoss loss = make_linear_loss(x, w, targets, options);
  RowStats stats;
  if (needs_grad({x, w})) stats = RowStats::make(loss, loss.rows);
  return record_again(loss, x, w, stats, losses_of_rows(loss, stats).view(targets.shape()));
}

Tensor mse_loss(const Tensor& x, const Tensor& target) {
  TESSERA_CHECK_EQ(x.shape(), target.shape(), "mse_loss: x and target must have one shape");
  return mean(squared_difference(x, target));
}

}  // namespace tessera
