#include "dist/fsdp/grad_norm.h"

#include <limits>

#include "core/elementary/kernel.h"
#include "kernels/loss_scale/loss_scale.h"
#include "kernels/reduce/reduce.h"

namespace tessera::dist {

GradNorm::GradNorm(const std::vector<std::unique_ptr<Unit>>& units, const Policy& policy,
                   Scalars& scalars)
    : units_(units), policy_(policy), scalars_(scalars) {
  const MemoryScope scope(MemoryClass::kOther);  // tables of segments
  const int64_t num_chunks = policy.num_norm_chunks();
  for (const auto& unit : units) {
    if (unit->plan().is_trainable()) unit_groups_.push_back({unit->name()});
    for (Group& g : unit->groups()) {
      if (!g.layout.is_trainable) continue;
      ++unit_groups_.back().num_groups;
      const int64_t begin = unit->shard_begin(g), own = begin + unit->own_begin(g);
      const int64_t numel = unit->own_numel(g) / num_chunks;
      for (int64_t c = 0; c < num_chunks; ++c) {
        const int64_t first = own + c * numel;
        std::vector<tessera::Segment> segments;
        for (const optim::Segment& s : segments_in(g.layout, first, first + numel)) {
          segments.push_back({s.begin, s.end});
        }
        parts_.push_back(
            {&g, g.grad.narrow(0, first - begin, numel), segments_to_device(segments, numel)});
      }
    }
  }
}

void GradNorm::take_partial(const Part& part, const Tensor& into, double p) {
  HostGradient* const host = part.group->host_grad.get();
  const Stream compute = current_stream();
  Offloader* const offloader = host != nullptr ? units_.front()->lanes().offloader.get() : nullptr;
  if (host != nullptr) {
    offloader->bring(*host, part.group->grad, /*with_values=*/true);
    offloader->wait(compute, host->is_here, OffloadWait::kNormHere);
  }
  partial_norm(into, part.grad, part.segments, p);
  if (host != nullptr) offloader->drop(*host, part.group->grad);
}

ClippedNorm GradNorm::take(double max_norm, double p, const Tensor& loss_scale, int64_t step) {
  for (const auto& unit : units_) {
    TESSERA_CHECK_AS(InternalError, !unit->plan().is_trainable() || unit->gradients.is_complete(),
                     "clip_grad_norm: the gradients of unit \"{}\" are not complete", unit->name());
  }
  const auto num_parts = static_cast<int64_t>(parts_.size());
  const int64_t shard_size = policy_.mesh.shard_size, replicas = policy_.mesh.replicate_size;
  const int64_t chunks = policy_.num_norm_chunks(), num_groups = num_parts / chunks;
  Tensor all = empty({num_parts * policy_.world_size}, kF64);
  Comm& comm = scalars_.comm();
  const Tensor mine = all.narrow(0, comm.rank() * num_parts, num_parts);
  for (int64_t i = 0; i < num_parts; ++i) {
    take_partial(parts_[static_cast<size_t>(i)], mine.narrow(0, i, 1), p);
  }
  const Stream compute = current_stream();
  if (policy_.world_size > 1) {
    comm.all_gather(compute, all.raw_data(), mine.raw_data(), num_parts, kF64,
                    {"grad_norm", "", step});
  }
  const Tensor ordered = empty({num_groups, shard_size, replicas, chunks}, kF64);
  kernels::copy(compute, {ordered.raw_data(),
                          all.raw_data(),
                          kF64,
                          kF64,
                          ordered.shape(),
                          ordered.strides(),
                          {chunks, num_parts, shard_size * num_parts, 1},
                          false});
  ClippedNorm clip{empty({}, kF32), empty({}, kF32), empty({}, kU8)};
  clip.partials = ordered;
  combine_norms(clip.norm, ordered.view({-1}), p);
  unscale_norm(clip.norm, clip.factor, clip.found_inf, loss_scale, policy_.grad_factor,
               max_norm > 0 ? max_norm : std::numeric_limits<double>::infinity());
  return clip;
}

UnitNorms GradNorm::by_unit(const ClippedNorm& clip, double p, const Tensor& loss_scale) const {
  UnitNorms all;
  all.norms = empty({std::ssize(unit_groups_)}, kF32);
  const Tensor factor = empty({}, kF32), found_inf = empty({}, kU8);  // of no interest
  int64_t first = 0;
  for (const UnitGroups& u : unit_groups_) {
    const Tensor norm = all.norms.narrow(0, std::ssize(all.units), 1);
    combine_norms(norm, clip.partials.narrow(0, first, u.num_groups).view({-1}), p);
    unscale_norm(norm, factor, found_inf, loss_scale, policy_.grad_factor,
                 std::numeric_limits<double>::infinity());
    first += u.num_groups;
    all.units.push_back(u.unit);
  }
  return all;
}

}  // namespace tessera::dist
