#include "apps/text/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <queue>

#include "apps/text/unicode.h"
#include "apps/text/word_cache.h"
#include "apps/text/work.h"
#include "core/check.h"

namespace tessera::text {
namespace {

constexpr int kIdBits = 21, kRankBits = 22;
constexpr uint32_t kNoRank = UINT32_MAX;
constexpr uint64_t kEmpty = 0;
constexpr uint64_t kHash = 0x9e3779b97f4a7c15u;
constexpr size_t kMaxShort = 64;  // symbols whose ranks are searched from the left each time

std::array<std::string, 256> make_byte_characters() {
  std::array<std::string, 256> characters;
  char32_t next = 256;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool is_itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    append_utf8(characters[byte], is_itself ? byte : next++);
  }
  return characters;
}

/// The positions of one rank in a long word: a sorted list, and what comes while it is worked off.
struct Bucket {
  std::vector<uint32_t> positions;
  size_t num_done = 0;
  bool is_started = false;
  std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> late;

  void add(uint32_t position) {
    if (is_started) {
      late.push(position);
    } else {
      positions.push_back(position);
    }
  }
  void start() {
    if (is_started) return;
    is_started = true;
    if (!std::is_sorted(positions.begin(), positions.end())) {
      std::sort(positions.begin(), positions.end());
    }
  }
  bool is_empty() const { return num_done == positions.size() && late.empty(); }
  uint32_t take() {
    const bool from_list =
        num_done < positions.size() && (late.empty() || positions[num_done] < late.top());
    if (from_list) return positions[num_done++];
    const uint32_t position = late.top();
    late.pop();
    return position;
  }
};

}  // namespace

const std::string& byte_character(unsigned char byte) {
  static const std::array<std::string, 256> characters = make_byte_characters();
  return characters[byte];
}

std::optional<std::string> bytes_of_characters(std::string_view text) {
  static const std::array<int16_t, 512> bytes = [] {
    std::array<int16_t, 512> all;
    all.fill(-1);
    for (unsigned byte = 0; byte < 256; ++byte) {
      all[utf8_decode(byte_character(static_cast<unsigned char>(byte)).c_str())] =
          static_cast<int16_t>(byte);
    }
    return all;
  }();
  std::string out;
  for (size_t at = 0; at < text.size(); at += utf8_nbytes(text[at])) {
    const char32_t c = utf8_decode(text.data() + at);
    if (c >= bytes.size() || bytes[c] < 0) return std::nullopt;
    out += static_cast<char>(bytes[c]);
  }
  return out;
}

Bpe::Bpe(const Vocabulary& vocabulary, const std::vector<Merge>& merges, BpeRules rules,
         bool is_byte_level)
    : vocabulary_(vocabulary), rules_(std::move(rules)), is_byte_level_(is_byte_level) {
  if (vocabulary.num_ids() > (int64_t{1} << kIdBits) || merges.size() >= (size_t{1} << kRankBits)) {
    throw InputError(fmt::format("BPE of {} ids and {} merges, expected at most {} and {}",
                                 vocabulary.num_ids(), merges.size(), 1 << kIdBits,
                                 (1 << kRankBits) - 1));
  }
  has_all_bytes_ = true;
  for (unsigned byte = 0; byte < 256; ++byte) {
    byte_ids_[byte] = vocabulary.id_of(byte_character(static_cast<unsigned char>(byte)));
    fallback_[byte] = vocabulary.id_of(fmt::format("<0x{:02X}>", byte));
    has_all_bytes_ = has_all_bytes_ && byte_ids_[byte] >= 0;
  }
  make_table(merges);
  if (!is_byte_level_) return;
  if (rules_.ignore_merges) make_whole();
  if (!has_all_bytes_) return;
  byte_ranks_.resize(65536);
  for (size_t i = 0; i < 65536; ++i) {
    byte_ranks_[i] = rank_of(byte_ids_[i >> 8], byte_ids_[i & 255]);
  }
}

namespace {
uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(left) << kIdBits | static_cast<uint64_t>(right);
}
}  // namespace

void Bpe::make_table(const std::vector<Merge>& merges) {
  int bits = 4;
  while ((size_t{1} << bits) < merges.size() * 2) ++bits;
  shift_ = 64 - bits;
  table_ = TableMemory<uint64_t>(size_t{1} << bits);
  constexpr int kFilterBits = 2;  // for each slot of the table 4
  filter_shift_ = shift_ - kFilterBits;
  filter_ = TableMemory<uint64_t>((size_t{1} << (bits + kFilterBits)) / 64);
  for (const Merge& merge : merges) {
    const uint64_t key = pair_key(merge.left, merge.right), hash = key * kHash;
    size_t i = hash >> shift_;
    while (table_[i] != kEmpty && table_[i] >> kRankBits != key) i = (i + 1) & (table_.size() - 1);
    table_[i] = key << kRankBits | (merge.rank + 1);
    filter_[hash >> filter_shift_ >> 6] |= uint64_t{1} << (hash >> filter_shift_ & 63);
    if (merge.rank >= made_.size()) made_.resize(merge.rank + 1);
    made_[merge.rank] = merge.both;
  }
}

void Bpe::make_whole() {
  const auto num_ids = static_cast<size_t>(vocabulary_.num_ids());
  size_t count = 16;
  while (count < num_ids * 2) count *= 2;
  whole_ = TableMemory<uint64_t>(count);
  token_ends_.resize(num_ids);
  for (size_t id = 0; id < num_ids; ++id) {
    const std::string* const token = vocabulary_.token(static_cast<int32_t>(id));
    const auto bytes = token == nullptr ? std::nullopt : bytes_of_characters(*token);
    if (bytes && token_bytes_.size() + bytes->size() <= UINT32_MAX) token_bytes_ += *bytes;
    token_ends_[id] = static_cast<uint32_t>(token_bytes_.size());
    if (!bytes || bytes->empty()) continue;
    const uint64_t hash = hash_bytes(bytes->data(), bytes->size());
    size_t i = hash & (count - 1);
    while (whole_[i] != kEmpty) i = (i + 1) & (count - 1);
    whole_[i] = hash >> kRankBits << kRankBits | (id + 1);
  }
}

/// The id of the token that the whole word is, or -1.
int32_t Bpe::whole_id(std::string_view word) const {
  const uint64_t hash = hash_bytes(word.data(), word.size());
  for (size_t i = hash & (whole_.size() - 1);; i = (i + 1) & (whole_.size() - 1)) {
    const uint64_t entry = whole_[i];
    if (entry == kEmpty) return -1;
    if (entry >> kRankBits != hash >> kRankBits) continue;
    const size_t id = (entry & ((1u << kRankBits) - 1)) - 1;
    const size_t begin = id == 0 ? 0 : token_ends_[id - 1];
    if (std::string_view(token_bytes_).substr(begin, token_ends_[id] - begin) == word) {
      return static_cast<int32_t>(id);
    }
  }
}

inline uint32_t Bpe::rank_of(int32_t left, int32_t right) const {
  const uint64_t key = pair_key(left, right), hash = key * kHash;
  if ((filter_[hash >> filter_shift_ >> 6] >> (hash >> filter_shift_ & 63) & 1) == 0) {
    return kNoRank;
  }
  for (size_t i = hash >> shift_;; i = (i + 1) & (table_.size() - 1)) {
    const uint64_t entry = table_[i];
    if (entry >> kRankBits == key && entry != kEmpty) {
      const auto rank = static_cast<uint32_t>(entry & ((1u << kRankBits) - 1)) - 1;
      __builtin_prefetch(&made_[rank]);
      return rank;
    }
    if (entry == kEmpty) return kNoRank;
  }
}

inline void Bpe::prefetch(int32_t left, int32_t right) const {
  __builtin_prefetch(&table_[(pair_key(left, right) * kHash) >> shift_]);
}

/// A character of the word: its token, else its bytes, else the unknown one (`unk`, if not -1,
/// is such a one before it that has not been added yet).
void Bpe::add_character(std::string_view symbol, int32_t& unk,
                        std::vector<int32_t>& symbols) const {
  const int32_t id = vocabulary_.id_of(symbol);
  if (id >= 0) {
    if (unk >= 0) symbols.push_back(unk);
    unk = -1;
    symbols.push_back(id);
    return;
  }
  if (rules_.byte_fallback) {
    const auto id_of = [&](char c) { return fallback_[static_cast<unsigned char>(c)]; };
    if (std::all_of(symbol.begin(), symbol.end(), [&](char c) { return id_of(c) >= 0; })) {
      for (const char c : symbol) symbols.push_back(id_of(c));
      return;
    }
  }
  if (!rules_.unk_token) return;
  if (unk >= 0 && rules_.fuse_unk) return;
  if (unk >= 0) symbols.push_back(unk);
  unk = vocabulary_.id_of(*rules_.unk_token);
  if (unk < 0) {
    throw InputError(
        fmt::format("tokenizer: '{}' is not in the vocabulary, and neither is "
                    "model.unk_token = '{}'",
                    symbol, *rules_.unk_token));
  }
}

void Bpe::add_symbols(std::string_view word, std::vector<int32_t>& symbols) const {
  int32_t unk = -1;
  std::string built;
  for (size_t at = 0; at < word.size();) {
    const size_t nbytes = is_byte_level_ ? 1 : utf8_nbytes(word[at]);
    std::string_view symbol = word.substr(at, nbytes);
    if (is_byte_level_) symbol = byte_character(static_cast<unsigned char>(word[at]));
    const bool is_first = at == 0, is_last = at + nbytes == word.size();
    if ((!is_first && !rules_.prefix.empty()) || (is_last && !rules_.suffix.empty())) {
      built.clear();
      if (!is_first) built += rules_.prefix;
      built += symbol;
      if (is_last) built += rules_.suffix;
      symbol = built;
    }
    add_character(symbol, unk, symbols);
    at += nbytes;
  }
  if (unk >= 0) symbols.push_back(unk);
}

size_t Bpe::merge_short(int32_t* symbols, size_t count) const {
  uint32_t ranks[kMaxShort];
  for (size_t i = 0; i + 1 < count; ++i) ranks[i] = rank_of(symbols[i], symbols[i + 1]);
  return merge_short(symbols, ranks, count);
}

/// `ranks` are those of each symbol with the one behind it.
size_t Bpe::merge_short(int32_t* symbols, uint32_t* ranks, size_t count) const {
  while (count > 1) {
    size_t best = 0;
    uint32_t rank = ranks[0];
    for (size_t i = 1; i + 1 < count; ++i) {
      if (ranks[i] < rank) {
        rank = ranks[i];
        best = i;
      }
    }
    if (rank == kNoRank) break;
    symbols[best] = made_[rank];
    --count;
    for (size_t i = best + 1; i < count; ++i) {
      symbols[i] = symbols[i + 1];
      ranks[i - 1] = ranks[i];
    }
    if (best > 0 && best + 1 < count) prefetch(symbols[best], symbols[best + 1]);
    if (best > 0) ranks[best - 1] = rank_of(symbols[best - 1], symbols[best]);
    if (best + 1 < count) ranks[best] = rank_of(symbols[best], symbols[best + 1]);
  }
  return count;
}

void Bpe::merge_long(std::vector<int32_t>& symbols) const {
  constexpr uint32_t kNone = UINT32_MAX;
  const auto count = static_cast<uint32_t>(symbols.size());
  std::vector<uint32_t> before(count), behind(count);
  std::unordered_map<uint32_t, Bucket> buckets;
  std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> ranks;
  int64_t& work = counted_work();
  const auto add = [&](uint32_t position) {
    ++work;
    const uint32_t rank = rank_of(symbols[position], symbols[behind[position]]);
    if (rank == kNoRank) return rank;
    const auto [found, is_new] = buckets.try_emplace(rank);
    found->second.add(position);
    if (is_new) ranks.push(rank);
    return rank;
  };
  for (uint32_t i = 0; i < count; ++i) {
    before[i] = i == 0 ? kNone : i - 1;
    behind[i] = i + 1 == count ? kNone : i + 1;
  }
  for (uint32_t i = 0; i + 1 < count; ++i) add(i);
  while (!ranks.empty()) {
    const uint32_t rank = ranks.top();
    Bucket& bucket = buckets.find(rank)->second;
    bucket.start();
    bool goes_on = true;
    while (goes_on && !bucket.is_empty()) {
      ++work;
      const uint32_t left = bucket.take(), right = behind[left];
      if (symbols[left] < 0 || right == kNone) continue;
      if (rank_of(symbols[left], symbols[right]) != rank) continue;
      symbols[left] = made_[rank];
      symbols[right] = -1;
      behind[left] = behind[right];
      if (behind[left] != kNone) before[behind[left]] = left;
      // A lower rank that has come up goes first.
      if (before[left] != kNone && add(before[left]) < rank) goes_on = false;
      if (behind[left] != kNone && add(left) < rank) goes_on = false;
    }
    if (goes_on) {
      ranks.pop();
      buckets.erase(rank);
    }
  }
  symbols.erase(std::remove(symbols.begin(), symbols.end(), -1), symbols.end());
}

void Bpe::encode(std::string_view word, std::vector<int32_t>& ids) const {
  if (rules_.ignore_merges) {
    const int32_t id = is_byte_level_ ? whole_id(word) : vocabulary_.id_of(word);
    if (id >= 0) {
      ids.push_back(id);
      return;
    }
  }
  if (is_byte_level_ && has_all_bytes_ && word.size() <= kMaxShort) {
    int32_t symbols[kMaxShort];
    uint32_t ranks[kMaxShort];
    unsigned before = 0;
    for (size_t i = 0; i < word.size(); ++i) {
      const auto byte = static_cast<unsigned char>(word[i]);
      symbols[i] = byte_ids_[byte];
      if (i > 0) ranks[i - 1] = byte_ranks_[before << 8 | byte];
      before = byte;
    }
    const size_t count = merge_short(symbols, ranks, word.size());
    ids.insert(ids.end(), symbols, symbols + count);
    return;
  }
  std::vector<int32_t> symbols;
  if (is_byte_level_ && has_all_bytes_) {
    symbols.reserve(word.size());
    for (const char c : word) symbols.push_back(byte_ids_[static_cast<unsigned char>(c)]);
  } else {
    add_symbols(word, symbols);
  }
  if (symbols.size() > UINT32_MAX - 1) {
    throw InputError(
        fmt::format("tokenizer: a word of {} bytes, expected less than 4 GiB", word.size()));
  }
  if (symbols.size() <= kMaxShort) {
    symbols.resize(merge_short(symbols.data(), symbols.size()));
  } else {
    merge_long(symbols);
  }
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

}  // namespace tessera::text
