// What a step sends, copies and holds, against formulas of the model's shapes.

#include <algorithm>
#include <atomic>
#include <fstream>
#include <utility>

#include "core/runtime/allocator.h"
#include "dist/fsdp/parts.h"
#include "dist/fsdp/shard_view.h"
#include "optim/adamw.h"
#include "optim/muon.h"
#include "optim/optimizer_set.h"
#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/observer.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::Strategy;

int64_t bytes_of(const AllocatorStats& stats, MemoryClass c) {
  return stats.allocated_by_class[static_cast<size_t>(c)];
}

/// Resident bytes of this process.
int64_t resident_nbytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

TEST_CASE("fsdp counts: bytes a parameter, by the allocator and resident", "[fsdp]") {
  nn::LlamaConfig config;
  config.vocab_size = 2048;
  config.context_length = 16;
  config.num_layers = 4;
  config.num_heads = 4;
  config.width = 256;
  config.ffn_width = 512;
  bool is_first = true;
  for (const bool is_bf16 : {false, true}) {
    for (const int world_size : {1, 2, 4, 8}) {
      for (const Strategy strategy : kAllStrategies) {
        dist::FsdpOptions options;
        options.strategy = strategy;
        options.shard_size = 0;
        const bool is_hybrid = strategy >= Strategy::kHybridShard;
        const int hybrid_size = std::max(1, world_size / 2);
        if (is_hybrid) options.shard_size = hybrid_size;
        if (is_bf16) options.precision.param_dtype = kBF16;
        dist::LocalOptions local;
        local.context.poison = false;
        std::vector<double> per_parameter(static_cast<size_t>(world_size));
        double resident = 0;
        int64_t num_parameters = 0;
        std::atomic<int64_t> allocated = 0;  // by all ranks, slots too
        dist::run_ranks(world_size, local, [&](dist::World& world) {
          std::unique_ptr<nn::Llama> model;
          {
            nn::DeferredInit deferred;
            model = std::make_unique<nn::Llama>(config);
          }
          world.control().barrier();
          const int64_t before = resident_nbytes();
          world.control().barrier();
          const auto fsdp = dist::fully_shard(*model, world, options);
          fsdp->initialize(1);
          optim::AdamW adamw(fsdp->shards(), {});
          for (optim::FlatShard& shard : fsdp->shards()) shard.grad.fill_(0);
          current_stream().synchronize();
          world.control().barrier();
          const auto count = static_cast<double>(dist::ShardView(*fsdp).num_parameters());
          if (world.rank() == 0) num_parameters = dist::ShardView(*fsdp).num_parameters();
          if (world.rank() == 0) resident = static_cast<double>(resident_nbytes() - before) / count;
          const AllocatorStats stats = Context::current()->allocator()->stats();
          allocated += stats.allocated;
          world.control().barrier();
          int64_t sum = 0;
          for (const MemoryClass c :
               {MemoryClass::kParameters, MemoryClass::kGradients, MemoryClass::kOptimizer}) {
            sum += bytes_of(stats, c);
          }
          per_parameter[static_cast<size_t>(world.rank())] = static_cast<double>(sum) / count;
        });
        const double groups = strategy == Strategy::kNoShard ? 1
                              : is_hybrid                    ? hybrid_size
                                                             : world_size;
        const double param = is_bf16 ? 2 : 4;
        // f32: master (the parameter itself), gradient, two moments; bf16: a copy of two bytes
        // more.
        double expected = (16 + (is_bf16 ? 2 : 0)) / groups;
        // Full parameters and f32 gradients instead of a shard of the parameters.
        if (strategy == Strategy::kShardOptim) {
          expected += param - param / groups + 4;
        }
        INFO(fmt::format("{}, world {}, bf16 {}: {} bytes a parameter, {} expected",
                         name_of(strategy), world_size, is_bf16, per_parameter[0], expected));
        for (const double actual : per_parameter) CHECK(std::fabs(actual / expected - 1) < 0.01);
        // Of all ranks together; the first run of the process finds no memory of earlier ones.
        const auto count = static_cast<double>(num_parameters);
        INFO(fmt::format("{} resident bytes a parameter, {} allocated", resident,
                         static_cast<double>(allocated) / count));
        CHECK(resident < 1.1 * static_cast<double>(allocated) / count + 1);
        if (std::exchange(is_first, false)) CHECK(resident > 0.95 * expected);
      }
    }
  }
}

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Elements of a unit of these parameters, with padding.
int64_t padded(const std::vector<int64_t>& numels, int world_size) {
  int64_t sum = 0;
  for (const int64_t numel : numels) sum += round_up(numel, 256);
  return round_up(sum, 256 * world_size);
}

/// Elements of the units of the tiny Llama: embedding, blocks, head.
std::vector<int64_t> unit_numels(const nn::LlamaConfig& c, int world_size) {
  const int64_t head_width = c.width / c.num_heads;
  const int64_t qkv_rows = (c.num_heads + 2 * c.num_kv_heads) * head_width;
  std::vector<int64_t> numels = {padded({c.vocab_size * c.width}, world_size)};
  for (int64_t i = 0; i < c.num_layers; ++i) {
    numels.push_back(padded({c.width, qkv_rows * c.width, c.width * c.width, c.width,
                             2 * c.ffn_width * c.width, c.width * c.ffn_width},
                            world_size));
  }
  numels.push_back(padded({c.width, c.vocab_size * c.width}, world_size));
  return numels;
}

/// Tasks of rank 0 in step 1.
std::vector<TaskRecord> tasks_of_step(FsdpRun run, int world_size) {
  std::shared_ptr<StreamTap> tap;
  std::vector<TaskRecord> tasks;
  run.num_steps = 2;
  run.on_ready = [&](dist::Fsdp& fsdp, dist::World& world) {
    if (world.rank() == 0) tap = StreamTap::install(fsdp, {.records = true});
  };
  run.on_step = [&](int, dist::Fsdp&, dist::World& world) {
    if (world.rank() == 0) tasks = tap->take();
  };
  run_fsdp_on_threads(world_size, run);
  return tasks;
}

/// "op bytes" of the collectives on a stream, where bytes are those of the whole, not of a shard.
std::vector<std::string> collectives(const std::vector<TaskRecord>& tasks,
                                     const std::string& stream) {
  std::vector<std::string> lines;
  for (const TaskRecord& t : tasks) {
    if (t.stream != stream) continue;
    if (t.name == "all_gather") lines.push_back(fmt::format("all_gather {}", t.bytes_written));
    if (t.name == "reduce_scatter") lines.push_back(fmt::format("reduce_scatter {}", t.bytes_read));
    if (t.name == "all_reduce") lines.push_back(fmt::format("all_reduce {}", t.bytes_read));
  }
  return lines;
}

/// Bytes that rank 0 receives in collectives, by what each has to bring from the others.
int64_t received_nbytes(const std::vector<TaskRecord>& tasks, int world_size) {
  int64_t nbytes = 0;
  for (const TaskRecord& t : tasks) {
    if (t.name == "all_gather") nbytes += t.bytes_written;
    if (t.name == "reduce_scatter") nbytes += t.bytes_read;
    if (t.name == "all_reduce") nbytes += 2 * t.bytes_read;
  }
  return nbytes * (world_size - 1) / world_size;
}

TEST_CASE("fsdp counts: Muon sends 4 bytes an element of its matrices more than AdamW, once a step",
          "[fsdp]") {
  using optim::OptimizerSet;
  const auto adamw = [](std::vector<optim::FlatShard> shards) {
    return std::make_unique<optim::AdamW>(std::move(shards));
  };
  for (const int world_size : {2, 3, 4}) {
    for (const Strategy strategy : {Strategy::kFullShard, Strategy::kShardOptim}) {
      for (const int micro_batches : {1, 3}) {
        std::atomic<int64_t> of_matrices = 0;  // elements, with padding
        const auto sent = [&](bool is_muon) {
          FsdpRun run;
          run.fsdp.strategy = strategy;
          run.num_micro_batches = micro_batches;
          run.samples_per_step = world_size * micro_batches;
          run.fsdp.parameters.optimizer = [](const nn::NamedParameter& p) {
            const bool is_hidden =
                p.parameter->tensor.shape().num_dims() == 2 && p.name.starts_with("blocks.");
            return std::string(is_hidden ? "muon" : "");
          };
          run.make_optimizer = [&](const std::vector<optim::FlatShard>& shards) {
            int64_t numel = 0;
            for (const optim::FlatShard& shard : shards) {
              if (shard.optimizer == "muon") numel += world_size * shard.master.numel();
            }
            of_matrices = numel;  // the same on all ranks
            const auto muon = [](std::vector<optim::FlatShard> own) {
              return std::make_unique<optim::Muon>(std::move(own));
            };
            return std::make_unique<OptimizerSet>(
                shards, std::map<std::string, OptimizerSet::Make>{
                            {"", adamw}, {"muon", is_muon ? OptimizerSet::Make(muon) : adamw}});
          };
          return received_nbytes(tasks_of_step(run, world_size), world_size);
        };
        const int64_t without = sent(false), with = sent(true);
        INFO(world_size << " ranks, " << name_of(strategy) << ", " << micro_batches << ": "
                        << without << " and " << with << " bytes");
        // bf16 directions come, and bf16 results go back.
        REQUIRE(of_matrices > 0);
        CHECK(with - without == 4 * of_matrices * (world_size - 1) / world_size);
      }
    }
  }
}

TEST_CASE("fsdp counts: collectives of a step, their order and bytes", "[fsdp]") {
  constexpr int kWorld = 4;
  for (const bool is_bf16 : {false, true}) {
    for (const Strategy strategy : kAllStrategies) {
      for (const int prefetch : {0, 1, 2}) {
        for (const bool recompute : {false, true}) {
          FsdpRun run;
          run.fsdp.strategy = strategy;
          run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
          if (recompute) run.recompute.kind = nn::RecomputePolicy::Kind::kFull;
          if (is_bf16) run.fsdp.precision.param_dtype = kBF16;
          const bool is_hybrid = strategy >= Strategy::kHybridShard;
          if (is_hybrid) run.fsdp.shard_size = 2;
          const std::vector<TaskRecord> tasks = tasks_of_step(run, kWorld);

          const std::vector<int64_t> units = unit_numels(run.model, kWorld);
          const int64_t item = is_bf16 ? 2 : 4;
          const int shard_size = is_hybrid ? 2 : strategy == Strategy::kNoShard ? 1 : kWorld;
          const bool reshards =
              strategy == Strategy::kFullShard || strategy == Strategy::kHybridShard;
          std::vector<std::string> gathers, reduces, outer, compute;
          if (shard_size > 1) {
            for (const int64_t n : units) gathers.push_back(fmt::format("all_gather {}", n * item));
            // Backward begins with head and last block, whose slots nobody took: they are there.
            for (size_t u = units.size() - 2; reshards && u-- > 0;) {
              gathers.push_back(fmt::format("all_gather {}", units[u] * item));
            }
          }
          for (size_t u = units.size(); u-- > 0;) {
            const int64_t n = units[u];
            if (shard_size > 1) reduces.push_back(fmt::format("reduce_scatter {}", n * item));
            if (is_hybrid) outer.push_back(fmt::format("reduce_scatter {}", n / shard_size * 4));
            if (shard_size == 1) outer.push_back(fmt::format("reduce_scatter {}", n * item));
          }
          // Replicas have summed a part each and exchange the parts.
          if (shard_size < kWorld) {
            for (const int64_t n : units) {
              outer.push_back(fmt::format("all_gather {}", n / shard_size * 4));
            }
          }
          // The loss, and the partial norms of a group a unit.
          compute = {"all_reduce 4", fmt::format("all_gather {}", 8 * kWorld * units.size())};
          INFO(fmt::format("{}, bf16 {}, prefetch {}, recompute {}", name_of(strategy), is_bf16,
                           prefetch, recompute));
          CHECK(collectives(tasks, "all_gather") == gathers);
          CHECK(collectives(tasks, "reduce_scatter") == reduces);
          CHECK(collectives(tasks, "all_reduce") == outer);
          CHECK(collectives(tasks, "compute") == compute);
        }
      }
    }
  }
}

TEST_CASE("fsdp counts: hybrid accumulation reduces over replicas once, after the last micro-batch",
          "[fsdp]") {
  constexpr int kWorld = 4, kMicroBatches = 8;
  for (const Strategy strategy : {Strategy::kHybridShard, Strategy::kHybridShardZero2}) {
    FsdpRun run;
    run.fsdp.strategy = strategy;
    run.fsdp.shard_size = 2;
    run.num_micro_batches = kMicroBatches;
    run.samples_per_step = kWorld * kMicroBatches;
    set_precision(run, Precision::kBF16);
    const std::vector<TaskRecord> tasks = tasks_of_step(run, kWorld);
    const std::vector<int64_t> units = unit_numels(run.model, kWorld);
    std::vector<std::string> inner, outer;
    for (int a = 0; a < kMicroBatches; ++a) {
      for (size_t u = units.size(); u-- > 0;) {  // bf16, added to the f32 shard
        inner.push_back(
            fmt::format("reduce_scatter {}", units[u] * 2 + (a > 0) * units[u] / 2 * 4));
      }
    }
    for (size_t u = units.size(); u-- > 0;) {  // the f32 shard
      outer.push_back(fmt::format("reduce_scatter {}", units[u] / 2 * 4));
    }
    for (const int64_t n : units) outer.push_back(fmt::format("all_gather {}", n / 2 * 4));
    INFO(name_of(strategy));
    CHECK(collectives(tasks, "reduce_scatter") == inner);
    CHECK(collectives(tasks, "all_reduce") == outer);
  }
}

TEST_CASE("fsdp counts: nothing of parameters or gradients is copied", "[fsdp]") {
  constexpr int kWorld = 4;
  for (const Precision precision : {Precision::kF32, Precision::kMixed, Precision::kBF16}) {
    for (const Strategy strategy : kAllStrategies) {
      FsdpRun run;
      run.fsdp.strategy = strategy;
      if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = 2;
      set_precision(run, precision);
      std::vector<int64_t> copies;
      for (const TaskRecord& t : tasks_of_step(run, kWorld)) {
        if (t.name == "copy") copies.push_back(t.bytes_written);
      }
      INFO(fmt::format("{}, precision {}: {}", name_of(strategy), static_cast<int>(precision),
                       fmt::join(copies, " ")));
      const std::vector<int64_t> units = unit_numels(run.model, kWorld);
      // The loss, and the partial norms from the order of ranks to that of chunks.
      std::vector<int64_t> expected = {4, 8 * kWorld * static_cast<int64_t>(units.size())};
      // shard_optim collects in f32; what travels is bf16: a cast, no copy.
      if (strategy == Strategy::kShardOptim && precision == Precision::kBF16) {
        for (auto n = units.rbegin(); n != units.rend(); ++n) expected.push_back(*n * 2);
      }
      std::sort(copies.begin(), copies.end());
      std::sort(expected.begin(), expected.end());
      CHECK(copies == expected);
    }
  }
}

// ---- memory

struct Memory {
  AllocatorStats after_first, after_last;
  std::string summary;
};

Memory memory_of(FsdpRun run, int world_size, int num_steps) {
  Memory memory;
  run.num_steps = num_steps;
  run.local.context.poison = false;
  run.on_step = [&](int step, dist::Fsdp& fsdp, dist::World& world) {
    if (world.rank() != 0) return;
    current_stream().synchronize();
    const AllocatorStats stats = Context::current()->allocator()->stats();
    if (step == 1) memory.after_first = stats;
    memory.after_last = stats;
    memory.summary = fsdp.summary();
  };
  run_fsdp_on_threads(world_size, run);
  return memory;
}

TEST_CASE("fsdp counts: slots are as the formula says and constant in depth", "[fsdp]") {
  constexpr int kWorld = 4;
  for (const Strategy strategy : kAllStrategies) {
    for (const int prefetch : {0, 1, 2}) {
      for (const int64_t num_layers : {2, 8, 32}) {
        FsdpRun run;
        run.fsdp.strategy = strategy;
        if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = 2;
        run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
        run.model.num_layers = num_layers;
        const Memory memory = memory_of(run, kWorld, 5);
        const std::vector<int64_t> units = unit_numels(run.model, kWorld);
        const int64_t block = units[1] * 4, other = std::max(units.front(), units.back()) * 4;
        int64_t all = 0;
        for (const int64_t numel : units) all += numel * 4;

        const bool reshards =
            strategy == Strategy::kFullShard || strategy == Strategy::kHybridShard;
        const bool keeps =
            strategy == Strategy::kShardGradOp || strategy == Strategy::kHybridShardZero2;
        int64_t expected = 0;
        // Gathered: the ring and the one of embedding and head, or each unit's own.
        if (reshards) expected += (prefetch + 1) * block + other;
        if (keeps) expected += all;
        // Gradients: two of blocks, one of embedding and head; shard_optim keeps them all.
        if (strategy != Strategy::kShardOptim) expected += 2 * block + other;
        INFO(fmt::format("{}, prefetch {}, {} layers: {}", name_of(strategy), prefetch, num_layers,
                         memory.summary));
        CHECK(bytes_of(memory.after_last, MemoryClass::kGathered) == expected);
        CHECK(bytes_of(memory.after_first, MemoryClass::kGathered) == expected);
        if (strategy == Strategy::kFullShard) {  // and each ring is named
          for (const auto& [count, nbytes] : {std::pair(int64_t{prefetch} + 1, block),
                                              {int64_t{2}, block},
                                              {int64_t{1}, other}}) {
            CHECK(memory.summary.find(fmt::format("{} x {}", count, format_nbytes(nbytes))) !=
                  std::string::npos);
          }
        }
        // Nothing more is taken from the device after step 1.
        CHECK(memory.after_last.num_backend_allocations ==
              memory.after_first.num_backend_allocations);
        CHECK(memory.after_last.reserved == memory.after_first.reserved);
      }
    }
  }
}

TEST_CASE("fsdp counts: a host far ahead of the device holds no more than the slots", "[fsdp]") {
  for (const int prefetch : {0, 2}) {
    FsdpRun run;
    run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
    run.model.num_layers = 32;
    run.on_ready = [](dist::Fsdp& fsdp, dist::World&) {
      StreamTap::install(fsdp,
                         {.delayed_share = 0.05, .max_delay_us = 1000, .only_stream = "compute"});
    };
    const Memory memory = memory_of(run, 2, 4);
    const std::vector<int64_t> units = unit_numels(run.model, 2);
    const int64_t block = units[1] * 4, other = std::max(units.front(), units.back()) * 4;
    INFO(memory.summary);
    CHECK(bytes_of(memory.after_last, MemoryClass::kGathered) ==
          (prefetch + 1 + 2) * block + 2 * other);
    CHECK(memory.after_last.num_backend_allocations == memory.after_first.num_backend_allocations);
  }
}

}  // namespace
}  // namespace tessera::testing
