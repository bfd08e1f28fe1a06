// tessera-bench-train: where the time of a training step goes, beside the least time that its
// products and its optimizer could take on this device.
//
//   floor = (flops a token x tokens) / rate of a large product + 28 bytes x parameters / memory
//   rate
//
// with flops a token of nn::LanguageModel::flops_per_token (forward, dX and dW multiply-adds, half
// of attention's square) and both rates measured at the start of the same run; AdamW reads
// parameter, gradient and two moments and writes three of them, 4 bytes each. MFU is those
// operations a second over the rate of a large product in the same dtype, in percent.
//
// With --gemm-sequence, on one CUDA device, the step stands beside its products of cuBLASLt alone,
// submitted back to back (gemm_sequence.h), and the kernels that are no products:
//
//   overhead = step - sequence - other kernels,  in percent of sequence + other kernels
//
// What Muon would add to a step of so many tokens, and to one of 524,288, by operations alone:
//
//   share = operations of orthogonalizing each matrix of the blocks / (flops a token x tokens)
//
// Peak memory stands beside what parameters, gradients and states, and activations, should take.
//
// With --count one step of one rank is not timed but counted: tasks, waits of the host, and bytes
// of the device's memory beside the least that they could be (step_cost.h).

#include <fmt/format.h>
#include <sys/resource.h>

#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "apps/bench/bench.h"
#include "apps/bench/gemm_sequence.h"
#include "apps/bench/step_cost.h"
#include "apps/bench/training.h"
#include "apps/command_line.h"
#include "apps/options.h"
#include "apps/program.h"
#include "core/profiler.h"
#include "core/runtime/context.h"
#include "core/runtime/cpu/affinity.h"
#include "dist/comm/local.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/shard_view.h"
#include "kernels/matmul/cuda/cublaslt.h"
#include "kernels/orthogonalize/orthogonalize.h"
#include "nn/gpt2/gpt2.h"
#include "nn/llama/llama.h"

namespace tessera::apps {
namespace {

struct Options {
  std::string model = "gpt2", dtype = "f32", strategy = "full_shard", recompute = "none",
              device = "auto";
  int64_t layers = 12, heads = 12, kv_heads = 0, width = 768, context = 64, vocab = 50257,
          micro_batch = 4;
  int steps = 10, threads = 0, num_thread_ranks = 0, prefetch = 1;
  bool as_json = false, checks_memory = false, counts = false, times_gemms = false,
       checks_finite = false;
  std::string attention = "own", gemm = "auto";
};

std::unique_ptr<nn::LanguageModel> make_model(const Options& o) {
  const nn::DeferredInit deferred;
  if (o.model == "gpt2") {
    nn::Gpt2Config c;
    c.vocab_size = o.vocab, c.context_length = o.context, c.num_layers = o.layers;
    c.num_heads = o.heads, c.width = o.width;
    return std::make_unique<nn::Gpt2>(c);
  }
  nn::LlamaConfig c;
  c.vocab_size = o.vocab, c.context_length = o.context, c.num_layers = o.layers;
  c.num_heads = o.heads, c.num_kv_heads = o.kv_heads, c.width = o.width;
  return std::make_unique<nn::Llama>(c);
}

constexpr float kLr = 1e-4f;

BenchTraining start(dist::World& world, const Options& o) {
  std::unique_ptr<nn::LanguageModel> model = make_model(o);
  using Kind = nn::RecomputePolicy::Kind;
  model->set_recompute({enum_from_name<Kind>(o.recompute, "--recompute")});
  dist::FsdpOptions fsdp;
  fsdp.strategy = enum_from_name<dist::Strategy>(o.strategy, "--strategy");
  fsdp.precision.param_dtype = dtype_from_name(o.dtype);
  // A gradient in f32 costs a bf16 product nothing and saves a cast of it.
  if (fsdp.precision.param_dtype != kF32) fsdp.precision.reduce_dtype = kF32;
  fsdp.prefetch_forward = fsdp.prefetch_backward = o.prefetch;
  return BenchTraining(world, std::move(model), fsdp, o.micro_batch);
}

/// Bytes a second of x += y on 256 MiB each: two reads and a write, no line fetched only to be
/// overwritten, like AdamW.
double update_rate(int64_t numel) {
  Tensor x = zeros({numel});
  const Tensor y = zeros(x.shape());
  return 3 * static_cast<double>(x.nbytes()) /
         (time_on_stream([&] { x.add_(y); }, 10).min_ms * 1e-3);
}

enum Part { kProducts, kAttention, kOptimizer, kWaits, kOther, kNumParts };

Part part_of(std::string_view task) {
  if (task == "matmul") return kProducts;
  if (task.starts_with("attention")) return kAttention;
  if (task == "adamw_step" || task == "sgd_step" || task == "advance_step") return kOptimizer;
  return task == "wait" ? kWaits : kOther;
}

/// Milliseconds of the compute stream by part, and of nothing to do (`idle`): the host is late.
struct Split {
  std::array<double, kNumParts> parts_ms{};
  double idle_ms = 0;

  double all_but_products_ms() const {
    double sum_ms = 0;
    for (size_t i = 0; i < parts_ms.size(); ++i) sum_ms += i == kProducts ? 0 : parts_ms[i];
    return sum_ms;
  }
};

Split split_of(const std::vector<TraceEvent>& events, int compute_id, double step_ms) {
  Split split;
  double busy_ms = 0;
  for (const TraceEvent& e : events) {
    if (e.stream_id != compute_id) continue;
    const double ms = static_cast<double>(e.end_ns - e.begin_ns) * 1e-6;
    split.parts_ms[part_of(e.name)] += ms;
    busy_ms += ms;
  }
  split.idle_ms = std::max(0.0, step_ms - busy_ms);
  return split;
}

/// Bytes at the moment of the peak, and what they should be; 0: not known.
struct Memory {
  double states = 0, expected_states = 0;  // parameters, gradients, moments
  double activations = 0, expected_activations = 0;
  double others = 0;  // gathered units, gradient slots

  bool is_as_expected() const {
    constexpr double kTolerance = 0.05;
    const auto is_near = [](double actual, double expected) {
      return expected == 0 || std::abs(actual - expected) <= kTolerance * expected;
    };
    return is_near(states, expected_states) && is_near(activations, expected_activations);
  }
};

/// What all blocks keep for backward, and the larger of what comes on top: in the head, its input,
/// the gradient of it and a chunk of f32 logits; in the last block, the gradient of the widest
/// activation and two of the block's width.
double expected_activations(const Options& o, const nn::ModelShape& s, DeviceType device) {
  const double C = static_cast<double>(s.width), H = static_cast<double>(s.num_heads),
               q = static_cast<double>(s.num_heads * s.head_width),
               kv = static_cast<double>(s.num_kv_heads * s.head_width);
  const auto element = static_cast<double>(size_of(dtype_from_name(o.dtype)));
  const auto rows = static_cast<double>(o.micro_batch * o.context);
  double per_row = 0, statistics = 4 * H, widest = 0;  // elements, and bytes in f32
  if (o.model == "gpt2") {
    widest = 4 * C;
    // Input, norm1; q, k, v; attention; the sum with the residual, norm2; before and after GELU.
    per_row = 2 * C + (q + 2 * kv) + q + 2 * C + 2 * widest;
    statistics += 4 * 4;
  } else {
    const double F = static_cast<double>((8 * s.width + 3 * 64 - 1) / (3 * 64) * 64);
    widest = 2 * F;
    // The same with rotated q and k, with gate and up, and their product.
    per_row = 2 * C + (q + 2 * kv) + (q + kv) + q + 2 * C + 3 * F;
    statistics += 2 * 4;
  }
  const double vocab = static_cast<double>(s.vocab_size);
  const double chunk = (device == DeviceType::kCuda ? 512 : 64) * 1048576.0;
  const double logits = std::min(chunk, rows * vocab * 4);
  const double head = rows * 2 * C * element + logits;
  const double block = rows * (widest + 2 * C) * element;
  return static_cast<double>(s.num_layers) * rows * (per_row * element + statistics) +
         std::max(head, block);
}

struct Result {
  Timing step;
  Memory memory;
  double rate = 0;  // of a large product, operations a second
  Split split;
  double floor_ms = 0, tokens = 0, parameters = 0, flops_per_token = 0;
  double muon_flops = 0;  // a step, whatever the tokens

  /// Percent of the operations of a step of so many tokens.
  double muon_percent(double of_tokens) const {
    return 100 * muon_flops / (flops_per_token * of_tokens);
  }
  double allocator_peak_gib = 0, resident_peak_gib = 0;
  Timing unchecked, checked;  // with --debug-nan: steps of both, in turn
  size_t num_gemms = 0;       // with --gemm-sequence
  double gemms_ms = 0;

  double bare_ms() const { return gemms_ms + split.all_but_products_ms(); }
  double overhead_ms() const { return step.median_ms - bare_ms(); }
  double overhead_percent() const { return 100 * overhead_ms() / bare_ms(); }
};

constexpr double kLargeStepTokens = 524288;  // of a GPT-2 124M as it is usually trained

double muon_flops_of(nn::LanguageModel& model) {
  double flops = 0;
  for (const nn::NamedParameter& p : model.named_parameters()) {
    const Shape& shape = p.parameter->tensor.shape();
    if (shape.num_dims() != 2 || !p.name.starts_with("blocks.")) continue;
    flops += orthogonalize_flops(shape[0], shape[1]).computed;
  }
  return flops;
}

double gib(double nbytes) {
  return nbytes / (1 << 30);
}

Memory memory_of(const BenchTraining& training, const Options& o, int num_ranks) {
  const AllocatorStats stats = Context::current()->allocator()->stats();
  const auto of = [&](MemoryClass c) {
    return static_cast<double>(stats.peak_by_class[static_cast<size_t>(c)]);
  };
  Memory m;
  m.states =
      of(MemoryClass::kParameters) + of(MemoryClass::kGradients) + of(MemoryClass::kOptimizer);
  m.activations = of(MemoryClass::kActivations);
  m.others = of(MemoryClass::kGathered) + of(MemoryClass::kOther);
  if (o.strategy == "full_shard" || o.strategy == "shard_grad_op") {
    m.expected_states = (o.dtype == "f32" ? 16 : 18) *
                        static_cast<double>(dist::ShardView(training.fsdp()).num_parameters()) /
                        num_ranks;
  }
  if (o.recompute == "none") {
    m.expected_activations =
        expected_activations(o, training.model().shape(), Context::current()->device().type);
  }
  return m;
}

Result measure(dist::World& world, const Options& o, const Roofline& roofline, double bytes_per_s) {
  BenchTraining training = start(world, o);
  const int64_t start_ns = profiler::now_ns();
  for (int i = 0; i < 2; ++i) training.step(kLr);
  training.finish();
  if (world.rank() == 0) {  // the first step is slower than the others
    say_estimate(static_cast<double>(profiler::now_ns() - start_ns) * 1e-9 / 2 * (o.steps + 1));
  }
  Context::current()->allocator()->reset_peak();
  std::vector<double> times_ms;
  for (int i = 0; i < o.steps; ++i) {
    const int64_t begin = profiler::now_ns();
    training.step(kLr);
    training.finish();
    times_ms.push_back(static_cast<double>(profiler::now_ns() - begin) * 1e-6);
  }
  Result r;
  r.step = summarize(times_ms);
  if (o.checks_finite) {
    std::vector<double> of_turn_ms[2];
    for (int i = 0; i < 2 * o.steps; ++i) {
      const bool is_on = i % 2 == 1;
      training.check_finite(is_on);
      const int64_t begin = profiler::now_ns();
      training.step(kLr);
      training.finish();
      of_turn_ms[is_on].push_back(static_cast<double>(profiler::now_ns() - begin) * 1e-6);
    }
    training.check_finite(false);
    r.unchecked = summarize(of_turn_ms[0]), r.checked = summarize(of_turn_ms[1]);
  }
  world.control().barrier();
  if (world.rank() == 0) profiler::start();
  world.control().barrier();
  const int64_t begin = profiler::now_ns();
  training.step(kLr);
  training.finish();
  const double traced_ms = static_cast<double>(profiler::now_ns() - begin) * 1e-6;
  if (world.rank() == 0) {
    profiler::stop();
    r.split = split_of(profiler::events(), Context::current()->compute().id(), traced_ms);
  }
  world.control().barrier();
  r.tokens = static_cast<double>(o.micro_batch * o.context * world.world_size());
  r.parameters = static_cast<double>(dist::ShardView(training.fsdp()).num_parameters());
  r.flops_per_token = training.model().flops_per_token(o.context);
  r.muon_flops = muon_flops_of(training.model());
  const bool is_cuda = Context::current()->device().type == DeviceType::kCuda;
  const int num_devices = is_cuda ? world.world_size() : 1;
  r.rate = roofline.flops_per_s(dtype_from_name(o.dtype)) * num_devices;
  r.floor_ms = 1e3 * (r.flops_per_token * r.tokens / r.rate +
                      28 * r.parameters / (bytes_per_s * num_devices));
  r.memory = memory_of(training, o, world.world_size());
  r.allocator_peak_gib =
      gib(static_cast<double>(Context::current()->allocator()->stats().peak_reserved));
  struct rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  r.resident_peak_gib = gib(static_cast<double>(usage.ru_maxrss) * 1024);
  if (o.times_gemms) {
    const GemmSequence gemms = GemmSequence::record([&] {
      training.step(kLr);
      training.finish();
    });
    TESSERA_CHECK(!gemms.products().empty(),
                  "--gemm-sequence: no product of the step was cuBLASLt's");
    r.num_gemms = gemms.products().size();
    r.gemms_ms = time_on_stream([&] { gemms.submit(); }, o.steps).median_ms;
  }
  return r;
}

/// The exit status of the program.
int report(const Options& o, int num_ranks, const Result& r) {
  const int status = !o.checks_memory || r.memory.is_as_expected() ? 0 : 1;
  const double tokens_per_s = r.tokens / (r.step.median_ms * 1e-3);
  const double mfu_percent = 100 * r.flops_per_token * tokens_per_s / r.rate;
  const auto& ms = r.split.parts_ms;
  if (o.as_json) {
    nlohmann::json gemms;
    if (o.times_gemms) {
      gemms = {{"num_gemms", r.num_gemms},
               {"gemm_sequence_ms", r.gemms_ms},
               {"other_kernels_ms", r.split.all_but_products_ms()},
               {"overhead_ms", r.overhead_ms()},
               {"overhead_percent", r.overhead_percent()}};
    }
    nlohmann::json all =
        nlohmann::json{{"bench", "train"},
                       {"model", o.model},
                       {"dtype", o.dtype},
                       {"strategy", o.strategy},
                       {"ranks", num_ranks},
                       {"layers", o.layers},
                       {"width", o.width},
                       {"context", o.context},
                       {"vocab", o.vocab},
                       {"micro_batch", o.micro_batch},
                       {"parameters", r.parameters},
                       {"flops_per_token", r.flops_per_token},
                       {"step_ms", r.step.median_ms},
                       {"min_ms", r.step.min_ms},
                       {"max_ms", r.step.max_ms},
                       {"tokens_per_s", tokens_per_s},
                       {"mfu_percent", mfu_percent},
                       {"floor_ms", r.floor_ms},
                       {"muon_flops", r.muon_flops},
                       {"muon_percent", r.muon_percent(r.tokens)},
                       {"muon_percent_of_524288_tokens", r.muon_percent(kLargeStepTokens)},
                       {"step_over_floor", r.step.median_ms / r.floor_ms},
                       {"products_ms", ms[kProducts]},
                       {"attention_ms", ms[kAttention]},
                       {"optimizer_ms", ms[kOptimizer]},
                       {"exposed_ms", ms[kWaits]},
                       {"other_ms", ms[kOther]},
                       {"idle_ms", r.split.idle_ms},
                       {"states_gib", gib(r.memory.states)},
                       {"expected_states_gib", gib(r.memory.expected_states)},
                       {"activations_gib", gib(r.memory.activations)},
                       {"expected_activations_gib", gib(r.memory.expected_activations)},
                       {"gathered_gib", gib(r.memory.others)},
                       {"allocator_peak_gib", r.allocator_peak_gib},
                       {"resident_peak_gib", r.resident_peak_gib}};
    if (o.times_gemms) all.update(gemms);
    if (o.checks_finite) {
      all.update({{"unchecked_ms", r.unchecked.median_ms},
                  {"checked_ms", r.checked.median_ms},
                  {"debug_nan_ratio", r.checked.median_ms / r.unchecked.median_ms}});
    }
    fmt::print("{}\n", all.dump());
    return status;
  }
  fmt::print(
      "{} {} {}, {} ranks, B {} T {} a rank, {:.1f} M parameters\n"
      "step {:.1f} ms ({:.1f}-{:.1f})  {:.0f} tokens/s  MFU {:.1f} %  floor {:.1f} ms  step / "
      "floor "
      "{:.2f}\n"
      "products {:.1f}  attention {:.1f}  other kernels {:.1f}  optimizer {:.1f}  exposed "
      "communication {:.1f}  idle {:.1f} ms\n"
      "Muon would add {:.2f} TFLOP: {:.2f} % of the step's operations, {:.3f} % at {:.0f} tokens\n"
      "peak (expected): states {:.3f} ({:.3f}), activations {:.3f} ({:.3f}), gathered {:.3f} GiB; "
      "allocator {:.3f}, resident {:.3f} GiB\n",
      o.model, o.dtype, o.strategy, num_ranks, o.micro_batch, o.context, r.parameters * 1e-6,
      r.step.median_ms, r.step.min_ms, r.step.max_ms, tokens_per_s, mfu_percent, r.floor_ms,
      r.step.median_ms / r.floor_ms, ms[kProducts], ms[kAttention], ms[kOther], ms[kOptimizer],
      ms[kWaits], r.split.idle_ms, r.muon_flops * 1e-12, r.muon_percent(r.tokens),
      r.muon_percent(kLargeStepTokens), kLargeStepTokens, gib(r.memory.states),
      gib(r.memory.expected_states), gib(r.memory.activations), gib(r.memory.expected_activations),
      gib(r.memory.others), r.allocator_peak_gib, r.resident_peak_gib);
  if (o.checks_finite) {
    fmt::print("debug.nan on {:.1f} ms, off {:.1f} ms, steps in turn: {:.3f} of a step\n",
               r.checked.median_ms, r.unchecked.median_ms,
               r.checked.median_ms / r.unchecked.median_ms);
  }
  if (o.times_gemms) {
    fmt::print(
        "{} products of cuBLASLt alone {:.1f} ms, other kernels {:.1f}, overhead {:.1f} ms "
        "({:.1f} %)\n",
        r.num_gemms, r.gemms_ms, r.split.all_but_products_ms(), r.overhead_ms(),
        r.overhead_percent());
  }
  return status;
}

/// What a step is made of. The least bytes are known of GPT-2.
void count(dist::World& world, const Options& o) {
  if (world.world_size() != 1) {
    throw ConfigError(fmt::format("--count: expected one rank, which has no collectives, got {}",
                                  world.world_size()));
  }
  BenchTraining training = start(world, o);
  training.check_finite(o.checks_finite);
  for (int i = 0; i < 2; ++i) training.step(kLr);
  training.finish();
  const auto element_nbytes = static_cast<int64_t>(size_of(dtype_from_name(o.dtype)));
  const auto counter = std::make_shared<TrafficCounter>(element_nbytes);
  const Stream& compute = Context::current()->compute();
  compute.impl()->observer = counter;
  training.step(kLr);
  const TrafficCounter::Traffic total = counter->total();
  const int64_t host_waits = counter->num_host_waits();
  training.finish();
  compute.impl()->observer = nullptr;
  int64_t minimum = 0;
  nlohmann::json parts = nlohmann::json::object(), tasks = nlohmann::json::object();
  if (o.model == "gpt2") {
    for (const MinimumPart& part : minimum_traffic(
             {o.micro_batch, o.context, o.layers, o.heads, o.width, o.vocab, element_nbytes})) {
      minimum += part.nbytes;
      parts[part.name] = part.nbytes;
      if (!o.as_json) fmt::print("minimum  {:28} {:11.3f} MB\n", part.name, part.nbytes * 1e-6);
    }
  }
  for (const auto& [name, traffic] : counter->by_task()) {
    tasks[name] = {{"tasks", traffic.num_tasks}, {"bytes", traffic.nbytes}};
    if (!o.as_json) {
      fmt::print("task     {:20} {:5}   {:11.3f} MB\n", name, traffic.num_tasks,
                 traffic.nbytes * 1e-6);
    }
  }
  const double ratio =
      minimum == 0 ? 0 : static_cast<double>(total.nbytes) / static_cast<double>(minimum);
  if (o.as_json) {
    fmt::print("{}\n", nlohmann::json{{"bench", "count"},
                                      {"model", o.model},
                                      {"dtype", o.dtype},
                                      {"micro_batch", o.micro_batch},
                                      {"context", o.context},
                                      {"tasks", total.num_tasks},
                                      {"host_waits", host_waits},
                                      {"bytes", total.nbytes},
                                      {"minimum_bytes", minimum},
                                      {"ratio", ratio},
                                      {"by_task", tasks},
                                      {"minimum", parts}}
                           .dump());
    return;
  }
  fmt::print("{} tasks, {} waits of the host, {:.1f} MB; minimum {:.1f} MB, ratio {:.3f}\n",
             total.num_tasks, host_waits, total.nbytes * 1e-6, minimum * 1e-6, ratio);
}

/// The rates of the whole machine, before any rank is at work.
struct Rates {
  Roofline roofline;
  double bytes_per_s = 0;
};

Rates measure_rates(Device device, int threads, const Backends& backends, bool is_quick) {
  ContextOptions context;
  context.backends = backends;
  context.device = device;
  context.num_threads = threads;
  const Context::Scope scope(std::make_shared<Context>(context));
  constexpr int64_t kQuickWidth = 256;
  return {measure_roofline(is_quick ? kQuickWidth : 0),
          update_rate(int64_t{is_quick ? 1 : 64} << 20)};
}

void print_rates(const Rates& rates, const Options& o) {
  if (o.as_json) return;
  fmt::print("products {:.3f} TFLOP/s, updates {:.1f} GB/s\n",
             rates.roofline.flops_per_s(dtype_from_name(o.dtype)) * 1e-12,
             rates.bytes_per_s * 1e-9);
}

int run(int argc, char** argv) {
  CommandLine app(
      "Times training steps and splits them by kind of work, beside the floor of this device.",
      "tessera-bench-train");
  Options o;
  app.add_option("--model", o.model, "model architecture")->check(CLI::IsMember({"gpt2", "llama"}));
  app.add_option("--layers", o.layers, "transformer blocks")->check(in_range<int64_t>(1, 4096));
  app.add_option("--heads", o.heads, "attention heads")->check(in_range<int64_t>(1, 4096));
  app.add_option("--kv-heads", o.kv_heads, "llama: key/value heads; 0: as many as heads");
  app.add_option("--width", o.width, "width of the hidden states")->check(in_range<int64_t>(1));
  app.add_option("--context", o.context, "tokens of a sample")->check(in_range<int64_t>(1));
  app.add_option("--vocab", o.vocab, "vocabulary size")->check(in_range<int64_t>(2));
  app.add_option("--micro-batch", o.micro_batch, "samples of a rank and step")
      ->check(in_range<int64_t>(1));
  app.add_option("--dtype", o.dtype, "dtype of parameters and activations")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  app.add_option("--strategy", o.strategy, "sharding strategy, as fsdp.strategy of tessera-train");
  app.add_option("--prefetch", o.prefetch, "units gathered ahead")
      ->check(in_range(0, std::optional(64)));
  app.add_option("--recompute", o.recompute, "activation recompute")
      ->check(CLI::IsMember({"none", "full", "selective"}));
  app.add_option("--steps", o.steps, "steps that are timed")
      ->check(in_range(1, std::optional(1000000)));
  app.add_option("--threads", o.threads,
                 "CPU threads of a rank; 0: allowed processors / ranks of the node")
      ->check(in_range(0, std::optional(4096)));
  app.add_option("--ranks", o.num_thread_ranks, "thread ranks of one process")
      ->check(in_range(1, std::optional(64)));
  app.add_option("--device", o.device, "auto, cpu or cuda");
  app.add_option("--attention", o.attention, "attention kernels on cuda")
      ->check(CLI::IsMember({"own", "cudnn", "auto"}));
  app.add_option("--gemm", o.gemm, "GEMMs on cuda")
      ->check(CLI::IsMember({"auto", "own", "cublaslt"}));
  app.add_flag("--count", o.counts, "one rank: tasks, waits and bytes of a step instead of times");
  app.add_flag("--debug-nan", o.checks_finite,
               "the step beside one in which each new value is looked at (debug.nan), in turn");
  app.add_flag("--check-memory", o.checks_memory,
               "exit status 1 if the peak is not within 5 % of what is expected");
  app.add_flag("--gemm-sequence", o.times_gemms,
               "on cuda, one rank: the step beside its products of cuBLASLt alone");
  app.add_flag("--json", o.as_json, "one JSON object instead of text");
  if (const auto status = app.read(argc, argv)) return *status;
  const auto check_gemms = [&o](DeviceType device, int num_ranks) {
    if (!o.times_gemms) return;
    TESSERA_CHECK_AS(ConfigError, device == DeviceType::kCuda && num_ranks == 1,
                     "--gemm-sequence: {} ranks on {}, expected one on cuda", num_ranks,
                     device == DeviceType::kCuda ? "cuda" : "cpu");
    TESSERA_CHECK_AS(ConfigError, kernels::cuda::cublaslt_problem().empty() && o.gemm != "own",
                     "--gemm-sequence: expected products by cuBLASLt, but {}",
                     o.gemm == "own" ? "--gemm=own" : kernels::cuda::cublaslt_problem());
  };
  Backends backends;
  backends.attention = enum_from_name<AttentionBackend>(o.attention, "--attention");
  backends.gemm = enum_from_name<GemmBackend>(o.gemm, "--gemm");
  const bool is_quick = o.steps == 1;  // to see that it works, maybe where it is slow
  if (o.num_thread_ranks > 0) {
    dist::LocalOptions local;
    local.context.poison = local.context.order_check = false;
    local.context.device = device_from_name(o.device);
    local.context.backends = backends;
    check_gemms(local.context.device.type, o.num_thread_ranks);
    Rates rates;
    if (!o.counts) {
      rates = measure_rates(local.context.device, 0, backends, is_quick);
      print_rates(rates, o);
    }
    if (o.threads > 0) local.context.num_threads = o.threads;
    int status = 0;
    dist::run_ranks(o.num_thread_ranks, local, [&](dist::World& world) {
      if (o.counts) return count(world, o);
      const Result result = measure(world, o, rates.roofline, rates.bytes_per_s);
      if (world.rank() == 0) status = report(o, world.world_size(), result);
    });
    return status;
  }
  return dist::run_main(argc, argv, [&](dist::World& world) {
    Rates rates;
    std::shared_ptr<Context> context;
    world.control().verdict([&] {
      ContextOptions options;
      options.device = world.device(o.device);
      options.num_threads = world.num_threads(o.threads);
      options.backends = backends;
      check_gemms(options.device.type, world.world_size());
      // The floor is that of all the machine: one rank measures, with all threads.
      if (world.rank() == 0 && !o.counts) {
        rates = measure_rates(options.device, num_allowed_processors(), backends, is_quick);
      }
      context = std::make_shared<Context>(options);
    });
    const Context::Scope scope(context);
    if (o.counts) {
      count(world, o);
      return 0;
    }
    if (world.rank() == 0) print_rates(rates, o);
    const Result result = measure(world, o, rates.roofline, rates.bytes_per_s);
    return world.rank() == 0 ? report(o, world.world_size(), result) : 0;
  });
}

}  // namespace
}  // namespace tessera::apps

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] { return tessera::apps::run(argc, argv); });
}
