#include "nn/attention.h"

#include "core/autograd.h"
#include "test/testing.h"

namespace tessera::nn {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using testing::gradcheck;
using testing::randn;

AttentionConfig grouped_config() {
  AttentionConfig c;
  c.width = 10;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_width = 6;
  c.qkv_bias = true;
  c.out_bias = true;
  return c;
}

/// Causal attention with grouped heads by its definition, in f64 loops.
std::vector<double> naive(Attention& attention, const Tensor& x_BTC) {
  const AttentionConfig& c = attention.config();
  const auto values = [&](const char* name) {
    return attention.parameter(name).tensor.to_vector();
  };
  const std::vector<double> x = x_BTC.to_vector(), w = values("qkv.weight"), b = values("qkv.bias"),
                            wo = values("out.weight"), bo = values("out.bias");
  const int64_t B = x_BTC.dim(0), T = x_BTC.dim(1), C = c.width, H = c.num_heads,
                G = c.num_kv_heads, D = c.head_width, N = (H + 2 * G) * D;
  std::vector<double> y;
  for (int64_t n = 0; n < B; ++n) {
    std::vector<double> qkv(static_cast<size_t>(T * N));
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i < N; ++i) {
        double sum = b[i];
        for (int64_t k = 0; k < C; ++k) sum += w[i * C + k] * x[(n * T + t) * C + k];
        qkv[t * N + i] = sum;
      }
    }
    for (int64_t t = 0; t < T; ++t) {
      std::vector<double> heads(static_cast<size_t>(H * D), 0.0);
      for (int64_t h = 0; h < H; ++h) {
        const int64_t g = h / (H / G);
        std::vector<double> p;
        double total = 0;
        for (int64_t s = 0; s <= t; ++s) {
          double dot = 0;
          for (int64_t d = 0; d < D; ++d) {
            dot += qkv[t * N + h * D + d] * qkv[s * N + (H + g) * D + d];
          }
          p.push_back(std::exp(dot / std::sqrt(static_cast<double>(D))));
          total += p.back();
        }
        for (int64_t s = 0; s <= t; ++s) {
          for (int64_t d = 0; d < D; ++d) {
            heads[h * D + d] += p[s] / total * qkv[s * N + (H + G + g) * D + d];
          }
        }
      }
      for (int64_t i = 0; i < C; ++i) {
        double sum = bo[i];
        for (int64_t k = 0; k < H * D; ++k) sum += wo[i * H * D + k] * heads[k];
        y.push_back(sum);
      }
    }
  }
  return y;
}

TEST_CASE("attention: grouped heads by definition", "[nn]") {
  ParameterDtype dtype(kF64);
  Attention attention(grouped_config());
  attention.initialize(3);
  const Tensor x_BTC = randn({2, 5, 10}, kF64);
  check_close(attention.forward(x_BTC).to_vector(), naive(attention, x_BTC), 1e-12);
  CHECK(attention.kind() == "Attention(4 heads of 6, 2 kv heads, causal)");
}

TEST_CASE("attention: backward matches finite differences, with every option", "[nn]") {
  ParameterDtype dtype(kF64);
  AttentionConfig c = grouped_config();
  c.qk_norm = true;
  c.rope = RopeOptions{};
  c.alibi = true;
  Attention attention(c);
  attention.initialize(3);
  std::vector<Tensor> inputs{randn({2, 4, 10}, kF64)};
  inputs[0].set_requires_grad(true);
  const auto parameters = attention.named_parameters();
  CHECK(parameters.size() == 6);
  for (const NamedParameter& entry : parameters) inputs.push_back(entry.parameter->tensor);
  const auto fn = [&](const std::vector<Tensor>& in) {
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].parameter->tensor = in[i + 1];
    return attention.forward(in[0]);
  };
  gradcheck(fn, inputs);
}

TEST_CASE("attention: window, soft-cap and scale are those of the op", "[nn]") {
  AttentionConfig c = grouped_config();
  c.window = 3, c.softcap = 0.2f, c.scale = 0.7f;
  Attention attention(c);
  attention.initialize(3);
  CHECK(attention.kind() == "Attention(4 heads of 6, 2 kv heads, window 3, softcap 0.2, causal)");
  const Tensor x_BTC = randn({2, 7, 10});
  const Tensor y_BTC = attention.forward(x_BTC);
  // A query of the last position sees the last three.
  Tensor other = x_BTC.clone();
  other.narrow(1, 0, 4).copy_(randn({2, 4, 10}, kF32, 9));
  const Tensor z_BTC = attention.forward(other);
  check_bitwise(z_BTC.narrow(1, 6, 1), y_BTC.narrow(1, 6, 1));
  CHECK(z_BTC.narrow(1, 5, 1).to_vector() != y_BTC.narrow(1, 5, 1).to_vector());
  const auto values = [&](auto change) {
    AttentionConfig without = c;
    change(without);
    Attention module(without);
    module.initialize(3);
    return module.forward(x_BTC).to_vector();
  };
  CHECK(values([](auto&) {}) == y_BTC.to_vector());
  CHECK(values([](auto& a) { a.softcap = 0; }) != y_BTC.to_vector());
  CHECK(values([](auto& a) { a.scale = 0; }) != y_BTC.to_vector());
}

TEST_CASE("attention: a cache gives what the whole row gives", "[nn]") {
  for (const char* kind : {"rope", "alibi", "window"}) {
    const bool alibi = kind == std::string_view("alibi");
    AttentionConfig c = grouped_config();
    c.alibi = alibi;
    if (!alibi) c.rope = RopeOptions{};
    if (kind == std::string_view("window")) c.window = 3, c.softcap = 0.5f;
    Attention attention(c);
    attention.initialize(3);
    NoGrad no_grad;
    const Tensor x_BTC = randn({2, 7, 10});
    const Tensor expected = attention.forward(x_BTC);
    LayerCache cache{zeros({2, 9, 2, 6}), zeros({2, 9, 2, 6})};
    int64_t begin = 0;
    for (const int64_t num_new : {3, 1, 1, 2}) {
      std::vector<int32_t> positions;
      for (int64_t t = 0; t < num_new; ++t) positions.push_back(static_cast<int32_t>(begin + t));
      AttentionInput input;
      input.positions = from_values(std::span<const int32_t>(positions), {num_new});
      input.cache = &cache;
      input.cache_length = begin;
      const Tensor y_BTC = attention.forward(x_BTC.narrow(1, begin, num_new).contiguous(), input);
      check_close(y_BTC, expected.narrow(1, begin, num_new), 1e-6);
      begin += num_new;
    }
    AttentionInput full_input;
    full_input.cache = &cache;
    full_input.cache_length = begin;
    CHECK(error_of([&] {
            attention.forward(randn({2, 3, 10}), full_input);
          })
              .starts_with("Attention: a cache of [2, 9, 2, 6] takes no 3 positions of 2 rows "
                           "after 7"));
  }
}

TEST_CASE("attention: documents do not see each other", "[nn]") {
  AttentionConfig c = grouped_config();
  c.rope = RopeOptions{};
  Attention attention(c);
  attention.initialize(3);
  const Tensor x_BTC = randn({1, 6, 10});
  AttentionInput input;
  input.document_starts = from_values({0, 0, 0, 0, 4, 4}, {1, 6});
  input.positions = from_values({0, 1, 2, 3, 0, 1}, {6});
  const Tensor packed = attention.forward(x_BTC, input);
  const Tensor alone = attention.forward(x_BTC.narrow(1, 4, 2).contiguous());
  check_close(packed.narrow(1, 4, 2), alone, 1e-6);
}

TEST_CASE("attention: slopes of linear biases", "[nn]") {
  CHECK(alibi_slopes(8) == std::vector<float>{0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.015625f,
                                              0.0078125f, 0.00390625f});
  const std::vector<float> six = alibi_slopes(6);
  REQUIRE(six.size() == 6);
  CHECK(six[0] == 0.25f);
  CHECK(six[3] == 0.00390625f);
  CHECK(six[4] == 0.5f);
  CHECK(six[5] == 0.125f);
}

TEST_CASE("attention: a deferred module gets its slopes with its bytes", "[nn]") {
  AttentionConfig c = grouped_config();
  c.alibi = true;
  std::unique_ptr<Attention> late;
  {
    DeferredInit deferred;
    late = std::make_unique<Attention>(c);
  }
  CHECK_FALSE(late->named_buffers()[0].buffer->persistent);
  late->materialize();
  late->initialize(1);
  Attention eager(c);
  eager.initialize(1);
  check_bitwise(late->named_buffers()[0].buffer->tensor, eager.named_buffers()[0].buffer->tensor);
  const Tensor x_BTC = randn({1, 3, 10});
  check_bitwise(late->forward(x_BTC), eager.forward(x_BTC));
}

TEST_CASE("attention: impossible sizes are named", "[nn]") {
  const auto error = [](auto change) {
    AttentionConfig c = grouped_config();
    change(c);
    return error_of([&] { Attention attention(c); });
  };
  CHECK(error([](auto& c) {
          c.num_heads = 0;
        }).starts_with("Attention: width and heads must be positive, got 10 and 0"));
  CHECK(error([](auto& c) {
          c.num_kv_heads = 3;
        }).starts_with("Attention: 4 heads are not divisible by 3 key and value heads"));
  CHECK(error([](auto& c) {
          c.head_width = 0;
        }).starts_with("Attention: width 10 is not divisible by 4 heads"));
  CHECK(error([](auto& c) {
          c.head_width = -2;
        }).starts_with("Attention: head width must be positive, got -2"));
  CHECK(error([](auto& c) {
          c.head_width = 5;
          c.rope = RopeOptions{};
        }).starts_with("Attention: rotary positions need an even head width, got 5"));
  CHECK(error([](auto& c) {
          c.window = -1;
        }).starts_with("Attention: a window must not be negative and needs causal, got -1"));
  CHECK(error([](auto& c) {
          c.window = 4, c.causal = false;
        }).starts_with("Attention: a window must not be negative and needs causal, got 4"));
  CHECK(error([](auto& c) {
          c.softcap = -3;
        }).starts_with("Attention: softcap must be finite and not negative, got -3"));
  CHECK(error([](auto& c) {
          c.softcap = 3, c.alibi = true;
        }).starts_with("Attention: alibi and a softcap of 3 do not go together"));
  Attention attention(grouped_config());
  CHECK(error_of([&] {
          attention.forward(randn({3, 10}));
        }).starts_with("Attention: x must be [B, T, C], got [3, 10]"));
}

}  // namespace
}  // namespace tessera::nn
