#include "kernels/attention/attention.h"

#include <cmath>
#include <vector>

#include "core/autograd.h"
#include "core/elementary/kernel.h"
#include "core/log.h"
#include "core/runtime/context.h"
#include "kernels/attention/cuda/cudnn.h"
#include "kernels/attention/decode.h"
#include "kernels/attention/kernel.h"
#include "kernels/attention/tune.h"

namespace tessera {
namespace kernels {

double AttentionShape::num_visible_pairs() const {
  const double T = static_cast<double>(num_queries), S = static_cast<double>(num_keys);
  double pairs = causal ? T * (S - T) + T * (T + 1) / 2 : T * S;
  if (window > 0) {
    // The first queries see fewer keys than the window has.
    const auto W = static_cast<double>(window), few = std::clamp(W - (S - T), 0.0, T);
    pairs = few * (S - T) + few * (few + 1) / 2 + (T - few) * W;
  }
  return static_cast<double>(batch * num_heads) * pairs;
}

int64_t HeadStrides::span(int64_t batches, int64_t times, int64_t heads, int64_t head_dim) const {
  if (batches * times * heads * head_dim == 0) return 0;
  return (batches - 1) * batch + (times - 1) * time + (heads - 1) * head + head_dim;
}

namespace {

int64_t span_nbytes(const AttentionShape& s, const HeadStrides& strides, bool is_query) {
  return strides.span(s.batch, is_query ? s.num_queries : s.num_keys,
                      is_query ? s.num_heads : s.num_kv_heads, s.head_dim) *
         static_cast<int64_t>(size_of(s.dtype));
}

/// The rows of keys or values that some query sees.
void read_keys(Cost& cost, const AttentionShape& s, const void* rows, const HeadStrides& strides) {
  const int64_t first = s.key_begin(), size = static_cast<int64_t>(size_of(s.dtype));
  cost.read(static_cast<const char*>(rows) + first * strides.time * size,
            strides.span(s.batch, s.num_keys - first, s.num_kv_heads, s.head_dim) * size);
}

int64_t compute_size(DType dtype) {
  return dtype == kF64 ? 8 : 4;
}

int64_t lse_nbytes(const AttentionShape& s) {
  return s.batch * s.num_heads * s.num_queries * compute_size(s.dtype);
}

int64_t o_nbytes(const AttentionShape& s) {
  return s.batch * s.num_queries * s.num_heads * s.head_dim *
         static_cast<int64_t>(size_of(s.dtype));
}

void read_masks(Cost& cost, const AttentionShape& s) {
  cost.read(s.document_starts, s.batch * s.num_queries * static_cast<int64_t>(sizeof(int32_t)))
      .read(s.alibi_slopes, s.num_heads * static_cast<int64_t>(sizeof(float)));
}

}  // namespace

Cost AttentionFwd::cost() const {
  Cost cost(4.0 * static_cast<double>(shape.head_dim) * shape.num_visible_pairs());
  cost.read(q, span_nbytes(shape, q_strides, true));
  read_keys(cost, shape, k, k_strides);
  read_keys(cost, shape, v, v_strides);
  cost.write(o, o_nbytes(shape)).write(lse, lse_nbytes(shape));
  read_masks(cost, shape);
  return cost;
}
TESSERA_DEFINE_KERNEL(attention_fwd, AttentionFwd);

int64_t AttentionBwd::num_chunks() const {
  constexpr int64_t kItems = 32, kMaxChunks = 8, kMinBlocks = 2;
  const int64_t heads = std::max<int64_t>(1, shape.batch * shape.num_kv_heads);
  const int64_t wanted = std::min((kItems + heads - 1) / heads, kMaxChunks);
  return std::clamp<int64_t>(shape.num_blocks() / kMinBlocks, 1, wanted);
}

int64_t AttentionBwd::workspace_numel() const {
  if (device == DeviceType::kCuda) {
    const int64_t blocks = (shape.num_queries + kAttentionBlock - 1) / kAttentionBlock;
    return 2 * shape.batch * shape.num_heads * blocks * kAttentionBlock;
  }
  return num_chunks() * shape.batch * shape.num_kv_heads * 2 * shape.num_keys *
         padded_width(shape.head_dim);
}

Cost AttentionBwd::cost() const {
  Cost cost(10.0 * static_cast<double>(shape.head_dim) * shape.num_visible_pairs());
  cost.read(q, span_nbytes(shape, q_strides, true));
  read_keys(cost, shape, k, k_strides);
  read_keys(cost, shape, v, v_strides);
  cost.read(o, o_nbytes(shape))
      .read(d_out, o_nbytes(shape))
      .read(lse, lse_nbytes(shape))
      .write_or_accumulate(dq, span_nbytes(shape, dq_strides, true), accumulate_dq)
      .write_or_accumulate(dk, span_nbytes(shape, dk_strides, false), accumulate_dk)
      .write_or_accumulate(dv, span_nbytes(shape, dv_strides, false), accumulate_dv)
      .write_or_accumulate(workspace, workspace_numel() * compute_size(shape.dtype), true);
  read_masks(cost, shape);
  return cost;
}
TESSERA_DEFINE_KERNEL(attention_bwd, AttentionBwd);

Cost AttentionDecode::cost() const {
  const auto size = static_cast<int64_t>(size_of(shape.dtype));
  const auto nbytes = [&](const HeadStrides& strides, int64_t times, int64_t heads) {
    return strides.span(shape.batch, times, heads, shape.head_dim) * size;
  };
  const int64_t k_nbytes = nbytes(k_cache_strides, shape.num_keys, shape.num_kv_heads);
  const int64_t v_nbytes = nbytes(v_cache_strides, shape.num_keys, shape.num_kv_heads);
  Cost cost(4.0 * static_cast<double>(shape.head_dim) * shape.num_visible_pairs());
  cost.read(q, nbytes(q_strides, 1, shape.num_heads))
      .read(k, nbytes(k_strides, 1, shape.num_kv_heads))
      .read(v, nbytes(v_strides, 1, shape.num_kv_heads))
      .write_or_accumulate(k_cache, k_nbytes, true)
      .write_or_accumulate(v_cache, v_nbytes, true)
      .read(lengths, shape.batch * static_cast<int64_t>(sizeof(int32_t)))
      .write(o, o_nbytes(shape));
  read_masks(cost, shape);
  return cost;
}

void attention_decode(const Stream& s, const AttentionDecode& a) {
  TESSERA_CHECK_AS(InternalError, s.device().type == DeviceType::kCpu,
                   "attention_decode: no kernel for device {}", s.device());
  if (s.is_observed()) s.declare("attention_decode", a.cost());
  s.submit("attention_decode", [a] { cpu::attention_decode(a); });
}

}  // namespace kernels

namespace {

using kernels::HeadStrides;

bool rows_are_contiguous(const Tensor& x) {
  return x.dim(3) <= 1 || x.strides().dim(3) == 1;
}

Tensor with_contiguous_rows(const Tensor& x) {
  return rows_are_contiguous(x) ? x : x.contiguous();
}

HeadStrides head_strides(const Tensor& x) {
  return {x.strides()[0], x.strides()[1], x.strides()[2]};
}

void check(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  TESSERA_CHECK_SHAPE(q.num_dims() == 4 && k.num_dims() == 4,
                      "attention: q must be [B, T, H, D] and k [B, S, Hk, D], got {} and {}",
                      q.shape(), k.shape());
  TESSERA_CHECK_EQ(v.shape(), k.shape(), "attention: v must have k's shape");
  TESSERA_CHECK_SHAPE(q.dim(0) == k.dim(0) && q.dim(3) == k.dim(3),
                      "attention: q and k must agree in B and D, got {} and {}", q.shape(),
                      k.shape());
  TESSERA_CHECK_SHAPE(k.dim(2) > 0 && q.dim(2) % k.dim(2) == 0,
                      "attention: q's heads must be a multiple of k's, got {} and {}", q.dim(2),
                      k.dim(2));
  TESSERA_CHECK_SHAPE(k.dim(1) >= q.dim(1),
                      "attention: needs at least as many keys as queries, got {} and {}", k.dim(1),
                      q.dim(1));
  TESSERA_CHECK_SHAPE(q.dim(3) > 0 && q.dim(3) <= kernels::kMaxAttentionWidth,
                      "attention: head width must be in [1, {}], got {}",
                      kernels::kMaxAttentionWidth, q.dim(3));
  TESSERA_CHECK_DTYPE(is_floating(q.dtype()), "attention: q must be floating, got {}", q.dtype());
  TESSERA_CHECK_EQ(k.dtype(), q.dtype(), "attention: k must have q's dtype");
  TESSERA_CHECK_EQ(v.dtype(), q.dtype(), "attention: v must have q's dtype");
  TESSERA_CHECK(std::isfinite(options.scale), "attention: scale must be finite, got {}",
                options.scale);
  if (const Tensor& starts = options.document_starts; starts.is_defined()) {
    TESSERA_CHECK_EQ(starts.shape(), (Shape{q.dim(0), q.dim(1)}),
                     "attention: document_starts must be [B, T]");
    TESSERA_CHECK_EQ(starts.dtype(), kI32, "attention: document_starts must be i32");
    TESSERA_CHECK_SHAPE(options.causal || k.dim(1) == q.dim(1),
                        "attention: documents without causal need as many keys as queries, got {} "
                        "and {}",
                        k.dim(1), q.dim(1));
  }
  TESSERA_CHECK(options.window >= 0, "attention: window must not be negative, got {}",
                options.window);
  TESSERA_CHECK(options.window == 0 || options.causal, "attention: a window of {} needs causal",
                options.window);
  TESSERA_CHECK(std::isfinite(options.softcap) && options.softcap >= 0,
                "attention: softcap must be finite and not negative, got {}", options.softcap);
  if (const Tensor& slopes = options.alibi_slopes; slopes.is_defined()) {
    TESSERA_CHECK(options.softcap == 0,
                  "attention: alibi_slopes and a softcap of {} do not go together",
                  options.softcap);
    TESSERA_CHECK_EQ(slopes.shape(), Shape{q.dim(2)}, "attention: alibi_slopes must be [H]");
    TESSERA_CHECK_EQ(slopes.dtype(), kF32, "attention: alibi_slopes must be f32");
  }
}

/// Whether the current Tuning has found cuDNN to be faster.
template <class Args>
bool is_cudnn_chosen(const Args& a) {
  Tuning* const tuning = Tuning::current();
  return tuning != nullptr && tuning->find_or_want(kernels::attention_key(a)) == "cudnn";
}

/// Submits by the selected backend.
template <class Args, class Own, class Cudnn>
void submit(const Args& a, bool is_backward, Own own, Cudnn cudnn) {
  const Stream& s = current_stream();
  const AttentionBackend backend = attention_backend();
  if (s.device().type != DeviceType::kCuda || backend == AttentionBackend::kOwn) return own(s, a);
  const std::string& problem = kernels::cudnn_problem();
  TESSERA_CHECK_AS(CudaError, problem.empty() || backend == AttentionBackend::kAuto,
                   "attention: the backend is cudnn, but {}", problem);
  if (!problem.empty()) {
    log_once("warning", fmt::format("attention: {}; own kernels compute it", problem));
    return own(s, a);
  }
  if (!kernels::cudnn_takes(a)) return own(s, a);
  if (backend == AttentionBackend::kAuto && !is_cudnn_chosen(a)) return own(s, a);
  if (cudnn(s, a)) return;
  log_once("info",
           fmt::format("attention: cuDNN has no kernel for the {} of {} heads of {}, {} queries "
                       "and {} keys of {}; own kernels compute it",
                       is_backward ? "backward" : "forward", a.shape.num_heads, a.shape.head_dim,
                       a.shape.num_queries, a.shape.num_keys, name_of(a.shape.dtype)));
  own(s, a);
}

/// One gradient of backward: the destination itself, or a buffer in the inputs' dtype that is
/// added to it afterwards where the kernel cannot write (another dtype, rows with gaps).
class Destination {
 public:
  Destination(Grads& g, int input, const Tensor& x) : g_(g), input_(input) {
    if (!g.wanted(input)) return;
    dst_ = g.destination(input);
    is_direct_ = dst_.view.dtype() == x.dtype() && rows_are_contiguous(dst_.view);
    buffer_ = is_direct_ ? dst_.view : empty(x.shape(), x.dtype());
  }
  void* data() const { return buffer_.is_defined() ? buffer_.raw_data() : nullptr; }
  bool accumulate() const { return is_direct_ && dst_.accumulate; }
  HeadStrides strides() const {
    return buffer_.is_defined() ? head_strides(buffer_) : HeadStrides{0, 0, 0};
  }
  void finish() {
    if (!buffer_.is_defined()) return;
    if (!is_direct_) {
      const Tensor& view = dst_.view;
      kernels::copy(current_stream(),
                    {view.raw_data(), buffer_.raw_data(), view.dtype(), buffer_.dtype(),
                     view.shape(), view.strides(), buffer_.strides(), dst_.accumulate});
    }
    g_.written(input_);
  }

 private:
  Grads& g_;
  int input_;
  GradDst dst_;
  bool is_direct_ = false;
  Tensor buffer_;
};

}  // namespace

void set_attention_backend(AttentionBackend backend) {
  Context& context = *Context::current();
  Backends backends = context.options().backends;
  backends.attention = backend;
  context.set_backends(backends);
}

AttentionBackend attention_backend() {
  return Context::current()->options().backends.attention;
}

Tensor attention(const Tensor& q_BTHD, const Tensor& k_BSHD, const Tensor& v_BSHD,
                 const AttentionOptions& options) {
  check(q_BTHD, k_BSHD, v_BSHD, options);
  const Tensor q = with_contiguous_rows(q_BTHD), k = with_contiguous_rows(k_BSHD),
               v = with_contiguous_rows(v_BSHD);
  const Tensor starts =
      options.document_starts.is_defined() ? options.document_starts.contiguous() : Tensor{};
  const Tensor slopes =
      options.alibi_slopes.is_defined() ? options.alibi_slopes.contiguous() : Tensor{};
  const int64_t head_dim = q.dim(3);
  const kernels::AttentionShape shape{
      .dtype = q.dtype(),
      .batch = q.dim(0),
      .num_queries = q.dim(1),
      .num_keys = k.dim(1),
      .num_heads = q.dim(2),
      .num_kv_heads = k.dim(2),
      .head_dim = head_dim,
      .scale = options.scale != 0 ? static_cast<double>(options.scale)
                                  : 1 / std::sqrt(static_cast<double>(head_dim)),
      .causal = options.causal,
      .document_starts = starts.is_defined() ? starts.data<int32_t>() : nullptr,
      .alibi_slopes = slopes.is_defined() ? slopes.data<float>() : nullptr,
      .window = options.window < k.dim(1) ? options.window : 0,
      .softcap = static_cast<double>(options.softcap)};

  Tensor o = empty(q.shape(), q.dtype());
  const Tensor lse =
      empty({shape.batch, shape.num_heads, shape.num_queries}, q.dtype() == kF64 ? kF64 : kF32);
  submit(
      kernels::AttentionFwd{o.raw_data(), lse.raw_data(), q.raw_data(), k.raw_data(), v.raw_data(),
                            head_strides(q), head_strides(k), head_strides(v), shape},
      false, kernels::attention_fwd, kernels::cudnn_attention_fwd);

  return record("attention", {q, k, v}, o,
                [shape, q = save(q), k = save(k), v = save(v), o = save(o), lse = save(lse),
                 starts = save(starts), slopes = save(slopes)](const Tensor& dy, Grads& g) {
                  const Tensor d_out = dy.contiguous();
                  Destination dq(g, 0, q), dk(g, 1, k), dv(g, 2, v);
                  kernels::AttentionBwd args{.dq = dq.data(),
                                             .dk = dk.data(),
                                             .dv = dv.data(),
                                             .accumulate_dq = dq.accumulate(),
                                             .accumulate_dk = dk.accumulate(),
                                             .accumulate_dv = dv.accumulate(),
                                             .dq_strides = dq.strides(),
                                             .dk_strides = dk.strides(),
                                             .dv_strides = dv.strides(),
                                             .workspace = nullptr,
                                             .d_out = d_out.raw_data(),
                                             .o = o->raw_data(),
                                             .lse = lse->raw_data(),
                                             .q = q->raw_data(),
                                             .k = k->raw_data(),
                                             .v = v->raw_data(),
                                             .q_strides = head_strides(q),
                                             .k_strides = head_strides(k),
                                             .v_strides = head_strides(v),
                                             .shape = shape,
                                             .device = current_stream().device().type};
                  // The storage of saved tensors may have moved since forward (released and
                  // gathered again).
                  if (starts->is_defined()) args.shape.document_starts = starts->data<int32_t>();
                  if (slopes->is_defined()) args.shape.alibi_slopes = slopes->data<float>();
                  const Tensor workspace = empty({args.workspace_numel()}, lse->dtype());
                  args.workspace = workspace.raw_data();
                  submit(args, true, kernels::attention_bwd, kernels::cudnn_attention_bwd);
                  dq.finish(), dk.finish(), dv.finish();
                });
}

namespace {

void check_decode(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                  const Tensor& v_cache, std::span<const int32_t> lengths,
                  const AttentionOptions& options) {
  constexpr const char* kOp = "attention_decode";
  TESSERA_CHECK_SHAPE(q.num_dims() == 4 && k_cache.num_dims() == 4 && q.dim(1) == 1,
                      "{}: q must be [B, 1, H, D] and the cache [B, S, Hk, D], got {} and {}", kOp,
                      q.shape(), k_cache.shape());
  TESSERA_CHECK_EQ(v_cache.shape(), k_cache.shape(), "{}: the caches must have one shape", kOp);
  TESSERA_CHECK_EQ(k.shape(), k_cache.shape().with(1, 1), "{}: k must be [B, 1, Hk, D]", kOp);
  TESSERA_CHECK_EQ(v.shape(), k.shape(), "{}: v must have k's shape", kOp);
  TESSERA_CHECK_SHAPE(
      q.dim(0) == k.dim(0) && q.dim(3) == k.dim(3) && k.dim(2) > 0 && q.dim(2) % k.dim(2) == 0,
      "{}: q {} does not fit k {}", kOp, q.shape(), k.shape());
  TESSERA_CHECK_SHAPE(q.dim(3) > 0 && q.dim(3) <= kernels::kMaxAttentionWidth,
                      "{}: head width must be in [1, {}], got {}", kOp, kernels::kMaxAttentionWidth,
                      q.dim(3));
  TESSERA_CHECK_SHAPE(std::ssize(lengths) == q.dim(0), "{}: {} lengths, expected {} rows", kOp,
                      lengths.size(), q.dim(0));
  for (const int32_t length : lengths) {
    TESSERA_CHECK_SHAPE(length < k_cache.dim(1), "{}: no place behind {} keys in a cache of {}",
                        kOp, length, k_cache.dim(1));
  }
  for (const Tensor& t : {k, v, k_cache, v_cache}) {
    TESSERA_CHECK_DTYPE(is_floating(q.dtype()) && t.dtype() == q.dtype(),
                        "{}: all tensors must have one floating dtype, got {} and {}", kOp,
                        q.dtype(), t.dtype());
  }
  TESSERA_CHECK(rows_are_contiguous(k_cache) && rows_are_contiguous(v_cache),
                "{}: rows of the caches must be contiguous", kOp);
  TESSERA_CHECK(options.causal && !options.document_starts.is_defined(),
                "{}: the query sees what is in its cache: causal, without document_starts", kOp);
  TESSERA_CHECK(!needs_grad({q, k, v}), "{}: has no gradient", kOp);
}

/// Rows one by one through `attention`.
Tensor decode_rows(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& k_cache,
                   Tensor& v_cache, std::span<const int32_t> lengths,
                   const AttentionOptions& options) {
  Tensor o = zeros(q.shape(), q.dtype());
  for (int64_t b = 0; b < q.dim(0); ++b) {
    const int64_t length = lengths[static_cast<size_t>(b)];
    if (length < 0) continue;
    const auto row = [&](const Tensor& t) { return t.narrow(0, b, 1); };
    row(k_cache).narrow(1, length, 1).copy_(row(k));
    row(v_cache).narrow(1, length, 1).copy_(row(v));
    row(o).copy_(attention(row(q), row(k_cache).narrow(1, 0, length + 1),
                           row(v_cache).narrow(1, 0, length + 1), options));
  }
  return o;
}

}  // namespace

Tensor attention_decode(const Tensor& q_BTHD, const Tensor& k_BTHD, const Tensor& v_BTHD,
                        Tensor& k_cache_BSHD, Tensor& v_cache_BSHD,
                        std::span<const int32_t> lengths, const AttentionOptions& options) {
  check_decode(q_BTHD, k_BTHD, v_BTHD, k_cache_BSHD, v_cache_BSHD, lengths, options);
  if (current_stream().device().type != DeviceType::kCpu) {
    return decode_rows(q_BTHD, k_BTHD, v_BTHD, k_cache_BSHD, v_cache_BSHD, lengths, options);
  }
  const Tensor q = with_contiguous_rows(q_BTHD), k = with_contiguous_rows(k_BTHD),
               v = with_contiguous_rows(v_BTHD);
  const Tensor slopes =
      options.alibi_slopes.is_defined() ? options.alibi_slopes.contiguous() : Tensor{};
  const Tensor held = from_values(lengths, {q.dim(0)});
  const int64_t head_dim = q.dim(3), num_keys = k_cache_BSHD.dim(1);
  const Tensor o = empty(q.shape(), q.dtype());
  kernels::attention_decode(
      current_stream(),
      {o.raw_data(), k_cache_BSHD.raw_data(), v_cache_BSHD.raw_data(), q.raw_data(), k.raw_data(),
       v.raw_data(), head_strides(k_cache_BSHD), head_strides(v_cache_BSHD), head_strides(q),
       head_strides(k), head_strides(v), held.data<int32_t>(),
       kernels::AttentionShape{.dtype = q.dtype(),
                               .batch = q.dim(0),
                               .num_queries = 1,
                               .num_keys = num_keys,
                               .num_heads = q.dim(2),
                               .num_kv_heads = k.dim(2),
                               .head_dim = head_dim,
                               .scale = options.scale != 0
                                            ? static_cast<double>(options.scale)
                                            : 1 / std::sqrt(static_cast<double>(head_dim)),
                               .causal = true,
                               .document_starts = nullptr,
                               .alibi_slopes = slopes.is_defined() ? slopes.data<float>() : nullptr,
                               .window = options.window < num_keys ? options.window : 0,
                               .softcap = static_cast<double>(options.softcap)}});
  return o;
}

}  // namespace tessera
