#include "dist/checkpoint/hf_config.h"

#include <algorithm>
#include <optional>
#include <set>

#include "core/formats/strict_json.h"
#include "core/log.h"
#include "core/text.h"

namespace tessera::dist {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;
constexpr int64_t kMaxHeads = 1 << 16;  // the rows of each are listed

using Names = std::set<std::string, std::less<>>;

/// Keys that say nothing about what the model computes: names, ids, settings of generation and of
/// training, notes of the programs that wrote the file.
const Names& ignored_keys() {
  static const Names keys = {
      "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
      "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id",
      "mask_token_id", "unk_token_id", "decoder_start_token_id", "initializer_range",
      "initializer_factor", "id2label", "label2id", "num_labels", "problem_type",
      "task_specific_params", "finetuning_task", "return_dict", "tokenizer_class", "n_ctx",
      "pretraining_tp", "slow_but_exact", "masked_softmax_fusion", "skip_bias_add",
      "skip_bias_add_qkv", "attention_softmax_in_fp32", "bias_dropout_fusion",
      "reorder_and_upcast_attn", "offset_alibi", "seq_length", "max_window_layers",
      "chunk_size_feed_forward", "is_decoder", "name_or_path", "vocab_file", "torchscript",
      "use_bfloat16", "n_special", "predict_special_tokens", "tf_legacy_loss", "n_inner",
      "is_llama_config", "unsloth_version", "unsloth_fixed", "transformers.js_config",
      "attn_implementation", "use_flash_attn", "use_flash_attention", "model_max_length",
      "max_sequence_length",
      // Defaults of generation, which old versions kept here.
      "temperature", "top_p", "top_k", "typical_p", "num_beams", "num_beam_groups", "do_sample",
      "early_stopping", "max_length", "min_length", "max_new_tokens", "length_penalty",
      "repetition_penalty", "diversity_penalty", "no_repeat_ngram_size",
      "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
      "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
      "exponential_decay_length_penalty", "remove_invalid_values", "return_dict_in_generate",
      "prefix", "generation_config"};
  return keys;
}

bool is_ignored(std::string_view key) {
  for (const std::string_view prefix : {"_", "summary_", "output_", "gradient_checkpointing"}) {
    if (key.starts_with(prefix)) return true;
  }
  // Probabilities of dropout are the trainer's.
  return key.ends_with("pdrop") || key.ends_with("dropout") || ignored_keys().contains(key);
}

/// Keys with which a relative of the models here computes something else. Whoever reads one of them
/// does so before it is looked for in this list.
const Names& known_to_change_numbers() {
  static const Names keys = {"quantization_config",
                             "quantization",
                             "compression_config",
                             "sparsity_config",
                             "is_encoder_decoder",
                             "add_cross_attention",
                             "cross_attention_hidden_size",
                             "pruned_heads",
                             "attention_bias",
                             "mlp_bias",
                             "qkv_bias",
                             "bias",
                             "use_bias",
                             "lm_head_bias",
                             "attention_out_bias",
                             "alibi",
                             "use_alibi",
                             "multi_query",
                             "parallel_attn",
                             "parallel_attention",
                             "use_parallel_residual",
                             "new_decoder_architecture",
                             "qk_norm",
                             "qk_layernorm",
                             "use_qk_norm",
                             "clip_qkv",
                             "logit_scale",
                             "scale_emb",
                             "scale_depth",
                             "dim_model_base",
                             "query_pre_attn_scalar",
                             "rotary_pct",
                             "rotary_dim",
                             "rope_interleaved",
                             "rope_interleave",
                             "no_rope_layers",
                             "no_rope_layer_interval",
                             "attention_chunk_size",
                             "attn_temperature_tuning",
                             "num_experts",
                             "num_local_experts",
                             "num_experts_per_tok",
                             "n_routed_experts",
                             "moe_intermediate_size",
                             "kv_lora_rank",
                             "q_lora_rank",
                             "word_embed_proj_dim",
                             "hidden_activation",
                             "position_embedding_type",
                             "use_mrope",
                             "dual_chunk_attention_config",
                             "sliding_window_pattern",
                             "global_attn_every_n_layers",
                             "use_sliding_window",
                             "layer_types",
                             "rope_scaling",
                             "rope_parameters"};
  return keys;
}

/// A factor of something that the models here compute without one, by its name.
bool is_factor(std::string_view key) {
  for (const std::string_view end :
       {"_multiplier", "_scaling", "_softcap", "_softcapping", "_factor", "_scale"}) {
    if (key.ends_with(end)) return true;
  }
  return key == "factor" || key == "rotary_pct" || key == "logit_scale" || key == "scale_emb";
}

bool is_off(const json& value) {
  return value.is_null() || value == false || (value.is_number() && value == 0) || value == "" ||
         (value.is_structured() && value.empty());
}

/// Reads the keys of one config.json and remembers which.
class Keys {
 public:
  Keys(std::string path, const json& object) : path_(std::move(path)), object_(object) {}

  [[noreturn]] void fail(std::string_view key, std::string_view expected) const {
    const auto found = object_.find(key);
    throw InputError(fmt::format("{}: {} is {}, expected {}", path_, key,
                                 found == object_.end() ? "missing" : json_text(*found), expected));
  }

  bool has(std::string_view key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }

  /// The first of `keys` that is there, null being absent; `fallback` < 0: one must be there.
  int64_t count(std::initializer_list<std::string_view> keys, int64_t fallback = -1,
                int64_t max = (int64_t{1} << 31) - 1) {
    for (const std::string_view key : keys) read_.emplace(key);
    for (const std::string_view key : keys) {
      if (!has(key)) continue;
      const int64_t value = json_size(object_.at(std::string(key)));
      if (value < 1 || value > max) fail(key, fmt::format("an integer in [1, {}]", max));
      return value;
    }
    if (fallback < 0) fail(*keys.begin(), fmt::format("an integer in [1, {}]", max));
    return fallback;
  }

  double number(std::string_view key, std::optional<double> fallback = std::nullopt) {
    read_.emplace(key);
    if (!has(key)) {
      if (!fallback) fail(key, "a positive number");
      return *fallback;
    }
    const json& value = object_.at(std::string(key));
    if (!value.is_number() || !(value.get<double>() > 0) || value.get<double>() > 1e18) {
      fail(key, "a positive number");
    }
    return value.get<double>();
  }

  bool flag(std::string_view key, bool fallback) {
    read_.emplace(key);
    if (!has(key)) return fallback;
    if (!object_.at(std::string(key)).is_boolean()) fail(key, "true or false");
    return object_.at(std::string(key)).get<bool>();
  }

  std::string text(std::string_view key, const std::string& fallback) {
    read_.emplace(key);
    if (!has(key)) return fallback;
    if (!object_.at(std::string(key)).is_string()) fail(key, "a string");
    return object_.at(std::string(key)).get<std::string>();
  }

  /// Empty if it is absent.
  json array(std::string_view key) {
    read_.emplace(key);
    if (!has(key)) return json::array();
    if (!object_.at(std::string(key)).is_array()) fail(key, "an array");
    return object_.at(std::string(key));
  }

  const json* object(std::string_view key) {
    read_.emplace(key);
    if (!has(key)) return nullptr;
    if (!object_.at(std::string(key)).is_object()) fail(key, "an object");
    return &object_.at(std::string(key));
  }

  /// One id or several; -1, with which some files say "none", is none.
  std::vector<int64_t> token_ids(std::string_view key) const {
    constexpr int64_t kMax = (int64_t{1} << 31) - 1;
    std::vector<int64_t> ids;
    if (!has(key)) return ids;
    const json& value = object_.at(std::string(key));
    const json all = value.is_array() ? value : json::array({value});
    for (const json& each : all) {
      if (each == -1) continue;
      const int64_t id = json_size(each);
      if (id < 0 || id > kMax) fail(key, fmt::format("an integer in [0, {}], or several", kMax));
      ids.push_back(id);
    }
    return ids;
  }

  /// InputError unless the key is absent or has this value.
  void require(std::string_view key, const json& value) {
    read_.emplace(key);
    if (has(key) && object_.at(std::string(key)) != value) {
      fail(key, fmt::format("{} (nothing else is supported)", json_text(value)));
    }
  }
  void ignore(std::string_view key) { read_.emplace(key); }

  /// InputError for a key that nobody has read, that is switched on and with which the model
  /// computes something else; the names of those of which nothing is known.
  std::vector<std::string> check_all_read(std::string_view architecture,
                                          const Names& ignored) const {
    std::vector<std::string> unknown;
    for (const auto& [key, value] : object_.items()) {
      if (read_.contains(key) || is_off(value)) continue;
      const bool is_neutral = is_factor(key) && value.is_number() && value == 1;
      const bool is_harmless = is_ignored(key) && (!is_factor(key) || key == "initializer_factor");
      if (is_neutral || is_harmless) continue;
      if (is_factor(key) || known_to_change_numbers().contains(key)) fail_key(key, architecture);
      if (!ignored.contains(key)) unknown.push_back(key);
    }
    return unknown;
  }

  /// InputError for any key that nobody has read and that is switched on.
  void check_nothing_else(std::string_view where) const {
    for (const std::string& key : check_all_read(where, {})) fail_key(key, where);
  }

  const std::string& path() const { return path_; }

 private:
  [[noreturn]] void fail_key(const std::string& key, std::string_view where) const {
    throw InputError(fmt::format("{}: key {} = {} is not supported for {}", path_, shorten(key),
                                 json_text(object_.at(key)), where));
  }

  std::string path_;
  const json& object_;
  Names read_;
};

Gelu gelu_of(Keys& keys, std::string_view key, const std::string& fallback) {
  const std::string name = keys.text(key, fallback);
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return Gelu::kTanh;
  if (name == "gelu") return Gelu::kExact;
  keys.fail(key, "gelu_new, gelu_pytorch_tanh or gelu");
}

/// A name for what the model has anyway is no reason to refuse it.
void check_positions(Keys& keys, const Names& own) {
  const std::string kind = keys.text("position_embedding_type", *own.begin());
  if (!own.contains(kind)) keys.fail("position_embedding_type", *own.begin());
}

nn::Gpt2Config gpt2_from(Keys& keys) {
  nn::Gpt2Config c;
  c.vocab_size = keys.count({"vocab_size"});
  c.context_length = keys.count({"n_positions", "max_position_embeddings"});
  c.num_layers = keys.count({"n_layer", "num_hidden_layers"});
  c.num_heads = keys.count({"n_head", "num_attention_heads"}, -1, kMaxHeads);
  c.width = keys.count({"n_embd", "hidden_size"});
  c.ffn_width = keys.count({"n_inner"}, 4 * c.width);
  c.tied = keys.flag("tie_word_embeddings", true);
  c.norm_eps = static_cast<float>(keys.number("layer_norm_epsilon", 1e-5));
  c.gelu = gelu_of(keys, "activation_function", "gelu_new");
  keys.require("scale_attn_weights", true);
  keys.require("scale_attn_by_inverse_layer_idx", false);
  check_positions(keys, {"absolute"});
  keys.require("add_cross_attention", false);
  return c;
}

/// rope_scaling of transformers 4 or rope_parameters of 5, which holds rope_theta too. A scaling
/// without one of its numbers is not guessed: transformers has no defaults for them.
void read_rope(Keys& keys, RopeOptions& rope) {
  rope.theta = static_cast<float>(keys.number("rope_theta", rope.theta));
  const json* scaling = keys.object("rope_parameters");
  if (scaling == nullptr) scaling = keys.object("rope_scaling");
  keys.ignore("rope_scaling");
  if (scaling == nullptr) return;
  Keys inner(keys.path() + ": rope scaling", *scaling);
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

/// A window shorter than the context would hide keys: what is left is the context inside of it.
void limit_to_window(Keys& keys, bool is_used, nn::LlamaConfig& c) {
  if (!is_used || !keys.has("sliding_window")) return keys.ignore("sliding_window");
  const int64_t window = keys.count({"sliding_window"});
  if (window >= c.context_length) return;
  log_once("warning",
           fmt::format("{}: attention sees {} positions back; the context is limited to them (from "
                       "{})",
                       keys.path(), window, c.context_length));
  c.context_length = window;
}

/// Layers with a window are full ones inside of it.
void check_layer_types(Keys& keys, bool has_window) {
  const json types = keys.array("layer_types");
  for (const json& type : types) {
    if (type == "full_attention" || (has_window && type == "sliding_attention")) continue;
    throw InputError(fmt::format("{}: layer_types has {}, expected \"full_attention\" only",
                                 keys.path(), json_text(type)));
  }
}

nn::LlamaConfig llama_from(Keys& keys, const std::string& architecture) {
  const bool is_qwen2 = architecture == "Qwen2ForCausalLM";
  const bool is_qwen3 = architecture == "Qwen3ForCausalLM";
  nn::LlamaConfig c;
  c.vocab_size = keys.count({"vocab_size"});
  c.context_length = keys.count({"max_position_embeddings"}, 2048);
  c.num_layers = keys.count({"num_hidden_layers"});
  c.num_heads = keys.count({"num_attention_heads"}, -1, kMaxHeads);
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
  const bool has_switch = is_qwen2 || is_qwen3;
  const bool has_window =
      has_switch ? keys.flag("use_sliding_window", false) : architecture == "MistralForCausalLM";
  limit_to_window(keys, has_window, c);
  check_layer_types(keys, has_window);
  check_positions(keys, {"rope", "rotary"});
  return c;
}

nn::BloomConfig bloom_from(Keys& keys) {
  nn::BloomConfig c;
  c.vocab_size = keys.count({"vocab_size"});
  c.context_length = keys.count({"seq_length"}, 2048);
  c.num_layers = keys.count({"n_layer", "num_hidden_layers"});
  c.num_heads = keys.count({"n_head", "num_attention_heads"}, -1, kMaxHeads);
  c.width = keys.count({"hidden_size", "n_embed"});
  c.tied = keys.flag("tie_word_embeddings", true);
  c.norm_eps = static_cast<float>(keys.number("layer_norm_epsilon", 1e-5));
  keys.require("apply_residual_connection_post_layernorm", false);
  keys.require("alibi", true);
  check_positions(keys, {"alibi"});
  return c;
}

std::string architecture_of(const std::string& path, const json& object) {
  static const std::map<std::string, std::string, std::less<>> by_type = {
      {"gpt2", "GPT2LMHeadModel"},       {"llama", "LlamaForCausalLM"},
      {"mistral", "MistralForCausalLM"}, {"qwen2", "Qwen2ForCausalLM"},
      {"qwen3", "Qwen3ForCausalLM"},     {"bloom", "BloomForCausalLM"}};
  std::string found;
  const auto names = object.find("architectures");
  if (names != object.end() && names->is_array() && names->size() == 1 && (*names)[0].is_string()) {
    found = (*names)[0];
    for (const auto& [type, name] : by_type) {
      if (found == name) return name;
    }
  }
  const auto type = object.find("model_type");
  if (type != object.end() && type->is_string()) {
    const auto known = by_type.find(type->get<std::string>());
    // "GPT2Model" and such: the same weights without a head's name.
    if (known != by_type.end() && (found.empty() || found.ends_with("Model"))) return known->second;
    if (found.empty()) found = type->get<std::string>();
  }
  std::vector<std::string> names_known;
  for (const auto& entry : by_type) names_known.push_back(entry.second);
  throw InputError(fmt::format("{}: architecture {}, expected one of {}", path,
                               found.empty() ? "missing" : shorten(found), join_few(names_known)));
}

/// The shortest decimal that is this f32, as people wrote it.
double decimal(float value) {
  return std::stod(fmt::format("{}", value));
}

json rope_json(const RopeOptions& rope) {
  if (rope.scaling == RopeScaling::kNone) return nullptr;
  json scaling = {{"factor", decimal(rope.factor)}};
  if (rope.scaling == RopeScaling::kLinear) {
    scaling["rope_type"] = "linear";
    return scaling;
  }
  scaling["rope_type"] = "llama3";
  scaling["low_freq_factor"] = decimal(rope.low_freq_factor);
  scaling["high_freq_factor"] = decimal(rope.high_freq_factor);
  scaling["original_max_position_embeddings"] = rope.original_max_position;
  return scaling;
}

json to_json(const nn::Gpt2Config& c) {
  TESSERA_CHECK_AS(ConfigError, c.bias && !c.alibi,
                   "export: transformers' GPT-2 always has biases, this model has none");
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"vocab_size", c.vocab_size},
          {"n_positions", c.context_length},
          {"n_layer", c.num_layers},
          {"n_head", c.num_heads},
          {"n_embd", c.width},
          {"n_inner", c.ffn_width == 0 ? 4 * c.width : c.ffn_width},
          {"layer_norm_epsilon", decimal(c.norm_eps)},
          {"activation_function", c.gelu == Gelu::kTanh ? "gelu_new" : "gelu"},
          {"tie_word_embeddings", c.tied}};
}

json to_json(const nn::LlamaConfig& c) {
  TESSERA_CHECK_AS(ConfigError, !(c.qk_norm && c.qkv_bias),
                   "export: qk_norm and qkv_bias together, transformers has no such model");
  TESSERA_CHECK_AS(ConfigError, !c.rope.interleaved && c.rope.rotary_dim == 0,
                   "export: interleaved or partial rotary positions, transformers' models have the "
                   "halves of whole heads");
  const bool is_standard_width = c.head_width * c.num_heads == c.width;
  TESSERA_CHECK_AS(ConfigError, !c.qkv_bias || is_standard_width,
                   "export: head width {} with qkv_bias, transformers' Qwen2 has width / heads",
                   c.head_width);
  json object = {{"vocab_size", c.vocab_size},
                 {"max_position_embeddings", c.context_length},
                 {"num_hidden_layers", c.num_layers},
                 {"num_attention_heads", c.num_heads},
                 {"num_key_value_heads", c.num_kv_heads},
                 {"hidden_size", c.width},
                 {"intermediate_size", c.ffn_width},
                 {"hidden_act", "silu"},
                 {"rms_norm_eps", decimal(c.norm_eps)},
                 {"rope_theta", decimal(c.rope.theta)},
                 {"tie_word_embeddings", c.tied}};
  if (const json scaling = rope_json(c.rope); !scaling.is_null()) object["rope_scaling"] = scaling;
  if (!c.qkv_bias) {
    object["head_dim"] = c.head_width;
    object["attention_bias"] = false;
  }
  object["architectures"] = {c.qk_norm    ? "Qwen3ForCausalLM"
                             : c.qkv_bias ? "Qwen2ForCausalLM"
                                          : "LlamaForCausalLM"};
  object["model_type"] = c.qk_norm ? "qwen3" : c.qkv_bias ? "qwen2" : "llama";
  return object;
}

json to_json(const nn::BloomConfig& c) {
  return {{"architectures", {"BloomForCausalLM"}},
          {"model_type", "bloom"},
          {"vocab_size", c.vocab_size},
          {"seq_length", c.context_length},
          {"n_layer", c.num_layers},
          {"n_head", c.num_heads},
          {"hidden_size", c.width},
          {"layer_norm_epsilon", decimal(c.norm_eps)},
          {"apply_residual_connection_post_layernorm", false},
          {"tie_word_embeddings", c.tied}};
}

json parse_object(const std::string& path, std::string_view text) {
  json object = parse_strict_json(path, text, {.max_depth = kMaxDepth, .python_numbers = true},
                                  "the object of a model");
  if (object.is_object()) return object;
  throw InputError(fmt::format("{}: no object, expected the object of a model", path));
}

void add_ids(json& object, const HfTokenIds& ids) {
  const auto add = [&](const char* key, const std::vector<int64_t>& values) {
    if (values.size() == 1) object[key] = values.front();
    if (values.size() > 1) object[key] = values;
  };
  add("bos_token_id", ids.bos);
  add("eos_token_id", ids.eos);
  add("pad_token_id", ids.pad);
}

std::string_view torch_name(DType dtype) {
  return dtype == kBF16 ? "bfloat16" : dtype == kF16 ? "float16" : "float32";
}

}  // namespace

HfModelConfig parse_hf_config(const std::string& path, std::string_view text,
                              const std::vector<std::string>& ignored_keys) {
  const json object = parse_object(path, text);
  const std::string architecture = architecture_of(path, object);
  Keys keys(path, object);
  HfModelConfig config;
  if (architecture == "GPT2LMHeadModel") {
    config = gpt2_from(keys);
  } else if (architecture == "BloomForCausalLM") {
    config = bloom_from(keys);
  } else {
    config = llama_from(keys, architecture);
  }
  const Names ignored(ignored_keys.begin(), ignored_keys.end());
  const std::vector<std::string> unknown = keys.check_all_read(architecture, ignored);
  if (!unknown.empty()) {
    constexpr size_t kMaxListed = 100, kMaxNbytes = 3000;
    log_once("warning",
             fmt::format("{}: keys that nothing is known of here are ignored: {} (no warning for "
                         "those in model.ignore_keys)",
                         path, join_few(unknown, ", ", kMaxListed, kMaxNbytes)));
  }
  return config;
}

HfTokenIds parse_hf_token_ids(const std::string& path, std::string_view text) {
  const json object = parse_object(path, text);
  const Keys keys(path, object);
  return {keys.token_ids("bos_token_id"), keys.token_ids("eos_token_id"),
          keys.token_ids("pad_token_id")};
}

std::string hf_config_json(const HfModelConfig& config, DType dtype, const HfTokenIds& ids) {
  json object = std::visit([](const auto& c) { return to_json(c); }, config);
  add_ids(object, ids);
  object["torch_dtype"] = torch_name(dtype);
  object["use_cache"] = true;
  return object.dump(2) + "\n";
}

std::string hf_generation_json(const HfTokenIds& ids) {
  json object = json::object();
  add_ids(object, ids);
  return object.dump(2) + "\n";
}

std::string hf_generation_json(const HfTokenIds& ids, bool changes_ids, const std::string& path,
                               std::string_view source) {
  json object = parse_strict_json(path, source, kMaxDepth, "the object of a generation");
  if (!object.is_object()) {
    throw InputError(fmt::format("{}: no object, expected that of a generation", path));
  }
  if (changes_ids) {
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) object.erase(key);
    add_ids(object, ids);
  }
  return object.dump(2) + "\n";
}

HfModelConfig hf_config_of(const nn::LanguageModel& model) {
  if (const auto* gpt2 = dynamic_cast<const nn::Gpt2*>(&model)) return gpt2->config();
  if (const auto* llama = dynamic_cast<const nn::Llama*>(&model)) return llama->config();
  if (const auto* bloom = dynamic_cast<const nn::Bloom*>(&model)) return bloom->config();
  throw ConfigError(fmt::format("export: transformers has no counterpart of {}", model.kind()));
}

std::unique_ptr<nn::LanguageModel> make_model(const HfModelConfig& config) {
  struct Make {
    std::unique_ptr<nn::LanguageModel> operator()(const nn::Gpt2Config& c) const {
      return std::make_unique<nn::Gpt2>(c);
    }
    std::unique_ptr<nn::LanguageModel> operator()(const nn::LlamaConfig& c) const {
      return std::make_unique<nn::Llama>(c);
    }
    std::unique_ptr<nn::LanguageModel> operator()(const nn::BloomConfig& c) const {
      return std::make_unique<nn::Bloom>(c);
    }
  };
  return std::visit(Make{}, config);
}

}  // namespace tessera::dist
