#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/runtime/stream.h"
#include "core/tensor.h"
#include "dist/comm/comm.h"
#include "dist/fsdp/shard.h"
#include "kernels/nf4/nf4.h"

// [Note: Coded groups]
// Frozen parameters may be kept as NF4 codes with double quantisation (kernels/nf4/kernel.h). They
// form a group of their own in the flat layout, whose granule of 256 elements is a record of 132
// bytes: a shard is a run of records, a gather moves records, 0.516 bytes an element, and dequantises
// them into the unit's slot right behind itself, on the same stream. Values exist nowhere else, also
// where a rank has all of the codes (no_shard, one rank): such a unit is "gathered" into a slot as
// under full_shard, without a byte on the wire.
//
// The nested scales and the mean (f32, one for 16,384 elements and one a tensor) stay on every rank:
// what shares a nested scale lies in several shards, so a rank's part of them would be none. They
// follow from the scales of the whole tensor, which the ranks gather once after values were written.
// So codes, scales and values have the same bits for any number of ranks.

namespace tessera::dist {

struct Lanes;

/// Codes and scales of one group on this rank.
class Coded {
 public:
  /// Of elements [begin, begin + numel) of the group. `codes`: memory for them, u8.
  Coded(const GroupLayout& layout, int64_t begin, Tensor codes);

  /// Elements that are quantised at a time where values are made for it: a multiple of a record.
  static constexpr int64_t kPieceNumel = int64_t{1} << 20;

  /// Values [first, first + numel) of a placement, in this rank's part, become codes; `first` is a
  /// multiple of 256. Their scales are kept in f32 until `finish`.
  void write(size_t placement, int64_t first, const Tensor& values);
  /// The placement is being written, in some rank's part: `finish` is due. The same on all ranks.
  void set_written(size_t placement) { is_written_[placement] = true; }
  bool is_finished() const;
  /// Scales of what was written become 8-bit codes. Collective in the shard group.
  void finish(Lanes& lanes, const CollectiveInfo& info);

  /// values[i] = element begin + i of the group, i < numel, from `codes`, its records: in the order
  /// of `stream`. Padding is left as it is.
  void dequantize(const Stream& stream, const Tensor& map, void* values, DType dtype,
                  const void* codes, int64_t begin, int64_t numel) const;

  int64_t begin() const { return begin_; }
  int64_t numel() const { return codes_.numel() / kNf4RecordNbytes * kNf4Record; }
  const Tensor& codes() const { return codes_; }    ///< u8: records of this rank's part
  const Tensor& scales() const { return scales_; }  ///< f32: of all placements, on every rank
  /// Of a placement: the mean, then nested scales.
  Tensor scales(size_t placement) const;

 private:
  const GroupLayout& layout_;
  const int64_t begin_;
  const Tensor codes_;
  Tensor scales_;
  std::vector<int64_t> first_scale_;  // of placements
  Tensor absmax_;                     // of this rank's part; undefined: nothing was written
  std::vector<bool> is_written_;
};

}  // namespace tessera::dist
