#pragma once

#include "optim/adamw.h"

namespace tessera::optim {

/// AdamW whose moments are kept in 8 bits, block-wise (Dettmers et al. 2022, arXiv:2110.02861):
/// 256 elements share a scale, the map is bitsandbytes' ([Note: Eight-bit states] in
/// kernels/optimizer/dynamic_map.h). The formula is AdamW's. Blocks lie in one parameter and one
/// shard, so that the bits do not depend on sharding.
/// States   "exp_avg", "exp_avg_sq" (u8 codes) and "exp_avg_absmax", "exp_avg_sq_absmax" (f32 for
///          256 elements): 2.03 bytes per element
/// Errors   ConfigError if an option is out of range; Error for a segment that begins elsewhere than
///          at a multiple of 256
class AdamW8bit final : public Optimizer {
 public:
  explicit AdamW8bit(std::vector<FlatShard> shards, const AdamWOptions& options = {});
  std::vector<NamedState> state() const override { return {states_, states_ + 4}; }
  const AdamWOptions& options() const { return options_; }

 private:
  void update_shard(const FlatUpdate& update, std::span<const Tensor> states) override;

  AdamWOptions options_;
  NamedState states_[4];
  Tensor maps_;
};

}  // namespace tessera::optim
