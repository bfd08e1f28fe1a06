// tessera-bench-generate: decoding, beside the time to read weights and cache, or if that is longer to
// multiply with the weights, at the rates at which the same threads read memory and run a large GEMM in
// the same run.

#include "nn/generate.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "apps/bench/bench.h"
#include "apps/command_line.h"
#include "apps/program.h"
#include "core/profiler.h"
#include "core/runtime/context.h"
#include "core/runtime/cpu/lanes.h"
#include "core/runtime/cpu/parallel.h"
#include "kernels/matmul/matmul.h"
#include "nn/gpt2/gpt2.h"

namespace tessera::apps {
namespace {

struct Options {
  int64_t layers = 12, width = 768, vocab = 50257, context = 1024, prompt = 64, tokens = 64;
  std::vector<int64_t> batches = {1, 16};
  std::vector<std::string> dtypes = {"f32", "bf16"};
  int threads = 0;
  bool as_json = false;
};

/// Bytes a second that the current stream's threads read from a buffer far larger than the caches.
double measure_read_rate() {
  constexpr int64_t kNumel = 128 << 20;
  const Tensor buffer = full({kNumel}, 1.0);
  const float* const data = buffer.data<float>();
  std::vector<double> seconds;
  for (int run = 0; run < 7; ++run) {
    const int64_t begin = profiler::now_ns();
    current_stream().submit("read", [data] {
      cpu::parallel_for(kNumel / 1024, 1024, [data](int64_t first, int64_t last) {
        cpu::Vector<float> sums[4] = {};
        cpu::for_lanes_of<float, 4>((last - first) * 1024, [&](int64_t i, auto lanes, auto u) {
          sums[u] += cpu::load_lanes<float>(data + first * 1024 + i, lanes);
        });
        [[maybe_unused]] const volatile float kept = cpu::sum_lanes<float>(sums);
      });
    });
    current_stream().synchronize();
    seconds.push_back(static_cast<double>(profiler::now_ns() - begin) * 1e-9);
  }
  std::sort(seconds.begin(), seconds.end());
  return static_cast<double>(kNumel) * sizeof(float) / seconds[seconds.size() / 2];
}

/// FLOP/s of a linear layer of 512 rows.
double measure_gemm_rate(DType dtype) {
  constexpr int64_t kRows = 512, kIn = 1024, kOut = 4096;
  const Tensor x = full({kRows, kIn}, 1.0, dtype), w = full({kOut, kIn}, 1.0, dtype);
  std::vector<double> seconds;
  for (int run = 0; run < 9; ++run) {
    const int64_t begin = profiler::now_ns();
    linear(x, w);
    current_stream().synchronize();
    seconds.push_back(static_cast<double>(profiler::now_ns() - begin) * 1e-9);
  }
  std::sort(seconds.begin(), seconds.end());
  return 2.0 * kRows * kIn * kOut / seconds[seconds.size() / 2];
}

struct Rates {
  double read = 0;  // bytes/s
  double gemm = 0;  // FLOP/s
};

struct Result {
  std::string dtype;
  int64_t batch = 0;
  double step_ms = 0, nbytes = 0, share = 0, gemm_rate = 0;
  double tokens_per_s() const { return static_cast<double>(batch) / step_ms * 1e3; }
};

/// Of random parameters: the time does not depend on them.
Result measure(const Options& options, const std::string& dtype, int64_t batch,
               const Rates& rates) {
  nn::Gpt2Config config;
  config.num_layers = options.layers;
  config.width = options.width;
  config.num_heads = std::max<int64_t>(1, options.width / 64);
  config.vocab_size = options.vocab;
  config.context_length = options.context;
  const nn::ParameterDtype of_parameters(dtype == "bf16" ? kBF16 : kF32);
  nn::Gpt2 model(config);
  model.initialize(1);
  std::vector<std::vector<int32_t>> prompts(static_cast<size_t>(batch));
  for (size_t row = 0; row < prompts.size(); ++row) {
    for (int64_t i = 0; i < options.prompt; ++i) {
      prompts[row].push_back(
          static_cast<int32_t>((i * 7919 + static_cast<int64_t>(row)) % options.vocab));
    }
  }
  nn::GenerateOptions generate;
  generate.num_tokens = options.tokens + 1;
  generate.max_batch = batch;
  generate.sampling.temperature = 0;
  std::vector<int64_t> times;  // after each step of decoding
  generate.on_token = [&](int64_t prompt, int32_t) {
    if (prompt == batch - 1) times.push_back(profiler::now_ns());
    return true;
  };
  nn::generate(model, prompts, generate);
  std::vector<double> steps;
  for (size_t i = 2; i < times.size(); ++i) {
    steps.push_back(static_cast<double>(times[i] - times[i - 1]) * 1e-6);
  }
  Result r{.dtype = dtype,
           .batch = batch,
           .step_ms = summarize(steps).median_ms,
           .gemm_rate = rates.gemm};
  const double size = dtype == "bf16" ? 2 : 4;
  double flops = 0;  // of the linear layers and the head, which is tied to the embedding
  for (const nn::NamedParameter& p : model.named_parameters()) {
    if (p.name == "position.weight") continue;
    const auto numel = static_cast<double>(p.parameter->tensor.numel());
    r.nbytes += size * numel;
    if (p.parameter->tensor.shape().num_dims() == 2) {
      flops += 2 * numel * static_cast<double>(batch);
    }
  }
  const double cached =
      static_cast<double>(options.prompt) + static_cast<double>(options.tokens) / 2;
  r.nbytes += size * cached * static_cast<double>(2 * options.layers * options.width * batch);
  r.share = std::max(r.nbytes / rates.read, flops / rates.gemm) / (r.step_ms * 1e-3);
  return r;
}

int run(int argc, char** argv) {
  CommandLine app(
      "Decoding of a GPT-2 beside the bound of memory and GEMMs, by default of 124 M "
      "parameters.",
      "tessera-bench-generate");
  Options options;
  const auto size = in_range<int64_t>(1, 1 << 20);
  app.add_option("--layers", options.layers, "blocks")->check(size);
  app.add_option("--width", options.width, "model width; a head has 64 of it")->check(size);
  app.add_option("--vocab", options.vocab, "tokens of the vocabulary")->check(size);
  app.add_option("--context", options.context, "positions")->check(size);
  app.add_option("--prompt", options.prompt, "tokens of a prompt")->check(size);
  app.add_option("--tokens", options.tokens, "steps of decoding")
      ->check(in_range<int64_t>(2, 1 << 20));
  app.add_option("--batch", options.batches, "texts together, several")
      ->delimiter(',')
      ->check(size);
  app.add_option("--dtype", options.dtypes, "f32, bf16 or both")
      ->delimiter(',')
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--threads", options.threads, "CPU threads; 0: all")
      ->check(in_range(0, std::optional(4096)));
  app.add_flag("--json", options.as_json, "a JSON object in place of the table");
  if (const auto status = app.read(argc, argv)) return *status;
  TESSERA_CHECK_AS(ConfigError, options.prompt + options.tokens < options.context,
                   "command line: --prompt={} and --tokens={}, expected both to fit --context={}",
                   options.prompt, options.tokens, options.context);
  ContextOptions context;
  if (options.threads > 0) context.num_threads = options.threads;
  const Context::Scope scope(std::make_shared<Context>(context));
  const double read_rate = measure_read_rate();
  std::vector<Result> results;
  for (const std::string& dtype : options.dtypes) {
    const Rates rates{read_rate, measure_gemm_rate(dtype == "bf16" ? kBF16 : kF32)};
    for (const int64_t batch : options.batches) {
      results.push_back(measure(options, dtype, batch, rates));
    }
  }
  nlohmann::json rows = nlohmann::json::array();
  if (!options.as_json) {
    fmt::print("memory is read at {:.1f} GB/s\n{:<6} {:>5} {:>10} {:>10} {:>9} {:>12} {:>10}\n",
               read_rate * 1e-9, "dtype", "batch", "ms a step", "tokens/s", "MB read",
               "GEMM GFLOP/s", "of bound");
  }
  for (const Result& r : results) {
    if (options.as_json) {
      rows.push_back({{"dtype", r.dtype},
                      {"batch", r.batch},
                      {"step_ms", r.step_ms},
                      {"tokens_per_s", r.tokens_per_s()},
                      {"bytes", r.nbytes},
                      {"gemm_flops_per_s", r.gemm_rate},
                      {"share_of_bound", r.share}});
    } else {
      fmt::print("{:<6} {:>5} {:>10.2f} {:>10.1f} {:>9.1f} {:>12.0f} {:>8.1f} %\n", r.dtype,
                 r.batch, r.step_ms, r.tokens_per_s(), r.nbytes * 1e-6, r.gemm_rate * 1e-9,
                 100 * r.share);
    }
  }
  if (options.as_json) {
    fmt::print(
        "{}\n",
        nlohmann::json{{"bench", "generate"}, {"read_bytes_per_s", read_rate}, {"rows", rows}}
            .dump());
  }
  return 0;
}

}  // namespace
}  // namespace tessera::apps

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] { return tessera::apps::run(argc, argv); });
}
