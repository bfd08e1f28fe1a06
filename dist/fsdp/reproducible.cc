#include "dist/fsdp/reproducible.h"

#include <bit>

#include "core/settings.h"
#include "dist/fsdp/flat_bytes.h"

namespace tessera::dist {

void check_reproducible(const FsdpOptions& options, int world_size) {
  constexpr const char* kField = "FsdpOptions::reproducible";
  check_option(
      std::has_single_bit(static_cast<unsigned>(world_size)) && world_size <= kReproducibleChunks,
      kField, "{} ranks, expected a power of two up to {}", world_size, kReproducibleChunks);
  check_option(options.strategy != Strategy::kShardOptim, kField,
               "strategy is shard_optim, which adds the micro-batches before the ranks; expected "
               "another one");
  const GradSync sync = options.sync_every_micro_batch.value_or(GradSync::kEveryMicroBatch);
  check_option(sync == GradSync::kEveryMicroBatch, kField,
               "sync_every_micro_batch is {}, expected true", name_of(sync));
}

// ---- the tree over micro-batches

void LeafTree::begin(const Tensor& result) {
  result_ = result;
  is_second_ = num_leaves_ % 2 == 1;
  if (!is_second_) {
    levels_.push_back(0);
    if (levels_.size() > buffers_.size() + 1) buffers_.push_back(empty_like(result));
  }
  ++num_leaves_;
}

LeafTree::Destination LeafTree::destination() const {
  return {buffer(levels_.size() - 1).raw_data(), is_second_};
}

void LeafTree::end(const Stream& stream) {
  if (is_second_) ++levels_.back();
  while (levels_.size() > 1 && levels_.back() == levels_[levels_.size() - 2]) {
    merge(stream);
    ++levels_.back();
  }
}

void LeafTree::finish(const Stream& stream) {
  while (levels_.size() > 1) merge(stream);
}

void LeafTree::reset() {
  levels_.clear();
  num_leaves_ = 0;
}

/// The newest subtree is added to the one before it.
void LeafTree::merge(const Stream& stream) {
  const Tensor &to = buffer(levels_.size() - 2), &from = buffer(levels_.size() - 1);
  cast_flat(stream, to.raw_data(), kF32, from.raw_data(), kF32, to.numel(), /*accumulate=*/true);
  levels_.pop_back();
}

Tensor sum_in_tree(std::span<const Tensor> values) {
  TESSERA_CHECK(!values.empty(), "sum_in_tree: no values");
  const Stream stream = current_stream();
  Tensor sum = empty_like(values[0]);
  LeafTree tree;
  for (const Tensor& value : values) {
    tree.begin(sum);
    const auto [data, accumulate] = tree.destination();
    cast_flat(stream, data, kF32, value.raw_data(), kF32, value.numel(), accumulate);
    tree.end(stream);
  }
  tree.finish(stream);
  return sum;
}

}  // namespace tessera::dist
