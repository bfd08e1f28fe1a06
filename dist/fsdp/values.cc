#include "dist/fsdp/values.h"

#include "core/autograd.h"
#include "dist/fsdp/flat_bytes.h"

namespace tessera::dist {
namespace {

/// Calls `f(placement, target, begin)` for each part of a parameter that this rank's shards hold:
/// `target` is its f32 master, or what a frozen group has, from element `begin` of the parameter on.
/// Of a group of codes it is a piece of the values, in f32, which become codes after the call.
template <class F>
void for_each_own_part(Unit& unit, Group& g, const F& f) {
  const int64_t first = unit.shard_begin(g);
  for (size_t i = 0; i < g.layout.placements.size(); ++i) {
    const Placement& p = g.layout.placements[i];
    const Overlap own(first, first + g.shard_numel, p.begin, p.numel);
    if (g.coded != nullptr) g.coded->set_written(i);
    if (own.is_empty()) continue;
    if (g.coded != nullptr) {
      const MemoryScope scope(MemoryClass::kOther);
      const int64_t begin = own.begin - p.begin;
      const Tensor buffer = empty({std::min(own.numel(), Coded::kPieceNumel)});
      for (int64_t at = 0; at < own.numel(); at += Coded::kPieceNumel) {
        const Tensor piece = buffer.narrow(0, 0, std::min(own.numel() - at, Coded::kPieceNumel));
        f(p, piece, begin + at);
        g.coded->write(i, begin + at, piece);
      }
      continue;
    }
    f(p, g.values().narrow(0, own.begin - first, own.numel()), own.begin - p.begin);
  }
}

}  // namespace

Values::Values(nn::Module& root, const std::vector<nn::NamedParameter>& ignored,
               const std::vector<std::unique_ptr<Unit>>& units, std::vector<std::string> missing,
               Issuer& issuer)
    : root_(root), ignored_(ignored), units_(units), missing_(std::move(missing)), issuer_(issuer) {
  for (const nn::NamedParameter& p : ignored) {
    if (!p.parameter->has_values()) empty_ignored_.push_back(p);
  }
}

void Values::initialize(uint64_t seed) {
  for (const nn::NamedParameter& p : empty_ignored_) {
    nn::fill_init(p.parameter->tensor, p.parameter->init, seed, p.name);
  }
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      for_each_own_part(*unit, g, [&](const Placement& p, const Tensor& part, int64_t begin) {
        nn::fill_init(part, p.parameter->init, seed, p.name, begin);
      });
      if (g.has_low_copy()) g.shard.copy_(g.master);
    }
    unit->finish_codes();
  }
  missing_.clear();
}

void Values::load_full(const std::function<Tensor(const std::string&)>& values) {
  const NoGrad no_grad;
  for (const nn::NamedParameter& p : empty_ignored_) {
    Tensor target = p.parameter->tensor;
    if (!p.parameter->has_values()) target.copy_(values(p.name));
  }
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      const int64_t first = unit->shard_begin(g);
      for (size_t i = 0; i < g.layout.placements.size(); ++i) {
        const Placement& p = g.layout.placements[i];
        const Tensor value = values(p.name);
        TESSERA_CHECK_EQ(value.shape(), p.shape, "load_full: {}", p.name);
        const Overlap own(first, first + g.shard_numel, p.begin, p.numel);
        if (g.coded != nullptr) g.coded->set_written(i);
        if (own.is_empty()) continue;
        const Tensor part =
            value.contiguous().view({p.numel}).narrow(0, own.begin - p.begin, own.numel());
        if (g.coded != nullptr) {
          g.coded->write(i, own.begin - p.begin, part);
        } else {
          g.values().narrow(0, own.begin - first, own.numel()).copy_(part);
        }
      }
    }
  }
}

void Values::shards_changed(optim::Optimizer* optimizer) {
  missing_.clear();
  const NoGrad no_grad;
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      if (g.has_low_copy()) g.shard.copy_(g.master);
    }
    unit->finish_codes();
  }
  if (optimizer != nullptr && optimizer->has_stochastic_rounding()) optimizer->round_low();
}

void Values::check(const char* what) {
  if (is_complete_) return;
  std::vector<std::string> missing = missing_;
  for (const nn::NamedParameter& p : empty_ignored_) {
    if (!p.parameter->has_values()) missing.push_back(p.name);
  }
  TESSERA_CHECK(missing.empty(),
                "{}: parameter \"{}\" of {} has no values (and {} more), expected "
                "Fsdp::initialize, Fsdp::load_full or a checkpoint before (Fsdp::shards_changed "
                "after writing shards())",
                what, missing.front(), root_.kind(), missing.size() - 1);
  is_complete_ = true;
}

void Values::for_each_full(Phase what, const OnFull& f) {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    for_each_full_of_unit(unit, what, f);
  }
  if (what != Phase::kMaster) return;
  for (const nn::NamedParameter& p : ignored_) f(p.name, p.parameter->tensor.to(kF32));
}

void Values::for_each_full_of_unit(int index, Phase what, const OnFull& f) {
  const NoGrad no_grad;
  Unit& unit = *units_[static_cast<size_t>(index)];
  const std::vector<Group>& groups = unit.groups();
  const auto is_wanted = [what](const Group& g) {
    return what == Phase::kMaster || g.layout.is_trainable;
  };
  int64_t numel = 0;
  for (const Group& g : groups) numel += is_wanted(g) ? g.layout.numel : 0;
  if (numel == 0) return;
  issuer_.act({ActionKind::kGatherFull, what, index, nbytes_of(numel, kF32)});
  const auto drop = [&] { issuer_.act({ActionKind::kDropFull, Phase::kNone, index}); };
  try {
    for (size_t k = 0; k < groups.size(); ++k) {
      if (!is_wanted(groups[k])) continue;
      for (const Placement& p : groups[k].layout.placements) {
        f(p.name, unit.whole.values(k).narrow(0, p.begin, p.numel).view(p.shape));
      }
    }
  } catch (...) {
    try {
      drop();
    } catch (const InternalError&) {  // what went wrong first is thrown
    }
    throw;
  }
  drop();
}

}  // namespace tessera::dist
