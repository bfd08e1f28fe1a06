#include "apps/token_check.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <sstream>

#include "core/check.h"
#include "core/files.h"
#include "core/log.h"
#include "dist/checkpoint/manifest.h"

namespace tessera::apps {
namespace {

constexpr std::string_view kResultsHeader = "tessera-token-check 2";

}  // namespace

std::optional<std::string> identity_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return std::nullopt;
  return fmt::format("{} {} {}.{:09} {}.{:09}", status.st_size, status.st_ino,
                     status.st_mtim.tv_sec, status.st_mtim.tv_nsec, status.st_ctim.tv_sec,
                     status.st_ctim.tv_nsec);
}

TokenCheck::TokenCheck(std::vector<TokenArray> files, Options options, dist::World& world)
    : files_(std::move(files)),
      options_(std::move(options)),
      world_(world),
      largest_(files_.size(), -1),
      hashes_(files_.size(), 0),
      is_known_(files_.size(), false) {
  read_results();
  const auto ranks = static_cast<size_t>(world_.world_size());
  size_t number = 0;
  for (size_t i = 0; i < files_.size(); ++i) {
    if (is_known_[i]) continue;
    const int64_t numel = files_[i].num_tokens();
    for (int64_t begin = 0; begin < numel; begin += options_.piece_numel, ++number) {
      if (number % ranks != static_cast<size_t>(world_.rank())) continue;
      pieces_.push_back({i, begin, std::min(begin + options_.piece_numel, numel)});
    }
  }
  world_.control().verdict([&] { read_pieces(options_.max_seconds); });
  if (world_.control().all_agree(is_through())) {
    decide_at_last();
    return;
  }
  decide();  // a bad one among those that were read ends the run now
  thread_ = std::thread([this] {
    try {
      read_pieces(std::numeric_limits<double>::infinity());
    } catch (const Error&) {
      error_ = std::current_exception();
    }
    has_ended_ = true;
  });
}

TokenCheck::~TokenCheck() {
  is_ending_ = true;
  if (thread_.joinable()) thread_.join();
}

bool TokenCheck::finish(const std::function<bool()>& is_to_end) {
  if (is_decided_) return true;
  // A slow disk must not look like a rank that hangs, nor keep the end of the run waiting.
  constexpr std::chrono::milliseconds kPeriod{20};
  while (!world_.control().all_agree(has_ended_)) {
    if (world_.control().max(is_to_end() ? 1 : 0) != 0) return false;
    std::this_thread::sleep_for(kPeriod);
  }
  thread_.join();
  world_.control().verdict([&] {
    if (error_ != nullptr) std::rethrow_exception(error_);
  });
  decide_at_last();
  return true;
}

void TokenCheck::decide_at_last() {
  decide();
  std::vector<uint64_t> all(hashes_.size() * static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(all.data(), hashes_.data(),
                              static_cast<int64_t>(hashes_.size() * sizeof(uint64_t)));
  for (size_t i = 0; i < hashes_.size(); ++i) {
    if (is_known_[i]) continue;
    hashes_[i] = 0;
    for (size_t k = i; k < all.size(); k += hashes_.size()) hashes_[i] += all[k];
  }
  is_decided_ = true;
  if (keeps_results_) write_results();
}

void TokenCheck::keep_results() {
  keeps_results_ = true;
  if (is_decided_) write_results();
}

void TokenCheck::read_pieces(double max_seconds) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (; !is_through() && !is_ending_; ++next_piece_) {
    if (std::chrono::duration<double>(Clock::now() - start).count() > max_seconds) return;
    if (options_.on_piece) options_.on_piece();
    read_piece(pieces_[next_piece_]);
  }
}

void TokenCheck::read_piece(const Piece& piece) {
  constexpr int64_t kBlock = 64 << 10;  // is in the cache when it is read again
  const TokenArray& file = files_[piece.file];
  dist::Hasher hasher;
  hasher.update(&piece.begin, sizeof(piece.begin));
  int64_t largest = -1;
  for (int64_t begin = piece.begin; begin < piece.end; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, piece.end);
    const std::string_view bytes = file.bytes(begin, end);
    hasher.update(bytes.data(), std::ssize(bytes));
    largest = std::max(largest, file.largest(begin, end));
  }
  file.check();
  num_read_ += piece.end - piece.begin;
  hashes_[piece.file] += hasher.digest();
  largest_[piece.file] = std::max(largest_[piece.file], largest);
  if (largest < options_.vocab_size || bad_file_ >= 0) return;
  bad_position_ = piece.begin;
  while (bad_position_ + 1 < piece.end && file[bad_position_] < options_.vocab_size) {
    ++bad_position_;  // the file may be cut meanwhile
  }
  bad_id_ = file[bad_position_];
  bad_file_ = static_cast<int64_t>(piece.file);
}

std::string TokenCheck::content(size_t begin, size_t end) const {
  if (begin == end) return "";
  return fmt::format("{:016x}",
                     dist::hash_of(hashes_.data() + begin,
                                   static_cast<int64_t>((end - begin) * sizeof(uint64_t))));
}

void TokenCheck::decide() {
  const auto ranks = static_cast<size_t>(world_.world_size());
  const std::vector<int64_t> mine = largest_;
  std::vector<int64_t> all(mine.size() * ranks);
  world_.control().all_gather(all.data(), mine.data(),
                              static_cast<int64_t>(mine.size() * sizeof(int64_t)));
  for (size_t i = 0; i < all.size(); ++i) {
    largest_[i % mine.size()] = std::max(largest_[i % mine.size()], all[i]);
  }
  // A result of an earlier run says that there is one, not where.
  for (size_t i = 0; i < files_.size() && bad_file_ < 0; ++i) {
    if (!is_known_[i] || largest_[i] < options_.vocab_size) continue;
    bad_file_ = static_cast<int64_t>(i);
    while (bad_position_ < files_[i].num_tokens() &&
           files_[i][bad_position_] < options_.vocab_size) {
      ++bad_position_;
    }
    bad_id_ = largest_[i];
  }
  const int64_t file = bad_file_ < 0 ? std::numeric_limits<int64_t>::max() : bad_file_;
  const int64_t first_file = world_.control().min(file);
  const int64_t position =
      bad_file_ == first_file ? bad_position_ : std::numeric_limits<int64_t>::max();
  const int64_t first_position = world_.control().min(position);
  world_.control().verdict([&] {
    if (bad_file_ < 0 || bad_file_ != first_file || bad_position_ != first_position) return;
    throw InputError(fmt::format("{}: token {} is {}, expected one below the vocabulary's size {}",
                                 files_[static_cast<size_t>(bad_file_)].name(), bad_position_,
                                 bad_id_, options_.vocab_size));
  });
}

/// Rank 0's: other nodes may see another file, or none.
void TokenCheck::read_results() {
  struct Result {
    std::string identity;
    int64_t largest;
    uint64_t hash;
  };
  std::map<std::string, Result> results;
  if (world_.rank() == 0 && !options_.results_path.empty()) {
    std::ifstream in(options_.results_path);
    std::string line;
    if (std::getline(in, line) && line == kResultsHeader) {
      while (std::getline(in, line)) {
        std::istringstream words(line);
        std::string nbytes, inode, modified, changed, path;
        int64_t largest = -1;
        uint64_t hash = 0;
        words >> largest >> std::hex >> hash >> nbytes >> inode >> modified >> changed;
        if (!words || words.get() != ' ') continue;
        std::getline(words, path);
        results[path] = {fmt::format("{} {} {} {}", nbytes, inode, modified, changed), largest,
                         hash};
      }
    }
  }
  for (size_t i = 0; i < files_.size(); ++i) {
    const auto found = results.find(files_[i].name());
    if (found == results.end() || found->second.identity != identity_of(files_[i].name())) continue;
    largest_[i] = found->second.largest;
    hashes_[i] = found->second.hash;
  }
  world_.control().broadcast(largest_.data(),
                             static_cast<int64_t>(largest_.size() * sizeof(int64_t)), 0);
  world_.control().broadcast(hashes_.data(),
                             static_cast<int64_t>(hashes_.size() * sizeof(uint64_t)), 0);
  for (size_t i = 0; i < files_.size(); ++i) is_known_[i] = largest_[i] >= 0;
}

void TokenCheck::write_results() const {
  if (world_.rank() != 0 || options_.results_path.empty()) return;
  std::string text = fmt::format("{}\n", kResultsHeader);
  for (size_t i = 0; i < files_.size(); ++i) {
    const auto identity = identity_of(files_[i].name());
    const bool is_one_line = files_[i].name().find('\n') == std::string::npos;
    if (identity && is_one_line && files_[i].num_tokens() > 0) {
      text +=
          fmt::format("{} {:016x} {} {}\n", largest_[i], hashes_[i], *identity, files_[i].name());
    }
  }
  try {
    write_file_atomically(options_.results_path, text);
  } catch (const IoError& error) {
    log_warning("{}; the tokens are read again by the next run", error.what());
  }
}

}  // namespace tessera::apps
