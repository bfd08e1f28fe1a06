#include "apps/classification.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/template.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/files.h"
#include "core/random.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

using text::jinja::Kind;
using text::jinja::Value;

constexpr size_t kMaxClasses = 65536;

const Value& column_of(const Value& row, const std::string& key) {
  const Value* value = row.is(Kind::kDict) ? row.dict().find(std::string_view(key)) : nullptr;
  if (value == nullptr || value->is_none()) {
    throw InputError(fmt::format("expected the key \"{}\"", key));
  }
  return *value;
}

/// A label as the name of a class.
std::string name_of_label(const Value& value, const std::string& key) {
  if (value.is_string()) return value.text();
  if (value.is(Kind::kInt)) return text::jinja::to_string(value);
  throw InputError(fmt::format("\"{}\" is {}, expected a text or a whole number", key,
                               text::jinja::type_name(value)));
}

bool is_whole_number(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

/// Of the labels that there are.
std::vector<std::string> sorted_classes(const std::set<std::string>& names) {
  std::vector<std::string> classes(names.begin(), names.end());
  if (std::all_of(classes.begin(), classes.end(), is_whole_number)) {
    std::sort(classes.begin(), classes.end(), [](const std::string& a, const std::string& b) {
      return std::stoll(a) < std::stoll(b);
    });
  }
  return classes;
}

struct LabelledRow {
  std::string where, label;
};

}  // namespace

std::vector<std::string> parse_classes(const std::string& text) {
  std::vector<std::string> classes;
  std::set<std::string> seen;
  for (size_t begin = 0; !text.empty() && begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    classes.push_back(text.substr(begin, end - begin));
    begin = end + 1;
    if (classes.back().empty()) {
      throw ConfigError(
          fmt::format("= \"{}\": an empty name, expected names between commas", shorten(text)));
    }
    if (!seen.insert(classes.back()).second) {
      throw ConfigError(fmt::format("= \"{}\": {} twice, expected each class once", shorten(text),
                                    shorten(classes.back())));
    }
  }
  if (classes.size() == 1) {
    throw ConfigError(fmt::format("= \"{}\": one class, expected two or more", shorten(text)));
  }
  return classes;
}

LoadedTexts load_labelled_texts(const Config& config, const text::Tokenizer& tokenizer) {
  const DataConfig& d = config.data;
  const std::vector<std::string> paths = files_of_globs(
      "data.classify", {d.classify}, "JSON lines or Parquet files of texts with labels");
  DocumentOptions rows_options;
  rows_options.whole_rows = true;
  rows_options.columns = {d.field, d.label_field};
  DocumentReader reader(paths, rows_options);
  auto texts = std::make_shared<LabelledTexts>();
  std::vector<int32_t> ids, of_text;
  std::vector<LabelledRow> rows;
  std::set<std::string> names;
  int64_t count = 0, num_long = 0;
  texts->begins.push_back(0);
  const auto limit = static_cast<size_t>(config.model.context);
  for (Document document; reader.next(document); ++count) {
    const std::string where = reader.where(document.position);
    try {
      const Value row = text::jinja::parse_json("the row", document.text);
      const Value& content = column_of(row, d.field);
      if (!content.is_string()) {
        throw InputError(
            fmt::format("\"{}\" is {}, expected a text", d.field, text::jinja::type_name(content)));
      }
      std::string label = name_of_label(column_of(row, d.label_field), d.label_field);
      of_text.clear();
      tokenizer.encode(content.text(), of_text, {.add_special_tokens = true});
      if (of_text.empty()) throw InputError(fmt::format("\"{}\" has no token", d.field));
      if (of_text.size() > limit) {
        ++num_long;
        if (d.long_chats == text::LongChats::kDrop) continue;
        of_text.resize(limit);
      }
      if (names.insert(label).second && names.size() > kMaxClasses) {
        throw InputError(fmt::format("more than {} different labels", kMaxClasses));
      }
      rows.push_back({where, std::move(label)});
    } catch (const InputError& error) {
      throw InputError(fmt::format("{}: {}", where, error.what()));
    }
    ids.insert(ids.end(), of_text.begin(), of_text.end());
    texts->begins.push_back(std::ssize(ids));
  }
  texts->classes =
      config.model.classes.empty() ? sorted_classes(names) : parse_classes(config.model.classes);
  for (const std::string& name : texts->classes) {
    if (!name.empty() && name.find(',') == std::string::npos) continue;
    throw InputError(fmt::format(
        "data.classify = {}: a class is called \"{}\", expected names without commas, or "
        "model.classes and labels that are indices of it",
        shorten(d.classify), shorten(name)));
  }
  if (texts->classes.size() < 2) {
    throw InputError(
        fmt::format("data.classify = {}: {} texts of {} files with {} different labels, "
                    "expected two or more",
                    shorten(d.classify), count, paths.size(), names.size()));
  }
  std::map<std::string, int32_t, std::less<>> index_of;
  for (const std::string& name : texts->classes) {
    index_of.emplace(name, static_cast<int32_t>(index_of.size()));
  }
  std::vector<int64_t> counts(texts->classes.size(), 0);
  for (const LabelledRow& row : rows) {
    const auto found = index_of.find(row.label);
    int64_t index = found != index_of.end() ? found->second : -1;
    if (index < 0 && is_whole_number(row.label)) index = std::stoll(row.label);
    if (index < 0 || index >= std::ssize(counts)) {
      throw InputError(fmt::format("{}: \"{}\" is {}, expected one of {}", row.where, d.label_field,
                                   shorten(row.label), join_few(texts->classes)));
    }
    texts->labels.push_back(static_cast<int32_t>(index));
    ++counts[static_cast<size_t>(index)];
  }
  std::vector<std::string> parts;
  for (size_t i = 0; i < counts.size(); ++i) {
    parts.push_back(fmt::format("{} {}", shorten(texts->classes[i]), counts[i]));
  }
  LoadedTexts loaded;
  loaded.summary = fmt::format("texts: {} of {} files, {} tokens, {} classes: {}", count,
                               paths.size(), ids.size(), counts.size(), join_few(parts));
  if (num_long > 0) {
    loaded.summary += fmt::format("; {} longer than model.context = {} tokens: {}", num_long, limit,
                                  d.long_chats == text::LongChats::kDrop ? "dropped" : "cut");
  }
  if (rows.empty()) {
    throw InputError(fmt::format("data.classify = {}: {}; expected at least one",
                                 shorten(d.classify), loaded.summary));
  }
  texts->tokens = TokenArray(ids, d.classify);
  loaded.texts = std::move(texts);
  return loaded;
}

TextSamples::TextSamples(std::shared_ptr<const LabelledTexts> texts, const SampleOptions& options,
                         double val_fraction, SplitPart part)
    : texts_(std::move(texts)),
      options_(options),
      split_(texts_->count(), val_fraction, 0),
      part_(part) {}

int64_t TextSamples::num_samples() const {
  return part_ == SplitPart::kTrain ? split_.num_train() : split_.num_val();
}

int64_t TextSamples::text_of(int64_t sample) const {
  if (part_ == SplitPart::kVal) return sample < num_samples() ? split_.val(sample) : -1;
  const int64_t epoch = sample / num_samples();
  const PhiloxKey key =
      make_key(options_.seed, hash_name("data order") + static_cast<uint64_t>(epoch));
  return split_.train(Permutation(num_samples(), key)(sample % num_samples()));
}

Batch TextSamples::batch(int64_t first_sample, int64_t B) const {
  constexpr int64_t kStep = 16;
  Batch batch;
  batch.B = B;
  std::vector<int64_t> indices;
  int64_t longest = 1;
  for (int64_t i = 0; i < B; ++i) {
    indices.push_back(text_of(first_sample + i));
    const bool is_there = indices.back() >= 0;
    const auto at = static_cast<size_t>(std::max<int64_t>(indices.back(), 0));
    batch.labels.push_back(is_there ? texts_->labels[at] : kIgnoredTarget);
    batch.lengths.push_back(is_there ? texts_->begins[at + 1] - texts_->begins[at] : 1);
    longest = std::max(longest, batch.lengths.back());
  }
  batch.T = std::min(options_.context, (longest + kStep - 1) / kStep * kStep);
  batch.inputs.assign(static_cast<size_t>(B * batch.T), 0);
  batch.targets.assign(batch.inputs.size(), kIgnoredTarget);
  batch.document_starts.assign(batch.inputs.size(), 0);
  for (int64_t row = 0; row < B; ++row) {
    const auto i = static_cast<size_t>(row);
    for (int64_t t = 0; t < batch.T; ++t) {
      const auto at = static_cast<size_t>(row * batch.T + t);
      // What fills a row up is seen by nobody.
      if (t >= batch.lengths[i]) {
        batch.document_starts[at] = static_cast<int32_t>(batch.lengths[i]);
      } else if (indices[i] >= 0) {
        const int64_t begin = texts_->begins[static_cast<size_t>(indices[i])];
        batch.inputs[at] = checked_id(texts_->tokens, begin + t, options_.vocab_size);
      }
    }
  }
  return batch;
}

int64_t TextSamples::num_targets(int64_t first_sample, int64_t count) const {
  if (part_ == SplitPart::kTrain) return count;
  return std::clamp<int64_t>(num_samples() - first_sample, 0, count);
}

int64_t TextSamples::num_tokens() const {
  int64_t total = 0;
  for (int64_t i = 0; i < num_samples(); ++i) {
    const auto text =
        static_cast<size_t>(part_ == SplitPart::kTrain ? split_.train(i) : split_.val(i));
    total += texts_->begins[text + 1] - texts_->begins[text];
  }
  return total;
}

ClassSum class_loss(nn::LanguageModel& model, const Batch& batch, const LossTerms& terms) {
  const std::vector<int32_t> lengths(batch.lengths.begin(), batch.lengths.end());
  const Tensor ids = from_values(std::span<const int32_t>(batch.inputs), {batch.B, batch.T});
  const Tensor logits = model.class_logits(ids, lengths, forward_options(batch));
  const Tensor labels = from_values(std::span<const int32_t>(batch.labels), {batch.B});
  return {cross_entropy(logits, labels,
                        CrossEntropyOptions{kIgnoredTarget, terms.z_loss, terms.label_smoothing}),
          logits.detach()};
}

ClassScores::ClassScores(int64_t num_classes)
    : right_(static_cast<size_t>(num_classes), 0),
      targets_(static_cast<size_t>(num_classes), 0),
      predictions_(static_cast<size_t>(num_classes), 0) {}

void ClassScores::add(const Tensor& logits, const Batch& batch) {
  constexpr size_t kMaxAhead = 2;
  const NoGrad no_grad;
  pending_.push_back({HostCopy(logits.to(kF32)), batch.labels});
  if (pending_.size() > kMaxAhead) take();
}

void ClassScores::take() {
  const Pending& batch = pending_.front();
  const size_t K = right_.size();
  const auto* logits = static_cast<const float*>(batch.logits.data());
  for (const int32_t label : batch.labels) {
    const float* const row = logits;
    logits += K;
    if (label == kIgnoredTarget) continue;
    const auto predicted = static_cast<size_t>(std::max_element(row, row + K) - row);
    ++targets_[static_cast<size_t>(label)];
    ++predictions_[predicted];
    right_[predicted] += predicted == static_cast<size_t>(label) ? 1 : 0;
  }
  pending_.pop_front();
}

ClassScores::Scores ClassScores::finish(dist::World& world) {
  while (!pending_.empty()) take();
  const size_t K = right_.size();
  std::vector<int64_t> mine;
  for (const auto* counts : {&right_, &targets_, &predictions_}) {
    mine.insert(mine.end(), counts->begin(), counts->end());
  }
  std::vector<int64_t> all(mine.size() * static_cast<size_t>(world.world_size()));
  world.control().all_gather(all.data(), mine.data(),
                             static_cast<int64_t>(mine.size() * sizeof(int64_t)));
  std::vector<int64_t> sums(mine.size(), 0);
  for (size_t i = 0; i < all.size(); ++i) sums[i % mine.size()] += all[i];
  double num_right = 0, num_texts = 0, f1 = 0, num_classes = 0;
  for (size_t k = 0; k < K; ++k) {
    const auto right = static_cast<double>(sums[k]), targets = static_cast<double>(sums[K + k]),
               predictions = static_cast<double>(sums[2 * K + k]);
    num_right += right, num_texts += targets;
    if (targets + predictions == 0) continue;
    f1 += 2 * right / (targets + predictions);
    ++num_classes;
  }
  return {num_texts > 0 ? num_right / num_texts : 0, num_classes > 0 ? f1 / num_classes : 0};
}

}  // namespace tessera::apps
