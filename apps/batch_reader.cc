#include "apps/batch_reader.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace tessera::apps {

BatchReader::BatchReader(const Samples& samples, const RankRows& rows, int64_t num_ahead,
                         int64_t delay_ms)
    : samples_(samples), rows_(rows), num_ahead_(num_ahead), delay_ms_(delay_ms) {}

std::vector<Batch> BatchReader::read(int64_t first) const {
  std::vector<Batch> batches;
  for (int64_t pass = 0; pass < rows_.num_passes; ++pass) {
    if (delay_ms_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms_));
    const int64_t offset = (pass * rows_.world_size + rows_.rank) * rows_.micro_batch;
    batches.push_back(samples_.batch(first + offset, rows_.micro_batch));
  }
  return batches;
}

std::vector<Batch> BatchReader::take(int64_t first, int64_t num_more) {
  if (num_ahead_ == 0) return read(first);
  while (!ahead_.empty() && ahead_.front().first != first) ahead_.pop_front();
  const int64_t last = first + std::min(num_ahead_, num_more) * rows_.samples_per_step();
  int64_t next = ahead_.empty() ? first : ahead_.back().first + rows_.samples_per_step();
  for (; next <= last; next += rows_.samples_per_step()) {
    ahead_.push_back({next, std::async(std::launch::async, [this, next] { return read(next); })});
  }
  std::future<std::vector<Batch>> mine = std::move(ahead_.front().batches);
  ahead_.pop_front();
  return mine.get();
}

}  // namespace tessera::apps
