#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::dist {

class Control;

// [Note: Clocks of ranks]
// A message arrives after it was sent. So if rank r reads its clock at `received` when it has a message
// of rank 0, which read its own at `sent`, then r's clock is ahead of rank 0's by at most
// received - sent; and a message the other way says by how much at least. Over many exchanges the
// tightest bounds meet to within the shortest way there and back; the middle is wrong by no more than
// half of what is left between them. Ranks of one machine read one clock, and need none of this.

/// How far this rank's steady clock is ahead of that of rank 0, and what that may be wrong by.
struct ClockOffset {
  int64_t offset_ns = 0, error_ns = 0;
};

/// What two ranks have read in one exchange in which each has sent to the other.
struct ClockExchange {
  int64_t sent_ns, received_ns;              ///< by this rank's clock
  int64_t other_sent_ns, other_received_ns;  ///< by the other's
};
/// From exchanges with the rank whose clock counts; at least one.
ClockOffset clock_offset(std::span<const ClockExchange> exchanges);

/// Collective. Blocks for about a third of a millisecond a rank where machines differ.
ClockOffset measure_clock(Control& control);

}  // namespace tessera::dist
