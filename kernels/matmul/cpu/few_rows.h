#pragma once

#include "kernels/matmul/kernel.h"

namespace tessera::kernels {

/// Whether `matmul_few_rows` takes it: on the CPU, a linear layer (trans_b alone, one batch) in f32,
/// bf16 or f16.
bool takes_few_rows(const ::tessera::Stream& s, const Matmul& p);
/// `matmul` for few rows, as decoding has them: each element of b is read from memory once, and a
/// row has the bits that it has alone, which are not those of `matmul`.
void matmul_few_rows(const ::tessera::Stream& s, const Matmul& p);

namespace cpu {
void matmul_few_rows(const Matmul& p);
}  // namespace cpu

}  // namespace tessera::kernels
