#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/runtime/allocator.h"

namespace tessera::dist {

/// What a rank keeps of a sharded model on its device, in bytes as its allocator counts them. All
/// of it is there from the end of the first step on and none of it grows with the depth of the
/// host's lead; activations, the optimizer's states and tables of segments come on top.
struct MemoryPlan {
  struct Entry {
    std::string what;  ///< "parameter shards", "ring of gathered slots, 2 x 1.0 MiB", ...
    MemoryClass memory_class;
    int64_t nbytes;
  };
  struct UnitBytes {
    std::string unit;
    int64_t parameters = 0;  ///< of the class kParameters on this rank
    int64_t gradients = 0;   ///< of kGradients
    int64_t gathered = 0;    ///< of its gathered parameters, while they are in a slot or for ever
  };
  std::vector<Entry> entries;    ///< of more than no bytes
  std::vector<UnitBytes> units;  ///< in the order of units

  int64_t nbytes_of(MemoryClass memory_class) const;
  /// A line an entry.
  std::string to_string() const;
};

}  // namespace tessera::dist
