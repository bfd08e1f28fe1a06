#include "kernels/attention/attention.h"

#include <limits>
#include <memory>
#include <numeric>

#include "core/runtime/order_check.h"
#include "kernels/attention/cuda/cudnn.h"
#include "kernels/attention/kernel.h"
#include "test/stderr_of.h"
#include "test/testing.h"

// B batch, T queries, S keys, H query heads, K key/value heads, D head width.

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using testing::gradcheck;
using testing::randn;
using testing::tol;

struct Case {
  int64_t B, T, S, H, K, D;
  bool causal = true;
  bool has_documents = false;
  bool has_alibi = false;
  float scale = 0;
  int64_t window = 0;
  float softcap = 0;

  Shape q_shape() const { return {B, T, H, D}; }
  Shape k_shape() const { return {B, S, K, D}; }
  std::string name() const {
    return fmt::format("B{} T{} S{} H{} Hk{} D{}{}{}{} scale {} window {} softcap {}", B, T, S, H,
                       K, D, causal ? " causal" : "", has_documents ? " documents" : "",
                       has_alibi ? " alibi" : "", scale, window, softcap);
  }
};

/// Documents of 1, 2, ... tokens, another phase in each sample; positions count from the first key.
std::vector<int32_t> document_starts(const Case& c) {
  std::vector<int32_t> starts;
  for (int64_t b = 0; b < c.B; ++b) {
    int64_t start = 0, length = 1 + b;
    for (int64_t s = 0; s < c.S; ++s) {
      if (s - start == length) start = s, length = 2 * length + 1;
      if (s >= c.S - c.T) starts.push_back(static_cast<int32_t>(start));
    }
  }
  return starts;
}

AttentionOptions options_of(const Case& c) {
  AttentionOptions options{
      .causal = c.causal, .scale = c.scale, .window = c.window, .softcap = c.softcap};
  if (c.has_documents)
    options.document_starts = from_values(std::span<const int32_t>(document_starts(c)), {c.B, c.T});
  if (c.has_alibi) {
    std::vector<float> slopes;
    for (int64_t h = 0; h < c.H; ++h) slopes.push_back(std::exp2(-static_cast<float>(h + 1)));
    options.alibi_slopes = from_values(std::span<const float>(slopes), {c.H});
  }
  return options;
}

struct Reference {
  std::vector<double> o, dq, dk, dv;
};

/// The definition, pair by pair, in f64.
Reference reference(const Case& c, const std::vector<double>& q, const std::vector<double>& k,
                    const std::vector<double>& v, const std::vector<double>& d_out) {
  Reference r{std::vector<double>(q.size()), std::vector<double>(q.size()),
              std::vector<double>(k.size()), std::vector<double>(k.size())};
  const std::vector<int32_t> starts = document_starts(c);
  const double scale = c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.D));
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t t = 0; t < c.T; ++t) {
        const int64_t position = c.S - c.T + t, row = ((b * c.T + t) * c.H + h) * c.D;
        const auto key_row = [&](int64_t s) {
          return ((b * c.S + s) * c.K + h / (c.H / c.K)) * c.D;
        };
        const auto is_visible = [&](int64_t s) {
          if (c.causal && s > position) return false;
          if (c.window > 0 && s <= position - c.window) return false;
          if (!c.has_documents) return true;
          if (s < starts[static_cast<size_t>(b * c.T + t)]) return false;
          return c.causal || starts[static_cast<size_t>(b * c.T + s)] ==
                                 starts[static_cast<size_t>(b * c.T + t)];
        };
        const auto dot = [&](const std::vector<double>& x, int64_t i, const std::vector<double>& y,
                             int64_t j) {
          return std::inner_product(x.begin() + i, x.begin() + i + c.D, y.begin() + j, 0.0);
        };
        std::vector<double> p(static_cast<size_t>(c.S), 0.0), slope(p.size(), 1.0);
        double largest = -std::numeric_limits<double>::infinity(), sum = 0;
        for (int64_t s = 0; s < c.S; ++s) {
          double& logit = p[static_cast<size_t>(s)];
          logit = scale * dot(q, row, k, key_row(s));
          if (c.softcap > 0) {
            const double t = std::tanh(logit / c.softcap);
            logit = c.softcap * t;
            slope[static_cast<size_t>(s)] = 1 - t * t;
          }
          if (c.has_alibi)
            logit -= std::exp2(-static_cast<double>(h + 1)) *
                     static_cast<double>(std::abs(position - s));
          if (is_visible(s)) largest = std::max(largest, logit);
        }
        for (int64_t s = 0; s < c.S; ++s) {
          double& logit = p[static_cast<size_t>(s)];
          logit = is_visible(s) ? std::exp(logit - largest) : 0.0;
          sum += logit;
        }
        double delta = 0;
        for (int64_t s = 0; s < c.S; ++s) {
          p[static_cast<size_t>(s)] /= sum;
          delta += p[static_cast<size_t>(s)] * dot(d_out, row, v, key_row(s));
        }
        for (int64_t s = 0; s < c.S; ++s) {
          const double probability = p[static_cast<size_t>(s)];
          const double ds = scale * probability * slope[static_cast<size_t>(s)] *
                            (dot(d_out, row, v, key_row(s)) - delta);
          for (int64_t d = 0; d < c.D; ++d) {
            const auto i = static_cast<size_t>(row + d), j = static_cast<size_t>(key_row(s) + d);
            r.o[i] += probability * v[j];
            r.dv[j] += probability * d_out[i];
            r.dq[i] += ds * k[j];
            r.dk[j] += ds * q[i];
          }
        }
      }
    }
  }
  return r;
}

struct Inputs {
  Tensor q, k, v, d_out;
};

Inputs make_inputs(const Case& c, DType dtype) {
  Inputs in{randn(c.q_shape(), dtype, 1), randn(c.k_shape(), dtype, 2),
            randn(c.k_shape(), dtype, 3), randn(c.q_shape(), dtype, 4)};
  in.q.set_requires_grad(true);
  in.k.set_requires_grad(true);
  in.v.set_requires_grad(true);
  return in;
}

void check_against_reference(const Case& c, DType dtype) {
  INFO(c.name() << " " << name_of(dtype));
  const Inputs in = make_inputs(c, dtype);
  const Reference expected =
      reference(c, in.q.to_vector(), in.k.to_vector(), in.v.to_vector(), in.d_out.to_vector());
  const Tensor o = attention(in.q, in.k, in.v, options_of(c));
  CHECK(o.dtype() == dtype);
  CHECK(o.is_contiguous());
  backward(o, in.d_out);
  check_close(o.to_vector(), expected.o, tol(dtype, c.S), "o");
  check_close(in.q.grad().to_vector(), expected.dq, tol(dtype, c.S + c.D), "dq");
  check_close(in.k.grad().to_vector(), expected.dk, tol(dtype, c.T + c.D), "dk");
  check_close(in.v.grad().to_vector(), expected.dv, tol(dtype, c.T), "dv");
}

/// Output and gradients of one run.
struct Results {
  Tensor o, dq, dk, dv;
};

Results run(const Inputs& in, const AttentionOptions& options) {
  for (const Tensor& x : {in.q, in.k, in.v}) Tensor(x).zero_grad();
  const Tensor o = attention(in.q, in.k, in.v, options);
  backward(o, in.d_out);
  return {o.detach(), in.q.grad(), in.k.grad(), in.v.grad()};
}

void check_bitwise(const Results& a, const Results& b) {
  check_bitwise(a.o, b.o, "o");
  check_bitwise(a.dq, b.dq, "dq");
  check_bitwise(a.dk, b.dk, "dk");
  check_bitwise(a.dv, b.dv, "dv");
}

/// `x` with rows [begin, end) of dimension 1 taken from `other`.
Tensor with_rows(const Tensor& x, const Tensor& other, int64_t begin, int64_t end) {
  Tensor out = x.clone();
  out.narrow(1, begin, end - begin).copy_(other.narrow(1, begin, end - begin));
  return out;
}

void check_contains(const std::string& text, const std::string& part) {
  INFO(text);
  CHECK(text.find(part) != std::string::npos);
}

/// A leaf's gradient goes to a given view.
class ViewSink : public GradSink {
 public:
  ViewSink(Tensor view, bool accumulate) : view_(std::move(view)), accumulate_(accumulate) {}
  GradDst destination(const Tensor&) override { return {view_, accumulate_}; }
  void written(const Tensor&) override { ++num_written; }
  int num_written = 0;

 private:
  Tensor view_;
  bool accumulate_;
};

const std::vector<Case> kCases = {
    {1, 1, 1, 1, 1, 1},
    {2, 7, 7, 2, 2, 3},
    {1, 64, 64, 1, 1, 16},
    {2, 65, 65, 3, 1, 7},
    {1, 150, 150, 4, 2, 20},
    {1, 131, 131, 2, 2, 80},
    {1, 67, 67, 1, 1, 96},
    {1, 70, 70, 2, 1, 128},
    {1, 33, 33, 1, 1, 256},
    {1, 1, 97, 4, 2, 8},
    {2, 5, 70, 3, 3, 12},
    {1, 50, 200, 6, 2, 9},
    {1, 90, 90, 2, 1, 16, false},
    {2, 13, 77, 2, 2, 5, false},
    {2, 150, 150, 2, 1, 8, true, true},
    {2, 40, 140, 2, 2, 8, true, true},
    {2, 150, 150, 2, 2, 8, false, true},
    {1, 100, 100, 5, 5, 6, true, false, true},
    {1, 60, 90, 4, 2, 6, false, false, true},
    {2, 80, 80, 4, 2, 11, true, true, true, 0.7f},
    {1, 30, 30, 2, 2, 8, true, false, false, -0.5f},
};

/// With a window: of one key, around the tiles, of most keys; decoding; documents; alibi; backward
/// in one chunk and in several, whose keys overlap.
const std::vector<Case> kWindowCases = {
    {1, 70, 70, 2, 1, 8, true, false, false, 0, 1},
    {2, 150, 150, 3, 1, 7, true, false, false, 0, 16},
    {1, 200, 200, 2, 2, 16, true, false, false, 0, 63},
    {1, 200, 200, 2, 1, 80, true, false, false, 0, 64},
    {1, 530, 530, 1, 1, 8, true, false, false, 0, 65},
    {1, 530, 530, 1, 1, 8, true, false, false, 0, 300},
    {1, 400, 700, 2, 1, 6, true, false, false, 0, 20},
    {2, 1, 97, 4, 2, 8, true, false, false, 0, 30},
    {1, 50, 200, 6, 2, 9, true, false, false, 0, 90},
    {2, 150, 150, 2, 1, 8, true, true, false, 0, 20},
    {2, 40, 140, 2, 2, 8, true, true, false, -0.5f, 33},
    {1, 100, 100, 5, 5, 6, true, false, true, 0, 24},
};

/// With a soft-cap, where it hardly bends the logits and where it flattens them.
const std::vector<Case> kSoftcapCases = {
    {1, 64, 64, 1, 1, 16, true, false, false, 0, 0, 50},
    {2, 65, 65, 3, 1, 7, true, false, false, 0, 0, 1.5f},
    {1, 70, 70, 2, 1, 128, true, false, false, 0, 0, 3},
    {1, 5, 70, 4, 2, 12, true, false, false, 0.9f, 0, 2},
    {1, 90, 90, 2, 1, 16, false, false, false, -0.5f, 0, 1},
    {2, 150, 150, 2, 1, 8, true, true, false, 0, 0, 2},
    {2, 150, 150, 2, 2, 8, false, true, false, 0, 0, 2},
    {1, 200, 200, 4, 2, 16, true, false, false, 0.7f, 50, 2},
    {2, 40, 140, 2, 1, 8, true, true, false, 0, 33, 5},
};

/// Steps of decoding with caches of several lengths beside `attention` of each row.
void check_decode(const Case& c, DType dtype) {
  CAPTURE(c.name(), dtype);
  const int64_t capacity = c.S + 3;
  const Tensor k_all = randn({c.B, capacity, c.K, c.D}, dtype, 1),
               v_all = randn({c.B, capacity, c.K, c.D}, dtype, 2);
  // Slices of one projection, as a model has them.
  const Tensor qkv = randn({c.B, 1, c.H + 2 * c.K, c.D}, dtype, 3);
  const Tensor q = qkv.narrow(2, 0, c.H), k = qkv.narrow(2, c.H, c.K),
               v = qkv.narrow(2, c.H + c.K, c.K);
  std::vector<int32_t> lengths;
  for (int64_t b = 0; b < c.B; ++b) {
    lengths.push_back(b == 1 ? -1 : static_cast<int32_t>(c.S - 1 - 5 * b));
  }
  const AttentionOptions options = options_of(c);
  const auto copy_of = [](const Tensor& t) {
    Tensor copy = empty(t.shape(), t.dtype());
    copy.copy_(t);
    return copy;
  };
  Tensor k_cache = copy_of(k_all), v_cache = copy_of(v_all);
  const Tensor o = attention_decode(q, k, v, k_cache, v_cache, lengths, options);
  for (int64_t b = 0; b < c.B; ++b) {
    CAPTURE(b);
    const auto row = [b](const Tensor& t) { return t.narrow(0, b, 1); };
    const int64_t length = lengths[static_cast<size_t>(b)];
    Tensor keys = copy_of(row(k_all)), values = copy_of(row(v_all));
    if (length < 0) {
      check_bitwise(row(o), zeros(row(o).shape(), dtype));
      check_bitwise(row(k_cache), keys);
      continue;
    }
    keys.narrow(1, length, 1).copy_(row(k));
    values.narrow(1, length, 1).copy_(row(v));
    check_bitwise(row(k_cache), keys);
    check_bitwise(row(v_cache), values);
    const Tensor expected =
        attention(row(q), keys.narrow(1, 0, length + 1), values.narrow(1, 0, length + 1), options);
    check_close(row(o), expected, 4 * tol(dtype, c.D), "o");
    // Alone it has the same bits, in a cache of another size too.
    Tensor k_alone = copy_of(row(k_all).narrow(1, 0, length + 1)),
           v_alone = copy_of(row(v_all).narrow(1, 0, length + 1));
    const int32_t one[] = {static_cast<int32_t>(length)};
    check_bitwise(attention_decode(row(q), row(k), row(v), k_alone, v_alone, one, options), row(o));
  }
}

TEST_CASE("attention_decode: is attention of each row to the keys that it has", "[attention]") {
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    check_decode({3, 1, 20, 2, 2, 16}, dtype);
    check_decode({3, 1, 150, 4, 2, 64}, dtype);
    check_decode({2, 1, 70, 18, 1, 20}, dtype);  // more query heads than share a walk
    check_decode({3, 1, 140, 2, 1, 8, true, false, true}, dtype);
    check_decode({3, 1, 140, 2, 1, 8, true, false, false, 0.3f, 33, 2.0f}, dtype);
  }
}

TEST_CASE("attention_decode: errors", "[attention]") {
  const Tensor q = zeros({2, 1, 2, 4}), k = zeros({2, 1, 1, 4}), two = zeros({2, 2, 2, 4});
  Tensor cache = zeros({2, 3, 1, 4});
  const auto error = [&](const Tensor& of_q, const Tensor& of_k, std::vector<int32_t> lengths,
                         const AttentionOptions& options = {}) {
    return error_of([&] { attention_decode(of_q, of_k, of_k, cache, cache, lengths, options); });
  };
  CHECK(error(two, k, {0, 0})
            .starts_with("attention_decode: q must be [B, 1, H, D] and the cache [B, S, Hk, D], "
                         "got [2, 2, 2, 4] and [2, 3, 1, 4]"));
  CHECK(error(q, q, {0, 0}).starts_with("attention_decode: k must be [B, 1, Hk, D]"));
  CHECK(error(q, k, {0}).starts_with("attention_decode: 1 lengths, expected 2 rows"));
  CHECK(
      error(q, k, {0, 3}).starts_with("attention_decode: no place behind 3 keys in a cache of 3"));
  CHECK(error(q.to(kBF16), k, {0, 0})
            .starts_with("attention_decode: all tensors must have one floating dtype, got bf16 and "
                         "f32"));
  CHECK(error(q, k, {0, 0}, {.causal = false})
            .starts_with("attention_decode: the query sees what is in its cache: causal"));
  Tensor wanted = zeros({2, 1, 2, 4});
  wanted.set_requires_grad(true);
  CHECK(error(wanted, k, {0, 0}).starts_with("attention_decode: has no gradient"));
}

}  // namespace

TEST_CASE("attention: output and gradients equal the definition in f64", "[attention]") {
  for (const Case& c : kCases) check_against_reference(c, kF64);
  for (const Case& c : kWindowCases) check_against_reference(c, kF64);
  for (const Case& c : kSoftcapCases) check_against_reference(c, kF64);
}

TEST_CASE("attention: f32, bf16 and f16 are within rounding of the definition", "[attention]") {
  for (const Case& c : kCases) {
    for (const DType dtype : {kF32, kBF16, kF16}) check_against_reference(c, dtype);
  }
  for (const auto* cases : {&kWindowCases, &kSoftcapCases}) {
    for (const Case& c : *cases) {
      for (const DType dtype : {kF32, kBF16, kF16}) check_against_reference(c, dtype);
    }
  }
}

TEST_CASE("attention: backward matches finite differences", "[attention]") {
  for (const Case& c : std::vector<Case>{{1, 4, 4, 2, 2, 3},
                                         {2, 3, 5, 4, 2, 2},
                                         {1, 4, 6, 2, 1, 3, false},
                                         {2, 6, 6, 2, 1, 2, true, true},
                                         {1, 6, 6, 2, 1, 2, false, true},
                                         {1, 4, 4, 2, 2, 2, true, false, true},
                                         {1, 3, 4, 2, 1, 3, true, true, true, 0.9f},
                                         {2, 7, 9, 2, 1, 2, true, false, false, 0, 3},
                                         {1, 6, 6, 2, 2, 3, true, false, false, 0.9f, 0, 1.5f},
                                         {1, 7, 7, 2, 1, 2, true, true, false, 0, 3, 0.8f}}) {
    INFO(c.name());
    const Inputs in = make_inputs(c, kF64);
    gradcheck(
        [&](const std::vector<Tensor>& x) { return attention(x[0], x[1], x[2], options_of(c)); },
        {in.q, in.k, in.v});
  }
}

TEST_CASE("attention: changing the future changes nothing, bit for bit", "[attention]") {
  const Case c{2, 150, 150, 4, 2, 16};
  for (const DType dtype : {kF32, kBF16}) {
    const Inputs in = make_inputs(c, dtype), other{randn(c.q_shape(), dtype, 11),
                                                   randn(c.k_shape(), dtype, 12, 50.0),
                                                   randn(c.k_shape(), dtype, 13, 50.0),
                                                   {}};
    const Tensor o = attention(in.q, in.k, in.v);
    for (const int64_t t : {int64_t{1}, int64_t{63}, int64_t{64}, int64_t{100}}) {
      const Tensor changed =
          attention(with_rows(in.q, other.q, t, c.T), with_rows(in.k, other.k, t, c.T),
                    with_rows(in.v, other.v, t, c.T));
      check_bitwise(changed.narrow(1, 0, t), o.narrow(1, 0, t), "the past");
      CHECK(changed.narrow(1, t, 1).to_vector() != o.narrow(1, t, 1).to_vector());
    }
  }
}

TEST_CASE("attention: a document does not depend on the one before it, bit for bit",
          "[attention]") {
  const int64_t T = 150, start = 41;
  for (const bool causal : {true, false}) {
    const Case c{1, T, T, 2, 1, 8, causal};
    std::vector<int32_t> starts(T, 0);
    std::fill(starts.begin() + start, starts.end(), static_cast<int32_t>(start));
    const AttentionOptions options{
        .causal = causal, .document_starts = from_values(std::span<const int32_t>(starts), {1, T})};
    Inputs in = make_inputs(c, kF32);
    const Results first = run(in, options);
    Inputs changed{with_rows(in.q, randn(c.q_shape(), kF32, 21), 0, start),
                   with_rows(in.k, randn(c.k_shape(), kF32, 22, 50.0), 0, start),
                   with_rows(in.v, randn(c.k_shape(), kF32, 23, 50.0), 0, start),
                   with_rows(in.d_out, randn(c.q_shape(), kF32, 24, 50.0), 0, start)};
    for (Tensor* x : {&changed.q, &changed.k, &changed.v}) x->set_requires_grad(true);
    const Results second = run(changed, options);
    const auto tail = [&](const Tensor& x) { return x.narrow(1, start, T - start); };
    check_bitwise({tail(first.o), tail(first.dq), tail(first.dk), tail(first.dv)},
                  {tail(second.o), tail(second.dq), tail(second.dk), tail(second.dv)});
    CHECK(first.o.narrow(1, 0, 1).to_vector() != second.o.narrow(1, 0, 1).to_vector());
  }
}

TEST_CASE("attention: a window that holds every key is none, bit for bit", "[attention]") {
  const Case c{2, 90, 130, 4, 2, 16};
  for (const DType dtype : {kF32, kBF16}) {
    const Inputs in = make_inputs(c, dtype);
    const Results expected = run(in, {});
    for (const int64_t window : {int64_t{130}, int64_t{131}, int64_t{1} << 40})
      check_bitwise(run(in, {.window = window}), expected);
    CHECK(run(in, {.window = 129}).o.to_vector() != expected.o.to_vector());
  }
}

TEST_CASE("attention: tiles outside the window are not visited", "[attention]") {
  // Probability 0 times NaN would be NaN.
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Case c{1, 40, 500, 2, 1, 8, true, false, false, 0, 60};
  const int64_t first = (500 - 40 + 1 - 60) / 64 * 64;  // of the first tile that holds a seen key
  for (const DType dtype : {kF32, kBF16}) {
    const Inputs in = make_inputs(c, dtype);
    const Results expected = run(in, options_of(c));
    Inputs other = in;
    for (Tensor* x : {&other.k, &other.v}) {
      *x = x->detach().clone();
      x->narrow(1, 0, first).fill_(nan);
      x->set_requires_grad(true);
    }
    check_bitwise(run(other, options_of(c)), expected);
    const std::vector<double> zeros(static_cast<size_t>(first * c.K * c.D), 0.0);
    CHECK(expected.dk.narrow(1, 0, first).to_vector() == zeros);
    CHECK(expected.dv.narrow(1, 0, first).to_vector() == zeros);
  }
  // Keys before 128 are seen by queries before 128 + 60 - 1.
  const Case square{1, 300, 300, 1, 1, 8, true, false, false, 0, 60};
  for (const DType dtype : {kF32, kBF16}) {
    const Inputs in = make_inputs(square, dtype);
    const Results expected = run(in, options_of(square));
    Inputs other{in.q.detach().clone(), in.k, in.v, in.d_out.clone()};
    for (const Tensor& x : {other.q, other.d_out}) x.narrow(1, 192, 108).fill_(nan);
    other.q.set_requires_grad(true);
    const Results changed = run(other, options_of(square));
    check_bitwise(changed.dk.narrow(1, 0, 128), expected.dk.narrow(1, 0, 128));
    check_bitwise(changed.dv.narrow(1, 0, 128), expected.dv.narrow(1, 0, 128));
  }
}

TEST_CASE("attention: grouped heads equal repeated key/value heads, bit for bit", "[attention]") {
  const Case grouped{2, 70, 90, 6, 2, 8};
  const Inputs in = make_inputs(grouped, kF32);
  Tensor k = empty({2, 90, 6, 8}), v = empty({2, 90, 6, 8});
  for (int64_t h = 0; h < 6; ++h) {
    k.narrow(2, h, 1).copy_(in.k.narrow(2, h / 3, 1));
    v.narrow(2, h, 1).copy_(in.v.narrow(2, h / 3, 1));
  }
  check_bitwise(attention(in.q, in.k, in.v), attention(in.q, k, v));
}

TEST_CASE("attention: decoding a token at a time equals the whole sequence, bit for bit",
          "[attention]") {
  const Case c{2, 130, 130, 4, 2, 16};
  const Inputs in = make_inputs(c, kF32);
  for (const AttentionOptions& options :
       {AttentionOptions{}, AttentionOptions{.window = 40}, AttentionOptions{.softcap = 2}}) {
    const Tensor whole = attention(in.q, in.k, in.v, options);
    for (const int64_t t : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, int64_t{129}}) {
      const Tensor one = attention(in.q.narrow(1, t, 1), in.k.narrow(1, 0, t + 1),
                                   in.v.narrow(1, 0, t + 1), options);
      check_bitwise(one, whole.narrow(1, t, 1));
    }
  }
}

TEST_CASE("attention: slices of a packed qkv are read and written in place", "[attention]") {
  const int64_t B = 2, T = 70, H = 3, D = 8;
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    INFO(name_of(dtype));
    const Case c{B, T, T, H, H, D};
    const Inputs in = make_inputs(c, dtype);
    const Results expected = run(in, {});

    Tensor qkv = empty({B, T, 3, H, D}, dtype), d_qkv = full({B, T, 3, H, D}, 1.0, dtype);
    Inputs packed{qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2), in.d_out};
    packed.q.copy_(in.q), packed.k.copy_(in.k), packed.v.copy_(in.v);
    int i = 0;
    for (const bool accumulate : {false, true}) {
      d_qkv.fill_(1.0);
      std::vector<std::shared_ptr<ViewSink>> sinks;
      i = 0;
      for (Tensor* x : {&packed.q, &packed.k, &packed.v}) {
        *x = x->detach().set_requires_grad(true);
        sinks.push_back(std::make_shared<ViewSink>(d_qkv.select(2, i++), accumulate));
        set_grad_sink(*x, sinks.back());
      }
      const Tensor o = attention(packed.q, packed.k, packed.v);
      backward(o, in.d_out);
      check_bitwise(o, expected.o);
      for (const auto& sink : sinks) CHECK(sink->num_written == 1);
      i = 0;
      for (const Tensor& grad : {expected.dq, expected.dk, expected.dv}) {
        std::vector<double> values = grad.to_vector();
        if (accumulate)
          for (double& value : values) value += 1;
        check_close(d_qkv.select(2, i++).to_vector(), values, accumulate ? tol(dtype) : 0);
      }
    }
  }
}

TEST_CASE("attention: a destination of another dtype or with gaps in its rows is added to",
          "[attention]") {
  const Case c{2, 20, 20, 2, 1, 5};
  Inputs in = make_inputs(c, kBF16);
  const Results expected = run(in, {});
  Tensor dq = full(c.q_shape(), 1.0, kF32), dk = full({2, 5, 1, 20}, 1.0, kBF16),
         dv = full(c.k_shape(), 7.0, kF32);
  for (Tensor* x : {&in.q, &in.k, &in.v}) *x = x->detach().set_requires_grad(true);
  set_grad_sink(in.q, std::make_shared<ViewSink>(dq, true));
  set_grad_sink(in.k, std::make_shared<ViewSink>(dk.transpose(1, 3), true));
  set_grad_sink(in.v, std::make_shared<ViewSink>(dv, false));
  backward(attention(in.q, in.k, in.v), in.d_out);
  const auto plus_one = [](const Tensor& x) {
    std::vector<double> values = x.to_vector();
    for (double& value : values) value += 1;
    return values;
  };
  check_close(dq.to_vector(), plus_one(expected.dq), tol(kF32));
  check_close(dk.transpose(1, 3).to_vector(), plus_one(expected.dk), tol(kBF16));
  check_close(dv.to_vector(), expected.dv.to_vector(), 0);
}

TEST_CASE("attention: inputs with gaps in their rows are copied and get their gradients",
          "[attention]") {
  const Case c{2, 9, 9, 2, 1, 4};
  const Inputs in = make_inputs(c, kF32);
  const Results expected = run(in, {});
  Tensor q = in.q.transpose(1, 3).contiguous().detach().set_requires_grad(true);  // [B, D, H, T]
  const Tensor o = attention(q.transpose(1, 3), in.k, in.v);
  backward(o, in.d_out);
  check_bitwise(o, expected.o);
  check_bitwise(q.grad().transpose(1, 3).contiguous(), expected.dq);
}

TEST_CASE("attention: only wanted gradients are computed", "[attention]") {
  const Case c{1, 70, 70, 2, 1, 8};
  for (int wanted = 0; wanted < 3; ++wanted) {
    Inputs in = make_inputs(c, kF32);
    const Results all = run(in, {});
    Tensor* inputs[] = {&in.q, &in.k, &in.v};
    const Tensor expected[] = {all.dq, all.dk, all.dv};
    for (int i = 0; i < 3; ++i) *inputs[i] = inputs[i]->detach().set_requires_grad(i == wanted);
    backward(attention(in.q, in.k, in.v), in.d_out);
    for (int i = 0; i < 3; ++i) {
      CHECK(inputs[i]->grad().is_defined() == (i == wanted));
      if (i == wanted) check_bitwise(inputs[i]->grad(), expected[i]);
    }
  }
}

TEST_CASE("attention: the number of threads changes no bit", "[attention]") {
  for (const Case& c : std::vector<Case>{{1, 400, 400, 2, 1, 32},
                                         {3, 130, 130, 4, 2, 24, true, true},
                                         {40, 64, 64, 1, 1, 16},
                                         {1, 700, 700, 2, 1, 8, true, false, false, 0, 70, 2}}) {
    INFO(c.name());
    for (const DType dtype : {kF32, kBF16}) {
      std::vector<std::vector<double>> values[2];
      for (const int num_threads : {1, 2}) {
        Context::Scope scope(
            std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = num_threads}));
        const Results r = run(make_inputs(c, dtype), options_of(c));
        for (const Tensor& x : {r.o, r.dq, r.dk, r.dv})
          values[num_threads - 1].push_back(x.to_vector());
      }
      CHECK(values[0] == values[1]);
    }
  }
}

TEST_CASE("attention: a query that sees no key gives zeros and no gradient", "[attention]") {
  const Case c{1, 6, 6, 2, 1, 4};
  for (const DType dtype : {kF32, kF64}) {
    // A start behind the query hides every key of it.
    const AttentionOptions options{.document_starts = from_values({0, 5, 0, 6, 0, 5}, {1, 6})};
    const Results r = run(make_inputs(c, dtype), options);
    for (const int64_t t : {int64_t{1}, int64_t{3}}) {
      const std::vector<double> zeros(8, 0.0);
      CHECK(r.o.narrow(1, t, 1).to_vector() == zeros);
      CHECK(r.dq.narrow(1, t, 1).to_vector() == zeros);
    }
    for (const Tensor& x : {r.o, r.dq, r.dk, r.dv}) {
      for (const double value : x.to_vector()) CHECK(std::isfinite(value));
    }
  }
}

TEST_CASE("attention: logits of any size do not overflow, a NaN is not hidden", "[attention]") {
  const Case c{1, 70, 70, 1, 1, 8};
  Inputs in = make_inputs(c, kF32);
  const AttentionOptions options{.scale = 1e4f};
  const Results r = run(in, options);
  for (const Tensor& x : {r.o, r.dq, r.dk, r.dv}) {
    for (const double value : x.to_vector()) CHECK(std::isfinite(value));
  }
  Tensor q = in.q.clone();
  q.narrow(1, 66, 1).fill_(std::numeric_limits<double>::quiet_NaN());
  for (const float softcap : {0.0f, 5.0f}) {
    const Tensor o = attention(q, in.k, in.v, {.softcap = softcap});
    for (int64_t t = 0; t < c.T; ++t) {
      for (const double value : o.narrow(1, t, 1).to_vector())
        CHECK(std::isnan(value) == (t == 66));
    }
  }
}

TEST_CASE("attention: empty batches and sequences", "[attention]") {
  for (const Case& c :
       std::vector<Case>{{0, 5, 5, 2, 1, 4}, {2, 0, 0, 2, 1, 4}, {2, 0, 3, 2, 1, 4}}) {
    INFO(c.name());
    const Results r = run(make_inputs(c, kF32), {});
    CHECK(r.o.shape() == c.q_shape());
    CHECK(r.dk.to_vector() == std::vector<double>(static_cast<size_t>(c.k_shape().numel()), 0.0));
  }
}

TEST_CASE("attention: peak memory is linear in T", "[attention]") {
  const auto peak = [](int64_t T, bool with_backward) {
    const auto context = std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = 2});
    Context::Scope scope(context);
    const Case c{1, T, T, 2, 1, 8};
    const Inputs in = make_inputs(c, kF32);
    context->compute().synchronize();
    const int64_t before = context->allocator()->stats().allocated;
    context->allocator()->reset_peak();
    const Tensor o = attention(in.q, in.k, in.v);
    if (with_backward) backward(o, in.d_out);
    context->compute().synchronize();
    return context->allocator()->stats().peak_allocated - before;
  };
  // Forward: o (2 heads of 8) and lse. A T x T matrix would be 4 MiB at 1024.
  const int64_t forward = 1024 * 2 * (8 + 1) * 4;
  CHECK(peak(1024, false) <= forward + 4096);
  CHECK(peak(2048, false) <= 2 * forward + 4096);
  // Backward: dq, dk, dv and 8 chunks of dk and dv with rows of 16.
  const int64_t workspace = 8 * 2 * 1024 * 16 * 4, gradients = 1024 * (2 + 1 + 1) * 8 * 4;
  CHECK(peak(1024, true) <= forward + workspace + gradients + 4096);
  CHECK(peak(2048, true) <= 2 * (forward + workspace + gradients) + 4096);
}

TEST_CASE("attention: passes the happens-before checker with poisoned frees", "[attention]") {
  const auto run_in = [&](const Case& c, bool checked) {
    const auto context = std::make_shared<Context>(
        ContextOptions{.device = {}, .num_threads = 2, .poison = checked, .order_check = checked});
    Context::Scope scope(context);
    const Inputs in = make_inputs(c, kBF16);
    const Results r = run(in, options_of(c));
    std::vector<std::vector<double>> values;
    for (const Tensor& x : {r.o, r.dq, r.dk, r.dv}) values.push_back(x.to_vector());
    if (checked) context->order_check()->throw_if_conflicts();
    return values;
  };
  for (const Case& c : {Case{2, 150, 150, 4, 2, 16, true, true, true},
                        Case{1, 300, 420, 2, 1, 8, true, false, false, 0, 40, 3}}) {
    INFO(c.name());
    CHECK(run_in(c, true) == run_in(c, false));
  }
}

TEST_CASE("attention: keys written on another stream without an event are reported",
          "[attention]") {
  for (const bool waits : {true, false}) {
    const auto context = std::make_shared<Context>(
        ContextOptions{.device = {}, .num_threads = 1, .order_check = true});
    Context::Scope scope(context);
    const Inputs in = make_inputs({1, 8, 8, 1, 1, 4}, kF32);
    const Stream other = context->make_stream("other");
    other.wait(context->compute().record());
    Tensor k = in.k.detach();
    {
      StreamGuard guard(other);
      k.fill_(0.5);
    }
    if (waits) context->compute().wait(other.record());
    const Tensor o = attention(in.q, k, in.v);
    context->compute().synchronize();
    other.synchronize();
    REQUIRE(context->order_check()->conflicts().size() == (waits ? 0 : 1));
    if (!waits) {
      check_contains(context->order_check()->conflicts()[0], "attention_fwd");
    }
  }
}

TEST_CASE("attention: cost counts the visible half and each operand once", "[attention]") {
  const kernels::AttentionShape shape{.dtype = kBF16,
                                      .batch = 2,
                                      .num_queries = 3,
                                      .num_keys = 5,
                                      .num_heads = 4,
                                      .num_kv_heads = 2,
                                      .head_dim = 8,
                                      .scale = 1,
                                      .causal = true,
                                      .document_starts = nullptr,
                                      .alibi_slopes = nullptr};
  char byte = 0;
  kernels::AttentionFwd fwd{&byte,       &byte,       &byte,       &byte, &byte,
                            {96, 32, 8}, {80, 16, 8}, {80, 16, 8}, shape};
  // Queries at positions 2, 3, 4 see 3 + 4 + 5 keys, in 8 heads.
  CHECK(fwd.cost().flops() == 4 * 8 * 8 * 12);
  CHECK(fwd.cost().bytes_read() == 2 * (192 + 160 + 160));
  CHECK(fwd.cost().bytes_written() == 2 * 192 + 4 * 24);
  fwd.shape.causal = false;
  CHECK(fwd.cost().flops() == 4 * 8 * 8 * 15);

  // A window of 4: 3 + 4 + 4 keys; of 2: 2 each, and key 0 is not read.
  fwd.shape.causal = true, fwd.shape.window = 4;
  CHECK(fwd.cost().flops() == 4 * 8 * 8 * 11);
  CHECK(fwd.cost().bytes_read() == 2 * (192 + 160 + 160));
  fwd.shape.window = 2;
  CHECK(fwd.cost().flops() == 4 * 8 * 8 * 6);
  CHECK(fwd.cost().bytes_read() == 2 * (192 + 2 * (160 - 16)));

  kernels::AttentionBwd bwd{.dq = &byte,
                            .dk = &byte,
                            .dv = nullptr,
                            .accumulate_dq = false,
                            .accumulate_dk = true,
                            .accumulate_dv = false,
                            .dq_strides = {96, 32, 8},
                            .dk_strides = {80, 16, 8},
                            .dv_strides = {0, 0, 0},
                            .workspace = &byte,
                            .d_out = &byte,
                            .o = &byte,
                            .lse = &byte,
                            .q = &byte,
                            .k = &byte,
                            .v = &byte,
                            .q_strides = {96, 32, 8},
                            .k_strides = {80, 16, 8},
                            .v_strides = {80, 16, 8},
                            .shape = shape};
  const int64_t workspace = 4 * bwd.workspace_numel();
  CHECK(bwd.num_chunks() == 1);
  CHECK(bwd.workspace_numel() == 2 * 2 * 2 * 5 * 16);
  CHECK(bwd.cost().flops() == 10 * 8 * 8 * 12);
  CHECK(bwd.cost().bytes_read() == 2 * (3 * 192 + 3 * 160) + 4 * 24 + workspace);
  CHECK(bwd.cost().bytes_written() == 2 * (192 + 160) + workspace);
}

TEST_CASE("attention: errors name the op and both values", "[attention]") {
  const Tensor q = zeros({2, 3, 4, 8}), k = zeros({2, 3, 2, 8});
  const auto error = [&](const Tensor& q_arg, const Tensor& k_arg, const Tensor& v_arg,
                         const AttentionOptions& options = {}) {
    return error_of([&] { attention(q_arg, k_arg, v_arg, options); });
  };
  check_contains(error(zeros({3, 4, 8}), k, k),
                 "attention: q must be [B, T, H, D] and k [B, "
                 "S, Hk, D], got [3, 4, 8] and [2, 3, 2, 8]");
  check_contains(error(q, k, zeros({2, 3, 2, 7})),
                 "attention: v must have k's shape (v.shape() == k.shape(): [2, 3, 2, 7] vs "
                 "[2, 3, 2, 8])");
  check_contains(error(q, zeros({1, 3, 2, 8}), zeros({1, 3, 2, 8})),
                 "attention: q and k must agree in B and D, got [2, 3, 4, 8] and [1, 3, 2, "
                 "8]");
  check_contains(error(q, zeros({2, 3, 3, 8}), zeros({2, 3, 3, 8})),
                 "attention: q's heads must be a multiple of k's, got 4 and 3");
  check_contains(error(q, zeros({2, 2, 2, 8}), zeros({2, 2, 2, 8})),
                 "attention: needs at least as many keys as queries, got 2 and 3");
  check_contains(error(zeros({1, 1, 1, 257}), zeros({1, 1, 1, 257}), zeros({1, 1, 1, 257})),
                 "attention: head width must be in [1, 256], got 257");
  const Tensor ids = zeros({2, 3, 4, 8}, kI32);
  check_contains(error(ids, ids, ids), "attention: q must be floating, got i32");
  check_contains(error(q, k.to(kBF16), k),
                 "attention: k must have q's dtype (k.dtype() == "
                 "q.dtype(): bf16 vs f32)");
  check_contains(error(q, k, k.to(kBF16)),
                 "attention: v must have q's dtype (v.dtype() == "
                 "q.dtype(): bf16 vs f32)");
  check_contains(error(q, k, k, {.scale = std::numeric_limits<float>::infinity()}),
                 "attention: scale must be finite, got inf");
  check_contains(error(q, k, k, {.window = -1}), "attention: window must not be negative, got -1");
  check_contains(error(q, k, k, {.causal = false, .window = 2}),
                 "attention: a window of 2 needs causal");
  check_contains(error(q, k, k, {.softcap = -3}),
                 "attention: softcap must be finite and not negative, got -3");
  check_contains(error(q, k, k, {.softcap = std::numeric_limits<float>::quiet_NaN()}),
                 "attention: softcap must be finite and not negative, got nan");
  check_contains(error(q, k, k, {.alibi_slopes = zeros({4}), .softcap = 2}),
                 "attention: alibi_slopes and a softcap of 2 do not go together");
  check_contains(error(q, k, k, {.document_starts = zeros({3, 2}, kI32)}),
                 "attention: document_starts must be [B, T]");
  check_contains(error(q, k, k, {.document_starts = zeros({2, 3}, kI64)}),
                 "attention: document_starts must be i32");
  const Tensor longer = zeros({2, 5, 2, 8});
  check_contains(
      error(q, longer, longer, {.causal = false, .document_starts = zeros({2, 3}, kI32)}),
      "attention: documents without causal need as many keys as queries, got 5 and 3");
  check_contains(error(q, k, k, {.alibi_slopes = zeros({2})}),
                 "attention: alibi_slopes must be [H]");
  check_contains(error(q, k, k, {.alibi_slopes = zeros({4}, kF64)}),
                 "attention: alibi_slopes must be f32");
}

namespace {

/// Arguments of a case without memory: as for aligned, contiguous operands.
kernels::AttentionFwd described_fwd(const Case& c, DType dtype) {
  const kernels::HeadStrides q{c.T * c.H * c.D, c.H * c.D, c.D}, k{c.S * c.K * c.D, c.K * c.D, c.D};
  return {.o = nullptr,
          .lse = nullptr,
          .q = nullptr,
          .k = nullptr,
          .v = nullptr,
          .q_strides = q,
          .k_strides = k,
          .v_strides = k,
          .shape = {dtype, c.B, c.T, c.S, c.H, c.K, c.D, 0.125, c.causal, nullptr, nullptr}};
}

kernels::AttentionBwd described_bwd(const Case& c, DType dtype, void* gradients) {
  const kernels::AttentionFwd fwd = described_fwd(c, dtype);
  return {.dq = gradients,
          .dk = gradients,
          .dv = gradients,
          .accumulate_dq = false,
          .accumulate_dk = false,
          .accumulate_dv = false,
          .dq_strides = fwd.q_strides,
          .dk_strides = fwd.k_strides,
          .dv_strides = fwd.v_strides,
          .workspace = nullptr,
          .d_out = nullptr,
          .o = nullptr,
          .lse = nullptr,
          .q = nullptr,
          .k = nullptr,
          .v = nullptr,
          .q_strides = fwd.q_strides,
          .k_strides = fwd.k_strides,
          .v_strides = fwd.v_strides,
          .shape = fwd.shape};
}

}  // namespace

TEST_CASE("attention: cuDNN accepts the description of its graphs", "[attention]") {
  if (!kernels::cudnn_problem().empty()) {
    WARN("skipped: " << kernels::cudnn_problem());
    CHECK(kernels::describe_to_cudnn(described_fwd(kCases[0], kBF16)) == kernels::cudnn_problem());
    CHECK(kernels::describe_to_cudnn(described_bwd(kCases[0], kBF16, nullptr)) ==
          kernels::cudnn_problem());
    return;
  }
  for (const DType dtype : {kBF16, kF16}) {
    for (const Case& c : {Case{2, 64, 64, 4, 4, 64}, Case{1, 128, 128, 8, 2, 128},
                          Case{1, 64, 192, 4, 1, 80}, Case{2, 64, 64, 2, 2, 64, false}}) {
      INFO(c.name());
      CHECK(kernels::describe_to_cudnn(described_fwd(c, dtype)).empty());
      CHECK(kernels::describe_to_cudnn(described_bwd(c, dtype, nullptr)).empty());
    }
  }
  const Case uneven_groups{1, 64, 64, 3, 2, 64};
  check_contains(kernels::describe_to_cudnn(described_fwd(uneven_groups, kBF16)),
                 "attention: cudnnBackendFinalize: status ");
  check_contains(kernels::describe_to_cudnn(described_bwd(uneven_groups, kBF16, nullptr)),
                 "attention: cudnnBackendFinalize: status ");
}

TEST_CASE("attention: what cuDNN is asked for", "[attention]") {
  const Case c{2, 64, 64, 4, 2, 64};
  const bool is_built = kernels::cudnn_problem() != "this build has no cuDNN";
  alignas(16) static char memory[16];
  static const int32_t start = 0;
  static const float slope = 1;
  CHECK(kernels::cudnn_takes(described_fwd(c, kBF16)) == is_built);
  CHECK(kernels::cudnn_takes(described_bwd(c, kF16, memory)) == is_built);
  CHECK_FALSE(kernels::cudnn_takes(described_fwd(c, kF32)));
  const auto fwd_with = [&](auto change) {
    kernels::AttentionFwd fwd = described_fwd(c, kBF16);
    change(fwd);
    return kernels::cudnn_takes(fwd);
  };
  CHECK_FALSE(fwd_with([](auto& a) { a.shape.document_starts = &start; }));
  CHECK_FALSE(fwd_with([](auto& a) { a.shape.alibi_slopes = &slope; }));
  CHECK_FALSE(fwd_with([](auto& a) { a.shape.scale = -1; }));
  CHECK_FALSE(fwd_with([](auto& a) { a.shape.window = 32; }));
  CHECK_FALSE(fwd_with([](auto& a) { a.shape.softcap = 50; }));
  CHECK_FALSE(fwd_with([](auto& a) { a.shape.num_queries = 0; }));
  CHECK_FALSE(fwd_with([](auto& a) { a.q = memory + 2; }));
  CHECK_FALSE(fwd_with([](auto& a) { a.k_strides.time += 4; }));
  const auto bwd_with = [&](auto change) {
    kernels::AttentionBwd bwd = described_bwd(c, kBF16, memory);
    change(bwd);
    return kernels::cudnn_takes(bwd);
  };
  CHECK_FALSE(bwd_with([](auto& a) { a.shape.window = 32; }));
  CHECK_FALSE(bwd_with([](auto& a) { a.shape.softcap = 50; }));
  CHECK_FALSE(bwd_with([](auto& a) { a.dk = nullptr; }));
  CHECK_FALSE(bwd_with([](auto& a) { a.accumulate_dv = true; }));
  CHECK_FALSE(bwd_with([](auto& a) { a.dq_strides.head += 1; }));
}

TEST_CASE("attention: cuDNN steps aside for a window and a soft-cap with one line", "[attention]") {
  if (kernels::cudnn_problem() == "this build has no cuDNN") return;
  kernels::AttentionFwd fwd = described_fwd({2, 64, 64, 4, 2, 64}, kBF16);
  const auto lines_of = [&](int64_t window, double softcap) {
    fwd.shape.window = window, fwd.shape.softcap = softcap;
    return testing::stderr_of([&] {
      for (int i = 0; i < 2; ++i) CHECK_FALSE(kernels::cudnn_takes(fwd));
    });
  };
  CHECK(lines_of(48, 0) ==
        "attention: cuDNN is not asked for a window of 48 keys; own kernels compute it\n");
  CHECK(lines_of(0, 30) ==
        "attention: cuDNN is not asked for a soft-cap of 30; own kernels compute it\n");
}

TEST_CASE("attention: cuDNN before 9.15.1 is not asked for a backward of keys off its tiles",
          "[attention]") {
  const bool is_built = kernels::cudnn_problem() != "this build has no cuDNN";
  alignas(16) static char memory[16];
  const kernels::AttentionBwd off = described_bwd({1, 64, 192, 2, 2, 64}, kBF16, memory),
                              on = described_bwd({1, 64, 256, 2, 2, 64}, kBF16, memory);
  for (const int64_t version : {90600, 91002, 91500}) {
    CHECK_FALSE(kernels::cudnn_takes(off, version));
    CHECK(kernels::cudnn_takes(on, version) == is_built);
  }
  for (const int64_t version : {91501, 91900}) {
    CHECK(kernels::cudnn_takes(off, version) == is_built);
    CHECK(kernels::cudnn_backward_problem(version, 192).empty());
  }
  CHECK(
      kernels::cudnn_backward_problem(91002, 192) ==
      "cuDNN 9.10.2 computes a wrong backward of 192 keys, which is no multiple of 128 (mended in "
      "9.15.1)");
}

TEST_CASE("attention: the backend of CUDA devices changes nothing on the CPU", "[attention]") {
  CHECK(attention_backend() == AttentionBackend::kOwn);
  const Inputs in = make_inputs({1, 20, 20, 2, 1, 8}, kBF16);
  const Results expected = run(in, {});
  for (const AttentionBackend backend : {AttentionBackend::kCudnn, AttentionBackend::kAuto}) {
    set_attention_backend(backend);
    CHECK(attention_backend() == backend);
    check_bitwise(run(in, {}), expected);
  }
  set_attention_backend(AttentionBackend::kOwn);
}

}  // namespace tessera
