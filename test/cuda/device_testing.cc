// What the tests of kernel families need (test/simt/simt_testing.h, and simt.h's part for tests) on
// a CUDA device. Memory is managed, so that tests fill and read it as on the emulator; whoever asks
// for its address has waited for the kernels. Schedules and shared memory are the device's own, all
// blocks of a grid run, and bank conflicts are not counted.
#include <cuda_runtime_api.h>

#include <cstring>

#include "core/runtime/cuda/check.h"
#include "test/simt/simt_testing.h"

namespace simt {
namespace {

void* allocate(size_t nbytes) {
  void* data = nullptr;
  TESSERA_CUDA_CHECK(cudaMallocManaged(&data, std::max<size_t>(nbytes, 1), cudaMemAttachGlobal));
  return data;
}

}  // namespace

Schedule::Schedule(Order order, uint64_t seed) : previous_order_(order), previous_seed_(seed) {}
Schedule::~Schedule() = default;

OnDevice::OnDevice(const Device& device) : previous_(device) {}
OnDevice::~OnDevice() = default;

OnlyBlocks::OnlyBlocks(std::vector<int64_t> blocks) : previous_(std::move(blocks)) {}
OnlyBlocks::~OnlyBlocks() = default;

MatrixLoads::MatrixLoads() : first_read_(0), first_conflict_(0) {}
int64_t MatrixLoads::num_reads() const {
  return first_read_;
}
int64_t MatrixLoads::num_conflicts() const {
  return first_conflict_;
}

ReservedBuffer::ReservedBuffer(int64_t nbytes)
    : data_(allocate(static_cast<size_t>(nbytes))), nbytes_(nbytes) {
  TESSERA_CUDA_CHECK(cudaMemset(data_, 0, static_cast<size_t>(nbytes)));
}
ReservedBuffer::~ReservedBuffer() {
  cudaDeviceSynchronize();
  cudaFree(data_);
}
void* ReservedBuffer::data() const {
  TESSERA_CUDA_CHECK(cudaDeviceSynchronize());
  return data_;
}

}  // namespace simt

namespace tessera::testing {

DeviceBuffer::DeviceBuffer(const Shape& shape, DType dtype, int64_t offset)
    : shape_(shape), dtype_(dtype) {
  const size_t offset_bytes = static_cast<size_t>(offset) * size_of(dtype);
  allocation_ = simt::allocate(offset_bytes + nbytes());
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
  cudaDeviceSynchronize();
  cudaFree(allocation_);
}

void* DeviceBuffer::data() const {
  TESSERA_CUDA_CHECK(cudaDeviceSynchronize());
  return data_;
}

Tensor DeviceBuffer::tensor() const {
  Tensor copy = empty(shape_, dtype_);
  current_stream().synchronize();
  if (nbytes() > 0) std::memcpy(copy.raw_data(), data(), nbytes());
  return copy;
}

std::vector<Tensor> run_in_all_schedules(const std::function<std::vector<Tensor>()>& run) {
  const std::vector<Tensor> outputs = run(), again = run();
  REQUIRE(again.size() == outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_bitwise(again[i], outputs[i], fmt::format("output {} of a second run", i));
  }
  return outputs;
}

}  // namespace tessera::testing
