#pragma once

#include <cstddef>

// AddressSanitizer's interface, for code that is itself not instrumented and runs with or without
// it: the functions are there when the program is built with -fsanitize=address.

extern "C" {
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* data, size_t nbytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* data, size_t nbytes);
[[gnu::weak]] void* __asan_region_is_poisoned(void* data, size_t nbytes);
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** save_fake_stack, const void* stack,
                                                  size_t stack_nbytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_stack,
                                                   size_t* old_stack_nbytes);
}

namespace simt::asan {

inline bool is_on() {
  return __asan_poison_memory_region != nullptr;
}
inline void poison(void* data, size_t nbytes) {
  if (is_on()) __asan_poison_memory_region(data, nbytes);
}
inline void unpoison(void* data, size_t nbytes) {
  if (is_on()) __asan_unpoison_memory_region(data, nbytes);
}
inline bool is_poisoned(const void* data, size_t nbytes) {
  return is_on() && __asan_region_is_poisoned(const_cast<void*>(data), nbytes) != nullptr;
}
/// Before a switch to `stack`; a null `save_fake_stack` says that the current stack ends.
inline void start_switch(void** save_fake_stack, const void* stack, size_t stack_nbytes) {
  if (is_on()) __sanitizer_start_switch_fiber(save_fake_stack, stack, stack_nbytes);
}
/// After a switch, on the new stack; tells which stack was left.
inline void finish_switch(void* fake_stack, const void** old_stack, size_t* old_stack_nbytes) {
  if (is_on()) __sanitizer_finish_switch_fiber(fake_stack, old_stack, old_stack_nbytes);
}

}  // namespace simt::asan
