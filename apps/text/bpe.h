#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/text/table_memory.h"
#include "apps/text/vocabulary.h"

namespace tessera::text {

/// What a model of type "BPE" says of itself in tokenizer.json.
struct BpeRules {
  std::optional<std::string> unk_token;
  std::string prefix, suffix;  ///< continuing_subword_prefix, end_of_word_suffix
  bool fuse_unk = false, byte_fallback = false, ignore_merges = false;
};

/// Byte pair encoding (Sennrich et al. 2016, arXiv:1508.07909): of all neighbours in a word the pair
/// of the lowest rank, of several the leftmost, becomes one token, until none has a rank.
/// Time     n log n of a word's n symbols at most (those of one rank are merged in one go)
/// Threads  any number may encode with one; it does not change
class Bpe {
 public:
  /// `merges` are pairs of ids, the id of what they make and their rank, of which several pairs may
  /// have the same; of a pair given twice the later one counts. With `is_byte_level` a word is its bytes, and the vocabulary
  /// has them as the printable characters that stand for bytes.
  /// Errors   InputError for more than 2,097,152 ids or 4,194,303 merges
  struct Merge {
    int32_t left, right, both;
    uint32_t rank;
  };
  Bpe(const Vocabulary& vocabulary, const std::vector<Merge>& merges, BpeRules rules,
      bool is_byte_level);

  /// Appends the ids of a word, which is not empty.
  /// Errors   InputError if it needs unk_token and the vocabulary lacks that
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

  bool is_byte_level() const { return is_byte_level_; }

 private:
  uint32_t rank_of(int32_t left, int32_t right) const;
  void prefetch(int32_t left, int32_t right) const;
  void make_table(const std::vector<Merge>& merges);
  void make_whole();
  int32_t whole_id(std::string_view word) const;
  void add_symbols(std::string_view word, std::vector<int32_t>& symbols) const;
  void add_character(std::string_view symbol, int32_t& unk, std::vector<int32_t>& symbols) const;
  size_t merge_short(int32_t* symbols, uint32_t* ranks, size_t count) const;
  size_t merge_short(int32_t* symbols, size_t count) const;
  void merge_long(std::vector<int32_t>& symbols) const;

  const Vocabulary& vocabulary_;
  BpeRules rules_;
  bool is_byte_level_;
  int32_t byte_ids_[256];  // byte level: of each byte, -1 where the vocabulary lacks it
  int32_t fallback_[256];  // <0x00>..., -1 likewise
  bool has_all_bytes_ = false;
  TableMemory<uint64_t> table_;  // left, right and rank + 1 of each pair in one word; 0: empty
  int shift_ = 0;
  TableMemory<uint64_t> filter_;  // a bit for the hash of each pair: most that are sought are none
  int filter_shift_ = 0;
  std::vector<int32_t> made_;         // by rank
  std::vector<uint32_t> byte_ranks_;  // byte level: by two bytes
  // Byte level with ignore_merges: bytes of tokens to their ids (bits of the hash and id + 1).
  TableMemory<uint64_t> whole_;
  std::string token_bytes_;
  std::vector<uint32_t> token_ends_;  // by id; of one that stands for no bytes as the one before
};

/// The printable character that stands for each byte in a byte-level vocabulary, in UTF-8: itself
/// where it is one, else one of those from U+0100 on, in the order of bytes.
const std::string& byte_character(unsigned char byte);

/// The bytes that a text of such characters stands for; none if it has another one.
std::optional<std::string> bytes_of_characters(std::string_view text);

}  // namespace tessera::text
