#include "apps/chats.h"

#include <thread>

#include "apps/config.h"
#include "apps/packed_samples.h"
#include "apps/tokenize.h"
#include "test/golden/golden.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;

namespace {

const char* const kTemplate =
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

std::shared_ptr<const text::Tokenizer> bytes() {
  return text::make_byte_tokenizer();
}

/// A directory with a template, and a file of these lines in it.
struct Place {
  explicit Place(const std::string& lines) : path(dir.write("chats.jsonl", lines)) {
    dir.write("chat_template.jinja", kTemplate);
    dir.write("tokenizer_config.json", R"({"eos_token": "$"})");
  }
  std::shared_ptr<const text::ChatTemplate> chat_template() const {
    return std::make_shared<const text::ChatTemplate>(text::load_chat_template(dir.path()));
  }
  Config config() const {
    Config config;
    config.data.chat = path;
    config.model.context = 100;
    return config;
  }
  testing::TempDir dir;
  std::string path;
};

std::string row(const std::string& question, const std::string& answer) {
  return R"({"prompt": ")" + question + R"(", "completion": ")" + answer + "\"}\n";
}

/// Each conversation of a file: where it is, and what is learned.
std::vector<std::string> learned(const Place& place, const ChatReaderOptions& options) {
  ChatReader reader({place.path}, place.chat_template(), bytes(), options);
  std::vector<std::string> all;
  Chat chat;
  while (reader.next(chat)) {
    std::string text = chat.where.substr(place.dir.path().size() + 1) + "|";
    for (size_t i = 0; i < chat.tokens.ids.size(); ++i) {
      if (chat.tokens.is_trained[i] != 0) text += static_cast<char>(chat.tokens.ids[i]);
    }
    all.push_back(text);
  }
  return all;
}

struct Loaded {
  TokenDocuments documents;
  std::string summary;
};
Loaded load_chats(const Config& config, const std::string& dir) {
  const ChatSource source = open_chats(config, dir);
  Loaded loaded;
  loaded.documents = encode_chats(source, bytes(), 1);
  loaded.summary =
      fit_chats(loaded.documents, source, config.model.context, config.data.long_chats);
  return loaded;
}

}  // namespace

TEST_CASE("chats: rows of each shape come in order, whatever the number of threads", "[chats]") {
  std::string lines =
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})"
      "\n\n" +
      row("c", "d") +
      R"({"conversations": [{"from": "human", "value": "e"}, {"from": "gpt", "value": "f"}]})"
      "\n"
      R"({"instruction": "g", "output": "h"})"
      "\n";
  CHECK(learned(Place(lines), {}) ==
        std::vector<std::string>{"chats.jsonl: line 1|b$\n", "chats.jsonl: line 3|d$\n",
                                 "chats.jsonl: line 4|f$\n", "chats.jsonl: line 5|h$\n"});
  for (int i = 0; i < 2000; ++i) lines += row("q", std::to_string(i));
  const Place place(lines);
  const auto expected = learned(place, {});
  CHECK(expected.size() == 2004);
  CHECK(learned(place, {.threads = 3}) == expected);
}

TEST_CASE("chats: rows of Parquet are those of JSON lines", "[chats]") {
  const std::string folder = testing::golden_dir() + "/parquet/chats.";
  const std::string with_tools =
      "{% if tools %}{{ tools | tojson }}\n{% endif %}" + std::string(kTemplate);
  const testing::TempDir dir;
  const auto chat_template = std::make_shared<const text::ChatTemplate>(
      text::load_chat_template("", dir.write("t.jinja", with_tools)));
  std::vector<std::string> texts, places;
  for (const char* kind : {"jsonl", "parquet"}) {
    ChatReader reader({folder + kind}, chat_template, bytes(), {});
    std::string all;
    Chat chat;
    while (reader.next(chat)) {
      all += fmt::format("{}|", chat.rendered.text);
      for (const uint8_t is_trained : chat.tokens.is_trained) all += is_trained ? '1' : '0';
      places.push_back(chat.where.substr(folder.size()));
    }
    texts.push_back(std::move(all));
  }
  CHECK(texts[0].find("adds 3") != std::string::npos);
  CHECK(texts[0] == texts[1]);
  REQUIRE(places.size() == 18);
  CHECK(places[1] == "jsonl: line 2");
  CHECK(places[10] == "parquet: row 2");
}

TEST_CASE("chats: an error names the file and the row, and rows before it come", "[chats]") {
  const std::string good = row("a", "b");
  const std::pair<std::string, std::string> kCases[] = {
      {"{\"prompt\": \"a\"}",
       "no conversation: the keys are prompt, expected \"messages\", "
       "\"prompt\" and \"completion\", \"conversations\", or "
       "\"instruction\" and \"output\""},
      {R"({"messages": [{"role": "bot", "content": "a"}]})",
       "message 0: unknown role \"bot\", expected one of system, user, assistant, tool, developer, "
       "function, ipython"},
      {"{\"messages\": ", "the row: no JSON (at byte 14)"},
      {R"({"messages": [{"role": "user", "content": "a"}]})",
       "PLACE/chat_template.jinja: nothing to learn in it; the conversation: user: 'a'"},
  };
  for (const auto& [line, expected] : kCases) {
    for (const int threads : {1, 3}) {
      const Place place(good + line + "\n" + good);
      ChatReader reader({place.path}, place.chat_template(), bytes(), {.threads = threads});
      Chat chat;
      CHECK(reader.next(chat));
      CHECK(chat.where == place.path + ": line 1");
      std::string error = error_of([&] { reader.next(chat); });
      for (size_t at; (at = error.find(place.dir.path())) != std::string::npos;) {
        error.replace(at, place.dir.path().size(), "PLACE");
      }
      CHECK(error == "PLACE/chats.jsonl: line 2: " + expected);
    }
  }
}

TEST_CASE("chats: show prints what is learned of each, with its row and its tokens", "[chats]") {
  const Place place(row("q", "a") + row("q\\u0007", std::string(90, 'b')));
  const auto shown = [&](std::vector<std::string> extra) {
    char* data = nullptr;
    size_t nbytes = 0;
    std::FILE* const out = ::open_memstream(&data, &nbytes);
    std::vector<std::string> arguments = {"show", place.path, "--tokenizer=byte",
                                          "--template=" + place.dir.path()};
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    std::string error;
    try {
      tokenize_command(arguments, out);
    } catch (const Error& caught) {
      error = caught.what();
    }
    std::fclose(out);
    std::string text(data, nbytes);
    std::free(data);
    for (size_t at; (at = text.find(place.path)) != std::string::npos;) {
      text.replace(at, place.path.size(), "FILE");
    }
    return text + error;
  };
  const std::string first =
      "FILE: line 1: 22 tokens, 3 of them learned\n"
      "user: q\nassistant: [[a$\n]]\n";
  CHECK(shown({"--count=1"}) == first + "\n1 conversations, 22 tokens, 3 of them learned\n");
  CHECK(shown({"--context=50"}) ==
        first +
            "\nFILE: line 2: 112 tokens, 92 of them learned, longer than the context of 50: 31 of "
            "these are left if it is cut\n"
            "user: q\\x07\nassistant: [[" +
            std::string(90, 'b') +
            "$\n]]\n"
            "\n2 conversations, 134 tokens, 95 of them learned; 1 longer than the context of 50\n");
  CHECK(shown({"--count=1", "--train-on=all"}).find("[[user: q\nassistant: a$\n]]") !=
        std::string::npos);
  CHECK(shown({"--shape=alpaca"}) == place.path + ": line 1: expected the key \"instruction\"");
  // On a terminal.
  ChatReader reader({place.path}, place.chat_template(), bytes(), {});
  char* data = nullptr;
  size_t nbytes = 0;
  std::FILE* const out = ::open_memstream(&data, &nbytes);
  show_chats(reader, {.count = 1, .has_colour = true}, out);
  std::fclose(out);
  CHECK(std::string(data, nbytes).find("\x1b[2muser: q\nassistant: \x1b[0m\x1b[32ma$\n\x1b[0m") !=
        std::string::npos);
  std::free(data);
}

TEST_CASE("chats: one that is too long is cut or dropped, and is counted", "[chats]") {
  // "user: q\nassistant: a$\n" has 22 bytes.
  const Place place(row("q", "a") + row("q", std::string(90, 'b')) +
                    row(std::string(99, 'q'), "c"));
  Config config = place.config();
  const auto load = [&] { return load_chats(config, place.dir.path()); };
  const auto lengths = [](const Loaded& chats) {
    const TokenDocuments& documents = chats.documents;
    std::vector<int64_t> numels;
    for (size_t i = 0; i < documents.begins.size(); ++i) {
      numels.push_back(documents.ends[i] - documents.begins[i]);
    }
    return numels;
  };
  Loaded chats = load();
  CHECK(lengths(chats) == std::vector<int64_t>{22, 101});
  CHECK(chats.summary ==
        "chats: 3 conversations of 1 files, 2 of them trained on: 123 tokens, 85 learned; 2 longer "
        "than model.context + 1 = 101 tokens: cut; 1 left out, as nothing of them is learned");
  config.data.long_chats = text::LongChats::kDrop;
  chats = load();
  CHECK(lengths(chats) == std::vector<int64_t>{22});
  CHECK(chats.summary ==
        "chats: 3 conversations of 1 files, 1 of them trained on: 22 tokens, 3 learned; 2 longer "
        "than model.context + 1 = 101 tokens: dropped");
  config.model.context = 5;
  CHECK(error_of(load) ==
        "data.chat = " + place.path +
            ": chats: 3 conversations of 1 files, 0 of them trained on: 0 tokens, "
            "0 learned; 3 longer than model.context + 1 = 6 tokens: dropped; "
            "expected at least one");
  config.data.chat = place.dir / "none*";
  CHECK(error_of(load) ==
        "data.chat = " + place.dir / "none*" +
            ": no file matches, expected JSON lines or Parquet files of conversations");
}

TEST_CASE("chats: what is trained on decides which tokens are targets", "[chats]") {
  const Place place(
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, )"
      R"({"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})");
  Config config = place.config();
  const std::pair<text::TrainOn, std::string> kCases[] = {
      {text::TrainOn::kAssistant, "b$\nd$\n"},
      {text::TrainOn::kLast, "d$\n"},
      {text::TrainOn::kCompletion, "d$\n"},
      {text::TrainOn::kAll, "ser: a\nassistant: b$\nuser: c\nassistant: d$\n"},
  };
  for (const auto& [on, expected] : kCases) {
    config.data.train_on = on;
    const auto sources = std::make_shared<const std::vector<TokenSource>>(
        std::vector<TokenSource>{{"chats", 0, {load_chats(config, place.dir.path()).documents}}});
    SampleOptions options;
    options.context = 100, options.vocab_size = 256, options.restart_positions = true;
    const PackedSamples samples(sources, options, 0, SplitPart::kTrain);
    REQUIRE(samples.num_samples() == 1);
    std::string found;
    for (const int32_t id : samples.batch(0, 1).targets) {
      if (id != kIgnoredTarget) found += static_cast<char>(id);
    }
    CHECK(found == expected);
    CHECK(samples.num_targets(0, 1) == static_cast<int64_t>(expected.size()));
  }
}

TEST_CASE("chats: the template is that of the setting, else of the tokenizer", "[chats]") {
  const Place place(row("q", "a"));
  const testing::TempDir other;
  Config config = place.config();
  const auto load = [&](const std::string& dir) {
    return load_chats(config, dir).documents.tokens.num_tokens();
  };
  const std::string none =
      ": no chat template, expected chat_template.jinja or a chat_template in "
      "tokenizer_config.json";
  CHECK(error_of([&] { load(other.path()); }) == other.path() + none);
  config.data.chat_template =
      other.write("t.jinja", "{{ messages[0].content }}>{{ messages[1].content }}{{ eos_token }}");
  config.data.train_on = text::TrainOn::kAll;
  // Its tokens are those of the tokenizer.
  CHECK(load(place.dir.path()) == 4);
  CHECK(load("") == 3);
  config.data.chat_template = place.dir.path();
  CHECK(load("") == 22);
  config.data.chat_template = other / "missing";
  CHECK(error_of([&] { load(place.dir.path()); }).starts_with(other / "missing"));
}
