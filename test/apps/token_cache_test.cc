#include "apps/token_cache.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "apps/chats.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::read_file;
using tessera::testing::TempDir;
namespace fs = std::filesystem;

namespace {

constexpr const char* kWords =
    R"({"pre_tokenizer": {"type": "WhitespaceSplit"}, "model": {"type": "WordLevel", "unk_token": "?",
        "vocab": {"?": 0, "one": 1, "two": 300, "three": 3}}})";

TextSource source_of(std::vector<std::string> paths) {
  return {.name = "texts", .paths = std::move(paths), .documents = {}};
}

std::vector<std::vector<int64_t>> ids_of(const TokenDocuments& documents) {
  std::vector<std::vector<int64_t>> all;
  for (size_t d = 0; d < documents.begins.size(); ++d) {
    auto& ids = all.emplace_back();
    for (int64_t i = documents.begins[d]; i < documents.ends[d]; ++i) {
      ids.push_back(documents.tokens[i]);
    }
  }
  return all;
}

size_t num_entries(const std::string& directory) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(directory)) ++count;
  return count;
}

/// What tells whether a file was written anew.
ino_t inode_of(const std::string& path) {
  struct stat status {};
  REQUIRE(::stat(path.c_str(), &status) == 0);
  return status.st_ino;
}

}  // namespace

TEST_CASE("token cache: has the documents' tokens, each by the size of the vocabulary",
          "[token_cache]") {
  const TempDir dir;
  const TextSource texts = source_of(
      {dir.write("a.jsonl", "{\"text\": \"one two\"}\n{\"text\": \"\"}\n{\"text\": \"three x\"}\n"),
       dir.write("b.txt", "two")});
  const auto words = text::parse_tokenizer(kWords, "t");
  const std::string entry = make_token_cache(*words, texts, {.directory = dir / "cache"});
  const TokenDocuments found = open_token_cache(entry);
  CHECK(found.tokens.is_mapped());
  CHECK(ids_of(found) == std::vector<std::vector<int64_t>>{{1, 300}, {3, 0}, {300}});
  CHECK(ids_of(found) == ids_of(encode_documents(texts, *words)));
  CHECK(fs::file_size(entry + "/tokens.bin") == 5 * 2);
  const auto byte = text::make_byte_tokenizer();
  const std::string bytes = make_token_cache(*byte, texts, {.directory = dir / "cache"});
  CHECK(fs::file_size(bytes + "/tokens.bin") == 17);
  CHECK(ids_of(open_token_cache(bytes)) == ids_of(encode_documents(texts, *byte)));
}

TEST_CASE("token cache: what is there whole is used, whatever the files are called",
          "[token_cache]") {
  const TempDir dir;
  const auto words = text::parse_tokenizer(kWords, "t");
  const std::string path = dir.write("a.txt", "one two");
  const auto make = [&](const TextSource& texts, const text::Tokenizer& tokenizer) {
    return make_token_cache(tokenizer, texts, {.directory = dir / "cache"});
  };
  const std::string entry = make(source_of({path}), *words);
  const ino_t inode = inode_of(entry + "/tokens.bin");
  CHECK(make(source_of({path}), *words) == entry);
  for (const std::string name : {"b.txt", "\xff\xfe.txt"}) {
    fs::copy_file(path, dir / name);
    CHECK(make(source_of({dir / name}), *words) == entry);
  }
  CHECK(inode_of(entry + "/tokens.bin") == inode);
  const TextSource odd = source_of({dir.write("\xfd.txt", "three")});
  CHECK(make(odd, *words) == make(odd, *words));
  // Another text, another tokenizer, another way of reading, another order are other tokens.
  CHECK(make(source_of({dir.write("c.txt", "one  two")}), *words) != entry);
  CHECK(make(source_of({path}), *text::make_byte_tokenizer()) != entry);
  TextSource other = source_of({path});
  other.documents.invalid = InvalidText::kReplace;
  CHECK(make(other, *words) != entry);
  CHECK(make(source_of({path, dir / "c.txt"}), *words) !=
        make(source_of({dir / "c.txt", path}), *words));
  // A file that is written anew, with the same size and time of modification.
  const auto time = fs::last_write_time(path);
  std::ofstream(path) << "two one";
  fs::last_write_time(path, time);
  const std::string changed = make(source_of({path}), *words);
  CHECK(changed != entry);
  CHECK(ids_of(open_token_cache(changed)) == std::vector<std::vector<int64_t>>{{300, 1}});
}

TEST_CASE("token cache: has conversations with what is learned of them", "[token_cache]") {
  const TempDir dir;
  const auto source_with = [&](std::string_view behind, text::TrainOn on) {
    const std::string text = fmt::format(
        "{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{}{{% endfor %}}"
        "{{% if add_generation_prompt %}}assistant: {{% endif %}}",
        behind);
    ChatSource source{"chats", {dir / "a.jsonl"}, nullptr, on};
    source.chat_template = std::make_shared<const text::ChatTemplate>(
        text::load_chat_template("", dir.write("t.jinja", text)));
    return source;
  };
  dir.write("a.jsonl",
            "{\"prompt\": \"1 + 1\", \"completion\": \"2\"}\n" +
                (R"({"prompt": "q", "completion": ")" + std::string(300, 'a') + "\"}\n"));
  const std::shared_ptr<const text::Tokenizer> byte = text::make_byte_tokenizer();
  const ChatSource source = source_with("$", text::TrainOn::kAssistant);
  const TokenCacheOptions options{.directory = dir / "cache", .threads = 2};
  const std::string entry = make_chat_cache(byte, source, options);
  const TokenDocuments found = open_token_cache(entry), expected = encode_chats(source, byte, 1);
  CHECK(found.tokens.is_mapped());
  CHECK(found.is_target.is_mapped());
  REQUIRE(found.count() == 2);
  CHECK(ids_of(found) == ids_of(expected));
  REQUIRE(found.is_target.num_tokens() == found.tokens.num_tokens());
  int64_t num_learned = 0;
  for (int64_t i = 0; i < found.tokens.num_tokens(); ++i) {
    CHECK(found.is_target[i] == expected.is_target[i]);
    num_learned += found.is_target[i];
  }
  CHECK(num_learned == 2 + 301);
  // There it is used; another template, or other tokens to learn, are another entry.
  const ino_t before = inode_of(entry + "/tokens.bin");
  CHECK(make_chat_cache(byte, source, options) == entry);
  CHECK(inode_of(entry + "/tokens.bin") == before);
  CHECK(make_chat_cache(byte, source_with("!", text::TrainOn::kAssistant), options) != entry);
  CHECK(make_chat_cache(byte, source_with("$", text::TrainOn::kAll), options) != entry);
  CHECK(num_entries(dir / "cache") == 3);
  // What is damaged is made anew.
  const std::string whole = read_file(entry + "/targets.bin");
  for (const std::string& damaged : {whole.substr(1), std::string(whole.size(), '\1')}) {
    dir.write("cache/" + fs::path(entry).filename().string() + "/targets.bin", damaged);
    CHECK(make_chat_cache(byte, source, options) == entry);
    CHECK(read_file(entry + "/targets.bin") == whole);
  }
  // A row that is no conversation is named, and leaves nothing to use.
  dir.write("a.jsonl", "{\"prompt\": \"q\"}\n");
  CHECK(error_of([&] {
          make_chat_cache(byte, source, options);
        }).starts_with(dir / "a.jsonl" + ": line 1: "));
  for (const auto& each : fs::directory_iterator(dir / "cache")) {
    if (fs::exists(each.path() / "cache.json")) continue;
    CHECK_FALSE(error_of([&] { open_token_cache(each.path(), 0); }).empty());
  }
}

TEST_CASE("token cache: what is not whole is made anew", "[token_cache]") {
  const TempDir dir;
  const auto words = text::parse_tokenizer(kWords, "t");
  const TextSource texts =
      source_of({dir.write("a.txt", "one two three"), dir.write("b.md", "two")});
  const auto make = [&] { return make_token_cache(*words, texts, {.directory = dir / "cache"}); };
  const std::string entry = make();
  const std::string record = entry + "/cache.json", tokens = entry + "/tokens.bin",
                    ends = entry + "/ends.bin";
  const auto expected = ids_of(open_token_cache(entry));
  const auto flip = [](const std::string& path, size_t at) {
    std::string bytes = read_file(path);
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    std::ofstream(path, std::ios::binary) << bytes;
  };
  const auto replace = [&](const std::string& old, const std::string& by) {
    std::string text = read_file(record);
    const size_t at = text.find(old);
    REQUIRE(at != std::string::npos);
    std::ofstream(record) << text.replace(at, old.size(), by);
  };
  const std::vector<std::function<void()>> damages = {
      [&] { fs::remove(record); },  // killed before the end
      [&] { fs::remove(tokens); },
      [&] { fs::resize_file(tokens, 4); },
      [&] { fs::resize_file(ends, 8); },
      [&] { flip(tokens, 2); },
      [&] { flip(ends, 0); },
      [&] { std::ofstream(record) << "{"; },
      [&] { std::ofstream(record) << "{\"format\": 7}"; },
      [&] { replace("token cache 2", "token cache 1"); },
      [&] { replace("\"bytes_per_token\": 2", "\"bytes_per_token\": 0"); },
      [&] { replace(fs::path(entry).filename().string(), std::string(32, '0')); }};
  for (size_t i = 0; i < damages.size(); ++i) {
    CAPTURE(i);
    damages[i]();
    const ino_t before = fs::exists(tokens) ? inode_of(tokens) : 0;
    CHECK(make() == entry);
    CHECK(inode_of(tokens) != before);
    CHECK(ids_of(open_token_cache(entry)) == expected);
  }
}

TEST_CASE("token cache: bad texts are named with file and line, and leave nothing to use",
          "[token_cache]") {
  const TempDir dir;
  const auto words = text::parse_tokenizer(kWords, "t");
  const auto error = [&](const TextSource& texts) {
    return error_of([&] { make_token_cache(*words, texts, {.directory = dir / "cache"}); });
  };
  const std::string bad = dir.write("bad.txt", "one\xff");
  for (int i = 0; i < 2; ++i) {  // nor the second time
    CHECK(error(source_of({dir.write("a.txt", "one"), bad})) ==
          bad + ": byte 3 (0xff) is in no character, expected UTF-8");
  }
  const std::string line = dir.write("a.jsonl", "{\"text\": \"one\"}\n{\"txt\": \"two\"}\n");
  CHECK(error(source_of({line})).starts_with(line + ": line 2: "));
  CHECK(error(source_of({dir.write("none.jsonl", "{\"text\": \"\"}\n")})) ==
        "texts: no token in 1 files, expected a text");
  CHECK(error(source_of({dir / "gone.txt"})) ==
        dir / "gone.txt: cannot be found any more, expected a file");
  // With data.invalid = replace it goes on.
  TextSource mended = source_of({bad});
  mended.documents.invalid = InvalidText::kReplace;
  const auto byte = text::make_byte_tokenizer();
  const std::string entry = make_token_cache(*byte, mended, {.directory = dir / "cache"});
  CHECK(ids_of(open_token_cache(entry)) ==
        std::vector<std::vector<int64_t>>{{'o', 'n', 'e', 0xef, 0xbf, 0xbd}});
}

TEST_CASE("token cache: a file that changes while it is read is refused", "[token_cache]") {
  const TempDir dir;
  const std::string path = dir.write("a.txt", "one two");
  const auto byte = text::make_byte_tokenizer();
  TokenCacheOptions options{.directory = dir / "cache"};
  options.progress = [&](int64_t, int64_t total) {
    if (total > 0) std::ofstream(path, std::ios::app) << "!";
  };
  CHECK(error_of([&] { make_token_cache(*byte, source_of({path}), options); }) ==
        path + ": has changed while it was read, expected a file that stays");
}

TEST_CASE("token cache: one that no rank has made is missed", "[token_cache]") {
  const TempDir dir;
  fs::create_directories(dir / "cache");
  const std::string entry = dir / "cache/" + std::string(32, 'a');
  CHECK(error_of([&] { open_token_cache(entry, /*wait_seconds=*/0); }) ==
        entry +
            ": not there, although the first rank has made it, expected output.dir on a file "
            "system that all nodes share");
  CHECK(num_entries(dir / "cache") == 0);
}
