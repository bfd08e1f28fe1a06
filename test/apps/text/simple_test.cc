#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "apps/text/tokenizer.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::text;
using tessera::testing::error_of;

using Ids = std::vector<int32_t>;

TEST_CASE("tokenizer: bytes are their own ids", "[tokenizer]") {
  const auto tokenizer = make_byte_tokenizer();
  CHECK(tokenizer->vocab_size() == 256);
  CHECK(tokenizer->encode(std::string_view("a\0\xff", 3)) == Ids{97, 0, 255});
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  CHECK(tokenizer->decode(tokenizer->encode(all)) == all);
  CHECK(error_of([&] { tokenizer->decode({256}); }) ==
        "tokenizer: id 256, expected one in [0, 256)");
  CHECK(error_of([&] { tokenizer->decode({-1}); }) == "tokenizer: id -1, expected one in [0, 256)");
}

TEST_CASE("tokenizer: characters are numbered by code point", "[tokenizer]") {
  // 1, 2, 3 and 4 bytes long: b, e with acute, euro, an emoji.
  const std::string text =
      "b\xf0\x9f\x98\x80\xe2\x82\xac\xc3\xa9"
      "ab";
  const auto tokenizer = make_char_tokenizer(text);
  CHECK(tokenizer->vocab_size() == 5);
  CHECK(tokenizer->encode(text) == Ids{1, 4, 3, 2, 0, 1});
  CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
  CHECK(error_of([&] { tokenizer->encode("abc"); }) ==
        "tokenizer: character 'c' at byte 2 is not in the vocabulary of 5");
  CHECK(error_of([&] { tokenizer->decode({5}); }) == "tokenizer: id 5, expected one in [0, 5)");
}

namespace {

const std::string& golden_text() {
  static const std::string text =
      "h\xc3\xa9llo  w\xc3\xb6rld\n\t\x01 \xe2\x82\xac \xf0\x9f\x98\x80\r\n <s> </s> <unknown> "
      "[UNK] 'll";
  return text;
}

std::vector<std::unique_ptr<Tokenizer>> golden_tokenizers() {
  std::vector<std::unique_ptr<Tokenizer>> tokenizers;
  tokenizers.push_back(make_byte_tokenizer());
  tokenizers.push_back(make_char_tokenizer(golden_text()));
  return tokenizers;
}

}  // namespace

// tokenizers.json: the files that transformers has loaded and the ids that it gave
// (make_tokenizers.py).
TEST_CASE("tokenizer: transformers gives our ids for the files of an export", "[tokenizer]") {
  const auto golden =
      nlohmann::json::parse(testing::read_file(TESSERA_GOLDEN_DIR "/tokenizers.json"));
  for (const auto& tokenizer : golden_tokenizers()) {
    const std::string name(tokenizer->name());
    CAPTURE(name);
    CHECK(nlohmann::json(tokenizer->hf_files()) == golden[name]["files"]);
    CHECK(golden[name]["text"] == golden_text());
    CHECK(golden[name]["ids"] == tokenizer->encode(golden_text()));
  }
}

// For make_tokenizers.py.
TEST_CASE("tokenizer: the files of exports into a folder", "[.hf-export]") {
  const char* const out = std::getenv("TESSERA_HF_EXPORT");
  REQUIRE(out != nullptr);
  std::ofstream(std::string(out) + "/text") << golden_text();
  for (const auto& tokenizer : golden_tokenizers()) {
    const std::string folder = fmt::format("{}/{}", out, tokenizer->name());
    std::filesystem::create_directories(folder);
    for (const auto& [name, text] : tokenizer->hf_files()) {
      std::ofstream(folder + "/" + name, std::ios::binary) << text;
    }
  }
}

TEST_CASE("tokenizer: what is not UTF-8 is named by its offset", "[tokenizer]") {
  const std::string bad[] = {"a\xff",
                             "a\x80",
                             "a\xc3",
                             "a\xc0\xaf",
                             "a\xe0\x80\xaf",
                             "a\xed\xa0\x80",
                             "a\xf4\x90\x80\x80",
                             "a\xe2\x82"};
  for (const std::string& text : bad) {
    CAPTURE(text);
    CHECK(error_of([&] {
            make_char_tokenizer(text);
          }).starts_with("tokenizer: byte 1 is not UTF-8 text, expected UTF-8"));
  }
}

TEST_CASE("tokenizer: JSON reads back as the same tokenizer", "[tokenizer]") {
  const std::string text = "\"\\\n\t\x01 \xc3\xa9";
  const auto chars = make_char_tokenizer(text);
  const auto again = parse_tokenizer(chars->to_json(), "t.json");
  CHECK(again->name() == "char");
  CHECK(again->to_json() == chars->to_json());
  CHECK(again->encode(text) == chars->encode(text));
  CHECK(parse_tokenizer(make_byte_tokenizer()->to_json(), "t.json")->name() == "byte");
  const testing::TempDir dir;
  CHECK(load_tokenizer(dir.write("t.json", chars->to_json()))->vocab_size() == chars->vocab_size());
  CHECK(error_of([&] { load_tokenizer(dir / "none.json"); }) ==
        dir / "none.json: No such file or directory, expected a file");
}

TEST_CASE("tokenizer: one of all characters of a large script reads back", "[tokenizer]") {
  std::string text;
  for (unsigned code = 0x4e00; code < 0x9fa0; ++code) {  // in UTF-8 three bytes each
    text += static_cast<char>(0xe0 | (code >> 12));
    text += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
    text += static_cast<char>(0x80 | (code & 0x3f));
  }
  const auto tokenizer = make_char_tokenizer(text);
  const auto again = parse_tokenizer(tokenizer->to_json(), "t.json");
  CHECK(again->vocab_size() == 0x9fa0 - 0x4e00);
  CHECK(again->decode(again->encode(text)) == text);
}

TEST_CASE("tokenizer: a damaged file is refused", "[tokenizer]") {
  const auto message = [](const char* json) {
    return error_of([&] { parse_tokenizer(json, "t.json"); });
  };
  CHECK(message("") == "t.json of 0 bytes is not JSON, expected a saved tokenizer");
  CHECK(message("[1]") == "t.json: not a JSON object, expected a saved tokenizer");
  CHECK(message("{}") ==
        "t.json: neither type nor model, expected \"type\": \"byte\" or \"char\", or \"model\": "
        "{...}");
  CHECK(message(R"({"type": "bpe"})") == "t.json: type = \"bpe\", expected one of byte, char");
  CHECK(message(R"({"type": "char"})") == "t.json: no characters, expected \"chars\": [...]");
  CHECK(message(R"({"type": "char", "chars": []})") ==
        "t.json: no characters, expected \"chars\": [...]");
  CHECK(message(R"({"type": "char", "chars": ["a", "bc"]})") ==
        "t.json: entry 1 is \"bc\", expected one character");
  CHECK(message(R"({"type": "char", "chars": ["a", 3]})") ==
        "t.json: entry 1 is 3, expected one character");
  CHECK(message(R"({"type": "char", "chars": ["a", "b", "a"]})") ==
        "t.json: character \"a\" twice, expected each once");
  CHECK(message("{\"type\": \"char\", \"chars\": [\"\xff\"]}") ==
        "t.json of 32 bytes is not JSON, expected a saved tokenizer");
  const std::string deep(100000, '[');
  CHECK(message(deep.c_str()) == "t.json nested too deep, expected 16");
  const std::string long_entry =
      R"({"type": "char", "chars": [")" + std::string(9000, 'x') + "\"]}";
  CHECK(message(long_entry.c_str()).size() < 400);
  const std::string long_type = R"({"type": ")" + std::string(9000, 'x') + "\"}";
  CHECK(message(long_type.c_str()).size() < 400);
  CHECK_THROWS_AS(parse_tokenizer("", "t.json"), InputError);
}

TEST_CASE("tokenizer: ids of a padded vocabulary decode as replacement characters", "[tokenizer]") {
  CHECK(decode_generated(*make_byte_tokenizer(), {97, 256, 98}) ==
        "a\xef\xbf\xbd"
        "b");
  CHECK_THROWS_AS(decode_generated(*make_byte_tokenizer(), {-1}), InputError);
}
