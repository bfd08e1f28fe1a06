#pragma once

#include <string>

#include "kernels/attention/kernel.h"

// Attention by cuDNN behind the same op: private to kernels/attention/attention.cc. The library is
// loaded when it is first asked for; a program starts without it. Not yet run on a GPU: only the
// descriptions of the graphs have been checked.

namespace tessera::kernels {

/// Why there is no cuDNN: not built with its headers, not installed, too old. Empty if there is.
const std::string& cudnn_problem();
/// As cudnnGetVersion() has it: 91501 is 9.15.1; 0 without one.
int64_t cudnn_version();

/// Whether cuDNN may take the problem: bf16 or f16 in rows of 16-byte multiples, no documents, no
/// position bias, a positive scale; no window and no soft-cap, and in the backward nothing that this
/// version of the library is known to compute wrongly (said once in the log); backward: all three
/// gradients, none added to.
bool cudnn_takes(const AttentionFwd& a);
bool cudnn_takes(const AttentionBwd& a);
/// The same of a library of `version`.
bool cudnn_takes(const AttentionBwd& a, int64_t version);

/// Why the backward over so many keys is not right in a version of cuDNN; empty if it is.
std::string cudnn_backward_problem(int64_t version, int64_t num_keys);

/// Why cuDNN is not asked for attention of this kind: the graphs here are of bf16 and f16 and describe
/// neither a window, a soft-cap, documents nor ALiBi. Empty if they describe it.
std::string cudnn_shape_problem(const AttentionShape& s);

/// Submits to a CUDA stream; false if cuDNN has no kernel for the shape (asked once a shape).
/// Scratch memory comes from the stream's allocator.
/// Errors   CudaError that begins with "attention:" if a call fails while a plan is executed
bool cudnn_attention_fwd(const Stream& s, const AttentionFwd& a);
bool cudnn_attention_bwd(const Stream& s, const AttentionBwd& a);

/// Describes the graph to cuDNN as far as that goes without a device. Empty if every description
/// was accepted, else what cuDNN said.
std::string describe_to_cudnn(const AttentionFwd& a);
std::string describe_to_cudnn(const AttentionBwd& a);

}  // namespace tessera::kernels
