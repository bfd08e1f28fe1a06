// What a Scheduler is made of: settings, streams and communicators, units, slots and shards.
#include <algorithm>
#include <bit>
#include <map>

#include "core/log.h"
#include "dist/comm/nccl.h"
#include "dist/fsdp/reproducible.h"
#include "dist/fsdp/schedule.h"
#include "kernels/reduce/reduce.h"

namespace tessera::dist {
namespace {

constexpr int kGradientSlots = 2;  // one is written while the other is reduced
constexpr int64_t kSmallUnit = 8;  // below 1/8 of the largest of its class: a slot of its own

}  // namespace

class Scheduler::Hook final : public nn::ModuleHook {
 public:
  Hook(Scheduler& scheduler, Unit& unit) : scheduler_(scheduler), unit_(unit) {}
  void pre_forward(nn::Module&, std::span<Tensor*> inputs) override {
    scheduler_.begin_call(unit_, inputs);
  }
  void post_forward(nn::Module& module, std::span<Tensor*> outputs) override {
    const bool is_root = &module == scheduler_.root_;
    if (is_root) scheduler_.cast_outputs(outputs);
    scheduler_.end_call(unit_, outputs);
    if (is_root) scheduler_.end_root_call();
  }
  void on_forward_error(nn::Module&) noexcept override { scheduler_.on_forward_error(); }

 private:
  Scheduler& scheduler_;
  Unit& unit_;
};

/// Around the calls of a root that is not a unit itself.
class Scheduler::RootHook final : public nn::ModuleHook {
 public:
  explicit RootHook(Scheduler& scheduler) : scheduler_(scheduler) {}
  void pre_forward(nn::Module&, std::span<Tensor*>) override {}
  void post_forward(nn::Module&, std::span<Tensor*> outputs) override {
    scheduler_.cast_outputs(outputs);
    scheduler_.end_root_call();
  }
  void on_forward_error(nn::Module&) noexcept override {}

 private:
  Scheduler& scheduler_;
};

// ---- construction

Scheduler::Scheduler(nn::Module& root, World& world, FsdpOptions options)
    : world_(world),
      options_(std::move(options)),
      root_(&root),
      life_(std::make_shared<Life>(world, root.kind())) {
  for (const nn::NamedParameter& p : root.named_parameters()) {
    TESSERA_CHECK_AS(ConfigError, !p.parameter->is_sharded,
                     "fully_shard: parameter \"{}\" of {} is sharded already, expected one Fsdp a "
                     "parameter",
                     p.name, root.kind());
  }
  world.control().verdict([this] { resolve_options(); });  // all ranks find the same
  make_lanes();
  make_units(root);
  make_pools();
  make_shards();
  make_buffers(root);
  install_hooks(root);
  for (size_t i = 0; i < units_.size(); ++i) order_.push_back({static_cast<int>(i), 0});
  shards_ready_ = {};
}

Scheduler::~Scheduler() {
  life_->end();
  if (life_->num_guards > 0) {
    log_error("fsdp: it ends before {} of its guards (UnshardGuard, NoSync)", life_->num_guards);
  }
  for (const auto& [module, _] : hooked_) module->set_hook(nullptr);
  if (has_root_hook_) root_->set_hook(nullptr);
  for (const auto& unit : units_) unit->detach();
  if (lanes_.offloader != nullptr) lanes_.offloader->drain();
  for (const Stream* s :
       {&lanes_.all_gather, &lanes_.reduce_scatter, &lanes_.all_reduce, &lanes_.compute}) {
    s->drain();
  }
}

void Scheduler::resolve_options() {
  FsdpOptions& o = options_;
  const int world_size = world_.world_size();
  const bool is_hybrid =
      o.strategy == Strategy::kHybridShard || o.strategy == Strategy::kHybridShardZero2;
  TESSERA_CHECK_AS(ConfigError, o.prefetch_forward >= 0 && o.prefetch_backward >= 0,
                   "fsdp.prefetch_forward, fsdp.prefetch_backward: {} and {}, expected >= 0",
                   o.prefetch_forward, o.prefetch_backward);
  TESSERA_CHECK_AS(ConfigError, o.communicators == 1 || o.communicators == 2,
                   "fsdp.communicators: {}, expected 1 or 2", o.communicators);
  TESSERA_CHECK_AS(ConfigError, is_hybrid || o.shard_size == 0 || o.shard_size == world_size,
                   "fsdp.shard_size: {} with {}, expected a hybrid strategy", o.shard_size,
                   name_of(o.strategy));
  lanes_.shard_size = o.strategy == Strategy::kNoShard ? 1
                      : !is_hybrid                     ? world_size
                      : o.shard_size > 0               ? o.shard_size
                                                       : world_.local_size();
  TESSERA_CHECK_AS(ConfigError, world_size % lanes_.shard_size == 0,
                   "fsdp.shard_size: {} does not divide the {} ranks", lanes_.shard_size,
                   world_size);
  lanes_.replicate_size = world_size / lanes_.shard_size;
  lanes_.shard_rank = world_.rank() % lanes_.shard_size;
  lanes_.replicate_rank = world_.rank() / lanes_.shard_size;

  const bool reshards = o.strategy == Strategy::kFullShard || o.strategy == Strategy::kHybridShard;
  const std::variant<bool, int> asked = o.reshard_after_forward.value_or(reshards);
  const int* part_size = std::get_if<int>(&asked);
  TESSERA_CHECK_AS(ConfigError, (part_size != nullptr || std::get<bool>(asked)) == reshards,
                   "fsdp.reshard_after_forward: {} contradicts fsdp.strategy {}",
                   part_size != nullptr ? std::to_string(*part_size)
                   : reshards           ? "false"
                                        : "true",
                   name_of(o.strategy));
  if (part_size != nullptr) {
    TESSERA_CHECK_AS(ConfigError, *part_size > 1 && lanes_.shard_size % *part_size == 0,
                     "fsdp.reshard_after_forward: {}, expected true, false or a divisor of the "
                     "shard group's {} ranks",
                     *part_size, lanes_.shard_size);
    if (*part_size < lanes_.shard_size) lanes_.part_size = *part_size;
  }
  o.reshard_after_forward = asked;

  if (o.reproducible) check_reproducible(o, world_size);
  lanes_.reproducible = o.reproducible;
  const GradSync default_sync = o.reproducible                        ? GradSync::kEveryMicroBatch
                                : is_hybrid                           ? GradSync::kShard
                                : o.strategy == Strategy::kShardOptim ? GradSync::kLast
                                                                      : GradSync::kEveryMicroBatch;
  lanes_.sync = o.sync_every_micro_batch.value_or(default_sync);
  TESSERA_CHECK_AS(ConfigError,
                   o.strategy != Strategy::kShardOptim || lanes_.sync == GradSync::kLast,
                   "fsdp.sync_every_micro_batch: {} with shard_optim, which keeps full gradients; "
                   "expected false",
                   name_of(lanes_.sync));
  TESSERA_CHECK_AS(ConfigError, lanes_.sync != GradSync::kShard || is_hybrid,
                   "fsdp.sync_every_micro_batch: \"shard\" with {}, expected a hybrid strategy",
                   name_of(o.strategy));
  o.sync_every_micro_batch = lanes_.sync;

  const auto check_dtype = [](const char* key, DType dtype, std::initializer_list<DType> allowed) {
    TESSERA_CHECK_AS(ConfigError, std::find(allowed.begin(), allowed.end(), dtype) != allowed.end(),
                     "{}: {}, expected f32, bf16 or f16", key, dtype);
  };
  PrecisionOptions& p = o.precision;
  check_dtype("precision.param_dtype", p.param_dtype, {kF32, kBF16, kF16});
  lanes_.reduce_dtype = p.reduce_dtype.value_or(p.param_dtype);
  check_dtype("precision.reduce_dtype", lanes_.reduce_dtype, {kF32, kBF16, kF16});
  lanes_.wire_dtype = p.wire_dtype.value_or(lanes_.reduce_dtype);
  check_dtype("fsdp.wire_dtype", lanes_.wire_dtype, {kF32, kBF16, kF16});
  TESSERA_CHECK_AS(ConfigError,
                   p.param_dtype != kF32 || lanes_.reduce_dtype == kF32 ||
                       lanes_.wire_dtype == lanes_.reduce_dtype,
                   "fsdp.wire_dtype: {} with precision.reduce_dtype {} and f32 parameters, whose "
                   "gradients are rounded as they travel; expected {}",
                   lanes_.wire_dtype, lanes_.reduce_dtype, lanes_.reduce_dtype);
  p.reduce_dtype = lanes_.reduce_dtype;
  p.wire_dtype = lanes_.wire_dtype;
  if (p.output_dtype) check_dtype("precision.output_dtype", *p.output_dtype, {kF32, kBF16, kF16});
  if (p.buffer_dtype) check_dtype("precision.buffer_dtype", *p.buffer_dtype, {kF32, kBF16, kF16});
  // The same for every strategy, so that they keep the same bits; in reproducible mode the same for
  // every number of ranks.
  const auto ranks = static_cast<unsigned>(world_size);
  p.pre_divide = p.pre_divide.value_or(lanes_.wire_dtype == kF16 && !o.reproducible
                                           ? static_cast<double>(std::bit_ceil(ranks))
                                           : 1.0);
  int exponent = 0;
  TESSERA_CHECK_AS(ConfigError, *p.pre_divide > 0 && std::frexp(*p.pre_divide, &exponent) == 0.5,
                   "fully_shard: PrecisionOptions::pre_divide is {}, expected a power of two",
                   *p.pre_divide);
  TESSERA_CHECK_AS(
      ConfigError, !o.reproducible || *p.pre_divide == 1,
      "fully_shard: PrecisionOptions::pre_divide is {} in reproducible mode, expected 1",
      *p.pre_divide);
  if (world_size == 1) p.pre_divide = 1.0;
  lanes_.pre_divide = *p.pre_divide;
  const int num_averaged = o.average_gradients ? world_size : 1;
  grad_factor_ = lanes_.pre_divide / num_averaged;
  life_->needs_factor = grad_factor_ != 1;
  if (!o.wrap) o.wrap = wrap::transformer_block();
  lanes_.poison = Context::current()->options().poison;
  TESSERA_CHECK_AS(ConfigError, o.offload_window > 0 && o.offload_window % kLayoutBlock == 0,
                   "fully_shard: FsdpOptions::offload_window is {}, expected a multiple of {}",
                   o.offload_window, kLayoutBlock);
}

bool Scheduler::is_on_cpu() const {
  return lanes_.compute.device().type == DeviceType::kCpu;
}

bool Scheduler::reshards_after_forward() const {
  const bool* whole = std::get_if<bool>(&*options_.reshard_after_forward);
  return whole == nullptr || *whole;
}

void Scheduler::make_lanes() {
  const Context& context = *Context::current();
  lanes_.compute = context.compute();
  lanes_.all_gather = context.make_stream("all_gather", {.high_priority = true});
  lanes_.reduce_scatter = options_.communicators == 1
                              ? lanes_.all_gather
                              : context.make_stream("reduce_scatter", {.high_priority = true});
  lanes_.all_reduce = context.make_stream("all_reduce");
  lanes_.is_reduced_into_shards = !is_on_cpu() && nccl_options().native_reduce_scatter;
  if (options_.offload != Offload::kNone) {
    lanes_.offloader = std::make_shared<Offloader>(options_.offload, options_.offload_window,
                                                   !options_.reproducible, lanes_.poison);
  }
  // In one fixed order on all ranks.
  scalar_comm_ = world_.make_comm();
  if (lanes_.shard_size > 1) {
    lanes_.gather_comm = scalar_comm_->split(lanes_.replicate_rank, lanes_.shard_rank);
    if (options_.communicators == 2) lanes_.reduce_comm = lanes_.gather_comm->duplicate();
  }
  if (lanes_.part_size > 1) {
    lanes_.part_comm = lanes_.gather_comm->split(lanes_.shard_rank / lanes_.part_size,
                                                 lanes_.shard_rank % lanes_.part_size);
  }
  if (lanes_.replicate_size > 1) {
    lanes_.replicate_comm = scalar_comm_->split(lanes_.shard_rank, lanes_.replicate_rank);
  }
}

void Scheduler::make_units(nn::Module& root) {
  std::vector<UnitSpec> specs = options_.wrap(root);
  const std::vector<std::string>& ignored = options_.ignored;
  for (const std::string& name : ignored) {
    const nn::Parameter& p = root.parameter(name);  // an Error if there is none
    if (p.tensor.requires_grad()) num_ignored_ += p.tensor.numel();
    if (!p.has_values()) empty_ignored_.push_back(name);
    if (!p.tensor.storage()->is_materialized()) {
      p.tensor.storage()->materialize(MemoryClass::kParameters);
    }
  }
  const Residence residence = lanes_.shard_size == 1 && !lanes_.offloads_parameters()
                                  ? Residence::kWhole
                              : reshards_after_forward() ? Residence::kReshard
                                                         : Residence::kKeep;
  const bool keeps_full_grad = lanes_.sync == GradSync::kLast;
  for (UnitSpec& spec : specs) {
    std::erase_if(spec.parameters, [&](const nn::NamedParameter& p) {
      return std::find(ignored.begin(), ignored.end(), p.name) != ignored.end();
    });
    if (spec.parameters.empty()) continue;
    units_.push_back(
        std::make_unique<Unit>(std::move(spec), options_.precision,
                               options_.reproducible ? kReproducibleChunks : world_.world_size(),
                               lanes_, residence, keeps_full_grad));
  }
  TESSERA_CHECK_AS(ConfigError, !units_.empty(), "fully_shard: the model has no parameters");
  Context::current()->allocator()->set_advice(
      [this, life = std::weak_ptr<Life>(life_)](const OutOfMemory& oom) {
        const std::shared_ptr<Life> alive = life.lock();
        return alive == nullptr || alive->is_over() ? std::string() : advice(oom);
      });
  for (const auto& unit : units_) {
    unit->shard_parameters(/*in_place=*/options_.strategy == Strategy::kShardOptim &&
                           !lanes_.offloads_parameters());
    missing_values_.insert(missing_values_.end(), unit->missing_values().begin(),
                           unit->missing_values().end());
  }
}

void Scheduler::make_pools() {
  const auto make = [this](int64_t nbytes, int num_slots, Comm* comm) {
    const auto allocate = [this, comm](int64_t n) {
      return comm != nullptr ? comm->allocate(n, MemoryClass::kGathered)
                             : lanes_.allocate(n, MemoryClass::kGathered);
    };
    pools_.push_back(std::make_unique<SlotPool>(nbytes, num_slots, allocate, comm != nullptr));
    return pools_.back().get();
  };
  // Two classes of units share slots, blocks and the others; small ones have a slot of their own.
  struct Pools {
    SlotPool *gathered = nullptr, *gradient = nullptr;
  };
  std::map<bool, Pools> shared;
  const auto is_small = [](int64_t nbytes, int64_t largest) {
    return nbytes * kSmallUnit < largest;
  };
  for (const bool is_block : {false, true}) {
    int64_t gathered = 0, gradient = 0;
    for (const auto& u : units_) {
      if (u->spec().is_block != is_block) continue;
      gathered = std::max(gathered, u->gathered_nbytes());
      gradient = std::max(gradient, u->gradient_nbytes());
    }
    const int depth = std::max(options_.prefetch_forward, options_.prefetch_backward);
    for (const auto& u : units_) {
      if (u->spec().is_block != is_block) continue;
      Pools own;
      if (u->residence() == Residence::kReshard) {
        if (u->spec().is_tied || is_small(u->gathered_nbytes(), gathered)) {
          own.gathered = make(u->gathered_nbytes(), 1, lanes_.gather_comm.get());
        } else if (shared[is_block].gathered == nullptr) {
          shared[is_block].gathered =
              make(gathered, is_block ? depth + 1 : 1, lanes_.gather_comm.get());
        }
      } else if (u->residence() == Residence::kKeep && !u->has_own_memory()) {
        own.gathered = make(u->gathered_nbytes(), 1, lanes_.gather_comm.get());
      }
      const bool keeps_full_grad = lanes_.sync == GradSync::kLast;
      if (!keeps_full_grad && u->gradient_nbytes() > 0) {
        if (u->spec().is_tied || is_small(u->gradient_nbytes(), gradient)) {
          own.gradient = make(u->gradient_nbytes(), 1, nullptr);
        } else if (shared[is_block].gradient == nullptr) {
          shared[is_block].gradient = make(gradient, is_block ? kGradientSlots : 1, nullptr);
        }
      }
      u->set_pools(own.gathered != nullptr ? own.gathered : shared[is_block].gathered,
                   own.gradient != nullptr ? own.gradient : shared[is_block].gradient);
    }
  }
  if (lanes_.offloader != nullptr && lanes_.offloader->has_gradients()) {
    int64_t numel = 0;
    for (const auto& u : units_) {
      for (const Group& g : u->groups()) {
        if (g.layout.is_trainable) numel = std::max(numel, g.shard_numel);
      }
    }
    lanes_.offloader->make_gradient_ring(numel);
  }
  // Scratch of the reduces: one of each, used in the order of its stream.
  const bool has_host_gradients =  // sent from a ring of the offloader's own
      lanes_.offloader != nullptr && lanes_.offloader->has_gradients();
  int64_t staging = 0, replicate_staging = 0, wire = 0, partial = 0;
  for (const auto& u : units_) {
    for (const Group& g : u->groups()) {
      if (!g.layout.is_trainable) continue;
      const DType wire_dtype = g.wire_dtype;
      if (wire_dtype != g.grad_dtype && (scalar_comm_->world_size() > 1 || options_.reproducible)) {
        wire = std::max(wire, g.layout.numel * static_cast<int64_t>(size_of(wire_dtype)));
      }
      if (lanes_.shard_size > 1) {
        staging = std::max(staging, lanes_.reducing_comm().reduce_scatter_staging_nbytes(
                                        g.shard_numel, wire_dtype, /*full_is_allocated=*/true));
      }
      if (lanes_.replicate_size > 1) {
        const DType outer = lanes_.shard_size > 1 ? kF32 : wire_dtype;
        replicate_staging =
            std::max(replicate_staging, lanes_.replicate_comm->reduce_scatter_staging_nbytes(
                                            u->own_numel(g), outer, !has_host_gradients));
        if (lanes_.shard_size > 1) partial = std::max(partial, g.shard_numel);
      }
    }
  }
  MemoryScope scope(MemoryClass::kGathered);
  const auto make_staging = [this](int64_t nbytes) {  // on the CPU no other rank reads it
    return is_on_cpu() ? empty({nbytes}, kU8) : lanes_.allocate_array(nbytes, kU8);
  };
  if (staging > 0) lanes_.reduce_staging = make_staging(staging);
  if (replicate_staging > 0) lanes_.replicate_staging = make_staging(replicate_staging);
  if (wire > 0) lanes_.wire_buffer = lanes_.allocate_array(wire, kU8);
  // With kShard only a backward after the last micro-batch needs it, and makes it then.
  lanes_.partial_numel = partial;
  if (partial > 0 && lanes_.sync != GradSync::kShard) {
    lanes_.partial_shard = lanes_.allocate_array(partial, kF32);
  }
}

void Scheduler::make_shards() {
  const MemoryScope scope(MemoryClass::kOther);  // tables of segments
  for (const auto& unit : units_) {
    for (Group& g : unit->groups()) {
      if (!g.layout.is_trainable) continue;
      const int64_t begin = lanes_.shard_rank * g.shard_numel;
      optim::FlatShard shard;
      shard.name = unit->name();
      shard.master = g.master;
      shard.grad = g.home_of_grad();
      shard.store = lanes_.offloader;
      shard.owner = life_;
      if (g.layout.dtype != kF32) shard.low = g.shard;
      shard.segments = segments_in(g.layout, begin, begin + g.shard_numel);
      shards_.push_back(std::move(shard));

      const int64_t own = begin + unit->own_begin(g);
      const int64_t numel = unit->own_numel(g) / num_norm_chunks();
      for (int64_t c = 0; c < num_norm_chunks(); ++c) {
        const int64_t first = own + c * numel;
        std::vector<tessera::Segment> segments;
        for (const optim::Segment& s : segments_in(g.layout, first, first + numel)) {
          segments.push_back({s.begin, s.end});
        }
        norm_groups_.push_back(&g);
        norm_inputs_.emplace_back(g.grad.narrow(0, first - begin, numel),
                                  segments_to_device(segments, numel));
      }
    }
  }
}

/// Of a (group, rank): partial norms of their own.
int64_t Scheduler::num_norm_chunks() const {
  return options_.reproducible ? kReproducibleChunks / world_.world_size() : 1;
}

void Scheduler::make_buffers(nn::Module& root) {
  std::vector<nn::Module*> owners;
  for (const nn::NamedBuffer& b : root.named_buffers()) {
    if (b.buffer->tensor.storage()->is_materialized()) continue;
    b.buffer->tensor.storage()->materialize(MemoryClass::kParameters);
    if (owners.empty() || owners.back() != b.owner) owners.push_back(b.owner);
  }
  for (nn::Module* owner : owners) owner->reset_buffers();
  if (!options_.precision.buffer_dtype) return;
  // After they have their values: a cast of what was computed in full, not a computation in less.
  const MemoryScope scope(MemoryClass::kParameters);
  for (const nn::NamedBuffer& b : root.named_buffers()) {
    Tensor& tensor = b.buffer->tensor;
    if (is_floating(tensor.dtype())) tensor = tensor.to(*options_.precision.buffer_dtype);
  }
}

void Scheduler::install_hooks(nn::Module& root) {
  for (const auto& unit : units_) {
    for (nn::Module* module : unit->spec().modules) {
      TESSERA_CHECK_AS(ConfigError, module->hook() == nullptr,
                       "fully_shard: a module of unit {} is sharded already", unit->name());
      module->set_hook(std::make_shared<Hook>(*this, *unit));
      hooked_.emplace_back(module, unit.get());
    }
  }
  if (root.hook() == nullptr) {
    root.set_hook(std::make_shared<RootHook>(*this));
    has_root_hook_ = true;
  }
  for (const nn::NamedModule& m : root.named_modules()) {
    for (const auto& [module, unit] : hooked_) {
      if (module == m.module) unit_of_module_.emplace_back(m.module, unit->name());
    }
  }
}

}  // namespace tessera::dist
