#include "nn/family.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "core/check.h"
#include "core/formats/strict_json.h"
#include "nn/gguf.h"
#include "nn/hf/keys.h"
#include "nn/llama/llama.h"

// Llama and its relatives as transformers has them.

namespace tessera::nn {
namespace {

void add_settings(ModelSettings& t, LlamaConfig& c) {
  RopeOptions& rope = c.rope;
  const bool is_llama3 = rope.scaling == RopeScaling::kLlama3;
  t.add("kv_heads", c.num_kv_heads, {0, 4096},
        "key/value heads of a block (grouped-query attention); 0: as many as heads")
      .also("num_key_value_heads");
  t.add("head_width", c.head_width, {0, 65536}, "width of an attention head; 0: width / heads")
      .also("head_dim");
  t.add("qkv_bias", c.qkv_bias, "biases of the query, key and value projections (Qwen2)");
  t.add("qk_norm", c.qk_norm, "RMS norms of queries and keys (Qwen3)");
  t.add("window", c.window, {0, 1 << 30},
        "positions that a query attends to, its own the last (sliding-window attention, Mistral); "
        "0: all")
      .also("sliding_window");
  t.add("window_layers", c.window_layers,
        "layers with the window, w, and with full attention, f, repeated over the layers, such as "
        "w (all), wf (every second one) or ffw")
      .harmless_elsewhere()
      .needs(c.window > 0, "window > 0");
  t.add("attn_softcap", c.attn_softcap, {0, 1e30},
        "soft-cap c of attention logits x, which count as c tanh(x / c) (Gemma 2); 0: none")
      .also("attn_logit_softcapping");
  t.add("logit_softcap", c.logit_softcap, {0, 1e30},
        "soft-cap of the logits of the vocabulary; 0: none")
      .also("final_logit_softcapping");
  t.add("rope_theta", rope.theta, kF32Positive, "base of the rotary position frequencies")
      .harmless_elsewhere();
  t.add("rope_scaling", rope.scaling, "scaling of the rotary frequencies for a longer context")
      .harmless_elsewhere();
  t.add("rope_factor", rope.factor, kF32Positive,
        "rope_scaling linear, llama3: factor by which rotary frequencies are divided")
      .harmless_elsewhere()
      .needs(rope.scaling != RopeScaling::kNone, "rope_scaling = linear or llama3");
  t.add("rope_low_freq_factor", rope.low_freq_factor, kF32Positive,
        "rope_scaling llama3: low_freq_factor of transformers' config.json")
      .harmless_elsewhere()
      .needs(is_llama3, "rope_scaling = llama3");
  t.add("rope_high_freq_factor", rope.high_freq_factor, kF32Positive,
        "rope_scaling llama3: high_freq_factor of transformers' config.json")
      .harmless_elsewhere()
      .needs(is_llama3, "rope_scaling = llama3");
  t.add("rope_original_context", rope.original_max_position, at_least(1),
        "rope_scaling llama3: context length before scaling, in tokens")
      .harmless_elsewhere()
      .needs(is_llama3, "rope_scaling = llama3");
}

void check(const LlamaConfig& c, const RefuseSetting& refuse) {
  check_heads(c.width, c.num_heads, c.head_width, refuse);
  if (c.num_kv_heads != 0 && c.num_heads % c.num_kv_heads != 0) {
    refuse("kv_heads", fmt::format("a divisor of heads = {}", c.num_heads));
  }
  const int64_t head_width = c.head_width == 0 ? c.width / c.num_heads : c.head_width;
  if (head_width % 2 != 0) {
    refuse(c.head_width == 0 ? "width" : "head_width",
           fmt::format("heads of an even width (rotary positions), not {}", head_width));
  }
  const RopeOptions& rope = c.rope;
  if (rope.scaling == RopeScaling::kLlama3 && rope.low_freq_factor >= rope.high_freq_factor) {
    refuse("rope_low_freq_factor",
           fmt::format("less than rope_high_freq_factor = {}", rope.high_freq_factor));
  }
  if (c.window_layers.empty() || c.window_layers.find_first_not_of("wf") != std::string::npos) {
    refuse("window_layers", "letters w and f, such as wf");
  }
}

/// rope_scaling of transformers 4 or rope_parameters of 5, which holds rope_theta too. A scaling
/// without one of its numbers is not guessed: transformers has no defaults for them.
void read_rope(HfKeys& keys, RopeOptions& rope) {
  rope.theta = static_cast<float>(keys.number("rope_theta", rope.theta));
  const nlohmann::json* scaling = keys.object("rope_parameters");
  if (scaling == nullptr) scaling = keys.object("rope_scaling");
  keys.ignore("rope_scaling");
  if (scaling == nullptr) return;
  HfKeys inner(keys.path() + ": rope scaling", *scaling);
  rope.theta = static_cast<float>(inner.number("rope_theta", rope.theta));
  const std::string kind = inner.text("rope_type", inner.text("type", "default"));
  inner.ignore("type");
  inner.require("partial_rotary_factor", 1.0);
  if (kind == "linear") {
    rope.scaling = RopeScaling::kLinear;
    rope.factor = static_cast<float>(inner.number("factor"));
  } else if (kind == "llama3") {
    rope.scaling = RopeScaling::kLlama3;
    rope.factor = static_cast<float>(inner.number("factor"));
    rope.low_freq_factor = static_cast<float>(inner.number("low_freq_factor"));
    rope.high_freq_factor = static_cast<float>(inner.number("high_freq_factor"));
    rope.original_max_position = inner.count({"original_max_position_embeddings"});
  } else if (kind != "default") {
    inner.fail(inner.has("rope_type") ? "rope_type" : "type", "default, linear or llama3");
  }
  inner.check_nothing_else("rotary positions");
}

/// The shortest text that gives `letters` when it is repeated.
std::string shortest_period(const std::string& letters) {
  size_t period = 1;
  const auto repeats = [&] {
    for (size_t i = period; i < letters.size(); ++i) {
      if (letters[i] != letters[i - period]) return false;
    }
    return true;
  };
  while (!repeats()) ++period;
  return letters.substr(0, period);
}

/// The window and which layers have it: all of Mistral's; of Qwen's, if it is switched on, those
/// that `layer_types` names, or without it those from max_window_layers on.
void read_window(HfKeys& keys, std::string_view architecture, LlamaConfig& c) {
  const bool is_mistral = architecture == "MistralForCausalLM";
  const bool is_qwen = architecture.starts_with("Qwen");
  constexpr int64_t kWindow = 4096, kFirstLayer = 28;  // where the keys are missing
  constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1;
  const bool is_used = is_mistral || (is_qwen && keys.flag("use_sliding_window", false));
  if (is_used && !keys.is_null("sliding_window"))
    c.window = keys.count({"sliding_window"}, kWindow);
  keys.ignore("sliding_window");
  const int64_t first =
      is_qwen ? keys.count({"max_window_layers"}, kFirstLayer, kMaxCount, /*smallest=*/0) : 0;
  keys.ignore("max_window_layers");

  const nlohmann::json types = keys.array("layer_types");
  if (!types.empty()) {
    std::string layers;
    for (const nlohmann::json& type : types) {
      const bool is_windowed = c.window > 0 && type == "sliding_attention";
      if (type != "full_attention" && !is_windowed) {
        throw InputError(fmt::format(
            "{}: layer_types has {}, expected {}", keys.path(), json_text(type),
            c.window > 0 ? "full_attention or sliding_attention" : "\"full_attention\" only"));
      }
      layers += is_windowed ? 'w' : 'f';
    }
    if (static_cast<int64_t>(layers.size()) != c.num_layers) {
      keys.fail("layer_types", fmt::format("one for each of {} layers", c.num_layers));
    }
    c.window_layers = shortest_period(layers);
    if (is_mistral && c.window > 0 && c.window_layers != "w") {
      keys.fail("layer_types", "\"sliding_attention\" for every layer beside sliding_window");
    }
  } else if (first >= c.num_layers) {
    c.window_layers = "f";
  } else if (c.window > 0 && first > 0) {
    constexpr int64_t kMaxLayers = 1 << 16;  // that are spelled out
    if (c.num_layers > kMaxLayers) {
      keys.fail("num_hidden_layers", fmt::format("at most {} beside a window", kMaxLayers));
    }
    c.window_layers = std::string(static_cast<size_t>(first), 'f') +
                      std::string(static_cast<size_t>(c.num_layers - first), 'w');
  }
  if (c.window == 0 || c.window_layers == "f") c.window = 0, c.window_layers = "w";
}

LlamaConfig read_hf(HfKeys& keys, std::string_view architecture) {
  const bool is_qwen2 = architecture == "Qwen2ForCausalLM";
  const bool is_qwen3 = architecture == "Qwen3ForCausalLM";
  LlamaConfig c;
  c.vocab_size = keys.count({"vocab_size"});
  c.context_length = keys.count({"max_position_embeddings"}, 2048);
  c.num_layers = keys.count({"num_hidden_layers"});
  c.num_heads = keys.num_heads({"num_attention_heads"});
  c.num_kv_heads = keys.count({"num_key_value_heads"}, c.num_heads);
  c.width = keys.count({"hidden_size"});
  c.head_width =
      keys.count({"head_dim"}, is_qwen3 ? 128 : std::max<int64_t>(1, c.width / c.num_heads));
  c.ffn_width = keys.count({"intermediate_size"});
  c.tied = keys.flag("tie_word_embeddings", false);
  c.qkv_bias = is_qwen2;
  c.qk_norm = is_qwen3;
  c.norm_eps = static_cast<float>(keys.number("rms_norm_eps", 1e-6));
  read_rope(keys, c.rope);
  keys.require("hidden_act", "silu");
  keys.require("attention_bias", false);
  keys.require("mlp_bias", false);
  read_window(keys, architecture, c);
  keys.ignore("is_llama_config");  // a note of a converter
  keys.check_positions({"rope", "rotary"});
  return c;
}

nlohmann::json rope_json(const RopeOptions& rope) {
  if (rope.scaling == RopeScaling::kNone) return nullptr;
  nlohmann::json scaling = {{"factor", shortest_decimal(rope.factor)}};
  if (rope.scaling == RopeScaling::kLinear) {
    scaling["rope_type"] = "linear";
    return scaling;
  }
  scaling["rope_type"] = "llama3";
  scaling["low_freq_factor"] = shortest_decimal(rope.low_freq_factor);
  scaling["high_freq_factor"] = shortest_decimal(rope.high_freq_factor);
  scaling["original_max_position_embeddings"] = rope.original_max_position;
  return scaling;
}

nlohmann::json write_hf(const LlamaConfig& c) {
  TESSERA_CHECK_AS(ConfigError, !(c.qk_norm && c.qkv_bias),
                   "export: qk_norm and qkv_bias together, transformers has no such model");
  TESSERA_CHECK_AS(ConfigError, !c.rope.interleaved && c.rope.rotary_dim == 0,
                   "export: interleaved or partial rotary positions, transformers' models have the "
                   "halves of whole heads");
  TESSERA_CHECK_AS(ConfigError, c.attn_softcap == 0 && c.logit_softcap == 0,
                   "export: soft-caps of {} and {}, transformers' relatives of Llama have none",
                   c.attn_softcap, c.logit_softcap);
  const std::vector<int64_t> windows = windows_of(c);
  const auto num_windows = std::count(windows.begin(), windows.end(), c.window);
  const bool has_window = c.window > 0 && num_windows > 0;
  const bool is_qwen = c.qk_norm || c.qkv_bias;
  TESSERA_CHECK_AS(
      ConfigError, is_qwen || !has_window || num_windows == c.num_layers,
      "export: window_layers \"{}\", transformers' Mistral has the window in every layer",
      c.window_layers);
  const bool is_standard_width = c.head_width * c.num_heads == c.width;
  TESSERA_CHECK_AS(ConfigError, !c.qkv_bias || is_standard_width,
                   "export: head width {} with qkv_bias, transformers' Qwen2 has width / heads",
                   c.head_width);
  nlohmann::json object = {{"vocab_size", c.vocab_size},
                           {"max_position_embeddings", c.context_length},
                           {"num_hidden_layers", c.num_layers},
                           {"num_attention_heads", c.num_heads},
                           {"num_key_value_heads", c.num_kv_heads},
                           {"hidden_size", c.width},
                           {"intermediate_size", c.ffn_width},
                           {"hidden_act", "silu"},
                           {"rms_norm_eps", shortest_decimal(c.norm_eps)},
                           {"rope_theta", shortest_decimal(c.rope.theta)},
                           {"tie_word_embeddings", c.tied}};
  if (const nlohmann::json scaling = rope_json(c.rope); !scaling.is_null()) {
    object["rope_scaling"] = scaling;
  }
  if (!c.qkv_bias) {
    object["head_dim"] = c.head_width;
    object["attention_bias"] = false;
  }
  object["architectures"] = {c.qk_norm    ? "Qwen3ForCausalLM"
                             : c.qkv_bias ? "Qwen2ForCausalLM"
                             : has_window ? "MistralForCausalLM"
                                          : "LlamaForCausalLM"};
  object["model_type"] = c.qk_norm    ? "qwen3"
                         : c.qkv_bias ? "qwen2"
                         : has_window ? "mistral"
                                      : "llama";
  if (!has_window) return object;
  object["sliding_window"] = c.window;
  if (!is_qwen) return object;
  object["use_sliding_window"] = true;
  for (const int64_t window : windows) {
    object["layer_types"].push_back(window > 0 ? "sliding_attention" : "full_attention");
  }
  // Versions without layer_types know one border: full layers before it, windows behind.
  const auto first = std::find(windows.begin(), windows.end(), c.window);
  if (num_windows == windows.end() - first) {
    object["max_window_layers"] = first - windows.begin();
  }
  return object;
}

std::vector<HfParameter> hf_parameters(const LlamaConfig& c) {
  const int64_t C = c.width, D = c.head_width, H = c.num_heads * D, G = c.num_kv_heads * D,
                F = c.ffn_width;
  HfParameterList all;
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

HfLayout hf_layout(const LlamaConfig&) {
  return {.prefix = "model.", .embedding = "model.embed_tokens.weight"};
}

bool is_derived_hf_tensor(const LlamaConfig&, std::string_view name) {
  return name.ends_with(".rotary_emb.inv_freq");
}

/// llama.cpp's Llama turns neighbours, not halves, by its positions: row 2 i + j of a head there is row
/// j D / 2 + i here.
std::vector<HfRows> interleaved_rows(int64_t first_row, int64_t num_heads, int64_t D) {
  std::vector<HfRows> rows;
  for (int64_t head = 0; head < num_heads; ++head) {
    for (int64_t row = 0; row < D; ++row) {
      const int64_t j = row / (D / 2), i = row % (D / 2);
      rows.push_back({first_row + head * D + row, head * D + 2 * i + j, 1});
    }
  }
  return rows;
}

/// What each rotary frequency is divided by, as transformers' llama3 scaling has it.
std::vector<float> llama3_divisors(const RopeOptions& rope, int64_t D) {
  std::vector<float> divisors;
  for (int64_t i = 0; i < D / 2; ++i) {
    const double frequency = std::pow(static_cast<double>(rope.theta),
                                      -2.0 * static_cast<double>(i) / static_cast<double>(D));
    const double wavelength = 2 * std::numbers::pi / frequency;
    const auto context = static_cast<double>(rope.original_max_position);
    const double low = rope.low_freq_factor, high = rope.high_freq_factor, factor = rope.factor;
    double divisor = 1;
    if (wavelength > context / low) {
      divisor = factor;
    } else if (wavelength >= context / high) {
      const double smooth = (context / wavelength - low) / (high - low);
      divisor = 1 / ((1 - smooth) / factor + smooth);
    }
    divisors.push_back(static_cast<float>(divisor));
  }
  return divisors;
}

GgufModel gguf(const FamilyConfig& config) {
  const auto& c = config.as<LlamaConfig>();
  write_hf(c);  // what transformers has no name for llama.cpp has none for either
  const bool is_llama = !c.qk_norm && !c.qkv_bias;
  TESSERA_CHECK_AS(ConfigError, c.window == 0 || c.window >= c.context_length,
                   "export: window {} below the context of {}, llama.cpp lets every layer of these "
                   "models see all keys",
                   c.window, c.context_length);
  TESSERA_CHECK_AS(ConfigError, is_llama || c.rope.scaling != RopeScaling::kLlama3,
                   "export: rope_scaling llama3 with {}, llama.cpp has it for Llama alone",
                   c.qk_norm ? "qk_norm" : "qkv_bias");
  const int64_t C = c.width, D = c.head_width, H = c.num_heads * D, G = c.num_kv_heads * D,
                F = c.ffn_width;
  GgufModel model{.architecture = is_llama ? "llama" : c.qk_norm ? "qwen3" : "qwen2"};
  model.add_sizes(c, F);
  model.add_count("attention.head_count_kv", c.num_kv_heads);
  model.add_count("attention.key_length", D);
  model.add_count("attention.value_length", D);
  model.add("attention.layer_norm_rms_epsilon", c.norm_eps);
  model.add_count("rope.dimension_count", D);
  model.add("rope.freq_base", c.rope.theta);
  if (c.rope.scaling == RopeScaling::kLinear) {
    model.add("rope.scaling.type", std::string("linear"));
    model.add("rope.scaling.factor", c.rope.factor);
  } else if (c.rope.scaling == RopeScaling::kLlama3) {
    model.constants.push_back({"rope_freqs.weight", llama3_divisors(c.rope, D)});
  }

  HfParameterList all;
  all.matrix("embed.weight", C, {{"token_embd.weight", c.vocab_size}});
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string ours = fmt::format("blocks.{}.", i), theirs = fmt::format("blk.{}.", i);
    all.norm(ours + "norm1", theirs + "attn_norm", C, false);
    const auto qkv = [&](const std::string& name) {
      return std::vector<HfParameterList::Part>{{theirs + "attn_q" + name, H},
                                                {theirs + "attn_k" + name, G},
                                                {theirs + "attn_v" + name, G}};
    };
    all.matrix(ours + "attn.qkv.weight", C, qkv(".weight"));
    if (is_llama) {
      all.set_rows(interleaved_rows(0, c.num_heads, D), 0);
      all.set_rows(interleaved_rows(H, c.num_kv_heads, D), 1);
    }
    if (c.qkv_bias) all.vector(ours + "attn.qkv.bias", qkv(".bias"));
    if (c.qk_norm) {
      all.norm(ours + "attn.q_norm", theirs + "attn_q_norm", D, false);
      all.norm(ours + "attn.k_norm", theirs + "attn_k_norm", D, false);
    }
    all.matrix(ours + "attn.out.weight", H, {{theirs + "attn_output.weight", C}});
    all.norm(ours + "norm2", theirs + "ffn_norm", C, false);
    all.matrix(ours + "mlp.gate_up.weight", C,
               {{theirs + "ffn_gate.weight", F}, {theirs + "ffn_up.weight", F}});
    all.matrix(ours + "mlp.down.weight", F, {{theirs + "ffn_down.weight", C}});
  }
  add_gguf_end(all, C, false, c.tied, c.vocab_size);
  model.parameters = all.take();
  return model;
}

}  // namespace

const Family& llama_family() {
  static const Family family =
      make_family<LlamaConfig, Llama, add_settings, check, read_hf, write_hf, hf_parameters,
                  hf_layout, is_derived_hf_tensor>(
          {.name = "llama",
           .architectures = {{"llama", "LlamaForCausalLM"},
                             {"mistral", "MistralForCausalLM"},
                             {"qwen2", "Qwen2ForCausalLM"},
                             {"qwen3", "Qwen3ForCausalLM"}},
           .gguf = gguf});
  return family;
}

const Family& family_of(const LlamaConfig&) {
  return llama_family();
}

std::unique_ptr<FamilyConfig> Llama::family_config() const {
  return std::make_unique<FamilyConfig>(config_);
}

}  // namespace tessera::nn
