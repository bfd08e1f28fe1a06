#pragma once

#include "core/enum_names.h"
#include "kernels/orthogonalize/orthogonalize.h"
#include "optim/optimizer.h"

namespace tessera::optim {

/// What multiplies the orthogonal matrix.
enum class MuonScale : unsigned char {
  kOriginal,       ///< sqrt(max(1, rows / columns)): rates near 0.02
  kMatchRmsAdamW,  ///< 0.2 sqrt(max(rows, columns)): rates and decays of AdamW
};
constexpr auto enum_names(MuonScale) {
  return std::to_array<EnumName<MuonScale>>(
      {{MuonScale::kOriginal, "original"}, {MuonScale::kMatchRmsAdamW, "match_rms_adamw"}});
}

/// Options of `Muon`.
struct MuonOptions {
  double lr = 1e-3;  ///< of `step()`; a schedule passes its own
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.1;  ///< where the segment decays
  MuonCoefficients coefficients = MuonCoefficients::kOriginal;
  MuonScale scale = MuonScale::kMatchRmsAdamW;
  /// Set: low-precision copies are rounded stochastically, with this seed
  /// (`FlatUpdate::rounding_step`).
  std::optional<uint64_t> rounding_seed = std::nullopt;
};

/// Muon (Jordan et al. 2024) for matrices, with PyTorch's formula and its bf16 operands:
///   b = b + (1 - momentum) (g - b);   d = g + momentum (b - g), or b without Nesterov
///   p -= lr weight_decay p;   p -= lr scale orthogonalize(bf16(d))
/// Each of `WholeParameter::row_blocks` is a matrix of its own.
/// Sharded  the shards' directions are gathered in bf16, each matrix is orthogonalized by one rank of
///          the shard group, and each rank is sent its part: 4 bytes an element and step, times
///          (ranks - 1) / ranks, whatever the micro-batches. The next shard's directions and
///          the last one's results travel while this one's matrices are computed. The bits do not
///          depend on the number of ranks.
/// States   "momentum_buffer" (b): 4 bytes per element
/// Memory   bf16 directions and results of two groups of parameters as large as the largest
/// Errors   ConfigError if an option is out of range, or for a parameter that is no matrix
class Muon final : public Optimizer {
 public:
  explicit Muon(std::vector<FlatShard> shards, const MuonOptions& options = {});
  std::vector<NamedState> state() const override { return {momentum_buffer_}; }
  const MuonOptions& options() const { return options_; }

 private:
  /// A matrix of a group: elements from `begin` on.
  struct Matrix {
    int64_t begin, rows, cols;
    int owner;
  };
  /// One shard's directions and results on their way.
  struct Slot {
    Tensor part, whole, result, update;  // bf16; `part` and `update` of the shard
    Event is_here, is_back;              // the directions, the results
  };
  void update(const StepScalars& step) override;
  void collect(size_t shard, const StepScalars& step, Slot& slot);
  void compute(size_t shard, Slot& slot);
  void apply(size_t shard, const StepScalars& step, const Slot& slot);
  Slot& slot_of(size_t shard) { return slots_[shard % 2]; }

  MuonOptions options_;
  NamedState momentum_buffer_;
  std::vector<std::vector<Matrix>> matrices_;  // of the shards
  std::vector<Tensor> scales_;                 // f32, of the shards' segments
  Slot slots_[2];
};

}  // namespace tessera::optim
