#include "apps/text/tokenizer.h"

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "apps/text/decode.h"
#include "apps/text/normalize.h"
#include "apps/text/pretokenize.h"
#include "apps/text/unicode.h"
#include "apps/text/work.h"
#include "core/files.h"
#include "core/utf8.h"
#include "test/temp_dir.h"
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

namespace {

/// components.json: every type of component that tokenizers has (make_components.py).
json components() {
  return json::parse(read_regular_file(TESSERA_GOLDEN_DIR "/components.json", int64_t{16} << 20));
}

/// A file around a component: words "a" and two special ones, or bytes.
json file_around(const std::string& key, const json& part) {
  json file = {{"version", "1.0"}, {"added_tokens", json::array()}};
  file["model"] = {
      {"type", "WordLevel"}, {"vocab", {{"a", 0}, {"<s>", 1}, {"</s>", 2}}}, {"unk_token", "a"}};
  file[key] = part;
  return file;
}

/// What a component makes of a probe, as JSON. `part` is known.
json result_of(const std::string& key, const json& part, const json& probe) {
  const JsonNode node(part, "t");
  if (key == "normalizer") {
    std::string text = probe;
    if (const auto normalizer = parse_normalizer(node)) normalizer->apply(text);
    return text;
  }
  if (key == "pre_tokenizer") {
    const std::string text = probe;
    Pieces pieces{text, {}};
    if (!text.empty()) pieces.pieces = {{0, text.size()}};
    const PreTokenization all = parse_pre_tokenizer(node);
    for (const auto& step : all.steps) step->apply(pieces);
    if (all.is_byte_level) map_bytes(pieces);
    json out = json::array();
    for (const auto& piece : pieces.pieces) out.push_back(std::string(pieces.view(piece)));
    return out;
  }
  if (key == "decoder") {
    auto tokens = probe.get<std::vector<std::string>>();
    parse_decoder(node)->apply(tokens);
    std::string text;
    for (const std::string& token : tokens) text += token;
    return replace_invalid_utf8(text);
  }
  const auto tokenizer = parse_tokenizer(file_around(key, part).dump(), "t");
  return tokenizer->encode(probe.get<std::string>(), {.add_special_tokens = true});
}

}  // namespace

TEST_CASE("text: every component of tokenizers does the same or is refused by name", "[text]") {
  const json golden = components();
  const std::map<std::string, std::set<std::string>> refused = {
      {"normalizer", {"ByteLevel", "Nmt", "Precompiled"}},
      {"pre_tokenizer", {"UnicodeScripts"}},
      {"decoder", {"CTC"}},
      {"model", {"Unigram"}},
      {"post_processor", {}}};
  std::map<std::string, std::set<std::string>> done;
  for (const json& row : golden["rows"]) {
    const std::string key = row["key"], type = row["part"]["type"];
    CAPTURE(key, row["part"].dump());
    if (refused.at(key).contains(type)) continue;
    done[key].insert(type);
    if (row["results"].is_null()) {  // ids that vary
      CHECK(parse_error(file_around(key, row["part"])).find("t.json: model.dropout = 0.5") == 0);
      continue;
    }
    const json& probes = key == "decoder"          ? golden["tokens"]
                         : key == "model"          ? golden["model_probes"]
                         : key == "post_processor" ? json::array({"a"})
                                                   : golden["probes"];
    for (size_t i = 0; i < probes.size(); ++i) {
      if (row["results"][i].is_null()) continue;  // an error or a panic there
      CAPTURE(probes[i].dump());
      CHECK(result_of(key, row["part"], probes[i]) == row["results"][i]);
    }
  }
  for (const auto& [key, types] : golden["types"].items()) {
    for (const std::string type : types) {
      CAPTURE(key, type);
      if (done[key].contains(type)) continue;
      CHECK(refused.at(key).contains(type));
      const std::string expected = "t.json: " + key + ".type = \"" + type + "\", expected one of ";
      CHECK(parse_error(file_around(key, {{"type", type}})).find(expected) == 0);
    }
  }
}

// Values of tokenizers 0.23.
TEST_CASE("text: bytes that a vocabulary lacks are what their rules say, in words of any length",
          "[text]") {
  const auto ids_of = [](const json& model, bool is_byte_level, const std::string& text) {
    json file = whole_file();
    file["added_tokens"] = json::array();
    file["model"] = model;
    if (!is_byte_level) file["pre_tokenizer"] = file["decoder"] = file["post_processor"] = nullptr;
    return parse_tokenizer(file.dump(), "t")->encode(text);
  };
  json model = {{"type", "BPE"},
                {"vocab", {{"U", 0}, {"a", 1}, {"b", 2}, {"ab", 3}}},
                {"merges", {"a b"}},
                {"unk_token", nullptr}};
  const std::string is_long = std::string(40, 'a') + 'x' + std::string(40, 'b');
  CHECK(ids_of(model, true, "abxab") == Ids{3, 3});
  CHECK(ids_of(model, true, "x").empty());
  CHECK(ids_of(model, true, is_long).size() == 79);  // "ab" has come together where "x" was
  model["unk_token"] = "U";
  CHECK(ids_of(model, true, "abxab") == Ids{3, 0, 3});
  CHECK(ids_of(model, true, "xx") == Ids{0, 0});
  CHECK(ids_of(model, true, is_long).size() == 81);
  model["fuse_unk"] = true;
  CHECK(ids_of(model, true, "abxxab") == Ids{3, 0, 3});

  // All characters of bytes, in a model that is not one of bytes: "\u00e9" is itself.
  model = gpt2_file()["model"];
  model["merges"] = json::array();
  const int32_t id = model["vocab"]["\u00e9"];
  std::string word;
  for (int i = 0; i < 80; ++i) word += "\u00e9";
  CHECK(ids_of(model, false, word) == Ids(80, id));
}

TEST_CASE("text: a word that no merges make is one id where they are ignored", "[text]") {
  json file = whole_file();
  json& model = file["model"];
  file["added_tokens"] = json::array();
  model["vocab"] = {{"U", 0}, {"a", 1}, {"b", 2}, {"c", 3}, {"abc", 4}, {"ab", 5}};
  model["merges"] = {"a b"};
  const auto ids_of = [&](const std::string& text) {
    return parse_tokenizer(file.dump(), "t")->encode(text);
  };
  CHECK(ids_of("abc") == Ids{5, 3});
  model["ignore_merges"] = true;
  CHECK(ids_of("abc") == Ids{4});
  CHECK(ids_of("abcabc") == Ids{5, 3, 5, 3});
  CHECK(ids_of("ab") == Ids{5});
}

TEST_CASE("text: decoding gives the text back where the kind allows it", "[text]") {
  const auto texts = golden()["texts"].get<std::vector<std::string>>();
  const auto same = [](const std::string& text) { return text; };
  const auto composed = [](const std::string& text) { return normal_form(text, NormalForm::kNfc); };
  // The mark of a space is one itself.
  const auto unmarked = [](std::string text) {
    for (size_t at = 0; (at = text.find("\xe2\x96\x81", at)) != std::string::npos;) {
      text.replace(at, 3, " ");
    }
    return text;
  };
  const std::map<std::string, std::function<std::string(const std::string&)>> kinds = {
      {"gpt2", same},      {"llama3", same},    {"two digits", same}, {"o200k", same},
      {"tekken", same},    {"bloom", same},     {"smollm", same},     {"deepseek", same},
      {"qwen2", composed}, {"llama2", unmarked}};
  for (const auto& [name, expected] : kinds) {
    CAPTURE(name);
    const auto tokenizer = parse_tokenizer(golden()["kinds"][name]["tokenizer"].dump(), name);
    size_t count = 0;
    for (const std::string& text : texts) {
      // Each stretch between special tokens begins with a space of its own.
      if (name == "llama2" && text.find("<") != std::string::npos) continue;
      CAPTURE(text);
      CHECK(tokenizer->decode(tokenizer->encode(text)) == expected(text));
      ++count;
    }
    CHECK(count > 70);
  }
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  CHECK(make_byte_tokenizer()->decode(make_byte_tokenizer()->encode(bytes)) == bytes);
  const auto chars = make_char_tokenizer(texts[3]);
  CHECK(chars->decode(chars->encode(texts[3])) == texts[3]);
}

TEST_CASE("text: work grows as the text whatever it is", "[text]") {
  const auto repeated = [](std::string_view unit, size_t nbytes) {
    std::string text;
    while (text.size() < nbytes) text += unit;
    return text;
  };
  for (const auto& [name, kind] : golden()["kinds"].items()) {
    CAPTURE(name);
    const auto tokenizer = parse_tokenizer(kind["tokenizer"].dump(), name);
    int64_t total = 0;
    for (const char* unit :
         {"a", "A", " ", "\n", " \n", "7", ".", "\xcc\x81", "\xcc\xb4\xcd\x85", "\xe6\xbc\xa2",
          "\xea\xb0\x80", "\xe1\x84\x80\xe1\x85\xa1", "it's ", "<|begin|", "[MAS", "\xc3\xa9"}) {
      CAPTURE(unit);
      constexpr size_t kNbytes = 4096;
      const std::string small = repeated(unit, kNbytes), large = repeated(unit, 4 * kNbytes);
      const auto work_of = [&](const std::string& text) {
        const int64_t before = counted_work();
        tokenizer->encode(text);
        return counted_work() - before;
      };
      const int64_t once = work_of(small), more = work_of(large);
      CHECK(more <= 4 * once + once / 4 + 512);
      CHECK(more <= static_cast<int64_t>(64 * large.size()));
      total += once;
    }
    CHECK(total >= 4096);  // something was counted
  }
}

TEST_CASE("text: marks of any number are ordered and composed", "[text]") {
  // An e, marks of a class above, then as many of one below: both stay in order, the first mark of
  // the class above is composed.
  for (const size_t count : {1u, 3u, 40u, 5000u}) {
    std::string text = "xe", expected = "x\xc3\xa9";
    for (size_t i = 0; i < count; ++i) text += "\xcc\x81";  // U+0301, above
    for (size_t i = 0; i < count; ++i) text += "\xcc\xb4";  // U+0334, through
    for (size_t i = 0; i < count; ++i) expected += "\xcc\xb4";
    for (size_t i = 1; i < count; ++i) expected += "\xcc\x81";
    CHECK(normal_form(text + "y", NormalForm::kNfc) == expected + "y");
    CHECK(normal_form(text, NormalForm::kNfkc) == expected);
  }
  CHECK(normal_form("\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", NormalForm::kNfc) == "\xea\xb0\x81");
  CHECK(is_surely_normal("\xea\xb0\x81\xc3\xa9 a", NormalForm::kNfc));
  CHECK_FALSE(is_surely_normal("a\xcc\x81", NormalForm::kNfc));
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
  CHECK(
      with("/normalizer", {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", "x"}}) ==
      "t.json: normalizer.pattern.String = \"\", expected a text that is not empty");
  CHECK(with("/version", "2.0") == "t.json: version = \"2.0\", expected one of 1.0");
  CHECK(with("/truncation", {{"strategy", "Middle"}}) ==
        "t.json: truncation.strategy = \"Middle\", expected one of LongestFirst, OnlyFirst, "
        "OnlySecond");
  CHECK(with("/truncation", {{"where", 1}}).find("t.json: truncation.where = 1, expected none") ==
        0);
  CHECK(with("/padding", {{"strategy", "Longest"}}) ==
        "t.json: padding.strategy = \"Longest\", expected one of BatchLongest");
  CHECK(with("/padding", {{"strategy", {{"Fixed", 8}, {"x", 1}}}})
            .find("t.json: padding.strategy.x = 1, expected none") == 0);
  const auto with_template = [&](json single, json pair) {
    return with("/post_processor", {{"type", "TemplateProcessing"},
                                    {"single", std::move(single)},
                                    {"pair", std::move(pair)},
                                    {"special_tokens", json::object()}});
  };
  const json a = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  CHECK(with_template({a}, {{{"Sequence", {{"id", "C"}}}}}) ==
        "t.json: post_processor.pair[0].Sequence.id = \"C\", expected one of A, B");
  CHECK(with_template({a}, {{{"Sequence", {{"id", "A"}, {"x", 1}}}}})
            .find("t.json: post_processor.pair[0].Sequence.x = 1, expected none") == 0);
  CHECK(with_template({a, {{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}}, {a}) ==
        "t.json: post_processor.single[1].SpecialToken.id = \"<s>\", expected one of "
        "special_tokens");
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

TEST_CASE("text: documents stand between the tokens that models of the tokenizer know", "[text]") {
  const auto with = [](std::string_view vocab, std::string_view rest, std::string_view config) {
    const tessera::testing::TempDir dir;
    dir.write("tokenizer.json", fmt::format(R"({{"model": {{"type": "WordLevel", "unk_token": "?",
                                "vocab": {{"?": 0, {}}}}}{}}})",
                                            vocab, rest));
    if (!config.empty()) dir.write("tokenizer_config.json", std::string(config));
    const DocumentTokens tokens = document_tokens(*load_tokenizer(dir.path()));
    return std::pair(tokens.begin, tokens.end);
  };
  using Pair = std::pair<int32_t, int32_t>;
  constexpr std::string_view kBegins =
      R"(, "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>",
         "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens":
         {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}})";
  CHECK(with(R"("a": 1)", "", "") == Pair(-1, -1));
  CHECK(with(R"("<|endoftext|>": 1)", "", "") == Pair(1, 1));
  CHECK(with(R"("<s>": 1, "</s>": 2)", kBegins, "") == Pair(1, 2));
  // The end of a turn ends no document; nothing else is known there.
  CHECK(with(R"("<|im_end|>": 1, "<|endoftext|>": 2)", "", R"({"eos_token": "<|im_end|>"})") ==
        Pair(2, 2));
  CHECK(with(R"("a": 1, "b": 2)", "", R"({"eos_token": {"content": "b"}})") == Pair(2, 2));
  CHECK(with(R"("a": 1)", "", R"({"eos_token": "c"})") == Pair(-1, -1));
  CHECK(with(R"("a": 1)", "", R"({"eos_token": null})") == Pair(-1, -1));
  CHECK(with(R"("a": 1)", "", "no JSON") == Pair(-1, -1));
  const DocumentTokens byte = document_tokens(*make_byte_tokenizer());
  CHECK(byte.end == -1);
  CHECK(byte.begin == -1);
}

TEST_CASE("text: an id between tokens is one that no token has", "[text]") {
  const auto tokenizer = parse_tokenizer(
      R"({"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 2}}})", "t.json");
  CHECK(decode_generated(*tokenizer, {0, 1, 2, 3}) ==
        "a\xef\xbf\xbd"
        "b\xef\xbf\xbd");
}
