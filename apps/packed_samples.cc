#include "apps/packed_samples.h"

#include <algorithm>
#include <charconv>

#include "apps/encode_documents.h"
#include "apps/text/unicode.h"
#include "apps/token_cache.h"
#include "core/check.h"
#include "core/split.h"
#include "core/text.h"
#include "core/utf8.h"

namespace tessera::apps {

/// The documents of a source that a part has, in one numbering.
struct PackedSamples::Source {
  const TokenSource& tokens;
  DocumentSplit split;
  SplitPart part;
  std::vector<int64_t> first;  // of each shard
  bool has_separator;

  struct Place {
    const TokenDocuments& documents;
    int64_t begin, end;
    /// Token i of the document, which is in it, or a separator.
    bool is_target(int64_t i) const {
      const TokenArray& targets = documents.is_target;
      return targets.num_tokens() == 0 || i < 0 || i >= end - begin || targets[begin + i] != 0;
    }
  };
  Place place(int64_t document) const {
    const int64_t i = part == SplitPart::kTrain ? split.train(document) : split.val(document);
    const auto after = std::upper_bound(first.begin(), first.end(), i);
    const auto shard = static_cast<size_t>(after - first.begin()) - 1;
    const TokenDocuments& documents = tokens.shards[shard];
    const auto k = static_cast<size_t>(i - first[shard]);
    return {documents, documents.begins[k], documents.ends[k]};
  }
  int64_t num_documents() const {
    return part == SplitPart::kTrain ? split.num_train() : split.num_val();
  }
  int64_t num_positions(int64_t document) const {
    const Place at = place(document);
    return std::max<int64_t>(at.end - at.begin + (has_separator ? 1 : -1), 0);
  }
};

TokenDocuments find_documents(const TokenArray& tokens, int32_t separator) {
  TokenDocuments documents;
  documents.tokens = tokens;
  int64_t begin = 0;
  const auto add = [&](int64_t end) {
    if (end == begin) return;
    documents.begins.push_back(begin);
    documents.ends.push_back(end);
  };
  for (int64_t i = 0; i < tokens.num_tokens(); ++i) {
    if (tokens[i] != separator) continue;
    add(i);
    begin = i + 1;
  }
  add(tokens.num_tokens());
  tokens.check();
  return documents;
}

std::vector<std::pair<std::string, double>> parse_sources(const std::string& text) {
  std::vector<std::pair<std::string, double>> sources;
  for (std::string_view part : split(text)) {
    double weight = 0;
    if (const size_t colon = part.rfind(':'); colon != std::string_view::npos) {
      const std::string_view number = trimmed(part.substr(colon + 1));
      const auto [stop, error] =
          std::from_chars(number.data(), number.data() + number.size(), weight);
      if (error == std::errc() && stop == number.data() + number.size()) {
        if (!(weight > 0 && weight <= 1e9)) {
          throw ConfigError(fmt::format("= \"{}\": weight {}, expected a number > 0", shorten(text),
                                        shorten(number)));
        }
        part = trimmed(part.substr(0, colon));
      } else {
        weight = 0;  // the colon is of the path
      }
    }
    if (part.empty()) {
      throw ConfigError(
          fmt::format("= \"{}\": an empty path, expected PATH or PATH: WEIGHT between "
                      "commas",
                      shorten(text)));
    }
    sources.emplace_back(part, weight);
  }
  const auto has_weight = [](const auto& source) { return source.second > 0; };
  if (std::any_of(sources.begin(), sources.end(), has_weight) &&
      !std::all_of(sources.begin(), sources.end(), has_weight)) {
    throw ConfigError(fmt::format("= \"{}\": weights of some, expected one of each source or none",
                                  shorten(text)));
  }
  return sources;
}

std::shared_ptr<text::Tokenizer> char_tokenizer_of(const std::vector<TextSource>& sources) {
  std::vector<bool> is_known(text::kNumCodes);
  std::string characters;
  for (const TextSource& source : sources) {
    DocumentReader reader(source.paths, source.documents);
    for (Document document; reader.next(document);) {
      text::for_each_character(document.text, [&](char32_t c) {
        if (is_known[c]) return;
        is_known[c] = true;
        append_utf8(characters, c);
      });
    }
  }
  return text::make_char_tokenizer(characters);
}

TokenDocuments encode_documents(const TextSource& source, const text::Tokenizer& tokenizer) {
  TokenDocuments documents;
  std::vector<int32_t> ids;
  DocumentReader reader(source.paths, source.documents);
  DocumentEncoder encoder(tokenizer, reader, {});
  int64_t last_end = 0;
  while (const auto batch = encoder.next()) {
    for (size_t i = 0; i < batch->parts.size(); ++i) {
      ids.insert(ids.end(), batch->ids[i].begin(), batch->ids[i].end());
      if (!batch->parts[i].is_last || std::ssize(ids) == last_end) continue;
      documents.begins.push_back(last_end);
      documents.ends.push_back(last_end = std::ssize(ids));
    }
  }
  if (ids.empty()) {
    throw InputError(
        fmt::format("{}: no token in {} files, expected a text", source.name, source.paths.size()));
  }
  documents.tokens = TokenArray(ids, source.name);
  return documents;
}

std::shared_ptr<const std::vector<TokenSource>> load_sources(
    const Config& config, const std::vector<TextSource>& texts,
    const std::vector<std::string>& caches, std::shared_ptr<text::Tokenizer>& tokenizer) {
  auto sources = std::make_shared<std::vector<TokenSource>>();
  if (!texts.empty() && tokenizer == nullptr) tokenizer = char_tokenizer_of(texts);
  size_t next_text = 0;
  for (const auto& [pattern, weight] : parse_sources(config.data.sources)) {
    TokenSource& source = sources->emplace_back();
    source.name = pattern;
    source.weight = weight;
    for (const std::string& path :
         files_of_globs("data.sources", {pattern}, "token shards or documents")) {
      if (!path.ends_with(".bin")) continue;
      if (config.data.separator < 0) {
        throw ConfigError(
            fmt::format("{}: data.sources with token shards, expected data.separator, "
                        "the token between documents, to be set",
                        config.origin("data.sources")));
      }
      source.shards.push_back(
          find_documents(load_token_shard(path), static_cast<int32_t>(config.data.separator)));
    }
    if (next_text == texts.size() || texts[next_text].name != pattern) continue;
    source.shards.push_back(caches.empty() ? encode_documents(texts[next_text], *tokenizer)
                                           : open_token_cache(caches.at(next_text)));
    ++next_text;
  }
  return sources;
}

std::shared_ptr<const std::vector<TokenSource>> load_documents(
    const TextSource& text, const std::vector<std::string>& caches,
    std::shared_ptr<text::Tokenizer>& tokenizer) {
  if (tokenizer == nullptr) tokenizer = char_tokenizer_of({text});
  auto sources = std::make_shared<std::vector<TokenSource>>();
  sources->push_back(
      {text.name,
       0,
       {caches.empty() ? encode_documents(text, *tokenizer) : open_token_cache(caches.at(0))}});
  return sources;
}

std::string sources_text(const PackPlan& plan, const std::vector<TokenSource>& sources,
                         int64_t num_windows) {
  std::string text;
  const auto progress = plan.progress(num_windows);
  for (size_t i = 0; i < sources.size(); ++i) {
    int64_t count = 0;
    for (const TokenDocuments& shard : sources[i].shards) count += shard.count();
    text += fmt::format("{}source {}: {} documents, {:.2f} passes, {:.1f} % of the positions",
                        i == 0 ? "" : "\n", shorten(sources[i].name), count, progress[i].passes,
                        progress[i].share * 100);
  }
  return text;
}

PackedSamples::PackedSamples(std::shared_ptr<const std::vector<TokenSource>> sources,
                             const SampleOptions& options, double val_fraction, SplitPart part)
    : tokens_(std::move(sources)), options_(options), part_(part) {
  std::vector<PackSource> packed;
  int64_t num_documents = 0;
  for (const TokenSource& tokens : *tokens_) {
    std::vector<int64_t> first;
    int64_t count = 0;
    for (const TokenDocuments& shard : tokens.shards)
      first.push_back(count), count += shard.count();
    auto source = std::make_shared<const Source>(
        Source{tokens, DocumentSplit(count, val_fraction, sources_.size()), part, std::move(first),
               options.separator >= 0});
    num_documents += source->num_documents();
    // Validation is the same whatever the weights: each of its documents once.
    packed.push_back({tokens.name, source->num_documents(),
                      [source](int64_t document) { return source->num_positions(document); },
                      part == SplitPart::kTrain ? tokens.weight : 0});
    sources_.push_back(std::move(source));
  }
  if (part == SplitPart::kVal && num_documents == 0) return;
  const uint64_t seed = part == SplitPart::kTrain ? options.seed : 0;
  plan_ = std::make_unique<PackPlan>(std::move(packed),
                                     PackOptions{.context = options.context, .seed = seed});
  num_samples_ = plan_->has_weights()
                     ? (plan_->num_positions() + options.context - 1) / options.context
                     : plan_->windows_of_first_epoch();
}

void PackedSamples::fill_row(Batch& batch, int64_t row, const std::vector<Piece>& pieces) const {
  const int64_t offset = row * batch.T;
  const int64_t begins_with =
      options_.document_begin >= 0 ? options_.document_begin : options_.separator;
  int64_t t = 0;
  for (const Piece& piece : pieces) {
    const Source::Place at = sources_[static_cast<size_t>(piece.source)]->place(piece.document);
    const TokenArray& tokens = at.documents.tokens;
    // Token i of the document, with what begins it before and the separator behind it.
    const auto token = [&](int64_t i) {
      if (i < 0) return static_cast<int32_t>(begins_with);
      return i < at.end - at.begin ? checked_id(tokens, at.begin + i, options_.vocab_size)
                                   : static_cast<int32_t>(options_.separator);
    };
    const int64_t shift = options_.separator >= 0 ? -1 : 0;  // of an input behind its position
    const auto start = static_cast<int32_t>(t);
    int32_t next = token(piece.begin + shift);
    for (int64_t k = 0; k < piece.length; ++k, ++t) {
      const auto i = static_cast<size_t>(offset + t);
      batch.inputs[i] = next;
      next = token(piece.begin + k + shift + 1);
      if (at.is_target(piece.begin + k + shift + 1)) {
        batch.targets[i] = next;
        ++batch.num_valid;
      }
      batch.document_starts[i] = start;
      if (options_.restart_positions) batch.positions[i] = static_cast<int32_t>(t) - start;
    }
    tokens.check();
  }
  const auto start = static_cast<int32_t>(t);
  for (; t < batch.T; ++t) {
    const auto i = static_cast<size_t>(offset + t);
    batch.document_starts[i] = start;
    if (options_.restart_positions) batch.positions[i] = static_cast<int32_t>(t) - start;
  }
}

int64_t PackedSamples::num_targets(const Piece& piece) const {
  const Source& source = *sources_[static_cast<size_t>(piece.source)];
  const Source::Place at = source.place(piece.document);
  if (at.documents.is_target.num_tokens() == 0) return piece.length;
  int64_t targets = 0;
  const int64_t first = piece.begin + (options_.separator >= 0 ? 0 : 1);
  for (int64_t i = first; i < first + piece.length; ++i) targets += at.is_target(i) ? 1 : 0;
  return targets;
}

int64_t PackedSamples::num_targets(int64_t first_sample, int64_t count) const {
  int64_t targets = 0;
  for (int64_t i = first_sample; i < first_sample + count; ++i) {
    if (part_ == SplitPart::kVal && i >= num_samples_) break;
    for (const Piece& piece : plan_->window(i)) targets += num_targets(piece);
  }
  return targets;
}

Batch PackedSamples::batch(int64_t first_sample, int64_t B) const {
  Batch batch;
  batch.B = B;
  batch.T = options_.context;
  const auto numel = static_cast<size_t>(B * options_.context);
  batch.inputs.assign(numel, 0);
  batch.targets.assign(numel, kIgnoredTarget);
  batch.document_starts.assign(numel, 0);
  if (options_.restart_positions) batch.positions.assign(numel, 0);
  for (int64_t row = 0; row < B; ++row) {
    const int64_t sample = first_sample + row;
    const bool is_padding = part_ == SplitPart::kVal && sample >= num_samples_;
    fill_row(batch, row, is_padding ? std::vector<Piece>{} : plan_->window(sample));
  }
  return batch;
}

}  // namespace tessera::apps
