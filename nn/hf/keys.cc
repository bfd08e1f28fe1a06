#include "nn/hf/keys.h"

#include "core/check.h"
#include "core/formats/strict_json.h"
#include "core/text.h"

namespace tessera::nn {
namespace {

using nlohmann::json;

using Names = HfKeys::Names;

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
      "reorder_and_upcast_attn", "offset_alibi", "seq_length", "chunk_size_feed_forward",
      "is_decoder", "name_or_path", "vocab_file", "torchscript", "use_bfloat16", "n_special",
      "predict_special_tokens", "tf_legacy_loss", "n_inner", "unsloth_version", "unsloth_fixed",
      "transformers.js_config", "attn_implementation", "use_flash_attn", "use_flash_attention",
      "model_max_length", "max_sequence_length",
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

}  // namespace

void HfKeys::fail(std::string_view key, std::string_view expected) const {
  const auto found = object_.find(key);
  throw InputError(fmt::format("{}: {} is {}, expected {}", path_, key,
                               found == object_.end() ? "missing" : json_text(*found), expected));
}

bool HfKeys::has(std::string_view key) const {
  const auto found = object_.find(key);
  return found != object_.end() && !found->is_null();
}

bool HfKeys::is_null(std::string_view key) const {
  const auto found = object_.find(key);
  return found != object_.end() && found->is_null();
}

int64_t HfKeys::count(std::initializer_list<std::string_view> keys, int64_t fallback, int64_t max,
                      int64_t smallest) {
  for (const std::string_view key : keys) read_.emplace(key);
  for (const std::string_view key : keys) {
    if (!has(key)) continue;
    const int64_t value = json_size(object_.at(std::string(key)));
    if (value < smallest || value > max) {
      fail(key, fmt::format("an integer in [{}, {}]", smallest, max));
    }
    return value;
  }
  if (fallback < 0) fail(*keys.begin(), fmt::format("an integer in [1, {}]", max));
  return fallback;
}

double HfKeys::number(std::string_view key, std::optional<double> fallback) {
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

bool HfKeys::flag(std::string_view key, bool fallback) {
  read_.emplace(key);
  if (!has(key)) return fallback;
  if (!object_.at(std::string(key)).is_boolean()) fail(key, "true or false");
  return object_.at(std::string(key)).get<bool>();
}

std::string HfKeys::text(std::string_view key, const std::string& fallback) {
  read_.emplace(key);
  if (!has(key)) return fallback;
  if (!object_.at(std::string(key)).is_string()) fail(key, "a string");
  return object_.at(std::string(key)).get<std::string>();
}

json HfKeys::array(std::string_view key) {
  read_.emplace(key);
  if (!has(key)) return json::array();
  if (!object_.at(std::string(key)).is_array()) fail(key, "an array");
  return object_.at(std::string(key));
}

const json* HfKeys::object(std::string_view key) {
  read_.emplace(key);
  if (!has(key)) return nullptr;
  if (!object_.at(std::string(key)).is_object()) fail(key, "an object");
  return &object_.at(std::string(key));
}

std::vector<int64_t> HfKeys::token_ids(std::string_view key) const {
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

void HfKeys::require(std::string_view key, const json& value) {
  read_.emplace(key);
  if (has(key) && object_.at(std::string(key)) != value) {
    fail(key, fmt::format("{} (nothing else is supported)", json_text(value)));
  }
}

std::vector<std::string> HfKeys::check_all_read(std::string_view architecture,
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

void HfKeys::check_nothing_else(std::string_view where) const {
  for (const std::string& key : check_all_read(where, {})) fail_key(key, where);
}

void HfKeys::fail_key(const std::string& key, std::string_view where) const {
  throw InputError(fmt::format("{}: key {} = {} is not supported for {}", path_, shorten(key),
                               json_text(object_.at(key)), where));
}

Gelu HfKeys::gelu(std::string_view key, const std::string& fallback) {
  const std::string name = text(key, fallback);
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return Gelu::kTanh;
  if (name == "gelu") return Gelu::kExact;
  fail(key, "gelu_new, gelu_pytorch_tanh or gelu");
}

void HfKeys::check_positions(const Names& own) {
  const std::string kind = text("position_embedding_type", *own.begin());
  if (!own.contains(kind)) fail("position_embedding_type", *own.begin());
}

double shortest_decimal(float value) {
  return std::stod(fmt::format("{}", value));
}

}  // namespace tessera::nn
