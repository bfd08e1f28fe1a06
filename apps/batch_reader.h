#pragma once

#include <cstdint>
#include <deque>
#include <future>
#include <vector>

#include "apps/data.h"

namespace tessera::apps {

/// What a rank reads of a step: of each pass the rows of its place among the ranks.
struct RankRows {
  int64_t micro_batch = 1, num_passes = 1, world_size = 1, rank = 0;
  int64_t samples_per_step() const { return micro_batch * num_passes * world_size; }
};

/// The batches of a rank, one step after the other. With `num_ahead` > 0 as many steps after the one
/// that is asked for are read by threads meanwhile, a thread each, so that storage that answers late
/// is asked for several at once. What is read does not depend on it.
class BatchReader {
 public:
  /// `samples` outlives this. `delay_ms`: a fault to inject, what each pass takes longer.
  BatchReader(const Samples& samples, const RankRows& rows, int64_t num_ahead, int64_t delay_ms);

  /// The batches of the passes of the step that begins with global sample `first`; at most `num_more`
  /// steps come after it. Waits for them. InputError as `Samples::batch`.
  std::vector<Batch> take(int64_t first, int64_t num_more);

 private:
  struct Ahead {
    int64_t first;
    std::future<std::vector<Batch>> batches;
  };
  std::vector<Batch> read(int64_t first) const;

  const Samples& samples_;
  const RankRows rows_;
  const int64_t num_ahead_, delay_ms_;
  std::deque<Ahead> ahead_;
};

}  // namespace tessera::apps
