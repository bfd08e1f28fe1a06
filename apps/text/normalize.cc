#include "apps/text/normalize.h"

#include <algorithm>

#include "apps/text/regex.h"
#include "apps/text/unicode.h"

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

/// Characters one by one.
class Mapped : public Normalizer {
 public:
  void apply(std::string& text) const override {
    std::string out;
    out.reserve(text.size());
    for_each_character(text, [&](char32_t c) { append(out, c); });
    text = std::move(out);
  }
  bool keeps(std::string_view) const override { return false; }
  bool is_local() const override { return true; }

 protected:
  virtual void append(std::string& out, char32_t c) const = 0;
  Properties properties_;
};

class Lowercase : public Mapped {
  void append(std::string& out, char32_t c) const override { append_lower(out, c); }
};

class StripAccents : public Mapped {
  void append(std::string& out, char32_t c) const override {
    if ((properties_(c) & kAccent) == 0) append_utf8(out, c);
  }
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
    std::string out;
    out.reserve(text.size() + 16);
    if (clean_ || ideographs_) {
      for_each_character(text, [&](char32_t c) { append_clean(out, c); });
      text.swap(out);
    }
    if (strips_) {
      if (!is_surely_normal(text, NormalForm::kNfd)) text = normal_form(text, NormalForm::kNfd);
      out.clear();
      for_each_character(text, [&](char32_t c) {
        if ((properties_(c) & kBertAccent) == 0) append_utf8(out, c);
      });
      text.swap(out);
    }
    if (lowers_) {
      out.clear();
      for_each_character(text, [&](char32_t c) { append_lower(out, c); });
      text.swap(out);
    }
  }
  bool keeps(std::string_view) const override { return false; }
  bool is_local() const override { return true; }

 private:
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
  return [sought = node["String"].text()](std::string_view text) {
    std::vector<std::pair<size_t, size_t>> found;
    if (sought.empty()) return found;
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
