#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "apps/text/table_memory.h"

namespace tessera::text {

/// Tokens and their ids. Ids may have gaps; two tokens may share one.
class Vocabulary {
 public:
  /// A token that is not there yet.
  void add(std::string_view token, int32_t id);
  void reserve(size_t num_tokens);
  /// The id, or -1.
  int32_t id_of(std::string_view token) const;
  /// The token; nullptr if no token has the id.
  const std::string* token(int32_t id) const;
  /// One more than the largest id.
  int64_t num_ids() const { return static_cast<int64_t>(tokens_.size()); }
  /// Different tokens.
  int64_t num_tokens() const { return static_cast<int64_t>(entries_.size()); }

 private:
  struct Entry {
    std::string token;
    int32_t id;
  };
  size_t slot_of(std::string_view token, uint64_t hash) const;

  std::deque<Entry> entries_;    // which do not move
  TableMemory<uint64_t> slots_;  // high bits of the hash and the entry's number + 1; 0: empty
  std::vector<const std::string*> tokens_;  // by id
};

}  // namespace tessera::text
