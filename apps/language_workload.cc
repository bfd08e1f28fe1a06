#include "apps/language_workload.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <type_traits>

#include "apps/agreement.h"
#include "apps/checkpointing.h"
#include "apps/classification.h"
#include "apps/evaluation/rounds.h"
#include "apps/loss.h"
#include "apps/model_from.h"
#include "apps/options.h"
#include "apps/packed_samples.h"
#include "apps/parameter_groups.h"
#include "apps/preferences.h"
#include "apps/run_control.h"
#include "apps/saved_model.h"
#include "apps/token_cache.h"
#include "apps/token_check.h"
#include "core/files.h"
#include "core/log.h"
#include "core/text.h"
#include "dist/checkpoint/huggingface.h"
#include "dist/checkpoint/peft.h"
#include "nn/generate.h"

namespace tessera::apps {
namespace {

/// What a run goes through: for training and for validation.
struct RunSamples {
  std::unique_ptr<Samples> train, val;
};

RunSamples samples_of(const Config& config, const Data& data) {
  const double fraction = config.data.val_fraction;
  const SampleOptions options = sample_options(config, data);
  const auto of_parts = [&]<class S>(std::type_identity<S>, const auto& rows) -> RunSamples {
    return {std::make_unique<S>(rows, options, fraction, SplitPart::kTrain),
            std::make_unique<S>(rows, options, fraction, SplitPart::kVal)};
  };
  if (data.pairs) return of_parts(std::type_identity<PreferenceSamples>{}, data.pairs);
  if (data.texts) return of_parts(std::type_identity<TextSamples>{}, data.texts);
  if (data.sources) return of_parts(std::type_identity<PackedSamples>{}, data.sources);
  return {std::make_unique<TrainSamples>(data.train, options),
          std::make_unique<EvalSamples>(data.val, options)};
}

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

bool is_of_base(const nn::NamedParameter& p) {
  return !nn::is_lora(p);
}

class LanguageWorkload final : public Workload {
 public:
  void open(const Config& config, dist::World& world, const Context& context) override;
  void load(const Config& config, dist::World& world, const Context& context) override;
  void make_samples(const Config& config) override;
  const Samples& train_samples() const override { return *samples_.train; }
  const Samples& val_samples() const override { return *samples_.val; }
  int64_t tokens_per_sample() const override;
  void resolve(Config& config) const override;
  void set_config(const Config& config) override;

  void check() const override;
  std::string data_id() const override;
  std::string val_id() const override;
  [[noreturn]] void fail_too_few(int64_t samples_per_step) const override;
  void make_model() override;
  nn::Module& model() override { return *model_; }
  void begin_checks(dist::World& world) override;
  void prepare_model(dist::World& world) override;
  dist::FsdpOptions fsdp_options() override { return apps::fsdp_options(config_, *model_); }
  void initialize(dist::Fsdp& fsdp, dist::World& world) override;
  std::unique_ptr<optim::Optimizer> make_optimizer(
      const std::vector<optim::FlatShard>& shards) override {
    return apps::make_optimizer(config_, shards);
  }

  bool has_contents() const override { return token_check_->is_decided(); }
  std::pair<std::string, std::string> contents() const override;
  bool finish_checks(const std::function<bool()>& is_to_end) override {
    return token_check_->finish(is_to_end);
  }
  void begin_run() override { token_check_->keep_results(); }
  void write_companions(const std::string& dir) const override;
  void describe_model(const Print& print) override;
  void describe_data(const Print& print) override;
  std::pair<int64_t, int64_t> num_positions() const override;
  void set_up(dist::World& world) override;

  LossSum loss(const Batch& batch, const Tensor& grad_scale,
               std::vector<HostCopy>& extras) override;
  LossSum val_loss(const Batch& batch) override;
  void begin_evaluation() override;
  Figures end_evaluation(dist::World& world) override;
  bool has_tasks() const override { return tasks_.has_value(); }
  Figures judge(dist::Fsdp& fsdp, dist::World& world, const std::function<bool()>& is_to_end,
                const Print& print) override;
  void add_metrics(StepMetrics& metrics, const std::vector<HostCopy>& extras,
                   dist::World& world) override;
  double flops_per_token() const override { return model_->flops_per_token(config_.model.context); }
  void describe_end(int64_t num_samples, const Print& print) override;
  void show_model(dist::Fsdp& fsdp, dist::World& world, const Print& print) override;

 private:
  void read_data(const Config& config, dist::World& world, const Context& context);
  void initialize_parameters(dist::Fsdp& fsdp, dist::World& world);
  void find_preference_references(dist::Fsdp& fsdp, dist::World& world);

  Config config_;
  Texts texts_;
  bool has_caches_ = false;  // of texts that are worth it, in the run's directory
  std::vector<std::string> caches_;
  Data data_;
  RunSamples samples_;
  std::optional<TokenCheck> token_check_;  // over before the first save or evaluation
  LossTerms loss_terms_;
  std::optional<ClassScores> scores_;  // of the evaluation in progress
  std::optional<TaskRounds> tasks_;    // eval.tasks
  std::unique_ptr<nn::LanguageModel> model_;
  std::unique_ptr<dist::PeftReader> adapters_;  // of `lora.from`
};

std::string cache_dir(const Config& config) {
  return config.output.dir + "/token_cache";
}

void LanguageWorkload::open(const Config& config, dist::World& world, const Context& context) {
  world.control().verdict([&] { texts_ = open_texts(config); });
  has_caches_ = world.control().max(texts_.has_caches() ? 1 : 0) != 0;
  if (!has_caches_) read_data(config, world, context);
}

/// Tokens that are kept lie in the run's directory, which is held before they are made.
void LanguageWorkload::load(const Config& config, dist::World& world, const Context& context) {
  if (!has_caches_) return;
  caches_ = make_token_caches(texts_, cache_dir(config), world);
  read_data(config, world, context);
}

void LanguageWorkload::read_data(const Config& config, dist::World& world, const Context& context) {
  std::vector<Fact> facts;
  world.control().verdict([&] {
    data_ = load_data(config, texts_, caches_, context.options().num_threads);
    facts = facts_of(config, data_, context.device());
  });
  check_agreement(world.control(), facts);
}

void LanguageWorkload::make_samples(const Config& config) {
  config_ = config;
  samples_ = samples_of(config, data_);
}

/// A pair has two sequences.
int64_t LanguageWorkload::tokens_per_sample() const {
  return config_.model.context * (data_.pairs != nullptr ? 2 : 1);
}

void LanguageWorkload::resolve(Config& config) const {
  if (data_.texts == nullptr) return;
  config.model.classes = fmt::format("{}", fmt::join(data_.texts->classes, ","));
  config.origins.insert_or_assign("model.classes", config.origin("data.classify"));
}

void LanguageWorkload::set_config(const Config& config) {
  config_ = config;
  loss_terms_ = {static_cast<float>(config.train.z_loss),
                 static_cast<float>(config.train.label_smoothing)};
}

/// What the configuration says of tokens, before the first step instead of after the last.
void LanguageWorkload::check() const {
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

std::string LanguageWorkload::data_id() const {
  std::string id = fingerprint(data_.train);
  if (data_.is_split_by_rows()) {
    id += fmt::format(", {} for validation", config_.data.val_fraction);
  }
  return id;
}

std::string LanguageWorkload::val_id() const {
  return validation_id(data_.is_split_by_rows() ? data_.train : data_.val, config_);
}

void LanguageWorkload::fail_too_few(int64_t samples_per_step) const {
  throw InputError(fmt::format(
      "data: {} tokens to train on give {} samples of model.context = {}, expected at least one "
      "step's {}",
      data_.train.num_tokens(), samples_.train->num_samples(), config_.model.context,
      samples_per_step));
}

void LanguageWorkload::make_model() {
  model_ = apps::make_model(config_, data_.vocab_size);
  if (config_.lora.from.empty()) return;
  adapters_ = std::make_unique<dist::PeftReader>(config_.lora.from);
  adapters_->attach(*model_);
}

void LanguageWorkload::begin_checks(dist::World& world) {
  TokenCheck::Options check{.vocab_size = data_.vocab_size,
                            .results_path = config_.output.dir + "/token_check.txt"};
  token_check_.emplace(data_.files, std::move(check), world);
  if (!config_.eval.is_on()) return;
  tasks_.emplace(config_, data_.tokenizer, model_->shape().context_length, data_.vocab_size, world);
}

void LanguageWorkload::prepare_model(dist::World& world) {
  model_->set_recompute(config_.recompute);
  world.control().verdict([&] { freeze_parameters(config_, *model_); });
  world.control().verdict([&] { check_quantized(config_, *model_); });
}

void LanguageWorkload::initialize(dist::Fsdp& fsdp, dist::World& world) {
  initialize_parameters(fsdp, world);
  find_preference_references(fsdp, world);
}

/// By the seed, or the values of `model.from` and `lora.from`.
void LanguageWorkload::initialize_parameters(dist::Fsdp& fsdp, dist::World& world) {
  fsdp.initialize(static_cast<uint64_t>(config_.train.seed));
  if (config_.model.from.empty()) return;
  std::optional<dist::HfReader> reader;
  world.control().verdict([&] {
    reader.emplace(config_.model.from, ignored_keys(config_.model), model_->classifier());
  });
  // What classifies may be new.
  const std::vector<std::string> there = reader->names();
  dist::load_parameters(*reader, fsdp, *model_, [&](const nn::NamedParameter& p) {
    const bool can_be_new = model_->classifier() != nullptr && nn::is_of_classifier(p.name);
    return is_of_base(p) &&
           !(can_be_new && std::find(there.begin(), there.end(), p.name) == there.end());
  });
  if (adapters_ == nullptr) return;
  const std::vector<std::string> names = adapters_->names();
  dist::load_parameters(*adapters_, fsdp, *model_, [&](const nn::NamedParameter& p) {
    return std::find(names.begin(), names.end(), p.name) != names.end();
  });
}

/// Of pairs, under the model of dpo.reference, or the one that training starts from, whatever
/// checkpoint it goes on from.
void LanguageWorkload::find_preference_references(dist::Fsdp& fsdp, dist::World& world) {
  if (data_.pairs == nullptr) return;
  const std::string& from = config_.dpo.reference;
  const std::string path = config_.output.dir + "/references.bin";
  dist::Hasher key;
  for (const std::string& part : {data_id(), from, reference_identity(config_)}) {
    key.update(part.c_str(), std::ssize(part) + 1);
  }
  bool is_loaded = false;
  const auto load = [&] {
    if (from.empty()) return;
    is_loaded = true;
    std::optional<dist::HfReader> reader;
    world.control().verdict([&] { reader.emplace(from); });
    dist::load_parameters(*reader, fsdp, *model_, is_of_base);
  };
  std::shared_ptr<const std::vector<float>> references;
  {
    // The reference of adapters is the model without them.
    std::optional<nn::LoraOff> off;
    if (config_.lora.is_on()) off.emplace();
    references = find_references(*model_, fsdp, world, *data_.pairs, sample_options(config_, data_),
                                 config_.train.micro_batch, path, key.digest(), load);
  }
  if (is_loaded) initialize_parameters(fsdp, world);
  for (const auto& samples : {samples_.train.get(), samples_.val.get()}) {
    dynamic_cast<PreferenceSamples&>(*samples).set_references(references);
  }
}

std::pair<std::string, std::string> LanguageWorkload::contents() const {
  const size_t num_train = data_.num_train_files, num_files = data_.files.size();
  std::string train = token_check_->content(0, num_train);
  if (num_files == num_train) return {train, train};  // validation is a part of the same
  return {std::move(train), token_check_->content(num_train, num_files)};
}

void LanguageWorkload::write_companions(const std::string& dir) const {
  if (data_.tokenizer == nullptr) return;
  write_tokenizer(dir, *data_.tokenizer);
  if (!data_.chat_template.empty()) {
    write_file_atomically(dir + "/chat_template.jinja", data_.chat_template);
  }
}

void LanguageWorkload::describe_model(const Print& print) {
  if (config_.lora.is_on()) {
    int64_t trained = 0;
    for (const nn::NamedParameter& p : model_->named_parameters()) {
      if (p.parameter->tensor.requires_grad()) trained += p.parameter->tensor.numel();
    }
    const int64_t all = model_->num_parameters();
    print(fmt::format("lora: {} of {} parameters are trained ({:.3g} %)", trained, all,
                      100.0 * static_cast<double>(trained) / static_cast<double>(all)));
  }
  const dist::ParameterRules rules = parameter_rules(config_, *model_);
  if (!rules.groups.empty() || rules.optimizer) {
    print(dist::describe_groups(*model_, rules, std::string(name_of(config_.optim.name))));
  }
}

void LanguageWorkload::describe_data(const Print& print) {
  const DataConfig& d = config_.data;
  if (!data_.chats.empty()) print(data_.chats);
  if (const text::DocumentTokens& marks = data_.document_tokens;
      marks.end >= 0 && d.separator < 0) {
    print(fmt::format("documents: each begins with {} and ends with {} (data.document_tokens)",
                      shorten(data_.tokenizer->token(marks.begin)),
                      shorten(data_.tokenizer->token(marks.end))));
  }
  if (d.val_tokens.empty() && d.val_fraction > 0 && d.val_split == ValSplit::kTail &&
      !data_.is_split_by_rows()) {
    print(fmt::format(
        "validation: the last {:g} % of the data, which may differ from the rest of it; "
        "--data.val_split=interleave takes pieces from all over",
        d.val_fraction * 100));
  }
  if (const std::string skipped = short_shards(data_.train, config_.model.context);
      !skipped.empty() && !data_.is_split_by_rows()) {
    log_warning("{}", skipped);
  }
}

std::pair<int64_t, int64_t> LanguageWorkload::num_positions() const {
  const auto positions = [](const Samples& samples, const Corpus& corpus) {
    if (const auto* const pairs = dynamic_cast<const PreferenceSamples*>(&samples)) {
      return pairs->num_tokens();
    }
    if (const auto* const texts = dynamic_cast<const TextSamples*>(&samples)) {
      return texts->num_tokens();
    }
    const auto* const packed = dynamic_cast<const PackedSamples*>(&samples);
    return packed != nullptr ? packed->num_positions() : corpus.num_tokens();
  };
  return {positions(*samples_.train, data_.train), positions(*samples_.val, data_.val)};
}

void LanguageWorkload::set_up(dist::World& world) {
  if (world.rank() == 0) remove_other_token_caches(cache_dir(config_), caches_);
}

LossSum LanguageWorkload::loss(const Batch& batch, const Tensor& grad_scale,
                               std::vector<HostCopy>& extras) {
  if (data_.texts != nullptr) return class_loss(*model_, batch, loss_terms_).loss;
  if (data_.pairs == nullptr) return batch_loss(*model_, batch, grad_scale, loss_terms_);
  PreferenceSum of_pairs = preference_loss(*model_, batch, config_.dpo);
  extras.emplace_back(of_pairs.rewards);
  return std::move(of_pairs.loss);
}

LossSum LanguageWorkload::val_loss(const Batch& batch) {
  if (data_.texts != nullptr) {
    ClassSum of_texts = class_loss(*model_, batch);
    scores_->add(of_texts.logits, batch);
    return of_texts.loss;
  }
  if (data_.pairs != nullptr) return preference_loss(*model_, batch, config_.dpo).loss;
  return batch_loss(*model_, batch);
}

void LanguageWorkload::begin_evaluation() {
  if (data_.texts != nullptr) scores_.emplace(std::ssize(data_.texts->classes));
}

Figures LanguageWorkload::end_evaluation(dist::World& world) {
  if (data_.texts == nullptr) return {};
  const ClassScores::Scores scores = scores_->finish(world);
  return {{"val_accuracy", scores.accuracy}, {"val_f1", scores.f1}};
}

Figures LanguageWorkload::judge(dist::Fsdp& fsdp, dist::World& world,
                                const std::function<bool()>& is_to_end, const Print& print) {
  const std::vector<TaskResult> results = tasks_->run(*model_, fsdp, world, is_to_end);
  if (!results.empty()) print(lines_of(results));
  return figures_of(results);
}

void LanguageWorkload::add_metrics(StepMetrics& metrics, const std::vector<HostCopy>& extras,
                                   dist::World& world) {
  if (extras.empty()) return;
  metrics.rewards = mean_rewards(extras, config_.train.micro_batch, world);
}

void LanguageWorkload::describe_end(int64_t num_samples, const Print& print) {
  const auto* const packed = dynamic_cast<const PackedSamples*>(samples_.train.get());
  if (packed != nullptr) print(sources_text(*packed->plan(), *data_.sources, num_samples));
}

void LanguageWorkload::show_model(dist::Fsdp& fsdp, dist::World& world, const Print& print) {
  if (config_.sample.options.num_tokens == 0) return;
  nn::GenerateOptions options = config_.sample.options;
  options.sampling.seed = static_cast<uint64_t>(config_.train.seed);
  options.on_token = [&](int64_t, int32_t) {
    return world.control().max(is_preemption_requested() ? 1 : 0) == 0;
  };
  std::vector<int32_t> text = data_.tokenizer->encode(config_.sample.prompt);
  const std::vector<int32_t> added = nn::generate(*model_, text, options);
  fsdp.end_forward();
  text.insert(text.end(), added.begin(), added.end());
  print("sample:\n" + text::decode_generated(*data_.tokenizer, text));
}

}  // namespace

std::unique_ptr<Workload> make_language_workload() {
  return std::make_unique<LanguageWorkload>();
}

}  // namespace tessera::apps
