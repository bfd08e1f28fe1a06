#include "nn/family.h"

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "nn/bert/bert.h"
#include "nn/hf/keys.h"

// BERT and RoBERTa as transformers has them: the same blocks under other prefixes, another name of
// everything in the head, and RoBERTa's positions, which begin after that of padding.

namespace tessera::nn {
namespace {

void add_settings(ModelSettings& t, BertConfig& c) {
  t.add("types", c.num_types, {1, 1024}, "types of tokens (segments)").also("type_vocab_size");
  t.add("position_offset", c.position_offset, {0, 1024},
        "rows of the position embeddings before that of position 0: 2 for RoBERTa");
}

void check(const BertConfig& c, const RefuseSetting& refuse) {
  check_heads(c.width, c.num_heads, 0, refuse);
  // Nothing sets it but an import: there is no loss to train with.
  if (!c.mlm_head && !c.classifies) {
    refuse("kind", "a model with a head that predicts masked tokens");
  }
}

bool is_roberta(const BertConfig& c) {
  return c.position_offset > 0;
}

/// RoBERTa classifies by a layer of its own.
bool has_base_pooler(const BertConfig& c) {
  return c.pooler && !(is_roberta(c) && c.classifies);
}

BertConfig read_hf(HfKeys& keys, std::string_view architecture) {
  BertConfig c;
  c.vocab_size = keys.count({"vocab_size"});
  c.num_layers = keys.count({"num_hidden_layers"});
  c.num_heads = keys.num_heads({"num_attention_heads"});
  c.width = keys.count({"hidden_size"});
  c.ffn_width = keys.count({"intermediate_size"}, 4 * c.width);
  c.num_types = keys.count({"type_vocab_size"}, 2);
  c.tied = keys.flag("tie_word_embeddings", true);
  c.norm_eps = static_cast<float>(keys.number("layer_norm_eps", 1e-12));
  c.gelu = keys.gelu("hidden_act", "gelu");
  c.mlm_head = architecture.ends_with("ForMaskedLM");
  c.pooler = !c.mlm_head;
  if (architecture.starts_with("Roberta")) {
    c.position_offset = keys.count({"pad_token_id"}, 1, 1 << 10, /*smallest=*/0) + 1;
  }
  const int64_t num_positions = keys.count({"max_position_embeddings"});
  if (num_positions <= c.position_offset) {
    keys.fail("max_position_embeddings",
              fmt::format("more than the {} before position 0", c.position_offset));
  }
  c.context_length = num_positions - c.position_offset;
  keys.check_positions({"absolute"});
  keys.ignore("hidden_dropout_prob");  // the trainer's
  keys.ignore("attention_probs_dropout_prob");
  keys.require("is_decoder", false);
  keys.require("add_cross_attention", false);
  return c;
}

nlohmann::json write_hf(const BertConfig& c) {
  TESSERA_CHECK_AS(ConfigError, !c.classifies || c.pooler,
                   "export: classes by a mean of states, transformers' BERT has those of the first "
                   "token, model.pooling = cls");
  TESSERA_CHECK_AS(ConfigError, c.mlm_head || c.classifies || (c.pooler && !is_roberta(c)),
                   "export: neither a head nor a pooler, transformers' BertModel has a pooler");
  return {{"architectures",
           {is_roberta(c)                ? "RobertaForMaskedLM"
            : c.mlm_head || c.classifies ? "BertForMaskedLM"
                                         : "BertModel"}},
          {"model_type", is_roberta(c) ? "roberta" : "bert"},
          {"vocab_size", c.vocab_size},
          {"max_position_embeddings", c.context_length + c.position_offset},
          {"num_hidden_layers", c.num_layers},
          {"num_attention_heads", c.num_heads},
          {"hidden_size", c.width},
          {"intermediate_size", c.ffn_width == 0 ? 4 * c.width : c.ffn_width},
          {"type_vocab_size", c.num_types},
          {"layer_norm_eps", shortest_decimal(c.norm_eps)},
          {"hidden_act", c.gelu == Gelu::kTanh ? "gelu_new" : "gelu"},
          {"tie_word_embeddings", c.tied}};
}

std::vector<HfParameter> hf_parameters(const BertConfig& c) {
  const int64_t C = c.width, F = c.ffn_width == 0 ? 4 * C : c.ffn_width;
  const std::string base = is_roberta(c) ? "roberta." : "bert.";
  HfParameterList all;
  all.matrix("embed.weight", C, {{base + "embeddings.word_embeddings.weight", c.vocab_size}});
  all.matrix(
      "position.weight", C,
      {{base + "embeddings.position_embeddings.weight", c.context_length + c.position_offset}});
  all.matrix("type.weight", C, {{base + "embeddings.token_type_embeddings.weight", c.num_types}});
  all.norm("embed_norm", base + "embeddings.LayerNorm", C, true);
  const auto linear = [&](const std::string& name, const std::string& hf_name, int64_t rows,
                          int64_t cols) {
    all.matrix(name + ".weight", cols, {{hf_name + ".weight", rows}});
    all.vector(name + ".bias", {{hf_name + ".bias", rows}});
  };
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string ours = fmt::format("blocks.{}.", i),
                      hf = fmt::format("{}encoder.layer.{}.", base, i),
                      self = hf + "attention.self.";
    all.norm(ours + "norm1", hf + "attention.output.LayerNorm", C, true);
    all.matrix(ours + "attn.qkv.weight", C,
               {{self + "query.weight", C}, {self + "key.weight", C}, {self + "value.weight", C}});
    all.vector(ours + "attn.qkv.bias",
               {{self + "query.bias", C}, {self + "key.bias", C}, {self + "value.bias", C}});
    linear(ours + "attn.out", hf + "attention.output.dense", C, C);
    all.norm(ours + "norm2", hf + "output.LayerNorm", C, true);
    linear(ours + "mlp.up", hf + "intermediate.dense", F, C);
    linear(ours + "mlp.down", hf + "output.dense", C, F);
  }
  if (c.pooler)
    linear("pooler", (has_base_pooler(c) ? base + "pooler" : "classifier") + ".dense", C, C);
  if (!c.mlm_head) return all.take();
  const std::string head = is_roberta(c) ? "lm_head." : "cls.predictions.";
  const std::string transform = is_roberta(c) ? head : head + "transform.";
  linear("transform.linear", transform + "dense", C, C);
  all.norm("transform.norm", transform + (is_roberta(c) ? "layer_norm" : "LayerNorm"), C, true);
  if (!c.tied) all.matrix("head.weight", C, {{head + "decoder.weight", c.vocab_size}});
  all.vector("head.bias.value", {{head + "bias", c.vocab_size}});
  return all.take();
}

HfLayout hf_layout(const BertConfig& c) {
  if (is_roberta(c)) {
    return {.prefix = "roberta.",
            .embedding = "roberta.embeddings.word_embeddings.weight",
            .head_prefix = "lm_head.",
            .head = "lm_head.decoder.weight",
            .score = "classifier.out_proj",
            .score_prefix = "classifier."};
  }
  return {.prefix = "bert.",
          .embedding = "bert.embeddings.word_embeddings.weight",
          .head_prefix = "cls.",
          .head = "cls.predictions.decoder.weight",
          .score = "classifier",
          .score_prefix = "classifier."};
}

/// What is computed, copies of the head's bias, and heads that a MaskedLM or a BertModel has not.
bool is_derived_hf_tensor(const BertConfig& c, std::string_view name) {
  if (name.ends_with(".embeddings.position_ids") || name.ends_with("decoder.bias")) return true;
  if (name.starts_with("cls.seq_relationship.")) return true;
  if (!has_base_pooler(c) && name.find(".pooler.") != std::string_view::npos) return true;
  return !c.mlm_head && (name.starts_with("cls.") || name.starts_with("lm_head."));
}

}  // namespace

const Family& bert_family() {
  static const Family family = make_family<BertConfig, Bert, add_settings, check, read_hf, write_hf,
                                           hf_parameters, hf_layout, is_derived_hf_tensor>(
      {.name = "bert",
       .architectures = {{"bert", "BertForMaskedLM"},
                         {"bert", "BertModel"},
                         {"roberta", "RobertaForMaskedLM"}},
       .is_causal = false});
  return family;
}

const Family& family_of(const BertConfig&) {
  return bert_family();
}

std::unique_ptr<FamilyConfig> Bert::family_config() const {
  return std::make_unique<FamilyConfig>(config_);
}

}  // namespace tessera::nn
