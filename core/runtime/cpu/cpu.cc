#include "core/runtime/cpu/cpu.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/log.h"
#include "core/profiler.h"
#include "core/runtime/cpu/parallel.h"
#include "core/runtime/unwinding.h"

namespace tessera {
namespace {

class CpuEvent final : public EventImpl {
 public:
  bool is_done() const override { return done_.load(std::memory_order_acquire); }

  void synchronize() const override {
    wait();
    if (error_) std::rethrow_exception(error_);
  }

  /// Blocks until the event is done; the error of its stream, if any.
  std::exception_ptr wait() const {
    if (!is_done()) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return is_done(); });
    }
    return error_;
  }

  void finish(std::exception_ptr error) {
    {
      std::lock_guard lock(mutex_);
      error_ = std::move(error);
      done_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
};

/// A growing ring of queue items: no allocation once it has its largest size.
template <class T>
class RingQueue {
 public:
  bool empty() const { return count_ == 0; }
  void push(T item) {
    if (count_ == items_.size()) grow();
    items_[(head_ + count_++) % items_.size()] = std::move(item);
  }
  T pop() {
    T item = std::move(items_[head_]);
    head_ = (head_ + 1) % items_.size();
    --count_;
    return item;
  }

 private:
  void grow() {
    std::vector<T> larger(std::max<size_t>(64, items_.size() * 2));
    const size_t count = count_;
    for (size_t i = 0; i < count; ++i) larger[i] = pop();
    items_ = std::move(larger);
    head_ = 0;
    count_ = count;
  }

  std::vector<T> items_;
  size_t head_ = 0, count_ = 0;
};

struct Item {
  const char* name = nullptr;
  Task task;                        // or, empty:
  std::shared_ptr<CpuEvent> event;  // to finish; both empty: the end
  int32_t label = 0;                // of the profiler
};

/// The queue and its thread's loop. Shared by the stream and the thread, which may outlive the
/// stream: a task's captures can hold the stream's last reference.
class Worker {
 public:
  Worker(const StreamImpl& stream, const StreamOptions& options)
      : stream_id_(stream.id),
        num_threads_(options.num_threads),
        spin_us_(options.spin_us),
        thread_name_(stream.name.substr(0, 15)) {}

  void push(Item item) {
    bool wake;
    {
      std::lock_guard lock(mutex_);
      queue_.push(std::move(item));
      pending_.store(true, std::memory_order_release);
      wake = sleeping_;
    }
    if (wake) changed_.notify_one();
  }

  void run() {
    cpu::set_num_threads(num_threads_);
    pthread_setname_np(pthread_self(), thread_name_.c_str());
    while (run_next()) {
    }
  }

  /// Runs or skips the next item, waiting for one; false at the end. On the worker's thread only.
  bool run_next() {
    Item item = pop();
    if (item.event != nullptr) {
      item.event->finish(error_);
      return true;
    }
    if (!item.task) return false;
    if (error_ != nullptr) return true;
    const bool traced = profiler::is_on();
    const int64_t begin = traced ? profiler::now_ns() : 0;
    try {
      item.task();
    } catch (...) {
      error_ = std::current_exception();
    }
    if (traced) {
      profiler::add({item.name, stream_id_, begin, profiler::now_ns(), "", item.label});
    }
    return true;
  }

 private:
  Item pop() {
    if (spin_us_ > 0 && !pending_.load(std::memory_order_acquire)) {
      const int64_t end = profiler::now_ns() + int64_t{1000} * spin_us_;
      while (!pending_.load(std::memory_order_acquire) && profiler::now_ns() < end) {
        for (int i = 0; i < 16; ++i) __builtin_ia32_pause();
      }
    }
    std::unique_lock lock(mutex_);
    sleeping_ = true;
    changed_.wait(lock, [this] { return !queue_.empty(); });
    sleeping_ = false;
    Item item = queue_.pop();
    pending_.store(!queue_.empty(), std::memory_order_relaxed);
    return item;
  }

  const int stream_id_, num_threads_, spin_us_;
  const std::string thread_name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  RingQueue<Item> queue_;
  std::atomic<bool> pending_{false};
  bool sleeping_ = false;
  std::exception_ptr error_;  // the worker's own
};

class CpuStream final : public StreamImpl {
 public:
  CpuStream(std::string stream_name, const StreamOptions& options)
      : StreamImpl({}, std::move(stream_name)), worker_(std::make_shared<Worker>(*this, options)) {
    observer = options.observer;
    profiler::name_stream(id, name);
    thread_ = std::thread([worker = worker_] { worker->run(); });
  }

  ~CpuStream() override {
    if (!is_on_worker()) wait_while_unwinding(*this, num_exceptions_);
    worker_->push({});
    is_on_worker() ? thread_.detach() : thread_.join();
  }

  void submit(const char* task_name, Task task) override {
    const int32_t label = profiler::is_on() ? profiler::current_label() : 0;
    worker_->push({task_name, std::move(task), nullptr, label});
  }

  void fill_bytes(const char* task_name, void* data, unsigned char value, size_t nbytes) override {
    submit(task_name, [=] { std::memset(data, value, nbytes); });
  }

  void copy_bytes(const char* task_name, void* dst, const void* src, size_t nbytes) override {
    submit(task_name, [=] { std::memcpy(dst, src, nbytes); });
  }

  Event record() override { return Event(push_event()); }

  void wait(const Event& event) override {
    auto target = std::dynamic_pointer_cast<CpuEvent>(event.shared_impl());
    TESSERA_CHECK(target != nullptr, "Stream::wait: the event is of another device than cpu");
    if (target->is_done() && target->wait() == nullptr) return;
    submit("wait", [target = std::move(target)] {
      if (std::exception_ptr error = target->wait()) std::rethrow_exception(error);
    });
  }

  void synchronize() override {
    if (std::exception_ptr error = run_or_wait()) std::rethrow_exception(error);
  }

  void drain() noexcept override {
    if (!is_on_worker()) wait_while_unwinding(*this, num_exceptions_);
    try {
      run_or_wait();
    } catch (...) {  // only out of memory for the event; nothing left to wait with
      log_error("stream {}: could not drain", name);
    }
  }

 private:
  bool is_on_worker() const { return thread_.get_id() == std::this_thread::get_id(); }

  std::shared_ptr<CpuEvent> push_event() {
    auto event = std::make_shared<CpuEvent>();
    worker_->push({nullptr, {}, event, 0});
    return event;
  }

  /// Returns when everything submitted so far has run; the stream's error. A task that drops the
  /// last reference to an allocator gets here on the worker itself, which then goes on by itself.
  std::exception_ptr run_or_wait() {
    const std::shared_ptr<CpuEvent> event = push_event();
    while (is_on_worker() && !event->is_done()) worker_->run_next();
    return event->wait();
  }

  const int num_exceptions_ = std::uncaught_exceptions();
  const std::shared_ptr<Worker> worker_;
  std::thread thread_;
};

}  // namespace

Stream make_cpu_stream(std::string name, const StreamOptions& options) {
  return Stream(std::make_shared<CpuStream>(std::move(name), options));
}

}  // namespace tessera
