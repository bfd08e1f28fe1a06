#include "apps/trainer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <tuple>

#include "apps/agreement.h"
#include "apps/batch_reader.h"
#include "apps/budget.h"
#include "apps/checkpointing.h"
#include "apps/config_table.h"
#include "apps/language_workload.h"
#include "apps/loss.h"
#include "apps/metrics.h"
#include "apps/options.h"
#include "apps/parameter_groups.h"
#include "apps/profile.h"
#include "apps/run_control.h"
#include "apps/run_dir.h"
#include "apps/saved_model.h"
#include "apps/workload.h"
#include "core/autograd.h"
#include "core/fatal_signals.h"
#include "core/files.h"
#include "core/log.h"
#include "core/profiler.h"
#include "core/random.h"
#include "core/runtime/context.h"
#include "core/runtime/cpu/affinity.h"
#include "core/runtime/order_check.h"
#include "core/runtime/staging.h"
#include "core/text.h"
#include "dist/comm/watchdog.h"
#include "dist/fsdp/finite_check.h"
#include "dist/fsdp/first_steps.h"
#include "dist/fsdp/shard_view.h"
#include "dist/fsdp/state_guard.h"
#include "dist/tuning.h"

namespace tessera::apps {
namespace {

using Clock = std::chrono::steady_clock;

/// Numbers of a step on their way to the host, which reads them while the next step runs.
struct PendingStep {
  int64_t step = 0;
  double lr = 0;
  int64_t first_sample = 0;
  int64_t num_targets = 1;     // that count, over all ranks
  std::vector<Tensor> losses;  // sums of this rank's micro-batches
  HostCopy loss_sum, grad_norm, found_inf;
  HostCopy loss_scale;             // of this step; undefined without one
  std::vector<HostCopy> extras;    // what the losses of this rank's micro-batches say besides
  std::vector<std::string> units;  // whose norms are in:
  HostCopy unit_norms;
  std::shared_ptr<const MemoryTimeline::Result> memory;
  std::shared_ptr<const dist::ExposedTimes> exposed;
  std::optional<double> spike;  // standard deviations; nothing was applied
  std::shared_ptr<const dist::FiniteCheck::Checked> checked;  // with debug.nan
  Event done;
};

/// NaN without its sign, which means nothing.
std::string number_text(double value) {
  return std::isnan(value) ? "nan" : fmt::format("{}", value);
}

/// `status.json` of a run in progress, from the thread that trains and from the one that ends the
/// process. Nothing is written before the directory is the run's.
class StatusFile {
 public:
  StatusFile(const std::string& dir, const RunDir& run_dir) : dir_(dir), run_dir_(run_dir) {}

  /// From the rank that trains and logs: no more often than a monitor wants to know.
  void progress(int64_t step, double loss) {
    constexpr std::chrono::seconds kPeriod{1};
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    if (is_over_ || (last_ && now - *last_ < kPeriod)) return;
    last_ = now;
    if (!is_running()) return;  // another rank has said why it failed
    try {
      write_status(dir_, RunState::kRunning, step, "", loss);
    } catch (const IoError& error) {
      if (!has_warned_) log_warning("{}; the run goes on", error.what());
      has_warned_ = true;
    }
  }
  /// How it ended, or is about to: after that no step counts. IoError.
  void end(RunState state, int64_t step, const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (!run_dir_.is_begun()) return;
    is_over_ = true;
    write_status(dir_, state, step, why, loss_);
  }
  void set_loss(double loss) {
    const std::lock_guard lock(mutex_);
    loss_ = loss;
  }
  bool is_running() const {
    const auto status = read_status(dir_);
    return status && status->state == RunState::kRunning;
  }

 private:
  const std::string dir_;
  const RunDir& run_dir_;
  std::mutex mutex_;
  std::optional<Clock::time_point> last_;
  std::optional<double> loss_;
  bool is_over_ = false, has_warned_ = false;
};

/// What a step is followed by.
struct Due {
  bool loss = false;   // of validation
  bool tasks = false;  // eval.tasks
  bool any() const { return loss || tasks; }
};

class TrainingRun {
 public:
  /// `steps_done` follows the steps that the host has seen complete.
  TrainingRun(const Config& config, dist::World& world, Workload& work, const std::string& budget,
              RunDir& run_dir, Checkpointing& checkpoints, StatusFile& status,
              std::atomic<int64_t>* steps_done);
  TrainResult run();

 private:
  void check_contents();
  void forget_other_best(const dist::Progress& there);
  void count_batches();
  void describe();
  void resume();
  void inject_faults(int64_t step);
  void read_batches();
  void read_first_batches();
  PendingStep submit_step(int64_t step);
  StepMetrics finish_step(const PendingStep& pending);
  bool accept_step(const PendingStep& pending, const StepMetrics& metrics);
  void warn_of_first_steps(const StepMetrics& metrics);
  std::string find_nonfinite(const PendingStep& pending, bool is_finite);
  void begin_finite_check();
  [[noreturn]] void stop(const PendingStep& pending, const std::string& what);
  std::string find_batches(const PendingStep& pending, bool only_largest);
  void take_snapshot();
  void rewind();
  dist::Progress progress() const;
  void finish(Due due, bool is_end);
  void log(const StepMetrics& metrics);
  void write_log(const std::function<void()>& write);
  void evaluate_end();
  void preempt();
  void save_end();
  void end_run();
  std::optional<double> validate();
  void judge();

  Config config_;
  dist::World& world_;
  RunDir& run_dir_;
  Checkpointing& checkpoints_;
  StatusFile& status_;
  std::atomic<int64_t>* steps_done_;
  Workload& work_;
  std::optional<dist::SharedTuning> tuning_;                   // none: the libraries' proposals
  std::string data_id_, data_content_, val_id_, val_content_;  // contents once they are read
  const Samples &samples_, &eval_samples_;
  const std::string budget_;  // what was resolved of it
  Figures figures_;           // of the last evaluation, beside val_loss_
  int64_t tokens_per_sample_ = 1, grad_accum_steps_ = 1, samples_per_step_ = 1,
          tokens_per_step_ = 1;
  nn::Module* model_ = nullptr;
  std::unique_ptr<dist::Fsdp> fsdp_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<optim::Schedule> schedule_;
  std::vector<std::string> early_lines_;  // before there is a log
  std::unique_ptr<MetricsLog> log_;       // rank 0
  std::optional<IoError> log_error_;      // it is full; nothing more goes there
  std::vector<Batch> batches_;            // of the next step
  std::optional<InputError> data_error_;  // there are none
  std::optional<dist::LossScaler> scaler_;
  TrainResult result_;
  int64_t step_ = 0;           // steps submitted
  int64_t num_submitted_ = 0;  // in this life
  int64_t next_sample_ = 0;    // global: the first of the next step
  std::optional<PendingStep> pending_;
  int64_t num_skipped_ = 0;
  int64_t skips_in_a_row_ = 0, spikes_in_a_row_ = 0;
  SpikeGuard guard_;
  std::unique_ptr<dist::Snapshot> snapshot_;
  int64_t snapshot_step_ = -1;
  bool is_rewind_due_ = false, is_best_ = false, is_end_saved_ = false;
  double last_lr_ = 0;
  std::optional<double> val_loss_, best_val_loss_;  // of the state now; of all
  std::optional<dist::Progress> resumed_;           // from the checkpoint
  bool has_contents_ = false;
  std::unique_ptr<dist::StateGuard> state_guard_;
  std::unique_ptr<dist::FiniteCheck> finite_check_;  // with debug.nan
  std::optional<dist::FirstSteps> first_steps_;      // until they are over
  std::vector<double> first_losses_;
  std::optional<Profile> profile_;  // with profile.steps
  std::optional<BatchReader> reader_;
  SlowRank slow_rank_;
  double last_step_ms_ = 0;
  double waited_ms_ = 0;      // for other ranks, in the last step that is over
  double collective_ms_ = 0;  // all of it so far
  StepRate rate_;             // since the start or the last evaluation
};

/// The loss of validation; nothing if the run is to end first.
std::optional<double> TrainingRun::validate() {
  work_.begin_evaluation();
  const auto loss = evaluate(
      *model_, *fsdp_, world_, eval_samples_, config_.train,
      [this](const Batch& batch) { return work_.val_loss(batch); }, is_preemption_requested);
  if (loss) figures_ = work_.end_evaluation(world_);
  return loss;
}

/// Tasks, which leave the model as it is.
void TrainingRun::judge() {
  if (!work_.has_tasks()) return;
  const auto print = [&](const std::string& lines) {
    if (log_ != nullptr) log_->print(lines);
  };
  const Figures figures = work_.judge(*fsdp_, world_, is_preemption_requested, print);
  if (figures.empty()) {
    print(fmt::format("eval.tasks after step {}: cut short, the run is to end", step_));
  }
  figures_.insert(figures_.end(), figures.begin(), figures.end());
}

TrainingRun::TrainingRun(const Config& config, dist::World& world, Workload& work,
                         const std::string& budget, RunDir& run_dir, Checkpointing& checkpoints,
                         StatusFile& status, std::atomic<int64_t>* steps_done)
    : config_(config),
      world_(world),
      run_dir_(run_dir),
      checkpoints_(checkpoints),
      status_(status),
      steps_done_(steps_done),
      work_(work),
      samples_(work.train_samples()),
      eval_samples_(work.val_samples()),
      budget_(budget),
      guard_(config.guard) {
  world_.control().verdict([&] {
    work_.check();
    data_id_ = work_.data_id();
    val_id_ = work_.val_id();
    count_batches();
    const nn::DeferredInit deferred;
    work_.make_model();
    model_ = &work_.model();
  });
  const Backends& backends = config_.runtime.backends;
  const std::string& tuning_file = config_.kernels.tuning_file;
  if (Context::current()->device().type == DeviceType::kCuda &&
      (!tuning_file.empty() || backends.attention == AttentionBackend::kAuto)) {
    tuning_.emplace(world_, tuning_file);
  }
  work_.begin_checks(world_);
  work_.prepare_model(world_);
  try {
    fsdp_ = dist::fully_shard(*model_, world_, work_.fsdp_options());
  } catch (const ConfigError& error) {
    const ConfigError in_our_terms(in_keys(config_, error.what()));
    world_.control().verdict(&in_our_terms);  // all ranks have it
  }
  work_.initialize(*fsdp_, world_);
  world_.control().verdict([&] { optimizer_ = work_.make_optimizer(fsdp_->shards()); });
  schedule_.emplace(make_schedule(config_));
  scaler_.emplace(loss_scale_options(config_.precision));
  if (world_.world_size() > 1) fsdp_->exposed_times();  // cuda measures from the first call on
  resume();
  state_guard_ = std::make_unique<dist::StateGuard>(
      *model_, *fsdp_, *optimizer_, world_, config_.guard.state,
      dist::StateGuard::Extras{{"loss scale", scaler_->scale()}});
  if (config_.debug.nan == NanCheck::kOn) begin_finite_check();
  if (!config_.profile.steps.empty()) {
    profile_.emplace(config_, step_ + 1, world_, *model_, *fsdp_, finite_check_.get(),
                     [this](const std::string& text) { log_->print(text); });
  }
  reader_.emplace(samples_,
                  RankRows{.micro_batch = config_.train.micro_batch,
                           .num_passes = grad_accum_steps_,
                           .world_size = world_.world_size(),
                           .rank = world_.rank()},
                  config_.data.read_ahead, config_.debug.slow_data_ms);
  const int64_t num_first = config_.guard.first_steps;
  if (num_first > 0 && num_first <= config_.train.steps - step_) {
    first_steps_.emplace(*fsdp_, world_, num_first);
  }
}

/// And of what training starts with, which nothing has computed here.
void TrainingRun::begin_finite_check() {
  finite_check_ = std::make_unique<dist::FiniteCheck>(*model_, *fsdp_, *optimizer_, world_);
  const auto found = finite_check_->find_in_parameters();
  if (!found) return;
  const bool is_imported = !resumed_ && !config_.model.from.empty();
  const std::string source = resumed_      ? checkpoints_.resumed_from()
                             : is_imported ? config_.model.from
                                           : std::string("the first values");
  const std::string what = fmt::format(
      "{}: {} is not finite, expected finite numbers to start from", source, found->text);
  world_.control().verdict([&] {
    if (resumed_) throw CheckpointError(what);
    if (is_imported) throw InputError(what);
    throw NumericsError(what);
  });
}

/// Everything is there: what it starts from, and the log from there on.
void TrainingRun::resume() {
  const RunIdentity identity{data_id_, static_cast<uint64_t>(config_.train.seed),
                             samples_per_step_};
  const auto progress = checkpoints_.start(
      {model_, fsdp_.get(), optimizer_.get(), &*scaler_}, identity, [&](const std::string& line) {
        log_ != nullptr ? log_->print(line) : early_lines_.push_back(line);
      });
  if (progress) {
    world_.control().verdict([&] {
      if (progress->next_sample <= INT64_MAX / 2 / config_.model.context) return;
      throw CheckpointError(
          fmt::format("{}: next_sample = {} with model.context = {}, expected no more tokens than "
                      "can be counted",
                      checkpoints_.resumed_from(), progress->next_sample, config_.model.context));
    });
    step_ = progress->step;
    next_sample_ = progress->next_sample;
    num_skipped_ = progress->num_skipped;
    last_lr_ = progress->lr;
    val_loss_ = progress->val_loss;
    best_val_loss_ = progress->best_val_loss;
    *steps_done_ = step_;
    resumed_ = progress;
    // A save that comes before all is read is of the data that it says, or that nothing is known of.
    if (!config_.checkpoint.resume_override) data_content_ = progress->data_content;
    forget_other_best(*progress);
  }
  if (work_.has_contents()) check_contents();
  if (guard_.rewinds()) {
    const dist::TrainingState state{model_, fsdp_.get(), optimizer_.get(), &*scaler_};
    snapshot_ = std::make_unique<dist::Snapshot>(dist::held_slices(state));
  }
  // What there was before is touched only now that all of the above has gone well.
  run_dir_.begin(step_, checkpoints_.resumed_from(), checkpoints_.run());
  work_.begin_run();
  world_.control().verdict([&] {
    if (world_.rank() != 0) return;
    log_ = std::make_unique<MetricsLog>(
        MetricsLog::Options{.dir = config_.output.dir,
                            .num_steps = config_.train.steps,
                            .log_every = config_.train.log_every,
                            .progress_bar = prints_to_terminal(),
                            .first_step = step_,
                            .on_out_closed = [] { request_preemption("a closed standard output"); },
                            .has_events = config_.output.tensorboard});
    log_->add_config(dump_config(config_), given_settings(config_));
    for (const std::string& dir : {config_.output.dir, checkpoints_.dir()}) {
      work_.write_companions(dir);
    }
  });
  if (world_.rank() == 0) {
    describe();
    for (const std::string& line : early_lines_) log_->print(line);
  }
}

/// Once, when all tokens are read: what they are, and whether they are those of the checkpoint.
void TrainingRun::check_contents() {
  if (has_contents_) return;
  has_contents_ = true;
  std::tie(data_content_, val_content_) = work_.contents();
  if (!resumed_) return;
  checkpoints_.check_content(data_content_);
  forget_other_best(*resumed_);
}

/// Losses of other validation data are not compared with those to come.
void TrainingRun::forget_other_best(const dist::Progress& there) {
  if (!best_val_loss_ || dist::is_same_validation(there, progress())) return;
  const std::string line = fmt::format(
      "resume: the validation data is another than that of the checkpoint: its best loss, {:.4f}, "
      "is not compared with those to come",
      *best_val_loss_);
  best_val_loss_.reset();
  if (world_.rank() != 0) return;
  log_ != nullptr ? log_->print(line) : early_lines_.push_back(line);
}

void TrainingRun::count_batches() {
  const TrainConfig& t = config_.train;
  const int64_t per_pass = t.micro_batch * world_.world_size();
  if (t.global_batch % per_pass != 0) {
    throw ConfigError(fmt::format(
        "{}: train.global_batch = {}, expected a multiple of train.micro_batch x ranks = {} x {}",
        config_.origin("train.global_batch"), t.global_batch, t.micro_batch, world_.world_size()));
  }
  tokens_per_sample_ = work_.tokens_per_sample();
  grad_accum_steps_ = t.global_batch == 0 ? t.grad_accum_steps : t.global_batch / per_pass;
  if (__builtin_mul_overflow(per_pass, grad_accum_steps_, &samples_per_step_) ||
      __builtin_mul_overflow(samples_per_step_, tokens_per_sample_, &tokens_per_step_)) {
    throw ConfigError(fmt::format(
        "{}: a step of {} passes of {} samples of {} tokens on {} ranks has more tokens than can "
        "be counted, expected fewer",
        config_.origin("train.grad_accum_steps"), grad_accum_steps_, t.micro_batch,
        config_.model.context, world_.world_size()));
  }
  if (samples_.num_samples() < samples_per_step_) work_.fail_too_few(samples_per_step_);
}

void TrainingRun::describe() {
  log_->print(dump_config(config_));
  if (const std::string derived = derived_defaults(config_); !derived.empty()) {
    log_->print("defaults: " + derived);
  }
  if (!budget_.empty()) log_->print(budget_);
  const dist::ShardView view(*fsdp_);
  log_->print(print_tree(*model_, [&](const nn::Module& m) { return view.unit_of(m); }));
  log_->print(fsdp_->summary());
  const Workload::Print print = [&](const std::string& line) { log_->print(line); };
  work_.describe_model(print);
  const auto [num_train, num_val] = work_.num_positions();
  log_->print(fmt::format(
      "data: {} tokens to train on ({} samples), {} for validation; a step: {} samples = {} ranks "
      "x {} passes x {}, {} tokens",
      num_train, samples_.num_samples(), num_val, samples_per_step_, world_.world_size(),
      grad_accum_steps_, config_.train.micro_batch, tokens_per_step_));
  work_.describe_data(print);
  const bool is_cuda = Context::current()->device().type == DeviceType::kCuda;
  if (const auto idle = keys_without_effect(config_, is_cuda); !idle.empty()) {
    constexpr size_t kMaxNbytes = 3000;
    log_warning("{} without effect: {}", idle.size() == 1 ? "a key" : "keys",
                join_few(idle, "; ", idle.size(), kMaxNbytes));
  }
}

/// Planted faults of a machine: a bit that flips, a rank that is slow.
void TrainingRun::inject_faults(int64_t step) {
  const DebugConfig& d = config_.debug;
  if (d.flip_step == step && d.flip_rank == world_.rank()) {
    const NoGrad no_grad;
    const Tensor first = fsdp_->shards().at(0).master.narrow(0, 0, 1);
    Tensor(first).copy_(scale(first, -1.0));  // the sign
  }
  if (d.slow_ms == 0 || d.slow_rank != world_.rank()) return;
  const auto sleep = [ms = d.slow_ms] {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
  };
  if (current_stream().device().type == DeviceType::kCpu) {
    current_stream().submit("debug.slow_ms", sleep);
  } else {
    sleep();
  }
}

/// Before the ranks speak at the end of a step of the next one's data: a file that was cut, or a
/// token out of range, which one of them meets alone, ends all of them between two steps.
void TrainingRun::read_batches() {
  const profiler::HostSpan span("data");
  batches_.clear();
  try {
    batches_ = reader_->take(next_sample_, config_.train.steps - step_ - 1);
  } catch (const InputError& error) {
    data_error_ = error;
  }
}

/// Where no end of a step comes between.
void TrainingRun::read_first_batches() {
  read_batches();
  world_.control().verdict(data_error_ ? &*data_error_ : nullptr);
}

PendingStep TrainingRun::submit_step(int64_t step) {
  const profiler::HostSpan span("step");
  // Of the third step, when all that stays is there.
  std::optional<MemoryTimeline> timeline;
  if (log_ != nullptr && num_submitted_++ == 2) {
    constexpr size_t kMaxPoints = 200;
    timeline.emplace(*Context::current()->allocator(), kMaxPoints);
  }
  // What is submitted is of a phase: for timelines, the profile's table and tools that read NVTX.
  std::unique_ptr<profiler::HostSpan> in_phase;
  const auto enter = [&](const char* phase) {
    in_phase.reset();
    in_phase = std::make_unique<profiler::HostSpan>(phase);
    if (profile_) profile_->enter(step + 1, phase);
    if (timeline) timeline->mark(phase);
  };
  enter("forward");
  inject_faults(step + 1);
  PendingStep pending;
  pending.step = step + 1;
  pending.first_sample = next_sample_;
  pending.num_targets = samples_.num_targets(next_sample_, samples_per_step_);
  const int64_t B = config_.train.micro_batch;
  // The mean over the step's targets of all ranks: folded in where the gradient starts.
  const Tensor grad_scale = scaler_->grad_scale(1.0 / static_cast<double>(pending.num_targets));
  std::optional<OpObserverScope> observes;
  if (OpObserver* const observer = profile_ ? profile_->observer() : finite_check_.get();
      observer != nullptr) {
    observes.emplace(observer);
  }
  for (int64_t pass = 0; pass < grad_accum_steps_; ++pass) {
    if (finite_check_ != nullptr) finite_check_->begin_pass(static_cast<int>(pass));
    const int64_t offset = (pass * world_.world_size() + world_.rank()) * B;
    random_state() = {.seed = static_cast<uint64_t>(config_.train.seed),
                      .step = static_cast<uint64_t>(step),
                      .op_index = 0,
                      .sample_offset = offset};
    fsdp_->begin_micro_batch(static_cast<int>(pass), static_cast<int>(grad_accum_steps_));
    const Batch& batch = batches_[static_cast<size_t>(pass)];
    if (pass > 0) enter("forward");
    const LossSum loss = work_.loss(batch, grad_scale, pending.extras);
    enter("backward");
    backward(loss.sum, grad_scale);
    pending.losses.push_back(loss.sum.detach().view({1}));
  }
  observes.reset();
  enter("optimizer");
  if (config_.debug.nan_step == step + 1 && config_.debug.nan_rank == world_.rank()) {
    pending.losses.back().fill_(std::numeric_limits<double>::quiet_NaN());
  }
  const Tensor loss_sum = fsdp_->sum_micro_batches(pending.losses);
  pending.loss_sum = HostCopy(loss_sum);
  const dist::ClippedNorm clip =
      fsdp_->clip_grad_norm(config_.optim.clip, config_.optim.clip_p, scaler_->scale());
  if (config_.output.unit_norms) {
    dist::UnitNorms of_units = fsdp_->unit_norms(clip, config_.optim.clip_p, scaler_->scale());
    pending.units = std::move(of_units.units);
    pending.unit_norms = HostCopy(of_units.norms);
  }
  include_loss(clip, loss_sum);
  Tensor skip = clip.found_inf;
  if (guard_.is_on()) {
    const double loss = pending.loss_sum.item() / static_cast<double>(pending.num_targets);
    if (guard_.is_spike(loss)) {
      pending.spike = guard_.score(loss);
      skip = full({}, 1, kU8);
    }
  }
  pending.lr = schedule_->lr(step);
  state_guard_->before_update(step + 1);
  if (first_steps_) first_steps_->before_update();
  optimizer_->step(static_cast<float>(pending.lr), clip.factor, skip);
  state_guard_->after_update();
  if (first_steps_) first_steps_->after_update();
  if (finite_check_ != nullptr) {
    finite_check_->after_update();
    pending.checked = finite_check_->end_step();
  }
  fsdp_->end_step();
  if (scaler_->options().scaling != dist::LossScaling::kNone) {
    pending.loss_scale = HostCopy(scaler_->scale());
    scaler_->update(clip.found_inf);
  }
  pending.grad_norm = HostCopy(clip.norm);
  pending.found_inf = HostCopy(clip.found_inf);
  if (world_.world_size() > 1) pending.exposed = fsdp_->exposed_times();
  pending.done = current_stream().record();
  if (timeline) pending.memory = std::make_shared<MemoryTimeline::Result>(timeline->result());
  in_phase.reset();
  if (profile_) profile_->enter(-1, "");  // until the next step
  return pending;
}

StepMetrics TrainingRun::finish_step(const PendingStep& pending) {
  pending.done.synchronize();
  state_guard_->check(pending.step);
  StepMetrics m;
  m.step = pending.step;
  m.lr = pending.lr;
  m.loss = pending.loss_sum.item() / static_cast<double>(pending.num_targets);
  m.grad_norm = pending.grad_norm.item();
  work_.add_metrics(m, pending.extras, world_);
  if (pending.unit_norms.is_defined()) {
    const auto* const norms = static_cast<const float*>(pending.unit_norms.data());
    for (size_t i = 0; i < pending.units.size(); ++i) {
      m.unit_norms.emplace_back(pending.units[i], norms[i]);
    }
  }
  m.tokens = (pending.first_sample + samples_per_step_) * tokens_per_sample_;
  if (pending.exposed != nullptr) {
    m.exposed_gather_ms = pending.exposed->gather_ms();
    m.exposed_reduce_ms = pending.exposed->reduce_ms();
    const auto count = static_cast<size_t>(config_.debug.exposed_units);
    for (const dist::ExposedTimes::Entry& e : pending.exposed->longest(count)) {
      m.exposed_units.push_back({e.unit, static_cast<double>(e.time.gather_ns) * 1e-6,
                                 static_cast<double>(e.time.reduce_ns) * 1e-6});
    }
  }
  const bool has_waits = m.exposed_gather_ms.has_value();
  rate_.add(Clock::now(),
            has_waits ? std::optional(*m.exposed_gather_ms + *m.exposed_reduce_ms) : std::nullopt);
  m.step_ms = last_step_ms_ = rate_.step_ms();
  m.exposed = rate_.exposed();
  m.tokens_per_second = static_cast<double>(tokens_per_step_) / std::max(m.step_ms * 1e-3, 1e-9);
  const double collective_ms = world_.watchdog().collective_ms(world_.rank());
  waited_ms_ = std::exchange(collective_ms_, collective_ms);
  waited_ms_ = collective_ms - waited_ms_;
  // No thread runs the collectives of a device: there it is what compute has stood still for.
  if (Context::current()->device().type == DeviceType::kCuda)
    waited_ms_ = m.exposed_gather_ms.value_or(0) + m.exposed_reduce_ms.value_or(0);
  if (const auto slowest = slow_rank_.find()) {
    m.slowest_rank = slowest->rank;
    m.slowest_behind_ms = slowest->behind_ms;
    m.is_slow = slowest->is_persistent;
  }
  const AllocatorStats memory = Context::current()->allocator()->stats();
  m.peak_bytes = memory.peak_allocated;
  m.peak_by_class = memory.peak_by_class;
  m.memory_over_step = pending.memory;
  m.reserved_bytes = memory.reserved;
  const double flops = work_.flops_per_token();
  if (config_.output.peak_tflops > 0 && flops > 0) {
    m.mfu = m.tokens_per_second * flops / (config_.output.peak_tflops * 1e12 * world_.world_size());
  }
  const bool is_accepted = accept_step(pending, m);
  if (pending.loss_scale.is_defined()) m.loss_scale = pending.loss_scale.item();
  if (pending.loss_scale.is_defined() || num_skipped_ > 0) m.skipped = num_skipped_;
  if (first_steps_) warn_of_first_steps(m);
  if (is_accepted) {
    skips_in_a_row_ = spikes_in_a_row_ = 0;
    guard_.add(m.loss);
  }
  last_lr_ = m.lr;
  *steps_done_ = m.step;
  return m;
}

/// Whether the step changed the model. If it did not, counts it, or ends the run: by the same
/// numbers on every rank. The optimizer has left all states as they were.
bool TrainingRun::accept_step(const PendingStep& pending, const StepMetrics& m) {
  const bool is_finite = pending.found_inf.item() == 0;
  const std::string first = find_nonfinite(pending, is_finite);
  if (is_finite && !pending.spike) return true;
  ++num_skipped_;
  // A scale that can fall may help: the next step starts lower.
  const bool scale_falls = pending.loss_scale.is_defined() &&
                           pending.loss_scale.item() > scaler_->options().rule.min_scale;
  if (!is_finite && scale_falls && std::isfinite(m.loss)) return false;
  std::string what;
  if (!is_finite) {
    what = fmt::format(
        "step {}: loss {}, gradient norm {}, expected finite numbers; {}nothing of this step was "
        "applied; {}; {}",
        m.step, number_text(m.loss), number_text(pending.grad_norm.item()), first,
        find_batches(pending, false), nonfinite_advice(config_, pending.lr));
    if (++skips_in_a_row_ > config_.guard.max_skips) stop(pending, what);
  } else {
    what = fmt::format(
        "step {}: loss {:.4f} is {:.1f} standard deviations above the last {}, expected at most "
        "{}; nothing of this step was applied; {}",
        m.step, m.loss, *pending.spike, config_.guard.spike_window, config_.guard.spike_z,
        find_batches(pending, true));
    if (++spikes_in_a_row_ > config_.guard.max_spikes) stop(pending, what);
    is_rewind_due_ = guard_.rewinds();
  }
  if (world_.rank() == 0) log_warning("{}", what);
  return false;
}

/// With debug.nan, "first not finite: output of ...; " of a step that is not. One whose loss and
/// gradients are finite although something was not is told of; what the optimizer has written cannot
/// be skipped any more and ends the run.
std::string TrainingRun::find_nonfinite(const PendingStep& pending, bool is_finite) {
  if (pending.checked == nullptr) return "";
  const auto found = finite_check_->find(*pending.checked);
  if (!found) {
    return is_finite ? ""
                     : "first not finite: the sum over ranks and passes, or the loss: every output "
                       "of an operation and every gradient was finite; ";
  }
  if (found->is_update) {
    stop(pending, fmt::format("step {}: {} is not finite after the optimizer's update, expected "
                              "finite numbers; {}",
                              pending.step, found->text, nonfinite_advice(config_, pending.lr)));
  }
  if (is_finite && world_.rank() == 0) {
    log_warning("step {}: first not finite: {}; loss and gradients are finite", pending.step,
                found->text);
  }
  return fmt::format("first not finite: {}; ", found->text);
}

/// Once, when they are over: of what does not train.
void TrainingRun::warn_of_first_steps(const StepMetrics& m) {
  first_losses_.push_back(m.loss);
  const int64_t count = config_.guard.first_steps;
  if (std::ssize(first_losses_) < count) return;
  const dist::FirstSteps::Found found = first_steps_->find();
  first_steps_.reset();
  if (world_.rank() != 0 || num_skipped_ >= count) return;
  std::vector<std::string> trained;
  for (const nn::NamedParameter& p : model_->named_parameters()) {
    if (p.parameter->tensor.requires_grad()) trained.push_back(p.name);
  }
  std::vector<std::string> texts =
      dead_parameters(found, parameter_rules(config_, *model_).groups, trained);
  const bool is_new = !resumed_ && config_.model.from.empty();
  if (std::string flat = flat_loss(first_losses_, is_new); !flat.empty()) {
    texts.push_back(std::move(flat));
  }
  for (const std::string& text : texts) log_warning("the first {} steps: {}", count, text);
}

void TrainingRun::stop(const PendingStep&, const std::string& what) {
  checkpoints_.finish();
  const NumericsError error(what);
  world_.control().verdict(&error);
  throw error;  // not reached: the verdict is that of all ranks
}

/// "samples 80 to 119; not finite: rank 1, samples 88 to 95" from the losses of all micro-batches,
/// or with the largest one.
std::string TrainingRun::find_batches(const PendingStep& pending, bool only_largest) {
  const auto ranks = static_cast<size_t>(world_.world_size());
  const int64_t B = config_.train.micro_batch;
  std::vector<double> mine, all(pending.losses.size() * ranks);
  for (const Tensor& loss : pending.losses) mine.push_back(loss.item());
  world_.control().all_gather(all.data(), mine.data(),
                              static_cast<int64_t>(mine.size() * sizeof(double)));
  const auto name = [&](size_t i) {
    const size_t rank = i / mine.size(), pass = i % mine.size();
    const int64_t first = pending.first_sample + static_cast<int64_t>(pass * ranks + rank) * B;
    return fmt::format("rank {}, samples {} to {}", rank, first, first + B - 1);
  };
  std::string text = fmt::format("samples {} to {}; ", pending.first_sample,
                                 pending.first_sample + samples_per_step_ - 1);
  if (only_largest) {
    const auto i = static_cast<size_t>(std::max_element(all.begin(), all.end()) - all.begin());
    return text +
           fmt::format("largest ({:.4f}): {}",
                       all[i] / static_cast<double>(B) / static_cast<double>(config_.model.context),
                       name(i));
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!std::isfinite(all[i])) names.push_back(name(i));
  }
  if (names.empty()) return text + "the losses of all ranks are finite";
  return text + fmt::format("not finite: {}", join_few(names, "; "));
}

void TrainingRun::take_snapshot() {
  snapshot_->capture();
  snapshot_step_ = step_;
}

/// The state of the last snapshot; the data goes on.
void TrainingRun::rewind() {
  is_rewind_due_ = false;
  snapshot_->restore();
  fsdp_->shards_changed(optimizer_.get());
  state_guard_->states_changed();
  step_ = snapshot_step_;
  if (log_ != nullptr) {
    log_->print(fmt::format("back to step {}, on with sample {}", step_, next_sample_));
  }
}

dist::Progress TrainingRun::progress() const {
  return {.step = step_,
          .next_sample = next_sample_,
          .samples_per_step = samples_per_step_,
          .tokens = next_sample_ * tokens_per_sample_,
          .num_skipped = num_skipped_,
          .lr = last_lr_,
          .val_loss = val_loss_,
          .best_val_loss = best_val_loss_,
          .seed = static_cast<uint64_t>(config_.train.seed),
          .data_id = data_id_,
          .data_content = data_content_,
          .val_id = val_id_,
          .val_content = val_content_,
          .config = dump_config(config_)};
}

/// Completes the step in flight on the host. The state at the end is on the disk before it is
/// evaluated: whatever goes wrong there must not cost the training. No resume comes back to the step
/// behind it, so its line is in the file before.
void TrainingRun::finish(Due due, bool is_end) {
  StepMetrics m = finish_step(*pending_);
  pending_.reset();
  val_loss_.reset();
  if (is_end && !is_rewind_due_) {
    write_log([&] { log_->record(m); });
    save_end();
  }
  if (due.any() && !is_rewind_due_) {
    figures_.clear();
    try {
      if (due.loss) m.val_loss = validate();
      if (due.tasks) judge();
    } catch (...) {
      log(m);
      throw;
    }
    m.figures = figures_;
    if (due.loss && !m.val_loss && eval_samples_.num_samples() > 0 && log_ != nullptr) {
      log_->print(fmt::format("evaluation after step {}: cut short, the run is to end", step_));
    }
    // Rates and waits of the next steps are theirs alone.
    if (world_.world_size() > 1) fsdp_->exposed_times();
    rate_.restart(Clock::now());
    collective_ms_ = world_.watchdog().collective_ms(world_.rank());
  }
  val_loss_ = m.val_loss;
  is_best_ = val_loss_ && !(best_val_loss_ && *best_val_loss_ <= *val_loss_);
  if (is_best_) best_val_loss_ = val_loss_;
  if (is_end_saved_) checkpoints_.add_val_loss(progress());
  result_.loss = m.loss;
  if (m.val_loss) result_.val_loss = m.val_loss;
  log(m);
  if (is_end && log_ != nullptr) {
    work_.describe_end(next_sample_, [&](const std::string& line) { log_->print(line); });
  }
}

/// A file that cannot be written any more is told to all ranks at the end of the next step, which
/// then save before they end.
void TrainingRun::log(const StepMetrics& m) {
  status_.set_loss(m.loss);
  work_.end_step(m);
  if (log_ == nullptr) return;
  status_.progress(m.step, m.loss);
  write_log([&] { log_->add(m); });
}

void TrainingRun::write_log(const std::function<void()>& write) {
  if (log_ == nullptr || log_error_) return;
  try {
    write();
  } catch (const IoError& error) {
    log_error_ = error;
  }
}

/// Of a run that had ended before it was evaluated.
void TrainingRun::evaluate_end() {
  const bool has_samples = eval_samples_.num_samples() > 0;
  if (!(has_samples || work_.has_tasks())) return;
  if (!work_.finish_checks(is_preemption_requested)) return;
  figures_.clear();
  val_loss_ = validate();
  if (has_samples && !val_loss_) return;
  judge();
  write_log([&] { log_->add_evaluation(step_, val_loss_, figures_); });
  if (!val_loss_) return;
  if (!best_val_loss_ || *val_loss_ < *best_val_loss_) best_val_loss_ = val_loss_;
  result_.val_loss = val_loss_;
  checkpoints_.add_val_loss(progress());
}

TrainResult TrainingRun::run() {
  const int64_t num_steps = config_.train.steps, eval_every = config_.train.eval_every;
  RunControl control(config_.train, world_);
  rate_.restart(Clock::now());
  result_.steps = step_;
  if (step_ < num_steps) read_first_batches();
  SignalHandlers::begin_steps();
  work_.begin_steps(step_);
  if (step_ == num_steps && !val_loss_) evaluate_end();
  while (step_ < num_steps) {
    if (guard_.rewinds() && step_ % config_.guard.snapshot_every == 0) take_snapshot();
    if (profile_) profile_->before_step(step_ + 1);
    if (batches_.empty()) read_first_batches();  // back from the last step
    PendingStep submitted = submit_step(step_);
    ++step_;
    next_sample_ += samples_per_step_;
    batches_.clear();
    if (step_ < num_steps) read_batches();
    if (config_.memory.empty_cache_every > 0 && step_ % config_.memory.empty_cache_every == 0) {
      Context::current()->allocator()->empty_cache();
    }
    if (pending_) finish({}, false);
    pending_ = std::move(submitted);
    RunControl::Decision decision =
        control.poll(checkpoints_.state(), checkpoints_.is_late(),
                     log_error_.has_value() || data_error_.has_value(), waited_ms_);
    if (last_step_ms_ > 0) slow_rank_.add(decision.waited_ms, last_step_ms_);
    if (tuning_) tuning_->update();
    checkpoints_.advance(decision.writers);
    const bool is_last = step_ == num_steps || decision.is_out_of_time;
    const bool is_eval_due = is_last || (eval_every > 0 && step_ % eval_every == 0) ||
                             completes_part_of_epoch(config_, config_.train.evals_per_epoch, step_);
    const bool is_round_due =
        work_.has_tasks() &&
        (is_last || (config_.eval.every > 0 && step_ % config_.eval.every == 0) ||
         completes_part_of_epoch(config_, config_.eval.per_epoch, step_));
    const bool is_save_due = checkpoints_.is_due(step_) || decision.is_save_due;
    // Who asked for the end may not leave the time for it: a resume reads the tokens again.
    if ((is_eval_due || is_round_due || is_save_due) && !decision.is_preempted &&
        !decision.has_failed) {
      decision.is_preempted = !work_.finish_checks(is_preemption_requested);
      if (!decision.is_preempted) check_contents();
    }
    const bool is_cut = decision.is_preempted || decision.has_failed;
    const bool is_end = is_last && !is_cut;
    const Due due{.loss = is_eval_due && !is_cut, .tasks = is_round_due && !is_cut};
    const bool saves = is_cut || is_save_due;
    // Evaluations and checkpoints are of the parameters after their step: nothing is ahead of it.
    if (is_cut || is_end || due.any() || saves || guard_.is_on()) finish(due, is_end);
    // Back from the last step, the run is not at its end.
    const bool ends = is_cut || (is_end && (!is_rewind_due_ || decision.is_out_of_time));
    if (is_rewind_due_) rewind();
    result_.steps = step_;
    if (decision.is_preempted)
      world_.watchdog().set_on_end(nullptr);  // the end of the step is reached
    if (!is_end_saved_ &&
        (saves || (is_best_ && checkpoints_.is_on() && config_.checkpoint.best))) {
      checkpoints_.save(progress());
    }
    is_best_ = false;
    if (decision.has_failed) {
      checkpoints_.finish();
      const Error* const mine = data_error_  ? static_cast<const Error*>(&*data_error_)
                                : log_error_ ? &*log_error_
                                             : nullptr;
      world_.control().verdict(mine);
    }
    if (decision.is_preempted) {
      result_.is_preempted = true;
      if (profile_) profile_->finish();
      preempt();
      return result_;
    }
    if (ends) break;
  }
  end_run();
  return result_;
}

/// Ends when the checkpoint is complete.
void TrainingRun::preempt() {
  if (!checkpoints_.finish()) {
    const IoError error(fmt::format(
        "step {}: preempted, but its checkpoint could not be written; the one before it stays",
        step_));
    world_.control().verdict(&error);
  }
  if (log_ != nullptr) log_->print(fmt::format("preempted after step {}", step_));
}

/// The checkpoint and the model after the last step. If one cannot be written, the other is there.
/// The checkpoint is complete before the model is there: a run that dies between the two goes on from
/// it, while beside a model without one nothing may begin anew.
void TrainingRun::save_end() {
  is_end_saved_ = true;
  std::exception_ptr failed;
  if (config_.checkpoint.last || checkpoints_.is_due(step_)) checkpoints_.save(progress());
  try {
    checkpoints_.finish();
  } catch (const Error& error) {
    if (world_.control().verdict_rank(error) < 0) throw;  // the ranks are not at the same place
    failed = std::current_exception();
  }
  const std::string path = config_.output.dir + "/model.safetensors";
  save_model(path, *model_, *fsdp_, world_, step_);
  if (log_ != nullptr) log_->print("model: " + path);
  if (failed) std::rethrow_exception(failed);
}

void TrainingRun::end_run() {
  if (profile_) profile_->finish();
  if (!is_end_saved_) save_end();
  work_.show_model(*fsdp_, world_, [&](const std::string& text) {
    write_log([&] { log_->add_sample(step_, text); });
  });
  checkpoints_.finish();
  world_.control().verdict(log_error_ ? &*log_error_ : nullptr);
}

}  // namespace

std::shared_ptr<Context> make_context(Config& config, dist::World& world) {
  check_agreement(world.control(), facts_of(config));
  world.watchdog().set_timeout(
      std::chrono::milliseconds(static_cast<int64_t>(config.dist.timeout * 1e3)));
  world.watchdog().set_verbose(config.debug.dist);
  world.watchdog().set_delay(std::chrono::microseconds(config.debug.slow_link_us));
  std::shared_ptr<Context> context;
  const std::optional<DType> stored_dtype = stored_param_dtype(config, world);
  world.control().verdict([&] {
    ContextOptions options = config.runtime;
    options.device = world.device(config.device);
    resolve_param_dtype(config, options.device.type == DeviceType::kCuda, stored_dtype);
    check_kernel_libraries(config, options.device.type);
    options.num_threads = world.num_threads(config.runtime.num_threads);
    context = std::make_shared<Context>(options);
    // Who sets train.threads may run other jobs beside this one, which would take the same.
    if (config.train.pin_threads && config.runtime.num_threads == 0 &&
        options.device.type == DeviceType::kCpu) {
      if (const auto processors = world.processors(options.num_threads); !processors.empty()) {
        pin_threads(context->compute(), processors);
      }
    }
  });
  return context;
}

TrainResult run_training(const Config& given, dist::World& world,
                         const std::shared_ptr<Context>& context, std::unique_ptr<Workload> owned) {
  Config config = given;
  const Context::Scope scope(context);
  const std::unique_ptr<Workload> held = std::move(owned);  // not longer than the scope
  Workload& work = *held;
  work.open(config, world, *context);
  world.control().verdict([&] {
    if (world.rank() == 0) check_trace_path(config);
  });
  RunDir run_dir(config, world);  // held until the end
  Checkpointing checkpoints(config, world);
  StatusFile status(config.output.dir, run_dir);
  std::atomic<bool> has_spoken = false;  // this rank: it may say more
  const auto report = [&](RunState state, int64_t step, const std::string& why,
                          bool is_stand_in = false) {
    if (world.rank() != 0 && !is_stand_in) return;
    // Who fails first says why, the others fail because of it.
    if (state == RunState::kFailed && !has_spoken && !status.is_running()) return;
    has_spoken = true;
    try {
      status.end(state, step, why);
    } catch (const IoError& error) {
      log_error("{}", error.what());
    }
  };
  const auto steps_done = std::make_shared<std::atomic<int64_t>>(0);
  const bool is_alone = world.world_size() == 1;
  const FatalReport fatal_report{.path = config.output.dir + "/status.json",
                                 .text = fatal_status_text(),
                                 .step = steps_done,
                                 .who = is_alone ? "" : fmt::format("rank {}: ", world.rank()),
                                 .only_if_running = !is_alone};
  if (run_dir.is_begun()) set_fatal_report(fatal_report);
  // A step that is not through by the time the process is ended has failed. After a first SIGTERM
  // it may still get through; see [Note: Signals].
  world.watchdog().set_on_end([&](const std::string& reason) {
    // Rank 0 may be the one that is gone already: then the next says so.
    std::this_thread::sleep_for(std::chrono::milliseconds(100) * std::min(world.rank(), 3));
    report(RunState::kFailed, *steps_done,
           reason.empty() ? fmt::format("ended by {} within a step", preemption_cause()) : reason,
           /*is_stand_in=*/true);
  });
  const auto forget = [](dist::World* w) {
    w->watchdog().set_on_end(nullptr);
    set_fatal_report({});
  };
  const std::unique_ptr<dist::World, decltype(forget)> scope_of_action(&world, forget);
  try {
    // Tokens that are kept lie in the run's directory, which is held before they are made.
    work.load(config, world, *context);
    std::string budget;
    world.control().verdict([&] {
      work.make_samples(config);
      work.resolve(config);
      budget = resolve_budget(config, {.samples_per_epoch = work.train_samples().num_samples(),
                                       .tokens_per_sample = work.tokens_per_sample(),
                                       .world_size = world.world_size()});
      work.set_config(config);
    });
    TrainingRun run(config, world, work, budget, run_dir, checkpoints, status, steps_done.get());
    work.set_up(world);
    set_fatal_report(fatal_report);  // only now an earlier run's status is this one's
    const TrainResult result = run.run();
    if (context->order_check() != nullptr) {
      context->order_check()->throw_if_conflicts();
      if (world.rank() == 0) log_info("order check: no conflict in {} steps", result.steps);
    }
    const bool is_short = result.steps < config.train.steps;
    // A run whose end nobody can read has failed.
    world.control().verdict([&] {
      if (world.rank() != 0) return;
      if (result.is_preempted) {
        const std::string cause = preemption_cause();
        status.end(RunState::kPreempted, result.steps,
                   fmt::format("asked to end{}; --resume=auto goes on",
                               cause.empty() ? "" : " by " + cause));
      } else {
        status.end(RunState::kFinished, result.steps, is_short ? "train.max_minutes reached" : "");
      }
    });
    if (result.is_preempted) forget_preemption();
    return result;
  } catch (const std::exception& error) {
    const auto* const known = dynamic_cast<const Error*>(&error);
    const bool is_mine = known == nullptr || world.control().verdict_rank(*known) < 0;
    report(RunState::kFailed, *steps_done, error.what(), /*is_stand_in=*/is_mine);
    throw;
  }
}

TrainResult train(const Config& given, dist::World& world) {
  Config config = given;
  const std::shared_ptr<Context> context = make_context(config, world);
  return run_training(config, world, context, make_language_workload());
}

}  // namespace tessera::apps
