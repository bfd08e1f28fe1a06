// The peak of a step, against formulas of what a block keeps for backward.

#include <map>
#include <set>

#include "core/runtime/allocator.h"
#include "test/dist/fsdp/combos.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using Kind = nn::RecomputePolicy::Kind;

constexpr int kWorld = 2;
constexpr int64_t kRows = 2 * 16;  // of a rank's micro-batch

/// Bytes of a tensor of `per_row` f32 elements a row, in the allocator's granules.
int64_t nbytes(int64_t per_row) {
  return (kRows * per_row * 4 + 511) / 512 * 512;
}

/// What a block of the Llama keeps for backward, its input aside.
int64_t saved_nbytes(const nn::LlamaConfig& c) {
  const int64_t C = c.width, D = C / c.num_heads, H = c.num_heads, G = c.num_kv_heads;
  const int64_t F = c.ffn_width;
  int64_t sum = 0;
  sum += nbytes(C) + nbytes(1);              // norm1: y, rstd
  sum += nbytes((H + 2 * G) * D);            // q, k, v before the rotation, of which v is used
  sum += nbytes(H * D) + nbytes(G * D);      // rotated q, k
  sum += nbytes(H * D) + nbytes(H);          // attention: y, log-sum-exp
  sum += nbytes(C) + nbytes(C) + nbytes(1);  // norm2: sum, y, rstd
  sum += nbytes(2 * F) + nbytes(F);          // mlp: gate and up, their product
  return sum;
}

nn::LlamaConfig model_of(int64_t num_layers) {
  nn::LlamaConfig c = FsdpRun::tiny_llama();
  c.num_layers = num_layers;
  c.ffn_width = 200;  // a block's backward is what takes most
  return c;
}

struct Peak {
  int64_t activations = 0;  // at the moment of the peak of all
  int64_t others = 0;       // parameters, gradients, states, slots and tables
  int64_t others_after = 0;
};

/// Of step 1 on rank 0.
Peak peak_of(FsdpRun run, int64_t num_layers, const nn::RecomputePolicy& recompute) {
  Peak peak;
  run.model = model_of(num_layers);
  run.samples_per_step = 2 * kWorld;
  run.num_steps = 2;
  run.recompute = recompute;
  run.on_step = [&](int step, dist::Fsdp&, dist::World& world) {
    current_stream().synchronize();
    Allocator& allocator = *Context::current()->allocator();
    if (step == 0) allocator.reset_peak();
    if (step == 0 || world.rank() != 0) return;
    const AllocatorStats stats = allocator.stats();
    const auto activations = static_cast<size_t>(MemoryClass::kActivations);
    peak.activations = stats.peak_by_class[activations];
    peak.others = stats.peak_allocated - peak.activations;
    peak.others_after = stats.allocated - stats.allocated_by_class[activations];
  };
  run_fsdp_on_threads(kWorld, run);
  return peak;
}

TEST_CASE("fsdp peak: activations are as the formula says, whatever the depth and the settings",
          "[fsdp]") {
  const nn::LlamaConfig c = model_of(2);
  const int64_t block = saved_nbytes(c) + nbytes(c.width);  // and its input
  // In the last block's backward: gradients of gate and up, of the block's output and of what the
  // block was added to. Ids, targets and scalars take a granule each.
  const int64_t workspace = nbytes(2 * c.ffn_width) + 2 * nbytes(c.width);
  std::set<int64_t> rests;
  for (const dist::Strategy strategy : kAllStrategies) {
    for (const int prefetch : {0, 1, 2}) {
      for (const int64_t num_layers : {2, 8, 32}) {
        FsdpRun run;
        run.fsdp.strategy = strategy;
        run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
        if (strategy >= dist::Strategy::kHybridShard) run.fsdp.shard_size = 2;
        const Peak peak = peak_of(run, num_layers, {Kind::kNone});
        INFO(fmt::format("{}, prefetch {}, {} layers", name_of(strategy), prefetch, num_layers));
        CHECK(peak.others == peak.others_after);  // nothing else comes and goes in a step
        rests.insert(peak.activations - num_layers * block - workspace);
      }
    }
  }
  INFO(fmt::format("{}", fmt::join(rests, " ")));
  CHECK(rests.size() == 1);
  CHECK(*rests.begin() >= 0);
  CHECK(*rests.begin() <= 6 * 512);
}

TEST_CASE("fsdp peak: recompute lowers it by what the policy plans", "[fsdp]") {
  const nn::LlamaConfig c = model_of(2);
  const int64_t saved = saved_nbytes(c), input = nbytes(c.width);
  // Norms run again, and so does the product of gate and up.
  const int64_t cheap = 2 * (nbytes(c.width) + nbytes(1)) + nbytes(c.ffn_width);
  for (const bool reshards : {false, true}) {
    for (const int prefetch : {0, 1, 2}) {
      FsdpRun run;
      run.fsdp.strategy = reshards ? dist::Strategy::kFullShard : dist::Strategy::kShardGradOp;
      run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
      std::map<int64_t, int64_t> none, selective;
      for (const int64_t num_layers : {2, 8, 32}) {
        INFO(fmt::format("reshards {}, prefetch {}, {} layers", reshards, prefetch, num_layers));
        none[num_layers] = peak_of(run, num_layers, {Kind::kNone, 2}).activations;
        selective[num_layers] = peak_of(run, num_layers, {Kind::kSelective, 2}).activations;
        // One block at a time is whole, with its output computed again.
        CHECK(none[num_layers] - peak_of(run, num_layers, {Kind::kFull, 2}).activations ==
              (num_layers - 1) * saved - input);
        CHECK(none[num_layers] - peak_of(run, num_layers, {Kind::kEveryN, 2}).activations ==
              num_layers / 2 * saved);
      }
      // A block that computes its cheap part again takes more at once: what counts is the depth.
      for (const int64_t num_layers : {8, 32}) {
        CHECK(none[num_layers] - none[2] - (selective[num_layers] - selective[2]) ==
              (num_layers - 2) * cheap);
      }
    }
  }
}

TEST_CASE(
    "fsdp peak: with MLPs in tiles and checkpoints on the host it does not grow with the depth",
    "[fsdp]") {
  const nn::LlamaConfig c = model_of(2);
  const int64_t input = nbytes(c.width);
  for (const int prefetch : {0, 2}) {
    FsdpRun run;
    run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
    std::map<int64_t, int64_t> full, tiled, away;
    for (const int64_t num_layers : {2, 8, 32}) {
      full[num_layers] = peak_of(run, num_layers, {Kind::kFull}).activations;
      tiled[num_layers] =
          peak_of(run, num_layers, {.kind = Kind::kFull, .mlp_tile = 4}).activations;
      const Peak peak =
          peak_of(run, num_layers, {.kind = Kind::kFull, .offload = true, .mlp_tile = 4});
      away[num_layers] = peak.activations;
      INFO(fmt::format("prefetch {}, {} layers: {} {} {}", prefetch, num_layers, full[num_layers],
                       tiled[num_layers], away[num_layers]));
      CHECK(peak.others == peak.others_after);
      CHECK(tiled[num_layers] - tiled[2] == (num_layers - 2) * input);
      CHECK(away[num_layers] == away[2]);
      // Gate and up, their product and the gradient of both: five widths of all rows, or of a tile.
      CHECK(full[num_layers] - tiled[num_layers] > nbytes(3 * c.ffn_width));
    }
  }
}

}  // namespace
}  // namespace tessera::testing
