#include "dist/fsdp/parts.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "core/log.h"

namespace tessera::dist {
namespace {

Policy agreed_policy(World& world, const FsdpOptions& options) {
  Policy policy;
  world.control().verdict([&] {  // all ranks find the same
    policy = resolve_policy(options, world.world_size(), world.rank(), world.local_size(),
                            Context::current()->options().poison);
  });
  return policy;
}

/// An Error if a parameter is sharded already.
std::shared_ptr<Life> begin_life(nn::Module& root, const World& world) {
  for (const nn::NamedParameter& p : root.named_parameters()) {
    TESSERA_CHECK_AS(ConfigError, !p.parameter->is_sharded,
                     "fully_shard: parameter \"{}\" of {} is sharded already, expected one Fsdp a "
                     "parameter",
                     p.name, root.kind());
  }
  return std::make_shared<Life>(world, root.kind());
}

/// Ignored parameters by name. An Error if there is none of a name.
std::vector<nn::NamedParameter> find_ignored(nn::Module& root, const FsdpOptions& options) {
  if (options.ignored.empty()) return {};
  std::unordered_map<std::string_view, nn::NamedParameter> by_name;
  const std::vector<nn::NamedParameter> all = root.named_parameters(/*with_ties=*/true);
  for (const nn::NamedParameter& p : all) by_name.emplace(p.name, p);
  std::vector<nn::NamedParameter> ignored;
  for (const std::string& name : options.ignored) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) root.parameter(name);  // throws
    ignored.push_back(found->second);
  }
  return ignored;
}

/// The units of the wrap policy without ignored parameters, which get bytes if they have none.
std::vector<UnitSpec> make_specs(nn::Module& root, const FsdpOptions& options,
                                 const std::vector<nn::NamedParameter>& ignored) {
  std::vector<UnitSpec> specs = options.wrap(root);
  std::unordered_set<std::string_view> names;
  for (const nn::NamedParameter& p : ignored) {
    names.insert(p.name);
    const std::shared_ptr<Storage>& storage = p.parameter->tensor.storage();
    if (!storage->is_materialized()) storage->materialize(MemoryClass::kParameters);
  }
  for (UnitSpec& spec : specs) {
    std::erase_if(spec.parameters,
                  [&](const nn::NamedParameter& p) { return names.contains(p.name); });
  }
  std::erase_if(specs, [](const UnitSpec& spec) { return spec.parameters.empty(); });
  TESSERA_CHECK_AS(ConfigError, !specs.empty(), "fully_shard: the model has no parameters");
  return specs;
}

std::vector<std::string> names_of(const std::vector<UnitSpec>& specs) {
  std::vector<std::string> names;
  for (const UnitSpec& spec : specs) names.push_back(spec.name);
  return names;
}

Plan plan_for(const std::vector<UnitSpec>& specs, const ParameterTable& table, const Policy& policy,
              const Lanes& lanes) {
  const auto in_group = [&lanes](int64_t shard_numel, DType wire) {
    return lanes.reducing_comm().reduce_scatter_staging_nbytes(shard_numel, wire,
                                                               /*full_is_allocated=*/true);
  };
  const auto over_replicas = [&](int64_t shard_numel, DType wire) {
    // Gradients from the host are sent from a ring of the offloader's own.
    return lanes.replicate_comm->reduce_scatter_staging_nbytes(shard_numel, wire,
                                                               !policy.offloads_gradients());
  };
  return make_plan(specs, policy, in_group, over_replicas, table);
}

OrderOptions order_options(const Policy& policy) {
  return {policy.options.prefetch_forward, policy.options.prefetch_backward,
          policy.keeps_whole_gradients(), policy.world_size == 1};
}

}  // namespace

FsdpParts::FsdpParts(nn::Module& root_, World& world_, const FsdpOptions& options)
    : root(root_),
      world(world_),
      life(begin_life(root, world)),
      policy(agreed_policy(world, options)),
      scalars(world, policy.is_reproducible()),
      lanes(policy, scalars.comm()),
      ignored(find_ignored(root, policy.options)),
      table(parameter_table(root, policy.options.parameters)),
      specs(make_specs(root, policy.options, ignored)),
      plan(plan_for(specs, table, policy, lanes)),
      runtime(world, units, names_of(specs)),
      order(plan.uses(policy), plan.num_gathered_slots(), order_options(policy), runtime) {
  life->needs_factor = policy.grad_factor != 1;
  for (const nn::NamedParameter& p : ignored) {
    if (p.parameter->tensor.requires_grad()) num_ignored += p.parameter->tensor.numel();
  }
  make_units();
  make_slots();
  make_shards();
  grad_norm = std::make_unique<GradNorm>(units, policy, scalars);
  make_buffers();
  hooks = std::make_unique<Hooks>(root, units, policy, order, *values, life);
}

FsdpParts::~FsdpParts() {
  life->end();
  if (life->num_guards > 0) {
    log_error("fsdp: it ends before {} of its guards (UnshardGuard, NoSync)", life->num_guards);
  }
  hooks.reset();
  for (const auto& unit : units) unit->detach();
  lanes.drain();
}

void FsdpParts::make_units() {
  for (size_t u = 0; u < specs.size(); ++u) {
    units.push_back(std::make_unique<Unit>(specs[u], plan.units[u], lanes));
    units.back()->gradients.is_expected = [this, u] {
      return order.num_calls(static_cast<int>(u)).open > 0;
    };
  }
  Context::current()->allocator()->set_advice(
      [this, alive = std::weak_ptr<Life>(life)](const OutOfMemory& oom) {
        const std::shared_ptr<Life> own = alive.lock();
        return own == nullptr || own->is_over() ? std::string() : memory_advice(*this, oom);
      });
  std::vector<std::string> missing;
  for (const auto& unit : units) {
    const std::vector<std::string> own = unit->shard_parameters();
    missing.insert(missing.end(), own.begin(), own.end());
  }
  values = std::make_unique<Values>(root, ignored, units, std::move(missing), runtime);
}

void FsdpParts::make_slots() {
  for (const PoolPlan& pool : plan.pools) pools.push_back(lanes.make_pool(pool));
  const auto pool_at = [this](int index) {
    return index < 0 ? nullptr : pools[static_cast<size_t>(index)].get();
  };
  for (const auto& unit : units) {
    unit->gathered.set_pool(pool_at(unit->plan().gathered_pool));
    unit->gradients.set_pools(pool_at(unit->plan().gradient_pool),
                              pool_at(unit->plan().piece_pool));
  }
  if (policy.offloads_gradients()) lanes.offloader->make_gradient_ring(plan.host_gradient_numel);
  lanes.make_scratch(plan.scratch);
}

void FsdpParts::make_shards() {
  const MemoryScope scope(MemoryClass::kOther);  // tables of segments
  const auto exchange = lanes.gather_comm == nullptr ? nullptr : std::make_shared<Exchange>(lanes);
  for (const auto& unit : units) {
    for (Group& g : unit->groups()) {
      if (!g.layout.is_trainable) continue;
      const int64_t begin = unit->shard_begin(g);
      optim::FlatShard shard;
      shard.name = unit->name();
      shard.master = g.master;
      shard.grad = g.home_of_grad();
      shard.store = lanes.offloader;
      shard.owner = life;
      if (g.layout.dtype != kF32) shard.low = g.shard;
      shard.optimizer = g.layout.optimizer;
      shard.begin = begin;
      shard.exchange = exchange;
      for (const Placement& p : g.layout.placements) {
        shard.parameters.push_back({p.name, p.shape, p.begin, p.settings.row_blocks,
                                    static_cast<float>(p.settings.lr_scale)});
      }
      shard.segments = segments_in(g.layout, begin, begin + g.shard_numel);
      shards.push_back(std::move(shard));
    }
  }
}

void FsdpParts::make_buffers() {
  std::vector<nn::Module*> owners;
  for (const nn::NamedBuffer& b : root.named_buffers()) {
    if (b.buffer->tensor.storage()->is_materialized()) continue;
    b.buffer->tensor.storage()->materialize(MemoryClass::kParameters);
    if (owners.empty() || owners.back() != b.owner) owners.push_back(b.owner);
  }
  for (nn::Module* owner : owners) owner->reset_buffers();
  const std::optional<DType> dtype = policy.options.precision.buffer_dtype;
  if (!dtype) return;
  // After they have their values: a cast of what was computed in full, not a computation in less.
  const MemoryScope scope(MemoryClass::kParameters);
  for (const nn::NamedBuffer& b : root.named_buffers()) {
    Tensor& tensor = b.buffer->tensor;
    if (is_floating(tensor.dtype())) tensor = tensor.to(*dtype);
  }
}

void FsdpParts::shards_changed() {
  for (int unit = 0; unit < static_cast<int>(units.size()); ++unit) order.expire(unit);
  runtime.shards_changed();
}

}  // namespace tessera::dist
