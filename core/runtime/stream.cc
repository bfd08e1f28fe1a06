#include "core/runtime/stream.h"

#include <atomic>

#include "core/runtime/context.h"
#include "core/runtime/cpu/cpu.h"
#include "core/runtime/cuda/cuda.h"

namespace tessera {
namespace {
std::atomic<int> next_stream_id{0};
thread_local const Stream* guarded_stream = nullptr;
}  // namespace

StreamImpl::StreamImpl(Device d, std::string n)
    : device(d), name(std::move(n)), id(next_stream_id.fetch_add(1)) {}

Stream make_stream(Device device, std::string name, const StreamOptions& options) {
  return device.type == DeviceType::kCpu ? make_cpu_stream(std::move(name), options)
                                         : make_cuda_stream(device, std::move(name), options);
}

const Stream& current_stream() {
  return guarded_stream != nullptr ? *guarded_stream : Context::current()->compute();
}

StreamGuard::StreamGuard(Stream stream) : stream_(std::move(stream)), previous_(guarded_stream) {
  guarded_stream = &stream_;
}

StreamGuard::~StreamGuard() {
  guarded_stream = previous_;
}

}  // namespace tessera
