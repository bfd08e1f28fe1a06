#pragma once

#include <string>

#include "kernels/matmul/kernel.h"
#include "kernels/tuning/tuning.h"

// Choices between the algorithms of cuBLASLt, and between its epilogues and passes of our own; see
// [Note: Tuning] (kernels/tuning/tuning.h).

namespace tessera::kernels::cuda {

/// What the time of a product of cuBLASLt depends on: types, shape, layout, epilogue, alignment of the
/// pointers, and whether TF32 is allowed as things are set now.
std::string gemm_key(const Matmul& p);

/// Adds the fastest way for `key`, and for the product without its epilogue if that is one. False for
/// a key of anything else. The choice is
///   "fused ALGORITHM"   by cuBLASLt, epilogue included
///   "apart"             the activation, or the sums of rows, by a pass of our own behind the product
///                       without, which has a choice of its own
///   "own"               by our own kernel: the library refuses each algorithm that it has offered
bool measure_gemm(const std::string& key, Tuning::Choices& choices);

/// Whether `choice` is one for `key` that the library takes.
bool is_gemm_choice(const std::string& key, const std::string& choice);

}  // namespace tessera::kernels::cuda
