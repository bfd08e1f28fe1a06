#include "apps/text/added_tokens.h"

#include <algorithm>
#include <cstring>

#include "apps/text/unicode.h"
#include "apps/text/work.h"

namespace tessera::text {
namespace {

/// The character that ends at `end` > 0.
char32_t character_before(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u) --at;
  return utf8_decode(text.data() + at);
}

size_t character_nbytes_before(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u) --at;
  return end - at;
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens,
                                   const std::vector<std::string>& contents)
    : tokens_(std::move(tokens)), trie_(1) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (contents[i].empty()) continue;
    uint32_t node = 0;
    for (const char c : contents[i]) {
      const auto [found, is_new] =
          trie_[node].next.try_emplace(c, static_cast<uint32_t>(trie_.size()));
      node = found->second;
      if (is_new) trie_.emplace_back();
    }
    if (trie_[node].token == nullptr) trie_[node].token = &tokens_[i];  // the first given counts
    is_first_[static_cast<unsigned char>(contents[i][0])] = true;
  }
  for (int c = 0; c < 256; ++c) {
    if (is_first_[c]) first_bytes_.push_back(static_cast<char>(c));
  }
}

/// The first place from `at` on where a token's first byte stands.
size_t AddedTokenFinder::candidate(std::string_view text, size_t at) const {
  if (first_bytes_.size() == 1) {
    const void* const found = std::memchr(text.data() + at, first_bytes_[0], text.size() - at);
    return found == nullptr ? text.size()
                            : static_cast<size_t>(static_cast<const char*>(found) - text.data());
  }
  while (at < text.size() && !is_first_[static_cast<unsigned char>(text[at])]) ++at;
  return at;
}

const AddedToken* AddedTokenFinder::longest_at(std::string_view text, size_t at,
                                               size_t* nbytes) const {
  const AddedToken* token = nullptr;
  uint32_t node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    ++counted_work();
    const auto found = trie_[node].next.find(text[i]);
    if (found == trie_[node].next.end()) break;
    node = found->second;
    if (trie_[node].token != nullptr) {
      token = trie_[node].token;
      *nbytes = i + 1 - at;
    }
  }
  return token;
}

void AddedTokenFinder::split(
    std::string_view text, const std::function<void(size_t, size_t, const AddedToken*)>& f) const {
  const Properties properties;
  const auto is_word = [&](char32_t c) { return (properties(c) & kWord) != 0; };
  const auto is_space = [&](char32_t c) { return (properties(c) & kWhite) != 0; };
  size_t done = 0;
  for (size_t at = 0; at < text.size() && !first_bytes_.empty();) {
    at = candidate(text, at);
    if (at >= text.size()) break;
    size_t nbytes = 0;
    const AddedToken* const token = longest_at(text, at, &nbytes);
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + nbytes;
    at = end;  // the search goes on there, whatever else the token takes in
    if (token->single_word && ((begin > 0 && is_word(character_before(text, begin))) ||
                               (end < text.size() && is_word(utf8_decode(text.data() + end))))) {
      continue;
    }
    if (token->lstrip) {
      while (begin > done && is_space(character_before(text, begin))) {
        begin -= character_nbytes_before(text, begin);
      }
      begin = std::max(begin, done);
    }
    if (token->rstrip) {
      while (end < text.size() && is_space(utf8_decode(text.data() + end))) {
        end += utf8_nbytes(text[end]);
      }
    }
    if (done < begin) f(done, begin, nullptr);
    f(begin, end, token);
    done = end;
  }
  if (done < text.size()) f(done, text.size(), nullptr);
}

}  // namespace tessera::text
