#include "kernels/attention/cuda/flash.h"
#include "kernels/attention/cuda/flash_bwd.cuh"

namespace tessera::kernels::cuda {

void flash_dq(CUstream_st* stream, const AttentionBwd& a) {
  visit_flash(a.shape, [&]<class T, int kWidth>() { launch_flash_dq<T, kWidth>(stream, a); });
}

}  // namespace tessera::kernels::cuda
