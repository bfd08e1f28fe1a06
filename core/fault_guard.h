#pragma once

#include <cstdint>

namespace tessera {

/// Keeps a process alive that reads a mapped file whose bytes are gone: a file cut short while it
/// is mapped, or a disk that fails, raises SIGBUS at the load. While a guard lives, such a load
/// gives zeros, as do all behind it in the mapping, and `has_faulted` says so: whoever reads asks
/// afterwards. Any thread may read. Faults elsewhere go to the handler that was there before.
class FaultGuard {
 public:
  /// The mapping [data, data + nbytes), from a page's beginning.
  FaultGuard(const void* data, int64_t nbytes);
  ~FaultGuard();  ///< before the mapping goes
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;

  bool has_faulted() const;

 private:
  struct Range;
  friend struct FaultRanges;
  Range* range_;
};

/// For a handler of SIGBUS that is installed later than that of the guards: whether `address`, of a
/// fault of the kernel, lies in a guarded mapping, which then reads as zeros. Async-signal-safe.
bool mend_mapped_fault(const void* address);

}  // namespace tessera
