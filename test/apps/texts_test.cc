// Texts in the trainer: from files to samples, and what lies beside the model.

#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "apps/checkpoint_command.h"
#include "apps/options.h"
#include "apps/packed_samples.h"
#include "apps/saved_model.h"
#include "test/apps/runs.h"
#include "test/golden/golden.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::error_on;
using tessera::testing::losses;
using tessera::testing::read_file;
using tessera::testing::TempDir;
using tessera::testing::train_on;
namespace fs = std::filesystem;

namespace {

Config small_config(const TempDir& dir, const std::vector<std::string>& extra) {
  std::vector<std::string> overrides = {"--output.dir=" + dir / "out",
                                        "--device=cpu",
                                        "--model.layers=1",
                                        "--model.heads=2",
                                        "--model.width=16",
                                        "--model.context=16",
                                        "--train.steps=3",
                                        "--train.micro_batch=1",
                                        "--train.threads=1",
                                        "--train.log_every=1000"};
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return load_config("", overrides);
}

/// One id for each of some letters, of Hugging Face's kind, and files that come with it.
void write_tokenizer_files(const std::string& folder) {
  fs::create_directories(folder);
  std::string vocab = R"("?": 0)";
  for (char c = 'a'; c <= 'z'; ++c) vocab += fmt::format(", \"{}\": {}", c, c - 'a' + 1);
  std::ofstream(folder + "/tokenizer.json")
      << R"({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated",
             "invert": false}, "decoder": {"type": "Fuse"}, "model": {"type": "WordLevel",
             "unk_token": "?", "vocab": {)"
      << vocab << "}}}";
  std::ofstream(folder + "/tokenizer_config.json") << "{\"eos_token\": \"z\"}";
  std::ofstream(folder + "/chat_template.jinja") << "{{ messages }}";
  std::ofstream(folder + "/generation_config.json") << "{\"eos_token_id\": 26}";
}

std::string lines_of(int count, int first = 0) {
  std::string text;
  for (int i = first; i < first + count; ++i) {
    std::string letters;
    for (int k = 0; k < 3 + i * i % 29; ++k) {
      letters += static_cast<char>('a' + (i * 7 + k * k * (1 + i % 5)) % 26);
    }
    text += fmt::format("{{\"id\": {}, \"text\": \"{}\"}}\n", i, letters);
  }
  return text;
}

}  // namespace

TEST_CASE("texts: documents with a tokenizer of one's own, tokenized once for all ranks",
          "[texts]") {
  const TempDir dir;
  write_tokenizer_files(dir / "tokenizer");
  dir.write("a.jsonl", lines_of(40));
  dir.write("b.jsonl", lines_of(30, 40));
  const auto config = [&](const std::vector<std::string>& extra) {
    std::vector<std::string> all = {"--data.text=" + dir / "*.jsonl",
                                    "--data.tokenizer=" + dir / "tokenizer"};
    all.insert(all.end(), extra.begin(), extra.end());
    return small_config(dir, all);
  };
  train_on(2, config({}));
  CHECK(losses(dir / "out").size() == 3);
  const auto tokens_of = [&] {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(dir / "out/token_cache")) {
      found.push_back(entry.path().string() + "/tokens.bin");
    }
    return found;
  };
  REQUIRE(tokens_of().size() == 1);
  const std::string first = tokens_of()[0];
  struct stat before {
  }, after{};
  REQUIRE(::stat(first.c_str(), &before) == 0);
  // Beside the model: the tokenizer with all that came with it.
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                           "generation_config.json"}) {
    CHECK(read_file(dir / "out/" + name) == read_file(dir / "tokenizer/" + name));
  }
  const SavedModel saved = load_model(dir / "out");
  CHECK(saved.tokenizer->name() == "WordLevel");
  CHECK(saved.model->family_config()->vocab_size() == 27);
  // An export has them as well.
  std::FILE* const quiet = std::fopen("/dev/null", "w");
  CHECK(checkpoint_command({"export", dir / "out", dir / "hf"}, quiet) == 0);
  CHECK(checkpoint_command({"export", dir / "out", dir / "own", "--format=tessera"}, quiet) == 0);
  std::fclose(quiet);
  for (const char* folder : {"hf/", "own/"}) {
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                             "generation_config.json"}) {
      CAPTURE(folder, name);
      CHECK(read_file(dir / folder + name) == read_file(dir / "tokenizer/" + name));
    }
  }
  CHECK(load_model(dir / "own").tokenizer->name() == "WordLevel");
  // Each document ends with the tokenizer's end, and begins behind it.
  Data data = load_data(config({}));
  CHECK(data.document_tokens.begin == 26);
  CHECK(data.document_tokens.end == 26);
  const SampleOptions options = sample_options(config({}), data);
  const PackedSamples samples(data.sources, options, 0, SplitPart::kTrain);
  const auto count = [&](const std::vector<int32_t>& ids) {
    return std::count(ids.begin(), ids.end(), 26);
  };
  int64_t num_begun = 0, num_ended = 0;
  for (int64_t i = 0; i < samples.num_samples(); ++i) {
    const Batch batch = samples.batch(i, 1);
    num_begun += count(batch.inputs), num_ended += count(batch.targets);
  }
  CHECK(num_begun >= 70);
  CHECK(num_begun == num_ended);
  // A token of their own instead, or none.
  CHECK(sample_options(config({"--data.separator=3"}), data).separator == 3);
  CHECK(sample_options(config({"--data.separator=3"}), data).document_begin == -1);
  CHECK(load_data(config({"--data.document_tokens=none"})).document_tokens.end == -1);
  // What stood around documents ends a text that is generated, and stands before one that is judged.
  const auto around = [&](const std::vector<std::string>& extra) {
    const Config c = config(extra);
    return std::pair{end_tokens_of(c, saved.tokenizer.get()),
                     prefix_token_of(c, saved.tokenizer.get())};
  };
  using Tokens = std::vector<int32_t>;
  CHECK(around({}) == std::pair{Tokens{26}, 26});
  CHECK(around({"--model.eos_ids=4"}) == std::pair{Tokens{4, 26}, 26});
  CHECK(around({"--model.eos_ids=4,26", "--model.bos_ids=5"}) == std::pair{Tokens{4, 26}, 5});
  CHECK(around({"--data.separator=3"}) == std::pair{Tokens{3}, 3});
  CHECK(around({"--data.document_tokens=none"}) == std::pair{Tokens{}, -1});
  CHECK(around({"--data.text=" + dir / "one.txt"}) == std::pair{Tokens{}, -1});  // no documents
  CHECK(around({"--data.text=" + dir / "one.jsonl"}) == std::pair{Tokens{26}, 26});
  CHECK(end_tokens_of(config({}), nullptr).empty());
  // Again: the same tokens, which are not made again; the same losses.
  const auto expected = losses(dir / "out");
  train_on(3, config({"--output.overwrite=true", "--train.global_batch=6"}));
  REQUIRE(::stat(first.c_str(), &after) == 0);
  CHECK(after.st_ino == before.st_ino);
  // Other bytes: other tokens, and nothing is left of the first.
  dir.write("b.jsonl", lines_of(31, 40));
  train_on(1, config({"--output.overwrite=true", "--data.tokenizer=byte"}));
  REQUIRE(tokens_of().size() == 1);
  CHECK(tokens_of()[0] != first);
  // Nor of the tokenizer.
  CHECK(load_model(dir / "out").tokenizer->name() == "byte");
  CHECK_FALSE(fs::exists(dir / "out/chat_template.jinja"));
}

TEST_CASE("texts: what is wrong with one ends all ranks before the first step", "[texts]") {
  const TempDir dir;
  write_tokenizer_files(dir / "tokenizer");
  const std::string tokenizer = "--data.tokenizer=" + dir / "tokenizer";
  const auto error = [&](int ranks, const std::string& text, std::vector<std::string> extra = {}) {
    extra.insert(extra.begin(), {"--data.text=" + text, tokenizer});
    const std::string message = error_on(ranks, small_config(dir, extra));
    CHECK(message.find('\n') == std::string::npos);
    CHECK_FALSE(fs::exists(dir / "out/metrics.jsonl"));
    return message;
  };
  const std::string good = dir.write("good.jsonl", lines_of(40));
  const std::string bad = dir.write("bad.jsonl", lines_of(5) + "{\"txt\": \"a\"}\n");
  CHECK_THAT(error(3, bad), Catch::Contains(bad + ": line 6: "));
  CHECK(nlohmann::json::parse(read_file(dir / "out/status.json"))["state"] == "failed");
  CHECK_THAT(error(2, dir.write("u.txt", std::string("ab\xc3\x28", 4))),
             Catch::Contains("u.txt: byte 2 (0xc3) is in no character, expected UTF-8"));
  CHECK_THAT(error(1, dir.write("e.jsonl", "")), Catch::Contains("e.jsonl: 0 bytes"));
  CHECK_THAT(error(1, dir.write("cut.txt.gz", "\x1f\x8b\x08")), Catch::Contains("cut.txt.gz: "));
  std::string parquet = read_file(testing::golden_dir() + "/parquet/gzip_v1.parquet");
  parquet[4 + 150] = static_cast<char>(parquet[4 + 150] ^ 0x55);  // in the first page of `plain`
  CHECK_THAT(error(2, dir.write("page.parquet", parquet), {"--data.field=plain"}),
             Catch::Contains("page.parquet: column \"plain\", row ") &&
                 Catch::Contains("incorrect data check, expected "));
  CHECK_THAT(error(1, dir.write("column.parquet",
                                read_file(testing::golden_dir() + "/parquet/zstd_v1.parquet"))),
             Catch::Contains("column.parquet: ") && Catch::Contains("text"));
  CHECK_THAT(error(2, dir / "*.csv"), Catch::Contains("no file matches, expected texts"));
  CHECK_THAT(error(1, good, {"--data.field=body"}), Catch::Contains("good.jsonl: line 1"));
  CHECK_THAT(error(1, good, {"--data.tokenizer=" + dir / "none"}),
             Catch::Contains("none: No such file or directory, expected byte, char, or the "
                             "path of a tokenizer.json"));
  // More ids than the model has.
  CHECK_THAT(
      error(2, good, {"--model.vocab=26"}),
      Catch::Contains("command line: model.vocab = 26, expected at least the tokenizer's 27"));
  std::string shard(1024 + 2 * 400, '\0');
  const int32_t header[] = {20240520, 1, 400};
  shard.replace(0, sizeof(header), reinterpret_cast<const char*>(header), sizeof(header));
  for (size_t i = 0; i < 400; ++i) shard[1024 + 2 * i] = static_cast<char>(1 + i % 23);
  CHECK_THAT(error_on(2, small_config(
                             dir, {"--data.sources=" + dir.write("s.bin", shard),
                                   "--data.separator=1", "--model.vocab=27", "--sample.tokens=3"})),
             Catch::Contains("sample.tokens = 3 with sources of token shards alone"));
  // What was wrong is mended: nothing of the failures is in the way.
  train_on(2, small_config(dir, {"--data.text=" + good, tokenizer}));
  CHECK(losses(dir / "out").size() == 3);
}

TEST_CASE("texts: bytes that are no UTF-8 are replaced if asked", "[texts]") {
  const TempDir dir;
  std::string text = lines_of(20);
  text[text.find("\"text\": \"") + 9] = '\xff';
  const std::vector<std::string> extra = {"--data.text=" + dir.write("a.jsonl", text)};
  CHECK_THAT(error_on(1, small_config(dir, extra)), Catch::Contains("a.jsonl: line 1: byte"));
  auto mended = extra;
  mended.emplace_back("--data.invalid=replace");
  train_on(1, small_config(dir, mended));
  CHECK(losses(dir / "out").size() == 3);
}

TEST_CASE("texts: an epoch of seven uneven sources is the same on any ranks, killed or not",
          "[texts]") {
  const TempDir dir;
  dir.write("one.txt", "a single document of one text, longer than a window of the model is");
  dir.write("many.jsonl", lines_of(60));
  dir.write("few.jsonl", lines_of(3, 60));
  dir.write("long.jsonl", "{\"text\": \"" + std::string(300, 'q') + "\"}\n" + lines_of(1, 63));
  for (int i = 0; i < 4; ++i) dir.write(fmt::format("part{}.md", i), fmt::format("# part {}", i));
  dir.write("short.jsonl", "{\"text\": \"x\"}\n{\"text\": \"\"}\n{\"text\": \"yz\"}\n");
  std::vector<int32_t> header(256), ids;
  for (int32_t d = 0; d < 9; ++d) {
    for (int32_t i = 0; i < 2 + d * 5; ++i) ids.push_back(128 + (d * 11 + i) % 100);
    ids.push_back(0);
  }
  header[0] = 20240520, header[1] = 1, header[2] = static_cast<int32_t>(ids.size());
  std::string shard(reinterpret_cast<const char*>(header.data()), 1024);
  for (const int32_t id : ids) shard += {static_cast<char>(id & 255), static_cast<char>(id >> 8)};
  dir.write("tokens.bin", shard);
  std::string sources;
  for (const char* name : {"one.txt", "many.jsonl", "few.jsonl", "long.jsonl", "part*.md",
                           "short.jsonl", "tokens.bin"}) {
    sources += (sources.empty() ? "" : ", ") + dir / name;
  }
  // At a learning rate of 0 the loss of a step says which samples it had.
  const auto config = [&](const std::string& out, std::vector<std::string> extra = {}) {
    extra.insert(extra.begin(),
                 {"--data.sources=" + sources, "--data.separator=0", "--data.val_fraction=0.1",
                  "--optim.lr=0", "--optim.final_lr=0", "--train.steps=14",
                  "--train.global_batch=12", "--output.dir=" + dir / out, "--checkpoint.every=5",
                  "--checkpoint.best=false", "--checkpoint.keep=9"});
    return small_config(dir, extra);
  };
  // The samples of an epoch have every position of every document once.
  const Config first = config("one");
  const Data data = load_data(first);
  const SampleOptions options{.context = 16, .vocab_size = 256, .seed = 1, .separator = 0};
  std::map<std::pair<int32_t, int32_t>, int> expected_pairs, pairs;
  int64_t num_documents = 0;
  for (const TokenSource& source : *data.sources) {
    for (const TokenDocuments& each : source.shards) {
      num_documents += each.count();
      for (size_t d = 0; d < each.begins.size(); ++d) {
        int32_t before = 0;
        for (int64_t i = each.begins[d]; i <= each.ends[d]; ++i) {
          const auto id = i < each.ends[d] ? static_cast<int32_t>(each.tokens[i]) : 0;
          ++expected_pairs[{before, id}];
          before = id;
        }
      }
    }
  }
  CHECK(num_documents == 1 + 60 + 3 + 2 + 4 + 2 + 9);
  const PackedSamples train(data.sources, options, 0.1, SplitPart::kTrain);
  const PackedSamples val(data.sources, options, 0.1, SplitPart::kVal);
  for (const PackedSamples* part : {&train, &val}) {
    for (int64_t i = 0; i < part->num_samples(); ++i) {
      const Batch batch = part->batch(i, 1);
      for (size_t t = 0; t < batch.inputs.size(); ++t) {
        if (batch.targets[t] != kIgnoredTarget) ++pairs[{batch.inputs[t], batch.targets[t]}];
      }
    }
  }
  CHECK(pairs == expected_pairs);
  CHECK(val.num_samples() > 0);
  CHECK(train.num_samples() < 14 * 12);  // the steps go beyond an epoch
  CHECK(train.num_samples() > 5 * 12);
  // The steps have them in that order, whoever runs them.
  const auto check_same = [&](const std::string& out, const std::vector<double>& expected) {
    const std::vector<double> found = losses(dir / out);
    REQUIRE(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      CAPTURE(out, i, found[i], expected[i]);
      CHECK(std::abs(found[i] - expected[i]) <= 1e-6 * expected[i]);
    }
  };
  train_on(1, first);
  const std::vector<double> expected = losses(dir / "one");
  REQUIRE(expected.size() == 14);
  std::set<double> different(expected.begin(), expected.end());
  CHECK(different.size() == 14);
  train_on(3, config("three"));
  train_on(4, config("four"));
  check_same("three", expected);
  check_same("four", expected);
  // Killed behind step 7, the last checkpoint is that of step 5; behind step 12 that of step 10.
  for (const auto& [from, killed_at, ranks] :
       {std::tuple{"three", 7, 4}, {"four", 12, 1}, {"one", 7, 3}}) {
    const std::string out = fmt::format("{}-on-{}", from, ranks);
    fs::copy(dir / from, dir / out, fs::copy_options::recursive);
    for (const int64_t step : testing::saved_steps(dir / out)) {
      if (step > killed_at) fs::remove_all(dir / out + "/" + dist::step_directory_name(step));
    }
    fs::remove(dir / out + "/model.safetensors");
    std::ofstream(dir / out + "/status.json")
        << fmt::format("{{\"state\": \"running\", \"step\": {}}}", killed_at);
    train_on(ranks, config(out, {"--checkpoint.resume=auto"}));
    check_same(out, expected);
  }
}
