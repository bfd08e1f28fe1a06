#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/shape.h"

// Which tensors of transformers a model's parameters are made of.

namespace tessera::nn {

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
/// or from one with another order (q, k, v of each head).
struct HfParameter {
  std::string name;
  Shape shape;
  std::vector<HfTensor> sources;

  int64_t cols() const { return shape.num_dims() < 2 ? 1 : shape.numel() / shape[0]; }
};

/// Builds the list of a model's parameters, in the order of its modules, tied ones once: each call
/// adds a parameter from whole tensors, one after the other.
class HfParameterList {
 public:
  /// A source of `num_rows` rows.
  struct Part {
    std::string name;
    int64_t num_rows;
  };

  void matrix(const std::string& name, int64_t cols, const std::vector<Part>& parts,
              bool is_transposed = false);
  void vector(const std::string& name, const std::vector<Part>& parts);
  /// weight, and bias if it has one.
  void norm(const std::string& name, const std::string& hf_name, int64_t width, bool has_bias);
  /// The rows of a source of the last one in another order.
  void set_rows(std::vector<HfRows> rows, size_t source = 0) {
    all_.back().sources[source].rows = std::move(rows);
  }

  std::vector<HfParameter> take() { return std::move(all_); }

 private:
  std::vector<HfParameter> all_;
};

}  // namespace tessera::nn
