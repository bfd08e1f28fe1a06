#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/check.h"
#include "core/runtime/stream.h"
#include "core/tensor.h"
#include "optim/flat_shard.h"

namespace tessera::optim {

/// What an optimizer that looks at whole parameters needs of the ranks that share a group of
/// parameters. Implemented where the world is known. Every rank makes the same calls in the same
/// order; each call is enqueued behind what the current stream has been given and returns at once;
/// its result may be read after the event. Buffers stay until then.
class ShardExchange {
 public:
  virtual ~ShardExchange() = default;

  /// Ranks that share the work on whole parameters, and which of them this is.
  virtual int num_owners() const = 0;
  virtual int owner() const = 0;

  /// whole = the shards of all ranks in order.
  virtual Event gather_shards(const Tensor& whole, const Tensor& shard) = 0;
  /// shard = this rank's part of the sum of all ranks' `whole`: where one rank has a value and the
  /// others 0, that value.
  virtual Event scatter_sum(const Tensor& shard, const Tensor& whole) = 0;
  /// values (f32) = the sum over the ranks, in the fixed tree of a reduce; the same on all.
  virtual Event sum(const Tensor& values) = 0;
};

/// Ranks that share the work on the shard's whole parameters, and which of them this is.
inline int num_owners(const FlatShard& shard) {
  return shard.exchange == nullptr ? 1 : shard.exchange->num_owners();
}
inline int this_owner(const FlatShard& shard) {
  return shard.exchange == nullptr ? 0 : shard.exchange->owner();
}

/// What an optimizer keeps of the parameter that a segment is a part of: the one of `all` that has
/// its name, by `name_of`.
/// Errors   InternalError if the shard has a part of a parameter that it does not know whole
template <class T, class NameOf>
const T& of_parameter(const char* optimizer, const FlatShard& shard, const Segment& segment,
                      const std::vector<T>& all, const NameOf& name_of) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const T& candidate) {
    return name_of(candidate) == segment.parameter;
  });
  TESSERA_CHECK_AS(InternalError, found != all.end(),
                   "{}: shard {} has a part of {}, which it does not know", optimizer, shard.name,
                   segment.parameter);
  return *found;
}

/// Who takes the next piece of work: the owner that has the least, which gets `amount` more.
inline int give_to_least(std::vector<double>& work, double amount) {
  const auto least = std::min_element(work.begin(), work.end());
  *least += amount;
  return static_cast<int>(least - work.begin());
}

}  // namespace tessera::optim
