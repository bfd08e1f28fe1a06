#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace tessera {

/// A move-only `void()` callable stored in place up to 256 bytes, so that submitting a kernel call
/// with its argument struct allocates nothing; larger ones go to the heap.
class Task {
 public:
  Task() = default;
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, Task>>>
  Task(F&& f) {  // NOLINT: implicit, as std::function
    using Fn = std::decay_t<F>;
    if constexpr (sizeof(Fn) <= kInlineBytes && alignof(Fn) <= alignof(std::max_align_t) &&
                  std::is_nothrow_move_constructible_v<Fn>) {
      ::new (static_cast<void*>(storage_)) Fn(std::forward<F>(f));
      ops_ = &kInlineOps<Fn>;
    } else {
      ::new (static_cast<void*>(storage_)) Fn*(new Fn(std::forward<F>(f)));
      ops_ = &kHeapOps<Fn>;
    }
  }
  Task(Task&& other) noexcept { take(other); }
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  ~Task() { reset(); }

  void operator()() { ops_->call(storage_); }
  explicit operator bool() const { return ops_ != nullptr; }

 private:
  static constexpr size_t kInlineBytes = 256;
  struct Ops {
    void (*call)(void*);
    void (*move)(void* to, void* from);  // moves and destroys the source
    void (*destroy)(void*);
  };
  template <class Fn>
  static constexpr Ops kInlineOps = {[](void* p) { (*static_cast<Fn*>(p))(); },
                                     [](void* to, void* from) {
                                       ::new (to) Fn(std::move(*static_cast<Fn*>(from)));
                                       static_cast<Fn*>(from)->~Fn();
                                     },
                                     [](void* p) { static_cast<Fn*>(p)->~Fn(); }};
  template <class Fn>
  static constexpr Ops kHeapOps = {
      [](void* p) { (**static_cast<Fn**>(p))(); },
      [](void* to, void* from) { ::new (to) Fn*(*static_cast<Fn**>(from)); },
      [](void* p) { delete *static_cast<Fn**>(p); }};

  void take(Task& other) {
    if (other.ops_ != nullptr) other.ops_->move(storage_, other.storage_);
    ops_ = std::exchange(other.ops_, nullptr);
  }
  void reset() {
    if (ops_ != nullptr) std::exchange(ops_, nullptr)->destroy(storage_);
  }

  const Ops* ops_ = nullptr;
  alignas(std::max_align_t) std::byte storage_[kInlineBytes];
};

}  // namespace tessera
