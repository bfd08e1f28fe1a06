// tessera-bench-checkpoint: what saving costs. Under mpirun -n N: the time of a step, of the copy
// into host memory, and of a step during which a checkpoint is written, in turns, so that what else
// the machine does meets all three alike; the writer's bytes/s beside `dd` on the same disk. Ends
// with status 1 if the step that saves takes more than 1.2 normal steps and the copy, by medians.
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "apps/bench/bench.h"
#include "apps/command_line.h"
#include "apps/program.h"
#include "core/autograd.h"
#include "core/runtime/context.h"
#include "dist/checkpoint/writer.h"
#include "nn/llama/llama.h"
#include "optim/adamw.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}
double smallest(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

/// After a save: the one before it is removed meanwhile, and its blocks are given back.
constexpr std::chrono::milliseconds kRest{300};

struct Options {
  std::string dir = "out/bench-checkpoint", device = "auto";
  int64_t layers = 8, width = 512, vocab = 16384, tokens = 256;
  int saves = 7;
};

/// A fresh directory in `parent`, which rank 0 makes, and removes at the end with what is in it; a
/// parent that was there before stays, with all that is in it. Collective.
class ScratchDir {
 public:
  ScratchDir(const std::string& parent, dist::World& world) {
    world.control().verdict([&] {
      if (world.rank() != 0) return;
      std::error_code error;
      std::filesystem::create_directories(parent, error);
      std::string name = parent + "/tessera-bench-checkpoint-XXXXXX";
      if (::mkdtemp(name.data()) == nullptr) {
        throw IoError(fmt::format("--dir {}: {}, expected a directory that can be written", parent,
                                  std::strerror(errno)));
      }
      mine_ = path_ = name;
    });
    path_ = world.control().broadcast(path_, 0);
  }
  ~ScratchDir() {
    std::error_code ignored;
    if (!mine_.empty()) std::filesystem::remove_all(mine_, ignored);
  }
  ScratchDir(const ScratchDir&) = delete;
  ScratchDir& operator=(const ScratchDir&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_, mine_;  // `mine_`: of the rank that made it
};

/// For a shell: one word, whatever is in it.
std::string shell_word(const std::string& text) {
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

/// A training whose steps are timed from an idle device to an idle device.
class Bench {
 public:
  Bench(const Options& options, dist::World& world) : options_(options), world_(world) {
    nn::LlamaConfig c;
    c.vocab_size = options.vocab;
    c.context_length = options.tokens;
    c.num_layers = options.layers;
    c.num_heads = 8;
    c.num_kv_heads = 8;
    c.width = options.width;
    c.tied = true;
    {
      nn::DeferredInit deferred;
      model_ = std::make_unique<nn::Llama>(c);
    }
    fsdp_ = dist::fully_shard(*model_, world, {});
    fsdp_->initialize(1);
    optimizer_ = std::make_unique<optim::AdamW>(fsdp_->shards(), optim::AdamWOptions{});
    std::vector<int32_t> ids;
    for (int64_t i = 0; i <= options.tokens; ++i) {
      ids.push_back(static_cast<int32_t>((i * 7919 + world.rank()) % options.vocab));
    }
    const std::span<const int32_t> all(ids);
    inputs_ = from_values(all.first(ids.size() - 1), {1, options.tokens});
    targets_ = from_values(all.last(ids.size() - 1), {1, options.tokens});
  }

  dist::TrainingState state() { return {model_.get(), fsdp_.get(), optimizer_.get(), nullptr}; }

  void step() {
    const Tensor scale = full({}, 1.0 / static_cast<double>(options_.tokens), kF32);
    LinearCrossEntropyOptions loss;
    loss.grad_scale = scale;
    backward(model_->loss(inputs_, targets_, {}, loss).sum, scale);
    const dist::ClippedNorm clip = fsdp_->clip_grad_norm(1.0);
    optimizer_->step(1e-4f, clip.factor, clip.found_inf);
    fsdp_->end_step();
  }
  /// Of the slowest rank.
  template <class F>
  double seconds(F&& f) {
    world_.control().barrier();
    const auto start = Clock::now();
    f();
    Context::current()->compute().synchronize();
    const auto mine = static_cast<int64_t>(since(start) * 1e9);
    return static_cast<double>(world_.control().max(mine)) * 1e-9;
  }

 private:
  const Options& options_;
  dist::World& world_;
  std::unique_ptr<nn::Llama> model_;
  std::unique_ptr<dist::Fsdp> fsdp_;
  std::unique_ptr<optim::AdamW> optimizer_;
  Tensor inputs_, targets_;
};

int run(const Options& options, dist::World& world) {
  ContextOptions context_options;
  context_options.device = world.device(options.device);
  context_options.num_threads = world.num_threads();
  const auto context = std::make_shared<Context>(context_options);
  const Context::Scope scope(context);
  const ScratchDir scratch(options.dir, world);
  Bench bench(options, world);
  for (int i = 0; i < 2; ++i) bench.seconds([&] { bench.step(); });
  std::vector<double> normal, copies, saving, writing, alone;
  dist::Snapshot snapshot(dist::owned_slices(bench.state()));
  bench.seconds([&] { snapshot.capture(); });  // the memory's first touch
  int64_t nbytes = 0;
  {
    dist::CheckpointWriter writer(world, bench.state(),
                                  {.dir = scratch.path(), .run = "bench", .keep = 1});
    const auto end = [&] {
      const std::optional<dist::SaveResult> result = writer.finish();
      if (!result || !result->error.empty()) throw IoError(result ? result->error : "no save");
      return *result;
    };
    dist::Progress progress;
    const auto start = Clock::now();
    for (int i = 0; i <= options.saves; ++i) {
      ++progress.step;
      std::this_thread::sleep_for(kRest);
      const double step = bench.seconds([&] { bench.step(); });
      const double copy = bench.seconds([&] { snapshot.capture(); });
      const double took = bench.seconds([&] {
        writer.begin(progress);
        bench.step();
      });
      const dist::SaveResult beside = end();
      ++progress.step;
      writer.begin(progress);
      const dist::SaveResult result = end();
      if (i == 0) {  // the first touch of its memory
        if (world.rank() == 0) apps::say_estimate(since(start) * options.saves);
        continue;
      }
      normal.push_back(step);
      copies.push_back(copy);
      saving.push_back(took);
      writing.push_back(beside.seconds);
      alone.push_back(result.seconds);
      nbytes = result.nbytes;
    }
  }
  // The same bytes by each rank's own dd, at the same time.
  constexpr int64_t kBlock = int64_t{8} << 20;
  const int64_t blocks = std::max<int64_t>(1, nbytes / world.world_size() / kBlock);
  const std::string file = fmt::format("{}/dd.{}", scratch.path(), world.rank());
  const std::string command =
      fmt::format("dd if=/dev/zero of={} bs={} count={} conv=fsync 2>/dev/null", shell_word(file),
                  kBlock, blocks);
  std::this_thread::sleep_for(kRest);
  int status = 0;
  const double dd = bench.seconds([&] { status = std::system(command.c_str()); });
  TESSERA_CHECK_AS(IoError, status == 0, "bench-checkpoint: dd ended with {}", status);
  world.control().barrier();  // before the files of all ranks go
  const double limit = 1.2 * median(normal) + median(copies);
  const bool is_good = median(saving) <= limit;
  if (world.rank() == 0) {
    const auto mb_per_s = [](int64_t n, double s) { return static_cast<double>(n) / s * 1e-6; };
    fmt::print("{} ranks, a checkpoint of {:.1f} MB; medians of {} saves\n", world.world_size(),
               static_cast<double>(nbytes) * 1e-6, options.saves);
    const auto line = [](const char* name, const std::vector<double>& times) {
      return fmt::format("{:<20} {:8.1f} ms   best {:.1f}", name, median(times) * 1e3,
                         smallest(times) * 1e3);
    };
    fmt::print("{}\n{}\n", line("step", normal), line("copy", copies));
    fmt::print("{}   limit {:.1f} (1.2 steps and the copy): {}\n", line("step that saves", saving),
               limit * 1e3, is_good ? "good" : "too slow");
    fmt::print("write beside it      {:8.1f} ms   {:.0f} MB/s\n", median(writing) * 1e3,
               mb_per_s(nbytes, median(writing)));
    fmt::print("write alone          {:8.1f} ms   {:.0f} MB/s\n", median(alone) * 1e3,
               mb_per_s(nbytes, median(alone)));
    fmt::print("dd                   {:8.1f} ms   {:.0f} MB/s\n", dd * 1e3,
               mb_per_s(blocks * kBlock * world.world_size(), dd));
    fmt::print(
        "{{\"bench\": \"checkpoint\", \"ranks\": {}, \"nbytes\": {}, \"step_ms\": {:.1f}, "
        "\"copy_ms\": {:.1f}, \"saving_step_ms\": {:.1f}, \"limit_ms\": {:.1f}, \"write_mb_s\": "
        "{:.0f}, \"dd_mb_s\": "
        "{:.0f}}}\n",
        world.world_size(), nbytes, median(normal) * 1e3, median(copies) * 1e3,
        median(saving) * 1e3, limit * 1e3, mb_per_s(nbytes, median(alone)),
        mb_per_s(blocks * kBlock * world.world_size(), dd));
    std::fflush(stdout);
  }
  return is_good ? 0 : 1;
}

int run(int argc, char** argv) {
  Options options;
  apps::CommandLine app(
      "What saving a checkpoint costs. Exit status 1 if the step that saves takes too long.",
      "tessera-bench-checkpoint");
  app.add_option("--dir", options.dir,
                 "directory on the disk to measure: a fresh one in it is used and removed");
  app.add_option("--device", options.device, "auto, cpu or cuda");
  app.add_option("--layers", options.layers,
                 "transformer blocks of the model, of which 12 bytes a parameter are saved")
      ->check(apps::in_range<int64_t>(1));
  app.add_option("--width", options.width, "width of the hidden states")
      ->check(apps::in_range<int64_t>(1));
  app.add_option("--tokens", options.tokens, "tokens of a rank and step")
      ->check(apps::in_range<int64_t>(1));
  app.add_option("--saves", options.saves, "saves that are measured")
      ->check(apps::in_range(1, std::optional(1000)));
  if (const auto status = app.read(argc, argv)) return *status;
  return dist::run_main(argc, argv, [&](dist::World& world) { return run(options, world); });
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] { return tessera::run(argc, argv); });
}
