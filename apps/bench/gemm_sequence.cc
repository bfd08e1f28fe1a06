#include "apps/bench/gemm_sequence.h"

#include <algorithm>
#include <array>

#include "core/random.h"
#include "core/runtime/context.h"
#include "kernels/matmul/cuda/cublaslt.h"
#include "kernels/random/random.h"

namespace tessera::apps {
namespace {

using kernels::Matmul;

/// Algorithms depend on how pointers are aligned, up to this.
constexpr int64_t kAlignment = 256;

enum Operand { kA, kB, kC, kBias, kResidual, kPreActivation, kRowSums, kWorkspace, kNumOperands };

struct Extent {
  const void* data;
  int64_t nbytes;
};

int64_t extent_of(int64_t rows, int64_t cols, int64_t ld, int64_t num_batches, int64_t stride,
                  DType dtype) {
  return ((num_batches - 1) * stride + (rows - 1) * ld + cols) *
         static_cast<int64_t>(size_of(dtype));
}

std::array<Extent, kNumOperands> operands_of(const Matmul& p) {
  const auto c_element = static_cast<int64_t>(size_of(p.c_dtype));
  const int64_t a_rows = p.trans_a ? p.k : p.m, a_cols = p.trans_a ? p.m : p.k;
  const int64_t b_rows = p.trans_b ? p.n : p.k, b_cols = p.trans_b ? p.k : p.n;
  return {{{p.a, extent_of(a_rows, a_cols, p.lda, p.num_batches, p.batch_stride_a, p.dtype)},
           {p.b, extent_of(b_rows, b_cols, p.ldb, p.num_batches, p.batch_stride_b, p.dtype)},
           {p.c, extent_of(p.m, p.n, p.ldc, p.num_batches, p.batch_stride_c, p.c_dtype)},
           {p.bias, p.n * static_cast<int64_t>(size_of(p.bias_dtype))},
           {p.residual, extent_of(p.m, p.n, p.ld_residual, 1, 0, p.c_dtype)},
           {p.pre_activation, p.m * p.n * c_element},
           {p.row_sums, p.m * c_element},
           {p.workspace, p.workspace_nbytes}}};
}

int64_t misalignment_of(const void* data) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kAlignment);
}

/// Numbers of ordinary size, whatever floating dtype they are read as: zeros take less power.
Tensor make_numbers(int64_t nbytes) {
  Tensor numbers = empty({(nbytes + 1) / 2}, kBF16);
  fill_normal(numbers, 0, 1, make_key(1, 1));
  return numbers;
}

}  // namespace

GemmSequence GemmSequence::record(const std::function<void()>& step) {
  GemmSequence sequence;
  kernels::cuda::observe_cublaslt(
      [&](const Matmul& product) { sequence.products_.push_back(product); });
  try {
    step();
  } catch (...) {
    kernels::cuda::observe_cublaslt(nullptr);
    throw;
  }
  kernels::cuda::observe_cublaslt(nullptr);
  sequence.move_to_own_memory();
  return sequence;
}

void GemmSequence::move_to_own_memory() {
  std::array<int64_t, kNumOperands> nbytes{};
  for (const Matmul& p : products_) {
    const auto operands = operands_of(p);
    for (size_t i = 0; i < operands.size(); ++i) {
      if (operands[i].data != nullptr) nbytes[i] = std::max(nbytes[i], operands[i].nbytes);
    }
  }
  for (const int64_t size : nbytes) {
    memory_.push_back(size > 0 ? make_numbers(size + 2 * kAlignment) : Tensor{});
  }
  for (Matmul& p : products_) {
    const auto place = [&](Operand operand, const void* old) -> void* {
      if (old == nullptr) return nullptr;
      char* data = static_cast<char*>(memory_[operand].raw_data());
      return data + (kAlignment - misalignment_of(data)) % kAlignment + misalignment_of(old);
    };
    const bool adds_to_c = p.residual == p.c;
    p.a = place(kA, p.a);
    p.b = place(kB, p.b);
    p.c = place(kC, p.c);
    p.bias = place(kBias, p.bias);
    p.residual = adds_to_c ? p.c : place(kResidual, p.residual);
    p.pre_activation = place(kPreActivation, p.pre_activation);
    p.row_sums = place(kRowSums, p.row_sums);
    p.workspace = place(kWorkspace, p.workspace);
  }
}

void GemmSequence::submit() const {
  CUstream_st* stream = current_stream().cuda();
  for (const Matmul& p : products_) kernels::cuda::cublaslt_matmul(stream, p);
}

}  // namespace tessera::apps
