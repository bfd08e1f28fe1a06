#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/tensor.h"
#include "dist/fsdp/program.h"

namespace tessera::dist {

struct Group;
class Unit;

/// The f32 values of a unit, gathered whole for one who reads them (`Fsdp::for_each_full`). The
/// verbs are actions of a program. A gather takes 4 bytes an element until it is dropped, but where
/// the shard is the whole.
class Whole {
 public:
  explicit Whole(Unit& unit) : unit_(unit) {}

  /// Phase::kMaster: what the optimizer updates, of a frozen group what it has; Phase::kGradient:
  /// the gradient shards. Tasks of the compute stream can read them after it.
  void gather(Phase what, int64_t step);
  void drop();
  /// Of a group, [layout.numel]; undefined of a frozen group's gradient. InternalError if nothing is
  /// gathered.
  const Tensor& values(size_t group) const;

 private:
  void check(bool is_there, const char* what) const;
  Tensor gather_group(size_t group, Tensor shard, int64_t step) const;
  Tensor master_of(const Group& g) const;

  Unit& unit_;
  std::vector<Tensor> values_;  // empty: nothing is gathered
};

}  // namespace tessera::dist
