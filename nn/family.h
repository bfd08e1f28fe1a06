#pragma once

#include <any>
#include <concepts>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/settings.h"
#include "kernels/elementwise/elementwise.h"
#include "nn/classifier.h"
#include "nn/hf/parameters.h"

// What programs know of a family of models, in one value. A family is one folder (its configuration,
// settings and modules, how transformers calls them) and one word in the list of nn/meson.build.

namespace tessera::nn {

class HfKeys;
class LanguageModel;
struct Family;
struct GgufModel;

/// A row of a family's settings: a field of its configuration under the name that people set. Rows
/// of several families with one name are the same setting.
struct ModelSetting : Setting {
  /// A model of a family without this setting computes something else than another value says: it
  /// is refused. Else such a value has no effect there.
  bool is_essential = true;
  bool may_change = false;            ///< in the course of a training
  bool has_effect = true;             ///< with the values that the other settings have now
  std::string_view condition = {};    ///< of an effect, in words: "rope_scaling = llama3"
  std::string_view other_names = {};  ///< in other trainers, separated by spaces

  ModelSetting& also(std::string_view names) { return other_names = names, *this; }
  ModelSetting& harmless_elsewhere() { return is_essential = false, *this; }
  ModelSetting& changes_freely() { return may_change = true, *this; }
  ModelSetting& needs(bool holds, std::string_view words) {
    has_effect = holds, condition = words;
    return *this;
  }
};
using ModelSettings = SettingTable<ModelSetting>;

/// Throws, as its caller likes, the error that a setting's value is not `expected`, which says what
/// would be right.
using RefuseSetting = std::function<void(std::string_view key, const std::string& expected)>;

/// What transformers calls the parts of a model.
struct HfLayout {
  std::string_view prefix;     ///< of all tensors but those of the head: "model."
  std::string_view embedding;  ///< the token embedding, which a tied head shares
  std::string_view head_prefix = "lm_head.";
  std::string_view head = "lm_head.weight";  ///< the head's matrix
  std::string_view score = "score";          ///< the layer that makes logits of classes
  std::string_view score_prefix = "score.";  ///< of all that classifies
};

/// The configuration of a model of any family: it is made of that of one, which it holds. Assigning
/// one of the same family keeps what settings are bound to.
class FamilyConfig {
 public:
  template <class Config>
  requires requires(const Config& c) {
    { family_of(c) } -> std::same_as<const Family&>;
  }
  FamilyConfig(Config config)  // implicit: any of them is one
      : family_(&family_of(config)), config_(std::move(config)) {}
  FamilyConfig(const FamilyConfig&) = default;
  FamilyConfig(FamilyConfig&&) = default;
  FamilyConfig& operator=(const FamilyConfig& other);
  FamilyConfig& operator=(FamilyConfig&& other) { return *this = std::as_const(other); }

  const Family& family() const { return *family_; }
  /// Null if it is that of another family.
  template <class Config>
  const Config* get_if() const {
    return std::any_cast<Config>(&config_);
  }
  template <class Config>
  Config* get_if() {
    return std::any_cast<Config>(&config_);
  }
  /// std::bad_any_cast if it is that of another family.
  template <class Config>
  const Config& as() const {
    return std::any_cast<const Config&>(config_);
  }
  template <class Config>
  Config& as() {
    return std::any_cast<Config&>(config_);
  }

  /// ConfigError of the model's constructor.
  std::unique_ptr<LanguageModel> make_model() const;
  int64_t num_layers() const;
  int64_t vocab_size() const;
  int64_t context_length() const;
  void set_sizes(int64_t vocab_size, int64_t context_length);
  /// Rows that read and write this configuration.
  ModelSettings settings();
  /// Sets one of them. ConfigError if there is none of that name, or as Setting::set.
  void set(std::string_view key, const SettingValue& value);
  /// Calls `refuse` for what does not go together.
  void check(const RefuseSetting& refuse) const;
  /// The model classifies sequences in place of predicting tokens: it has no head, and by default pools
  /// as transformers' models of the family do: `last` if it is causal, else `cls`.
  void set_classifier(std::vector<std::string> classes, std::optional<Pooling> pooling = {});
  /// Null for a model that predicts tokens.
  const ClassifierConfig* classifier() const { return classifier_ ? &*classifier_ : nullptr; }
  /// The head uses the token embedding's weight.
  bool is_tied() const;
  void set_tied(bool is_tied);
  /// Every parameter of the model, in the order of its modules; tied ones once.
  std::vector<HfParameter> hf_parameters() const;
  HfLayout hf_layout() const;
  /// Whether a file may have a tensor of this name that nobody needs: masks and frequencies that
  /// are computed, the head of a model whose head is tied.
  bool is_derived_hf_tensor(std::string_view name) const;

 private:
  const Family* family_;
  std::any config_;
  std::optional<ClassifierConfig> classifier_;
};

/// The name that transformers has for a model: `model_type` and one of `architectures`.
struct HfArchitecture {
  std::string_view model_type, name;
};

/// What of a family differs from others beside its functions.
struct FamilyTraits {
  std::string_view name;  ///< `model.kind` of the programs
  std::vector<HfArchitecture> architectures;
  bool has_alibi = false;  ///< biases of attention in place of positions
  bool is_causal = true;   ///< false: predicts masked tokens, not the next one
  /// Settings of other families that are refused although they would be harmless.
  std::vector<std::string_view> refused = {};
  /// The model of llama.cpp; null: it has none of this family. ConfigError for what it computes
  /// otherwise.
  GgufModel (*gguf)(const FamilyConfig& config) = nullptr;
};

struct Family : FamilyTraits {
  FamilyConfig (*defaults)();
  void (*assign)(std::any& config, const std::any& other);
  std::unique_ptr<LanguageModel> (*make_model)(const FamilyConfig& config);
  int64_t (*num_layers)(const FamilyConfig& config);
  int64_t (*vocab_size)(const FamilyConfig& config);
  int64_t (*context_length)(const FamilyConfig& config);
  void (*set_sizes)(FamilyConfig& config, int64_t vocab_size, int64_t context_length);
  void (*add_settings)(ModelSettings& settings, FamilyConfig& config);
  void (*check)(const FamilyConfig& config, const RefuseSetting& refuse);
  /// Takes away what predicts tokens: drop_head(pooling) of the configuration if it has one, else the
  /// head is tied.
  void (*drop_head)(FamilyConfig& config, Pooling pooling);
  bool (*is_tied)(const FamilyConfig& config);
  void (*set_tied)(FamilyConfig& config, bool is_tied);
  /// The configuration that the keys of a config.json describe. InputError (see HfKeys).
  FamilyConfig (*read_hf)(HfKeys& keys, std::string_view architecture);
  /// The object of a config.json, without what all families have (token ids, dtype).
  /// Errors   ConfigError for a model that transformers has no name for
  nlohmann::json (*write_hf)(const FamilyConfig& config);
  std::vector<HfParameter> (*hf_parameters)(const FamilyConfig& config);
  HfLayout (*hf_layout)(const FamilyConfig& config);
  /// Beside the head of a tied model.
  bool (*is_derived_hf_tensor)(const FamilyConfig& config, std::string_view name);
};

/// All of them; the first is the one that programs take where nobody chooses.
std::span<const Family* const> families();
/// ConfigError that names all of them.
const Family& family_named(std::string_view name);

/// The settings of the fields that configurations of families have under the same name.
template <class Config>
void add_common_settings(ModelSettings& t, Config& c) {
  t.add("layers", c.num_layers, {1, 10000}, "number of transformer blocks")
      .also("num_hidden_layers n_layer");
  t.add("heads", c.num_heads, {1, 4096}, "attention heads of a block")
      .also("num_attention_heads n_head");
  t.add("width", c.width, {1, 1048576}, "width of the hidden states")
      .also("hidden_size dim n_embd");
  if constexpr (requires { c.ffn_width; }) {
    t.add("ffn", c.ffn_width, {0, 16777216},
          "hidden width of the MLP; 0: 4 x width, of a gated one (SwiGLU) 8/3 x width rounded up "
          "to a multiple of 64")
        .also("intermediate_size");
  }
  t.add("tied", c.tied, "output head shares the weight of the token embedding")
      .also("tie_word_embeddings weight_tying");
  if constexpr (requires { c.gelu; }) {
    t.add("gelu", c.gelu, "tanh approximation of GELU, or the exact function").harmless_elsewhere();
  }
  t.add("norm_eps", c.norm_eps, kF32Positive, "epsilon of LayerNorm and RMSNorm")
      .also("rms_norm_eps");
  if constexpr (requires { c.dropout; }) {
    t.add("dropout", c.dropout, kFraction, "dropout probability").changes_freely();
  }
}

/// Whether the heads divide the width and the kernels take them; `head_width` 0: none of its own.
void check_heads(int64_t width, int64_t num_heads, int64_t head_width, const RefuseSetting& refuse);

/// Joins the functions of a family, each of its own configuration, into what all have. `Config` has
/// the fields vocab_size, context_length, num_layers, num_heads, width, tied and norm_eps; a `Model`
/// is made of it. The others are
///   void add_settings(ModelSettings&, Config&)            beside those of add_common_settings
///   void check(const Config&, const RefuseSetting&)
///   Config read_hf(HfKeys&, std::string_view architecture)
///   nlohmann::json write_hf(const Config&)
///   std::vector<HfParameter> hf_parameters(const Config&)
///   HfLayout hf_layout(const Config&)
///   bool is_derived_hf_tensor(const Config&, std::string_view)
template <class Config, class Model, auto kAddSettings, auto kCheck, auto kReadHf, auto kWriteHf,
          auto kHfParameters, auto kHfLayout, auto kIsDerivedHfTensor>
Family make_family(FamilyTraits traits) {
  Family f;
  static_cast<FamilyTraits&>(f) = std::move(traits);
  f.defaults = [] { return FamilyConfig(Config{}); };
  f.assign = [](std::any& config, const std::any& other) {
    std::any_cast<Config&>(config) = std::any_cast<const Config&>(other);
  };
  f.make_model = [](const FamilyConfig& config) -> std::unique_ptr<LanguageModel> {
    return std::make_unique<Model>(config.as<Config>());
  };
  f.num_layers = [](const FamilyConfig& config) { return config.as<Config>().num_layers; };
  f.vocab_size = [](const FamilyConfig& config) { return config.as<Config>().vocab_size; };
  f.context_length = [](const FamilyConfig& config) { return config.as<Config>().context_length; };
  f.set_sizes = [](FamilyConfig& config, int64_t vocab_size, int64_t context_length) {
    config.as<Config>().vocab_size = vocab_size;
    config.as<Config>().context_length = context_length;
  };
  f.add_settings = [](ModelSettings& settings, FamilyConfig& config) {
    add_common_settings(settings, config.as<Config>());
    kAddSettings(settings, config.as<Config>());
  };
  f.check = [](const FamilyConfig& config, const RefuseSetting& refuse) {
    kCheck(config.as<Config>(), refuse);
  };
  f.drop_head = [](FamilyConfig& config, Pooling pooling) {
    Config& c = config.as<Config>();
    if constexpr (requires { c.drop_head(pooling); }) {
      c.drop_head(pooling);
    } else {
      c.tied = true;  // a head without a weight of its own, which is never called
    }
  };
  f.is_tied = [](const FamilyConfig& config) { return config.as<Config>().tied; };
  f.set_tied = [](FamilyConfig& config, bool is_tied) { config.as<Config>().tied = is_tied; };
  f.read_hf = [](HfKeys& keys, std::string_view architecture) -> FamilyConfig {
    return kReadHf(keys, architecture);
  };
  f.write_hf = [](const FamilyConfig& config) { return kWriteHf(config.as<Config>()); };
  f.hf_parameters = [](const FamilyConfig& config) { return kHfParameters(config.as<Config>()); };
  f.hf_layout = [](const FamilyConfig& config) { return kHfLayout(config.as<Config>()); };
  f.is_derived_hf_tensor = [](const FamilyConfig& config, std::string_view name) {
    return kIsDerivedHfTensor(config.as<Config>(), name);
  };
  return f;
}

}  // namespace tessera::nn
