#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

// [Note: Tuning]
// A library offers several ways to compute the same, and which is the fastest is found by timing
// them. They add in different orders, so a choice decides bits: all ranks must have the same, and a
// run that is to repeat another must have the other's. Nothing is timed inside of a step, where the
// ranks would have to wait for each other: what has no choice yet is computed as the library
// proposes it, which is the same on devices of one kind, and its key is kept as wanted. Between two
// steps one rank times what any rank wants (`measure_choices`), and all ranks are given its choices
// (dist/tuning.h). Keys and choices are lines of text, so that they can be sent, kept in a file and
// read.

namespace tessera {

/// Choices by key: "gemm ..." (kernels/matmul/cuda/tune.h) and "attention ..."
/// (kernels/attention/tune.h), of one rank.
class Tuning {
 public:
  using Choices = std::map<std::string, std::string>;
  /// No more keys than this are wanted: shapes that never repeat would be timed for ever.
  static constexpr size_t kMaxKeys = 512;

  /// `has_gemms`: products of cuBLASLt are tuned too; their bits are those of the choices then.
  explicit Tuning(bool has_gemms = true);
  Tuning(const Tuning&) = delete;
  Tuning& operator=(const Tuning&) = delete;

  /// While one lives, `tuning` is the current one of this thread.
  class Scope {
   public:
    explicit Scope(Tuning& tuning);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Tuning* previous_;
  };
  /// Null outside of any scope: then what libraries propose first is computed.
  static Tuning* current();

  /// The choice for `key`. Empty if there is none, and the key is wanted from now on.
  std::string find_or_want(const std::string& key);
  /// The choice for `key`, or empty.
  std::string find(const std::string& key) const;
  /// Keys without a choice that were asked for, in order.
  std::vector<std::string> wanted() const;
  /// Adds choices; one for a key that has one replaces it.
  void add(const Choices& choices);
  Choices choices() const;

  bool has_gemms() const { return has_gemms_; }
  uint64_t id() const { return id_; }  ///< of no other in this process
  /// Grows when choices are added.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  const bool has_gemms_;
  const uint64_t id_;
  std::atomic<uint64_t> version_{1};
  mutable std::mutex mutex_;
  Choices choices_;
  std::set<std::string> wanted_;
};

namespace kernels {

/// Times the ways to compute what `keys` describe, on the current stream, with memory of the current
/// allocator, and waits for them. The choice of the fastest for each, and for products that others
/// are made of; keys for which there is no memory are left to the library's first proposal.
/// Errors   InternalError for a key that nobody has made; CudaError if the device fails
Tuning::Choices measure_choices(const std::vector<std::string>& keys);

/// Whether the libraries that are there take `choice` for `key`, as far as that is known without
/// computing: lines of a file may be of other ones.
bool is_choice(const std::string& key, const std::string& choice);

/// What choices depend on beside their keys: the current device and the versions of the libraries, one
/// line.
std::string tuning_machine();

/// "name=value" fields of integers behind the first word of a key.
std::string key_text(const char* word, const std::map<std::string, int64_t>& fields);
/// Empty unless `key` is such a text that begins with `word`.
std::map<std::string, int64_t> key_fields(const char* word, const std::string& key);

}  // namespace kernels
}  // namespace tessera
