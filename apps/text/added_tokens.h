#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::text {

/// A token that is found in the text itself, before words are cut.
struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool single_word = false;  ///< only where no part of a word stands beside it
  bool lstrip = false;       ///< with the whitespace before it
  bool rstrip = false;       ///< and behind it
  bool normalized = false;   ///< sought in the normalized text, and is itself normalized
  bool special = false;      ///< may be left out of decoded text
};

/// Finds some tokens: the leftmost, of several there the longest. Time is that of the text times
/// the longest token at most; a text without their first bytes is passed over quickly.
class AddedTokenFinder {
 public:
  /// `contents` are what is sought, one for each token (normalized as the text is).
  AddedTokenFinder(std::vector<AddedToken> tokens, const std::vector<std::string>& contents);

  bool is_empty() const { return tokens_.empty(); }

  /// The stretches of a valid text in order: f(begin, end, nullptr) for one without tokens, which is
  /// not empty, and f(begin, end, &token).
  void split(std::string_view text,
             const std::function<void(size_t, size_t, const AddedToken*)>& f) const;

 private:
  struct Node {
    std::unordered_map<char, uint32_t> next;
    const AddedToken* token = nullptr;
  };
  const AddedToken* longest_at(std::string_view text, size_t at, size_t* nbytes) const;
  size_t candidate(std::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> trie_;
  std::vector<char> first_bytes_;
  bool is_first_[256] = {};
};

}  // namespace tessera::text
