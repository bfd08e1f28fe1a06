#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "apps/data.h"
#include "dist/comm/world.h"

namespace tessera::apps {

/// What tells that a file is the one that was read: size, inode, and the times of its last change.
/// Who writes into a file can give it any time of modification, but the inode has the time of that.
/// None if there is no such file.
std::optional<std::string> identity_of(const std::string& path);

/// Every token of the files is read once at the start of a run, so that an id which the vocabulary
/// lacks ends it there and not in the middle, and a resume can tell that the data is what it was to
/// the last token. The ranks share the work out in pieces; what is not through after `max_seconds`
/// goes on in a thread beside the first steps.
/// Largest id and hash of each file are kept in `results_path` with what tells that it is the same:
/// size, inode, and the times of its last change, of which nobody can set that of the inode. A file
/// that has not changed since is not read again.
class TokenCheck {
 public:
  struct Options {
    int64_t vocab_size = 0;
    std::string results_path;  ///< "": nothing is kept
    double max_seconds = 20;
    int64_t piece_numel = 32 << 20;            ///< tokens that a rank reads at a time
    std::function<void()> on_piece = nullptr;  ///< called before each; a slow disk, in tests
  };

  /// `files` are whole shards (Data::files). Collective.
  /// Errors   InputError, the same on all ranks, with the file and the position in it
  TokenCheck(std::vector<TokenArray> files, Options options, dist::World& world);
  /// Ends the thread, wherever it is.
  ~TokenCheck();
  TokenCheck(const TokenCheck&) = delete;
  TokenCheck& operator=(const TokenCheck&) = delete;

  /// Waits until every token was read, or `is_to_end` says on any rank that it is not to be waited
  /// for: then false, and the reading goes on. Nothing the second time. Collective.
  /// Errors   as above
  bool finish(const std::function<bool()>& is_to_end);
  /// From now on what it has found is kept in `results_path`, which belongs to the run.
  void keep_results();
  /// All is read.
  bool is_decided() const { return is_decided_; }
  /// Once it is decided: what tells files [begin, end) from any others, in a few characters; empty
  /// without one.
  std::string content(size_t begin, size_t end) const;
  int64_t num_read() const { return num_read_; }  ///< tokens, by this rank

 private:
  struct Piece {
    size_t file;
    int64_t begin, end;
  };
  /// This rank's pieces from the next one on, for at most `max_seconds`.
  void read_pieces(double max_seconds);
  bool is_through() const { return next_piece_ == pieces_.size(); }
  void read_piece(const Piece& piece);
  /// The verdict of all ranks on what they have read.
  void decide();
  void decide_at_last();
  void read_results();
  void write_results() const;

  const std::vector<TokenArray> files_;
  const Options options_;
  dist::World& world_;
  std::vector<int64_t> largest_;  // of each file, as far as it was read here
  std::vector<uint64_t> hashes_;  // of each file: the sum of those of its pieces
  std::vector<bool> is_known_;    // from an earlier run
  std::vector<Piece> pieces_;     // of this rank
  size_t next_piece_ = 0;
  int64_t num_read_ = 0;
  int64_t bad_file_ = -1, bad_position_ = 0, bad_id_ = 0;  // the first that this rank has found
  bool is_decided_ = false, keeps_results_ = false;
  std::atomic<bool> is_ending_ = false, has_ended_ = false;  // of the thread
  std::exception_ptr error_;  // of the thread: a file that cannot be read any more
  std::thread thread_;
};

}  // namespace tessera::apps
