#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/runtime/stream.h"

// What a training step moves through the memory of its device, counted from what each task says
// that it reads and writes, beside the least that a step with the same fused operations could move.

namespace tessera::apps {

/// Counts tasks and bytes of the streams that it observes, by the names of tasks. A task's bytes
/// are those of the ranges that it reads, counted once where they overlap, and of those that it
/// writes. Where a range is wider than what is touched of it, it is known here:
///   a table that rows are taken from, or gradients of rows are added to: the rows;
///   gradients of logits in bf16 and f16 that lie at the beginnings of f32 rows: half of the range.
class TrafficCounter final : public StreamObserver {
 public:
  struct Traffic {
    int64_t num_tasks = 0, nbytes = 0;
  };

  /// `element_nbytes`: of an activation.
  explicit TrafficCounter(int64_t element_nbytes) : element_nbytes_(element_nbytes) {}

  void on_task(const Stream& stream, const char* name, const Cost& cost) override;
  void on_record(const Stream&, const Event&) override {}
  void on_wait(const Stream&, const Event&) override {}
  void on_host_wait(const Stream&) override { count_host_wait(); }
  void on_host_wait(const Event&) override { count_host_wait(); }

  std::map<std::string, Traffic> by_task() const;
  Traffic total() const;
  /// How often the host has waited for a stream or an event.
  int64_t num_host_waits() const;
  void reset();

 private:
  void count_host_wait();
  int64_t nbytes_of(const std::string& name, const Cost& cost);

  const int64_t element_nbytes_;
  mutable std::mutex mutex_;
  std::map<std::string, Traffic> by_task_;
  int64_t num_host_waits_ = 0;
  const void* logits_ = nullptr;  // that became gradients last
};

/// A step of a GPT-2 with tied embeddings on one rank.
struct Gpt2Step {
  int64_t batch, time, layers, heads, width, vocab;
  int64_t element_nbytes;  ///< 4, or 2 with f32 masters and gradients
  int64_t num_parameters() const;
};

/// One kind of operation of the minimum, over all layers.
struct MinimumPart {
  const char* name;
  int64_t nbytes;
};

/// The least bytes of a step, by hand: each fused operation reads its operands once and writes its
/// results once. See the table in README.md.
std::vector<MinimumPart> minimum_traffic(const Gpt2Step& step);

}  // namespace tessera::apps
