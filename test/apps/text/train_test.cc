#include "apps/text/train.h"

#include <nlohmann/json.hpp>

#include "core/files.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::text;
using nlohmann::json;
using tessera::testing::error_of;

namespace {

/// What tokenizers has learned from a text (test/golden/make_text.py).
const json& golden() {
  static const json all =
      json::parse(read_regular_file(TESSERA_GOLDEN_DIR "/text.json", int64_t{64} << 20));
  return all;
}

json trained(const TrainBpeOptions& options, const std::vector<std::string>& texts) {
  BpeTrainer trainer(options);
  for (const std::string& text : texts) trainer.add(text);
  return json::parse(trainer.train()->to_json());
}

}  // namespace

TEST_CASE("train: vocabulary and merges are those of tokenizers", "[text]") {
  const auto text = golden()["texts"][3].get<std::string>();
  for (const auto& [name, pattern] : {std::pair("gpt2", "gpt2"),
                                      {"llama3", "llama3"},
                                      {"qwen2", "qwen2"},
                                      {"o200k", "o200k"},
                                      {"tekken", "tekken"},
                                      {"bloom",
                                       " ?[^(\\s|[.,!?\xe2\x80\xa6\xe3\x80\x82\xef\xbc\x8c\xe3"
                                       "\x80\x81\xe0\xa5\xa4\xdb\x94\xd8\x8c])]+"}}) {
    if (std::string_view(name) == "qwen2") continue;  // learned from another normal form
    CAPTURE(name);
    const json own =
        trained({.vocab_size = 330, .pattern = pattern, .special_tokens = {"<|begin|>", "<|end|>"}},
                {text, text, text});
    const json& other = golden()["kinds"][name]["tokenizer"];
    CHECK(own["model"]["vocab"] == other["model"]["vocab"]);
    CHECK(own["model"]["merges"] == other["model"]["merges"]);
    CHECK(own["added_tokens"] == other["added_tokens"]);
    CHECK(own["pre_tokenizer"] == other["pre_tokenizer"]);
  }
}

TEST_CASE("train: what several have counted is learned as by one", "[text]") {
  const TrainBpeOptions options{.vocab_size = 300, .special_tokens = {}};
  BpeTrainer all(options), first(options), second(options);
  all.add("one two one two three");
  all.add("two three four");
  first.add("one two one two three");
  second.add("two three four");
  second.add(first);
  CHECK(second.num_words() == 6);  // "one" and " one", ...
  CHECK(second.train()->to_json() == all.train()->to_json());
}

TEST_CASE("train: merging ends when no pair is left that is frequent enough", "[text]") {
  // "ab" and "bc" are as frequent: the lower ids go first.
  const json own =
      trained({.vocab_size = 1000, .pattern = "gpt2", .special_tokens = {}, .min_frequency = 2},
              {"abc abc xbc xab"});
  CHECK(own["model"]["vocab"].size() == 256 + own["model"]["merges"].size());
  CHECK(own["model"]["merges"][0] == json({"a", "b"}));
  const json none =
      trained({.vocab_size = 1000, .pattern = "gpt2", .special_tokens = {}, .min_frequency = 9},
              {"abc abc xbc xab"});
  CHECK(none["model"]["merges"] == json::array());
}

TEST_CASE("train: settings that cannot be are named", "[text]") {
  const auto message = [](const TrainBpeOptions& options) {
    return error_of([&] { BpeTrainer trainer(options); });
  };
  CHECK(message({.vocab_size = 256}) ==
        "train: a vocabulary of 256, expected 257 (256 bytes and 1 special tokens) to 1048576");
  CHECK(message({.vocab_size = 1 << 21}) ==
        "train: a vocabulary of 2097152, expected 257 (256 bytes and 1 special tokens) to 1048576");
  CHECK(message({.special_tokens = {"<a>", "<a>"}}) ==
        "train: special token '<a>' twice, expected each once");
  CHECK(message({.special_tokens = {"a"}}) ==
        "train: special token 'a', expected two characters or more");
  CHECK(message({.pattern = "("}).find("train: pattern: '(' is no regular expression") == 0);
  CHECK(error_of([] { BpeTrainer({}).add("a\xff"); }) ==
        "train: byte 1 is not UTF-8 text, expected UTF-8");
}
