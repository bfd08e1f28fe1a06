#include "core/storage.h"

namespace tessera {

Storage::Storage(size_t nbytes, Device device) : nbytes_(nbytes), device_(device) {}

Storage::~Storage() {
  release();
}

void Storage::materialize(MemoryClass memory_class) {
  materialize(Context::current()->allocator(), current_stream(), memory_class);
}

void Storage::materialize(const std::shared_ptr<Allocator>& allocator, const Stream& stream,
                          MemoryClass memory_class) {
  if (nbytes_ == 0 || data_ != nullptr) return;
  block_ = allocator->allocate(nbytes_, stream, memory_class);
  allocator_ = allocator;
  data_ = Allocator::data(block_);
}

void Storage::materialize_segment(std::shared_ptr<MemoryBackend> backend,
                                  MemoryClass memory_class) {
  if (nbytes_ == 0 || data_ != nullptr) return;
  allocator_ = Context::current()->allocator();
  block_ =
      allocator_->allocate_segment(std::move(backend), nbytes_, current_stream(), memory_class);
  data_ = Allocator::data(block_);
}

void Storage::attach(void* data, std::shared_ptr<void> owner) {
  release();
  data_ = data;
  owner_ = std::move(owner);
}

void Storage::release() {
  data_ = nullptr;
  owner_ = nullptr;
  if (block_ == nullptr) return;
  allocator_->free(std::exchange(block_, nullptr));
  allocator_ = nullptr;
}

void Storage::fail_released() const {
  if (!owner_text_.empty()) {
    throw Error(fmt::format("Storage: its {} bytes are not there: {}", nbytes_, owner_text_));
  }
  throw InternalError(fmt::format("Storage: its {} bytes are released", nbytes_));
}

}  // namespace tessera
