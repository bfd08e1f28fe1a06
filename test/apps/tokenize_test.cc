#include "apps/tokenize.h"

#include <cstdio>
#include <filesystem>

#include "apps/data.h"
#include "apps/encode_files.h"
#include "core/files.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;

namespace {

namespace fs = std::filesystem;

std::string read(const std::string& path) {
  return read_regular_file(path, 1 << 24);
}

/// What the program prints.
std::string run(const std::vector<std::string>& arguments) {
  char* data = nullptr;
  size_t nbytes = 0;
  std::FILE* const out = ::open_memstream(&data, &nbytes);
  int status = 0;
  try {
    status = tokenize_command(arguments, out);
  } catch (...) {
    std::fclose(out);
    std::free(data);
    throw;
  }
  std::fclose(out);
  const std::string text(data, nbytes);
  std::free(data);
  CHECK(status == 0);
  return text;
}

/// JSON lines, the texts of which are several shards long.
std::string write_lines(const std::string& path, int count) {
  std::string all;
  std::string lines;
  for (int i = 0; i < count; ++i) {
    std::string text;
    for (int k = 0; k <= i * 7 % 50; ++k) text += "line " + std::to_string(i * k) + " of words.";
    lines += "{\"text\": \"" + text + "\"}\n";
    all += text + "<|endoftext|>";
  }
  write_file_atomically(path, lines);
  return all;
}

/// The bytes of all files of tokens in a directory.
std::string shards(const std::string& directory) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().extension() == ".bin") paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  std::string all;
  for (const std::string& path : paths) all += path.substr(directory.size()) + "\n" + read(path);
  return all;
}

}  // namespace

TEST_CASE("tokenize: a tokenizer is trained, and texts are encoded and decoded", "[tokenize]") {
  const testing::TempDir dir;
  const std::string text = write_lines((dir / "a.jsonl"), 40);
  const std::string trained =
      run({"train", (dir / "*.jsonl"), "--out=" + (dir / "t"), "--vocab=300"});
  CHECK(trained.find((dir / "t") + ": 300 ids from ") == 0);
  CHECK(trained.find(fmt::format(" different words of 40 documents, {} bytes\n",
                                 text.size() - 40 * 13)) != std::string::npos);
  CHECK(fs::exists((dir / "t") + "/tokenizer_config.json"));
  const std::string encoded = run({"encode", (dir / "a.jsonl"), "--tokenizer=" + (dir / "t"),
                                   "--out=" + (dir / "one"), "--threads=1", "--shard-tokens=1000"});
  CHECK(encoded.find(" tokens of 40 documents") != std::string::npos);
  CHECK(encoded.find("separator 0\n") != std::string::npos);
  std::vector<std::string> arguments = {"decode", "--tokenizer=" + (dir / "t")};
  for (int i = 0; fs::exists(fmt::format("{}/tokens_{:06}.bin", (dir / "one"), i)); ++i) {
    arguments.push_back(fmt::format("{}/tokens_{:06}.bin", (dir / "one"), i));
  }
  CHECK(arguments.size() > 4);
  CHECK(load_token_shard(arguments[2]).num_tokens() == 1000);
  CHECK(run(arguments) == text);
  // The same bytes with other threads, and 32 bits are the same tokens.
  run({"encode", (dir / "a.jsonl"), "--tokenizer=" + (dir / "t"), "--out=" + (dir / "three"),
       "--threads=3", "--shard-tokens=1000"});
  CHECK(shards((dir / "three")) == shards((dir / "one")));
  run({"encode", (dir / "a.jsonl"), "--tokenizer=" + (dir / "t"), "--out=" + (dir / "wide"),
       "--bits=32"});
  CHECK(run({"decode", "--tokenizer=" + (dir / "t"), (dir / "wide") + "/tokens_000000.bin"}) ==
        text);
  CHECK(run({"inspect", "--tokenizer=" + (dir / "t"), (dir / "a.jsonl")})
            .find("BPE, 300 ids, 1 added tokens\n        0 <|endoftext|> (special)\n") !=
        std::string::npos);
  write_file_atomically((dir / "b.txt"), "words");
  CHECK(run({"ids", "--tokenizer=byte", (dir / "b.txt")}) == "119 111 114 100 115\n");
  CHECK(run({"bench", "--tokenizer=byte", "--threads=2", (dir / "b.txt")})
            .find("5 bytes, 5 tokens") != std::string::npos);
}

TEST_CASE("tokenize: work that was cut off goes on without a lost or doubled token", "[tokenize]") {
  const testing::TempDir dir;
  std::string big(3 << 20, 'x');
  for (size_t i = 9; i < big.size(); i += 10) big[i] = '\n';
  write_file_atomically((dir / "big.txt"), big);
  write_lines((dir / "a.jsonl"), 40);
  const auto tokenizer = text::make_byte_tokenizer();
  const std::vector<std::string> paths = {(dir / "big.txt"), (dir / "a.jsonl")};
  EncodeFilesOptions options{
      .out = (dir / "whole"), .shard_tokens = 300'001, .separator = 255, .threads = 2};
  const auto whole = encode_files(*tokenizer, paths, options);
  CHECK(whole.num_documents == 41);
  options.out = (dir / "cut");
  int num_cuts = 0;
  for (;; ++num_cuts) {
    REQUIRE(num_cuts < 20);
    int num_calls = 0;  // of a batch each: every run comes a bit further
    try {
      const auto result = encode_files(*tokenizer, paths, options, [&](int64_t, int64_t) {
        if (++num_calls < num_cuts + 2) return;
        throw std::runtime_error("cut");
      });
      CHECK(result.num_tokens == whole.num_tokens);
      CHECK(result.num_documents == whole.num_documents);
      CHECK(result.num_text_bytes == whole.num_text_bytes);
      CHECK(result.is_resumed);
      break;
    } catch (const std::runtime_error&) {
    }
  }
  CHECK(num_cuts >= 1);
  CHECK(shards((dir / "cut")) == shards((dir / "whole")));
  // Once more it has nothing to do; with other settings it is refused.
  CHECK(encode_files(*tokenizer, paths, options).num_tokens == whole.num_tokens);
  options.separator = 254;
  CHECK(
      error_of([&] { encode_files(*tokenizer, paths, options); }) ==
      (dir / "cut") +
          "/tokenize.json: of other files, another tokenizer or other settings, expected the same "
          "or another output directory");
  fs::remove((dir / "cut") + "/tokenize.json");
  CHECK(error_of([&] { encode_files(*tokenizer, paths, options); }) ==
        (dir / "cut") + ": has shards but no tokenize.json, expected an empty directory");
}

TEST_CASE("tokenize: what is wrong is named with its place", "[tokenize]") {
  const testing::TempDir dir;
  write_file_atomically((dir / "a.jsonl"), "{\"text\": \"abc\"}\n{\"text\": \"xyz\"}\n");
  write_file_atomically((dir / "t.json"), R"({"type": "char", "chars": ["a", "b", "c"]})");
  CHECK(error_of([&] {
          run({"encode", "--tokenizer=" + (dir / "t.json"), "--out=" + (dir / "o"),
               (dir / "a.jsonl")});
        }) == (dir / "a.jsonl") +
                  ": line 2: tokenizer: character 'x' at byte 0 is not in the vocabulary of 3");
  CHECK(error_of([&] {
          run({"ids", "--tokenizer=" + (dir / "t.json"), (dir / "a.jsonl")});
        }) == (dir / "a.jsonl") +
                  ": line 2: tokenizer: character 'x' at byte 0 is not in the vocabulary of 3");
  CHECK(error_of([&] {
          run({"encode", "--tokenizer=byte", "--separator=<x>", "--out=" + (dir / "o"),
               (dir / "a.jsonl")});
        }) == "command line: --separator=<x>, expected a token of byte, auto or none");
  const auto byte = text::make_byte_tokenizer();
  CHECK(error_of([&] {
          encode_files(*byte, {(dir / "a.jsonl")},
                       {.out = (dir / "p"), .bits = 16, .separator = 70000});
        }) == "tokenize: 70001 ids in 16 bits, expected at most 65536 or 32 bits");
  write_file_atomically((dir / "o.bin"), "");
  CHECK_THROWS_AS(run({"decode", "--tokenizer=byte", (dir / "o.bin")}), InputError);
}
