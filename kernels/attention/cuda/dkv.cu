#include "kernels/attention/cuda/flash.h"
#include "kernels/attention/cuda/flash_bwd.cuh"

namespace tessera::kernels::cuda {

void flash_dkv(CUstream_st* stream, const AttentionBwd& a) {
  visit_flash(a.shape, [&]<class T, int kWidth>() { launch_flash_dkv<T, kWidth>(stream, a); });
}

}  // namespace tessera::kernels::cuda
