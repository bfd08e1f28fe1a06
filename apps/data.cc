#include "apps/data.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "apps/chats.h"
#include "apps/classification.h"
#include "apps/data/byte_stream.h"
#include "apps/data/text_files.h"
#include "apps/packed_samples.h"
#include "apps/preferences.h"
#include "apps/token_cache.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

constexpr int kHeaderInts = 256;
constexpr int64_t kHeaderNbytes = kHeaderInts * 4;
constexpr int32_t kMagicU16 = 20240520, kVersionU16 = 1;
constexpr int32_t kMagicU32 = 20240801, kVersionU32 = 7;

Corpus load_shards(const char* key, const std::string& pattern) {
  Corpus corpus;
  for (const std::string& path : files_of_globs(key, {pattern}, "token shards")) {
    corpus.shards.push_back(load_token_shard(path));
  }
  return corpus;
}

/// The corpus in two: the first `num_tokens` and the rest.
std::pair<Corpus, Corpus> split_corpus(const Corpus& corpus, int64_t num_tokens) {
  std::pair<Corpus, Corpus> parts;
  for (const TokenArray& shard : corpus.shards) {
    const int64_t here = std::min(shard.num_tokens(), num_tokens);
    if (here > 0) parts.first.shards.push_back(shard.slice(0, here));
    if (here < shard.num_tokens()) {
      parts.second.shards.push_back(shard.slice(here, shard.num_tokens() - here));
    }
    num_tokens -= here;
  }
  return parts;
}

/// Where validation pieces come from all over the data: each piece of `corpus` gives its end. A
/// piece is long enough for some windows of validation.
std::pair<Corpus, Corpus> interleave_corpus(const Corpus& corpus, double val_fraction,
                                            int64_t context) {
  constexpr int64_t kMaxPieces = 64, kWindows = 8;
  std::pair<Corpus, Corpus> parts;
  for (const TokenArray& shard : corpus.shards) {
    const int64_t numel = shard.num_tokens();
    const auto val_numel = static_cast<int64_t>(static_cast<double>(numel) * val_fraction);
    const int64_t pieces =
        std::clamp<int64_t>(val_numel / (kWindows * (context + 1)), 1, kMaxPieces);
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t begin = numel * i / pieces, end = numel * (i + 1) / pieces;
      const int64_t kept = end - begin - val_numel / pieces;
      if (kept > 0) parts.first.shards.push_back(shard.slice(begin, kept));
      if (begin + kept < end) {
        parts.second.shards.push_back(shard.slice(begin + kept, end - begin - kept));
      }
    }
  }
  return parts;
}

/// One text as one array of tokens.
TokenArray load_text(const TextSource& source, std::shared_ptr<text::Tokenizer>& tokenizer) {
  const std::string& path = source.paths[0];
  const bool is_char = tokenizer == nullptr, is_byte = !is_char && tokenizer->name() == "byte";
  const bool replaces = is_char && source.documents.invalid == InvalidText::kReplace;
  if (compression_of_name(path) != Compression::kNone || replaces || (!is_char && !is_byte)) {
    if (is_char) tokenizer = char_tokenizer_of({source});
    return encode_documents(source, *tokenizer).tokens;
  }
  const auto file = std::make_shared<MappedFile>(path);
  if (file->nbytes() == 0) {
    throw InputError(fmt::format("{}: 0 bytes, expected a text to train on", path));
  }
  if (const auto format = packed_format(file->text()); !format.empty()) {
    throw InputError(
        fmt::format("{}: it looks like {}, expected a text (unpack it first)", path, format));
  }
  if (is_byte) return TokenArray(file, file->data(), 1, file->nbytes(), path);
  try {
    tokenizer = text::make_char_tokenizer(file->text());
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", path, error.what()));
  }
  TokenArray tokens(tokenizer->encode(file->text()), path);
  file->check();
  return tokens;
}

/// Where the windows of each shard begin in one numbering, and their total.
template <class F>
std::vector<int64_t> number_samples(const Corpus& corpus, F&& num_samples_of) {
  std::vector<int64_t> first{0};
  for (const TokenArray& shard : corpus.shards)
    first.push_back(first.back() + num_samples_of(shard));
  return first;
}

size_t shard_of(const std::vector<int64_t>& first_sample, int64_t sample) {
  const auto after = std::upper_bound(first_sample.begin(), first_sample.end(), sample);
  return static_cast<size_t>(after - first_sample.begin()) - 1;
}

/// In blocks of a fixed length, which the compiler turns into vectors: as fast as a disk.
template <class T>
int64_t largest_of(const uint8_t* data, int64_t numel) {
  constexpr int64_t kBlock = 1024;
  std::array<T, kBlock> largest{}, block;
  for (; numel >= kBlock; numel -= kBlock, data += sizeof(block)) {
    std::memcpy(block.data(), data, sizeof(block));
    for (size_t i = 0; i < kBlock; ++i) largest[i] = std::max(largest[i], block[i]);
  }
  std::memcpy(block.data(), data, static_cast<size_t>(numel) * sizeof(T));
  const auto end = block.begin() + numel;
  const T rest = numel > 0 ? *std::max_element(block.begin(), end) : T{0};
  return std::max(rest, *std::max_element(largest.begin(), largest.end()));
}

Batch make_batch(int64_t B, const SampleOptions& options) {
  Batch batch;
  batch.B = B;
  batch.T = options.context;
  const size_t numel = static_cast<size_t>(B * options.context);
  batch.inputs.assign(numel, 0);
  batch.targets.assign(numel, kIgnoredTarget);
  if (options.separator >= 0) {
    batch.document_starts.assign(numel, 0);
    if (options.restart_positions) batch.positions.assign(numel, 0);
  }
  return batch;
}

/// Row `row` from the tokens at `begin`, as many as there are.
/// What is drawn of a row, by its sample alone.
PhiloxKey mask_key(const SampleOptions& options, std::string_view stream, int64_t sample) {
  return make_key(options.seed, hash_name(stream) + static_cast<uint64_t>(sample));
}

/// Chooses the targets of the `length` inputs at `offset`, and hides most of them.
void mask_row(Batch& batch, size_t offset, int64_t length, const SampleOptions& options,
              PhiloxKey key) {
  constexpr uint32_t kDraws = 16;  // counters beyond those of the permutation
  constexpr double kReplaced = 0.8, kRandom = 0.9;
  const Permutation order(length, key);
  const int64_t count = num_masked(length, options.mask_probability);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = order(i);
    const auto drawn = philox(key, kDraws, static_cast<uint64_t>(t));
    int32_t& input = batch.inputs[offset + static_cast<size_t>(t)];
    batch.targets[offset + static_cast<size_t>(t)] = input;
    const double u = static_cast<double>(drawn[0]) * 0x1p-32;
    if (u < kReplaced) {
      input = static_cast<int32_t>(options.mask_token);
    } else if (u < kRandom) {
      input = static_cast<int32_t>(drawn[1] % static_cast<uint64_t>(options.vocab_size));
    }
  }
  batch.num_valid += count;
}

void fill_row(Batch& batch, int64_t row, const TokenArray& shard, int64_t begin,
              const SampleOptions& options, PhiloxKey masks) {
  const size_t offset = static_cast<size_t>(row * batch.T);
  const int64_t length = std::min(batch.T, shard.num_tokens() - 1 - begin);
  const bool is_masked = options.mask_token >= 0;
  int32_t next = checked_id(shard, begin, options.vocab_size);
  for (int64_t t = 0; t < length; ++t) {
    batch.inputs[offset + static_cast<size_t>(t)] = next;
    next = checked_id(shard, begin + t + 1, options.vocab_size);
    if (!is_masked) batch.targets[offset + static_cast<size_t>(t)] = next;
  }
  shard.check();
  if (!is_masked) batch.num_valid += length;
  if (options.separator >= 0) {
    int32_t start = 0;
    for (int64_t t = 0; t < batch.T; ++t) {
      const size_t i = offset + static_cast<size_t>(t);
      if (batch.inputs[i] == options.separator && t < length) start = static_cast<int32_t>(t);
      batch.document_starts[i] = start;
      if (options.restart_positions) batch.positions[i] = static_cast<int32_t>(t) - start;
    }
  }
  if (is_masked) mask_row(batch, offset, length, options, masks);
}

}  // namespace

int32_t checked_id(const TokenArray& shard, int64_t i, int64_t vocab_size) {
  const int64_t id = shard[i];
  if (id >= vocab_size) {
    throw InputError(fmt::format("{}: token {} is {}, expected one below the vocabulary's size {}",
                                 shard.name(), shard.first() + i, id, vocab_size));
  }
  return static_cast<int32_t>(id);
}

TokenArray::TokenArray(std::shared_ptr<const MappedFile> file, const void* data,
                       int bytes_per_token, int64_t num_tokens, std::string name)
    : file_(std::move(file)),
      data_(static_cast<const uint8_t*>(data)),
      bytes_per_token_(bytes_per_token),
      num_tokens_(num_tokens),
      name_(std::move(name)) {}

TokenArray::TokenArray(const std::vector<int32_t>& ids, std::string name)
    : num_tokens_(static_cast<int64_t>(ids.size())), name_(std::move(name)) {
  const int32_t largest = ids.empty() ? 0 : *std::max_element(ids.begin(), ids.end());
  const auto keep = [&]<class T>(T) {
    auto copy = std::make_shared<std::vector<T>>(ids.begin(), ids.end());
    data_ = reinterpret_cast<const uint8_t*>(copy->data());
    bytes_per_token_ = sizeof(T);
    owner_ = std::move(copy);
  };
  if (largest < 256)
    keep(uint8_t{});
  else if (largest < 65536)
    keep(uint16_t{});
  else
    keep(uint32_t{});
}

int64_t TokenArray::operator[](int64_t i) const {
  const uint8_t* p = data_ + i * bytes_per_token_;
  if (bytes_per_token_ == 1) return *p;
  if (bytes_per_token_ == 2) {
    uint16_t value;
    std::memcpy(&value, p, sizeof(value));
    return value;
  }
  uint32_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

void TokenArray::check() const {
  if (file_ != nullptr) file_->check();
}

TokenArray TokenArray::slice(int64_t begin, int64_t num_tokens) const {
  TokenArray part = *this;
  part.data_ += begin * bytes_per_token_;
  part.num_tokens_ = num_tokens;
  part.first_ += begin;
  return part;
}

int64_t TokenArray::largest(int64_t begin, int64_t end) const {
  if (begin >= end) return -1;
  const uint8_t* data = data_ + begin * bytes_per_token_;
  if (bytes_per_token_ == 1) return largest_of<uint8_t>(data, end - begin);
  if (bytes_per_token_ == 2) return largest_of<uint16_t>(data, end - begin);
  return largest_of<uint32_t>(data, end - begin);
}

TokenArray load_token_shard(const std::string& path) {
  const auto file = std::make_shared<MappedFile>(path);
  if (file->nbytes() < kHeaderNbytes) {
    throw InputError(fmt::format("{}: {} bytes, expected a token shard with a header of {} bytes",
                                 path, file->nbytes(), kHeaderNbytes));
  }
  int32_t header[3];
  std::memcpy(header, file->data(), sizeof(header));
  const bool is_u16 = header[0] == kMagicU16;
  if (!is_u16 && header[0] != kMagicU32) {
    throw InputError(
        fmt::format("{}: magic {}, expected {} (uint16 tokens) or {} (uint32 tokens); a stream of "
                    "tokens without the header of llm.c is not accepted",
                    path, header[0], kMagicU16, kMagicU32));
  }
  const int32_t version = is_u16 ? kVersionU16 : kVersionU32;
  if (header[1] != version) {
    throw InputError(fmt::format("{}: version {}, expected {}", path, header[1], version));
  }
  const int bytes_per_token = is_u16 ? 2 : 4;
  const int64_t num_tokens = header[2];
  const int64_t expected = kHeaderNbytes + num_tokens * bytes_per_token;
  if (num_tokens < 0 || file->nbytes() != expected) {
    throw InputError(
        fmt::format("{}: {} bytes, expected {} = header of {} + {} tokens (as it says) of {} bytes",
                    path, file->nbytes(), expected, kHeaderNbytes, num_tokens, bytes_per_token));
  }
  return TokenArray(file, file->data() + kHeaderNbytes, bytes_per_token, num_tokens, path);
}

int64_t Corpus::num_tokens() const {
  int64_t total = 0;
  for (const TokenArray& shard : shards) total += shard.num_tokens();
  return total;
}

std::string short_shards(const Corpus& corpus, int64_t context) {
  constexpr size_t kMostNames = 5;
  std::vector<std::string> names;
  for (const TokenArray& shard : corpus.shards) {
    if (shard.num_tokens() < context + 1) names.push_back(shard.name());
  }
  if (names.empty()) return "";
  return fmt::format(
      "data: {} of {} shards have fewer than model.context + 1 = {} tokens and are not trained "
      "on: {}",
      names.size(), corpus.shards.size(), context + 1, join_few(names, ", ", kMostNames));
}

namespace {

bool is_named_as_rows(std::string_view name) {
  return name.ends_with(".jsonl") || name.ends_with(".ndjson") || name.ends_with(".parquet");
}

bool is_pattern(const std::string& path) {
  return path.find_first_of("*?[") != std::string::npos;
}

}  // namespace

bool may_have_documents(const DataConfig& d) {
  if (d.text.empty()) return !d.sources.empty();
  return is_pattern(d.text) || is_named_as_rows(name_without_compression(d.text));
}

namespace {

std::vector<TextSource> text_sources(const Config& config) {
  std::vector<TextSource> sources;
  DocumentOptions documents;
  documents.field = config.data.field;
  documents.invalid = config.data.invalid;
  if (!config.data.text.empty()) {
    TextSource& source = sources.emplace_back();
    source.name = config.data.text;
    source.documents = documents;
    // One that is no pattern is opened by who reads it, and says so if it cannot be.
    source.paths = {config.data.text};
    if (is_pattern(config.data.text)) {
      source.paths =
          files_of_globs("data.text", {config.data.text}, "texts, JSON lines or Parquet files");
    }
    if (source.paths.size() > 1) return sources;
    const std::string_view name = name_without_compression(source.paths[0]);
    // One file that is given by its name is a text whatever it is called.
    source.is_one_text = !is_named_as_rows(name);
    if (source.is_one_text) source.documents.format = FileFormat::kText;
    return sources;
  }
  if (config.data.sources.empty()) return sources;
  for (const auto& [pattern, weight] : parse_sources(config.data.sources)) {
    TextSource source{.name = pattern, .paths = {}, .documents = documents};
    for (std::string& path :
         files_of_globs("data.sources", {pattern}, "token shards or documents")) {
      if (!path.ends_with(".bin")) source.paths.push_back(std::move(path));
    }
    if (!source.paths.empty()) sources.push_back(std::move(source));
  }
  return sources;
}

std::shared_ptr<text::Tokenizer> open_tokenizer(const Config& config) {
  const std::string& name = config.data.tokenizer;
  if (name == "char") return nullptr;
  if (name == "byte") return text::make_byte_tokenizer();
  struct stat status {};
  if (::stat(name.c_str(), &status) != 0) {
    throw ConfigError(
        fmt::format("{}: data.tokenizer = {}: {}, expected byte, char, or the path of "
                    "a tokenizer.json or of a directory with one",
                    config.origin("data.tokenizer"), name, std::strerror(errno)));
  }
  return text::load_tokenizer(name);
}

}  // namespace

Texts open_texts(const Config& config) {
  Texts texts{.sources = text_sources(config), .chats = nullptr, .tokenizer = nullptr};
  const bool has_chats = !config.data.chat.empty(), has_pairs = !config.data.preference.empty();
  const bool classifies = !config.data.classify.empty();
  const bool needs_words = has_chats || has_pairs || classifies;
  if (!texts.sources.empty() || needs_words) texts.tokenizer = open_tokenizer(config);
  if (!needs_words) return texts;
  if (texts.tokenizer == nullptr) {
    throw ConfigError(
        fmt::format("{}: data.tokenizer = {} with data.{}, expected byte or the path of a "
                    "tokenizer",
                    config.origin("data.tokenizer"), config.data.tokenizer,
                    classifies  ? "classify"
                    : has_pairs ? "preference"
                                : "chat"));
  }
  if (!has_chats) return texts;
  texts.chats = std::make_shared<const ChatSource>(
      open_chats(config, folder_of_tokenizer(config.data.tokenizer)));
  return texts;
}

bool Texts::has_caches() const {
  if (chats != nullptr) return true;
  if (sources.empty() || tokenizer == nullptr || tokenizer->name() == "char") return false;
  return !(tokenizer->name() == "byte" && sources[0].is_one_text &&
           compression_of_name(sources[0].paths[0]) == Compression::kNone);
}

int64_t Batch::num_counted() const {
  if (!labels.empty()) {
    return std::ssize(labels) - std::count(labels.begin(), labels.end(), kIgnoredTarget);
  }
  return references.empty() ? num_valid : num_pairs;
}

Data load_data(const Config& config, Texts texts, const std::vector<std::string>& caches,
               int threads) {
  Data data;
  Corpus all;
  data.tokenizer = texts.tokenizer;
  bool has_documents = false;  // of texts
  if (!config.data.classify.empty()) {
    LoadedTexts loaded = load_labelled_texts(config, *data.tokenizer);
    data.texts = std::move(loaded.texts);
    data.chats = std::move(loaded.summary);
  } else if (!config.data.preference.empty()) {
    LoadedPreferences loaded =
        load_preferences(config, data.tokenizer, folder_of_tokenizer(config.data.tokenizer));
    data.pairs = std::move(loaded.pairs);
    data.chats = std::move(loaded.summary);
    if (!config.data.chat_template.empty()) data.chat_template = loaded.chat_template->source();
  } else if (texts.chats != nullptr) {
    TokenDocuments chats = caches.empty() ? encode_chats(*texts.chats, data.tokenizer, threads)
                                          : open_token_cache(caches[0]);
    data.chats = fit_chats(chats, *texts.chats, config.model.context, config.data.long_chats);
    if (!config.data.chat_template.empty()) {
      data.chat_template = texts.chats->chat_template->source();
    }
    data.sources = std::make_shared<const std::vector<TokenSource>>(
        std::vector<TokenSource>{{texts.chats->name, 0, {std::move(chats)}}});
  } else if (!config.data.sources.empty()) {
    data.sources = load_sources(config, texts.sources, caches, data.tokenizer);
    has_documents = !texts.sources.empty();
  } else if (!texts.sources.empty() && texts.sources[0].is_one_text) {
    all.shards.push_back(caches.empty() ? load_text(texts.sources[0], data.tokenizer)
                                        : open_token_cache(caches[0]).tokens);
  } else if (!texts.sources.empty()) {
    data.sources = load_documents(texts.sources[0], caches, data.tokenizer);
    has_documents = true;
  } else {
    all = load_shards("data.tokens", config.data.tokens);
  }
  if (has_documents && config.data.document_tokens == DocumentMarks::kAuto) {
    data.document_tokens = text::document_tokens(*data.tokenizer);
  }
  if (data.sources == nullptr && config.data.restart_positions && config.data.separator < 0) {
    throw ConfigError(fmt::format(
        "{}: data.restart_positions = true with one text, which has no documents, expected "
        "data.separator to be set",
        config.origin("data.restart_positions")));
  }
  if (data.sources != nullptr) {
    if (config.data.mask_token >= 0) {
      throw ConfigError(
          fmt::format("{}: data.mask_token with documents, expected one text or data.tokens",
                      config.origin("data.mask_token")));
    }
    for (const TokenSource& source : *data.sources) {
      for (const TokenDocuments& shard : source.shards) {
        all.shards.push_back(shard.tokens);
        if (shard.is_target.num_tokens() > 0) all.targets.push_back(shard.is_target);
      }
    }
  }
  if (data.texts != nullptr) {
    all.shards.push_back(data.texts->tokens);
    all.targets.push_back(TokenArray(data.texts->labels, config.data.classify));
  }
  if (data.pairs != nullptr) {
    all.shards.push_back(data.pairs->tokens);
    all.targets.push_back(data.pairs->is_target);
  }
  for (const TokenArray& shard : all.shards) {
    if (shard.is_mapped()) data.files.push_back(shard);
  }
  data.num_train_files = data.files.size();
  if (data.is_split_by_rows()) {
    data.train = std::move(all);  // split by document, or by pair
  } else if (!config.data.val_tokens.empty()) {
    data.train = std::move(all);
    data.val = load_shards("data.val_tokens", config.data.val_tokens);
    data.files.insert(data.files.end(), data.val.shards.begin(), data.val.shards.end());
  } else {
    const int64_t num_tokens = all.num_tokens();
    const double kept = static_cast<double>(num_tokens) * (1 - config.data.val_fraction);
    std::tie(data.train, data.val) =
        config.data.val_split == ValSplit::kTail
            ? split_corpus(all, static_cast<int64_t>(kept))
            : interleave_corpus(all, config.data.val_fraction, config.model.context);
  }
  const int64_t own = data.tokenizer == nullptr ? 0 : data.tokenizer->vocab_size();
  data.vocab_size = config.model.vocab == 0 ? own : config.model.vocab;
  if (data.vocab_size < own) {
    throw ConfigError(fmt::format("{}: model.vocab = {}, expected at least the tokenizer's {}",
                                  config.origin("model.vocab"), data.vocab_size, own));
  }
  if (config.data.mask_token >= data.vocab_size) {
    throw ConfigError(fmt::format("{}: data.mask_token = {}, expected an id below model.vocab = {}",
                                  config.origin("data.mask_token"), config.data.mask_token,
                                  data.vocab_size));
  }
  return data;
}

int64_t num_masked(int64_t length, double probability) {
  const auto rounded =
      static_cast<int64_t>(std::llround(static_cast<double>(length) * probability));
  return std::clamp<int64_t>(rounded, 1, length);
}

TrainSamples::TrainSamples(Corpus corpus, const SampleOptions& options)
    : corpus_(std::move(corpus)), options_(options) {
  first_sample_ = number_samples(corpus_, [&](const TokenArray& shard) {
    return std::max<int64_t>(shard.num_tokens() - 1, 0) / options_.context;
  });
  if (num_samples() == 0) {
    throw InputError(
        fmt::format("data: {} tokens to train on in {} shards, expected at least one shard of "
                    "model.context + 1 = {}",
                    corpus_.num_tokens(), corpus_.shards.size(), options_.context + 1));
  }
}

int64_t TrainSamples::window_of(int64_t global_sample) const {
  const int64_t epoch = global_sample / num_samples();
  const PhiloxKey key =
      make_key(options_.seed, hash_name("data order") + static_cast<uint64_t>(epoch));
  return Permutation(num_samples(), key)(global_sample % num_samples());
}

Batch TrainSamples::batch(int64_t first_global_sample, int64_t B) const {
  Batch batch = make_batch(B, options_);
  for (int64_t row = 0; row < B; ++row) {
    const int64_t epoch = (first_global_sample + row) / num_samples();
    const int64_t window = window_of(first_global_sample + row);
    const size_t index = shard_of(first_sample_, window);
    const TokenArray& shard = corpus_.shards[index];
    const int64_t windows = first_sample_[index + 1] - first_sample_[index];
    const int64_t spare = shard.num_tokens() - 1 - windows * options_.context;
    const PhiloxKey key = make_key(options_.seed, hash_name("data shift"));
    const uint64_t drawn = philox(key, static_cast<uint64_t>(epoch), index)[0];
    const int64_t shift =
        epoch == 0 ? 0 : static_cast<int64_t>(drawn % static_cast<uint64_t>(spare + 1));
    fill_row(batch, row, shard, (window - first_sample_[index]) * options_.context + shift,
             options_, mask_key(options_, "data masks", first_global_sample + row));
  }
  return batch;
}

int64_t TrainSamples::num_targets(int64_t, int64_t count) const {
  return count * (options_.mask_token < 0
                      ? options_.context
                      : num_masked(options_.context, options_.mask_probability));
}

EvalSamples::EvalSamples(Corpus corpus, const SampleOptions& options)
    : corpus_(std::move(corpus)), options_(options) {
  first_sample_ = number_samples(corpus_, [&](const TokenArray& shard) {
    const int64_t num_targets = std::max<int64_t>(shard.num_tokens() - 1, 0);
    return (num_targets + options_.context - 1) / options_.context;
  });
}

Batch EvalSamples::batch(int64_t first_sample, int64_t B) const {
  Batch batch = make_batch(B, options_);
  for (int64_t row = 0; row < B && first_sample + row < num_samples(); ++row) {
    const size_t index = shard_of(first_sample_, first_sample + row);
    const int64_t window = first_sample + row - first_sample_[index];
    fill_row(batch, row, corpus_.shards[index], window * options_.context, options_,
             mask_key(options_, "validation masks", first_sample + row));
  }
  return batch;
}

}  // namespace tessera::apps
