#include "apps/text/train.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <queue>

#include "apps/text/bpe.h"
#include "apps/text/byte_level_file.h"
#include "apps/text/pretokenize.h"
#include "apps/text/regex.h"
#include "apps/text/word_cache.h"
#include "core/check.h"
#include "core/text.h"

namespace tessera::text {
namespace {

using nlohmann::json;

constexpr int64_t kMaxVocabSize = 1 << 20;

/// A pair of ids in one number.
constexpr uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
}

/// Pairs with a number each, from 0 on.
class PairIndex {
 public:
  PairIndex() : slots_(1 << 12, kNone) {}
  uint32_t number(uint64_t pair) {
    size_t i = slot(pair);
    if (slots_[i] != kNone) return slots_[i];
    if ((pairs_.size() + 1) * 2 > slots_.size()) {
      slots_.assign(slots_.size() * 2, kNone);
      for (size_t k = 0; k < pairs_.size(); ++k) {
        slots_[slot(pairs_[k])] = static_cast<uint32_t>(k);
      }
      i = slot(pair);
    }
    slots_[i] = static_cast<uint32_t>(pairs_.size());
    pairs_.push_back(pair);
    return slots_[i];
  }
  uint64_t pair(uint32_t number) const { return pairs_[number]; }
  size_t count() const { return pairs_.size(); }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  size_t slot(uint64_t pair) const {
    const size_t mask = slots_.size() - 1;
    size_t i = (pair * 0x9e3779b97f4a7c15u >> 20) & mask;
    while (slots_[i] != kNone && pairs_[slots_[i]] != pair) i = (i + 1) & mask;
    return i;
  }
  std::vector<uint32_t> slots_;
  std::vector<uint64_t> pairs_;
};

/// A pair that may be merged, in the words that had it when its count grew last.
struct Candidate {
  int64_t count;
  uint64_t pair;
  uint32_t number;
  std::vector<uint32_t> words;
};
struct GoesLater {
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.count != b.count ? a.count < b.count : a.pair > b.pair;
  }
};

}  // namespace

/// Different words with their counts; the bytes of all behind each other.
struct BpeTrainer::Words {
  std::optional<KnownPattern> known;
  std::optional<Regex> regex;
  std::vector<char> bytes;
  std::vector<size_t> ends;
  std::vector<int64_t> counts;
  std::vector<uint32_t> slots = std::vector<uint32_t>(1 << 12, UINT32_MAX);
  std::vector<uint64_t> hashes;

  std::string_view word(size_t i) const {
    const size_t begin = i == 0 ? 0 : ends[i - 1];
    return {bytes.data() + begin, ends[i] - begin};
  }
  void add(std::string_view text, int64_t count) {
    const uint64_t hash = hash_bytes(text.data(), text.size());
    size_t i = hash & (slots.size() - 1);
    for (; slots[i] != UINT32_MAX; i = (i + 1) & (slots.size() - 1)) {
      const uint32_t found = slots[i];
      if (hashes[found] == hash && word(found) == text) {
        counts[found] += count;
        return;
      }
    }
    slots[i] = static_cast<uint32_t>(counts.size());
    bytes.insert(bytes.end(), text.begin(), text.end());
    ends.push_back(bytes.size());
    counts.push_back(count);
    hashes.push_back(hash);
    if (counts.size() * 2 < slots.size()) return;
    slots.assign(slots.size() * 2, UINT32_MAX);
    for (size_t k = 0; k < hashes.size(); ++k) {
      size_t at = hashes[k] & (slots.size() - 1);
      while (slots[at] != UINT32_MAX) at = (at + 1) & (slots.size() - 1);
      slots[at] = static_cast<uint32_t>(k);
    }
  }
};

BpeTrainer::BpeTrainer(TrainBpeOptions options)
    : options_(std::move(options)), words_(std::make_unique<Words>()) {
  const auto num_special = static_cast<int64_t>(options_.special_tokens.size());
  if (options_.vocab_size < 256 + num_special || options_.vocab_size > kMaxVocabSize) {
    throw ConfigError(
        fmt::format("train: a vocabulary of {}, expected {} (256 bytes and {} special "
                    "tokens) to {}",
                    options_.vocab_size, 256 + num_special, num_special, kMaxVocabSize));
  }
  std::vector<std::string> special = options_.special_tokens;
  std::sort(special.begin(), special.end());
  const auto twice = std::adjacent_find(special.begin(), special.end());
  if (twice != special.end()) {
    throw ConfigError(
        fmt::format("train: special token '{}' twice, expected each once", shorten(*twice)));
  }
  for (const std::string& token : special) {
    if (token.size() < 2) {
      throw ConfigError(fmt::format("train: special token '{}', expected two characters or more",
                                    shorten(token)));
    }
  }
  const std::string_view named = pattern_by_name(options_.pattern);
  if (!named.empty()) options_.pattern = named;
  words_->known = known_pattern(options_.pattern);
  if (!words_->known) words_->regex.emplace(options_.pattern, "train: pattern");
}
BpeTrainer::~BpeTrainer() = default;

int64_t BpeTrainer::num_words() const {
  return static_cast<int64_t>(words_->counts.size());
}

void BpeTrainer::add(std::string_view text) {
  if (const size_t at = find_invalid_utf8(text); at < text.size()) {
    throw InputError(fmt::format("train: byte {} is not UTF-8 text, expected UTF-8", at));
  }
  if (words_->known) {
    with_scanner(*words_->known, [&](const auto& scanner) {
      const char *p = text.data(), *const end = p + text.size();
      while (p < end) {
        const char* const next = scanner.next(p, end);
        words_->add({p, static_cast<size_t>(next - p)}, 1);
        p = next;
      }
    });
    return;
  }
  size_t done = 0;
  const auto add_stretch = [&](size_t begin, size_t end) {
    if (begin < end) words_->add(text.substr(begin, end - begin), 1);
  };
  for (const auto& [begin, end] : words_->regex->find_all(text)) {
    add_stretch(done, begin);
    add_stretch(begin, end);
    done = end;
  }
  add_stretch(done, text.size());
}

void BpeTrainer::add(const BpeTrainer& other) {
  for (size_t i = 0; i < other.words_->counts.size(); ++i) {
    words_->add(other.words_->word(i), other.words_->counts[i]);
  }
}

std::unique_ptr<Tokenizer> BpeTrainer::train(const std::function<void(int64_t)>& progress) {
  // Tokens: special ones, the bytes in the order of the characters that stand for them, then what
  // merges make; a token may come about in two ways.
  const Words& words = *words_;
  std::vector<std::string> tokens = options_.special_tokens;  // as their files write them
  std::unordered_map<std::string, int32_t> ids;
  for (const std::string& token : tokens) ids.emplace(token, static_cast<int32_t>(ids.size()));
  std::vector<unsigned> order(256);
  for (unsigned byte = 0; byte < 256; ++byte) order[byte] = byte;
  std::sort(order.begin(), order.end(), [](unsigned a, unsigned b) {
    return byte_character(static_cast<unsigned char>(a)) <
           byte_character(static_cast<unsigned char>(b));  // UTF-8 sorts as code points do
  });
  int32_t byte_ids[256];
  for (const unsigned byte : order) {
    const std::string& character = byte_character(static_cast<unsigned char>(byte));
    byte_ids[byte] = static_cast<int32_t>(tokens.size());
    ids.emplace(character, byte_ids[byte]);
    tokens.push_back(character);
  }

  // The symbols of all words, each word in its stretch.
  std::vector<int32_t> symbols(words.bytes.size());
  std::vector<uint32_t> lengths(words.counts.size());
  for (size_t i = 0; i < words.bytes.size(); ++i) {
    symbols[i] = byte_ids[static_cast<unsigned char>(words.bytes[i])];
  }
  PairIndex pairs;
  std::vector<int64_t> counts;
  std::vector<std::vector<uint32_t>> where;  // by pair, of this round; the last one is not repeated
  const auto add_pair = [&](int32_t left, int32_t right, int64_t count, uint32_t word) {
    const uint32_t number = pairs.number(pair_of(left, right));
    if (number == counts.size()) {
      counts.push_back(0);
      where.emplace_back();
    }
    counts[number] += count;
    if (count > 0 && (where[number].empty() || where[number].back() != word)) {
      where[number].push_back(word);
    }
    return number;
  };
  for (uint32_t i = 0; i < lengths.size(); ++i) {
    const size_t begin = i == 0 ? 0 : words.ends[i - 1];
    lengths[i] = static_cast<uint32_t>(words.ends[i] - begin);
    for (size_t k = begin; k + 1 < words.ends[i]; ++k) {
      add_pair(symbols[k], symbols[k + 1], words.counts[i], i);
    }
  }
  std::priority_queue<Candidate, std::vector<Candidate>, GoesLater> queue;
  const auto push = [&](uint32_t number) {
    if (where[number].empty()) return;
    if (counts[number] > 0) {
      queue.push({counts[number], pairs.pair(number), number, std::move(where[number])});
    }
    where[number].clear();
  };
  for (uint32_t number = 0; number < counts.size(); ++number) push(number);

  json merges = json::array();
  std::vector<uint32_t> touched;
  while (static_cast<int64_t>(tokens.size()) < options_.vocab_size && !queue.empty()) {
    // The queue gives only constant references; what is taken out is not compared again.
    Candidate top = std::move(const_cast<Candidate&>(queue.top()));
    queue.pop();
    if (top.count != counts[top.number]) {
      top.count = counts[top.number];
      if (top.count > 0) queue.push(std::move(top));
      continue;
    }
    if (top.count < std::max<int64_t>(1, options_.min_frequency)) break;
    const auto left = static_cast<int32_t>(top.pair >> 32);
    const auto right = static_cast<int32_t>(top.pair & 0xffffffffu);
    const std::string both = tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)];
    const auto [found, is_new] = ids.emplace(both, static_cast<int32_t>(tokens.size()));
    if (is_new) tokens.push_back(both);
    const int32_t merged = found->second;
    merges.push_back({tokens[static_cast<size_t>(left)], tokens[static_cast<size_t>(right)]});
    touched.clear();
    for (const uint32_t word : top.words) {
      int32_t* const own = symbols.data() + (word == 0 ? 0 : words.ends[word - 1]);
      const uint32_t length = lengths[word];
      const int64_t count = words.counts[word];
      uint32_t out = 0;
      for (uint32_t i = 0; i < length;) {
        if (own[i] != left || i + 1 >= length || own[i + 1] != right) {
          own[out++] = own[i++];
          continue;
        }
        if (out > 0) {
          add_pair(own[out - 1], left, -count, word);
          touched.push_back(add_pair(own[out - 1], merged, count, word));
        }
        if (i + 2 < length) {
          add_pair(right, own[i + 2], -count, word);
          touched.push_back(add_pair(merged, own[i + 2], count, word));
        }
        own[out++] = merged;
        i += 2;
      }
      lengths[word] = out;
    }
    for (const uint32_t number : touched) push(number);
    if (progress && tokens.size() % 256 == 0) progress(static_cast<int64_t>(tokens.size()));
  }

  json vocab = json::object(), added = json::array();
  for (size_t id = 0; id < tokens.size(); ++id) vocab.emplace(tokens[id], id);
  for (size_t id = 0; id < options_.special_tokens.size(); ++id) {
    added.push_back(special_token_json(static_cast<int32_t>(id), options_.special_tokens[id]));
  }
  return make_byte_level(std::move(vocab), std::move(merges), split_by_regex(options_.pattern),
                         std::move(added), false, "train");
}

}  // namespace tessera::text
