#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "apps/text/vocabulary.h"

namespace tessera::text {

/// WordPiece (BERT): from the left the longest token of the vocabulary again and again, those
/// behind the first with a prefix; a word for which that does not work out, or that is too long, is
/// one unknown token.
class WordPiece {
 public:
  struct Rules {
    std::string unk_token = "[UNK]", prefix = "##";
    int64_t max_characters = 100;
  };
  WordPiece(const Vocabulary& vocabulary, Rules rules);

  /// Appends the ids of a word, which is not empty. Time: its length times the longest token's.
  /// Errors   InputError if it needs unk_token and the vocabulary lacks that
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

 private:
  const Vocabulary& vocabulary_;
  Rules rules_;
  size_t longest_nbytes_ = 0;
};

}  // namespace tessera::text
