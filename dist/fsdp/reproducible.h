#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "dist/fsdp/options.h"

// [Note: One tree over a step]
// The micro-batches of a step over all ranks are the leaves of one binary tree: leaf = micro-batch
// x ranks + rank. With a power of two of ranks the low bits of a leaf's number are its rank, and
// [Note: Tree over ranks] adds exactly the aligned subtrees of that many leaves. What is left is to
// add those sums as they come, a micro-batch at a time, in the same tree: equal aligned subtrees as
// soon as both are there, like the carries of a binary counter, and at the end what remains, the
// smallest first. So the number of ranks only says which part of the tree is added by whom, and
// the bits are the same. A norm has kReproducibleChunks partial sums a group instead of one a rank;
// [Note: Flat layout] is padded for that many, so that their bounds are the same as well.

namespace tessera::dist {

/// Chunks of a group that have a partial norm of their own, and the most ranks there can be.
inline constexpr int kReproducibleChunks = 64;

/// Errors   ConfigError if `options`, resolved, cannot give the bits of other numbers of ranks
void check_reproducible(const FsdpOptions& options, int world_size);

/// Adds f32 sums of successive micro-batches in the tree of [Note: One tree over a step]. The first
/// one's place is the result; later ones take buffers of their own, at most log2(count) - 1 for a
/// power of two of micro-batches, which stay for the steps that follow. For each micro-batch:
/// `begin`, write or add to `destination()` on a stream, `end` on that stream.
class LeafTree {
 public:
  struct Destination {
    void* data;
    bool accumulate;  ///< the value is to be added to what is there
  };

  /// The next micro-batch; memory that is missing is allocated on the current stream.
  void begin(const Tensor& result);
  Destination destination() const;
  /// Adds the subtrees that are complete, on the stream of `destination()`'s writer.
  void end(const Stream& stream);
  /// Adds what is left: the result is the sum of all.
  void finish(const Stream& stream);
  /// Forgets all.
  void reset();

  int64_t num_leaves() const { return num_leaves_; }
  /// Buffers besides the result.
  int num_buffers() const { return static_cast<int>(buffers_.size()); }

 private:
  const Tensor& buffer(size_t depth) const { return depth == 0 ? result_ : buffers_[depth - 1]; }
  void merge(const Stream& stream);

  Tensor result_;
  std::vector<Tensor> buffers_;  // by depth; the last of subtrees_ is in the one that many deep
  std::vector<int> levels_;      // subtrees not added yet: 2^level micro-batches each
  int64_t num_leaves_ = 0;
  bool is_second_ = false;  // the micro-batch completes a pair and is added to its first
};

/// The sum of `values` (f32, of one shape, one a micro-batch, summed over ranks already) in the
/// tree; on the current stream.
Tensor sum_in_tree(std::span<const Tensor> values);

}  // namespace tessera::dist
