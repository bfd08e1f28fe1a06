// Fibers for x86-64: a switch saves the callee-saved registers on the stack that is left and takes
// those of the other. (ucontext costs a system call a switch.)
#include "test/simt/fiber.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <vector>

#include "test/simt/asan.h"

#if !defined(__x86_64__)
#error "the emulator's fibers are written for x86-64"
#endif

extern "C" void tessera_simt_switch(void** save_stack_pointer, void* stack_pointer);
asm(R"(
.text
.type tessera_simt_switch,@function
tessera_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tessera_simt_switch, .-tessera_simt_switch
)");

namespace simt {
namespace {

constexpr size_t kStackBytes = 256 * 1024;  // of which touched pages cost memory
constexpr size_t kGuardBytes = 4096;        // an overflow faults instead of corrupting

/// Stacks of this thread that no fiber has.
class StackPool {
 public:
  ~StackPool() {
    for (char* stack : free_) munmap(stack - kGuardBytes, kStackBytes + kGuardBytes);
  }
  char* take() {
    if (!free_.empty()) {
      char* stack = free_.back();
      free_.pop_back();
      return stack;
    }
    void* mapped = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mprotect(mapped, kGuardBytes, PROT_NONE);
    return static_cast<char*>(mapped) + kGuardBytes;
  }
  void put(char* stack) { free_.push_back(stack); }

 private:
  std::vector<char*> free_;
};

thread_local StackPool stack_pool;
thread_local Fiber* entering = nullptr;

}  // namespace

Fiber::Fiber() : stack_(stack_pool.take()) {}

Fiber::~Fiber() {
  if (!is_done_) asan::unpoison(stack_, kStackBytes);  // frames left in the middle
  stack_pool.put(stack_);
}

void enter_fiber() {
  Fiber* fiber = entering;
  asan::finish_switch(nullptr, &fiber->resumer_stack_, &fiber->resumer_stack_nbytes_);
  fiber->entry_(fiber->argument_);
  fiber->is_done_ = true;
  fiber->yield();
  std::abort();  // nobody resumes a fiber that is done
}

void Fiber::start(void (*entry)(void*), void* argument) {
  if (!is_done_) asan::unpoison(stack_, kStackBytes);
  entry_ = entry;
  argument_ = argument;
  is_done_ = false;
  auto** top = reinterpret_cast<void**>(stack_ + kStackBytes);
  *--top = nullptr;  // no caller; aligns the stack as after a call
  *--top = reinterpret_cast<void*>(&enter_fiber);
  for (int i = 0; i < 6; ++i) *--top = nullptr;  // rbp rbx r12 to r15
  stack_pointer_ = top;
}

void Fiber::resume() {
  entering = this;
  void* fake_stack = nullptr;
  asan::start_switch(&fake_stack, stack_, kStackBytes);
  tessera_simt_switch(&resumer_, stack_pointer_);
  asan::finish_switch(fake_stack, nullptr, nullptr);
}

void Fiber::yield() {
  void* fake_stack = nullptr;
  asan::start_switch(is_done_ ? nullptr : &fake_stack, resumer_stack_, resumer_stack_nbytes_);
  tessera_simt_switch(&stack_pointer_, resumer_);
  asan::finish_switch(fake_stack, &resumer_stack_, &resumer_stack_nbytes_);
}

}  // namespace simt
