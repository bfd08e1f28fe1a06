// Instructions as the emulator computes them (test/simt) and as the device does.

#include <cuda_runtime_api.h>

#include <cstring>
#include <span>

#include "core/runtime/cuda/check.h"
#include "test/cuda/ptx_kernels.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

/// One object in memory that the host and the device see, all bytes 0xff.
template <class T>
class Shared {
 public:
  Shared() {
    void* memory = nullptr;
    TESSERA_CUDA_CHECK(cudaMallocManaged(&memory, sizeof(T), cudaMemAttachGlobal));
    std::memset(memory, 0xff, sizeof(T));
    object_ = static_cast<T*>(memory);
  }
  ~Shared() { cudaFree(object_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* get() const { return object_; }
  T* operator->() const { return object_; }

 private:
  T* object_;
};

template <class T>
void fill(PtxIn& in) {
  const std::vector<double> a = randn({16 * 16}, kF32, 1).to_vector(),
                            b = randn({16 * 8}, kF32, 2).to_vector(),
                            c = randn({4 * kLanes}, kF32, 3).to_vector(),
                            x = randn({kLanes}, kF32, 4).to_vector();
  for (size_t i = 0; i < a.size(); ++i) in.a[i] = T(static_cast<float>(a[i])).bits;
  for (size_t k = 0; k < 16; ++k) {
    for (size_t n = 0; n < 8; ++n) {
      in.b[k * 8 + n] = in.bt[n * 16 + k] = T(static_cast<float>(b[k * 8 + n])).bits;
    }
  }
  for (size_t i = 0; i < c.size(); ++i) in.c[i / kLanes][i % kLanes] = static_cast<float>(c[i]);
  for (size_t i = 0; i < x.size(); ++i) in.x[i] = std::abs(static_cast<float>(x[i])) + 0.01f;
}

template <class T, size_t kNum>
std::vector<double> numbers(const T (&values)[kNum][kLanes]) {
  const std::span<const T> flat(&values[0][0], kNum * kLanes);
  return {flat.begin(), flat.end()};
}
template <class T>
std::vector<double> numbers(const T (&values)[kLanes]) {
  return {std::begin(values), std::end(values)};
}

template <class T, class Run>
void check_ptx(Run compiled_run, Run emulated_run) {
  const Shared<PtxIn> in;
  const Shared<PtxOut> real, emulated;
  fill<T>(*in.get());
  emulated_run(emulated.get(), in.get());
  compiled_run(real.get(), in.get());
  TESSERA_CUDA_CHECK(cudaDeviceSynchronize());
  CHECK(numbers(real->a) == numbers(emulated->a));
  CHECK(numbers(real->a_trans) == numbers(emulated->a_trans));
  CHECK(numbers(real->b) == numbers(emulated->b));
  CHECK(numbers(real->bt) == numbers(emulated->bt));
  CHECK(numbers(real->b) == numbers(real->bt));
  CHECK(numbers(real->copied) == numbers(emulated->copied));
  CHECK(numbers(real->packed) == numbers(emulated->packed));
  CHECK(numbers(real->d) == numbers(real->dt));
  check_close(numbers(real->d), numbers(emulated->d), tol(kF32, 16), "mma");
  check_close(numbers(real->exp2), numbers(emulated->exp2), tol(kF32, 1), "exp2");
  check_close(numbers(real->log2), numbers(emulated->log2), tol(kF32, 1), "log2");
  check_close(numbers(real->rcp), numbers(emulated->rcp), tol(kF32, 1), "rcp");
}

TEST_CASE("ptx: registers of ldmatrix, cp.async and mma are those of the emulator", "[cuda]") {
  SECTION("bf16") {
    check_ptx<BFloat16>(compiled::run_ptx_bf16, emulated::run_ptx_bf16);
  }
  SECTION("f16") {
    check_ptx<Float16>(compiled::run_ptx_f16, emulated::run_ptx_f16);
  }
}

}  // namespace
}  // namespace tessera::testing
