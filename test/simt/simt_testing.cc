#include "test/simt/simt_testing.h"

#include <cstring>
#include <new>

namespace tessera::testing {
namespace {

constexpr size_t kAlignment = 256;

}  // namespace

DeviceBuffer::DeviceBuffer(const Shape& shape, DType dtype, int64_t offset)
    : shape_(shape), dtype_(dtype) {
  const size_t offset_bytes = static_cast<size_t>(offset) * size_of(dtype);
  allocation_ = ::operator new (offset_bytes + nbytes(), std::align_val_t{kAlignment});
  data_ = static_cast<char*>(allocation_) + offset_bytes;
  std::memset(allocation_, 0xff, offset_bytes + nbytes());
}

DeviceBuffer::DeviceBuffer(const Tensor& tensor, int64_t offset)
    : DeviceBuffer(tensor.shape(), tensor.dtype(), offset) {
  const Tensor dense = tensor.contiguous();
  current_stream().synchronize();
  if (nbytes() > 0) std::memcpy(data_, dense.raw_data(), nbytes());
}

DeviceBuffer::~DeviceBuffer() {
  ::operator delete (allocation_, std::align_val_t{kAlignment});
}

void* DeviceBuffer::data() const {
  return data_;
}

Tensor DeviceBuffer::tensor() const {
  Tensor copy = empty(shape_, dtype_);
  current_stream().synchronize();
  if (nbytes() > 0) std::memcpy(copy.raw_data(), data_, nbytes());
  return copy;
}

std::vector<Tensor> run_in_all_schedules(const std::function<std::vector<Tensor>()>& run) {
  std::vector<Tensor> outputs;
  {
    const simt::Schedule schedule(simt::Order::kForward);
    outputs = run();
  }
  for (const auto order : {simt::Order::kReverse, simt::Order::kRandom}) {
    const simt::Schedule schedule(order);
    const std::vector<Tensor> others = run();
    REQUIRE(others.size() == outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      check_bitwise(others[i], outputs[i],
                    fmt::format("output {} in {} order against forward order", i,
                                order == simt::Order::kReverse ? "reverse" : "random"));
    }
  }
  return outputs;
}

}  // namespace tessera::testing
