// From the bytes of a conversation that are to be learned to its tokens, and to a terminal.

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "apps/text/chat.h"
#include "apps/text/unicode.h"
#include "core/check.h"
#include "core/text.h"
#include "core/utf8.h"

namespace tessera::text {

using jinja::Span;

std::string show(const RenderedChat& chat, bool has_colour) {
  constexpr std::string_view kGreen = "\x1b[32m", kDim = "\x1b[2m", kPlain = "\x1b[0m";
  const std::string_view text = chat.text;
  std::string out;
  const auto add = [&](size_t begin, size_t end, bool is_trained) {
    if (begin >= end) return;
    const std::string shown = printable(text.substr(begin, end - begin), "\n");
    if (has_colour) {
      out += is_trained ? kGreen : kDim;
      out += shown;
      out += kPlain;
    } else {
      out += is_trained ? "[[" + shown + "]]" : shown;
    }
  };
  size_t at = 0;
  for (const Span& span : chat.trained) {
    add(at, span.begin, false);
    add(span.begin, span.end, true);
    at = span.end;
  }
  add(at, text.size(), false);
  return out;
}

EncodeWithOffsets with_offsets(std::function<std::vector<int32_t>(std::string_view)> encode,
                               std::function<std::string(int32_t)> decode) {
  return [encode, decode](std::string_view text, std::vector<int32_t>& ids,
                          std::vector<Span>& offsets) {
    ids = encode(text);
    offsets.clear();
    size_t at = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::string whole = decode(ids[i]);
      std::string_view piece = whole;
      size_t begin = at;
      if (piece.starts_with(' ') && !text.substr(at).starts_with(piece) &&
          text.substr(at).starts_with(piece.substr(1))) {
        piece.remove_prefix(1);
      }
      while (begin < text.size() && text[begin] == ' ' && !text.substr(begin).starts_with(piece)) {
        ++begin;
      }
      if (!text.substr(begin).starts_with(piece)) {
        throw InputError(fmt::format(
            "id {} at place {} is {}, expected {} from byte {} on: the tokenizer changes the text, "
            "so what is to be learned cannot be found in it",
            ids[i], i, printable(shorten(piece, 40)), printable(shorten(text.substr(at), 40)), at));
      }
      offsets.push_back({at, begin + piece.size()});
      at = begin + piece.size();
    }
    // Spaces at the end that no token is written with belong to the last one.
    const size_t end = text.find_last_not_of(' ');
    if (at < text.size() && (end == std::string_view::npos || at > end) && !offsets.empty()) {
      offsets.back().end = at = text.size();
    }
    if (at < text.size()) {
      throw InputError(fmt::format("{} from byte {} on has no ids",
                                   printable(shorten(text.substr(at), 40)), at));
    }
  };
}

TokenizedChat tokenize(const RenderedChat& chat, const EncodeWithOffsets& encode) {
  TokenizedChat result;
  std::vector<Span> offsets;
  encode(chat.text, result.ids, offsets);
  if (offsets.size() != result.ids.size()) {
    throw InternalError(
        fmt::format("tokenize: {} offsets of {} ids", offsets.size(), result.ids.size()));
  }
  result.is_trained.assign(result.ids.size(), 0);
  size_t first = 0;
  for (const Span& span : chat.trained) {
    while (first < offsets.size() && offsets[first].end <= span.begin) ++first;
    size_t end = first;
    for (size_t i = first; i < offsets.size() && offsets[i].begin < span.end; ++i) {
      if (offsets[i].end > span.begin) end = i + 1;
    }
    if (end == first) {
      throw InputError(
          fmt::format("bytes {} to {} of a conversation are to be learned, but no token has any "
                      "of them",
                      span.begin, span.end));
    }
    std::fill(result.is_trained.begin() + static_cast<int64_t>(first),
              result.is_trained.begin() + static_cast<int64_t>(end), uint8_t{1});
  }
  return result;
}

namespace {

/// The text in which characters are composed, if it is composed part by part as well.
std::optional<RenderedChat> composed(const RenderedChat& chat) {
  RenderedChat result;
  const std::string_view text = chat.text;
  size_t at = 0;
  const auto add = [&](size_t end) {
    result.text += normal_form(text.substr(at, end - at), NormalForm::kNfc);
    at = end;
    return result.text.size();
  };
  for (const Span& span : chat.trained) {
    const size_t begin = add(span.begin);
    result.trained.push_back({begin, add(span.end)});
  }
  add(text.size());
  if (result.text != normal_form(text, NormalForm::kNfc)) return std::nullopt;
  return result;
}

}  // namespace

ChatTokenizer::ChatTokenizer(std::shared_ptr<const Tokenizer> tokenizer)
    : tokenizer_(std::move(tokenizer)) {
  const auto pieces = std::make_shared<std::unordered_map<int32_t, std::string>>();
  encode_ = with_offsets([own = tokenizer_](std::string_view text) { return own->encode(text); },
                         [own = tokenizer_, pieces](int32_t id) {
                           const auto [at, is_new] = pieces->try_emplace(id);
                           // Behind another one: decoders treat the first of a text apart.
                           if (is_new)
                             at->second = own->decode({id, id}).substr(own->decode({id}).size());
                           return at->second;
                         });
}

TokenizedChat ChatTokenizer::tokenize(const RenderedChat& chat) const {
  try {
    return text::tokenize(chat, encode_);
  } catch (const InputError&) {
    if (find_invalid_utf8(chat.text) < chat.text.size()) throw;
    const std::optional<RenderedChat> other = composed(chat);
    if (!other || other->text == chat.text ||
        tokenizer_->encode(other->text) != tokenizer_->encode(chat.text)) {
      throw;
    }
    return text::tokenize(*other, encode_);
  }
}

}  // namespace tessera::text
