#include "apps/text/pretokenize.h"

#include <algorithm>
#include <functional>

#include "apps/text/bpe.h"
#include "apps/text/normalize.h"
#include "apps/text/work.h"

namespace tessera::text {
namespace {

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kGpt4Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kGpt4oPattern =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

std::string replaced(std::string text, std::string_view old, std::string_view by) {
  for (size_t at = text.find(old); at != std::string::npos; at = text.find(old, at + by.size())) {
    text.replace(at, old.size(), by);
  }
  return text;
}

const std::string& qwen2_pattern() {
  static const std::string pattern =
      replaced(std::string(kGpt4Pattern), R"(\p{N}{1,3})", R"(\p{N})");
  return pattern;
}
const std::string& tekken_pattern() {
  static const std::string pattern =
      replaced(replaced(std::string(kGpt4oPattern), R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)", ""),
               R"(\p{N}{1,3})", R"(\p{N})");
  return pattern;
}

enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
Behavior parse_behavior(const JsonNode& node) {
  return static_cast<Behavior>(
      node.one_of({"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}));
}

using Ranges = std::vector<std::pair<size_t, size_t>>;

/// Cuts a stretch of `nbytes` that begins at `offset` of a text, by what was found in it, and
/// appends what is left.
void split(std::vector<Pieces::Piece>& out, size_t offset, size_t nbytes, const Ranges& found,
           Behavior behavior, bool invert) {
  struct Part {
    size_t begin, end;
    bool is_match;
  };
  const auto for_each_part = [&](auto&& f) {
    size_t done = 0;
    for (const auto& [begin, end] : found) {
      if (done != begin) f(Part{done, begin, invert});
      f(Part{begin, end, !invert});
      done = end;
    }
    if (done != nbytes) f(Part{done, nbytes, invert});
  };
  const size_t first = out.size();
  const auto push = [&](const Part& part) {
    out.push_back({offset + part.begin, offset + part.end});
  };
  bool before = false;
  if (behavior == Behavior::kMergedWithNext) {
    std::vector<Part> parts;
    for_each_part([&](const Part& part) { parts.push_back(part); });
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      if (part->is_match && !before && out.size() > first) {
        out.back().begin = offset + part->begin;
      } else {
        push(*part);
      }
      before = part->is_match;
    }
    std::reverse(out.begin() + static_cast<std::ptrdiff_t>(first), out.end());
  } else {
    for_each_part([&](const Part& part) {
      const bool joins = behavior == Behavior::kContiguous           ? part.is_match == before
                         : behavior == Behavior::kMergedWithPrevious ? part.is_match && !before
                                                                     : false;
      if (joins && out.size() > first) {
        out.back().end = offset + part.end;
      } else if (behavior != Behavior::kRemoved || !part.is_match) {
        push(part);
      }
      before = part.is_match;
    });
  }
  out.erase(std::remove_if(out.begin() + static_cast<std::ptrdiff_t>(first), out.end(),
                           [](const auto& piece) { return piece.begin == piece.end; }),
            out.end());
}

class Split : public PreTokenizer {
 public:
  Split(FindAll find, Behavior behavior, bool invert)
      : find_(std::move(find)), behavior_(behavior), invert_(invert) {}
  void apply(Pieces& pieces) const override {
    std::vector<Pieces::Piece> out;
    bool drops_start = false;
    for (const auto& piece : pieces.pieces) {
      const std::string_view text = pieces.view(piece);
      counted_work() += static_cast<int64_t>(text.size());
      split(out, piece.begin, text.size(), find_(text), behavior_, invert_);
      if (&piece == &pieces.pieces.front()) {
        drops_start = out.empty() || out.front().begin != piece.begin;
      }
    }
    pieces.pieces = std::move(out);
    if (drops_start) pieces.is_at_start = false;
  }

 private:
  FindAll find_;
  Behavior behavior_;
  bool invert_;
};

/// Finds each character that is `wanted`, alone.
FindAll find_characters(std::function<bool(char32_t)> wanted) {
  return [wanted = std::move(wanted)](std::string_view text) {
    Ranges found;
    for (size_t at = 0; at < text.size(); at += utf8_nbytes(text[at])) {
      if (wanted(utf8_decode(text.data() + at))) found.emplace_back(at, at + utf8_nbytes(text[at]));
    }
    return found;
  };
}
FindAll find_property(uint32_t property) {
  return find_characters([property, properties = Properties()](char32_t c) {
    return (properties(c) & property) != 0;
  });
}

FindAll find_pattern(const KnownPattern& pattern) {
  return [pattern](std::string_view text) {
    return with_scanner(pattern, [&](const auto& scanner) {
      Ranges found;
      const char *p = text.data(), *const end = p + text.size();
      while (p < end) {
        const char* const next = scanner.next(p, end);
        found.emplace_back(p - text.data(), next - text.data());
        p = next;
      }
      return found;
    });
  };
}

/// \w+|[^\w\s]+ with the words and the whitespace of Rust.
Ranges find_words(std::string_view text) {
  const Properties properties;
  Ranges found;
  const auto kind = [&](size_t at) {
    const uint32_t bits = properties(utf8_decode(text.data() + at));
    return (bits & kWord) != 0 ? 0 : (bits & kWhite) != 0 ? 1 : 2;
  };
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const int own = kind(at);
    while (at < text.size() && kind(at) == own) at += utf8_nbytes(text[at]);
    if (own != 1) found.emplace_back(begin, at);
  }
  return found;
}

Ranges find_lengths(std::string_view text, int64_t length) {
  Ranges found;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    for (int64_t i = 0; i < length && at < text.size(); ++i) at += utf8_nbytes(text[at]);
    found.emplace_back(begin, at);
  }
  return found;
}

/// A new text of the pieces, each as `f` writes it.
template <class F>
void rewrite(Pieces& pieces, F&& f) {
  std::string text;
  text.reserve(pieces.text.size() + 16);
  for (auto& piece : pieces.pieces) {
    const size_t begin = text.size();
    f(text, pieces.view(piece), &piece == &pieces.pieces.front());
    piece = {begin, text.size()};
  }
  pieces.text = std::move(text);
}

class PrefixSpace : public PreTokenizer {
 public:
  void apply(Pieces& pieces) const override {
    rewrite(pieces, [](std::string& out, std::string_view text, bool) {
      if (!text.starts_with(' ')) out += ' ';
      out += text;
    });
  }
};

class MapBytes : public PreTokenizer {
 public:
  void apply(Pieces& pieces) const override { map_bytes(pieces); }
};

class Metaspace : public PreTokenizer {
 public:
  enum Scheme { kAlways, kFirst, kNever };
  Metaspace(std::string mark, Scheme scheme, bool splits)
      : mark_(std::move(mark)), scheme_(scheme), splits_(splits) {}
  void apply(Pieces& pieces) const override {
    const bool is_at_start = pieces.is_at_start;
    rewrite(pieces, [&](std::string& out, std::string_view text, bool is_first) {
      const bool wanted = scheme_ == kAlways || (scheme_ == kFirst && is_first && is_at_start);
      if (wanted && !text.starts_with(' ') && !text.starts_with(mark_)) out += mark_;
      for (const char c : text) {
        if (c == ' ') {
          out += mark_;
        } else {
          out += c;
        }
      }
    });
    if (!splits_) return;
    std::vector<Pieces::Piece> out;
    for (const auto& piece : pieces.pieces) {
      Ranges found;
      const std::string_view text = pieces.view(piece);
      for (size_t at = text.find(mark_); at != std::string_view::npos;
           at = text.find(mark_, at + mark_.size())) {
        found.emplace_back(at, at + mark_.size());
      }
      split(out, piece.begin, text.size(), found, Behavior::kMergedWithNext, false);
    }
    pieces.pieces = std::move(out);
  }

 private:
  std::string mark_;
  Scheme scheme_;
  bool splits_;
};

std::unique_ptr<PreTokenizer> make_split(FindAll find, Behavior behavior, bool invert = false) {
  return std::make_unique<Split>(std::move(find), behavior, invert);
}

char32_t parse_character(const JsonNode& node) {
  const std::string text = node.text();
  if (text.empty() || utf8_nbytes(text[0]) != text.size()) node.fail("one character");
  return utf8_decode(text.data());
}

void add_metaspace(const JsonNode& node, PreTokenization& all) {
  node.check_keys(
      {"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
  parse_character(node["replacement"]);
  auto scheme = Metaspace::kAlways;
  if (!node["prepend_scheme"].is_null()) {
    scheme =
        static_cast<Metaspace::Scheme>(node["prepend_scheme"].one_of({"always", "first", "never"}));
  }
  if (!node["add_prefix_space"].flag_or(true)) scheme = Metaspace::kNever;
  all.steps.push_back(
      std::make_unique<Metaspace>(node["replacement"].text(), scheme, node["split"].flag_or(true)));
}

void add_split(const JsonNode& node, PreTokenization& all) {
  node.check_keys({"type", "pattern", "behavior", "invert"});
  const auto behavior = parse_behavior(node["behavior"]);
  const bool invert = node["invert"].flag();
  const JsonNode regex = node["pattern"]["Regex"];
  const auto known = regex.is_null() ? std::nullopt : known_pattern(regex.text());
  if (!known) {
    all.steps.push_back(make_split(parse_pattern(node["pattern"]), behavior, invert));
    return;
  }
  // Every character is in a match, so what is matched is what is left.
  if (all.steps.empty() && behavior == (invert ? Behavior::kRemoved : Behavior::kIsolated)) {
    all.pattern = known;
  }
  all.steps.push_back(make_split(find_pattern(*known), behavior, invert));
}

void add_byte_level(const JsonNode& node, PreTokenization& all) {
  node.check_keys({"type", "add_prefix_space", "trim_offsets", "use_regex"});
  if (node["add_prefix_space"].flag_or(true)) {
    all.steps.push_back(std::make_unique<PrefixSpace>());
    all.pattern.reset();
  }
  if (node["use_regex"].flag_or(true)) {
    const KnownPattern gpt2{KnownPattern::kGpt2};
    if (all.steps.empty()) {
      all.pattern = gpt2;
    } else {
      all.pattern.reset();
    }
    all.steps.push_back(make_split(find_pattern(gpt2), Behavior::kIsolated));
  }
  all.is_byte_level = true;
}

void add_steps(const JsonNode& node, PreTokenization& all) {
  const size_t type = node["type"].one_of(
      {"Sequence", "ByteLevel", "Split", "Metaspace", "Digits", "Punctuation", "Whitespace",
       "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit", "FixedLength"});
  if (all.is_byte_level) {  // what follows sees the characters that stand for bytes
    all.steps.push_back(std::make_unique<MapBytes>());
    all.is_byte_level = false;
    all.pattern.reset();
  }
  if (type >= 3 && all.pattern) all.pattern.reset();
  switch (type) {
    case 0: {
      node.check_keys({"type", "pretokenizers"});
      const JsonNode list = node["pretokenizers"];
      for (size_t i = 0; i < list.size(); ++i) add_steps(list.at(i), all);
      return;
    }
    case 1:
      return add_byte_level(node, all);
    case 2:
      if (!all.steps.empty()) all.pattern.reset();
      return add_split(node, all);
    case 3:
      return add_metaspace(node, all);
    case 4:
      node.check_keys({"type", "individual_digits"});
      all.steps.push_back(make_split(find_property(kNumeric), node["individual_digits"].flag()
                                                                  ? Behavior::kIsolated
                                                                  : Behavior::kContiguous));
      return;
    case 5: {
      node.check_keys({"type", "behavior"});
      const auto behavior =
          node["behavior"].is_null() ? Behavior::kIsolated : parse_behavior(node["behavior"]);
      all.steps.push_back(make_split(find_property(kPunctuation), behavior));
      return;
    }
    case 6:
      node.check_keys({"type"});
      all.steps.push_back(make_split(find_words, Behavior::kRemoved, true));
      return;
    case 7:
      node.check_keys({"type"});
      all.steps.push_back(make_split(find_property(kWhite), Behavior::kRemoved));
      return;
    case 8:
      node.check_keys({"type"});
      all.steps.push_back(make_split(find_property(kWhite), Behavior::kRemoved));
      all.steps.push_back(make_split(find_property(kBertAlone), Behavior::kIsolated));
      return;
    case 9: {
      node.check_keys({"type", "delimiter"});
      const char32_t delimiter = parse_character(node["delimiter"]);
      all.steps.push_back(make_split(
          find_characters([delimiter](char32_t c) { return c == delimiter; }), Behavior::kRemoved));
      return;
    }
    default: {
      node.check_keys({"type", "length"});
      const int64_t length = node["length"].integer(1, INT32_MAX);
      all.steps.push_back(
          make_split([length](std::string_view text) { return find_lengths(text, length); },
                     Behavior::kIsolated));
    }
  }
}

}  // namespace

std::string_view pattern_by_name(std::string_view name) {
  if (name == "gpt2") return kGpt2Pattern;
  if (name == "gpt4" || name == "cl100k" || name == "llama3") return kGpt4Pattern;
  if (name == "gpt4o" || name == "o200k") return kGpt4oPattern;
  if (name == "qwen2") return qwen2_pattern();
  if (name == "tekken") return tekken_pattern();
  return {};
}

std::optional<KnownPattern> known_pattern(std::string_view regex) {
  if (regex == kGpt2Pattern) return KnownPattern{KnownPattern::kGpt2};
  if (regex == kGpt4Pattern) return KnownPattern{KnownPattern::kGpt4, 3};
  if (regex == qwen2_pattern()) return KnownPattern{KnownPattern::kGpt4, 1};
  if (regex == replaced(std::string(kGpt4Pattern), "{1,3}", "{1,2}")) {
    return KnownPattern{KnownPattern::kGpt4, 2};
  }
  if (regex == kGpt4oPattern) return KnownPattern{KnownPattern::kGpt4o, 3, true};
  if (regex == tekken_pattern()) return KnownPattern{KnownPattern::kGpt4o, 1, false};
  return std::nullopt;
}

PreTokenization parse_pre_tokenizer(const JsonNode& node) {
  PreTokenization all;
  if (!node.is_null()) add_steps(node, all);
  return all;
}

void map_bytes(Pieces& pieces) {
  rewrite(pieces, [](std::string& out, std::string_view text, bool) {
    for (const char c : text) out += byte_character(static_cast<unsigned char>(c));
  });
}

}  // namespace tessera::text
