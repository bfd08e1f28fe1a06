#include "core/check.h"
#include "kernels/rank_reduce/kernel.h"

namespace tessera::kernels {

Cost RankReduce::cost() const {
  const auto nbytes = [this](DType dtype) { return numel * static_cast<int64_t>(size_of(dtype)); };
  const int num_others = num_ranks - 1;
  Cost cost(static_cast<double>(numel) * (num_others + (accumulate ? 1 : 0)));
  cost.read(own, nbytes(src_dtype));
  if (num_others > 0) cost.read(others, (num_others - 1) * others_stride + nbytes(src_dtype));
  return cost.write_or_accumulate(dst, nbytes(dst_dtype), accumulate);
}

void check_reduce_dtypes(Reduction reduction, DType src, DType dst, bool accumulate) {
  if (reduction == Reduction::kSum) {
    TESSERA_CHECK_DTYPE(is_floating(src) && is_floating(dst),
                        "tree_reduce: a sum is of floating dtypes, got {} and {}", src, dst);
    return;
  }
  TESSERA_CHECK_DTYPE(src == kF32 || src == kI32 || src == kU8,
                      "tree_reduce: a maximum is f32, i32 or u8, got {}", src);
  TESSERA_CHECK_DTYPE(src == dst && !accumulate, "tree_reduce: a maximum stays {}, got {}", src,
                      dst);
}

TESSERA_DEFINE_KERNEL(rank_reduce, RankReduce);

}  // namespace tessera::kernels
