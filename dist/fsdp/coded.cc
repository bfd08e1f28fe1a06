#include "dist/fsdp/coded.h"

#include <algorithm>

#include "core/autograd.h"
#include "dist/fsdp/flat_bytes.h"
#include "dist/fsdp/lanes.h"
#include "kernels/nf4/kernel.h"

namespace tessera::dist {

Coded::Coded(const GroupLayout& layout, int64_t begin, Tensor codes)
    : layout_(layout),
      begin_(begin),
      codes_(std::move(codes)),
      is_written_(layout.placements.size(), false) {
  scales_ = zeros({num_scales(layout)});
  int64_t first = 0;
  for (const Placement& p : layout.placements) {
    first_scale_.push_back(first);
    first += nf4_num_scales(p.numel);
  }
}

Tensor Coded::scales(size_t placement) const {
  return scales_.narrow(0, first_scale_[placement],
                        nf4_num_scales(layout_.placements[placement].numel));
}

bool Coded::is_finished() const {
  return std::none_of(is_written_.begin(), is_written_.end(), [](bool written) { return written; });
}

void Coded::write(size_t placement, int64_t first, const Tensor& values) {
  const Placement& p = layout_.placements[placement];
  const int64_t at = p.begin + first - begin_, count = values.numel();
  TESSERA_CHECK_AS(InternalError, first % kNf4Record == 0 && at >= 0 && at + count <= numel(),
                   "fsdp: values [{}, {}) of {}, expected some of this rank's, from a multiple of "
                   "{} on",
                   first, first + count, p.name, kNf4Record);
  if (!absmax_.is_defined()) {
    const MemoryScope scope(MemoryClass::kOther);
    absmax_ = zeros({numel() / kNf4Block});
  }
  nf4_quantize(codes_.narrow(0, nf4_nbytes(at), nf4_nbytes(count)),
               absmax_.narrow(0, at / kNf4Block, nf4_num_blocks(count)), values);
  set_written(placement);
}

void Coded::finish(Lanes& lanes, const CollectiveInfo& info) {
  if (is_finished()) return;
  const NoGrad no_grad;
  const MemoryScope scope(MemoryClass::kOther);
  Tensor own = absmax_.is_defined() ? absmax_ : zeros({numel() / kNf4Block}), all = own;
  if (lanes.gather_comm != nullptr) {
    all = empty({layout_.numel / kNf4Block});
    lanes.wait(lanes.all_gather, lanes.compute.record(), WaitPoint::kFullReady);
    lanes.gather_comm->all_gather(lanes.all_gather, all.raw_data(), own.raw_data(), own.numel(),
                                  kF32, info);
    lanes.wait(lanes.compute, lanes.all_gather.record(), WaitPoint::kFullGathered);
  }
  for (size_t i = 0; i < is_written_.size(); ++i) {
    if (!is_written_[i]) continue;
    const Placement& p = layout_.placements[i];
    const Overlap mine(begin_, begin_ + numel(), p.begin, p.numel);
    const int64_t first = mine.is_empty() ? 0 : mine.begin - p.begin;
    const int64_t count = mine.is_empty() ? 0 : mine.numel();
    nf4_compress(
        codes_.narrow(0, mine.is_empty() ? 0 : nf4_nbytes(mine.begin - begin_), nf4_nbytes(count)),
        scales(i), all.narrow(0, p.begin / kNf4Block, nf4_num_blocks(p.numel)), lanes.nf4_map,
        first);
  }
  absmax_ = {};
  is_written_.assign(is_written_.size(), false);
}

void Coded::dequantize(const Stream& stream, const Tensor& map, void* values, DType dtype,
                       const void* codes, int64_t begin, int64_t numel) const {
  for (size_t i = 0; i < layout_.placements.size(); ++i) {
    const Placement& p = layout_.placements[i];
    const Overlap part(begin, begin + numel, p.begin, p.numel);
    if (part.is_empty()) continue;
    const int64_t at = part.begin - begin;
    const float* const mean = scales(i).data<float>();
    kernels::nf4_dequantize(stream, {.values = static_cast<char*>(values) + nbytes_of(at, dtype),
                                     .records = static_cast<const uint8_t*>(codes) + nf4_nbytes(at),
                                     .nested = mean + 1,
                                     .mean = mean,
                                     .map = map.data<float>(),
                                     .dtype = dtype,
                                     .first_record = (part.begin - p.begin) / kNf4Record,
                                     .numel = part.numel()});
  }
}

}  // namespace tessera::dist
