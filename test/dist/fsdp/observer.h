#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/runtime/stream.h"
#include "dist/fsdp/parts.h"

// Watches and disturbs the streams of a rank under FSDP.

namespace tessera::testing {

/// One submitted task.
struct TaskRecord {
  std::string stream, name;
  int64_t bytes_read, bytes_written;
};

/// Takes the place of the observer of a rank's streams (the happens-before checker), which it goes
/// on telling everything.
class StreamTap final : public StreamObserver {
 public:
  struct Options {
    bool records = false;          ///< keep a record of each task
    bool serializes = false;       ///< a task starts when the tasks of all other streams are over
    double delayed_share = 0;      ///< of the tasks ...
    int max_delay_us = 0;          ///< ... that start up to this much late
    std::string only_stream = {};  ///< delays are on this stream alone
    uint64_t seed = 0;
  };

  /// Puts a tap on all streams of `fsdp`.
  static std::shared_ptr<StreamTap> install(dist::Fsdp& fsdp, const Options& options) {
    dist::Lanes& lanes = parts_of(fsdp).lanes;
    auto tap = std::make_shared<StreamTap>(options);
    std::vector<Stream> streams = {lanes.compute, lanes.all_gather, lanes.reduce_scatter,
                                   lanes.all_reduce};
    if (lanes.offloader != nullptr) {
      streams.insert(streams.end(), {lanes.offloader->h2d(), lanes.offloader->d2h()});
    }
    for (const Stream& s : streams) {
      s.drain();
      if (std::find(tap->streams_.begin(), tap->streams_.end(), s.impl()) != tap->streams_.end()) {
        continue;  // one communicator: one stream does both
      }
      tap->streams_.push_back(s.impl());
      tap->next_ = s.impl()->observer;
    }
    for (StreamImpl* s : tap->streams_) s->observer = tap;
    return tap;
  }

  explicit StreamTap(const Options& options)
      : options_(options), host_(std::this_thread::get_id()), random_(options.seed) {}

  void on_task(const Stream& stream, const char* name, const Cost& cost) override {
    int delay_us = 0;
    {
      const std::lock_guard lock(mutex_);
      if (options_.records) {
        records_.push_back({stream.name(), name, cost.bytes_read(), cost.bytes_written()});
      }
      const bool may_delay = options_.only_stream.empty() || options_.only_stream == stream.name();
      if (options_.max_delay_us > 0 && may_delay &&
          std::uniform_real_distribution<>(0, 1)(random_) < options_.delayed_share) {
        delay_us = std::uniform_int_distribution<int>(0, options_.max_delay_us)(random_);
      }
    }
    if (options_.serializes && std::this_thread::get_id() == host_) {
      for (StreamImpl* s : streams_) {
        if (s != stream.impl()) s->synchronize();
      }
    }
    if (delay_us > 0) {
      stream.impl()->submit("delay", [delay_us] {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      });
    }
    if (next_ != nullptr) next_->on_task(stream, name, cost);
  }
  void on_record(const Stream& stream, const Event& event) override {
    if (next_ != nullptr) next_->on_record(stream, event);
  }
  void on_wait(const Stream& stream, const Event& event) override {
    if (next_ != nullptr) next_->on_wait(stream, event);
  }
  void on_host_wait(const Stream& stream) override {
    if (next_ != nullptr) next_->on_host_wait(stream);
  }
  void on_host_wait(const Event& event) override {
    if (next_ != nullptr) next_->on_host_wait(event);
  }

  /// The records so far, which are forgotten.
  std::vector<TaskRecord> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(records_, {});
  }

 private:
  const Options options_;
  const std::thread::id host_;
  std::shared_ptr<StreamObserver> next_;
  std::vector<StreamImpl*> streams_;
  std::mutex mutex_;
  std::mt19937_64 random_;
  std::vector<TaskRecord> records_;
};

}  // namespace tessera::testing
