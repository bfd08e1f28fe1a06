#include "apps/text/hf_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "apps/text/bpe.h"
#include "core/check.h"
#include "core/text.h"

namespace tessera::text {
namespace {

constexpr std::string_view kMark = "\xe2\x96\x81";  // of SentencePiece
constexpr size_t kMaxCachedNbytes = 256;

/// Settings of a call of Hugging Face's, which are read and left alone.
void check_call_settings(const JsonNode& truncation, const JsonNode& padding) {
  if (!truncation.is_null()) {
    truncation.check_keys({"direction", "max_length", "strategy", "stride"});
    if (!truncation["direction"].is_null()) truncation["direction"].one_of({"Left", "Right"});
    truncation["strategy"].one_of({"LongestFirst", "OnlyFirst", "OnlySecond"});
    truncation["max_length"].integer(0, INT64_MAX);
    truncation["stride"].integer(0, INT64_MAX);
  }
  if (padding.is_null()) return;
  padding.check_keys(
      {"strategy", "direction", "pad_to_multiple_of", "pad_id", "pad_type_id", "pad_token"});
  const JsonNode strategy = padding["strategy"];
  if (strategy.value().is_object()) {
    strategy.check_keys({"Fixed"});
    strategy["Fixed"].integer(0, INT64_MAX);
  } else {
    strategy.one_of({"BatchLongest"});
  }
  padding["direction"].one_of({"Left", "Right"});
}

}  // namespace

/// A scratch of the tokenizer's, given back at the end.
class HfTokenizer::Lease {
 public:
  explicit Lease(const HfTokenizer& owner) : owner_(owner) {
    const std::lock_guard lock(owner.mutex_);
    if (owner.scratch_.empty()) {
      scratch_ = std::make_unique<Scratch>();
    } else {
      scratch_ = std::move(owner.scratch_.back());
      owner.scratch_.pop_back();
    }
  }
  ~Lease() {
    const std::lock_guard lock(owner_.mutex_);
    owner_.scratch_.push_back(std::move(scratch_));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Scratch& operator*() const { return *scratch_; }

 private:
  const HfTokenizer& owner_;
  std::unique_ptr<Scratch> scratch_;
};

HfTokenizer::HfTokenizer(const JsonNode& root, std::string text) : text_(std::move(text)) {
  root.check_keys({"version", "truncation", "padding", "added_tokens", "normalizer",
                   "pre_tokenizer", "post_processor", "decoder", "model"});
  if (!root["version"].is_null()) root["version"].one_of({"1.0"});
  check_call_settings(root["truncation"], root["padding"]);
  normalizer_ = parse_normalizer(root["normalizer"]);
  pre_tokenization_ = parse_pre_tokenizer(root["pre_tokenizer"]);
  ParsedModel parsed = parse_model(root["model"], pre_tokenization_.is_byte_level);
  name_ = parsed.name;
  vocabulary_ = std::move(parsed.vocabulary);
  model_ = std::move(parsed.model);
  decoder_ = parse_decoder(root["decoder"]);
  vocab_size_ = vocabulary_->num_ids();
  parse_added_tokens(root["added_tokens"]);
  if (vocab_size_ == 0) root["model"]["vocab"].fail("at least one token");
  parse_post_processor(root["post_processor"]);
  set_cutting();
}

void HfTokenizer::parse_added_tokens(const JsonNode& list) {
  std::vector<AddedToken> plain, in_normalized;
  std::vector<std::string> plain_text, normalized_text;
  const size_t count = list.is_null() ? 0 : list.size();
  added_.reserve(count);
  int64_t largest = -1;
  for (size_t i = 0; i < count; ++i) {
    const JsonNode node = list.at(i);
    node.check_keys({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token{node["content"].text(),
                     static_cast<int32_t>(node["id"].integer(0, INT32_MAX)),
                     node["single_word"].flag_or(false),
                     node["lstrip"].flag_or(false),
                     node["rstrip"].flag_or(false),
                     node["normalized"].flag_or(true),
                     node["special"].flag_or(false)};
    if (token.content.empty()) continue;  // finds nothing
    // The numbers that tokenizers gives.
    const int32_t known = id_of(token.content);
    const int64_t next = std::max(largest + 1, vocabulary_->num_tokens());
    const int64_t expected = known >= 0 ? known : next;
    if (token.id != expected) {
      node["id"].fail(fmt::format("{} for '{}'", expected, shorten(token.content)));
    }
    largest = std::max<int64_t>(largest, token.id);
    vocab_size_ = std::max<int64_t>(vocab_size_, token.id + 1);
    if (added_ids_.contains(token.content)) continue;
    added_.push_back(token);
    added_ids_.emplace(token.content, token.id);
    by_id_.emplace(token.id, &added_.back());
    std::string sought = token.content;
    if (token.normalized && normalizer_ != nullptr) normalizer_->apply(sought);
    shown_.emplace(token.id, sought);
    (token.normalized ? normalized_text : plain_text).push_back(sought);
    (token.normalized ? in_normalized : plain).push_back(std::move(token));
  }
  plain_ = std::make_unique<AddedTokenFinder>(std::move(plain), plain_text);
  in_normalized_ = std::make_unique<AddedTokenFinder>(std::move(in_normalized), normalized_text);
}

/// The ids of a special token in a template.
std::vector<int32_t> HfTokenizer::template_ids(const JsonNode& processor,
                                               const JsonNode& name) const {
  const JsonNode token = processor["special_tokens"][name.text()];
  if (token.is_null()) name.fail("one of special_tokens");
  token.check_keys({"id", "ids", "tokens"});
  std::vector<int32_t> ids;
  const JsonNode list = token["ids"];
  for (size_t i = 0; i < list.size(); ++i) {
    ids.push_back(static_cast<int32_t>(list.at(i).integer(0, vocab_size_ - 1)));
  }
  return ids;
}

/// The ids before the first sequence of a template and behind it; the sequences are A, then B.
std::pair<std::vector<int32_t>, std::vector<int32_t>> HfTokenizer::template_sides(
    const JsonNode& processor, const JsonNode& parts) const {
  std::vector<int32_t> before, behind;
  const bool is_pair = &parts.value() == &processor["pair"].value();
  size_t num_a = 0, num_b = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const JsonNode part = parts.at(i);
    part.check_keys({"SpecialToken", "Sequence"});
    const bool is_sequence = !part["Sequence"].is_null();
    const JsonNode content = part[is_sequence ? "Sequence" : "SpecialToken"];
    content.check_keys({"id", "type_id"});
    if (is_sequence) {
      ++(content["id"].one_of({"A", "B"}) == 0 ? num_a : num_b);
      continue;
    }
    auto& side = num_a + num_b == 0 ? before : behind;
    for (const int32_t id : template_ids(processor, content["id"])) side.push_back(id);
  }
  if (!is_pair && (num_a != 1 || num_b != 0)) parts.fail("the sequence A once");
  return {before, behind};
}

void HfTokenizer::parse_post_processor(const JsonNode& node) {
  if (node.is_null()) return;
  const size_t type = node["type"].one_of(
      {"Sequence", "ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"});
  if (type == 0) {
    node.check_keys({"type", "processors"});
    const JsonNode list = node["processors"];
    for (size_t i = 0; i < list.size(); ++i) parse_post_processor(list.at(i));
  } else if (type == 1) {  // changes offsets only
    node.check_keys({"type", "add_prefix_space", "trim_offsets", "use_regex"});
  } else if (type == 2) {
    node.check_keys({"type", "single", "pair", "special_tokens"});
    const auto [before, behind] = template_sides(node, node["single"]);
    // Pairs of texts are not encoded here.
    if (!node["pair"].is_null()) template_sides(node, node["pair"]);
    before_.insert(before_.begin(), before.begin(), before.end());
    behind_.insert(behind_.end(), behind.begin(), behind.end());
  } else {
    node.check_keys({"type", "sep", "cls", "trim_offsets", "add_prefix_space"});
    const auto id_of_pair = [&](const JsonNode& pair) {
      if (pair.size() != 2) pair.fail("a token and its id");
      return static_cast<int32_t>(pair.at(1).integer(0, vocab_size_ - 1));
    };
    before_.insert(before_.begin(), id_of_pair(node["cls"]));
    behind_.push_back(id_of_pair(node["sep"]));
  }
}

void HfTokenizer::set_cutting() {
  const bool is_plain = pre_tokenization_.steps.empty() && !pre_tokenization_.is_byte_level;
  cuts_at_mark_ = is_plain && model_->can_cut_at(kMark);
  can_cut_ = pre_tokenization_.pattern.has_value() &&
             (normalizer_ == nullptr || normalizer_->is_local()) &&
             std::none_of(added_.begin(), added_.end(), [](const AddedToken& token) {
               return token.lstrip || token.content.find('\n') != std::string::npos;
             });
}

size_t HfTokenizer::next_cut(std::string_view text, size_t from) const {
  if (!can_cut_) return text.size();
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  // "x\ny": every pattern ends a word behind the line break.
  for (size_t i = text.find('\n', std::max<size_t>(from, 1)); i != std::string_view::npos;
       i = text.find('\n', i + 1)) {
    if (i + 1 >= text.size()) break;
    const unsigned char next = at(i + 1) | 0x20u;
    if (at(i - 1) > ' ' && at(i - 1) < 0x7f && next >= 'a' && next <= 'z') return i + 1;
  }
  return text.size();
}

void HfTokenizer::encode(std::string_view text, std::vector<int32_t>& ids,
                         const EncodeOptions& options) const {
  if (const size_t at = find_invalid_utf8(text); at < text.size()) {
    throw InputError(fmt::format("tokenizer: byte {} is not UTF-8 text, expected UTF-8", at));
  }
  // Memory is touched when ids are written: a guess of many ids costs nothing, growing costs copies.
  constexpr size_t kLargeNbytes = 1 << 20;
  if (text.size() >= kLargeNbytes && ids.capacity() - ids.size() < text.size() / 2) {
    ids.reserve(std::max(ids.size() + text.size() / 2, ids.capacity() * 2));
  }
  const Lease scratch(*this);
  if (options.add_special_tokens) ids.insert(ids.end(), before_.begin(), before_.end());
  plain_->split(text, [&](size_t begin, size_t end, const AddedToken* token) {
    if (token != nullptr) {
      ids.push_back(token->id);
    } else {
      encode_segment(*scratch, text.substr(begin, end - begin), begin == 0, ids);
    }
  });
  if (options.add_special_tokens) ids.insert(ids.end(), behind_.begin(), behind_.end());
}

/// A stretch without tokens that are sought in the text itself.
void HfTokenizer::encode_segment(Scratch& scratch, std::string_view text, bool is_at_start,
                                 std::vector<int32_t>& ids) const {
  if (normalizer_ != nullptr && !normalizer_->keeps(text)) {
    scratch.normalized = text;
    normalizer_->apply(scratch.normalized);
    text = scratch.normalized;
  }
  if (in_normalized_->is_empty()) {
    if (!text.empty()) encode_normalized(scratch, text, is_at_start, ids);
    return;
  }
  in_normalized_->split(text, [&](size_t begin, size_t end, const AddedToken* token) {
    if (token != nullptr) {
      ids.push_back(token->id);
    } else {
      encode_normalized(scratch, text.substr(begin, end - begin), is_at_start && begin == 0, ids);
    }
  });
}

void HfTokenizer::encode_normalized(Scratch& scratch, std::string_view text, bool is_at_start,
                                    std::vector<int32_t>& ids) const {
  if (pre_tokenization_.pattern && pre_tokenization_.is_byte_level == model_->is_byte_level()) {
    with_scanner(*pre_tokenization_.pattern,
                 [&](const auto& scanner) { encode_words(scratch, text, scanner, ids); });
    return;
  }
  if (cuts_at_mark_) {
    encode_words(scratch, text, MarkScanner(kMark), ids);
    return;
  }
  Pieces pieces{std::string(text), {{0, text.size()}}, is_at_start};
  for (const auto& step : pre_tokenization_.steps) step->apply(pieces);
  if (pre_tokenization_.is_byte_level && !model_->is_byte_level()) map_bytes(pieces);
  // The pieces are the words of a scanner that knows where each ends.
  class PieceScanner {
   public:
    explicit PieceScanner(const Pieces::Piece* piece) : piece_(piece) {}
    const char* next(const char* p, const char*) const {
      const Pieces::Piece& own = *piece_++;
      return p + (own.end - own.begin);
    }

   private:
    mutable const Pieces::Piece* piece_;
  };
  // Pieces need not touch: stretches of those that do.
  for (size_t first = 0; first < pieces.pieces.size();) {
    size_t last = first;
    while (last + 1 < pieces.pieces.size() &&
           pieces.pieces[last + 1].begin == pieces.pieces[last].end) {
      ++last;
    }
    const size_t begin = pieces.pieces[first].begin, end = pieces.pieces[last].end;
    encode_words(scratch, std::string_view(pieces.text).substr(begin, end - begin),
                 PieceScanner(&pieces.pieces[first]), ids);
    first = last + 1;
  }
}

void HfTokenizer::encode_long_word(Scratch& scratch, std::string_view word,
                                   std::vector<int32_t>& ids) const {
  size_t count = 0;
  if (word.size() <= kMaxCachedNbytes) {
    if (const int32_t* known = scratch.cache.find_long(word, &count)) {
      ids.insert(ids.end(), known, known + count);
      return;
    }
  }
  const size_t first = ids.size();
  model_->encode(word, ids);
  if (word.size() <= kMaxCachedNbytes) {
    scratch.cache.add_long(word, ids.data() + first, ids.size() - first);
  }
}

template <class Scanner>
void HfTokenizer::encode_words(Scratch& scratch, std::string_view text, const Scanner& scanner,
                               std::vector<int32_t>& ids) const {
  // Ids are gathered in a small array, into which an entry's are written four at a time.
  constexpr size_t kBufferCount = 2048;
  int32_t buffer[kBufferCount + 4];
  size_t count = 0;
  const auto flush = [&] {
    ids.insert(ids.end(), buffer, buffer + count);
    count = 0;
  };
  // Words are cut some ahead of their ids, so that the entries of these are on their way meanwhile.
  struct Word {
    const char* begin;
    size_t nbytes;
    ShortKey key;
    uint64_t hash;
  };
  constexpr size_t kAhead = 24;
  Word words[kAhead];
  WordCache& cache = scratch.cache;
  const char *p = text.data(), *const end = p + text.size();
  while (p < end) {
    size_t num_words = 0;
    for (; num_words < kAhead && p < end; ++num_words) {
      const char* const next = scanner.next(p, end);
      Word& word = words[num_words];
      word.begin = p;
      word.nbytes = static_cast<size_t>(next - p);
      if (word.nbytes <= kMaxShortNbytes) [[likely]] {
        word.key = short_key(p, word.nbytes, end);
        word.hash = hash_of(word.key);
        cache.prefetch(word.hash);
      }
      p = next;
    }
    for (const Word* word = words; word < words + num_words; ++word) {
      if (count >= kBufferCount) flush();
      if (word->nbytes > kMaxShortNbytes) [[unlikely]] {
        flush();
        encode_long_word(scratch, {word->begin, word->nbytes}, ids);
        continue;
      }
      WordCache::Entry* const entry = cache.find(word->key, word->hash);
      if (entry->key.high == 0) [[unlikely]] {
        scratch.word_ids.clear();
        model_->encode({word->begin, word->nbytes}, scratch.word_ids);
        cache.add(entry, word->key, word->hash, scratch.word_ids.data(), scratch.word_ids.size());
        flush();
        ids.insert(ids.end(), scratch.word_ids.begin(), scratch.word_ids.end());
      } else if (entry->count <= 3) [[likely]] {
        std::memcpy(buffer + count, entry->ids, 16);
        count += entry->count;
      } else {
        flush();
        const int32_t* const known = cache.ids_of(*entry);
        ids.insert(ids.end(), known, known + entry->count);
      }
    }
  }
  flush();
}

std::string HfTokenizer::token(int32_t id) const {
  const auto added = shown_.find(id);
  if (added != shown_.end()) return added->second;
  const std::string* const token = vocabulary_->token(id);
  return token == nullptr ? std::string() : *token;
}

int32_t HfTokenizer::id_of(std::string_view token) const {
  const auto added = added_ids_.find(token);
  return added != added_ids_.end() ? added->second : vocabulary_->id_of(token);
}

std::string HfTokenizer::decode(const std::vector<int32_t>& ids,
                                const DecodeOptions& options) const {
  std::vector<std::string> tokens;
  for (const int32_t id : ids) {
    const auto added = by_id_.find(id);
    if (added == by_id_.end() && vocabulary_->token(id) == nullptr) {
      throw InputError(
          fmt::format("tokenizer: id {}, expected one of a token in [0, {})", id, vocab_size_));
    }
    tokens.push_back(token(id));
    // One that normalizing changes is not known as a special one any more.
    const bool is_special =
        added != by_id_.end() && added->second->special && added->second->content == tokens.back();
    if (options.skip_special_tokens && is_special) tokens.pop_back();
  }
  if (tokens.empty()) return {};
  if (decoder_ != nullptr) decoder_->apply(tokens);
  std::string text;
  for (const std::string& token : tokens) {
    if (decoder_ == nullptr && &token != &tokens.front()) text += ' ';
    text += token;
  }
  return text;
}

std::map<std::string, std::string> HfTokenizer::files() const {
  std::map<std::string, std::string> files = companions_;
  files["tokenizer.json"] = text_;
  return files;
}

std::map<std::string, std::string> HfTokenizer::hf_files() const {
  std::map<std::string, std::string> files = this->files();
  files.try_emplace("tokenizer_config.json",
                    "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n"
                    "  \"clean_up_tokenization_spaces\": false\n}\n");
  return files;
}

}  // namespace tessera::text
