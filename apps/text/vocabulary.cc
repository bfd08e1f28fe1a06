#include "apps/text/vocabulary.h"

#include <algorithm>

#include "apps/text/word_cache.h"
#include "core/check.h"

namespace tessera::text {
namespace {

constexpr int kIndexBits = 28;  // a file has fewer tokens than bytes
constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;

uint64_t hash_of(std::string_view token) {
  return hash_bytes(token.data(), token.size());
}

}  // namespace

/// Where the token is, or would go.
size_t Vocabulary::slot_of(std::string_view token, uint64_t hash) const {
  size_t i = hash & (slots_.size() - 1);
  while (slots_[i] != 0 && (slots_[i] >> kIndexBits != hash >> kIndexBits ||
                            entries_[(slots_[i] & kIndexMask) - 1].token != token)) {
    i = (i + 1) & (slots_.size() - 1);
  }
  return i;
}

void Vocabulary::reserve(size_t num_tokens) {
  size_t count = std::max<size_t>(slots_.size(), 16);
  while (count < num_tokens * 2) count *= 2;
  if (count == slots_.size()) return;
  slots_ = TableMemory<uint64_t>(count);
  for (size_t i = 0; i < entries_.size(); ++i) {
    const uint64_t hash = hash_of(entries_[i].token);
    slots_[slot_of(entries_[i].token, hash)] = hash >> kIndexBits << kIndexBits | (i + 1);
  }
}

void Vocabulary::add(std::string_view token, int32_t id) {
  reserve(entries_.size() + 1);
  const uint64_t hash = hash_of(token);
  uint64_t& slot = slots_[slot_of(token, hash)];
  TESSERA_DCHECK(slot == 0);
  entries_.push_back({std::string(token), id});
  slot = hash >> kIndexBits << kIndexBits | entries_.size();
  if (static_cast<size_t>(id) >= tokens_.size()) tokens_.resize(static_cast<size_t>(id) + 1);
  tokens_[static_cast<size_t>(id)] = &entries_.back().token;
}

int32_t Vocabulary::id_of(std::string_view token) const {
  if (entries_.empty()) return -1;
  const uint64_t slot = slots_[slot_of(token, hash_of(token))];
  return slot == 0 ? -1 : entries_[(slot & kIndexMask) - 1].id;
}

const std::string* Vocabulary::token(int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= tokens_.size()) return nullptr;
  return tokens_[static_cast<size_t>(id)];
}

}  // namespace tessera::text
