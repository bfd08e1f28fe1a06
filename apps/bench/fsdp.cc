// tessera-bench-fsdp: what sharding is for, measured on thread ranks of this machine.
//   overlap  communication that compute waits for, with prefetch 0, 1 and 2, over a network with
//            latency and bandwidth (each unit computes for longer than it communicates, as
//            measured in the same run)
//   batch    one memory limit for every rank: the largest micro-batch under no_shard and full_shard
//   memory   bytes a parameter, by strategy and world: parameters, gradients and optimizer states,
//            and what is gathered, in slots or for ever, with the buffers of reduces; then the peak
//            of a step with the gradients of a large vocabulary whole and in pieces

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "apps/bench/bench.h"
#include "apps/bench/training.h"
#include "apps/command_line.h"
#include "apps/program.h"
#include "core/profiler.h"
#include "dist/comm/local.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/shard_view.h"
#include "nn/llama/llama.h"

namespace tessera::apps {
namespace {

using dist::Strategy;
using nlohmann::json;

struct Workload {
  nn::LlamaConfig model;
  dist::FsdpOptions fsdp;
  int64_t micro_batch = 4;
};

nn::LlamaConfig llama(int64_t layers, int64_t width, int64_t context) {
  nn::LlamaConfig c;
  c.vocab_size = 256;
  c.context_length = context;
  c.num_layers = layers;
  c.num_heads = width / 32;
  c.width = width;
  return c;
}

constexpr float kLr = 1e-3f;

BenchTraining start(dist::World& world, const Workload& work) {
  std::unique_ptr<nn::LanguageModel> model;
  {
    const nn::DeferredInit deferred;
    model = std::make_unique<nn::Llama>(work.model);
  }
  return BenchTraining(world, std::move(model), work.fsdp, work.micro_batch);
}

dist::LocalOptions local_options() {
  dist::LocalOptions options;
  options.context.poison = options.context.order_check = false;
  return options;
}

double ms(int64_t ns) {
  return static_cast<double>(ns) * 1e-6;
}

double mib(int64_t nbytes) {
  return static_cast<double>(nbytes) / (1 << 20);
}

double seconds_since(int64_t begin_ns) {
  return ms(profiler::now_ns() - begin_ns) * 1e-3;
}

// ---- overlap

constexpr int64_t kOverlapBlocks = 48, kOverlapWidth = 128;

struct Exposure {
  double step_ms = 0;
  double exposed_ms = 0;         // a step and rank: compute waits while a transfer goes on
  double compute_ms_a_unit = 0;  // mean of forward and backward
};

struct Interval {
  int64_t begin, end;
};

/// When collective i was on the network: from when its last rank had come to it, so that waiting
/// for a rank that computes more slowly than the others does not count as communication.
std::vector<Interval> transfers(const std::vector<TraceEvent>& events, std::string_view name,
                                const std::set<int>& compute_ids) {
  std::map<int, size_t> num_seen;  // by stream: one a rank, each with the same collectives
  std::vector<Interval> all;
  for (const TraceEvent& e : events) {
    if (!std::string_view(e.name).starts_with(name) || compute_ids.count(e.stream_id) != 0)
      continue;
    const size_t i = num_seen[e.stream_id]++;
    if (i == all.size()) all.push_back({e.begin_ns, e.end_ns});
    all[i] = {std::max(all[i].begin, e.begin_ns), std::max(all[i].end, e.end_ns)};
  }
  return all;
}

/// How long the compute streams wait while a transfer goes on.
int64_t exposed_ns(const std::vector<TraceEvent>& events, const std::set<int>& compute_ids) {
  std::vector<Interval> all = transfers(events, "all_gather", compute_ids);
  const std::vector<Interval> reduces = transfers(events, "reduce_scatter", compute_ids);
  all.insert(all.end(), reduces.begin(), reduces.end());
  std::sort(all.begin(), all.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  int64_t total = 0;
  for (const TraceEvent& e : events) {
    if (std::string_view(e.name) != "wait" || compute_ids.count(e.stream_id) == 0) continue;
    int64_t from = e.begin_ns;  // what overlaps counts once
    for (const Interval& t : all) {
      const int64_t begin = std::max(from, t.begin), end = std::min(e.end_ns, t.end);
      if (begin >= end) continue;
      total += end - begin;
      from = end;
    }
  }
  return total;
}

/// What the compute streams compute.
int64_t kernel_ns(const std::vector<TraceEvent>& events, const std::set<int>& compute_ids) {
  int64_t total = 0;
  for (const TraceEvent& e : events) {
    const std::string_view name = e.name;
    const bool is_kernel = name != "wait" && name != "all_gather" && name != "all_reduce";
    if (is_kernel && compute_ids.count(e.stream_id) != 0) total += e.end_ns - e.begin_ns;
  }
  return total;
}

/// Latency and bandwidth that make a gather of a block take `transfer_ms`, half by each.
struct Network {
  double latency_us = 0, bandwidth_bytes_per_s = 0;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Medians over `num_steps` steps.
Exposure measure_overlap(int prefetch, int num_ranks, const Network& network, int num_steps) {
  Workload work;
  work.model = llama(kOverlapBlocks, kOverlapWidth, /*context=*/64);
  work.micro_batch = 40;
  work.fsdp.prefetch_forward = work.fsdp.prefetch_backward = prefetch;
  dist::LocalOptions options = local_options();
  options.latency_us = network.latency_us;
  options.bandwidth_bytes_per_s = network.bandwidth_bytes_per_s;
  std::set<int> compute_ids;
  std::mutex mutex;
  std::vector<double> step_ms, exposed_ms, compute_ms;
  dist::run_ranks(num_ranks, options, [&](dist::World& world) {
    BenchTraining training = start(world, work);
    training.step(kLr);
    training.finish();
    {
      std::lock_guard lock(mutex);
      compute_ids.insert(Context::current()->compute().id());
    }
    world.control().barrier();
    for (int i = 0; i < num_steps; ++i) {
      if (world.rank() == 0) profiler::start();
      world.control().barrier();
      const int64_t begin = profiler::now_ns();
      training.step(kLr);
      training.finish();
      if (world.rank() == 0) {
        step_ms.push_back(ms(profiler::now_ns() - begin));
        profiler::stop();
        const std::vector<TraceEvent> events = profiler::events();
        exposed_ms.push_back(ms(exposed_ns(events, compute_ids)) / num_ranks);
        compute_ms.push_back(ms(kernel_ns(events, compute_ids)) / num_ranks /
                             (2 * dist::ShardView(training.fsdp()).num_units()));
      }
      world.control().barrier();
    }
  });
  return {median(step_ms), median(exposed_ms), median(compute_ms)};
}

bool bench_overlap(bool as_json) {
  constexpr int kRanks = 2, kSteps = 5;
  // As fast as this machine computes now: a third of a unit's mean time, forward and backward.
  const int64_t start = profiler::now_ns();
  const double transfer_ms = measure_overlap(1, kRanks, {}, 3).compute_ms_a_unit / 3;
  // That were 4 steps; three times 6 follow, which also wait for the network.
  say_estimate(seconds_since(start) / 4 * 18 * 1.5);
  const double nbytes = 4.0 * static_cast<double>(12 * kOverlapWidth * kOverlapWidth) / kRanks;
  const Network network{1e3 * transfer_ms / 2, 1e3 * nbytes * (kRanks - 1) / (transfer_ms / 2)};
  if (!as_json) {
    fmt::print(
        "overlap: {} blocks on {} ranks, a network of {:.1f} ms latency and {:.2f} GB/s\n"
        "  prefetch   step ms  exposed ms  of prefetch 0  compute ms a unit  transfer ms a unit\n",
        kOverlapBlocks, kRanks, network.latency_us * 1e-3, network.bandwidth_bytes_per_s * 1e-9);
  }
  double first = 0;
  bool ok = true;
  for (const int prefetch : {0, 1, 2}) {
    const Exposure e = measure_overlap(prefetch, kRanks, network, kSteps);
    if (prefetch == 0) first = e.exposed_ms;
    const double ratio = e.exposed_ms / first;
    if (prefetch > 0) ok = ok && ratio < 0.1;
    if (as_json) {
      fmt::print("{}\n", json{{"bench", "overlap"},
                              {"prefetch", prefetch},
                              {"step_ms", e.step_ms},
                              {"exposed_ms", e.exposed_ms},
                              {"exposed_ratio", ratio},
                              {"compute_ms_a_unit", e.compute_ms_a_unit},
                              {"transfer_ms_a_unit", transfer_ms}}
                             .dump());
    } else {
      fmt::print("  {:>8}  {:>8.1f}  {:>10.2f}  {:>12.1f}%  {:>17.2f}  {:>18.2f}\n", prefetch,
                 e.step_ms, e.exposed_ms, 100 * ratio, e.compute_ms_a_unit, transfer_ms);
    }
  }
  return ok;
}

// ---- batch

struct BatchRun {
  bool runs = false;
  double step_ms = 0, first_loss = 0, last_loss = 0;
};

/// Whether `micro_batch` samples a rank fit the limit, and how fast they train.
BatchRun try_batch(Workload work, int64_t micro_batch, int64_t limit, int num_ranks, int steps) {
  work.micro_batch = micro_batch;
  dist::LocalOptions options = local_options();
  options.context.memory_limit = limit;
  BatchRun result;
  try {
    dist::run_ranks(num_ranks, options, [&](dist::World& world) {
      BenchTraining training = start(world, work);
      const double first = training.step(kLr).item();
      double last = training.step(kLr).item();
      training.finish();
      const int64_t begin = profiler::now_ns();
      for (int i = 0; i < steps; ++i) last = training.step(kLr).item();
      training.finish();
      if (world.rank() != 0) return;
      const auto tokens = static_cast<double>(micro_batch * work.model.context_length);
      result = {true, ms(profiler::now_ns() - begin) / std::max(steps, 1), first / tokens,
                last / tokens};
    });
  } catch (const OutOfMemoryError&) {
    result.runs = false;
  }
  return result;
}

int64_t largest_batch(const Workload& work, int64_t limit, int num_ranks) {
  const auto runs = [&](int64_t batch) {
    return batch == 0 || try_batch(work, batch, limit, num_ranks, 0).runs;
  };
  int64_t good = 0, bad = 1;
  while (runs(bad)) good = bad, bad *= 2;
  while (bad - good > std::max<int64_t>(1, good / 8)) {
    const int64_t middle = (good + bad) / 2;
    (runs(middle) ? good : bad) = middle;
  }
  return good;
}

bool bench_batch(bool as_json) {
  constexpr int kRanks = 4;
  constexpr int64_t kLimit = int64_t{64} << 20;
  Workload work;
  work.model = llama(/*layers=*/4, /*width=*/256, /*context=*/32);
  Workload larger = work;
  larger.model.num_layers = 8;
  if (!as_json) {
    fmt::print(
        "batch: {} ranks with {} each, Llama of width 256, 32 tokens a sample\n"
        "  strategy    blocks  largest micro-batch   step ms  samples/s\n",
        kRanks, format_nbytes(kLimit));
  }
  int64_t batches[2] = {};
  bool ok = true;
  int row = 0;
  for (const Strategy strategy : {Strategy::kNoShard, Strategy::kFullShard}) {
    work.fsdp.strategy = larger.fsdp.strategy = strategy;
    const int64_t start = profiler::now_ns();
    const int64_t batch = batches[row++] = largest_batch(work, kLimit, kRanks);
    // full_shard tries more and larger ones.
    if (row == 1) say_estimate(seconds_since(start) * 10);
    const BatchRun run = try_batch(work, std::max<int64_t>(batch, 1), kLimit, kRanks, 3);
    const double rate = static_cast<double>(batch * kRanks) / (run.step_ms * 1e-3);
    // The larger model: whether it starts at all, and whether it learns.
    const BatchRun large = try_batch(larger, 1, kLimit, kRanks, 5);
    const bool learns = large.runs && large.last_loss < large.first_loss;
    ok = ok && run.runs && learns == (strategy == Strategy::kFullShard);
    if (as_json) {
      fmt::print("{}\n", json{{"bench", "batch"},
                              {"strategy", name_of(strategy)},
                              {"ranks", kRanks},
                              {"limit_bytes", kLimit},
                              {"micro_batch", batch},
                              {"step_ms", run.step_ms},
                              {"samples_per_s", rate},
                              {"larger_model_trains", learns}}
                             .dump());
      continue;
    }
    fmt::print("  {:<10}  {:>6}  {:>19}  {:>8.1f}  {:>9.1f}\n", name_of(strategy),
               work.model.num_layers, batch, run.step_ms, rate);
    if (large.runs) {
      fmt::print("  {:<10}  {:>6}  trains: loss {:.3f} -> {:.3f} nats a token in 7 steps of 1\n",
                 name_of(strategy), larger.model.num_layers, large.first_loss, large.last_loss);
    } else {
      fmt::print("  {:<10}  {:>6}  out of memory with 1 sample\n", name_of(strategy),
                 larger.model.num_layers);
    }
  }
  if (!as_json) {
    fmt::print(
        "  full_shard runs a batch {:.1f} times as large\n",
        static_cast<double>(batches[1]) / static_cast<double>(std::max<int64_t>(1, batches[0])));
  }
  return ok && batches[1] >= 2 * batches[0];
}

// ---- memory

/// Bytes of parameters, gradients and states a parameter on one rank.
double expected_bytes(Strategy strategy, bool is_bf16, int world, int shard_size) {
  const double states = is_bf16 ? 18 : 16;
  switch (strategy) {
    case Strategy::kNoShard:
      return states;
    case Strategy::kShardOptim:  // parameters and f32 gradients are whole
      return is_bf16 ? 6 + 16.0 / world : 8 + 12.0 / world;
    default:
      return states / shard_size;
  }
}

bool bench_memory(bool as_json) {
  if (!as_json) {
    fmt::print(
        "memory: bytes a parameter on a rank: parameters, gradients and AdamW states (expected) + "
        "gathered units, slots and staging, of which the ring is one of 2 blocks here\n"
        "  strategy            dtype  {:>26}{:>26}{:>26}{:>26}\n",
        "1 rank", "2 ranks", "4 ranks", "8 ranks");
  }
  bool ok = true, has_said_estimate = false;
  for (const Strategy strategy :
       {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kShardOptim, Strategy::kNoShard,
        Strategy::kHybridShard, Strategy::kHybridShardZero2}) {
    for (const bool is_bf16 : {false, true}) {
      std::string line =
          fmt::format("  {:<18}  {:<5}  ", name_of(strategy), is_bf16 ? "bf16" : "f32");
      for (const int world_size : {1, 2, 4, 8}) {
        Workload work;
        work.model = llama(/*layers=*/2, /*width=*/256, /*context=*/8);
        work.micro_batch = 1;
        work.fsdp.strategy = strategy;
        work.fsdp.precision.param_dtype = is_bf16 ? kBF16 : kF32;
        const bool is_hybrid =
            strategy == Strategy::kHybridShard || strategy == Strategy::kHybridShardZero2;
        const int shard_size = is_hybrid ? std::max(1, world_size / 2) : world_size;
        if (is_hybrid) work.fsdp.shard_size = shard_size;
        double actual = 0, gathered = 0;
        bool is_as_said = true;
        const int64_t begin = profiler::now_ns();
        dist::run_ranks(world_size, local_options(), [&](dist::World& world) {
          BenchTraining training = start(world, work);
          training.step(kLr);
          training.finish();
          if (world.rank() != 0) return;
          const auto by_class = Context::current()->allocator()->stats().allocated_by_class;
          int64_t nbytes = 0;
          for (const MemoryClass c :
               {MemoryClass::kParameters, MemoryClass::kGradients, MemoryClass::kOptimizer}) {
            nbytes += by_class[static_cast<size_t>(c)];
          }
          const auto count = static_cast<double>(dist::ShardView(training.fsdp()).num_parameters());
          const auto gathered_nbytes = by_class[static_cast<size_t>(MemoryClass::kGathered)];
          actual = static_cast<double>(nbytes) / count;
          gathered = static_cast<double>(gathered_nbytes) / count;
          const dist::MemoryPlan plan = training.fsdp().memory();
          for (const MemoryClass c :
               {MemoryClass::kParameters, MemoryClass::kGradients, MemoryClass::kGathered}) {
            // A cached block that would leave less than `memory.split` is counted whole.
            const int64_t said = plan.nbytes_of(c), counted = by_class[static_cast<size_t>(c)];
            is_as_said = is_as_said && said <= counted && counted - said <= said / 100;
          }
        });
        // The first of 48, whose mean number of ranks is 15 / 4.
        if (!std::exchange(has_said_estimate, true))
          say_estimate(seconds_since(begin) * 48 * 15 / 4);
        const double expected = expected_bytes(strategy, is_bf16, world_size, shard_size);
        ok = ok && is_as_said && std::abs(actual - expected) <= 0.01 * expected;
        line += fmt::format("  {:>6.3f} ({:>6.3f}) + {:>5.2f}", actual, expected, gathered);
        if (as_json) {
          fmt::print("{}\n", json{{"bench", "memory"},
                                  {"strategy", name_of(strategy)},
                                  {"param_dtype", is_bf16 ? "bf16" : "f32"},
                                  {"world_size", world_size},
                                  {"shard_size", shard_size},
                                  {"bytes_per_parameter", actual},
                                  {"gathered_bytes_per_parameter", gathered},
                                  {"expected", expected}}
                                 .dump());
        }
      }
      if (!as_json) fmt::print("{}\n", line);
    }
  }
  return ok;
}

/// The peak of a step of a model whose embedding and head are 16 times as large as a block, with
/// their gradients whole and in pieces. Whether pieces take as much less as the plan says.
bool bench_pieces(bool as_json) {
  constexpr int kRanks = 2;
  int64_t peak[2] = {}, slots[2] = {};
  double loss[2] = {};
  for (const bool is_in_pieces : {false, true}) {
    Workload work;
    work.model = llama(/*layers=*/2, /*width=*/128, /*context=*/64);
    work.model.vocab_size = 25000;
    work.micro_batch = 1;
    work.fsdp.gradient_pieces = is_in_pieces;
    dist::run_ranks(kRanks, local_options(), [&](dist::World& world) {
      BenchTraining training = start(world, work);
      training.step(kLr);
      training.finish();
      Context::current()->allocator()->reset_peak();
      const double last = training.step(kLr).item();
      training.finish();
      if (world.rank() != 0) return;
      peak[is_in_pieces] = Context::current()->allocator()->stats().peak_allocated;
      slots[is_in_pieces] = training.fsdp().memory().nbytes_of(MemoryClass::kGathered);
      loss[is_in_pieces] = last;
    });
  }
  if (as_json) {
    fmt::print("{}\n", json{{"bench", "pieces"},
                            {"ranks", kRanks},
                            {"peak_bytes_whole", peak[0]},
                            {"peak_bytes_pieces", peak[1]},
                            {"slots_bytes_whole", slots[0]},
                            {"slots_bytes_pieces", slots[1]}}
                           .dump());
  } else {
    fmt::print(
        "gradients of a vocabulary of 25000, {} ranks: peak of a step {:.1f} MiB whole, {:.1f} in "
        "pieces; of it slots and gathered units {:.1f} and {:.1f}\n",
        kRanks, mib(peak[0]), mib(peak[1]), mib(slots[0]), mib(slots[1]));
  }
  return loss[0] == loss[1] && peak[1] < peak[0] && slots[1] < slots[0];
}

int run(int argc, char** argv) {
  CommandLine app("What sharding is for, measured on thread ranks. Exit status 1 if a claim fails.",
                  "tessera-bench-fsdp");
  std::vector<std::string> names;
  bool as_json = false;
  app.add_option("bench", names, "overlap, batch, memory; default: all of them")
      ->check(CLI::IsMember({"overlap", "batch", "memory"}));
  app.add_flag("--json", as_json, "one JSON object a line instead of tables");
  if (const auto status = app.read(argc, argv)) return *status;
  if (names.empty()) names = {"overlap", "batch", "memory"};
  bool ok = true;
  for (const std::string& name : names) {
    const bool holds = name == "overlap" ? bench_overlap(as_json)
                       : name == "batch" ? bench_batch(as_json)
                                         : bench_memory(as_json) && bench_pieces(as_json);
    if (!holds) fmt::print(stderr, "{}: the claim does not hold here\n", name);
    ok = ok && holds;
  }
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace tessera::apps

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] { return tessera::apps::run(argc, argv); });
}
