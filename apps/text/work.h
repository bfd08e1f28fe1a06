#pragma once

#include <cstdint>

namespace tessera::text {

/// Steps that this thread has done where time could grow faster than the text: rank look-ups of long
/// words, characters normalized or looked at by pieces, nodes of added tokens, pieces that WordPiece
/// has sought, matches of expressions. Tests show by it that time is linear.
inline int64_t& counted_work() {
  static thread_local int64_t work = 0;
  return work;
}

}  // namespace tessera::text
