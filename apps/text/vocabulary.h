#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::text {

/// Tokens and their ids. Ids may have gaps; two tokens may share one.
class Vocabulary {
 public:
  void add(std::string_view token, int32_t id);
  void reserve(size_t num_tokens) { ids_.reserve(num_tokens); }
  /// The id, or -1.
  int32_t id_of(std::string_view token) const;
  /// The token; nullptr if no token has the id.
  const std::string* token(int32_t id) const;
  /// One more than the largest id.
  int64_t num_ids() const { return static_cast<int64_t>(tokens_.size()); }
  /// Different tokens.
  int64_t num_tokens() const { return static_cast<int64_t>(ids_.size()); }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const;
  };
  struct Equal {
    using is_transparent = void;
    bool operator()(std::string_view a, std::string_view b) const { return a == b; }
  };
  std::unordered_map<std::string, int32_t, Hash, Equal> ids_;
  std::vector<const std::string*> tokens_;  // the keys, which do not move
};

}  // namespace tessera::text
