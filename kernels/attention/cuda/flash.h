#pragma once

#include "kernels/attention/kernel.h"

// The kernels for tensor cores, bf16 and f16, each in a source of its own (they compile side by
// side). Private to kernels/attention/cuda/attention.cu.

namespace tessera::kernels::cuda {

void flash_fwd(CUstream_st* stream, const AttentionFwd& a);
/// Both need the statistics in a.workspace (attention_stats_kernel).
void flash_dq(CUstream_st* stream, const AttentionBwd& a);
void flash_dkv(CUstream_st* stream, const AttentionBwd& a);

}  // namespace tessera::kernels::cuda
