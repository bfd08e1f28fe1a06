#pragma once

#include "core/runtime/stream.h"

namespace tessera::dist {

/// Waits of one stream for an event of another, each at a named place. A test hides one place at a
/// time from the happens-before checker, which then has to report something: none of them is for
/// nothing.
template <class Point>
struct Waits {
  Point hidden = Point::kNone;

  /// `stream` waits for `event`.
  void operator()(const Stream& stream, const Event& event, Point point) const {
    if (point == hidden && event.impl() != nullptr) [[unlikely]] {
      stream.impl()->wait(event);
    } else {
      stream.wait(event);
    }
  }
};

/// The places where one stream waits for another.
enum class WaitPoint : unsigned char {
  kNone,
  kFullReady,       ///< all_gather, before a state is gathered whole: the shard was computed
  kFullGathered,    ///< compute, before it reads that state
  kSlotFree,        ///< all_gather: the slot's last unit was computed with
  kShardsReady,     ///< all_gather: the optimizer has written the shards
  kPartSaved,       ///< all_gather: the part kept after forward was copied
  kGathered,        ///< compute: the parameters are there
  kGradSlotFree,    ///< compute: the gradient slot's last unit was reduced
  kWholeGradFree,   ///< compute: the unit's whole gradient was reduced before (kLast)
  kGradReady,       ///< the reducing stream: the gradients are complete
  kOuterReady,      ///< all_reduce: the shard group's sum is complete
  kPartialFree,     ///< reduce_scatter: the buffer between the two sums was read
  kPartialReady,    ///< all_reduce: that buffer was written
  kGradShardReady,  ///< compute: the gradient shard is complete
  kCount
};

}  // namespace tessera::dist
