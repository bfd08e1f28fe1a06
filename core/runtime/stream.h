#pragma once

#include <memory>
#include <string>

#include "core/runtime/cost.h"
#include "core/runtime/device.h"
#include "core/runtime/task.h"

// The device seam. Contract, the same on every device:
//  1. `submit`, `record` and `wait` never block the host.
//  2. One stream runs its tasks in submission order.
//  3. An Event is an immutable point returned by `record()`; waiting on a default one is a no-op.
//  4. Memory belongs to the stream it was allocated on. Whoever uses it on another stream holds it
//     until the owner has waited on the user's event (there is no `record_stream`).
//  5. One communicator, one stream; all ranks issue the same collectives in the same order, from
//     one host thread a rank, in program order.
//  6. A task's exception poisons its stream: later tasks are skipped, later events carry it, and
//     it is rethrown at every `synchronize()`.
//  7. The host reads results only after the event that covers them.

struct CUstream_st;

namespace tessera {

class Event;
class Stream;

/// Sees what the host submits and waits for, in program order. Calls may come from any thread (a
/// worker that drops the last reference to memory submits too); implementations lock.
class StreamObserver {
 public:
  virtual ~StreamObserver() = default;
  /// A task was submitted, with what it reads and writes.
  virtual void on_task(const Stream& stream, const char* name, const Cost& cost) = 0;
  /// `Stream::record` gave `event`.
  virtual void on_record(const Stream& stream, const Event& event) = 0;
  /// What is submitted to `stream` from now on comes after `event`.
  virtual void on_wait(const Stream& stream, const Event& event) = 0;
  /// The host has waited: whatever is submitted from now on, to any stream, comes after.
  virtual void on_host_wait(const Stream& stream) = 0;
  /// The same of an event.
  virtual void on_host_wait(const Event& event) = 0;
};

/// An event of a device; the last owner may be any thread.
class EventImpl {
 public:
  virtual ~EventImpl() = default;
  virtual bool is_done() const = 0;
  virtual void synchronize() const = 0;  // rethrows what poisoned the stream before the event

  std::shared_ptr<StreamObserver> observer;  // of the stream that recorded it
};

/// A point in a stream. A value; default constructed it is already complete.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<EventImpl> impl) : impl_(std::move(impl)) {}

  bool is_done() const { return impl_ == nullptr || impl_->is_done(); }
  /// Blocks the host; rethrows an exception of the stream.
  void synchronize() const {
    if (impl_ == nullptr) return;
    impl_->synchronize();
    if (impl_->observer != nullptr) impl_->observer->on_host_wait(*this);
  }
  EventImpl* impl() const { return impl_.get(); }
  const std::shared_ptr<EventImpl>& shared_impl() const { return impl_; }

 private:
  std::shared_ptr<EventImpl> impl_;
};

/// A queue of a device, which a Stream refers to.
class StreamImpl {
 public:
  StreamImpl(Device device, std::string name);
  virtual ~StreamImpl() = default;
  /// As `Stream::submit`.
  virtual void submit(const char* name, Task task) = 0;
  /// As `Stream::fill_bytes`.
  virtual void fill_bytes(const char* name, void* data, unsigned char value, size_t nbytes) = 0;
  /// As `Stream::copy_bytes`.
  virtual void copy_bytes(const char* name, void* dst, const void* src, size_t nbytes) = 0;
  virtual Event record() = 0;
  /// As `Stream::wait`.
  virtual void wait(const Event& event) = 0;
  virtual void synchronize() = 0;
  virtual void drain() noexcept = 0;
  virtual CUstream_st* cuda() const { return nullptr; }

  const Device device;
  const std::string name;
  const int id;                              // unique in the process, counted from 0
  std::shared_ptr<StreamObserver> observer;  // set before the first task
};

/// A FIFO queue of work on one device. A value that refers to a queue; the last reference drains
/// it.
class Stream {
 public:
  Stream() = default;
  explicit Stream(std::shared_ptr<StreamImpl> impl) : impl_(std::move(impl)) {}

  explicit operator bool() const { return impl_ != nullptr; }
  Device device() const { return impl_->device; }
  const std::string& name() const { return impl_->name; }
  int id() const { return impl_->id; }
  CUstream_st* cuda() const { return impl_->cuda(); }

  /// Runs `task` after everything submitted before. `name` must outlive the stream (a literal).
  void submit(const char* name, Task task) const { impl_->submit(name, std::move(task)); }
  /// Declares what the next submitted task reads and writes; nothing unless someone observes.
  void declare(const char* name, const Cost& cost) const {
    if (impl_->observer != nullptr) impl_->observer->on_task(*this, name, cost);
  }
  bool is_observed() const { return impl_->observer != nullptr; }
  /// Sets `nbytes` bytes to `value` as a task of its own.
  void fill_bytes(const char* name, void* data, unsigned char value, size_t nbytes) const {
    declare(name, Cost().write(data, static_cast<int64_t>(nbytes)));
    impl_->fill_bytes(name, data, value, nbytes);
  }
  /// Copies between device memory and host memory of `Context::host_allocator` (or
  /// core/runtime/staging.h) in any direction, as a task of its own; the ranges do not overlap.
  void copy_bytes(const char* name, void* dst, const void* src, size_t nbytes) const {
    const auto count = static_cast<int64_t>(nbytes);
    declare(name, Cost().read(src, count).write(dst, count));
    impl_->copy_bytes(name, dst, src, nbytes);
  }
  Event record() const {
    Event event = impl_->record();
    if (impl_->observer != nullptr) {
      event.impl()->observer = impl_->observer;
      impl_->observer->on_record(*this, event);
    }
    return event;
  }
  /// Later tasks of this stream come after `event`; the host does not wait.
  void wait(const Event& event) const {
    if (event.impl() == nullptr) return;
    if (impl_->observer != nullptr) impl_->observer->on_wait(*this, event);
    impl_->wait(event);
  }
  /// Blocks the host until all tasks have run; rethrows what poisoned the stream.
  void synchronize() const {
    impl_->synchronize();
    if (impl_->observer != nullptr) impl_->observer->on_host_wait(*this);
  }
  /// Blocks the host until all tasks have run or been skipped; for destructors.
  void drain() const noexcept {
    impl_->drain();
    if (impl_->observer != nullptr) impl_->observer->on_host_wait(*this);
  }

  friend bool operator==(const Stream& a, const Stream& b) { return a.impl_ == b.impl_; }
  StreamImpl* impl() const { return impl_.get(); }

 private:
  std::shared_ptr<StreamImpl> impl_;
};

/// How a stream works.
struct StreamOptions {
  int num_threads = 1;  ///< CPU: OpenMP threads of the worker; only the compute stream has more
  int spin_us = 0;      ///< CPU: how long an idle worker spins before it sleeps, microseconds
  bool high_priority = false;  ///< CUDA: stream priority
  std::shared_ptr<StreamObserver> observer = nullptr;
};

/// A new stream on `device`. UnimplementedError if the build lacks the device, CudaError if it does
/// not answer.
Stream make_stream(Device device, std::string name, const StreamOptions& options = {});

/// The stream on which tensor operations of this thread run: that of the innermost StreamGuard,
/// else the compute stream of the thread's Context.
const Stream& current_stream();

/// Makes `stream` the current one of this thread for a scope.
class StreamGuard {
 public:
  explicit StreamGuard(Stream stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  Stream stream_;
  const Stream* previous_;
};

}  // namespace tessera
