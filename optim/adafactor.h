#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

/// Options of `Adafactor`.
struct AdafactorOptions {
  double lr = 1e-2;  ///< of `step()`; a schedule passes its own
  double beta2_decay = -0.8;
  double eps1 =
      1.1920928955078125e-07;  ///< least mean square of a row, and root of the least moment
  double eps2 = 1e-3;          ///< least root mean square of a parameter that counts
  double d = 1;                ///< largest root mean square of an update
  double weight_decay = 0;     ///< where the segment decays
  /// Set: low-precision copies are rounded stochastically, with this seed
  /// (`FlatUpdate::rounding_step`).
  std::optional<uint64_t> rounding_seed = std::nullopt;
};

/// Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) with PyTorch's formula: the second moment of a
/// matrix is the product of one value a row and one a column. At step t, with w = t^beta2_decay:
///   row[i] += w (mean_j g[i, j]^2 - row[i]);   col[j] += w (mean_i g[i, j]^2 - col[j])
///   v[i, j] = row[i] col[j] / max(mean(row), eps1)
///   u = g / sqrt(max(v, eps1^2));   rho = min(lr, 1 / sqrt(t))
///   p = p (1 - lr weight_decay) - rho max(eps2, rms(p)) u / max(1, rms(u) / d)
/// For a vector v is a state of its own: v += w (g^2 - v). Of more than two dimensions all but the
/// last are rows.
/// Sharded  gradients are gathered in f32, 4 bytes an element and step times (ranks - 1) / ranks;
///          one rank computes the factors of a parameter, all apply them to their shards. The bits do
///          not depend on the number of ranks.
/// States   "row_var" and "col_var" of matrices, "variance" of vectors (f32), whole on every rank
/// Memory   f32 gradients of the largest group of parameters
/// Errors   ConfigError if an option is out of range
class Adafactor final : public Optimizer {
 public:
  explicit Adafactor(std::vector<FlatShard> shards, const AdafactorOptions& options = {});
  std::vector<NamedState> state() const override { return {}; }
  std::vector<WholeState> whole_state() const override;
  const AdafactorOptions& options() const { return options_; }

 private:
  /// Where the values of a parameter are in `Group::values`.
  struct Factors {
    WholeParameter parameter;
    int64_t rows, cols;  // rows 0: a vector, whose second moments are the columns
    int64_t begin;       // rows, columns, and two scalars
    int owner;
  };
  struct Group {
    std::vector<Factors> factors;
    Tensor values, next;  // f32; `next` is zero but for what this rank computes
    Tensor places;        // i64 [S, 5], `AdafactorApply::places`
  };
  void update(const StepScalars& step) override;
  void update_group(size_t index, const StepScalars& step);

  AdafactorOptions options_;
  std::vector<Group> groups_;  // of the shards
  Tensor part_, squares_part_, whole_, squares_, workspace_;
};

}  // namespace tessera::optim
