#include "apps/text/normalize.h"

#include <algorithm>
#include <cstring>

#include "apps/text/regex.h"
#include "apps/text/unicode.h"
#include "apps/text/work.h"

namespace tessera::text {
namespace {

class Form : public Normalizer {
 public:
  explicit Form(NormalForm form) : form_(form) {}
  void apply(std::string& text) const override { text = normal_form(text, form_); }
  bool keeps(std::string_view text) const override { return is_surely_normal(text, form_); }
  bool is_local() const override { return true; }

 private:
  NormalForm form_;
};

class Lowercase : public Normalizer {
 public:
  void apply(std::string& text) const override {
    std::string out;
    out.reserve(text.size());
    append_lower(out, text);
    text = std::move(out);
  }
  bool keeps(std::string_view) const override { return false; }
  bool is_local() const override { return true; }
};

/// Drops the characters of a property that no ASCII character has.
void drop(std::string& text, uint32_t property, const Properties& properties) {
  size_t out = 0;
  for (size_t at = 0; at < text.size();) {
    size_t nbytes = ascii_nbytes(std::string_view(text).substr(at));
    if (nbytes == 0) {
      nbytes = utf8_nbytes(text[at]);
      if ((properties(utf8_decode(text.data() + at)) & property) != 0) {
        at += nbytes;
        continue;
      }
    }
    if (out != at) std::memmove(text.data() + out, text.data() + at, nbytes);
    out += nbytes;
    at += nbytes;
  }
  text.resize(out);
}

class StripAccents : public Normalizer {
 public:
  void apply(std::string& text) const override { drop(text, kAccent, properties_); }
  bool keeps(std::string_view text) const override { return ascii_nbytes(text) == text.size(); }
  bool is_local() const override { return true; }

 private:
  Properties properties_;
};

class Strip : public Normalizer {
 public:
  Strip(bool left, bool right) : left_(left), right_(right) {}
  void apply(std::string& text) const override {
    size_t begin = 0, end = text.size();
    const auto is_white = [&](size_t at) {
      return (properties_(utf8_decode(text.data() + at)) & kWhite) != 0;
    };
    while (left_ && begin < end && is_white(begin)) begin += utf8_nbytes(text[begin]);
    while (right_ && end > begin) {
      size_t last = end - 1;
      while ((static_cast<unsigned char>(text[last]) & 0xc0u) == 0x80u) --last;
      if (!is_white(last)) break;
      end = last;
    }
    text = text.substr(begin, end - begin);
  }
  bool keeps(std::string_view) const override { return false; }

 private:
  bool left_, right_;
  Properties properties_;
};

class Prepend : public Normalizer {
 public:
  explicit Prepend(std::string prefix) : prefix_(std::move(prefix)) {}
  void apply(std::string& text) const override {
    if (!text.empty()) text.insert(0, prefix_);
  }
  bool keeps(std::string_view text) const override { return text.empty(); }

 private:
  std::string prefix_;
};

class Replace : public Normalizer {
 public:
  Replace(FindAll find, std::string content)
      : find_(std::move(find)), content_(std::move(content)) {}
  void apply(std::string& text) const override { replace_all(text, find_, content_); }
  bool keeps(std::string_view) const override { return false; }

 private:
  FindAll find_;
  std::string content_;
};

class Sequence : public Normalizer {
 public:
  explicit Sequence(std::vector<std::unique_ptr<Normalizer>> parts) : parts_(std::move(parts)) {}
  void apply(std::string& text) const override {
    for (const auto& part : parts_) {
      if (!part->keeps(text)) part->apply(text);
    }
  }
  bool keeps(std::string_view text) const override {
    return std::all_of(parts_.begin(), parts_.end(), [&](auto& p) { return p->keeps(text); });
  }
  bool is_local() const override {
    return std::all_of(parts_.begin(), parts_.end(), [](auto& p) { return p->is_local(); });
  }

 private:
  std::vector<std::unique_ptr<Normalizer>> parts_;
};

/// BERT's: control characters go and whitespace becomes spaces; ideographs stand alone; accents
/// go; small letters.
class Bert : public Normalizer {
 public:
  Bert(bool clean, bool ideographs, bool strip_accents, bool lowercase)
      : clean_(clean), ideographs_(ideographs), strips_(strip_accents), lowers_(lowercase) {}
  void apply(std::string& text) const override {
    std::string out, stretch;
    out.reserve(text.size() + 16);
    const std::string_view all(text);
    for (size_t at = 0; at < all.size();) {
      // ASCII that stays needs no more than its case, and no mark behind it is ordered past it.
      const size_t end = at + plain_nbytes(all.substr(at));
      if (lowers_) {
        append_ascii_lower(out, all.substr(at, end - at));
      } else {
        out += all.substr(at, end - at);
      }
      at = end;
      while (at < all.size() && !is_plain(all[at])) {
        const size_t nbytes = utf8_nbytes(all[at]);
        append_clean(stretch, utf8_decode(all.data() + at));
        at += nbytes;
      }
      counted_work() += static_cast<int64_t>(at - end);
      if (stretch.empty()) continue;
      if (strips_) {
        if (!is_surely_normal(stretch, NormalForm::kNfd)) {
          stretch = normal_form(stretch, NormalForm::kNfd);
        }
        drop(stretch, kBertAccent, properties_);
      }
      if (lowers_) {
        append_lower(out, stretch);
      } else {
        out += stretch;
      }
      stretch.clear();
    }
    text = std::move(out);
  }
  bool keeps(std::string_view) const override { return false; }
  bool is_local() const override { return true; }

 private:
  /// ASCII that cleaning keeps.
  static bool is_plain(char c) { return c >= ' ' && c != 0x7f; }
  static size_t plain_nbytes(std::string_view text) {
    size_t at = 0;
    while (at < text.size() && is_plain(text[at])) ++at;
    return at;
  }
  static bool is_ideograph(char32_t c) {
    constexpr std::pair<char32_t, char32_t> kRanges[] = {
        {0x4e00, 0x9fff},   {0x3400, 0x4dbf},   {0x20000, 0x2a6df}, {0x2a700, 0x2b73f},
        {0x2b740, 0x2b81f}, {0x2b920, 0x2ceaf}, {0xf900, 0xfaff},   {0x2f800, 0x2fa1f}};
    return c >= 0x3400 && std::any_of(std::begin(kRanges), std::end(kRanges), [&](auto& range) {
             return c >= range.first && c <= range.second;
           });
  }
  void append_clean(std::string& out, char32_t c) const {
    const uint32_t bits = clean_ ? properties_(c) : 0;
    if ((bits & kBertControl) != 0) return;
    if ((bits & kBertSpace) != 0) {
      out += ' ';
    } else if (ideographs_ && is_ideograph(c)) {
      out += ' ';
      append_utf8(out, c);
      out += ' ';
    } else {
      append_utf8(out, c);
    }
  }

  bool clean_, ideographs_, strips_, lowers_;
  Properties properties_;
};

}  // namespace

void replace_all(std::string& text, const FindAll& find, std::string_view content) {
  const auto matches = find(text);
  if (matches.empty()) return;
  std::string out;
  out.reserve(text.size());
  size_t done = 0;
  for (const auto& [begin, end] : matches) {
    out.append(text, done, begin - done);
    out += content;
    done = end;
  }
  out.append(text, done);
  text = std::move(out);
}

FindAll parse_pattern(const JsonNode& node) {
  node.check_keys({"String", "Regex"});
  if (!node["Regex"].is_null()) {
    const JsonNode regex = node["Regex"];
    return [code = std::make_shared<Regex>(regex.text(), regex.place())](std::string_view text) {
      return code->find_all(text);
    };
  }
  if (node["String"].text().empty()) node["String"].fail("a text that is not empty");
  return [sought = node["String"].text()](std::string_view text) {
    std::vector<std::pair<size_t, size_t>> found;
    for (size_t at = text.find(sought); at != std::string_view::npos;
         at = text.find(sought, at + sought.size())) {
      found.emplace_back(at, at + sought.size());
    }
    return found;
  };
}

std::unique_ptr<Normalizer> parse_normalizer(const JsonNode& node) {
  if (node.is_null()) return nullptr;
  const size_t type =
      node["type"].one_of({"Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents",
                           "Strip", "Prepend", "Replace", "BertNormalizer"});
  if (type >= 1 && type <= 6) node.check_keys({"type"});
  switch (type) {
    case 0: {
      node.check_keys({"type", "normalizers"});
      std::vector<std::unique_ptr<Normalizer>> parts;
      const JsonNode list = node["normalizers"];
      for (size_t i = 0; i < list.size(); ++i) {
        parts.push_back(parse_normalizer(list.at(i)));
        if (parts.back() == nullptr) list.at(i).fail("a normalizer");
      }
      return std::make_unique<Sequence>(std::move(parts));
    }
    case 1:
      return std::make_unique<Form>(NormalForm::kNfc);
    case 2:
      return std::make_unique<Form>(NormalForm::kNfd);
    case 3:
      return std::make_unique<Form>(NormalForm::kNfkc);
    case 4:
      return std::make_unique<Form>(NormalForm::kNfkd);
    case 5:
      return std::make_unique<Lowercase>();
    case 6:
      return std::make_unique<StripAccents>();
    case 7:
      node.check_keys({"type", "strip_left", "strip_right"});
      return std::make_unique<Strip>(node["strip_left"].flag(), node["strip_right"].flag());
    case 8:
      node.check_keys({"type", "prepend"});
      return std::make_unique<Prepend>(node["prepend"].text());
    case 9:
      node.check_keys({"type", "pattern", "content"});
      return std::make_unique<Replace>(parse_pattern(node["pattern"]), node["content"].text());
    default:
      break;
  }
  node.check_keys({"type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"});
  const bool lowercase = node["lowercase"].flag();
  return std::make_unique<Bert>(node["clean_text"].flag(), node["handle_chinese_chars"].flag(),
                                node["strip_accents"].flag_or(lowercase), lowercase);
}

}  // namespace tessera::text
