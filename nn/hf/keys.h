#pragma once

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/elementwise/elementwise.h"

// The keys of a config.json of transformers, read strictly: what nobody has read, is switched on and
// changes what the model computes is an error.

namespace tessera::nn {

class HfKeys {
 public:
  using Names = std::set<std::string, std::less<>>;

  /// Messages begin with `path`; `object` outlives this.
  HfKeys(std::string path, const nlohmann::json& object)
      : path_(std::move(path)), object_(object) {}

  /// InputError with the value of `key` and what was expected.
  [[noreturn]] void fail(std::string_view key, std::string_view expected) const;
  /// It is there and not null.
  bool has(std::string_view key) const;
  /// It says that there is none.
  bool is_null(std::string_view key) const;

  /// An integer in [smallest, max]: the first of `keys` that is there, null being absent; `fallback` < 0:
  /// one must be there.
  int64_t count(std::initializer_list<std::string_view> keys, int64_t fallback = -1,
                int64_t max = (int64_t{1} << 31) - 1, int64_t smallest = 1);
  /// The same of heads, whose rows are listed one by one: at most 2^16.
  int64_t num_heads(std::initializer_list<std::string_view> keys) {
    return count(keys, -1, 1 << 16);
  }
  /// Positive, at most 1e18; without a fallback it must be there.
  double number(std::string_view key, std::optional<double> fallback = std::nullopt);
  bool flag(std::string_view key, bool fallback);
  std::string text(std::string_view key, const std::string& fallback);
  /// Empty if it is absent.
  nlohmann::json array(std::string_view key);
  /// Null if it is absent.
  const nlohmann::json* object(std::string_view key);
  /// One id or several; -1, with which some files say "none", is none.
  std::vector<int64_t> token_ids(std::string_view key) const;
  /// gelu_new, gelu_pytorch_tanh, gelu_fast or gelu.
  Gelu gelu(std::string_view key, const std::string& fallback);
  /// A name in `position_embedding_type` for what the model has anyway; InputError for another.
  void check_positions(const Names& own);

  /// InputError unless the key is absent or has this value.
  void require(std::string_view key, const nlohmann::json& value);
  void ignore(std::string_view key) { read_.emplace(key); }

  /// InputError for a key that nobody has read, that is switched on and with which the model
  /// computes something else; the names of those of which nothing is known.
  std::vector<std::string> check_all_read(std::string_view architecture,
                                          const Names& ignored) const;
  /// InputError for any key that nobody has read and that is switched on.
  void check_nothing_else(std::string_view where) const;

  const std::string& path() const { return path_; }

 private:
  [[noreturn]] void fail_key(const std::string& key, std::string_view where) const;

  std::string path_;
  const nlohmann::json& object_;
  Names read_;
};

/// The shortest decimal that is this f32, as people wrote it.
double shortest_decimal(float value);

}  // namespace tessera::nn
