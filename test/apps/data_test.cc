#include "apps/data.h"

#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;

namespace {

/// Tokens 0, 1, 2, ... so that a window shows where it came from.
Corpus counting(std::initializer_list<int64_t> shard_sizes) {
  Corpus corpus;
  int32_t next = 0;
  for (const int64_t size : shard_sizes) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < size; ++i) ids.push_back(next++);
    corpus.shards.emplace_back(ids, "shard");
  }
  return corpus;
}

SampleOptions options(int64_t context, uint64_t seed = 1) {
  SampleOptions o;
  o.context = context;
  o.vocab_size = 1 << 30;
  o.seed = seed;
  return o;
}

std::string shard_bytes(std::vector<int32_t> header, int bytes_per_token, int64_t num_tokens) {
  header.resize(256);
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  for (int64_t i = 0; i < num_tokens; ++i) {
    const uint32_t token = static_cast<uint32_t>(i * 7);
    bytes.append(reinterpret_cast<const char*>(&token), static_cast<size_t>(bytes_per_token));
  }
  return bytes;
}

Config text_config(const std::string& path) {
  Config config;
  config.data.text = path;
  return config;
}

}  // namespace

TEST_CASE("data: a text or shard that is cut while it is read is named", "[data]") {
  const testing::TempDir dir;
  const auto error = [&](const std::string& path, const Corpus& corpus) {
    const TrainSamples samples(corpus, options(8));
    samples.batch(0, 4);
    const auto nbytes = std::filesystem::file_size(path);
    std::filesystem::resize_file(path, 4096);
    std::string message;  // where the samples come to what is gone
    for (int64_t i = 0; i < samples.num_samples() && message.empty(); ++i) {
      message = error_of([&] { samples.batch(i, 1); });
    }
    CHECK(message == fmt::format("{}: cut to 4096 bytes while it was read, expected {} as before",
                                 path, nbytes));
  };
  for (const int width : {2, 4}) {
    const bool is_u16 = width == 2;
    const std::string shard =
        dir.write("shard", shard_bytes(is_u16 ? std::vector<int32_t>{20240520, 1, 9000}
                                              : std::vector<int32_t>{20240801, 7, 9000},
                                       width, 9000));
    Corpus corpus;
    corpus.shards.push_back(load_token_shard(shard));
    error(shard, corpus);
  }
  const std::string text = dir.write("text", std::string(20000, 'x'));
  Config config = text_config(text);
  config.data.tokenizer = "byte";
  error(text, load_data(config).train);
}

TEST_CASE("data: a permutation visits every index once, for any count", "[data]") {
  for (const int64_t count : {1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4099}) {
    const Permutation permutation(count, make_key(3, 4));
    std::vector<bool> seen(static_cast<size_t>(count));
    int64_t fixed = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t image = permutation(i);
      REQUIRE((image >= 0 && image < count));
      REQUIRE_FALSE(seen[static_cast<size_t>(image)]);
      seen[static_cast<size_t>(image)] = true;
      fixed += image == i;
    }
    if (count >= 100) CHECK(fixed < count / 10);  // about one fixed point is expected
  }
}

TEST_CASE("data: each window comes exactly once an epoch, over any ranks and batches", "[data]") {
  const TrainSamples samples(counting({101, 3, 64}), options(7));
  REQUIRE(samples.num_samples() == 14 + 0 + 9);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::set<int64_t> windows;
    for (int64_t i = 0; i < samples.num_samples(); ++i) {
      windows.insert(samples.window_of(epoch * samples.num_samples() + i));
    }
    CHECK(static_cast<int64_t>(windows.size()) == samples.num_samples());
  }
  // Two ranks of three rows and one rank of six see the same rows.
  const Batch whole = samples.batch(12, 6), first = samples.batch(12, 3),
              second = samples.batch(15, 3);
  std::vector<int32_t> joined = first.inputs;
  joined.insert(joined.end(), second.inputs.begin(), second.inputs.end());
  CHECK(joined == whole.inputs);
}

TEST_CASE("data: windows are consecutive tokens with the next as the target", "[data]") {
  const TrainSamples samples(counting({50, 33}), options(8));
  std::set<int32_t> starts;
  for (int64_t g = 0; g < 3 * samples.num_samples(); ++g) {
    const Batch batch = samples.batch(g, 1);
    CHECK(batch.num_valid == 8);
    for (size_t t = 0; t < 8; ++t) {
      REQUIRE(batch.inputs[t] == batch.inputs[0] + static_cast<int32_t>(t));
      REQUIRE(batch.targets[t] == batch.inputs[t] + 1);
    }
    const int32_t begin = batch.inputs[0];
    CHECK((begin + 8 < 50 || begin >= 50));  // within one shard
    if (g < samples.num_samples()) CHECK(begin % (begin < 50 ? 8 : 1) == 0);
    starts.insert(begin);
  }
  CHECK(static_cast<int64_t>(starts.size()) > samples.num_samples());  // later epochs are shifted
}

TEST_CASE("data: order depends on the seed and the epoch", "[data]") {
  const TrainSamples a(counting({1000}), options(3, 1)), b(counting({1000}), options(3, 2));
  const int64_t n = a.num_samples();
  int64_t same_seed = 0, same_epoch = 0;
  for (int64_t i = 0; i < n; ++i) {
    same_seed += a.window_of(i) == b.window_of(i);
    same_epoch += a.window_of(i) == a.window_of(n + i);
  }
  CHECK(same_seed < n / 20);
  CHECK(same_epoch < n / 20);
}

TEST_CASE("data: validation sees every target once, in order, with padding at the end", "[data]") {
  const EvalSamples samples(counting({20, 1, 9}), options(8));
  REQUIRE(samples.num_samples() == 3 + 0 + 1);
  const Batch batch = samples.batch(0, 6);
  std::vector<int32_t> targets;
  for (const int32_t target : batch.targets) {
    if (target != kIgnoredTarget) targets.push_back(target);
  }
  std::vector<int32_t> expected;
  for (int32_t i = 1; i < 20; ++i) expected.push_back(i);
  for (int32_t i = 22; i < 30; ++i) expected.push_back(i);
  CHECK(targets == expected);
  CHECK(batch.num_valid == static_cast<int64_t>(expected.size()));
  CHECK(samples.batch(4, 2).num_valid == 0);
  CHECK(EvalSamples(Corpus{}, options(8)).num_samples() == 0);
}

TEST_CASE("data: separators give documents of their own and positions that restart", "[data]") {
  Corpus corpus;
  corpus.shards.emplace_back(std::vector<int32_t>{1, 2, 9, 3, 9, 9, 4, 5, 6}, "shard");
  SampleOptions o = options(8);
  o.separator = 9;
  const Batch plain = EvalSamples(corpus, o).batch(0, 1);
  CHECK(plain.document_starts == std::vector<int32_t>{0, 0, 2, 2, 4, 5, 5, 5});
  CHECK(plain.positions.empty());
  o.restart_positions = true;
  CHECK(EvalSamples(corpus, o).batch(0, 1).positions ==
        std::vector<int32_t>{0, 1, 0, 1, 0, 0, 1, 2});
  CHECK(EvalSamples(corpus, options(8)).batch(0, 1).document_starts.empty());
}

TEST_CASE("data: masked tokens are the targets, drawn by seed and sample alone", "[data]") {
  constexpr int32_t kMask = 5000, kVocab = 5001;
  SampleOptions o = options(20);
  o.vocab_size = kVocab;
  o.mask_token = kMask;
  o.mask_probability = 0.15;
  const Corpus corpus = counting({4000});
  const TrainSamples samples(corpus, o), plain(corpus, options(20));
  CHECK(num_masked(20, 0.15) == 3);
  CHECK(num_masked(20, 0.001) == 1);
  CHECK(num_masked(3, 1) == 3);
  const int64_t num_rows = samples.num_samples();
  const Batch all = samples.batch(0, num_rows), tokens = plain.batch(0, num_rows);
  CHECK(all.num_valid == num_rows * 3);
  int64_t num_targets = 0, num_hidden = 0, num_kept = 0;
  std::set<int32_t> random;
  std::map<int64_t, int64_t> per_row, per_position;
  for (size_t i = 0; i < all.inputs.size(); ++i) {
    if (all.targets[i] == kIgnoredTarget) {
      CHECK(all.inputs[i] == tokens.inputs[i]);
      continue;
    }
    CHECK(all.targets[i] == tokens.inputs[i]);
    ++num_targets;
    ++per_row[static_cast<int64_t>(i) / 20];
    ++per_position[static_cast<int64_t>(i) % 20];
    if (all.inputs[i] == kMask) {
      ++num_hidden;
    } else if (all.inputs[i] == tokens.inputs[i]) {
      ++num_kept;
    } else {
      random.insert(all.inputs[i]);
      CHECK(all.inputs[i] < kVocab);
    }
  }
  for (const auto& [row, count] : per_row) CHECK(count == 3);
  CHECK(std::ssize(per_row) == num_rows);
  CHECK(std::ssize(per_position) == 20);
  CHECK(num_targets == 3 * num_rows);  // 597: shares of 0.8, 0.1, 0.1 within 5 deviations
  CHECK(std::abs(num_hidden - 0.8 * static_cast<double>(num_targets)) < 50);
  CHECK(std::abs(num_kept - 0.1 * static_cast<double>(num_targets)) < 37);
  CHECK(random.size() > 20);
  // Whoever asks, in whichever batches.
  for (int64_t i = 0; i < num_rows; i += 7) {
    const Batch one = samples.batch(i, 1);
    CHECK(std::equal(one.inputs.begin(), one.inputs.end(), all.inputs.begin() + i * 20));
    CHECK(std::equal(one.targets.begin(), one.targets.end(), all.targets.begin() + i * 20));
  }
  SampleOptions other = o;
  other.seed = 2;
  CHECK(TrainSamples(corpus, other).batch(0, 5).targets != samples.batch(0, 5).targets);
}

TEST_CASE("data: validation masks a share of what each row has, the same each time", "[data]") {
  SampleOptions o = options(20);
  o.mask_token = 99;
  o.mask_probability = 0.5;
  const EvalSamples samples(counting({26}), o);  // rows of 20 and of 5 tokens
  const Batch batch = samples.batch(0, 3), again = samples.batch(0, 3);
  CHECK(batch.num_valid == 10 + 3);
  CHECK(batch.targets == again.targets);
  CHECK(batch.inputs == again.inputs);
  const auto targets_in = [&](int64_t begin, int64_t end) {
    return std::count_if(batch.targets.begin() + begin, batch.targets.begin() + end,
                         [](int32_t target) { return target != kIgnoredTarget; });
  };
  CHECK(targets_in(0, 20) == 10);
  CHECK(targets_in(20, 25) == 3);
  CHECK(targets_in(25, 60) == 0);
}

TEST_CASE("data: token arrays keep ids of any size", "[data]") {
  for (const int32_t largest : {255, 256, 65535, 65536, 2147483647}) {
    const TokenArray tokens(std::vector<int32_t>{0, largest, 7}, "x");
    CHECK(tokens[1] == largest);
    CHECK(tokens.slice(1, 2)[1] == 7);
    CHECK(tokens.slice(1, 2).num_tokens() == 2);
  }
}

TEST_CASE("data: token shards of 16 and 32 bits", "[data]") {
  const testing::TempDir dir;
  const TokenArray narrow =
      load_token_shard(dir.write("a.bin", shard_bytes({20240520, 1, 5}, 2, 5)));
  CHECK(narrow.num_tokens() == 5);
  CHECK(narrow[4] == 28);
  const TokenArray wide =
      load_token_shard(dir.write("b.bin", shard_bytes({20240801, 7, 20000}, 4, 20000)));
  CHECK(wide[19999] == 139993);
}

TEST_CASE("data: a bad token shard is named with counts", "[data]") {
  const testing::TempDir dir;
  const auto message = [&](const std::string& bytes) {
    const std::string path = dir.write("a.bin", bytes);
    return error_of([&] { load_token_shard(path); }).substr(path.size() + 2);
  };
  CHECK(message("") == "0 bytes, expected a token shard with a header of 1024 bytes");
  CHECK(message(std::string(1023, 'x')) ==
        "1023 bytes, expected a token shard with a header of 1024 bytes");
  CHECK(
      message(shard_bytes({7, 1, 5}, 2, 5)) ==
      "magic 7, expected 20240520 (uint16 tokens) or 20240801 (uint32 tokens); a stream of tokens "
      "without the header of llm.c is not accepted");
  CHECK(message(shard_bytes({20240520, 2, 5}, 2, 5)) == "version 2, expected 1");
  CHECK(message(shard_bytes({20240801, 1, 5}, 4, 5)) == "version 1, expected 7");
  CHECK(message(shard_bytes({20240520, 1, 6}, 2, 5)) ==
        "1034 bytes, expected 1036 = header of 1024 + 6 tokens (as it says) of 2 bytes");
  CHECK(message(shard_bytes({20240520, 1, 5}, 2, 5) + "x") ==
        "1035 bytes, expected 1034 = header of 1024 + 5 tokens (as it says) of 2 bytes");
  CHECK(message(shard_bytes({20240520, 1, -1}, 2, 5)).starts_with("1034 bytes, expected 1022"));
  CHECK(error_of([&] { load_token_shard(dir / "none.bin"); }) ==
        dir / "none.bin: No such file or directory, expected a file");
  CHECK(error_of([&] { load_token_shard(dir.path()); }) ==
        dir.path() + ": a directory, expected a regular file");
}

TEST_CASE("data: too little data and ids outside the vocabulary are input errors", "[data]") {
  CHECK(error_of([] {
          TrainSamples(counting({5, 4}), options(5));
        }) ==
        "data: 9 tokens to train on in 2 shards, expected at least one shard of model.context + 1 "
        "= 6");
  CHECK_THROWS_AS(TrainSamples(counting({5}), options(5)), InputError);
  SampleOptions o = options(5);
  o.vocab_size = 3;
  CHECK(error_of([&] { TrainSamples(counting({6}), o).batch(0, 1); }) ==
        "shard: token 3 is 3, expected one below the vocabulary's size 3");
}

TEST_CASE("data: a text is split at the end, by bytes or by characters", "[data]") {
  const testing::TempDir dir;
  // Ten characters, the last of two bytes.
  Config config = text_config(dir.write("a.txt", "abcdefghi\xc3\xa9"));
  config.data.val_fraction = 0.25;
  const Data bytes = load_data(config);
  CHECK(bytes.train.num_tokens() == 8);
  CHECK(bytes.val.num_tokens() == 3);
  CHECK(bytes.vocab_size == 256);
  config.data.tokenizer = "char";
  const Data chars = load_data(config);
  CHECK(chars.train.num_tokens() == 7);
  CHECK(chars.val.num_tokens() == 3);
  CHECK(chars.vocab_size == 10);
  CHECK(chars.val.shards[0][2] == 9);
  config.data.val_fraction = 0;
  CHECK(load_data(config).val.num_tokens() == 0);
  config.model.vocab = 16;
  CHECK(load_data(config).vocab_size == 16);
  config.model.vocab = 9;
  CHECK(error_of([&] { load_data(config); }) ==
        "default: model.vocab = 9, expected at least the tokenizer's 10");
}

TEST_CASE("data: interleaved validation comes from all over the data", "[data]") {
  const testing::TempDir dir;
  std::string text;
  for (int i = 0; i < 40000; ++i) text += static_cast<char>('a' + i / 10000);  // four documents
  Config config;
  config.data.text = dir.write("text", text);
  config.model.context = 16;
  const auto chars_of = [](const Corpus& corpus) {
    std::set<int64_t> seen;
    for (const TokenArray& shard : corpus.shards) {
      for (int64_t i = 0; i < shard.num_tokens(); ++i) seen.insert(shard[i]);
    }
    return seen.size();
  };
  const Data tail = load_data(config);
  CHECK(chars_of(tail.val) == 1);
  config.data.val_split = ValSplit::kInterleave;
  const Data data = load_data(config);
  CHECK(chars_of(data.val) == 4);
  CHECK(chars_of(data.train) == 4);
  CHECK(data.train.num_tokens() + data.val.num_tokens() == 40000);
  CHECK(std::abs(data.val.num_tokens() - 4000) <= 64);
  for (const TokenArray& shard : data.val.shards) CHECK(shard.num_tokens() > 4 * 17);
  // A short text is one piece.
  config.data.text = dir.write("short", text.substr(0, 100));
  CHECK(load_data(config).val.num_tokens() == 10);
}

TEST_CASE("data: shards that are too short are named with their number", "[data]") {
  const auto shard = [](int64_t numel, const char* name) {
    return TokenArray(std::vector<int32_t>(static_cast<size_t>(numel), 1), name);
  };
  Corpus corpus;
  corpus.shards = {shard(17, "a.bin"), shard(16, "b.bin"), shard(3, "c.bin")};
  CHECK(short_shards(corpus, 16) ==
        "data: 2 of 3 shards have fewer than model.context + 1 = 17 tokens and are not trained on: "
        "b.bin, c.bin");
  CHECK(short_shards(corpus, 2).empty());
  for (int i = 0; i < 6; ++i) corpus.shards.push_back(shard(1, "d.bin"));
  CHECK(short_shards(corpus, 16).ends_with("b.bin, c.bin, d.bin, d.bin, d.bin and 3 more"));
}

TEST_CASE("data: a compressed file is no text", "[data]") {
  const testing::TempDir dir;
  for (const auto& [magic, what] :
       std::vector<std::pair<std::string, std::string>>{{"\x1f\x8b", "a gzip file"},
                                                        {"PK\x03\x04", "a zip archive"},
                                                        {"BZh9", "a bzip2 file"},
                                                        {"\x28\xb5\x2f\xfd", "a zstd file"},
                                                        {"PAR1", "a Parquet file"},
                                                        {"%PDF-1.7", "a PDF file"}}) {
    Config config;
    config.data.text = dir.write("text", magic + std::string(100, 'x'));
    CHECK(testing::error_of([&] { load_data(config); }) ==
          config.data.text + ": it looks like " + what + ", expected a text (unpack it first)");
  }
}

TEST_CASE("data: missing, empty and unreadable texts are named", "[data]") {
  const testing::TempDir dir;
  CHECK(error_of([&] { load_data(text_config(dir / "none")); }) ==
        dir / "none: No such file or directory, expected a file");
  const std::string empty = dir.write("empty", "");
  CHECK(error_of([&] { load_data(text_config(empty)); }) ==
        empty + ": 0 bytes, expected a text to train on");
  Config config = text_config(dir.write("bad", "a\xff"));
  config.data.tokenizer = "char";
  CHECK(error_of([&] {
          load_data(config);
        }).starts_with(dir / "bad: tokenizer: byte 1 is not UTF-8"));
}

TEST_CASE("data: shards by glob, split or with shards of their own for validation", "[data]") {
  const testing::TempDir dir;
  dir.write("train_0.bin", shard_bytes({20240520, 1, 30}, 2, 30));
  dir.write("train_1.bin", shard_bytes({20240520, 1, 10}, 2, 10));
  dir.write("val_0.bin", shard_bytes({20240520, 1, 6}, 2, 6));
  Config config;
  config.model.vocab = 1000;
  config.data.tokens = dir / "train_*.bin";
  config.data.val_fraction = 0.5;
  const Data split = load_data(config);
  CHECK(split.train.num_tokens() == 20);
  CHECK(split.val.num_tokens() == 20);
  CHECK(split.val.shards.size() == 2);
  config.data.val_tokens = dir / "val_*.bin";
  const Data own = load_data(config);
  CHECK(own.train.num_tokens() == 40);
  CHECK(own.val.num_tokens() == 6);
  CHECK(own.tokenizer == nullptr);
  // A path that is there is taken as it is, whatever glob(3) would make of it.
  std::filesystem::create_directory(dir / "[x]");
  dir.write("[x]/a*.bin", shard_bytes({20240520, 1, 7}, 2, 7));
  dir.write("[x]/ab.bin", shard_bytes({20240520, 1, 8}, 2, 8));
  config.data.tokens = dir / "[x]/a*.bin";
  CHECK(load_data(config).train.num_tokens() == 7);
  // Without it, the folder is still what it is called, and so with a backslash.
  std::filesystem::remove(dir / "[x]/a*.bin");
  CHECK(load_data(config).train.num_tokens() == 8);
  config.data.tokens = dir / "\\[x]/a*.bin";
  CHECK(load_data(config).train.num_tokens() == 8);
  config.data.tokens = dir / "[x]/b*.bin";
  CHECK(error_of([&] { load_data(config); }).ends_with(": no file matches, expected token shards"));
  config.data.tokens = dir / "[wxy]*/../[x]/a*.bin";  // a folder that is not there is a pattern
  CHECK(error_of([&] { load_data(config); }).ends_with(": no file matches, expected token shards"));
  std::filesystem::create_directory(dir / "part_1");
  dir.write("part_1/c.bin", shard_bytes({20240520, 1, 9}, 2, 9));
  config.data.tokens = dir / "part_?/c.bin";
  CHECK(load_data(config).train.num_tokens() == 9);
  config.data.tokens = dir / "none_*.bin";
  CHECK(error_of([&] { load_data(config); }) ==
        "data.tokens = " + (dir / "none_*.bin") + ": no file matches, expected token shards");
}
