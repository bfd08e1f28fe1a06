#pragma once

#include <cstddef>

namespace simt {

/// A function with a stack of its own that can be left in the middle and resumed. One thread at a
/// time; a fiber stays on the thread that started it.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// The next `resume` calls entry(argument), which must not throw. A run that was left in the
  /// middle is forgotten, without destructors.
  void start(void (*entry)(void*), void* argument);
  /// Runs the fiber until it yields or ends. Not from inside a fiber.
  void resume();
  /// From inside: back to `resume`.
  void yield();
  bool is_done() const { return is_done_; }

 private:
  friend void enter_fiber();

  void* stack_pointer_ = nullptr;
  void* resumer_ = nullptr;
  char* stack_;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool is_done_ = true;
  // AddressSanitizer's view of the resumer's stack.
  const void* resumer_stack_ = nullptr;
  size_t resumer_stack_nbytes_ = 0;
};

}  // namespace simt
