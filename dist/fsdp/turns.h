#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::dist {

/// One call of a unit in the forward of a pass, or its turn that this rank skipped.
struct Call {
  int unit;
  int64_t begin, end;  // ticks: the call's interval, for nested units
  bool is_skipped, is_over;
  int64_t region = 0;        // of recompute, in which it was made
  bool is_replayed = false;  // made again by it
};

/// The order in which a forward calls units: that of registration, until all ranks have agreed on
/// what the first step called.
class Turns {
 public:
  explicit Turns(int num_units);

  int size() const { return static_cast<int>(turns_.size()); }
  int unit_at(int position) const { return turns_[static_cast<size_t>(position)].unit; }
  /// Calls in a row (a unit with two modules); 0: not known yet.
  int num_calls_at(int position) const { return turns_[static_cast<size_t>(position)].num_calls; }
  /// The first position of `unit` from `begin` on; `size()` if there is none.
  int find(int unit, int begin) const;
  bool is_known() const { return is_known_; }

  /// What ranks compare: the turns of a step as issued (the same on all ranks, or they have called
  /// units in different orders) and without those that this rank skipped.
  struct Hashes {
    uint64_t issued, called;
  };
  static Hashes hashes_of(std::span<const Call> calls);
  /// Takes the order of the first step. Where all ranks called the same, turns that none of them
  /// took fall out, and units that nobody called keep a turn behind their predecessor; else the
  /// turns stay as they were issued.
  void learn(std::span<const Call> calls, bool all_called_the_same);

 private:
  struct Turn {
    int unit;
    int num_calls;
  };
  static std::vector<Turn> turns_of(std::span<const Call> calls, bool with_skipped);

  int num_units_;
  std::vector<Turn> turns_;
  bool is_known_ = false;
};

}  // namespace tessera::dist
