#include "dist/fsdp/whole.h"

#include "core/autograd.h"
#include "dist/fsdp/unit.h"

namespace tessera::dist {

void Whole::check(bool is_there, const char* what) const {
  TESSERA_CHECK_AS(InternalError, is_there != values_.empty(),
                   "fsdp: the program says {} of unit \"{}\", whose full values are {}", what,
                   unit_.name(), is_there ? "not there" : "there");
}

void Whole::gather(Phase what, int64_t step) {
  check(false, name_of(ActionKind::kGatherFull));
  const NoGrad no_grad;
  const std::vector<Group>& groups = unit_.groups();
  std::vector<Tensor> values(groups.size());
  for (size_t k = 0; k < groups.size(); ++k) {
    const Group& g = groups[k];
    if (what == Phase::kMaster) {
      values[k] = gather_group(k, master_of(g), step);
    } else if (g.layout.is_trainable) {
      values[k] = gather_group(k, g.home_of_grad(), step);
    }
  }
  values_ = std::move(values);
}

/// This rank's part of what the optimizer updates, or of a frozen group's values, in f32.
Tensor Whole::master_of(const Group& g) const {
  if (g.coded == nullptr) return g.master.is_defined() ? g.master : g.shard.to(kF32);
  const Lanes& lanes = unit_.lanes();
  const Tensor values = zeros({g.shard_numel});
  g.coded->dequantize(lanes.compute, lanes.nf4_map, values.raw_data(), kF32,
                      g.coded->codes().raw_data(), g.coded->begin(), g.shard_numel);
  return values;
}

/// `shard`: this rank's part of the group's f32 values.
Tensor Whole::gather_group(size_t group, Tensor shard, int64_t step) const {
  const Group& g = unit_.groups()[group];
  const Lanes& lanes = unit_.lanes();
  if (lanes.policy.mesh.shard_size == 1) return shard;
  const Tensor full = empty({g.layout.numel}, kF32);
  if (lanes.offloader != nullptr) {  // sent from device memory
    Tensor place = full.narrow(0, unit_.shard_begin(g), g.shard_numel);
    shard = place.copy_(shard);
  }
  lanes.wait(lanes.all_gather, lanes.compute.record(), WaitPoint::kFullReady);
  lanes.gather_comm->all_gather(lanes.all_gather, full.raw_data(), shard.raw_data(), g.shard_numel,
                                kF32,
                                {name_of(ActionKind::kGatherFull), unit_.static_name(), step});
  lanes.wait(lanes.compute, lanes.all_gather.record(), WaitPoint::kFullGathered);
  return full;
}

void Whole::drop() {
  check(true, name_of(ActionKind::kDropFull));
  values_.clear();
}

const Tensor& Whole::values(size_t group) const {
  TESSERA_CHECK_AS(InternalError, !values_.empty(),
                   "fsdp: the program has not gathered the full values of unit \"{}\"",
                   unit_.name());
  return values_[group];
}

}  // namespace tessera::dist
