// mutate [COUNT [SEED]] [--corpus=DIR]: of every target good inputs, the files in DIR/<target>/, and
// COUNT mutations of these, drawn from the seed. Anything but an answer or an
// Error ends the program: a crash or what the sanitizers find, 10 s for one input, or a single
// allocation of more than twice the input (and the target's own bytes for what does not depend on it).

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <random>

#include "test/fuzz/targets.h"

namespace {

std::atomic<size_t> limit{SIZE_MAX};  // of one allocation

[[noreturn]] void die(const char* what, size_t nbytes) {
  std::fprintf(stderr, "fuzz: %s %zu bytes, expected at most %zu\n", what, nbytes, limit.load());
  std::abort();
}

}  // namespace

void* operator new(size_t nbytes) {
  if (nbytes > limit) die("allocates", nbytes);
  void* data = std::malloc(nbytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void* operator new(size_t nbytes, const std::nothrow_t&) noexcept {
  if (nbytes > limit) die("allocates", nbytes);
  return std::malloc(nbytes);
}
void operator delete(void* data) noexcept {
  std::free(data);
}
void operator delete(void* data, size_t) noexcept {
  std::free(data);
}

namespace tessera::fuzz {
namespace {

using Random = std::mt19937_64;

size_t below(Random& random, size_t count) {
  return count == 0 ? 0 : random() % count;
}

/// Texts that break parsers when they stand where something else should.
constexpr std::string_view kTexts[] = {"{",    "}",    "[",  "]",    "\"",   ":",       ",",
                                       "null", "true", "-1", "1e99", "0",    "\\u0000", "\xff",
                                       "\xc3", "{}",   "[]", "1.5",  "\"\"", "0,0,0,0"};
constexpr std::string_view kNumbers[] = {"0",
                                         "1",
                                         "4294967296",
                                         "9223372036854775807",
                                         "9223372036854775808",
                                         "18446744073709551615",
                                         "18446744073709551616",
                                         "-9223372036854775808",
                                         "100000001"};

/// Half of them change little, so that what is behind the first checks is reached. `words` are the
/// target's.
std::string mutate(std::string bytes, const std::string& other,
                   const std::vector<std::string>& words, Random& random) {
  constexpr size_t kGentle[] = {0, 1, 7, 10};
  const bool is_gentle = random() % 2 == 0;
  const size_t rounds = is_gentle ? 1 : 1 + below(random, 4);
  for (size_t round = 0; round < rounds; ++round) {
    const size_t at = below(random, bytes.size() + 1);
    const size_t length = 1 + below(random, std::min<size_t>(64, bytes.size() - at + 1));
    switch (is_gentle ? kGentle[below(random, 4)] : below(random, 11)) {
      case 0:  // a bit
        if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(random, 8)));
        break;
      case 1:
        if (at < bytes.size()) bytes[at] = static_cast<char>(random());
        break;
      case 2:  // cut short
        bytes.resize(at);
        break;
      case 3:
        bytes.erase(at, length);
        break;
      case 4:  // a stretch twice
        bytes.insert(at, bytes.substr(at, length));
        break;
      case 5:  // a stretch of another input
        bytes.insert(at, other.substr(below(random, other.size() + 1), length * 4));
        break;
      case 6:
        bytes.insert(at, kTexts[below(random, std::size(kTexts))]);
        break;
      case 7: {  // a number becomes another one
        const size_t begin = bytes.find_first_of("0123456789", at);
        if (begin == std::string::npos) break;
        const size_t end = std::min(bytes.find_first_not_of("0123456789", begin), bytes.size());
        bytes.replace(begin, end - begin, kNumbers[below(random, std::size(kNumbers))]);
        break;
      }
      case 8: {  // eight bytes of a binary number
        const uint64_t values[] = {0, 1, UINT64_MAX, uint64_t{1} << 63, 100'000'001, random()};
        const uint64_t value = values[below(random, std::size(values))];
        const size_t where = below(random, 4) == 0 ? at : 0;
        for (size_t i = 0; i < 8 && where + i < bytes.size(); ++i) {
          bytes[where + i] = static_cast<char>(value >> (8 * i));
        }
        break;
      }
      case 10:  // a word, in place of something or between
        bytes.replace(at, random() % 2 == 0 ? 0 : std::min(length, bytes.size() - at),
                      words[below(random, words.size())]);
        break;
      default:  // many of the same
        bytes.insert(at, std::string(below(random, 4000), at % 2 == 0 ? '[' : '0'));
        for (size_t i = at + 1; at % 5 == 0 && i < std::min(bytes.size(), at + 4000); i += 2) {
          bytes[i] = ',';
        }
    }
  }
  return bytes;
}

int run(int64_t count, uint64_t seed, const std::string& corpus) {
  Random random(seed);
  for (const Target& target : targets()) {
    std::vector<std::string> inputs = target.seeds();
    for (const std::string& input : inputs) {
      if (accepts(target, input)) continue;
      fmt::print(stderr, "fuzz: {} does not take one of its seeds\n", target.name);
      return 1;
    }
    const size_t num_seeds = inputs.size();
    const std::vector<std::string> words = target.words();
    const std::string dir = corpus + "/" + std::string(target.name);
    if (!corpus.empty() && std::filesystem::is_directory(dir)) {
      std::vector<std::filesystem::path> files;
      for (const auto& entry : std::filesystem::directory_iterator(dir)) files.push_back(entry);
      std::sort(files.begin(), files.end());
      for (const auto& path : files) {
        std::ifstream file(path, std::ios::binary);
        inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
      }
    }
    int64_t num_taken = 0, num_runs = 0;
    const auto check = [&](const std::string& input) {
      ::alarm(10);
      limit = 2 * input.size() + target.fixed_nbytes;
      num_taken += accepts(target, input) ? 1 : 0;
      limit = SIZE_MAX;
      ++num_runs;
    };
    for (const std::string& input : inputs) check(input);
    for (int64_t i = 0; i < count; ++i) {
      const std::string& other = inputs[below(random, inputs.size())];
      const size_t num_bases = i % 2 == 0 ? num_seeds : inputs.size();
      check(mutate(inputs[below(random, num_bases)], other, words, random));
    }
    ::alarm(0);
    fmt::print("{}: {} inputs, {} taken\n", target.name, num_runs, num_taken);
  }
  return 0;
}

}  // namespace
}  // namespace tessera::fuzz

int main(int argc, char** argv) {
  int64_t count = 200'000;
  uint64_t seed = 1;
  std::string corpus;
  int position = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--corpus=")) {
      corpus = argument.substr(9);
    } else if (position++ == 0) {
      count = std::atoll(argv[i]);
    } else {
      seed = static_cast<uint64_t>(std::atoll(argv[i]));
    }
  }
  return tessera::fuzz::run(count, seed, corpus);
}
