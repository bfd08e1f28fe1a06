#include "core/runtime/cpu.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "core/log.h"
#include "core/profiler.h"

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

class CpuStream final : public StreamImpl {
 public:
  CpuStream(std::string stream_name, const StreamOptions& options)
      : StreamImpl({}, std::move(stream_name)), spin_us_(options.spin_us) {
    observer = options.observer;
    profiler::name_stream(id, name);
    worker_ = std::thread([this, threads = options.num_threads] { run(threads); });
  }

  ~CpuStream() override {
    push({nullptr, {}, nullptr});
    // The last reference may be dropped by a task that this very worker runs.
    if (worker_.get_id() == std::this_thread::get_id()) {
      worker_.detach();
    } else {
      worker_.join();
    }
  }

  void submit(const char* task_name, Task task) override { push({task_name, std::move(task), {}}); }

  Event record() override {
    auto event = std::make_shared<CpuEvent>();
    push({nullptr, {}, event});
    return Event(std::move(event));
  }

  void wait(const Event& event) override {
    auto target = std::dynamic_pointer_cast<CpuEvent>(event.shared_impl());
    TESSERA_CHECK(target != nullptr, "Stream::wait: the event is of another device than cpu");
    if (target->is_done() && !target_failed(*target)) return;
    submit("wait", [target = std::move(target)] {
      if (std::exception_ptr error = target->wait()) std::rethrow_exception(error);
    });
  }

  void synchronize() override { record().synchronize(); }

  void drain() noexcept override {
    try {
      static_cast<CpuEvent*>(record().impl())->wait();
    } catch (...) {  // only out of memory for the event; nothing left to wait with
      log_error("stream {}: could not drain", name);
    }
  }

 private:
  struct Item {
    const char* name = nullptr;
    Task task;                        // or, empty:
    std::shared_ptr<CpuEvent> event;  // to finish; both empty: the end
  };

  static bool target_failed(const CpuEvent& event) { return event.wait() != nullptr; }

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

  void run(int num_threads) {
    omp_set_num_threads(num_threads);
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    const int stream_id = id;
    std::exception_ptr error;
    for (;;) {
      Item item = pop();
      if (item.event != nullptr) {
        item.event->finish(error);
      } else if (!item.task) {
        return;
      } else if (error == nullptr) {
        const bool traced = profiler::is_on();
        const int64_t begin = traced ? profiler::now_ns() : 0;
        try {
          item.task();
        } catch (...) {
          error = std::current_exception();
        }
        if (traced) profiler::add({item.name, stream_id, begin, profiler::now_ns()});
      }
    }
  }

  const int spin_us_;
  std::mutex mutex_;
  std::condition_variable changed_;
  RingQueue<Item> queue_;
  std::atomic<bool> pending_{false};
  bool sleeping_ = false;
  std::thread worker_;
};

}  // namespace

Stream make_cpu_stream(std::string name, const StreamOptions& options) {
  return Stream(std::make_shared<CpuStream>(std::move(name), options));
}

}  // namespace tessera
