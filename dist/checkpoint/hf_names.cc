#include "dist/checkpoint/hf_names.h"

#include <fmt/format.h>

namespace tessera::dist {
namespace {

/// Builds the list: each call adds a parameter from whole tensors, one after the other.
class Parameters {
 public:
  /// A source of `num_rows` rows.
  struct Part {
    std::string name;
    int64_t num_rows;
  };

  void matrix(const std::string& name, int64_t cols, const std::vector<Part>& parts,
              bool is_transposed = false) {
    HfParameter p{name, {}, {}};
    int64_t row = 0;
    for (const Part& part : parts) {
      const Shape shape = is_transposed ? Shape{cols, part.num_rows} : Shape{part.num_rows, cols};
      p.sources.push_back({part.name, shape, is_transposed, {{row, 0, part.num_rows}}});
      row += part.num_rows;
    }
    p.shape = {row, cols};
    all_.push_back(std::move(p));
  }

  void vector(const std::string& name, const std::vector<Part>& parts) {
    HfParameter p{name, {}, {}};
    int64_t row = 0;
    for (const Part& part : parts) {
      p.sources.push_back({part.name, {part.num_rows}, false, {{row, 0, part.num_rows}}});
      row += part.num_rows;
    }
    p.shape = {row};
    all_.push_back(std::move(p));
  }

  void norm(const std::string& name, const std::string& hf_name, int64_t width, bool has_bias) {
    vector(name + ".weight", {{hf_name + ".weight", width}});
    if (has_bias) vector(name + ".bias", {{hf_name + ".bias", width}});
  }

  /// The last one's rows in another order.
  void set_rows(std::vector<HfRows> rows) { all_.back().sources[0].rows = std::move(rows); }

  std::vector<HfParameter> take() { return std::move(all_); }

 private:
  std::vector<HfParameter> all_;
};

std::vector<HfParameter> parameters_of(const nn::Gpt2Config& c) {
  const int64_t C = c.width, F = c.ffn_width == 0 ? 4 * C : c.ffn_width;
  Parameters all;
  all.matrix("embed.weight", C, {{"transformer.wte.weight", c.vocab_size}});
  all.matrix("position.weight", C, {{"transformer.wpe.weight", c.context_length}});
  const auto linear = [&](const std::string& name, const std::string& hf_name, int64_t rows,
                          int64_t cols) {
    all.matrix(name + ".weight", cols, {{hf_name + ".weight", rows}}, true);
    all.vector(name + ".bias", {{hf_name + ".bias", rows}});
  };
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string ours = fmt::format("blocks.{}.", i), hf = fmt::format("transformer.h.{}.", i);
    all.norm(ours + "norm1", hf + "ln_1", C, true);
    linear(ours + "attn.qkv", hf + "attn.c_attn", 3 * C, C);
    linear(ours + "attn.out", hf + "attn.c_proj", C, C);
    all.norm(ours + "norm2", hf + "ln_2", C, true);
    linear(ours + "mlp.up", hf + "mlp.c_fc", F, C);
    linear(ours + "mlp.down", hf + "mlp.c_proj", C, F);
  }
  all.norm("norm", "transformer.ln_f", C, true);
  if (!c.tied) all.matrix("head.weight", C, {{"lm_head.weight", c.vocab_size}});
  return all.take();
}

std::vector<HfParameter> parameters_of(const nn::LlamaConfig& c) {
  const int64_t C = c.width, D = c.head_width, H = c.num_heads * D, G = c.num_kv_heads * D,
                F = c.ffn_width;
  Parameters all;
  all.matrix("embed.weight", C, {{"model.embed_tokens.weight", c.vocab_size}});
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string ours = fmt::format("blocks.{}.", i), hf = fmt::format("model.layers.{}.", i);
    const std::string attn = hf + "self_attn.";
    all.norm(ours + "norm1", hf + "input_layernorm", C, false);
    all.matrix(
        ours + "attn.qkv.weight", C,
        {{attn + "q_proj.weight", H}, {attn + "k_proj.weight", G}, {attn + "v_proj.weight", G}});
    if (c.qkv_bias) {
      all.vector(ours + "attn.qkv.bias",
                 {{attn + "q_proj.bias", H}, {attn + "k_proj.bias", G}, {attn + "v_proj.bias", G}});
    }
    if (c.qk_norm) {
      all.norm(ours + "attn.q_norm", attn + "q_norm", D, false);
      all.norm(ours + "attn.k_norm", attn + "k_norm", D, false);
    }
    all.matrix(ours + "attn.out.weight", H, {{attn + "o_proj.weight", C}});
    all.norm(ours + "norm2", hf + "post_attention_layernorm", C, false);
    all.matrix(ours + "mlp.gate_up.weight", C,
               {{hf + "mlp.gate_proj.weight", F}, {hf + "mlp.up_proj.weight", F}});
    all.matrix(ours + "mlp.down.weight", F, {{hf + "mlp.down_proj.weight", C}});
  }
  all.norm("norm", "model.norm", C, false);
  if (!c.tied) all.matrix("head.weight", C, {{"lm_head.weight", c.vocab_size}});
  return all.take();
}

/// Ours: the query rows of all heads, then the keys, then the values. BLOOM's: q, k, v of a head.
std::vector<HfRows> bloom_qkv_rows(int64_t num_heads, int64_t head_width) {
  std::vector<HfRows> rows;
  for (int64_t part = 0; part < 3; ++part) {
    for (int64_t h = 0; h < num_heads; ++h) {
      rows.push_back(
          {(part * num_heads + h) * head_width, (3 * h + part) * head_width, head_width});
    }
  }
  return rows;
}

std::vector<HfParameter> parameters_of(const nn::BloomConfig& c) {
  const int64_t C = c.width;
  const std::vector<HfRows> qkv_rows = bloom_qkv_rows(c.num_heads, C / c.num_heads);
  Parameters all;
  all.matrix("embed.weight", C, {{"transformer.word_embeddings.weight", c.vocab_size}});
  all.norm("embed_norm", "transformer.word_embeddings_layernorm", C, true);
  const auto linear = [&](const std::string& name, const std::string& hf_name, int64_t rows,
                          int64_t cols, bool is_qkv = false) {
    all.matrix(name + ".weight", cols, {{hf_name + ".weight", rows}});
    if (is_qkv) all.set_rows(qkv_rows);
    all.vector(name + ".bias", {{hf_name + ".bias", rows}});
    if (is_qkv) all.set_rows(qkv_rows);
  };
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string ours = fmt::format("blocks.{}.", i), hf = fmt::format("transformer.h.{}.", i);
    all.norm(ours + "norm1", hf + "input_layernorm", C, true);
    linear(ours + "attn.qkv", hf + "self_attention.query_key_value", 3 * C, C, true);
    linear(ours + "attn.out", hf + "self_attention.dense", C, C);
    all.norm(ours + "norm2", hf + "post_attention_layernorm", C, true);
    linear(ours + "mlp.up", hf + "mlp.dense_h_to_4h", 4 * C, C);
    linear(ours + "mlp.down", hf + "mlp.dense_4h_to_h", C, 4 * C);
  }
  all.norm("norm", "transformer.ln_f", C, true);
  if (!c.tied) all.matrix("head.weight", C, {{"lm_head.weight", c.vocab_size}});
  return all.take();
}

}  // namespace

std::vector<HfParameter> hf_parameters(const HfModelConfig& config) {
  return std::visit([](const auto& c) { return parameters_of(c); }, config);
}

bool is_derived_hf_tensor(const HfModelConfig& config, std::string_view name) {
  const bool is_tied = std::visit([](const auto& c) { return c.tied; }, config);
  if (is_tied && name == "lm_head.weight") return true;
  if (std::holds_alternative<nn::Gpt2Config>(config)) {
    return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
  }
  return name.ends_with(".rotary_emb.inv_freq");
}

}  // namespace tessera::dist
