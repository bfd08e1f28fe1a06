#pragma once

#include <functional>
#include <vector>

#include "core/tensor.h"
#include "kernels/matmul/kernel.h"

namespace tessera::apps {

/// The products of cuBLASLt in a step, as they could be had without a framework: the same shapes,
/// epilogues, order and algorithms, submitted back to back.
class GemmSequence {
 public:
  /// Runs `step` and keeps the products that it gave to cuBLASLt, on any thread.
  static GemmSequence record(const std::function<void()>& step);

  /// Submits them to the current stream, whose device is CUDA. They work on memory of the sequence,
  /// as much as the largest operands take; all share it, so what fits the L2 may be found there.
  void submit() const;

  const std::vector<kernels::Matmul>& products() const { return products_; }

 private:
  void move_to_own_memory();

  std::vector<kernels::Matmul> products_;
  std::vector<Tensor> memory_;
};

}  // namespace tessera::apps
