#include "core/runtime/staging.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <utility>
#include <vector>

#include "core/runtime/context.h"
#include "core/tensor.h"

namespace tessera {
namespace {
constexpr size_t kSmallest = 4096;                 // bytes of a buffer
constexpr size_t kLargestIdle = size_t{64} << 20;  // bytes that stay for the next values
}  // namespace

struct HostBuffer::Buffer {
  void* data = nullptr;
  size_t nbytes = 0;
  Event last_use;
};

struct HostBuffer::Pool {
  explicit Pool(std::unique_ptr<MemoryBackend> b) : backend(std::move(b)) {}

  // The owners of buffers hold the pool: whatever is here is idle or on its way.
  ~Pool() {
    for (const auto& buffer : buffers) {
      try {
        buffer->last_use.synchronize();
      } catch (...) {  // its stream is poisoned and so nothing is in flight
      }
      backend->free(buffer->data, buffer->nbytes);
    }
  }

  std::unique_ptr<Buffer> take_idle(size_t nbytes) {
    const auto it = std::find_if(buffers.begin(), buffers.end(), [nbytes](const auto& b) {
      return b->nbytes == nbytes && b->last_use.is_done();
    });
    if (it == buffers.end()) return nullptr;
    std::unique_ptr<Buffer> buffer = std::move(*it);
    buffers.erase(it);
    return buffer;
  }

  void free_large() {
    size_t idle_nbytes = 0;
    std::erase_if(buffers, [&](const auto& b) {
      if (!b->last_use.is_done()) return false;
      idle_nbytes += b->nbytes;
      if (idle_nbytes <= kLargestIdle) return false;
      backend->free(b->data, b->nbytes);
      return true;
    });
  }

  const std::unique_ptr<MemoryBackend> backend;
  std::mutex mutex;
  std::vector<std::unique_ptr<Buffer>> buffers;  // the longest unused first
  int num_made = 0;
};

HostBuffer::HostBuffer(std::shared_ptr<Pool> pool, std::unique_ptr<Buffer> buffer, size_t nbytes)
    : pool_(std::move(pool)), buffer_(std::move(buffer)), nbytes_(nbytes) {}

HostBuffer::HostBuffer() noexcept = default;
HostBuffer::HostBuffer(HostBuffer&&) noexcept = default;

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  give_back();
  pool_ = std::move(other.pool_);
  buffer_ = std::move(other.buffer_);
  nbytes_ = other.nbytes_;
  return *this;
}

HostBuffer::~HostBuffer() {
  give_back();
}

void HostBuffer::give_back() noexcept {
  if (buffer_ == nullptr) return;
  const std::lock_guard lock(pool_->mutex);
  pool_->buffers.push_back(std::move(buffer_));
}

void* HostBuffer::data() const {
  return buffer_ != nullptr ? buffer_->data : nullptr;
}

// The order of a buffer's uses is this file's matter (a buffer in use is not handed out), so the
// checker sees the device's side only.
void HostBuffer::upload(const char* name, const Stream& stream, void* dst) && {
  stream.declare(name, Cost().write(dst, static_cast<int64_t>(nbytes_)));
  stream.impl()->copy_bytes(name, dst, buffer_->data, nbytes_);
  buffer_->last_use = Event(stream.impl()->record());
  give_back();
}

Event HostBuffer::download(const char* name, const Stream& stream, const void* src) {
  stream.declare(name, Cost().read(src, static_cast<int64_t>(nbytes_)));
  stream.impl()->copy_bytes(name, buffer_->data, src, nbytes_);
  return buffer_->last_use = stream.record();
}

HostStaging::HostStaging(std::unique_ptr<MemoryBackend> backend)
    : pool_(std::make_shared<HostBuffer::Pool>(std::move(backend))) {}

HostBuffer HostStaging::acquire(size_t nbytes) {
  const size_t rounded = std::bit_ceil(std::max(nbytes, kSmallest));
  const std::lock_guard lock(pool_->mutex);
  std::unique_ptr<HostBuffer::Buffer> buffer = pool_->take_idle(rounded);
  pool_->free_large();
  if (buffer == nullptr) {
    buffer = std::make_unique<HostBuffer::Buffer>();
    buffer->nbytes = rounded;
    buffer->data = pool_->backend->allocate(rounded);
    if (buffer->data == nullptr) {
      throw OutOfMemoryError(fmt::format("staging: no {} of host memory that the device can reach",
                                         format_nbytes(static_cast<int64_t>(rounded))));
    }
    ++pool_->num_made;
  }
  return HostBuffer(pool_, std::move(buffer), nbytes);
}

int HostStaging::num_buffers() const {
  const std::lock_guard lock(pool_->mutex);
  return pool_->num_made;
}

HostCopy::HostCopy(const Tensor& source)
    : buffer_(Context::current()->staging()->acquire(static_cast<size_t>(source.nbytes()))),
      dtype_(source.dtype()) {
  TESSERA_CHECK_SHAPE(source.is_contiguous(), "HostCopy: expected a contiguous tensor, got {}",
                      source.strides());
  if (source.numel() > 0) {
    event_ = buffer_.download("to_host", current_stream(), source.raw_data());
  }
}

const void* HostCopy::data() const {
  event_.synchronize();
  return buffer_.data();
}

double HostCopy::item() const {
  return visit_dtype(dtype_, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T value = *static_cast<const T*>(data());
    if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>)
      return static_cast<double>(static_cast<float>(value));
    else
      return static_cast<double>(value);
  });
}

}  // namespace tessera
