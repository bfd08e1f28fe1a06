#include "apps/text/wordpiece.h"

#include <fmt/format.h>

#include <algorithm>

#include "apps/text/unicode.h"
#include "apps/text/work.h"
#include "core/check.h"

namespace tessera::text {

WordPiece::WordPiece(const Vocabulary& vocabulary, Rules rules)
    : vocabulary_(vocabulary), rules_(std::move(rules)) {
  for (int64_t id = 0; id < vocabulary.num_ids(); ++id) {
    const std::string* token = vocabulary.token(static_cast<int32_t>(id));
    if (token != nullptr) longest_nbytes_ = std::max(longest_nbytes_, token->size());
  }
}

void WordPiece::encode(std::string_view word, std::vector<int32_t>& ids) const {
  const size_t first = ids.size();
  const auto num_characters =
      std::count_if(word.begin(), word.end(), [](char c) { return (c & 0xc0) != 0x80; });
  bool is_known = num_characters <= rules_.max_characters;
  std::string piece;
  for (size_t begin = 0; is_known && begin < word.size();) {
    const std::string_view prefix = begin == 0 ? std::string_view() : rules_.prefix;
    const size_t longest = longest_nbytes_ - std::min(longest_nbytes_, prefix.size());
    size_t end = begin + std::min(word.size() - begin, longest);
    int32_t id = -1;
    while (end > begin) {
      const bool is_cut = end < word.size() && (word[end] & 0xc0) == 0x80;  // inside a character
      if (!is_cut) {
        piece.assign(prefix);
        piece += word.substr(begin, end - begin);
        id = vocabulary_.id_of(piece);
        ++counted_work();
        if (id >= 0) break;
      }
      --end;
    }
    is_known = id >= 0;
    if (is_known) ids.push_back(id);
    begin = end;
  }
  if (is_known) return;
  ids.resize(first);
  const int32_t unk = vocabulary_.id_of(rules_.unk_token);
  if (unk < 0) {
    throw InputError(
        fmt::format("tokenizer: '{}' is not in the vocabulary, and neither is "
                    "model.unk_token = '{}'",
                    word.substr(0, 100), rules_.unk_token));
  }
  ids.push_back(unk);
}

}  // namespace tessera::text
