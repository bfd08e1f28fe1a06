#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "apps/text/table_memory.h"

// From a word to its ids. Bounded: what has been found is forgotten when the tables are full.

namespace tessera::text {

/// Up to 15 bytes of a word, zeros behind them, and their number in the last byte: never all zeros.
struct ShortKey {
  uint64_t low, high;
  bool operator==(const ShortKey& o) const { return ((low ^ o.low) | (high ^ o.high)) == 0; }
};

inline constexpr size_t kMaxShortNbytes = 15;

/// The key of `nbytes` <= 15 bytes at `p`; the text ends at `end`.
inline ShortKey short_key(const char* p, size_t nbytes, const char* end) {
  alignas(16) static constexpr uint8_t kMasks[32] = {255, 255, 255, 255, 255, 255, 255, 255,
                                                     255, 255, 255, 255, 255, 255, 255, 255};
  __m128i bytes;
  if (end - p >= 16) [[likely]] {
    bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  } else {
    char copy[16] = {};
    std::memcpy(copy, p, nbytes);
    bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(copy));
  }
  const __m128i mask = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kMasks + 16 - nbytes));
  bytes = _mm_and_si128(bytes, mask);
  return {static_cast<uint64_t>(_mm_cvtsi128_si64(bytes)),
          static_cast<uint64_t>(_mm_extract_epi64(bytes, 1)) | uint64_t{nbytes} << 56};
}

__extension__ using Product = unsigned __int128;

inline uint64_t mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<Product>(a ^ 0x9e3779b97f4a7c15u) * (b ^ 0xe7037ed1a0b428dbu);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}
inline uint64_t hash_of(const ShortKey& key) {
  return mix(key.low, key.high);
}

inline uint64_t hash_bytes(const char* p, size_t nbytes) {
  uint64_t hash = nbytes;
  for (; nbytes >= 8; p += 8, nbytes -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    hash = mix(hash, word);
  }
  uint64_t word = 0;
  std::memcpy(&word, p, nbytes);
  return mix(hash, word);
}

class WordCache {
 public:
  /// What is known of a short word: `count` ids, in the entry or, if they are more than three, at
  /// ids[0] of `more`.
  struct Entry {
    ShortKey key;
    int32_t ids[3];
    uint32_t count;
  };

  WordCache() : entries_(size_t{1} << kFirstBits), longs_(size_t{1} << (kFirstBits - 4)) {}

  /// Asks for the entry of a key that is sought soon.
  void prefetch(uint64_t hash) const { __builtin_prefetch(&entries_[hash >> shift_]); }
  /// The entry of the key with that hash, or where it would go (its key is all zeros).
  Entry* find(const ShortKey& key, uint64_t hash) {
    for (size_t i = hash >> shift_;; i = (i + 1) & (entries_.size() - 1)) {
      Entry& entry = entries_[i];
      if (entry.key == key) [[likely]]
        return &entry;
      if (entry.key.high == 0) return &entry;
    }
  }
  const int32_t* ids_of(const Entry& entry) const {
    return entry.count <= 3 ? entry.ids : more_.data() + entry.ids[0];
  }
  /// Fills what `find` gave; no entry may be used afterwards.
  void add(Entry* entry, const ShortKey& key, uint64_t hash, const int32_t* ids, size_t count) {
    if (more_.size() > kMaxMore || num_entries_ >= kMaxEntries) {
      clear();
      entry = find(key, hash);
    }
    entry->key = key;
    entry->count = static_cast<uint32_t>(count);
    if (count <= 3) {
      std::copy_n(ids, count, entry->ids);  // which may be none
    } else {
      entry->ids[0] = static_cast<int32_t>(more_.size());
      more_.insert(more_.end(), ids, ids + count);
    }
    if (++num_entries_ * 2 > entries_.size()) grow();
  }

  struct LongEntry {
    uint64_t hash;
    uint32_t text, nbytes, ids, count;
  };
  /// The ids of a longer word, or none (nullptr).
  const int32_t* find_long(std::string_view word, size_t* count) const {
    const uint64_t hash = hash_bytes(word.data(), word.size());
    for (size_t i = hash & (longs_.size() - 1);; i = (i + 1) & (longs_.size() - 1)) {
      const LongEntry& entry = longs_[i];
      if (entry.nbytes == 0) return nullptr;
      if (entry.hash == hash && entry.nbytes == word.size() &&
          std::memcmp(text_.data() + entry.text, word.data(), word.size()) == 0) {
        *count = entry.count;
        return long_ids_.data() + entry.ids;
      }
    }
  }
  void add_long(std::string_view word, const int32_t* ids, size_t count) {
    if (text_.size() > kMaxText) clear_long();
    if ((num_longs_ + 1) * 2 > longs_.size()) grow_long();
    insert_long({hash_bytes(word.data(), word.size()), static_cast<uint32_t>(text_.size()),
                 static_cast<uint32_t>(word.size()), static_cast<uint32_t>(long_ids_.size()),
                 static_cast<uint32_t>(count)});
    text_.insert(text_.end(), word.begin(), word.end());
    long_ids_.insert(long_ids_.end(), ids, ids + count);
    ++num_longs_;
  }

 private:
  static constexpr int kFirstBits = 15;
  static constexpr size_t kMaxEntries = 1 << 20, kMaxMore = 1 << 23, kMaxText = 1 << 25;

  void clear() {
    entries_.clear();
    more_.clear();
    num_entries_ = 0;
  }
  void grow() {
    TableMemory<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    --shift_;
    for (const Entry& entry : old) {
      if (entry.key.high != 0) *find(entry.key, hash_of(entry.key)) = entry;
    }
  }
  void clear_long() {
    longs_.clear();
    text_.clear();
    long_ids_.clear();
    num_longs_ = 0;
  }
  void insert_long(const LongEntry& entry) {
    size_t i = entry.hash & (longs_.size() - 1);
    while (longs_[i].nbytes != 0) i = (i + 1) & (longs_.size() - 1);
    longs_[i] = entry;
  }
  void grow_long() {
    TableMemory<LongEntry> old(longs_.size() * 2);
    old.swap(longs_);
    for (const LongEntry& entry : old) {
      if (entry.nbytes != 0) insert_long(entry);
    }
  }

  TableMemory<Entry> entries_;
  int shift_ = 64 - kFirstBits;
  size_t num_entries_ = 0;
  std::vector<int32_t> more_;
  TableMemory<LongEntry> longs_;
  size_t num_longs_ = 0;
  std::vector<char> text_;
  std::vector<int32_t> long_ids_;
};

}  // namespace tessera::text
