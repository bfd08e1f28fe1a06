#include "apps/text/vocabulary.h"

#include "apps/text/word_cache.h"

namespace tessera::text {

size_t Vocabulary::Hash::operator()(std::string_view text) const {
  return hash_bytes(text.data(), text.size());
}

void Vocabulary::add(std::string_view token, int32_t id) {
  const auto [found, is_new] = ids_.insert_or_assign(std::string(token), id);
  if (static_cast<size_t>(id) >= tokens_.size()) tokens_.resize(static_cast<size_t>(id) + 1);
  tokens_[static_cast<size_t>(id)] = &found->first;
}

int32_t Vocabulary::id_of(std::string_view token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? -1 : found->second;
}

const std::string* Vocabulary::token(int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= tokens_.size()) return nullptr;
  return tokens_[static_cast<size_t>(id)];
}

}  // namespace tessera::text
