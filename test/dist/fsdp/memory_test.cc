// What sharding costs in memory is what is said of it, and what an out-of-memory error advises
// helps.

#include <algorithm>
#include <sstream>

#include "core/autograd.h"
#include "dist/comm/local.h"
#include "optim/adamw.h"
#include "test/dist/fsdp/memory_cases.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::Strategy;

TEST_CASE("fsdp memory: what is said is what the allocator sees, under every strategy", "[fsdp]") {
  check_memory_cases();
}

TEST_CASE("fsdp memory: parts, no_sync's gradients and reproducible sums are in it", "[fsdp]") {
  const auto entries_of = [](int world_size, FsdpRun run) {
    std::vector<std::string> entries;
    std::string problem;
    dist::run_ranks(world_size, [&](dist::World& world) {
      const std::string mine = memory_problem(world, run);
      if (world.rank() == 0) problem = mine;
    });
    return problem;
  };
  FsdpRun parts;
  parts.fsdp.reshard_after_forward = 2;
  CHECK(entries_of(4, parts) == "");
  FsdpRun reproducible;
  reproducible.fsdp.reproducible = true;
  reproducible.num_micro_batches = 4;
  CHECK(entries_of(2, reproducible) == "");
}

TEST_CASE("fsdp memory: one rank writes f32 gradients where they stay, others in slots", "[fsdp]") {
  const auto slots_of = [](int world_size, Precision precision) {
    int64_t nbytes = 0;
    FsdpRun run;
    set_precision(run, precision);
    run.samples_per_step = 2 * world_size;
    run.on_step = [&](int step, dist::Fsdp& fsdp, dist::World& world) {
      if (step == 1 && world.rank() == 0) {
        nbytes = fsdp.memory().nbytes_of(MemoryClass::kGathered);
      }
    };
    dist::run_ranks(world_size, [&](dist::World& world) { run_fsdp(world, run); });
    return nbytes;
  };
  CHECK(slots_of(1, Precision::kF32) == 0);
  CHECK(slots_of(1, Precision::kBF16) > 0);
  CHECK(slots_of(2, Precision::kF32) > 0);
}

// ---- out of memory

/// A model whose states take most of the memory, and one whose activations do.
struct Job {
  nn::LlamaConfig model;
  int64_t batch = 1;
  nn::RecomputePolicy recompute;
  dist::FsdpOptions fsdp;
};

enum class Phase { kSetUp, kOptimizer, kForward, kBackward };
constexpr Phase kPhases[] = {Phase::kSetUp, Phase::kOptimizer, Phase::kForward, Phase::kBackward};

Job wide_job() {
  Job job;
  job.model = FsdpRun::tiny_llama();
  job.model.vocab_size = 128;
  job.model.num_layers = 8;
  job.model.width = 256;
  job.model.ffn_width = 512;
  return job;
}

/// Two steps under a limit; bytes that rank 0 has taken from the system after each phase, and in
/// `peak`, if given, those in use at once.
std::map<Phase, int64_t> train(int world_size, const Job& job, int64_t limit,
                               int64_t* peak = nullptr) {
  std::map<Phase, int64_t> reserved;
  dist::LocalOptions local;
  local.context.poison = local.context.order_check = false;
  local.context.memory_limit = limit;
  dist::run_ranks(world_size, local, [&](dist::World& world) {
    const auto note = [&](Phase phase) {
      current_stream().synchronize();
      if (world.rank() == 0) {
        const int64_t peak = Context::current()->allocator()->stats().peak_reserved;
        reserved[phase] = std::max(reserved[phase], peak);
      }
    };
    std::unique_ptr<nn::Llama> model;
    {
      const nn::DeferredInit deferred;
      model = std::make_unique<nn::Llama>(job.model);
    }
    model->set_recompute(job.recompute);
    const auto fsdp = dist::fully_shard(*model, world, job.fsdp);
    fsdp->initialize(1);
    note(Phase::kSetUp);
    optim::AdamW adamw(fsdp->shards(), {});
    note(Phase::kOptimizer);
    for (int step = 0; step < 2; ++step) {
      const Tensor ids = zeros({job.batch, job.model.context_length}, kI32);
      const Tensor loss = model->loss(ids, ids).sum;
      if (step == 0) note(Phase::kForward);
      backward(loss);
      const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
      adamw.step(1e-3f, clip.factor);
      fsdp->end_step();
      if (step == 0) note(Phase::kBackward);
    }
    current_stream().synchronize();
    if (world.rank() == 0 && peak != nullptr) {
      *peak = Context::current()->allocator()->stats().peak_allocated;
    }
  });
  return reserved;
}

std::string out_of_memory(int world_size, const Job& job, int64_t limit) {
  try {
    train(world_size, job, limit);
  } catch (const OutOfMemoryError& error) {
    return error.what();
  }
  return "no error";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("fsdp memory: where states fill it, sharding is advised in every phase, and it fits",
          "[fsdp]") {
  Job job = wide_job();
  job.fsdp.strategy = Strategy::kNoShard;
  Job advised = job;
  advised.fsdp.strategy = Strategy::kFullShard;
  constexpr int kWorld = 4;
  const std::map<Phase, int64_t> needs = train(kWorld, job, 0);
  const std::map<Phase, int64_t> needs_less = train(kWorld, advised, 0);
  int64_t before = 0;
  for (const Phase phase : kPhases) {
    // What the phases before need, and a part of what this one takes.
    const int64_t after = needs.at(phase);
    const int64_t limit = before + (after - before) * 3 / 4;
    before = after;
    INFO(fmt::format("phase {}, limit {}", static_cast<int>(phase), format_nbytes(limit)));
    if (limit >= after) continue;  // nothing is taken in this phase
    const std::string text = out_of_memory(kWorld, job, limit);
    INFO(text);
    CHECK(has(text, "for parameters, gradients, optimizer states and gathered units; less with"));
    CHECK(has(text, "    FsdpOptions::strategy=full_shard "));
    CHECK(has(text, "    FsdpOptions::offload=params_and_optimizer "));
    CHECK(has(text, "    FsdpOptions::offload=optimizer "));
    CHECK(has(text, "  unit                       parameters    gradients     gathered\n"));
    CHECK(has(text, "  blocks.0 "));
    CHECK(has(text, "  and 5 more\n"));
    CHECK_FALSE(has(text, "batch"));
    if (phase == Phase::kSetUp && needs_less.at(Phase::kBackward) > limit) continue;
    CHECK(out_of_memory(kWorld, advised, limit) == "no error");
  }
  // Offload, as it advises, fits where no sharding does not.
  Job offloaded = job;
  offloaded.fsdp.offload = dist::Offload::kParamsAndOptimizer;
  offloaded.fsdp.offload_window = 16384;
  CHECK(out_of_memory(kWorld, offloaded, needs.at(Phase::kOptimizer) * 3 / 4) == "no error");
}

/// What `text` proposes and how many bytes less it promises.
std::map<std::string, double> proposals_of(const std::string& text) {
  std::map<std::string, double> proposals;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t about = line.find(" about ");
    if (!line.starts_with("    ") || about == std::string::npos) continue;
    std::istringstream words(line.substr(about + 7));
    double number = 0;
    std::string unit;
    words >> number >> unit;
    const double scale = unit == "KiB" ? 1024 : unit == "MiB" ? 1024 * 1024 : 1;
    proposals[line.substr(4, line.find_last_not_of(' ', about) - 3)] = number * scale;
  }
  return proposals;
}

TEST_CASE("fsdp memory: what an advice promises is what following it gives", "[fsdp]") {
  struct Start {
    int world_size;
    Strategy strategy;
    dist::GradSync sync;
    dist::WrapPolicy wrap;
    std::vector<std::string> proposals;
  };
  const std::string full = "FsdpOptions::strategy=full_shard",
                    prefetch = "FsdpOptions::prefetch_forward=0, FsdpOptions::prefetch_backward=0",
                    optimizer = "FsdpOptions::offload=optimizer",
                    params = "FsdpOptions::offload=params_and_optimizer",
                    bf16 = "PrecisionOptions::param_dtype=bf16",
                    sync = "FsdpOptions::sync_every_micro_batch=true",
                    ranks = "4 ranks instead of 2";
  constexpr auto kEvery = dist::GradSync::kEveryMicroBatch, kLast = dist::GradSync::kLast;
  const Start starts[] = {
      {2, Strategy::kNoShard, kEvery, nullptr, {full, optimizer, params}},
      {2, Strategy::kShardOptim, kLast, nullptr, {full, optimizer, params}},
      {2, Strategy::kFullShard, kLast, nullptr, {ranks, sync, optimizer, params, prefetch}},
      {2,
       Strategy::kFullShard,
       kEvery,
       dist::wrap::whole_model(),
       {ranks, optimizer, params, bf16}},
  };
  for (const Start& start : starts) {
    Job job = wide_job();
    job.fsdp.strategy = start.strategy;
    job.fsdp.sync_every_micro_batch = start.sync;
    job.fsdp.wrap = start.wrap;
    job.fsdp.offload_window = 16384;
    int64_t need = 0;
    const std::map<Phase, int64_t> needs = train(start.world_size, job, 0, &need);
    // In the backward all that stays is there.
    const std::string text =
        out_of_memory(start.world_size, job, needs.at(Phase::kBackward) * 9 / 10);
    INFO(name_of(start.strategy) << "\n" << text);
    const std::map<std::string, double> proposals = proposals_of(text);
    for (const auto& [proposal, promised] : proposals) {
      INFO(proposal);
      CHECK(std::count(start.proposals.begin(), start.proposals.end(), proposal) == 1);
      Job followed = job;
      dist::FsdpOptions& o = followed.fsdp;
      int world_size = start.world_size;
      if (proposal == full) o.strategy = Strategy::kFullShard, o.sync_every_micro_batch = kEvery;
      if (proposal == ranks) world_size = 4, o.sync_every_micro_batch = kEvery;
      if (proposal == sync) o.sync_every_micro_batch = kEvery;
      if (proposal == optimizer) o.offload = dist::Offload::kOptimizer;
      if (proposal == params) o.offload = dist::Offload::kParamsAndOptimizer;
      if (proposal == prefetch) o.prefetch_forward = o.prefetch_backward = 0;
      if (proposal == bf16) o.precision.param_dtype = kBF16;
      int64_t needed = 0;
      train(world_size, followed, 0, &needed);
      const double saved = static_cast<double>(need - needed);
      CHECK(saved > 0.9 * promised);
      CHECK(saved < 1.15 * promised);
    }
    CHECK(proposals.size() == start.proposals.size());
    CHECK(has(text, "smaller units") == static_cast<bool>(start.wrap));
  }
}

TEST_CASE("fsdp memory: gradients of a large vocabulary in pieces save what an advice promises",
          "[fsdp]") {
  Job job = wide_job();
  job.model.vocab_size = 8192;
  const std::string pieces = "FsdpOptions::gradient_pieces=true";
  int64_t need = 0, needed = 0;
  const int64_t at_backward = train(2, job, 0, &need).at(Phase::kBackward);
  const std::map<std::string, double> proposals =
      proposals_of(out_of_memory(2, job, at_backward * 9 / 10));
  REQUIRE(proposals.count(pieces) == 1);
  job.fsdp.gradient_pieces = true;
  train(2, job, 0, &needed);
  const double saved = static_cast<double>(need - needed);
  INFO(fmt::format("{} bytes promised, {} saved", proposals.at(pieces), saved));
  CHECK(saved > 0.9 * proposals.at(pieces));
  CHECK(saved < 1.15 * proposals.at(pieces));
  // What is so already is not advised.
  CHECK(proposals_of(out_of_memory(2, job, at_backward / 2)).count(pieces) == 0);
}

TEST_CASE("fsdp memory: where everything is sharded, more ranks and smaller units are advised",
          "[fsdp]") {
  Job job = wide_job();
  job.fsdp.wrap = dist::wrap::whole_model();
  const int64_t need = train(2, job, 0).at(Phase::kBackward);
  const std::string text = out_of_memory(2, job, need / 2);
  INFO(text);
  CHECK(has(text, "    4 ranks instead of 2 "));
  CHECK(has(text, "    FsdpOptions::wrap: smaller units "));
  CHECK(has(text, "    PrecisionOptions::param_dtype=bf16 "));
  job.fsdp.wrap = nullptr;
  CHECK(out_of_memory(2, job, need * 3 / 4) == "no error");
}

TEST_CASE("fsdp memory: where activations fill it, smaller batches and recompute are advised",
          "[fsdp]") {
  Job job;
  job.model = FsdpRun::tiny_llama();
  job.model.num_layers = 6;
  job.batch = 128;
  const std::map<Phase, int64_t> needs = train(1, job, 0);
  for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
    const int64_t before = needs.at(phase == Phase::kForward ? Phase::kOptimizer : Phase::kForward);
    const int64_t limit = before + (needs.at(phase) - before) * 3 / 4;
    if (limit >= needs.at(phase)) continue;
    const std::string text = out_of_memory(1, job, limit);
    INFO(text);
    CHECK(has(text, "for activations; less with"));
    CHECK(has(text, "    batch, half of it "));
    CHECK(has(text, "    RecomputePolicy::kind=full, or selective "));
    CHECK(has(text, "    sequence, half of it "));
    CHECK_FALSE(has(text, "FsdpOptions::"));
    Job halved = job, recomputed = job;
    halved.batch /= 2;
    recomputed.recompute.kind = nn::RecomputePolicy::Kind::kFull;
    CHECK(out_of_memory(1, halved, limit) == "no error");
    CHECK(out_of_memory(1, recomputed, limit) == "no error");
  }
}

}  // namespace
}  // namespace tessera::testing
