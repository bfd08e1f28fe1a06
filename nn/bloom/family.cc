#include "nn/family.h"

#include <nlohmann/json.hpp>

#include "nn/bloom/bloom.h"
#include "nn/gguf.h"
#include "nn/hf/keys.h"

// BLOOM as transformers has it: q, k and v of a head stand together.

namespace tessera::nn {
namespace {

void add_settings(ModelSettings&, BloomConfig&) {}

void check(const BloomConfig& c, const RefuseSetting& refuse) {
  check_heads(c.width, c.num_heads, 0, refuse);
}

BloomConfig read_hf(HfKeys& keys, std::string_view) {
  BloomConfig c;
  c.vocab_size = keys.count({"vocab_size"});
  c.context_length = keys.count({"seq_length"}, 2048);
  c.num_layers = keys.count({"n_layer", "num_hidden_layers"});
  c.num_heads = keys.num_heads({"n_head", "num_attention_heads"});
  c.width = keys.count({"hidden_size", "n_embed"});
  c.tied = keys.flag("tie_word_embeddings", true);
  c.norm_eps = static_cast<float>(keys.number("layer_norm_epsilon", 1e-5));
  keys.require("apply_residual_connection_post_layernorm", false);
  keys.require("alibi", true);
  keys.check_positions({"alibi"});
  return c;
}

nlohmann::json write_hf(const BloomConfig& c) {
  return {{"architectures", {"BloomForCausalLM"}},
          {"model_type", "bloom"},
          {"vocab_size", c.vocab_size},
          {"seq_length", c.context_length},
          {"n_layer", c.num_layers},
          {"n_head", c.num_heads},
          {"hidden_size", c.width},
          {"layer_norm_epsilon", shortest_decimal(c.norm_eps)},
          {"apply_residual_connection_post_layernorm", false},
          {"tie_word_embeddings", c.tied}};
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

std::vector<HfParameter> hf_parameters(const BloomConfig& c) {
  const int64_t C = c.width;
  const std::vector<HfRows> qkv_rows = bloom_qkv_rows(c.num_heads, C / c.num_heads);
  HfParameterList all;
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

HfLayout hf_layout(const BloomConfig&) {
  return {.prefix = "transformer.", .embedding = "transformer.word_embeddings.weight"};
}

bool is_derived_hf_tensor(const BloomConfig&, std::string_view name) {
  return name.ends_with(".rotary_emb.inv_freq");
}

GgufModel gguf(const FamilyConfig& config) {
  const auto& c = config.as<BloomConfig>();
  const int64_t C = c.width;
  GgufModel model{.architecture = "bloom"};
  model.add_sizes(c, 4 * C);
  model.add_count("attention.head_count_kv", c.num_heads);
  model.add("attention.layer_norm_epsilon", c.norm_eps);

  HfParameterList all;
  all.matrix("embed.weight", C, {{"token_embd.weight", c.vocab_size}});
  all.norm("embed_norm", "token_embd_norm", C, true);
  add_gguf_blocks(all, c.num_layers, C, 4 * C);
  add_gguf_end(all, C, true, c.tied, c.vocab_size);
  model.parameters = all.take();
  return model;
}

}  // namespace

const Family& bloom_family() {
  static const Family family =
      make_family<BloomConfig, Bloom, add_settings, check, read_hf, write_hf, hf_parameters,
                  hf_layout, is_derived_hf_tensor>(
          {.name = "bloom",
           .architectures = {{"bloom", "BloomForCausalLM"}},
           .has_alibi = true,
           .refused = {"bias", "gelu"},
           .gguf = gguf});
  return family;
}

const Family& family_of(const BloomConfig&) {
  return bloom_family();
}

std::unique_ptr<FamilyConfig> Bloom::family_config() const {
  return std::make_unique<FamilyConfig>(config_);
}

}  // namespace tessera::nn
