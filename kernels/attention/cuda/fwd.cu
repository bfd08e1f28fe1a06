#include "kernels/attention/cuda/flash.h"
#include "kernels/attention/cuda/flash_fwd.cuh"

namespace tessera::kernels::cuda {

void flash_fwd(CUstream_st* stream, const AttentionFwd& a) {
  visit_flash(a.shape, [&]<class T, int kWidth>() { launch_flash_fwd<T, kWidth>(stream, a); });
}

}  // namespace tessera::kernels::cuda
