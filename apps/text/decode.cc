#include "apps/text/decode.h"

#include <algorithm>

#include "apps/text/bpe.h"
#include "apps/text/normalize.h"
#include "apps/text/unicode.h"

namespace tessera::text {
namespace {

std::string joined(const std::vector<std::string>& tokens) {
  std::string text;
  for (const std::string& token : tokens) text += token;
  return text;
}

void replace_text(std::string& text, std::string_view old, std::string_view by) {
  if (old.empty()) return;
  for (size_t at = text.find(old); at != std::string::npos; at = text.find(old, at + by.size())) {
    text.replace(at, old.size(), by);
  }
}

class ByteLevel : public Decoder {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    std::string text;
    for (const std::string& token : tokens) text += bytes_of_characters(token).value_or(token);
    tokens = {std::move(text)};
  }
  bool is_byte_level() const override { return true; }
};

class ByteFallback : public Decoder {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    std::vector<std::string> out;
    bool is_in_bytes = false;
    for (std::string& token : tokens) {
      const int byte = byte_of(token);
      if (byte < 0) {
        out.push_back(std::move(token));
      } else {
        if (!is_in_bytes) out.emplace_back();
        out.back() += static_cast<char>(byte);
      }
      is_in_bytes = byte >= 0;
    }
    tokens = std::move(out);
  }

 private:
  static int byte_of(const std::string& token) {
    if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
    int value = 0;
    for (const char c : {token[3], token[4]}) {
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                               : -1;
      if (digit < 0) return -1;
      value = value * 16 + digit;
    }
    return value;
  }
};

class Fuse : public Decoder {
 public:
  void apply(std::vector<std::string>& tokens) const override { tokens = {joined(tokens)}; }
};

class Metaspace : public Decoder {
 public:
  Metaspace(std::string mark, bool drops_first) : mark_(std::move(mark)), drops_(drops_first) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      replace_text(token, mark_, drops_ && &token == &tokens.front() ? "" : " ");
    }
  }

 private:
  std::string mark_;
  bool drops_;
};

class Replace : public Decoder {
 public:
  Replace(FindAll find, std::string content)
      : find_(std::move(find)), content_(std::move(content)) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) replace_all(token, find_, content_);
  }

 private:
  FindAll find_;
  std::string content_;
};

/// Takes up to `start` of a character off the front of each token and up to `stop` off its end.
class Strip : public Decoder {
 public:
  Strip(std::string content, int64_t start, int64_t stop)
      : content_(std::move(content)), start_(start), stop_(stop) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      size_t begin = 0, end = token.size();
      for (int64_t i = 0; i < start_; ++i) {
        if (token.compare(begin, content_.size(), content_) != 0) break;
        begin += content_.size();
      }
      for (int64_t i = 0; i < stop_ && end - begin >= content_.size(); ++i) {
        if (token.compare(end - content_.size(), content_.size(), content_) != 0) break;
        end -= content_.size();
      }
      token = token.substr(begin, end - begin);
    }
  }

 private:
  std::string content_;
  int64_t start_, stop_;
};

/// What a tokenizer of words puts between these, taken out again.
void clean_up(std::string& text) {
  for (const auto& [old, by] :
       std::initializer_list<std::pair<const char*, const char*>>{{" .", "."},
                                                                  {" ?", "?"},
                                                                  {" !", "!"},
                                                                  {" ,", ","},
                                                                  {" ' ", "'"},
                                                                  {" n't", "n't"},
                                                                  {" 'm", "'m"},
                                                                  {" do not", " don't"},
                                                                  {" 's", "'s"},
                                                                  {" 've", "'ve"},
                                                                  {" 're", "'re"}}) {
    replace_text(text, old, by);
  }
}

class WordPieces : public Decoder {
 public:
  WordPieces(std::string prefix, bool cleanup) : prefix_(std::move(prefix)), cleanup_(cleanup) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      if (&token != &tokens.front()) {
        if (token.starts_with(prefix_)) {
          token.erase(0, prefix_.size());
        } else {
          token.insert(0, " ");
        }
      }
      if (cleanup_) clean_up(token);
    }
  }

 private:
  std::string prefix_;
  bool cleanup_;
};

class Suffixed : public Decoder {
 public:
  explicit Suffixed(std::string suffix) : suffix_(std::move(suffix)) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      replace_text(token, suffix_, &token == &tokens.back() ? "" : " ");
    }
  }

 private:
  std::string suffix_;
};

class Sequence : public Decoder {
 public:
  explicit Sequence(std::vector<std::unique_ptr<Decoder>> parts) : parts_(std::move(parts)) {}
  void apply(std::vector<std::string>& tokens) const override {
    for (const auto& part : parts_) part->apply(tokens);
  }
  bool is_byte_level() const override { return parts_.size() == 1 && parts_[0]->is_byte_level(); }

 private:
  std::vector<std::unique_ptr<Decoder>> parts_;
};

}  // namespace

std::unique_ptr<Decoder> parse_decoder(const JsonNode& node) {
  if (node.is_null()) return nullptr;
  switch (node["type"].one_of({"Sequence", "ByteLevel", "ByteFallback", "Fuse", "Metaspace",
                               "Replace", "Strip", "WordPiece", "BPEDecoder"})) {
    case 0: {
      node.check_keys({"type", "decoders"});
      std::vector<std::unique_ptr<Decoder>> parts;
      const JsonNode list = node["decoders"];
      for (size_t i = 0; i < list.size(); ++i) {
        parts.push_back(parse_decoder(list.at(i)));
        if (parts.back() == nullptr) list.at(i).fail("a decoder");
      }
      return std::make_unique<Sequence>(std::move(parts));
    }
    case 1:
      node.check_keys({"type", "add_prefix_space", "trim_offsets", "use_regex"});
      return std::make_unique<ByteLevel>();
    case 2:
      node.check_keys({"type"});
      return std::make_unique<ByteFallback>();
    case 3:
      node.check_keys({"type"});
      return std::make_unique<Fuse>();
    case 4: {
      node.check_keys(
          {"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
      const bool is_never = !node["prepend_scheme"].is_null() &&
                            node["prepend_scheme"].one_of({"always", "first", "never"}) == 2;
      return std::make_unique<Metaspace>(node["replacement"].text(),
                                         !is_never && node["add_prefix_space"].flag_or(true));
    }
    case 5:
      node.check_keys({"type", "pattern", "content"});
      return std::make_unique<Replace>(parse_pattern(node["pattern"]), node["content"].text());
    case 6: {
      node.check_keys({"type", "content", "start", "stop"});
      const std::string content = node["content"].text();
      if (content.empty() || utf8_nbytes(content[0]) != content.size()) {
        node["content"].fail("one character");
      }
      return std::make_unique<Strip>(content, node["start"].integer(0, INT32_MAX),
                                     node["stop"].integer(0, INT32_MAX));
    }
    case 7:
      node.check_keys({"type", "prefix", "cleanup"});
      return std::make_unique<WordPieces>(node["prefix"].text(), node["cleanup"].flag());
    default:
      node.check_keys({"type", "suffix"});
      return std::make_unique<Suffixed>(node["suffix"].text());
  }
}

}  // namespace tessera::text
