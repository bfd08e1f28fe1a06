#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/runtime/stream.h"

namespace tessera {

/// Happens-before checker: vector clocks over the streams and events of one rank, and for each byte
/// range the last writer and the last reader of every stream. A task that touches bytes whose last
/// conflicting access no event orders before it is reported with both names and streams. It runs
/// on the host at submission, so that it finds a missing wait whatever the timing was. Where the
/// host itself waits for a stream or an event, all later tasks come after. Thread-safe.
class OrderCheck final : public StreamObserver {
 public:
  OrderCheck();
  ~OrderCheck() override;

  void on_task(const Stream& stream, const char* name, const Cost& cost) override;
  void on_record(const Stream& stream, const Event& event) override;
  void on_wait(const Stream& stream, const Event& event) override;
  void on_host_wait(const Stream& stream) override;
  void on_host_wait(const Event& event) override;

  /// Forgets all accesses to a range: a slot was acquired, or memory changed hands while idle.
  void clear(const void* data, int64_t nbytes);

  /// The conflicts so far, one line each: "reduce block3 (reduce_scatter) writes [..] after
  /// matmul_dw (compute) reads it: no event orders them". At most 100 are kept.
  std::vector<std::string> conflicts() const;
  /// InternalError with the first conflicts if there are any.
  void throw_if_conflicts() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
