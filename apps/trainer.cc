#include "apps/trainer.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <deque>
#include <filesystem>
#include <thread>

#include "apps/metrics.h"
#include "apps/options.h"
#include "core/autograd.h"
#include "core/files.h"
#include "core/log.h"
#include "core/profiler.h"
#include "core/random.h"
#include "core/runtime/context.h"
#include "core/runtime/order_check.h"
#include "core/runtime/staging.h"
#include "dist/comm/nccl.h"
#include "nn/generate.h"

namespace tessera::apps {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void prepare_output_dir(const Config& config) {
  const std::string& dir = config.output.dir;
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  const std::string where = config.origin("output.dir");
  if (error) {
    throw ConfigError(fmt::format("{}: output.dir = {}: {}, expected a directory that can be made",
                                  where, dir, error.message()));
  }
  try {
    write_status(dir, RunState::kRunning, 0);
    write_file_atomically(dir + "/config.toml", dump_config(config));
  } catch (const IoError& e) {
    throw ConfigError(fmt::format("{}: output.dir: {}, expected a directory that can be written",
                                  where, e.what()));
  }
}

/// Numbers of a step on their way to the host, which reads them while the next step runs.
struct PendingStep {
  int64_t step = 0;
  double lr = 0;
  HostCopy loss_sum, grad_norm, found_inf;
  HostCopy loss_scale;  // of this step; undefined without one
  std::shared_ptr<const dist::ExposedTimes> exposed;
  Event done;
};

bool is_running(const std::string& dir) {
  try {
    return MappedFile(dir + "/status.json").text().find("\"running\"") != std::string_view::npos;
  } catch (const Error&) {
    return false;
  }
}

/// Ends the process as `signal` does without a handler, so that who started it sees why.
void end_by_signal(int number) {
  signal(number, SIG_DFL);
  kill(getpid(), number);
}

class Trainer {
 public:
  /// `steps_done` follows the steps that the host has seen complete.
  Trainer(const Config& config, dist::World& world, std::atomic<int64_t>* steps_done);
  TrainResult run();

 private:
  void count_batches();
  void describe();
  PendingStep submit_step(int64_t step);
  StepMetrics finish_step(const PendingStep& pending);
  std::optional<double> evaluate();
  double sum_in_sample_order(const std::vector<Tensor>& sums);
  nn::ForwardOptions forward_options(const Batch& batch) const;
  void print_sample();
  bool is_out_of_time();
  void follow_trace(int64_t step);
  void write_trace();

  Config config_;
  dist::World& world_;
  std::atomic<int64_t>* steps_done_;
  Data data_;
  std::optional<TrainSamples> samples_;
  std::optional<EvalSamples> eval_samples_;
  int64_t grad_accum_steps_ = 1, samples_per_step_ = 1, tokens_per_step_ = 1;
  std::unique_ptr<nn::LanguageModel> model_;
  std::unique_ptr<dist::Fsdp> fsdp_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<optim::Schedule> schedule_;
  std::unique_ptr<MetricsLog> log_;  // rank 0
  std::optional<dist::LossScaler> scaler_;
  int64_t num_skipped_ = 0;
  bool is_tracing_ = false;
  Clock::time_point start_;
  std::deque<Clock::time_point> step_ends_;  // since the start or the last evaluation
};

Trainer::Trainer(const Config& config, dist::World& world, std::atomic<int64_t>* steps_done)
    : config_(config), world_(world), steps_done_(steps_done) {
  world_.control().verdict([&] {
    data_ = load_data(config_);
    const SampleOptions options = sample_options(config_, data_.vocab_size);
    samples_.emplace(data_.train, options);
    eval_samples_.emplace(data_.val, options);
    count_batches();
  });
  {
    nn::DeferredInit deferred;
    model_ = make_model(config_.model, data_.vocab_size);
  }
  model_->set_recompute(recompute_policy(config_.recompute));
  fsdp_ = dist::fully_shard(*model_, world_, fsdp_options(config_));
  fsdp_->initialize(static_cast<uint64_t>(config_.train.seed));
  optimizer_ = make_optimizer(config_.optim, fsdp_->shards());
  schedule_.emplace(make_schedule(config_));
  scaler_.emplace(loss_scale_options(config_.precision));
  world_.control().verdict([&] {
    if (world_.rank() != 0) return;
    log_ = std::make_unique<MetricsLog>(MetricsLog::Options{.dir = config_.output.dir,
                                                            .num_steps = config_.train.steps,
                                                            .log_every = config_.train.log_every,
                                                            .progress_bar = prints_to_terminal()});
    if (data_.tokenizer != nullptr) {
      write_file_atomically(config_.output.dir + "/tokenizer.json", data_.tokenizer->to_json());
    }
  });
  if (world_.rank() == 0) describe();
}

void Trainer::count_batches() {
  const TrainConfig& t = config_.train;
  const int64_t per_pass = t.micro_batch * world_.world_size();
  if (t.global_batch % per_pass != 0) {
    throw ConfigError(fmt::format(
        "{}: train.global_batch = {}, expected a multiple of train.micro_batch x ranks = {} x {}",
        config_.origin("train.global_batch"), t.global_batch, t.micro_batch, world_.world_size()));
  }
  grad_accum_steps_ = t.global_batch == 0 ? t.grad_accum_steps : t.global_batch / per_pass;
  samples_per_step_ = per_pass * grad_accum_steps_;
  tokens_per_step_ = samples_per_step_ * config_.model.context;
  if (samples_->num_samples() < samples_per_step_) {
    throw InputError(fmt::format(
        "data: {} tokens to train on give {} samples of model.context = {}, expected at least one "
        "step's {}",
        data_.train.num_tokens(), samples_->num_samples(), config_.model.context,
        samples_per_step_));
  }
}

void Trainer::describe() {
  log_->print(dump_config(config_));
  log_->print(print_tree(*model_, [&](const nn::Module& m) { return fsdp_->unit_of(m); }));
  log_->print(fsdp_->summary());
  log_->print(fmt::format(
      "data: {} tokens to train on ({} samples), {} for validation; a step: {} samples = {} ranks "
      "x "
      "{} passes x {}, {} tokens",
      data_.train.num_tokens(), samples_->num_samples(), data_.val.num_tokens(), samples_per_step_,
      world_.world_size(), grad_accum_steps_, config_.train.micro_batch, tokens_per_step_));
}

nn::ForwardOptions Trainer::forward_options(const Batch& batch) const {
  nn::ForwardOptions options;
  const Shape shape{batch.B, batch.T};
  if (!batch.document_starts.empty()) {
    options.document_starts = from_values(std::span<const int32_t>(batch.document_starts), shape);
  }
  if (!batch.positions.empty()) {
    options.positions = from_values(std::span<const int32_t>(batch.positions), shape);
  }
  return options;
}

PendingStep Trainer::submit_step(int64_t step) {
  PendingStep pending;
  pending.step = step + 1;
  std::vector<Tensor> losses;
  const int64_t B = config_.train.micro_batch;
  // The mean over the step's targets of all ranks: folded in where the gradient starts.
  const Tensor grad_scale = scaler_->grad_scale(1.0 / static_cast<double>(tokens_per_step_));
  for (int64_t pass = 0; pass < grad_accum_steps_; ++pass) {
    const int64_t offset = (pass * world_.world_size() + world_.rank()) * B;
    const Batch batch = samples_->batch(step * samples_per_step_ + offset, B);
    random_state() = {.seed = static_cast<uint64_t>(config_.train.seed),
                      .step = static_cast<uint64_t>(step),
                      .op_index = 0,
                      .sample_offset = offset};
    fsdp_->begin_micro_batch(static_cast<int>(pass), static_cast<int>(grad_accum_steps_));
    LinearCrossEntropyOptions loss_options;
    loss_options.ignore_index = kIgnoredTarget;
    loss_options.grad_scale = grad_scale;
    const Shape shape{batch.B, batch.T};
    const LossSum loss = model_->loss(from_values(std::span<const int32_t>(batch.inputs), shape),
                                      from_values(std::span<const int32_t>(batch.targets), shape),
                                      forward_options(batch), loss_options);
    backward(loss.sum, grad_scale);
    losses.push_back(loss.sum.detach().view({1}));
  }
  const dist::ClippedNorm clip =
      fsdp_->clip_grad_norm(config_.optim.clip, config_.optim.clip_p, scaler_->scale());
  pending.lr = schedule_->lr(step);
  optimizer_->step(static_cast<float>(pending.lr), clip.factor, clip.found_inf);
  fsdp_->end_step();
  pending.loss_sum = HostCopy(fsdp_->sum_micro_batches(losses));
  if (scaler_->options().scaling != dist::LossScaling::kNone) {
    pending.loss_scale = HostCopy(scaler_->scale());
    scaler_->update(clip.found_inf);
  }
  pending.grad_norm = HostCopy(clip.norm);
  pending.found_inf = HostCopy(clip.found_inf);
  if (world_.world_size() > 1) pending.exposed = fsdp_->exposed_times();
  pending.done = current_stream().record();
  return pending;
}

StepMetrics Trainer::finish_step(const PendingStep& pending) {
  pending.done.synchronize();
  StepMetrics m;
  m.step = pending.step;
  m.lr = pending.lr;
  m.loss = pending.loss_sum.item() / static_cast<double>(tokens_per_step_);
  m.grad_norm = pending.grad_norm.item();
  m.tokens = pending.step * tokens_per_step_;
  if (pending.exposed != nullptr) {
    m.exposed_gather_ms = pending.exposed->gather_ms();
    m.exposed_reduce_ms = pending.exposed->reduce_ms();
    const auto count = static_cast<size_t>(config_.debug.exposed_units);
    for (const dist::ExposedTimes::Entry& e : pending.exposed->longest(count)) {
      m.exposed_units.push_back({e.unit, static_cast<double>(e.time.gather_ns) * 1e-6,
                                 static_cast<double>(e.time.reduce_ns) * 1e-6});
    }
  }
  // The host sees steps end in bursts, so the rate is that of the last few.
  constexpr size_t kNumRateSteps = 16;
  step_ends_.push_back(Clock::now());
  if (step_ends_.size() > kNumRateSteps + 1) step_ends_.pop_front();
  const std::chrono::duration<double> seconds = step_ends_.back() - step_ends_.front();
  const double per_step = seconds.count() / static_cast<double>(step_ends_.size() - 1);
  m.step_ms = per_step * 1e3;
  m.tokens_per_second = static_cast<double>(tokens_per_step_) / std::max(per_step, 1e-9);
  m.peak_bytes = Context::current()->allocator()->stats().peak_allocated;
  if (config_.output.peak_tflops > 0) {
    m.mfu = m.tokens_per_second * model_->flops_per_token(config_.model.context) /
            (config_.output.peak_tflops * 1e12 * world_.world_size());
  }
  bool is_skipped = false;
  if (pending.loss_scale.is_defined()) {
    m.loss_scale = pending.loss_scale.item();
    // A scale that can fall may help: the step was skipped and the next one starts lower.
    is_skipped = pending.found_inf.item() != 0 && *m.loss_scale > scaler_->options().rule.min_scale;
    if (is_skipped) ++num_skipped_;
    m.skipped = num_skipped_;
  }
  if (!is_skipped && (pending.found_inf.item() != 0 || !std::isfinite(m.loss))) {
    // The same numbers on every rank; the optimizer has left the states as they were.
    const NumericsError error(
        fmt::format("step {}: loss {}, gradient norm {}, expected finite numbers; nothing of this "
                    "step was applied",
                    m.step, m.loss, m.grad_norm));
    world_.control().verdict(&error);
  }
  *steps_done_ = m.step;
  return m;
}

std::optional<double> Trainer::evaluate() {
  const int64_t B = config_.train.micro_batch, ranks = world_.world_size();
  int64_t passes = (eval_samples_->num_samples() + B * ranks - 1) / (B * ranks);
  if (config_.train.eval_batches > 0) passes = std::min(passes, config_.train.eval_batches);
  if (passes == 0) return std::nullopt;
  NoGrad no_grad;
  model_->train(false);
  Tensor total = zeros({1}, kF64);
  std::vector<Tensor> sums;
  int64_t num_valid = 0;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const Batch batch = eval_samples_->batch((pass * ranks + world_.rank()) * B, B);
    const Shape shape{batch.B, batch.T};
    LinearCrossEntropyOptions loss_options;
    loss_options.ignore_index = kIgnoredTarget;
    const LossSum loss = model_->loss(from_values(std::span<const int32_t>(batch.inputs), shape),
                                      from_values(std::span<const int32_t>(batch.targets), shape),
                                      forward_options(batch), loss_options);
    sums.push_back(loss.sum.view({1}).to(kF64));
    total.add_(sums.back());
    num_valid += batch.num_valid;
  }
  fsdp_->end_forward();
  model_->train(true);
  const double sum =
      config_.train.reproducible ? sum_in_sample_order(sums) : world_.control().sum(total.item());
  return sum / static_cast<double>(world_.control().sum(num_valid));
}

/// The sum of the micro-batches that all ranks have evaluated: the same for any number of ranks.
double Trainer::sum_in_sample_order(const std::vector<Tensor>& sums) {
  std::vector<double> mine, all(sums.size() * static_cast<size_t>(world_.world_size()));
  for (const Tensor& sum : sums) mine.push_back(sum.item());
  world_.control().all_gather(all.data(), mine.data(),
                              static_cast<int64_t>(mine.size() * sizeof(double)));
  double total = 0;
  for (size_t pass = 0; pass < sums.size(); ++pass) {
    for (size_t i = pass; i < all.size(); i += sums.size()) total += all[i];
  }
  return total;
}

/// Called before a step is submitted: the timeline begins and ends between steps.
void Trainer::follow_trace(int64_t step) {
  const DebugConfig& d = config_.debug;
  if (d.trace.empty()) return;
  if (step + 1 == d.trace_from) {
    Context::current()->compute().synchronize();
    profiler::start();
    is_tracing_ = true;
  }
  if (step + 1 == d.trace_from + d.trace_steps) write_trace();
}

void Trainer::write_trace() {
  if (!is_tracing_) return;
  is_tracing_ = false;
  Context::current()->compute().synchronize();
  profiler::stop();
  const int rank = world_.rank();
  const std::string path = config_.debug.trace + (rank == 0 ? "" : fmt::format(".{}", rank));
  world_.control().verdict([&] { profiler::write_chrome_trace(path); });
  if (log_ != nullptr) log_->print("trace: " + path);
}

bool Trainer::is_out_of_time() {
  if (config_.train.max_minutes == 0) return false;
  const bool mine = seconds_since(start_) >= config_.train.max_minutes * 60;
  return world_.control().max(mine ? 1 : 0) != 0;
}

TrainResult Trainer::run() {
  TrainResult result;
  const int64_t num_steps = config_.train.steps, eval_every = config_.train.eval_every;
  std::optional<PendingStep> pending;
  const auto finish = [&] {
    StepMetrics m = finish_step(*pending);
    pending.reset();
    const bool is_last = m.step == num_steps || (result.steps != 0 && m.step == result.steps);
    if (is_last || (eval_every > 0 && m.step % eval_every == 0)) {
      m.val_loss = evaluate();
      step_ends_ = {Clock::now()};
    }
    result.loss = m.loss;
    if (m.val_loss) result.val_loss = m.val_loss;
    if (log_ != nullptr) log_->add(m);
  };
  start_ = Clock::now();
  step_ends_ = {start_};
  for (int64_t step = 0; step < num_steps; ++step) {
    follow_trace(step);
    PendingStep submitted = submit_step(step);
    if (pending) finish();
    pending = std::move(submitted);
    const bool stops = step + 1 == num_steps || is_out_of_time();
    if (stops) result.steps = step + 1;
    // An evaluation is of the parameters after its step, so nothing may be ahead of it.
    if (stops || (eval_every > 0 && (step + 1) % eval_every == 0)) finish();
    if (stops) break;
  }
  write_trace();
  const std::string path = config_.output.dir + "/model.safetensors";
  apps::save_model(path, *model_, *fsdp_, world_);
  if (log_ != nullptr) log_->print("model: " + path);
  print_sample();
  return result;
}

void Trainer::print_sample() {
  if (config_.sample.tokens == 0 || data_.tokenizer == nullptr) return;
  nn::GenerateOptions options;
  options.num_tokens = config_.sample.tokens;
  options.sampling = {.temperature = config_.sample.temperature,
                      .top_k = config_.sample.top_k,
                      .top_p = config_.sample.top_p,
                      .seed = static_cast<uint64_t>(config_.train.seed)};
  std::vector<int32_t> text = data_.tokenizer->encode(config_.sample.prompt);
  const std::vector<int32_t> added = nn::generate(*model_, text, options);
  fsdp_->end_forward();
  text.insert(text.end(), added.begin(), added.end());
  if (log_ != nullptr) log_->print("sample:\n" + decode_generated(*data_.tokenizer, text));
}

}  // namespace

TrainResult train(const Config& config, dist::World& world) {
  world.set_timeout(std::chrono::milliseconds(static_cast<int64_t>(config.dist.timeout * 1e3)));
  world.set_verbose(config.debug.dist);
  dist::set_nccl_options({.native_reduce_scatter = config.dist.nccl_reduce == "nccl",
                          .max_ctas = static_cast<int>(config.dist.nccl_max_ctas)});
  std::shared_ptr<Context> context;
  world.control().verdict([&] {
    ContextOptions options;
    options.device = world.device(config.device);
    options.num_threads = world.num_threads(static_cast<int>(config.train.threads));
    options.memory_limit = parse_nbytes(config.memory.limit);
    options.poison = config.debug.poison;
    options.order_check = config.debug.order_check;
    context = std::make_shared<Context>(options);
    if (world.rank() == 0) prepare_output_dir(config);
  });
  const Context::Scope scope(context);
  const auto report = [&](RunState state, int64_t step, const std::string& why,
                          bool is_stand_in = false) {
    if (world.rank() != 0 && !is_stand_in) return;
    try {
      write_status(config.output.dir, state, step, why);
    } catch (const IoError& error) {
      log_error("{}", error.what());
    }
  };
  std::atomic<int64_t> steps_done = 0;
  // A step that is not through by the time the process is ended has failed.
  world.set_on_end([&](const std::string& reason) {
    // Rank 0 may be the one that is gone already: then the next says so.
    std::this_thread::sleep_for(std::chrono::milliseconds(100) * std::min(world.rank(), 3));
    const bool is_stand_in = world.rank() != 0 && is_running(config.output.dir);
    report(RunState::kFailed, steps_done, reason.empty() ? "ended by SIGTERM" : reason,
           is_stand_in);
    if (reason.empty()) end_by_signal(SIGTERM);
  });
  const auto forget = [](dist::World* w) { w->set_on_end(nullptr); };
  const std::unique_ptr<dist::World, decltype(forget)> scope_of_action(&world, forget);
  try {
    Trainer trainer(config, world, &steps_done);
    const TrainResult result = trainer.run();
    if (context->order_check() != nullptr) context->order_check()->throw_if_conflicts();
    const bool is_short = result.steps < config.train.steps;
    report(RunState::kFinished, result.steps, is_short ? "train.max_minutes reached" : "");
    return result;
  } catch (const std::exception& error) {
    report(RunState::kFailed, steps_done, error.what());
    throw;
  }
}

}  // namespace tessera::apps
