#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/ptx.cuh"
#include "test/cuda/ptx_kernels.h"

namespace tessera::testing::TESSERA_CUDA_BODY {
namespace {

using namespace tessera::cuda;

/// One warp. Shared memory: a [16, 16], b [16, 8], bt [8, 16], and a again for the copy with zeros.
template <class T>
__global__ void __launch_bounds__(kLanes) ptx_kernel(PtxOut* out, const PtxIn* in) {
  const auto lane = static_cast<int>(threadIdx.x);
  auto* a = dynamic_smem<uint16_t>();
  auto* b = dynamic_smem<uint16_t>(512);
  auto* bt = dynamic_smem<uint16_t>(768);
  auto* zeroed = dynamic_smem<uint32_t>(1024);
  cp_async_16(a + 8 * lane, in->a + 8 * lane);
  if (lane < 16) {
    cp_async_16(b + 8 * lane, in->b + 8 * lane);
    cp_async_16(bt + 8 * lane, in->bt + 8 * lane);
  }
  cp_async_16(zeroed + 4 * lane, in->a + 8 * lane, lane % 2 == 0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  // Lane l gives row l % 8 of matrix l / 8; the matrices are a's quarters, upper ones first.
  const uint16_t* a_row = a + lane % 16 * 16 + lane / 16 * 8;
  uint32_t ra[4], ra_trans[4], rb[2], rbt[2];
  ldmatrix_x4(ra, a_row);
  ldmatrix_x4_trans(ra_trans, a_row);
  ldmatrix_x2_trans(rb, b + lane % 16 * 8);
  ldmatrix_x2(rbt, bt + lane % 8 * 16 + lane / 8 % 2 * 8);
  float c[4], d[4], dt[4];
  for (int i = 0; i < 4; ++i) c[i] = in->c[i][lane];
  mma_m16n8k16<T>(d, ra, rb, c);
  mma_m16n8k16<T>(dt, ra, rbt, c);
  for (int i = 0; i < 4; ++i) {
    out->a[i][lane] = ra[i];
    out->a_trans[i][lane] = ra_trans[i];
    out->d[i][lane] = d[i];
    out->dt[i][lane] = dt[i];
    out->copied[i][lane] = zeroed[4 * lane + i];
  }
  for (int i = 0; i < 2; ++i) {
    out->b[i][lane] = rb[i];
    out->bt[i][lane] = rbt[i];
  }
  const float x = in->x[lane];
  out->packed[lane] = pack2<T>(x, x * -0.3f);
  out->exp2[lane] = exp2_approx(x);
  out->log2[lane] = log2_approx(x);
  out->rcp[lane] = rcp_approx(x);
}

template <class T>
void run_ptx(PtxOut* out, const PtxIn* in) {
  constexpr size_t kSmemBytes = 1024 + 512;
  launch("ptx", ptx_kernel<T>, LaunchConfig{dim3(1), dim3(kLanes), kSmemBytes, nullptr}, out, in);
}

}  // namespace

void run_ptx_bf16(PtxOut* out, const PtxIn* in) {
  run_ptx<BFloat16>(out, in);
}
void run_ptx_f16(PtxOut* out, const PtxIn* in) {
  run_ptx<Float16>(out, in);
}

}  // namespace tessera::testing::TESSERA_CUDA_BODY
