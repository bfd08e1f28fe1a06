#include "nn/transformer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/embedding/embedding.h"
#include "kernels/matmul/matmul.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "nn/family.h"

namespace tessera::nn {

Bias::Bias(int64_t width) : value_(register_parameter("value", {width}, Init::zeros())) {}

Tensor Bias::forward(const Tensor& x) {
  return add(x, value_);
}

LmHead::LmHead(int64_t width, int64_t vocab_size, const Init& init, float softcap, bool bias)
    : weight_(register_parameter("weight", {vocab_size, width}, init)),
      is_tied_(false),
      softcap_(softcap) {
  if (bias) add_bias();
}

LmHead::LmHead(Embedding& embedding, float softcap, bool bias)
    : weight_(tie("weight", embedding, "weight")), is_tied_(true), softcap_(softcap) {
  if (bias) add_bias();
}

void LmHead::add_bias() {
  TESSERA_CHECK(softcap_ == 0, "LmHead: a bias beside a softcap of {}", softcap_);
  bias_.emplace(this, "bias", weight_.dim(0));
}

Tensor LmHead::forward(const Tensor& hidden_BTC) {
  const Tensor logits_BTV = linear(hidden_BTC, weight_);
  if (bias_) return bias_(logits_BTV);
  return softcap_ > 0 ? tanh(logits_BTV / softcap_) * softcap_ : logits_BTV;
}

LossSum LmHead::forward(const Tensor& hidden_BTC, const Tensor& targets_BT,
                        const LinearCrossEntropyOptions& options) {
  if (bias_) {
    return cross_entropy(
        forward(hidden_BTC), targets_BT,
        CrossEntropyOptions{options.ignore_index, options.z_loss, options.label_smoothing});
  }
  return linear_cross_entropy(hidden_BTC, weight_, targets_BT, capped(options));
}

Tensor LmHead::forward(const Tensor& hidden_BTC, const Tensor& targets_BT, const OfEach& of_each) {
  TESSERA_CHECK(!bias_, "LmHead: losses of each position with a bias, expected a head without one");
  return linear_cross_entropy_rows(hidden_BTC, weight_, targets_BT, capped(of_each.options));
}

LinearCrossEntropyOptions LmHead::capped(LinearCrossEntropyOptions options) const {
  if (softcap_ > 0) options.softcap = softcap_;
  return options;
}

std::string LmHead::kind() const {
  return fmt::format("LmHead({} -> {}{}{})", weight_.dim(1), weight_.dim(0),
                     is_tied_ ? ", tied" : "",
                     softcap_ > 0 ? fmt::format(", softcap {}", softcap_) : "");
}

std::unique_ptr<FamilyConfig> LanguageModel::family_config() const {
  return nullptr;
}

void LanguageModel::check_predicts_tokens() const {
  TESSERA_CHECK_AS(ConfigError, !classifier_,
                   "{}: the model classifies texts, expected one that predicts tokens", kind());
}

LossSum LanguageModel::loss(const Tensor& ids_BT, const Tensor& targets_BT,
                            const ForwardOptions& options,
                            const LinearCrossEntropyOptions& loss_options) {
  check_predicts_tokens();
  return run(
      *this,
      [&](LanguageModel& model, const Tensor& ids, const Tensor& targets) {
        return model.head()(model.hidden_of_targets(ids, options), targets, loss_options);
      },
      ids_BT, targets_BT);
}

Tensor LanguageModel::token_losses(const Tensor& ids_BT, const Tensor& targets_BT,
                                   const ForwardOptions& options) {
  check_predicts_tokens();
  return run(
      *this,
      [&](LanguageModel& model, const Tensor& ids, const Tensor& targets) {
        return model.head()(model.hidden_of_targets(ids, options), targets, LmHead::OfEach{});
      },
      ids_BT, targets_BT);
}

Tensor LanguageModel::hidden_of_targets(const Tensor& ids_BT, const ForwardOptions& options) {
  Tensor hidden_BTC = forward(ids_BT, options);
  if (options.loss_rows.is_defined()) {
    const int64_t C = hidden_BTC.dim(2);
    hidden_BTC = embedding(options.loss_rows, hidden_BTC.view({hidden_BTC.numel() / C, C}));
  }
  return head_input(hidden_BTC);
}

void LanguageModel::add_classifier(const ClassifierConfig& config) {
  TESSERA_CHECK(!classifier_, "add_classifier: the model has one, expected one call");
  TESSERA_CHECK(config.classes.size() >= 2, "add_classifier: {} classes, expected two or more",
                config.classes.size());
  classifier_ = config;
  score_.emplace(this, "score", shape().width, std::ssize(config.classes),
                 LinearOptions{.bias = config.bias, .init = Init::normal(0, 0.02)});
}

Tensor LanguageModel::pooled(const Tensor& hidden_BTC, std::span<const int32_t> lengths) const {
  const int64_t B = hidden_BTC.dim(0), T = hidden_BTC.dim(1), C = hidden_BTC.dim(2);
  TESSERA_CHECK_EQ(std::ssize(lengths), B, "class_logits: a length of each row");
  for (const int32_t length : lengths) {
    TESSERA_CHECK(length >= 1 && length <= T, "class_logits: length {}, expected 1 to {}", length,
                  T);
  }
  if (classifier_->pooling == Pooling::kMean) {
    std::vector<float> weights(static_cast<size_t>(B * T), 0);
    for (int64_t b = 0; b < B; ++b) {
      const int32_t length = lengths[static_cast<size_t>(b)];
      std::fill_n(weights.begin() + b * T, length, 1 / static_cast<float>(length));
    }
    const Tensor share =
        from_values(std::span<const float>(weights), {B, T, 1}, hidden_BTC.dtype());
    return sum(mul(hidden_BTC, share), 1);
  }
  std::vector<int32_t> rows;
  for (int64_t b = 0; b < B; ++b) {
    const bool is_last = classifier_->pooling == Pooling::kLast;
    const int64_t t = is_last ? lengths[static_cast<size_t>(b)] - 1 : 0;
    rows.push_back(static_cast<int32_t>(b * T + t));
  }
  return embedding(from_values(std::span<const int32_t>(rows), {B}), hidden_BTC.view({B * T, C}));
}

Tensor LanguageModel::class_logits(const Tensor& ids_BT, std::span<const int32_t> lengths,
                                   const ForwardOptions& options) {
  TESSERA_CHECK(classifier_, "class_logits: {} has no classes, expected add_classifier", kind());
  return run(
      *this,
      [&](LanguageModel& model, const Tensor& ids) {
        const Tensor pooled_BC = model.pooled(model.forward(ids, options), lengths);
        return model.score_(model.classifier_input(pooled_BC));
      },
      ids_BT);
}

Tensor LanguageModel::logits(const Tensor& ids_BT, const ForwardOptions& options) {
  check_predicts_tokens();
  return run(
      *this,
      [&](LanguageModel& model, const Tensor& ids) {
        Tensor hidden_BTC = model.head_input(model.forward(ids, options));
        if (options.last_only) hidden_BTC = hidden_BTC.narrow(1, hidden_BTC.dim(1) - 1, 1);
        return model.head()(hidden_BTC);
      },
      ids_BT);
}

KvCache LanguageModel::make_cache(int64_t num_rows, int64_t capacity) {
  const ModelShape& s = shape();
  KvCache cache;
  cache.capacity = capacity == 0 ? s.context_length : capacity;
  const DType dtype = head()->weight().dtype();
  for (int64_t layer = 0; layer < s.num_layers; ++layer) {
    const Shape kv{num_rows, cache.capacity, s.num_kv_heads, s.head_width};
    cache.layers.push_back({zeros(kv, dtype), zeros(kv, dtype)});
  }
  return cache;
}

KvCache KvCache::row(int64_t row) const {
  KvCache one;
  one.capacity = capacity;
  for (const LayerCache& layer : layers) {
    one.layers.push_back({layer.k_BSGD.narrow(0, row, 1), layer.v_BSGD.narrow(0, row, 1)});
  }
  return one;
}

void KvCache::append(int64_t num_positions) {
  if (row_lengths.empty()) length += num_positions;
  for (int32_t& held : row_lengths) {
    if (held >= 0) held += static_cast<int32_t>(num_positions);
  }
}

void LanguageModel::set_recompute(const RecomputePolicy& policy) {
  host_checkpoints_ = policy.offload ? HostCheckpoints::make() : nullptr;
  int64_t layer = 0;
  for (const NamedModule& entry : named_modules()) {
    auto* const block = dynamic_cast<Block*>(entry.module);
    if (block == nullptr) continue;
    block->set_recompute({policy.of(layer++), host_checkpoints_, policy.mlp_tile});
  }
}

double LanguageModel::flops_per_token(int64_t T) {
  double products = 0;
  const auto count = [&products](const Tensor& weight) {
    const int passes = weight.requires_grad() ? 6 : 4;
    products += passes * static_cast<double>(weight.numel());
  };
  for (const NamedModule& entry : named_modules()) {
    if (const auto* linear = dynamic_cast<const Linear*>(entry.module)) {
      if (linear != score_.get()) count(linear->weight());
    } else if (const auto* lm_head = dynamic_cast<const LmHead*>(entry.module);
               lm_head != nullptr && !classifier_) {
      count(lm_head->weight());
    } else if (auto* lora = dynamic_cast<Lora*>(entry.module)) {
      for (const NamedParameter& p : lora->named_parameters()) count(p.parameter->tensor);
    }
  }
  const ModelShape& s = shape();
  const auto square = static_cast<double>(T);
  double attention = static_cast<double>(s.num_layers) * square;
  for (const int64_t window : s.windows) {
    if (window == 0 || window >= T) continue;
    const auto inside = static_cast<double>(window);
    attention += 2 * inside - inside * inside / square - square;
  }
  attention *= static_cast<double>(s.num_heads * s.head_width) * (s.is_causal ? 1 : 2);
  return products + 6.0 * attention;
}

void LanguageModel::check_forward(const Tensor& ids_BT, const ForwardOptions& options) const {
  TESSERA_CHECK_SHAPE(ids_BT.num_dims() == 2, "{}: ids must be [B, T], got {}", kind(),
                      ids_BT.shape());
  int64_t cached = options.cache != nullptr ? options.cache->length : 0;
  if (options.cache != nullptr && !options.cache->row_lengths.empty()) {
    const std::vector<int32_t>& lengths = options.cache->row_lengths;
    TESSERA_CHECK_SHAPE(ids_BT.dim(1) == 1 && std::ssize(lengths) == ids_BT.dim(0),
                        "{}: ids of a cache with lengths of {} rows must be one a row, got {}",
                        kind(), lengths.size(), ids_BT.shape());
    cached = std::max<int64_t>(0, *std::max_element(lengths.begin(), lengths.end()));
  }
  const int64_t end = cached + ids_BT.dim(1);
  TESSERA_CHECK_SHAPE(end <= shape().context_length || options.positions.is_defined(),
                      "{}: {} positions do not fit the context of {}", kind(), end,
                      shape().context_length);
  if (options.cache == nullptr) return;
  TESSERA_CHECK(!options.document_starts.is_defined(),
                "{}: document_starts and a cache do not go together", kind());
  TESSERA_CHECK_SHAPE(end <= options.cache->capacity,
                      "{}: {} positions do not fit the cache's capacity of {}", kind(), end,
                      options.cache->capacity);
  TESSERA_CHECK_EQ(static_cast<int64_t>(options.cache->layers.size()), shape().num_layers,
                   "{}: the cache has another number of layers", kind());
}

Tensor LanguageModel::position_range(int64_t first, int64_t T) {
  if (!positions_.is_defined() || positions_first_ != first || positions_.dim(0) != T) {
    std::vector<int32_t> values(static_cast<size_t>(T));
    std::iota(values.begin(), values.end(), static_cast<int32_t>(first));
    positions_ = from_values(std::span<const int32_t>(values), {T});
    positions_first_ = first;
  }
  return positions_;
}

Tensor LanguageModel::positions_of(const Tensor& ids_BT, const ForwardOptions& options) {
  if (options.positions.is_defined()) return options.positions;
  if (options.cache != nullptr && !options.cache->row_lengths.empty()) {
    std::vector<int32_t> positions = options.cache->row_lengths;
    for (int32_t& position : positions) position = std::max(position, 0);
    return from_values(std::span<const int32_t>(positions), {std::ssize(positions), 1});
  }
  return position_range(options.cache != nullptr ? options.cache->length : 0, ids_BT.dim(1));
}

void LanguageModel::emplace_head(Child<LmHead>& head, bool tied, Embedding& embedding,
                                 const Init& init, float softcap, bool bias) {
  if (tied) {
    head.emplace(this, "head", embedding, softcap, bias);
  } else {
    const Shape& shape = embedding.weight().shape();
    head.emplace(this, "head", shape[1], shape[0], init, softcap, bias);
  }
}

AttentionInput LanguageModel::attention_input(const ForwardOptions& options,
                                              const Tensor& positions, int64_t layer) {
  AttentionInput input;
  input.positions = positions;
  input.document_starts = options.document_starts;
  if (options.cache != nullptr) {
    input.cache = &options.cache->layers[static_cast<size_t>(layer)];
    input.cache_length = options.cache->length;
    input.row_lengths = options.cache->row_lengths;
  }
  return input;
}

void check_shape(const char* model, const ModelShape& s) {
  const std::pair<const char*, int64_t> fields[] = {
      {"vocab_size", s.vocab_size}, {"context_length", s.context_length},
      {"num_layers", s.num_layers}, {"num_heads", s.num_heads},
      {"width", s.width},
  };
  for (const auto& field : fields) {
    TESSERA_CHECK_AS(ConfigError, field.second > 0, "{}: {} must be positive, got {}", model,
                     field.first, field.second);
  }
}

MatrixInit::MatrixInit(double stddev, int64_t num_layers)
    : inside(Init::normal(0, stddev)),
      out(Init::normal(0, stddev / std::sqrt(2.0 * static_cast<double>(num_layers)))) {}

}  // namespace tessera::nn
