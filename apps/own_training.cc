#include <mutex>

#include "apps/agreement.h"
#include "apps/data/permutation.h"
#include "apps/options.h"
#include "apps/trainer.h"
#include "apps/workload.h"
#include "kernels/elementwise/elementwise.h"

namespace tessera::apps {
namespace {

/// No samples of validation.
class NoSamples final : public Samples {
 public:
  int64_t num_samples() const override { return 0; }
  Batch batch(int64_t, int64_t) const override { return {}; }
  int64_t num_targets(int64_t, int64_t) const override { return 0; }
};

/// Samples to train on, of which batches count as many targets as the loss is divided by. Two places
/// say it, the second before anything is read.
class CheckedSamples final : public Samples {
 public:
  explicit CheckedSamples(const Samples& samples) : samples_(samples) {}
  int64_t num_samples() const override { return samples_.num_samples(); }
  int64_t num_targets(int64_t first, int64_t count) const override {
    return samples_.num_targets(first, count);
  }
  Batch batch(int64_t first, int64_t B) const override {
    Batch batch = samples_.batch(first, B);
    const int64_t expected = samples_.num_targets(first, B);
    TESSERA_CHECK_AS(InputError, batch.num_counted() == expected,
                     "samples {} to {}: a batch with {} targets (num_valid), expected the {} of "
                     "num_targets, by which the loss is divided",
                     first, first + B - 1, batch.num_counted(), expected);
    return batch;
  }

 private:
  const Samples& samples_;
};

}  // namespace

OwnSamples::OwnSamples(int64_t num_samples, Read read, std::optional<uint64_t> shuffle_seed,
                       int64_t targets_per_sample)
    : num_samples_(num_samples),
      targets_per_sample_(targets_per_sample),
      read_(std::move(read)),
      shuffle_seed_(shuffle_seed) {
  TESSERA_CHECK_AS(InputError, num_samples > 0, "OwnSamples: {} samples, expected at least one",
                   num_samples);
  TESSERA_CHECK_AS(InputError, targets_per_sample > 0,
                   "OwnSamples: {} targets_per_sample, expected at least one", targets_per_sample);
}

Batch OwnSamples::batch(int64_t first_sample, int64_t B) const {
  std::vector<int64_t> indices;
  for (int64_t g = first_sample; g < first_sample + B; ++g) {
    const int64_t epoch = g / num_samples_, i = g % num_samples_;
    if (shuffle_seed_) {
      const PhiloxKey key = make_key(*shuffle_seed_, static_cast<uint64_t>(epoch));
      indices.push_back(Permutation(num_samples_, key)(i));
    } else if (epoch == 0) {
      indices.push_back(i);
    }
  }
  // A rank whose turn is beyond the last one computes with the others, for nothing.
  const bool is_padding = indices.empty();
  if (is_padding) indices.push_back(0);
  Batch batch = read_(indices);
  if (batch.B == 0) batch.B = std::ssize(indices);
  if (batch.num_valid == 0) batch.num_valid = std::ssize(indices) * targets_per_sample_;
  if (is_padding) batch.num_valid = 0;
  return batch;
}

struct Trainer::Parts {
  Parts(Config c, dist::World& w) : config(std::move(c)), world(w) {}

  Config config;
  dist::World& world;
  std::shared_ptr<Context> context;
  std::optional<Context::Scope> scope;
  std::unique_ptr<nn::Module> model;
  dist::WrapPolicy wrap;
  std::unique_ptr<Samples> train, val;
  std::string data_id;
  std::function<LossSum(const Batch&)> loss;
  MakeOptimizer make_optimizer;
  std::vector<std::unique_ptr<Callback>> callbacks;
};

namespace {

/// What a Trainer was given. `parts` outlives it.
template <class Parts>
class OwnWorkload final : public Workload {
 public:
  explicit OwnWorkload(Parts& parts) : parts_(parts) {}

  void open(const Config& config, dist::World& world, const Context&) override {
    std::vector<Fact> facts;
    world.control().verdict([&] {
      const auto expect = [](bool is_there, const char* what) {
        TESSERA_CHECK_AS(ConfigError, is_there, "Trainer: run() without {}", what);
      };
      expect(parts_.model != nullptr, "a model, expected make_model or set_model before");
      expect(parts_.train != nullptr, "samples, expected set_samples before");
      expect(parts_.loss != nullptr, "a loss, expected set_loss before");
      train_ = std::make_unique<CheckedSamples>(*parts_.train);
      facts = facts_of(config);
      facts.push_back({"samples", data_id()});
    });
    check_agreement(world.control(), facts);
  }
  void load(const Config&, dist::World&, const Context&) override {}
  void make_samples(const Config&) override {}
  const Samples& train_samples() const override { return *train_; }
  const Samples& val_samples() const override { return *parts_.val; }
  int64_t tokens_per_sample() const override {
    const auto* const own = dynamic_cast<const OwnSamples*>(parts_.train.get());
    return own != nullptr ? own->num_targets(0, 1) : 1;
  }
  void set_config(const Config& config) override { config_ = config; }

  std::string data_id() const override {
    return fmt::format("{} of {} samples", parts_.data_id.empty() ? "own data" : parts_.data_id,
                       parts_.train->num_samples());
  }
  std::string val_id() const override {
    return fmt::format("{}, {} for validation", data_id(), parts_.val->num_samples());
  }
  [[noreturn]] void fail_too_few(int64_t samples_per_step) const override {
    throw InputError(fmt::format("samples: {} to train on, expected at least one step's {}",
                                 parts_.train->num_samples(), samples_per_step));
  }
  void make_model() override {}
  nn::Module& model() override { return *parts_.model; }
  void prepare_model(dist::World& world) override {
    world.control().verdict([&] { freeze_parameters(config_, *parts_.model); });
  }
  dist::FsdpOptions fsdp_options() override {
    dist::FsdpOptions options = apps::fsdp_options(config_, *parts_.model);
    if (parts_.wrap) options.wrap = parts_.wrap;
    return options;
  }
  void initialize(dist::Fsdp& fsdp, dist::World&) override {
    fsdp.initialize(static_cast<uint64_t>(config_.train.seed));
  }
  std::unique_ptr<optim::Optimizer> make_optimizer(
      const std::vector<optim::FlatShard>& shards) override {
    return parts_.make_optimizer ? parts_.make_optimizer(shards)
                                 : apps::make_optimizer(config_, shards);
  }
  std::pair<int64_t, int64_t> num_positions() const override {
    return {parts_.train->num_samples() * tokens_per_sample(),
            parts_.val->num_samples() * tokens_per_sample()};
  }
  void begin_steps(int64_t steps_done) override {
    for (const auto& callback : parts_.callbacks) callback->on_begin(steps_done);
  }
  LossSum loss(const Batch& batch, const Tensor&, std::vector<HostCopy>&) override {
    return parts_.loss(batch);
  }
  LossSum val_loss(const Batch& batch) override {
    LossSum loss = parts_.loss(batch);
    if (batch.num_valid == 0) loss.sum = scale(loss.sum, 0.0);  // padding
    return loss;
  }
  void end_step(const StepMetrics& metrics) override {
    for (const auto& callback : parts_.callbacks) callback->on_step(metrics);
  }

 private:
  Parts& parts_;
  std::unique_ptr<CheckedSamples> train_;
  Config config_;
};

}  // namespace

Trainer::Trainer(Config config, dist::World& world)
    : parts_(std::make_unique<Parts>(std::move(config), world)) {
  parts_->context = make_context(parts_->config, world);
  parts_->scope.emplace(parts_->context);
}

Trainer::~Trainer() = default;

void Trainer::set_model(std::unique_ptr<nn::Module> model) {
  parts_->model = std::move(model);
}

void Trainer::set_wrap(dist::WrapPolicy wrap) {
  parts_->wrap = std::move(wrap);
}

void Trainer::set_samples(std::unique_ptr<Samples> train, std::unique_ptr<Samples> val,
                          std::string data_id) {
  parts_->train = std::move(train);
  parts_->val = val != nullptr ? std::move(val) : std::make_unique<NoSamples>();
  parts_->data_id = std::move(data_id);
}

void Trainer::set_loss(std::function<LossSum(const Batch&)> loss) {
  parts_->loss = std::move(loss);
}

void Trainer::set_optimizer(MakeOptimizer make) {
  parts_->make_optimizer = std::move(make);
}

void Trainer::add_callback(std::unique_ptr<Callback> callback) {
  parts_->callbacks.push_back(std::move(callback));
}

namespace {

/// Of the process: thread ranks share them.
std::shared_ptr<SignalHandlers> signal_handlers() {
  static std::mutex mutex;
  static std::weak_ptr<SignalHandlers> alive;
  const std::lock_guard lock(mutex);
  std::shared_ptr<SignalHandlers> handlers = alive.lock();
  if (handlers == nullptr) alive = handlers = std::make_shared<SignalHandlers>();
  return handlers;
}

}  // namespace

TrainResult Trainer::run() {
  const std::shared_ptr<SignalHandlers> handlers = signal_handlers();
  const TrainResult result = run_training(parts_->config, parts_->world, parts_->context,
                                          std::make_unique<OwnWorkload<Parts>>(*parts_));
  SignalHandlers::end_run();
  for (const auto& callback : parts_->callbacks) callback->on_end(result);
  return result;
}

void Trainer::request_end() {
  request_preemption("a callback");
}

const Config& Trainer::config() const {
  return parts_->config;
}

DType Trainer::param_dtype() const {
  return parts_->config.precision.param_dtype.value_or(kF32);
}

}  // namespace tessera::apps
