#include "nn/family.h"

#include <fmt/ranges.h>

#include "core/check.h"
#include "kernels/attention/kernel.h"
#include "nn/transformer.h"

namespace tessera::nn {

// TESSERA_FAMILIES(F) is F(name) for each name in the list of nn/meson.build; a folder defines
// `const Family& NAME_family()`.
#define TESSERA_DECLARE(name) const Family& name##_family();
TESSERA_FAMILIES(TESSERA_DECLARE)
#undef TESSERA_DECLARE

std::span<const Family* const> families() {
#define TESSERA_ENTRY(name) &name##_family(),
  static const Family* const all[] = {TESSERA_FAMILIES(TESSERA_ENTRY)};
#undef TESSERA_ENTRY
  return all;
}

const Family& family_named(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Family* family : families()) {
    if (family->name == name) return *family;
    names.push_back(family->name);
  }
  throw ConfigError(
      fmt::format("family of models \"{}\", expected one of {}", name, fmt::join(names, ", ")));
}

FamilyConfig& FamilyConfig::operator=(const FamilyConfig& other) {
  if (family_ == other.family_) {
    family_->assign(config_, other.config_);
  } else {
    family_ = other.family_;
    config_ = other.config_;
  }
  classifier_ = other.classifier_;
  return *this;
}

std::unique_ptr<LanguageModel> FamilyConfig::make_model() const {
  std::unique_ptr<LanguageModel> model = family_->make_model(*this);
  if (classifier_) model->add_classifier(*classifier_);
  return model;
}

void FamilyConfig::set_classifier(std::vector<std::string> classes,
                                  std::optional<Pooling> pooling) {
  const bool is_causal = family_->is_causal;
  classifier_ = {std::move(classes), pooling.value_or(is_causal ? Pooling::kLast : Pooling::kCls),
                 /*bias=*/!is_causal};
  family_->drop_head(*this, classifier_->pooling);
}

int64_t FamilyConfig::num_layers() const {
  return family_->num_layers(*this);
}

int64_t FamilyConfig::vocab_size() const {
  return family_->vocab_size(*this);
}

int64_t FamilyConfig::context_length() const {
  return family_->context_length(*this);
}

void FamilyConfig::set_sizes(int64_t vocab_size, int64_t context_length) {
  family_->set_sizes(*this, vocab_size, context_length);
}

ModelSettings FamilyConfig::settings() {
  ModelSettings settings;
  family_->add_settings(settings, *this);
  return settings;
}

void FamilyConfig::set(std::string_view key, const SettingValue& value) {
  const ModelSettings table = settings();
  for (const ModelSetting& row : table.rows()) {
    if (row.key == key) {
      return row.set(value, std::visit([](const auto& v) { return fmt::format("{}", v); }, value));
    }
  }
  throw ConfigError(fmt::format("{}: no setting {}", family_->name, key));
}

void FamilyConfig::check(const RefuseSetting& refuse) const {
  family_->check(*this, refuse);
}

bool FamilyConfig::is_tied() const {
  return family_->is_tied(*this);
}

void FamilyConfig::set_tied(bool is_tied) {
  family_->set_tied(*this, is_tied);
}

std::vector<HfParameter> FamilyConfig::hf_parameters() const {
  std::vector<HfParameter> all = family_->hf_parameters(*this);
  if (!classifier_) return all;
  const std::string score(hf_layout().score);
  const int64_t count = std::ssize(classifier_->classes);
  HfParameterList list;
  // Every model's first parameter is its token embedding.
  list.matrix("score.weight", all.front().cols(), {{score + ".weight", count}});
  if (classifier_->bias) list.vector("score.bias", {{score + ".bias", count}});
  for (HfParameter& parameter : list.take()) all.push_back(std::move(parameter));
  return all;
}

HfLayout FamilyConfig::hf_layout() const {
  return family_->hf_layout(*this);
}

bool FamilyConfig::is_derived_hf_tensor(std::string_view name) const {
  if (classifier_ && name.starts_with(hf_layout().head_prefix)) return true;
  return (is_tied() && name == hf_layout().head) || family_->is_derived_hf_tensor(*this, name);
}

void check_heads(int64_t width, int64_t num_heads, int64_t head_width,
                 const RefuseSetting& refuse) {
  if (head_width == 0 && width % num_heads != 0) {
    refuse("width", fmt::format("a multiple of heads = {}", num_heads));
  }
  const bool is_own = head_width != 0;
  if ((is_own ? head_width : width / num_heads) <= kernels::kMaxAttentionWidth) return;
  refuse(is_own ? "head_width" : "width",
         fmt::format("heads of a width of at most {}", kernels::kMaxAttentionWidth));
}

}  // namespace tessera::nn
