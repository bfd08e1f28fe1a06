#include "apps/trainer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <limits>
#include <mutex>
#include <thread>
#include <type_traits>

#include "apps/agreement.h"
#include "apps/budget.h"
#include "apps/checkpointing.h"
#include "apps/config_table.h"
#include "apps/loss.h"
#include "apps/metrics.h"
#include "apps/model_from.h"
#include "apps/options.h"
#include "apps/packed_samples.h"
#include "apps/parameter_groups.h"
#include "apps/preferences.h"
#include "apps/run_control.h"
#include "apps/run_dir.h"
#include "apps/token_cache.h"
#include "apps/token_check.h"
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
#include "dist/checkpoint/huggingface.h"
#include "dist/checkpoint/peft.h"
#include "dist/comm/watchdog.h"
#include "dist/fsdp/shard_view.h"
#include "dist/fsdp/state_guard.h"
#include "nn/generate.h"

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
  HostCopy loss_scale;            // of this step; undefined without one
  std::vector<HostCopy> rewards;  // of this rank's micro-batches of pairs
  std::shared_ptr<const dist::ExposedTimes> exposed;
  std::optional<double> spike;  // standard deviations; nothing was applied
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

/// What a model needs beside it to read and write text. What an earlier run has left of another
/// tokenizer goes: these names are the run's (RunDir).
void write_tokenizer(const std::string& dir, const text::Tokenizer& tokenizer) {
  const std::map<std::string, std::string> files = tokenizer.files();
  for (const auto& [name, content] : files) write_file_atomically(dir + "/" + name, content);
  for (const char* name : text::kCompanionFiles) {
    std::error_code ignored;
    if (!files.contains(name)) std::filesystem::remove(dir + "/" + name, ignored);
  }
}

/// What a run goes through: for training and for validation.
struct RunSamples {
  std::unique_ptr<Samples> train, val;
};

RunSamples make_samples(const Config& config, const Data& data) {
  const double fraction = config.data.val_fraction;
  const SampleOptions options = sample_options(config, data);
  const auto of_parts = [&]<class S>(std::type_identity<S>, const auto& rows) -> RunSamples {
    return {std::make_unique<S>(rows, options, fraction, SplitPart::kTrain),
            std::make_unique<S>(rows, options, fraction, SplitPart::kVal)};
  };
  if (data.pairs) return of_parts(std::type_identity<PreferenceSamples>{}, data.pairs);
  if (data.sources) return of_parts(std::type_identity<PackedSamples>{}, data.sources);
  return {std::make_unique<TrainSamples>(data.train, options),
          std::make_unique<EvalSamples>(data.val, options)};
}

/// A pair has two sequences.
int64_t tokens_per_sample(const Config& config, const Data& data) {
  return config.model.context * (data.pairs != nullptr ? 2 : 1);
}

class Trainer {
 public:
  /// `steps_done` follows the steps that the host has seen complete.
  Trainer(const Config& config, dist::World& world, Data data, RunSamples samples,
          const std::string& budget, RunDir& run_dir, Checkpointing& checkpoints,
          StatusFile& status, std::atomic<int64_t>* steps_done);
  TrainResult run();

 private:
  void check_tokens() const;
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
  [[noreturn]] void stop(const PendingStep& pending, const std::string& what);
  std::string find_batches(const PendingStep& pending, bool only_largest);
  void take_snapshot();
  void rewind();
  dist::Progress progress() const;
  void finish(bool evaluates, bool is_end);
  void log(const StepMetrics& metrics);
  void write_log(const std::function<void()>& write);
  void evaluate_end();
  void preempt();
  void save_end();
  void end_run();
  void print_sample();
  void follow_trace(int64_t step);
  void write_trace();
  void initialize_parameters();
  void find_preference_references();
  std::optional<double> validate();

  Config config_;
  dist::World& world_;
  RunDir& run_dir_;
  Checkpointing& checkpoints_;
  StatusFile& status_;
  std::atomic<int64_t>* steps_done_;
  Data data_;
  std::string data_id_, data_content_, val_id_, val_content_;  // contents once they are read
  std::unique_ptr<Samples> samples_, eval_samples_;
  std::optional<TokenCheck> token_check_;  // over before the first save or evaluation
  const std::string budget_;               // what was resolved of it
  const LossTerms loss_terms_;
  int64_t tokens_per_sample_ = 1, grad_accum_steps_ = 1, samples_per_step_ = 1,
          tokens_per_step_ = 1;
  std::unique_ptr<nn::LanguageModel> model_;
  std::unique_ptr<dist::PeftReader> adapters_;  // of `lora.from`
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
  int64_t step_ = 0;         // steps submitted
  int64_t next_sample_ = 0;  // global: the first of the next step
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
  SlowRank slow_rank_;
  double last_step_ms_ = 0;
  double waited_ms_ = 0;      // for other ranks, in the last step that is over
  double collective_ms_ = 0;  // all of it so far
  bool is_tracing_ = false;
  StepRate rate_;  // since the start or the last evaluation
};

bool is_of_base(const nn::NamedParameter& p) {
  return !nn::is_lora(p);
}

/// Of pairs, under the model of dpo.reference, or the one that training starts from, whatever
/// checkpoint it goes on from.
void Trainer::find_preference_references() {
  if (data_.pairs == nullptr) return;
  const std::string& from = config_.dpo.reference;
  const std::string path = config_.output.dir + "/references.bin";
  dist::Hasher key;
  for (const std::string& part : {data_id_, from, reference_identity(config_)}) {
    key.update(part.c_str(), std::ssize(part) + 1);
  }
  bool is_loaded = false;
  const auto load = [&] {
    if (from.empty()) return;
    is_loaded = true;
    std::optional<dist::HfReader> reader;
    world_.control().verdict([&] { reader.emplace(from); });
    dist::load_parameters(*reader, *fsdp_, *model_, is_of_base);
  };
  std::shared_ptr<const std::vector<float>> references;
  {
    // The reference of adapters is the model without them.
    std::optional<nn::LoraOff> off;
    if (config_.lora.is_on()) off.emplace();
    references =
        find_references(*model_, *fsdp_, world_, *data_.pairs, sample_options(config_, data_),
                        config_.train.micro_batch, path, key.digest(), load);
  }
  if (is_loaded) initialize_parameters();
  for (const auto& samples : {samples_.get(), eval_samples_.get()}) {
    dynamic_cast<PreferenceSamples&>(*samples).set_references(references);
  }
}

/// The loss of validation; nothing if the run is to end first.
std::optional<double> Trainer::validate() {
  const auto loss_of = [this](const Batch& batch) {
    if (data_.pairs != nullptr) return preference_loss(*model_, batch, config_.dpo).loss;
    return batch_loss(*model_, batch);
  };
  return evaluate(*model_, *fsdp_, world_, *eval_samples_, config_.train, loss_of,
                  is_preemption_requested);
}

/// By the seed, or the values of `model.from` and `lora.from`.
void Trainer::initialize_parameters() {
  fsdp_->initialize(static_cast<uint64_t>(config_.train.seed));
  if (config_.model.from.empty()) return;
  std::optional<dist::HfReader> reader;
  world_.control().verdict(
      [&] { reader.emplace(config_.model.from, ignored_keys(config_.model)); });
  dist::load_parameters(*reader, *fsdp_, *model_, is_of_base);
  if (adapters_ == nullptr) return;
  const std::vector<std::string> names = adapters_->names();
  dist::load_parameters(*adapters_, *fsdp_, *model_, [&](const nn::NamedParameter& p) {
    return std::find(names.begin(), names.end(), p.name) != names.end();
  });
}

Trainer::Trainer(const Config& config, dist::World& world, Data data, RunSamples samples,
                 const std::string& budget, RunDir& run_dir, Checkpointing& checkpoints,
                 StatusFile& status, std::atomic<int64_t>* steps_done)
    : config_(config),
      world_(world),
      run_dir_(run_dir),
      checkpoints_(checkpoints),
      status_(status),
      steps_done_(steps_done),
      data_(std::move(data)),
      samples_(std::move(samples.train)),
      eval_samples_(std::move(samples.val)),
      budget_(budget),
      loss_terms_{static_cast<float>(config.train.z_loss),
                  static_cast<float>(config.train.label_smoothing)},
      guard_(config.guard) {
  world_.control().verdict([&] {
    check_tokens();
    data_id_ = fingerprint(data_.train);
    if (data_.is_split_by_rows()) {
      data_id_ += fmt::format(", {} for validation", config_.data.val_fraction);
    }
    val_id_ = validation_id(data_.is_split_by_rows() ? data_.train : data_.val, config_);
    count_batches();
    const nn::DeferredInit deferred;
    model_ = make_model(config_, data_.vocab_size);
    if (!config_.lora.from.empty()) {
      adapters_ = std::make_unique<dist::PeftReader>(config_.lora.from);
      adapters_->attach(*model_);
    }
  });
  TokenCheck::Options check{.vocab_size = data_.vocab_size,
                            .results_path = config_.output.dir + "/token_check.txt"};
  token_check_.emplace(data_.files, std::move(check), world_);
  model_->set_recompute(config_.recompute);
  world_.control().verdict([&] { freeze_parameters(config_, *model_); });
  world_.control().verdict([&] { check_quantized(config_, *model_); });
  try {
    fsdp_ = dist::fully_shard(*model_, world_, fsdp_options(config_, *model_));
  } catch (const ConfigError& error) {
    const ConfigError in_our_terms(in_keys(config_, error.what()));
    world_.control().verdict(&in_our_terms);  // all ranks have it
  }
  initialize_parameters();
  find_preference_references();
  world_.control().verdict([&] { optimizer_ = make_optimizer(config_, fsdp_->shards()); });
  schedule_.emplace(make_schedule(config_));
  scaler_.emplace(loss_scale_options(config_.precision));
  if (world_.world_size() > 1) fsdp_->exposed_times();  // cuda measures from the first call on
  resume();
  state_guard_ = std::make_unique<dist::StateGuard>(
      *model_, *fsdp_, *optimizer_, world_, config_.guard.state,
      dist::StateGuard::Extras{{"loss scale", scaler_->scale()}});
}

/// Everything is there: what it starts from, and the log from there on.
void Trainer::resume() {
  const RunIdentity identity{data_id_, static_cast<uint64_t>(config_.train.seed),
                             samples_per_step_};
  const auto progress =
      checkpoints_.start({model_.get(), fsdp_.get(), optimizer_.get(), &*scaler_}, identity,
                         [&](const std::string& line) {
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
  if (token_check_->is_decided()) check_contents();
  if (guard_.rewinds()) {
    const dist::TrainingState state{model_.get(), fsdp_.get(), optimizer_.get(), &*scaler_};
    snapshot_ = std::make_unique<dist::Snapshot>(dist::held_slices(state));
  }
  // What there was before is touched only now that all of the above has gone well.
  run_dir_.begin(step_, checkpoints_.resumed_from(), checkpoints_.run());
  token_check_->keep_results();
  world_.control().verdict([&] {
    if (world_.rank() != 0) return;
    log_ = std::make_unique<MetricsLog>(MetricsLog::Options{
        .dir = config_.output.dir,
        .num_steps = config_.train.steps,
        .log_every = config_.train.log_every,
        .progress_bar = prints_to_terminal(),
        .first_step = step_,
        .on_out_closed = [] { request_preemption("a closed standard output"); }});
    if (data_.tokenizer == nullptr) return;
    for (const std::string& dir : {config_.output.dir, checkpoints_.dir()}) {
      write_tokenizer(dir, *data_.tokenizer);
      if (!data_.chat_template.empty()) {
        write_file_atomically(dir + "/chat_template.jinja", data_.chat_template);
      }
    }
  });
  if (world_.rank() == 0) {
    describe();
    for (const std::string& line : early_lines_) log_->print(line);
  }
}

/// Once, when all tokens are read: what they are, and whether they are those of the checkpoint.
void Trainer::check_contents() {
  if (has_contents_) return;
  has_contents_ = true;
  const size_t num_train = data_.num_train_files, num_files = data_.files.size();
  data_content_ = token_check_->content(0, num_train);
  val_content_ = token_check_->content(num_train, num_files);
  if (num_files == num_train) val_content_ = data_content_;  // a part of the same
  if (!resumed_) return;
  checkpoints_.check_content(data_content_);
  forget_other_best(*resumed_);
}

/// Losses of other validation data are not compared with those to come.
void Trainer::forget_other_best(const dist::Progress& there) {
  if (!best_val_loss_ || dist::is_same_validation(there, progress())) return;
  const std::string line = fmt::format(
      "resume: the validation data is another than that of the checkpoint: its best loss, {:.4f}, "
      "is not compared with those to come",
      *best_val_loss_);
  best_val_loss_.reset();
  if (world_.rank() != 0) return;
  log_ != nullptr ? log_->print(line) : early_lines_.push_back(line);
}

/// What the configuration says of tokens, before the first step instead of after the last.
void Trainer::check_tokens() const {
  if (config_.data.separator >= data_.vocab_size) {
    throw ConfigError(
        fmt::format("{}: data.separator = {}, expected a token below the vocabulary's size {}",
                    config_.origin("data.separator"), config_.data.separator, data_.vocab_size));
  }
  if (config_.sample.options.num_tokens == 0) return;
  if (data_.tokenizer == nullptr) {
    throw ConfigError(fmt::format(
        "{}: sample.tokens = {} with sources of token shards alone, expected 0 or texts among them, "
        "which have a tokenizer",
        config_.origin("sample.tokens"), config_.sample.options.num_tokens));
  }
  try {
    data_.tokenizer->encode(config_.sample.prompt);
  } catch (const InputError& error) {
    throw ConfigError(
        fmt::format("{}: sample.prompt: {}", config_.origin("sample.prompt"), error.what()));
  }
}

void Trainer::count_batches() {
  const TrainConfig& t = config_.train;
  const int64_t per_pass = t.micro_batch * world_.world_size();
  if (t.global_batch % per_pass != 0) {
    throw ConfigError(fmt::format(
        "{}: train.global_batch = {}, expected a multiple of train.micro_batch x ranks = {} x {}",
        config_.origin("train.global_batch"), t.global_batch, t.micro_batch, world_.world_size()));
  }
  tokens_per_sample_ = tokens_per_sample(config_, data_);
  grad_accum_steps_ = t.global_batch == 0 ? t.grad_accum_steps : t.global_batch / per_pass;
  if (__builtin_mul_overflow(per_pass, grad_accum_steps_, &samples_per_step_) ||
      __builtin_mul_overflow(samples_per_step_, tokens_per_sample_, &tokens_per_step_)) {
    throw ConfigError(fmt::format(
        "{}: a step of {} passes of {} samples of {} tokens on {} ranks has more tokens than can "
        "be counted, expected fewer",
        config_.origin("train.grad_accum_steps"), grad_accum_steps_, t.micro_batch,
        config_.model.context, world_.world_size()));
  }
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
  if (const std::string derived = derived_defaults(config_); !derived.empty()) {
    log_->print("defaults: " + derived);
  }
  if (!budget_.empty()) log_->print(budget_);
  const dist::ShardView view(*fsdp_);
  log_->print(print_tree(*model_, [&](const nn::Module& m) { return view.unit_of(m); }));
  log_->print(fsdp_->summary());
  if (config_.lora.is_on()) {
    int64_t trained = 0;
    for (const nn::NamedParameter& p : model_->named_parameters()) {
      if (p.parameter->tensor.requires_grad()) trained += p.parameter->tensor.numel();
    }
    const int64_t all = model_->num_parameters();
    log_->print(fmt::format("lora: {} of {} parameters are trained ({:.3g} %)", trained, all,
                            100.0 * static_cast<double>(trained) / static_cast<double>(all)));
  }
  const dist::ParameterRules rules = parameter_rules(config_, *model_);
  if (!rules.groups.empty() || rules.optimizer) {
    log_->print(dist::describe_groups(*model_, rules, std::string(name_of(config_.optim.name))));
  }
  const auto positions = [](const Samples& samples, const Corpus& corpus) {
    if (const auto* const pairs = dynamic_cast<const PreferenceSamples*>(&samples)) {
      return pairs->num_tokens();
    }
    const auto* const packed = dynamic_cast<const PackedSamples*>(&samples);
    return packed != nullptr ? packed->num_positions() : corpus.num_tokens();
  };
  log_->print(fmt::format(
      "data: {} tokens to train on ({} samples), {} for validation; a step: {} samples = {} ranks "
      "x {} passes x {}, {} tokens",
      positions(*samples_, data_.train), samples_->num_samples(),
      positions(*eval_samples_, data_.val), samples_per_step_, world_.world_size(),
      grad_accum_steps_, config_.train.micro_batch, tokens_per_step_));
  const DataConfig& d = config_.data;
  if (!data_.chats.empty()) log_->print(data_.chats);
  if (const text::DocumentTokens& marks = data_.document_tokens;
      marks.end >= 0 && d.separator < 0) {
    log_->print(fmt::format(
        "documents: each begins with {} and ends with {} (data.document_tokens)",
        shorten(data_.tokenizer->token(marks.begin)), shorten(data_.tokenizer->token(marks.end))));
  }
  if (d.val_tokens.empty() && d.val_fraction > 0 && d.val_split == ValSplit::kTail &&
      !data_.is_split_by_rows()) {
    log_->print(fmt::format(
        "validation: the last {:g} % of the data, which may differ from the rest of it; "
        "--data.val_split=interleave takes pieces from all over",
        d.val_fraction * 100));
  }
  if (const std::string skipped = short_shards(data_.train, config_.model.context);
      !skipped.empty() && !data_.is_split_by_rows()) {
    log_warning("{}", skipped);
  }
  const bool is_cuda = Context::current()->device().type == DeviceType::kCuda;
  if (const auto idle = keys_without_effect(config_, is_cuda); !idle.empty()) {
    constexpr size_t kMaxNbytes = 3000;
    log_warning("{} without effect: {}", idle.size() == 1 ? "a key" : "keys",
                join_few(idle, "; ", idle.size(), kMaxNbytes));
  }
}

/// Planted faults of a machine: a bit that flips, a rank that is slow.
void Trainer::inject_faults(int64_t step) {
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
void Trainer::read_batches() {
  const int64_t B = config_.train.micro_batch;
  batches_.clear();
  try {
    for (int64_t pass = 0; pass < grad_accum_steps_; ++pass) {
      const int64_t offset = (pass * world_.world_size() + world_.rank()) * B;
      batches_.push_back(samples_->batch(next_sample_ + offset, B));
    }
  } catch (const InputError& error) {
    data_error_ = error;
  }
}

/// Where no end of a step comes between.
void Trainer::read_first_batches() {
  read_batches();
  world_.control().verdict(data_error_ ? &*data_error_ : nullptr);
}

PendingStep Trainer::submit_step(int64_t step) {
  inject_faults(step + 1);
  PendingStep pending;
  pending.step = step + 1;
  pending.first_sample = next_sample_;
  pending.num_targets = samples_->num_targets(next_sample_, samples_per_step_);
  const int64_t B = config_.train.micro_batch;
  // The mean over the step's targets of all ranks: folded in where the gradient starts.
  const Tensor grad_scale = scaler_->grad_scale(1.0 / static_cast<double>(pending.num_targets));
  for (int64_t pass = 0; pass < grad_accum_steps_; ++pass) {
    const int64_t offset = (pass * world_.world_size() + world_.rank()) * B;
    random_state() = {.seed = static_cast<uint64_t>(config_.train.seed),
                      .step = static_cast<uint64_t>(step),
                      .op_index = 0,
                      .sample_offset = offset};
    fsdp_->begin_micro_batch(static_cast<int>(pass), static_cast<int>(grad_accum_steps_));
    const Batch& batch = batches_[static_cast<size_t>(pass)];
    LossSum loss;
    if (data_.pairs != nullptr) {
      PreferenceSum of_pairs = preference_loss(*model_, batch, config_.dpo);
      loss = std::move(of_pairs.loss);
      pending.rewards.emplace_back(of_pairs.rewards);
    } else {
      loss = batch_loss(*model_, batch, grad_scale, loss_terms_);
    }
    backward(loss.sum, grad_scale);
    pending.losses.push_back(loss.sum.detach().view({1}));
  }
  if (config_.debug.nan_step == step + 1 && config_.debug.nan_rank == world_.rank()) {
    pending.losses.back().fill_(std::numeric_limits<double>::quiet_NaN());
  }
  const Tensor loss_sum = fsdp_->sum_micro_batches(pending.losses);
  pending.loss_sum = HostCopy(loss_sum);
  const dist::ClippedNorm clip =
      fsdp_->clip_grad_norm(config_.optim.clip, config_.optim.clip_p, scaler_->scale());
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
  optimizer_->step(static_cast<float>(pending.lr), clip.factor, skip);
  state_guard_->after_update();
  fsdp_->end_step();
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
  state_guard_->check(pending.step);
  StepMetrics m;
  m.step = pending.step;
  m.lr = pending.lr;
  m.loss = pending.loss_sum.item() / static_cast<double>(pending.num_targets);
  m.grad_norm = pending.grad_norm.item();
  if (!pending.rewards.empty()) {
    m.rewards = mean_rewards(pending.rewards, config_.train.micro_batch, world_);
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
  m.reserved_bytes = memory.reserved;
  if (config_.output.peak_tflops > 0) {
    m.mfu = m.tokens_per_second * model_->flops_per_token(config_.model.context) /
            (config_.output.peak_tflops * 1e12 * world_.world_size());
  }
  const bool is_accepted = accept_step(pending, m);
  if (pending.loss_scale.is_defined()) m.loss_scale = pending.loss_scale.item();
  if (pending.loss_scale.is_defined() || num_skipped_ > 0) m.skipped = num_skipped_;
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
bool Trainer::accept_step(const PendingStep& pending, const StepMetrics& m) {
  const bool is_finite = pending.found_inf.item() == 0;
  if (is_finite && !pending.spike) return true;
  ++num_skipped_;
  // A scale that can fall may help: the next step starts lower.
  const bool scale_falls = pending.loss_scale.is_defined() &&
                           pending.loss_scale.item() > scaler_->options().rule.min_scale;
  if (!is_finite && scale_falls && std::isfinite(m.loss)) return false;
  std::string what;
  if (!is_finite) {
    what = fmt::format(
        "step {}: loss {}, gradient norm {}, expected finite numbers; nothing of this step was "
        "applied; {}; {}",
        m.step, number_text(m.loss), number_text(pending.grad_norm.item()),
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

void Trainer::stop(const PendingStep&, const std::string& what) {
  checkpoints_.finish();
  const NumericsError error(what);
  world_.control().verdict(&error);
  throw error;  // not reached: the verdict is that of all ranks
}

/// "samples 80 to 119; not finite: rank 1, samples 88 to 95" from the losses of all micro-batches,
/// or with the largest one.
std::string Trainer::find_batches(const PendingStep& pending, bool only_largest) {
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

void Trainer::take_snapshot() {
  snapshot_->capture();
  snapshot_step_ = step_;
}

/// The state of the last snapshot; the data goes on.
void Trainer::rewind() {
  is_rewind_due_ = false;
  snapshot_->restore();
  fsdp_->shards_changed(optimizer_.get());
  state_guard_->states_changed();
  step_ = snapshot_step_;
  if (log_ != nullptr) {
    log_->print(fmt::format("back to step {}, on with sample {}", step_, next_sample_));
  }
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
  const std::string path = trace_path(config_, rank);
  // One time for all ranks, whose nodes agree on the time of day only.
  const auto time_of_day = std::chrono::system_clock::now().time_since_epoch();
  const int64_t offset_ns = std::chrono::nanoseconds(time_of_day).count() - profiler::now_ns();
  const profiler::TraceProcess process{
      .id = rank,
      .name = world_.world_size() == 1 ? "tessera" : fmt::format("rank {}", rank),
      .origin_ns = world_.control().min(profiler::first_event_ns() + offset_ns) - offset_ns};
  world_.control().verdict([&] { profiler::write_chrome_trace(path, process); });
  if (log_ != nullptr) log_->print("trace: " + path);
}

dist::Progress Trainer::progress() const {
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
void Trainer::finish(bool evaluates, bool is_end) {
  StepMetrics m = finish_step(*pending_);
  pending_.reset();
  val_loss_.reset();
  if (is_end && !is_rewind_due_) {
    write_log([&] { log_->record(m); });
    save_end();
  }
  if (evaluates && !is_rewind_due_) {
    try {
      m.val_loss = validate();
    } catch (...) {
      log(m);
      throw;
    }
    if (!m.val_loss && eval_samples_->num_samples() > 0 && log_ != nullptr) {
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
  if (const auto* const packed = dynamic_cast<const PackedSamples*>(samples_.get());
      is_end && packed != nullptr && log_ != nullptr) {
    log_->print(sources_text(*packed->plan(), *data_.sources, next_sample_));
  }
}

/// A file that cannot be written any more is told to all ranks at the end of the next step, which
/// then save before they end.
void Trainer::log(const StepMetrics& m) {
  status_.set_loss(m.loss);
  if (log_ == nullptr) return;
  status_.progress(m.step, m.loss);
  write_log([&] { log_->add(m); });
}

void Trainer::write_log(const std::function<void()>& write) {
  if (log_ == nullptr || log_error_) return;
  try {
    write();
  } catch (const IoError& error) {
    log_error_ = error;
  }
}

/// Of a run that had ended before it was evaluated.
void Trainer::evaluate_end() {
  if (eval_samples_->num_samples() == 0 || !token_check_->finish(is_preemption_requested)) return;
  val_loss_ = validate();
  if (!val_loss_) return;
  if (!best_val_loss_ || *val_loss_ < *best_val_loss_) best_val_loss_ = val_loss_;
  result_.val_loss = val_loss_;
  checkpoints_.add_val_loss(progress());
  write_log([&] { log_->add_val_loss(step_, *val_loss_); });
}

TrainResult Trainer::run() {
  const int64_t num_steps = config_.train.steps, eval_every = config_.train.eval_every;
  RunControl control(config_.train, world_);
  rate_.restart(Clock::now());
  result_.steps = step_;
  if (step_ < num_steps) read_first_batches();
  SignalHandlers::begin_steps();
  if (step_ == num_steps && !val_loss_) evaluate_end();
  while (step_ < num_steps) {
    if (guard_.rewinds() && step_ % config_.guard.snapshot_every == 0) take_snapshot();
    follow_trace(step_);
    if (batches_.empty()) read_first_batches();  // back from the last step
    PendingStep submitted = submit_step(step_);
    ++step_;
    next_sample_ += samples_per_step_;
    batches_.clear();
    if (step_ < num_steps) read_batches();
    if (config_.memory.empty_cache_every > 0 && step_ % config_.memory.empty_cache_every == 0) {
      Context::current()->allocator()->empty_cache();
    }
    if (pending_) finish(false, false);
    pending_ = std::move(submitted);
    RunControl::Decision decision =
        control.poll(checkpoints_.state(), checkpoints_.is_late(),
                     log_error_.has_value() || data_error_.has_value(), waited_ms_);
    if (last_step_ms_ > 0) slow_rank_.add(decision.waited_ms, last_step_ms_);
    checkpoints_.advance(decision.writers);
    const bool is_last = step_ == num_steps || decision.is_out_of_time;
    const bool is_eval_due = is_last || (eval_every > 0 && step_ % eval_every == 0) ||
                             completes_part_of_epoch(config_, config_.train.evals_per_epoch, step_);
    const bool is_save_due = checkpoints_.is_due(step_) || decision.is_save_due;
    // Who asked for the end may not leave the time for it: a resume reads the tokens again.
    if ((is_eval_due || is_save_due) && !decision.is_preempted && !decision.has_failed) {
      decision.is_preempted = !token_check_->finish(is_preemption_requested);
      if (!decision.is_preempted) check_contents();
    }
    const bool is_cut = decision.is_preempted || decision.has_failed;
    const bool is_end = is_last && !is_cut, evaluates = is_eval_due && !is_cut;
    const bool saves = is_cut || is_save_due;
    // Evaluations and checkpoints are of the parameters after their step: nothing is ahead of it.
    if (is_cut || is_end || evaluates || saves || guard_.is_on()) finish(evaluates, is_end);
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
      write_trace();
      preempt();
      return result_;
    }
    if (ends) break;
  }
  end_run();
  return result_;
}

/// Ends when the checkpoint is complete.
void Trainer::preempt() {
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
void Trainer::save_end() {
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

void Trainer::end_run() {
  write_trace();
  if (!is_end_saved_) save_end();
  world_.control().verdict(log_error_ ? &*log_error_ : nullptr);
  print_sample();
  checkpoints_.finish();
}

void Trainer::print_sample() {
  if (config_.sample.options.num_tokens == 0) return;
  nn::GenerateOptions options = config_.sample.options;
  options.sampling.seed = static_cast<uint64_t>(config_.train.seed);
  options.on_token = [&](int64_t, int32_t) {
    return world_.control().max(is_preemption_requested() ? 1 : 0) == 0;
  };
  std::vector<int32_t> text = data_.tokenizer->encode(config_.sample.prompt);
  const std::vector<int32_t> added = nn::generate(*model_, text, options);
  fsdp_->end_forward();
  text.insert(text.end(), added.begin(), added.end());
  if (log_ != nullptr)
    log_->print_text("sample:\n" + text::decode_generated(*data_.tokenizer, text));
}

}  // namespace

TrainResult train(const Config& given, dist::World& world) {
  check_agreement(world.control(), facts_of(given));
  Config config = given;
  world.watchdog().set_timeout(
      std::chrono::milliseconds(static_cast<int64_t>(config.dist.timeout * 1e3)));
  world.watchdog().set_verbose(config.debug.dist);
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
  Data data;
  Texts texts;
  world.control().verdict([&] { texts = open_texts(config); });
  const auto load = [&](const std::vector<std::string>& caches) {
    std::vector<Fact> facts;
    world.control().verdict([&] {
      data = load_data(config, texts, caches, context->options().num_threads);
      facts = facts_of(config, data, context->device());
    });
    check_agreement(world.control(), facts);
  };
  // Tokens that are kept lie in the run's directory, which is held before they are made.
  const std::string cache_dir = config.output.dir + "/token_cache";
  const bool has_cache = world.control().max(texts.has_caches() ? 1 : 0) != 0;
  if (!has_cache) load({});
  world.control().verdict([&] { check_trace_path(config, world.rank()); });
  RunDir run_dir(config, world);  // held until the end
  Checkpointing checkpoints(config, world);
  const Context::Scope scope(context);
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
    std::vector<std::string> caches;
    if (has_cache) {
      caches = make_token_caches(texts, cache_dir, world);
      load(caches);
    }
    RunSamples samples;
    std::string budget;
    world.control().verdict([&] {
      samples = make_samples(config, data);
      budget = resolve_budget(config, {.samples_per_epoch = samples.train->num_samples(),
                                       .tokens_per_sample = tokens_per_sample(config, data),
                                       .world_size = world.world_size()});
    });
    Trainer trainer(config, world, std::move(data), std::move(samples), budget, run_dir,
                    checkpoints, status, steps_done.get());
    if (world.rank() == 0) remove_other_token_caches(cache_dir, caches);
    set_fatal_report(fatal_report);  // only now an earlier run's status is this one's
    const TrainResult result = trainer.run();
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

}  // namespace tessera::apps
