#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "core/runtime/allocator.h"
#include "core/runtime/context.h"

namespace tessera {

/// Bytes of tensors. The object outlives its bytes: they come with `materialize` (own memory of
/// the allocator) or `attach` (memory of somebody else, such as a ring slot) and go with `release`,
/// so that tensors and saved values that refer to it are valid again after the next gather.
class Storage {
 public:
  /// Without bytes; `materialize` or `attach` brings them.
  Storage(size_t nbytes, Device device);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  size_t nbytes() const { return nbytes_; }
  Device device() const { return device_; }
  bool is_materialized() const { return data_ != nullptr || nbytes_ == 0; }
  /// Error if the bytes are released, with what `set_owner` said of them (InternalError if
  /// nothing).
  void* data() const {
    if (data_ == nullptr && nbytes_ != 0) [[unlikely]]
      fail_released();
    return data_;
  }

  /// Own bytes (uninitialized) that belong to the current stream, from the current Context.
  void materialize(MemoryClass memory_class = MemoryScope::current());
  /// The same from another allocator, for tasks of `stream`.
  void materialize(const std::shared_ptr<Allocator>& allocator, const Stream& stream,
                   MemoryClass memory_class);
  /// Own bytes from `backend`, see `Allocator::allocate_segment`.
  void materialize_segment(std::shared_ptr<MemoryBackend> backend, MemoryClass memory_class);
  /// Uses memory of `owner`, which is kept alive until release.
  void attach(void* data, std::shared_ptr<void> owner = nullptr);
  void release();
  /// What the bytes are and when they are there, for the error of who reads them at another time.
  void set_owner(std::string description) { owner_text_ = std::move(description); }

 private:
  [[noreturn]] void fail_released() const;

  size_t nbytes_;
  Device device_;
  void* data_ = nullptr;
  Allocator::Block* block_ = nullptr;
  std::shared_ptr<Allocator> allocator_;
  std::shared_ptr<void> owner_;
  std::string owner_text_;
};

}  // namespace tessera
