#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/shape.h"
#include "dist/checkpoint/hf_config.h"

namespace tessera::dist {

/// `num_rows` rows of a parameter of ours from `row` on are those of the other tensor from
/// `hf_row` on.
struct HfRows {
  int64_t row = 0, hf_row = 0, num_rows = 0;
};

/// A tensor of transformers that feeds (a part of) one parameter of ours.
struct HfTensor {
  std::string name;
  Shape shape;
  /// Stored [columns, rows] (GPT-2's Conv1D): a "row" above is then a column of it.
  bool is_transposed = false;
  std::vector<HfRows> rows;  ///< all of its rows, in the order of ours
};

/// One parameter of ours as a matrix of rows (a vector: rows of one element), and where each of its
/// rows comes from. Projections that we keep packed come from several tensors (q, k, v; gate, up)
/// or from one with another order (BLOOM's q, k, v of each head).
struct HfParameter {
  std::string name;
  Shape shape;
  std::vector<HfTensor> sources;

  int64_t cols() const { return shape.num_dims() < 2 ? 1 : shape.numel() / shape[0]; }
};

/// Every parameter of the model, in the order of its modules; tied ones once.
std::vector<HfParameter> hf_parameters(const HfModelConfig& config);

/// Whether a file may have a tensor of this name that nobody needs: masks and frequencies that are
/// computed, the head of a model whose head is tied.
bool is_derived_hf_tensor(const HfModelConfig& config, std::string_view name);

}  // namespace tessera::dist
