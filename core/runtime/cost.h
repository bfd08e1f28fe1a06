#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "core/check.h"

namespace tessera {

/// A byte range that a task reads or writes.
struct Access {
  const void* data;
  int64_t nbytes;
  bool is_write;
};

/// What one kernel call costs: floating-point operations and the byte ranges it reads and writes.
/// Every argument struct in a family's `kernel.h` has `Cost cost() const`; the happens-before
/// checker takes the ranges, benches and MFU take the sums. Lives on the stack, never allocates.
class Cost {
 public:
  explicit Cost(double flops = 0) : flops_(flops) {}

  Cost& read(const void* data, int64_t nbytes) { return add({data, nbytes, false}); }
  Cost& write(const void* data, int64_t nbytes) { return add({data, nbytes, true}); }
  /// A gradient output: also read when it is accumulated into.
  Cost& write_or_accumulate(const void* data, int64_t nbytes, bool accumulate) {
    return accumulate ? read(data, nbytes).write(data, nbytes) : write(data, nbytes);
  }

  double flops() const { return flops_; }
  int64_t bytes_read() const { return sum(false); }
  int64_t bytes_written() const { return sum(true); }
  int64_t bytes() const { return bytes_read() + bytes_written(); }
  std::span<const Access> accesses() const { return {accesses_.data(), num_accesses_}; }

 private:
  Cost& add(Access access) {
    if (access.data == nullptr || access.nbytes == 0) return *this;  // an operand that is not there
    TESSERA_DCHECK(num_accesses_ < accesses_.size());
    accesses_[num_accesses_++] = access;
    return *this;
  }
  int64_t sum(bool is_write) const {
    int64_t total = 0;
    for (const Access& a : accesses()) total += a.is_write == is_write ? a.nbytes : 0;
    return total;
  }

  double flops_;
  size_t num_accesses_ = 0;
  std::array<Access, 24> accesses_;
};

}  // namespace tessera
