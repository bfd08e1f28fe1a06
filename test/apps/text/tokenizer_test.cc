#include "apps/text/tokenizer.h"

#include <nlohmann/json.hpp>
#include <thread>

#include "apps/text/normalize.h"
#include "apps/text/pretokenize.h"
#include "core/files.h"
#include "core/utf8.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::text;
using nlohmann::json;
using tessera::testing::error_of;

using Ids = std::vector<int32_t>;

namespace {

/// text.json: what tokenizers gives (make_text.py).
const json& golden() {
  static const json all =
      json::parse(read_regular_file(TESSERA_GOLDEN_DIR "/text.json", int64_t{64} << 20));
  return all;
}

uint64_t fnv(std::string_view bytes, uint64_t value = 0xcbf29ce484222325u) {
  for (const char c : bytes) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return value;
}

json gpt2_file() {
  return golden()["kinds"]["gpt2"]["tokenizer"];
}

std::string parse_error(const json& file) {
  return error_of([&] { parse_tokenizer(file.dump(), "t.json"); });
}

/// Byte level, whose only word is the whole text.
json whole_file() {
  json file = gpt2_file();
  file["pre_tokenizer"]["use_regex"] = false;
  return file;
}

}  // namespace

TEST_CASE("text: ids and decoded texts are those of tokenizers", "[text]") {
  const auto texts = golden()["texts"].get<std::vector<std::string>>();
  for (const auto& [name, kind] : golden()["kinds"].items()) {
    CAPTURE(name);
    const auto tokenizer = parse_tokenizer(kind["tokenizer"].dump(), name);
    for (size_t i = 0; i < texts.size(); ++i) {
      CAPTURE(i, texts[i]);
      const Ids ids = tokenizer->encode(texts[i]);
      CHECK(ids == kind["ids"][i].get<Ids>());
      // Theirs has U+FFFD in place of what is not UTF-8.
      CHECK(replace_invalid_utf8(tokenizer->decode(ids)) == kind["decoded"][i].get<std::string>());
      CHECK(replace_invalid_utf8(tokenizer->decode(ids, {.skip_special_tokens = true})) ==
            kind["skipped"][i].get<std::string>());
    }
    CHECK(tokenizer->encode("a b", {.add_special_tokens = true}) == kind["template"].get<Ids>());
    // A second time from the cache, and from a file that was written.
    const auto again = parse_tokenizer(tokenizer->to_json(), name);
    CHECK(tokenizer->encode(texts[3]) == kind["ids"][3].get<Ids>());
    CHECK(again->encode(texts[3]) == kind["ids"][3].get<Ids>());
    CHECK(again->to_json() == tokenizer->to_json());
  }
}

TEST_CASE("text: characters are to every part what they are to tokenizers", "[text]") {
  std::vector<std::string> lines(1);
  size_t count = 0;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if ((c >= 0xd800 && c < 0xe000) || c == 10) continue;
    if (count++ % 1024 == 0 && count > 1) lines.emplace_back();
    std::string& line = lines.back();
    if (!line.empty()) line += '\n';
    line += 'a';
    append_utf8(line, c);
    line += 'a';
  }
  for (const json& part : golden()["characters"]) {
    CAPTURE(part["name"]);
    uint64_t value = fnv("");
    const JsonNode node(part["part"], "t");
    if (part["key"] == "normalizer") {
      const auto normalizer = parse_normalizer(node);
      for (std::string line : lines) {
        normalizer->apply(line);
        value = fnv(line, value);
      }
    } else {
      const auto steps = parse_pre_tokenizer(node).steps;
      for (const std::string& line : lines) {
        Pieces pieces{line, {{0, line.size()}}};
        for (const auto& step : steps) step->apply(pieces);
        bool is_first = true;
        for (const auto& piece : pieces.pieces) {
          if (!is_first) value = fnv(std::string_view("\0", 1), value);
          value = fnv(pieces.view(piece), value);
          is_first = false;
        }
      }
    }
    CHECK(std::to_string(value) == part["fnv"].get<std::string>());
  }
}

TEST_CASE("text: a text cut where it may be gives the ids of the whole", "[text]") {
  const auto texts = golden()["texts"].get<std::vector<std::string>>();
  const std::string text = texts[3] + texts[3] + "x.\nyes\n\nno \nnor this\n\tx\ny\n1\nz";
  for (const char* name : {"gpt2", "llama3", "qwen2", "o200k", "tekken"}) {
    const auto tokenizer = parse_tokenizer(golden()["kinds"][name]["tokenizer"].dump(), name);
    Ids ids;
    size_t num_parts = 0;
    for (size_t at = 0; at < text.size(); ++num_parts) {
      const size_t end = tokenizer->next_cut(text, at + 1);
      tokenizer->encode(std::string_view(text).substr(at, end - at), ids);
      at = end;
    }
    CHECK(num_parts >= 5);
    CHECK(ids == tokenizer->encode(text));
  }
  const auto bert = parse_tokenizer(golden()["kinds"]["bert"]["tokenizer"].dump(), "bert");
  CHECK(bert->next_cut(text, 1) == text.size());
}

TEST_CASE("text: words of any length merge as short ones do", "[text]") {
  const auto tokenizer = parse_tokenizer(whole_file().dump(), "t");
  // A long word takes another way; a short one before and behind a byte that merges with nothing
  // gives the same.
  const std::string word = golden()["texts"][3].get<std::string>().substr(0, 60);
  Ids expected;
  std::string text;
  for (int i = 0; i < 50; ++i) {
    text += word + "\x7f";
    tokenizer->encode(word, expected);
    tokenizer->encode("\x7f", expected);
  }
  CHECK(tokenizer->encode(text) == expected);
  // A merge of a lower rank that comes up late goes first: (a, b) makes what (ab, c) has rank 0 for.
  json file = whole_file();
  json& model = file["model"];
  model["vocab"]["bc"] = 1000;
  model["vocab"]["ab"] = 1001;
  model["vocab"]["abc"] = 1002;
  model["vocab"]["aba"] = 1003;
  model["merges"] = json::array({"ab c", "ab a", "a b", "b c"});
  const auto odd = parse_tokenizer(file.dump(), "t");
  CHECK(odd->encode("abab") == Ids{1003, model["vocab"]["b"].get<int32_t>()});
  CHECK(odd->encode("ababc") == Ids{1003, 1000});
  std::string many;
  Ids all;
  for (int i = 0; i < 40; ++i) {
    many += "ababc.";
    odd->encode("ababc.", all);
  }
  CHECK(odd->encode(many) == all);
}

TEST_CASE("text: threads share a tokenizer", "[text]") {
  const auto tokenizer = parse_tokenizer(gpt2_file().dump(), "t");
  const std::string text = golden()["texts"][3];
  const Ids expected = parse_tokenizer(gpt2_file().dump(), "t")->encode(text);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int k = 0; k < 50; ++k) wrong[i] += tokenizer->encode(text) != expected;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4));
}

TEST_CASE("text: an unknown key is named", "[text]") {
  const auto with = [](const char* pointer, json value) {
    json file = gpt2_file();
    file[json::json_pointer(pointer)] = std::move(value);
    return parse_error(file);
  };
  CHECK(with("/extra", 1) ==
        "t.json: extra = 1, expected none of that name, one of version, truncation, padding, "
        "added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model");
  CHECK(
      with("/normalizer", {{"type", "Precompiled"}}) ==
      "t.json: normalizer.type = \"Precompiled\", expected one of Sequence, NFC, NFD, NFKC, NFKD, "
      "Lowercase, StripAccents, Strip, Prepend, Replace, BertNormalizer");
  CHECK(with("/normalizer", {{"type", "NFC"}, {"x", 1}}) ==
        "t.json: normalizer.x = 1, expected none of that name, one of type");
  CHECK(with("/pre_tokenizer",
             {{"type", "Sequence"}, {"pretokenizers", {{{"type", "UnicodeScripts"}}}}})
            .find("t.json: pre_tokenizer.pretokenizers[0].type = \"UnicodeScripts\", expected one "
                  "of Sequence, ByteLevel") == 0);
  CHECK(with("/pre_tokenizer/mode", 3).find("t.json: pre_tokenizer.mode = 3, expected none of") ==
        0);
  CHECK(with("/pre_tokenizer/use_regex", 3) ==
        "t.json: pre_tokenizer.use_regex = 3, expected true or false");
  CHECK(with("/decoder", {{"type", "CTC"}}).find("t.json: decoder.type = \"CTC\", expected") == 0);
  CHECK(with("/post_processor", {{"type", "Padding"}})
            .find("t.json: post_processor.type = \"Padding\", expected one of Sequence") == 0);
  CHECK(with("/model/type", "Unigram") ==
        "t.json: model.type = \"Unigram\", expected one of BPE, WordPiece, WordLevel");
  CHECK(with("/model/dropout", 0.1) ==
        "t.json: model.dropout = 0.1, expected null: ids that do not vary");
  CHECK(with("/model/beam", 2).find("t.json: model.beam = 2, expected none of that name") == 0);
  CHECK(with("/model/vocab", json::array()) ==
        "t.json: model.vocab = [], expected an object of tokens and their ids");
  CHECK(with("/added_tokens/0/flavor", true)
            .find("t.json: added_tokens[0].flavor = true, expected none of that name") == 0);
}

TEST_CASE("text: a damaged tokenizer.json is refused", "[text]") {
  const auto with = [](const char* pointer, json value) {
    json file = gpt2_file();
    file[json::json_pointer(pointer)] = std::move(value);
    return parse_error(file);
  };
  CHECK(error_of([] { parse_tokenizer("{", "t.json"); }) ==
        "t.json of 1 bytes is not JSON, expected a saved tokenizer");
  CHECK(error_of([] { parse_tokenizer("{}", "t.json"); }) ==
        "t.json: neither type nor model, expected \"type\": \"byte\" or \"char\", or \"model\": "
        "{...}");
  CHECK(with("/model/merges/3", {"a", "never"}) ==
        "t.json: model.merges[3] = [\"a\",\"never\"], expected 'never' in the vocabulary");
  CHECK(with("/model/merges/3", "abc") == "t.json: model.merges[3] = \"abc\", expected two tokens");
  CHECK(with("/model/merges/3", {"a", "q"}) ==
        "t.json: model.merges[3] = [\"a\",\"q\"], expected 'aq' in the vocabulary");
  CHECK(with("/model/vocab/x", 5).find("t.json: model.vocab: id 5 of '") == 0);
  CHECK(with("/model/vocab/new", 123456789) ==
        "t.json: model.vocab: the id of 'new' is 123456789, expected 0 to 1686 for 331 tokens");
  CHECK(with("/model/vocab/new", -1).find("t.json: model.vocab: the id of 'new' is -1, expec") ==
        0);
  CHECK(with("/added_tokens/0/id", 7) ==
        "t.json: added_tokens[0].id = 7, expected 0 for '<|begin|>'");
  CHECK(with("/added_tokens/0/content", "<new>") ==
        "t.json: added_tokens[0].id = 0, expected 330 for '<new>'");
  CHECK(with("/post_processor", {{"type", "TemplateProcessing"},
                                 {"single", json::array()},
                                 {"pair", json::array()},
                                 {"special_tokens", json::object()}}) ==
        "t.json: post_processor.single = [], expected the sequence A once");
  CHECK(with("/pre_tokenizer", {{"type", "Split"},
                                {"pattern", {{"Regex", "(a"}}},
                                {"behavior", "Isolated"},
                                {"invert", false}}) ==
        "t.json: pre_tokenizer.pattern.Regex: '(a' is no regular expression (missing closing "
        "parenthesis)");
}

TEST_CASE("text: what cannot be encoded or decoded is an error with its place", "[text]") {
  const auto tokenizer = parse_tokenizer(gpt2_file().dump(), "t");
  CHECK(error_of([&] { tokenizer->encode("ab\xff"); }) ==
        "tokenizer: byte 2 is not UTF-8 text, expected UTF-8");
  CHECK(error_of([&] { tokenizer->decode({330}); }) ==
        "tokenizer: id 330, expected one of a token in [0, 330)");
  CHECK(error_of([&] { tokenizer->decode({-1}); }) ==
        "tokenizer: id -1, expected one of a token in [0, 330)");
  json file = golden()["kinds"]["bert"]["tokenizer"];
  file["model"]["unk_token"] = "none";
  CHECK(error_of([&] { parse_tokenizer(file.dump(), "t")->encode("\xe2\x82\xac"); }) ==
        "tokenizer: '\xe2\x82\xac' is not in the vocabulary, and neither is model.unk_token = "
        "'none'");
}

TEST_CASE("text: GPT-2's own files are the same tokenizer", "[text]") {
  const json file = gpt2_file();
  std::string merges = "#version: 0.2\n";
  for (const json& merge : file["model"]["merges"]) {
    merges += merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
  }
  json vocab = file["model"]["vocab"];
  vocab["<|endoftext|>"] = 330;
  const auto tokenizer = parse_gpt2(merges, vocab.dump(), "vocab.bpe");
  const std::string text = golden()["texts"][3];
  CHECK(tokenizer->encode(text) == golden()["kinds"]["gpt2"]["ids"][3].get<Ids>());
  CHECK(tokenizer->encode("a<|endoftext|>") == Ids{vocab["a"].get<int32_t>(), 330});
  // Without the vocabulary ids follow from the merges: bytes that are printable first.
  const auto bare = parse_gpt2("#version: 0.2\nh e\nhe l\n", "", "vocab.bpe");
  CHECK(bare->vocab_size() == 259);
  CHECK(bare->encode("hello<|endoftext|>!") == Ids{257, 'l' - 33, 'o' - 33, 258, 0});
  CHECK(error_of([] { parse_gpt2("a b\nabc\n", "", "vocab.bpe"); }) ==
        "vocab.bpe:2: 'abc', expected two tokens with a space between them");
}

TEST_CASE("text: tiktoken's ranks are a tokenizer", "[text]") {
  // The bytes a, b, c and the tokens ab, abc, bc.
  const char* const ranks = "YQ== 0\nYg== 1\nYw== 2\nYWI= 3\nYWJj 4\nYmM= 5\n";
  const auto tokenizer = parse_tiktoken(ranks, pattern_by_name("gpt2"), {{"<end>", 9}}, "r");
  CHECK(tokenizer->vocab_size() == 10);
  CHECK(tokenizer->encode("abcbca<end>bc") == Ids{4, 5, 0, 9, 5});
  CHECK(tokenizer->decode({4, 5, 9}) == "abcbc<end>");
  CHECK(error_of([] { parse_tiktoken("YQ== 1\n", "a", {}, "r"); }) ==
        "r:1: 'YQ== 1', expected a token in base64 and rank 0");
  CHECK(error_of([] { parse_tiktoken("YQ= 0\n", "a", {}, "r"); }) ==
        "r:1: 'YQ= 0', expected a token in base64 and rank 0");
  CHECK(error_of([] { parse_tiktoken("YQ== 0\nYQ== 1\n", "a", {}, "r"); }) ==
        "r:2: 'YQ== 1', expected each token once");
  CHECK(error_of([] {
          parse_tiktoken("YQ== 0\n", "a", {{"<end>", -1}}, "r");
        }) == "r: id -1 of '<end>', expected 0 or more");
}

TEST_CASE("text: tokens one by one give the text of all, in whole characters", "[text]") {
  const auto texts = golden()["texts"].get<std::vector<std::string>>();
  for (const auto& [name, kind] : golden()["kinds"].items()) {
    const auto tokenizer = parse_tokenizer(kind["tokenizer"].dump(), name);
    for (size_t i = 0; i < texts.size(); ++i) {
      CAPTURE(name, i, texts[i]);
      const Ids ids = tokenizer->encode(texts[i]);
      const std::string whole = tokenizer->decode(ids);
      for (const size_t num_before : {size_t{0}, std::min<size_t>(3, ids.size())}) {
        const Ids before(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(num_before));
        StreamDecoder stream(*tokenizer, before);
        std::string text = tokenizer->decode(before);
        const bool is_whole = find_invalid_utf8(whole) == whole.size();
        for (size_t k = num_before; k < ids.size(); ++k) {
          const std::string piece = stream.add(ids[k]);
          if (num_before == 0 && is_whole) CHECK(find_invalid_utf8(piece) == piece.size());
          text += piece;
        }
        text += stream.finish();
        CHECK(text == whole);
      }
    }
  }
}

TEST_CASE("text: a token that is part of a character waits for the rest of it", "[text]") {
  const auto byte = make_byte_tokenizer();
  StreamDecoder stream(*byte, {'a'});
  CHECK(stream.add('b') == "b");
  CHECK(stream.add(0xe2) == "");
  CHECK(stream.add(0x82) == "");
  CHECK(stream.add(0xac) == "\xe2\x82\xac");
  CHECK(stream.add(0xf0) == "");
  CHECK(stream.add('c') ==
        "\xf0"
        "c");  // none that becomes whole
  CHECK(stream.add(256) == "\xef\xbf\xbd");
  CHECK(stream.add(0xc3) == "");
  CHECK(stream.finish() == "\xc3");
  CHECK(stream.finish() == "");
}

TEST_CASE("text: an id between tokens is one that no token has", "[text]") {
  const auto tokenizer = parse_tokenizer(
      R"({"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 2}}})", "t.json");
  CHECK(decode_generated(*tokenizer, {0, 1, 2, 3}) ==
        "a\xef\xbf\xbd"
        "b\xef\xbf\xbd");
}
