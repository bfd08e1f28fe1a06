#include "dist/fsdp/guards.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "core/log.h"
#include "dist/fsdp/parts.h"

namespace tessera::dist {
namespace {

std::vector<uint32_t> versions_of(Unit& unit) {
  std::vector<uint32_t> versions;
  for (const Group& g : unit.groups()) {
    for (const Placement& p : g.layout.placements) {
      versions.push_back(*p.parameter->tensor.impl()->version);
    }
  }
  return versions;
}

}  // namespace

// ---- unshard

UnshardGuard::UnshardGuard(Fsdp& fsdp, std::string_view unit, Access access)
    : parts_(parts_of(fsdp)), life_(parts_.life), access_(access) {
  std::string names;
  for (size_t u = 0; u < parts_.units.size(); ++u) {
    const std::string& name = parts_.units[u]->name();
    if (name == unit) {
      hold(u);
      return;
    }
    names += fmt::format("{}{}", names.empty() ? "" : ", ", name);
  }
  throw Error(fmt::format("unshard: no unit is called \"{}\"; there are {}", unit, names));
}

UnshardGuard::UnshardGuard(Fsdp& fsdp, nn::Module& module, Access access)
    : parts_(parts_of(fsdp)), life_(parts_.life), access_(access) {
  std::unordered_set<const nn::Parameter*> used;
  for (const nn::NamedParameter& p : module.named_parameters()) used.insert(p.parameter);
  for (size_t u = 0; u < parts_.units.size(); ++u) {
    const auto& own = parts_.units[u]->spec().parameters;
    const bool is_used = std::any_of(own.begin(), own.end(), [&](const nn::NamedParameter& p) {
      return used.contains(p.parameter);
    });
    if (is_used) hold(u);
  }
}

void UnshardGuard::hold(size_t unit) {
  life_->check_open("UnshardGuard");
  if (access_ == Access::kRead) parts_.values->check("UnshardGuard");
  const Order::Before before = parts_.order.hold(static_cast<int>(unit));
  ++life_->num_guards;
  held_.push_back({unit, before.was_gathered, before.was_open, versions_of(*parts_.units[unit])});
}

UnshardGuard::~UnshardGuard() {
  life_->num_guards -= static_cast<int>(held_.size());
  if (life_->is_over()) return;  // with its units; it said so
  try {
    while (!held_.empty()) {
      const Held held = std::move(held_.back());
      held_.pop_back();
      end_hold(held);
    }
  } catch (const std::exception& error) {  // a stream is poisoned; synchronize says so too
    log_error("unshard: {}", error.what());
  }
}

void UnshardGuard::end_hold(const Held& held) {
  Unit& unit = *parts_.units[held.unit];
  const bool is_write = access_ == Access::kWrite;
  if (is_write) {
    const std::vector<uint32_t> now = versions_of(unit);
    std::vector<bool> is_written;
    for (size_t i = 0; i < now.size(); ++i) is_written.push_back(now[i] != held.versions[i]);
    unit.write_shards(is_written);
    size_t index = 0;
    for (const Group& g : unit.groups()) {
      for (const Placement& p : g.layout.placements) {
        if (is_written[index++]) parts_.values->set_given(p.name);
      }
    }
  }
  parts_.order.end_hold(static_cast<int>(held.unit), {held.was_gathered, held.was_open}, is_write);
  if (is_write) parts_.runtime.shards_changed();
}

// ---- no_sync

NoSync::NoSync(Fsdp& fsdp) : parts_(parts_of(fsdp)), life_(parts_.life) {
  life_->check("NoSync");
  TESSERA_CHECK_AS(ConfigError, !parts_.policy.is_reproducible(),
                   "no_sync: not in reproducible mode, which reduces every micro-batch");
  ++parts_.order.accumulation.num_no_sync;
  ++life_->num_guards;
}
NoSync::~NoSync() {
  --life_->num_guards;
  if (!life_->is_over()) --parts_.order.accumulation.num_no_sync;
}

}  // namespace tessera::dist
