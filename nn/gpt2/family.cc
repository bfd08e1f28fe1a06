#include "nn/family.h"

#include <nlohmann/json.hpp>

#include "nn/gguf.h"
#include "nn/gpt2/gpt2.h"
#include "nn/hf/keys.h"

// GPT-2 as transformers has it: GPT2LMHeadModel, whose matrices are stored transposed.

namespace tessera::nn {
namespace {

void add_settings(ModelSettings& t, Gpt2Config& c) {
  t.add("bias", c.bias, "biases in linear and norm layers").harmless_elsewhere();
}

void check(const Gpt2Config& c, const RefuseSetting& refuse) {
  check_heads(c.width, c.num_heads, 0, refuse);
}

Gpt2Config read_hf(HfKeys& keys, std::string_view) {
  Gpt2Config c;
  c.vocab_size = keys.count({"vocab_size"});
  c.context_length = keys.count({"n_positions", "max_position_embeddings"});
  c.num_layers = keys.count({"n_layer", "num_hidden_layers"});
  c.num_heads = keys.num_heads({"n_head", "num_attention_heads"});
  c.width = keys.count({"n_embd", "hidden_size"});
  c.ffn_width = keys.count({"n_inner"}, 4 * c.width);
  c.tied = keys.flag("tie_word_embeddings", true);
  c.norm_eps = static_cast<float>(keys.number("layer_norm_epsilon", 1e-5));
  c.gelu = keys.gelu("activation_function", "gelu_new");
  keys.require("scale_attn_weights", true);
  keys.require("scale_attn_by_inverse_layer_idx", false);
  keys.check_positions({"absolute"});
  keys.require("add_cross_attention", false);
  return c;
}

nlohmann::json write_hf(const Gpt2Config& c) {
  TESSERA_CHECK_AS(ConfigError, c.bias,
                   "export: transformers' GPT-2 always has biases, this model has none");
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"vocab_size", c.vocab_size},
          {"n_positions", c.context_length},
          {"n_layer", c.num_layers},
          {"n_head", c.num_heads},
          {"n_embd", c.width},
          {"n_inner", c.ffn_width == 0 ? 4 * c.width : c.ffn_width},
          {"layer_norm_epsilon", shortest_decimal(c.norm_eps)},
          {"activation_function", c.gelu == Gelu::kTanh ? "gelu_new" : "gelu"},
          {"tie_word_embeddings", c.tied}};
}

std::vector<HfParameter> hf_parameters(const Gpt2Config& c) {
  const int64_t C = c.width, F = c.ffn_width == 0 ? 4 * C : c.ffn_width;
  HfParameterList all;
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

HfLayout hf_layout(const Gpt2Config&) {
  return {.prefix = "transformer.", .embedding = "transformer.wte.weight"};
}

bool is_derived_hf_tensor(const Gpt2Config&, std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

GgufModel gguf(const FamilyConfig& config) {
  const auto& c = config.as<Gpt2Config>();
  write_hf(c);
  TESSERA_CHECK_AS(ConfigError, c.gelu == Gelu::kTanh,
                   "export: gelu {}, llama.cpp's GPT-2 has the tanh approximation",
                   name_of(c.gelu));
  const int64_t C = c.width, F = c.ffn_width == 0 ? 4 * C : c.ffn_width;
  GgufModel model{.architecture = "gpt2"};
  model.add_sizes(c, F);
  model.add("attention.layer_norm_epsilon", c.norm_eps);

  HfParameterList all;
  all.matrix("embed.weight", C, {{"token_embd.weight", c.vocab_size}});
  all.matrix("position.weight", C, {{"position_embd.weight", c.context_length}});
  add_gguf_blocks(all, c.num_layers, C, F);
  add_gguf_end(all, C, true, c.tied, c.vocab_size);
  model.parameters = all.take();
  return model;
}

}  // namespace

const Family& gpt2_family() {
  static const Family family = make_family<Gpt2Config, Gpt2, add_settings, check, read_hf, write_hf,
                                           hf_parameters, hf_layout, is_derived_hf_tensor>(
      {.name = "gpt2", .architectures = {{"gpt2", "GPT2LMHeadModel"}}, .gguf = gguf});
  return family;
}

const Family& family_of(const Gpt2Config&) {
  return gpt2_family();
}

std::unique_ptr<FamilyConfig> Gpt2::family_config() const {
  return std::make_unique<FamilyConfig>(config_);
}

}  // namespace tessera::nn
