#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

namespace tessera::text {

/// Zeroed memory of a table that is read at random places: whole cache lines, and huge pages where
/// the system has them, as a table of megabytes otherwise misses the TLB with each word.
template <class T>
class TableMemory {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  TableMemory() = default;
  explicit TableMemory(size_t count) : count_(count) {
    constexpr size_t kLine = 64, kHuge = size_t{2} << 20;
    const size_t nbytes = count * sizeof(T), alignment = nbytes < kHuge ? kLine : kHuge;
    const size_t rounded = (nbytes + alignment - 1) / alignment * alignment;
    data_.reset(static_cast<T*>(std::aligned_alloc(alignment, rounded)));
    if (data_ == nullptr) throw std::bad_alloc();
    if (alignment == kHuge) ::madvise(data_.get(), rounded, MADV_HUGEPAGE);  // a wish
    clear();
  }

  size_t size() const { return count_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  const T* begin() const { return data_.get(); }
  const T* end() const { return data_.get() + count_; }
  void clear() { std::memset(static_cast<void*>(data_.get()), 0, count_ * sizeof(T)); }
  void swap(TableMemory& other) {
    data_.swap(other.data_);
    std::swap(count_, other.count_);
  }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T[], Free> data_;
  size_t count_ = 0;
};

}  // namespace tessera::text
