#pragma once

#include "nn/module.h"

namespace tessera::nn {

/// Rows of a table.
/// Shapes   ids i32 | i64 [...], weight [V, C] -> [..., C]
class Embedding : public Module {
 public:
  Embedding(int64_t num_rows, int64_t width, const Init& init = Init::normal(0, 1));

  Tensor forward(const Tensor& ids);

  std::string kind() const override;
  const Tensor& weight() const { return weight_; }

 private:
  Tensor& weight_;
};

}  // namespace tessera::nn
