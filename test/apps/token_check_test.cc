#include "apps/token_check.h"

#include <atomic>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "dist/comm/local.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;

namespace {

/// A shard in the format of llm.c, of uint16 or uint32 tokens, all 7 but for those named.
TokenArray shard(const std::string& path, int bytes_per_token, int64_t numel,
                 std::vector<std::pair<int64_t, uint32_t>> others = {}) {
  std::vector<int32_t> header(256);
  header[0] = bytes_per_token == 2 ? 20240520 : 20240801;
  header[1] = bytes_per_token == 2 ? 1 : 7;
  header[2] = static_cast<int32_t>(numel);
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  std::vector<uint32_t> tokens(static_cast<size_t>(numel), 7);
  for (const auto& [position, token] : others) tokens[static_cast<size_t>(position)] = token;
  for (const uint32_t token : tokens) {
    bytes.append(reinterpret_cast<const char*>(&token), static_cast<size_t>(bytes_per_token));
  }
  std::ofstream(path, std::ios::binary) << bytes;
  return load_token_shard(path);
}

/// The error of a whole check by `ranks` threads, which all ranks have; "" without one. `num_read`
/// gets what all of them read.
std::string check(int ranks, const std::vector<TokenArray>& files,
                  const TokenCheck::Options& options, int64_t* num_read = nullptr) {
  std::mutex mutex;
  std::vector<std::string> errors;
  int64_t total = 0;
  dist::run_ranks(ranks, [&](dist::World& world) {
    int64_t mine = 0;
    std::string error;
    try {
      TokenCheck tokens(files, options, world);
      tokens.keep_results();
      if (!tokens.finish([] { return false; })) throw Error("it was not waited for");
      mine = tokens.num_read();
    } catch (const InputError& e) {
      error = e.what();
    }
    const std::lock_guard lock(mutex);
    errors.push_back(error);
    total += mine;
  });
  for (const std::string& error : errors) REQUIRE(error == errors[0]);
  if (num_read != nullptr) *num_read = total;
  return errors[0];
}

}  // namespace

TEST_CASE("token_check: the first id outside the vocabulary is named by file and place", "[data]") {
  const testing::TempDir dir;
  const std::vector<TokenArray> files{shard(dir.path() + "/a.bin", 2, 5000),
                                      shard(dir.path() + "/b.bin", 4, 7001, {{6999, 300}}),
                                      shard(dir.path() + "/c.bin", 2, 3000, {{1, 65535}})};
  for (const int ranks : {1, 2, 3}) {
    for (const double max_seconds : {20.0, -1.0}) {  // at once; all of it beside the first steps
      const TokenCheck::Options options{
          .vocab_size = 300, .results_path = "", .max_seconds = max_seconds, .piece_numel = 999};
      CHECK(check(ranks, files, options) ==
            dir.path() + "/b.bin: token 6999 is 300, expected one below the vocabulary's size 300");
      int64_t num_read = 0;
      CHECK(check(ranks, {files[0], files[1]},
                  {.vocab_size = 301,
                   .results_path = "",
                   .max_seconds = max_seconds,
                   .piece_numel = 999},
                  &num_read)
                .empty());
      CHECK(num_read == 12001);  // each token by one rank
    }
  }
}

TEST_CASE("token_check: ids of 2^31 and more are outside of every vocabulary", "[data]") {
  const testing::TempDir dir;
  const TokenArray file = shard(dir.path() + "/a.bin", 4, 3000, {{2047, 0xffffffffU}});
  CHECK(check(1, {file}, {.vocab_size = 1 << 30, .results_path = ""}) ==
        dir.path() + "/a.bin: token 2047 is 4294967295, expected one below the vocabulary's size " +
            "1073741824");
}

TEST_CASE("token_check: a file that has not changed is not read again", "[data]") {
  const testing::TempDir dir;
  const std::string results = dir.path() + "/results", path = dir.path() + "/a b.bin";
  const std::vector<TokenArray> files{shard(path, 2, 5000, {{4000, 90}}),
                                      shard(dir.path() + "/c.bin", 2, 3000)};
  const TokenCheck::Options options{.vocab_size = 100, .results_path = results};
  int64_t num_read = 0;
  CHECK(check(2, files, options, &num_read).empty());
  CHECK(num_read == 8000);
  CHECK(check(2, files, options, &num_read).empty());
  CHECK(num_read == 0);
  // Another vocabulary needs no second reading either.
  TokenCheck::Options smaller = options;
  smaller.vocab_size = 90;
  CHECK(check(2, files, smaller) ==
        path + ": token 4000 is 90, expected one below the vocabulary's size 90");

  const TokenArray changed = shard(path, 2, 5000, {{17, 91}});
  std::filesystem::last_write_time(
      path, std::filesystem::file_time_type::clock::now() + std::chrono::seconds(2));
  CHECK(check(2, {changed, files[1]}, options, &num_read).empty());
  CHECK(num_read == 5000);

  std::ofstream(results) << "tessera-token-check 2\nnonsense\n-1 x\n7 zz 1 2 3.0 4.0 " + path +
                                "\n";
  CHECK(check(1, files, options, &num_read).empty());
  CHECK(num_read == 8000);
}

TEST_CASE("token_check: a token that changes while size, inode and time stay is seen", "[data]") {
  const testing::TempDir dir;
  const std::string path = dir.path() + "/a.bin";
  const std::vector<TokenArray> files{shard(path, 2, 200'000),
                                      shard(dir.path() + "/b.bin", 4, 3000)};
  const auto content = [&](int ranks, size_t begin, size_t end, int64_t* num_read = nullptr) {
    std::mutex mutex;
    std::vector<std::string> all;
    dist::run_ranks(ranks, [&](dist::World& world) {
      TokenCheck tokens(
          files, {.vocab_size = 100, .results_path = dir.path() + "/kept", .piece_numel = 999},
          world);
      tokens.keep_results();
      const std::lock_guard lock(mutex);
      if (!tokens.is_decided()) throw Error("it is not through");
      all.push_back(tokens.content(begin, end));
      if (num_read != nullptr) *num_read = tokens.num_read();
    });
    for (const std::string& each : all) CHECK(each == all[0]);
    return all[0];
  };
  int64_t num_read = 0;
  const std::string before = content(1, 0, 2, &num_read), second = content(1, 1, 2);
  CHECK(num_read == 203'000);
  CHECK(before.size() == 16);
  CHECK(before != second);
  CHECK(content(1, 0, 0).empty());
  CHECK(content(3, 0, 2, &num_read) == before);
  CHECK(num_read == 0);
  std::filesystem::remove(dir.path() + "/kept");
  CHECK(content(3, 0, 2) == before);  // whoever reads which piece

  const auto time = std::filesystem::last_write_time(path);
  const auto set_token = [&](uint16_t token) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(1024 + 2 * 100'000);
    file.write(reinterpret_cast<const char*>(&token), sizeof(token));
    file.close();
    std::filesystem::last_write_time(path, time);
  };
  set_token(8);
  CHECK(content(1, 0, 2, &num_read) != before);
  CHECK(num_read == 200'000);
  CHECK(content(1, 1, 2) == second);
  set_token(7);
  CHECK(content(2, 0, 2) == before);
}

TEST_CASE("token_check: the position of a batch's bad token is that in the file", "[data]") {
  const testing::TempDir dir;
  const TokenArray file = shard(dir.path() + "/a.bin", 2, 100, {{80, 500}});
  Corpus corpus;
  corpus.shards = {file.slice(60, 40)};
  const EvalSamples samples(corpus, {.context = 8, .vocab_size = 300});
  CHECK(error_of([&] { samples.batch(0, 5); }) ==
        dir.path() + "/a.bin: token 80 is 500, expected one below the vocabulary's size 300");
}

TEST_CASE("token_check: a check that was not finished ends with its run", "[data]") {
  const testing::TempDir dir;
  const TokenArray file = shard(dir.path() + "/a.bin", 2, 5000, {{4999, 500}});
  dist::run_ranks(2, [&](dist::World& world) {
    const TokenCheck tokens({file}, {.vocab_size = 100, .results_path = "", .max_seconds = -1},
                            world);
  });
}

TEST_CASE("token_check: who ends a run waits for no reading, on whichever rank it is asked",
          "[data]") {
  const testing::TempDir dir;
  const std::string kept = dir.path() + "/kept";
  const std::vector<TokenArray> files{shard(dir.path() + "/a.bin", 2, 5000)};
  for (const int ranks : {1, 3}) {
    std::atomic<bool> is_fast = false;
    const TokenCheck::Options options{.vocab_size = 8,
                                      .results_path = kept,
                                      .max_seconds = -1,
                                      .piece_numel = 999,
                                      .on_piece = [&] {
                                        while (!is_fast) std::this_thread::yield();
                                      }};
    dist::run_ranks(ranks, [&](dist::World& world) {
      TokenCheck tokens(files, options, world);
      tokens.keep_results();
      const bool is_waited_for = tokens.finish([&] { return world.rank() == ranks - 1; });
      const bool is_kept = std::filesystem::exists(kept);
      world.control().barrier();
      is_fast = true;
      if (is_waited_for || is_kept) throw Error("it was waited for");
      if (!tokens.finish([] { return false; })) throw Error("it was not waited for");
      if (!tokens.finish([] { return true; })) throw Error("it is over, and says it is not");
    });
    CHECK(std::filesystem::remove(kept));
  }
}
