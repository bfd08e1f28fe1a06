#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/documents.h"
#include "apps/text/chat_options.h"
#include "core/enum_names.h"
#include "core/runtime/context.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/scaler.h"
#include "dist/fsdp/state_guard.h"
#include "nn/family.h"
#include "nn/generate.h"
#include "nn/lora.h"
#include "nn/transformer.h"
#include "optim/adamw.h"
#include "optim/lion.h"
#include "optim/muon.h"
#include "optim/schedule.h"
#include "optim/sgd.h"

// Configuration of a training run: TOML with strict keys. What a library has options for are that
// library's structs; each key is a row of `config_fields` (config_table.h), which parsing, ranges,
// --help, the printed form, resume and agreement read.

namespace tessera::apps {

inline constexpr int64_t kMaxConfigNbytes = 1 << 20;  ///< of the text of one

/// How frozen weights are kept.
enum class Quantize : unsigned char {
  kNone,
  kNf4,  ///< 4-bit codes (QLoRA)
};
constexpr auto enum_names(Quantize) {
  return std::to_array<EnumName<Quantize>>({{Quantize::kNone, "none"}, {Quantize::kNf4, "nf4"}});
}
/// Section model: what is trained. The sizes are settings of the selected family.
struct ModelConfig {
  std::string from;         ///< a model of transformers; the other keys are then its
  std::string source;       ///< where that was; goes into checkpoints
  std::string ignore_keys;  ///< of its config.json
  std::string kind;         ///< name of a family
  int64_t context = 64, max_positions = 0, vocab = 0;
  std::string bos_ids, eos_ids, pad_ids;
  std::string classes;  ///< names, separated by commas; empty: it predicts tokens
  std::optional<nn::Pooling> pooling;
  std::string frozen;  ///< patterns of parameters that stay as they are
  Quantize quantize = Quantize::kNone;
  /// One of each family, in the order of nn::families: the other keys are their settings.
  std::vector<nn::FamilyConfig> families;

  /// Of the first family, with small sizes.
  ModelConfig();
  nn::FamilyConfig& selected();  ///< that of `kind`
  const nn::FamilyConfig& selected() const;
};

/// What stands around each document of texts.
enum class DocumentMarks : unsigned char {
  kAuto,  ///< what the tokenizer's models know
  kNone
};
constexpr auto enum_names(DocumentMarks) {
  return std::to_array<EnumName<DocumentMarks>>(
      {{DocumentMarks::kAuto, "auto"}, {DocumentMarks::kNone, "none"}});
}

/// Section lora: low-rank adapters beside a frozen model.
struct LoraConfig {
  nn::LoraOptions options;  ///< without targets: no adapters
  std::string from;         ///< adapters to begin with; the other keys are then theirs

  bool is_on() const { return !options.targets.empty(); }
};

/// Where the data for validation is taken from.
enum class ValSplit : unsigned char {
  kTail,        ///< the end of the data
  kInterleave,  ///< the end of each of many pieces of it
};
constexpr auto enum_names(ValSplit) {
  return std::to_array<EnumName<ValSplit>>(
      {{ValSplit::kTail, "tail"}, {ValSplit::kInterleave, "interleave"}});
}
/// Section data: files, tokenizer, and what of them is learned. One of `text`, `tokens`, `sources`,
/// `chat`, `preference` and `classify` is given.
struct DataConfig {
  std::string text, tokens, sources, chat, preference, classify, val_tokens, tokenizer = "byte",
                                                                             field = "text";
  std::string label_field = "label";
  std::string chat_template;  ///< a file, or a directory; empty: the tokenizer's
  text::TrainOn train_on = text::TrainOn::kAssistant;
  text::LongChats long_chats = text::LongChats::kCut;
  InvalidText invalid = InvalidText::kError;
  double val_fraction = 0.1;
  ValSplit val_split = ValSplit::kTail;
  int64_t separator = -1;
  DocumentMarks document_tokens = DocumentMarks::kAuto;
  bool restart_positions = false;
  int64_t mask_token = -1, read_ahead = 0;
  double mask_probability = 0.15;
};
/// Section train: budget, batch, seed and intervals. Samples count windows of `ModelConfig::context`
/// tokens; 0 in an interval is never.
struct TrainConfig {
  int64_t steps = 1000, micro_batch = 8, grad_accum_steps = 1, global_batch = 0, seed = 1;
  int64_t tokens = 0, global_batch_tokens = 0;  ///< 0: not given so (budget.h)
  double epochs = 0;
  int64_t eval_every = 0, evals_per_epoch = 0, eval_batches = 0, log_every = 1;
  double max_minutes = 0, z_loss = 0, label_smoothing = 0;
  bool pin_threads = true;
};
/// The loss of a pair of answers: DPO's (Rafailov et al. 2023, arXiv:2305.18290), or IPO's (Azar et al.
/// 2023, arXiv:2310.12036).
enum class PreferenceLoss : unsigned char { kSigmoid, kIpo };
constexpr auto enum_names(PreferenceLoss) {
  return std::to_array<EnumName<PreferenceLoss>>(
      {{PreferenceLoss::kSigmoid, "sigmoid"}, {PreferenceLoss::kIpo, "ipo"}});
}
/// Of pairs of answers: section dpo.
struct PreferenceConfig {
  double beta = 0.1, label_smoothing = 0;
  PreferenceLoss loss = PreferenceLoss::kSigmoid;
  std::string reference;  ///< a model of transformers; empty: the model as training starts
};
/// Tasks that judge the model while it is trained: section eval (apps/evaluation).
struct EvalConfig {
  std::string tasks;
  int64_t every = 0, per_epoch = 0, fewshot = 0, limit = 0, fewshot_seed = 1234, max_tokens = 256;
  std::string fewshot_file, tokenizer;
  bool is_on() const { return !tasks.empty(); }
};
/// Section sample: a text to be continued after training; without tokens none.
struct SampleConfig {
  SampleConfig() { options.num_tokens = 0, options.sampling.temperature = 0.8; }
  nn::GenerateOptions options;
  std::string prompt = "\n";
};

/// The optimizers of optim/, as `optim.name` has them.
enum class OptimizerName : unsigned char { kAdamW, kAdamW8bit, kAdafactor, kLion, kMuon, kSgd };
constexpr auto enum_names(OptimizerName) {
  return std::to_array<EnumName<OptimizerName>>({{OptimizerName::kAdamW, "adamw"},
                                                 {OptimizerName::kAdamW8bit, "adamw_8bit"},
                                                 {OptimizerName::kAdafactor, "adafactor"},
                                                 {OptimizerName::kLion, "lion"},
                                                 {OptimizerName::kMuon, "muon"},
                                                 {OptimizerName::kSgd, "sgd"}});
}
/// What of a fused projection is a matrix of its own to Muon.
enum class MuonBlocks : unsigned char { kWhole, kProjections, kHeads };
constexpr auto enum_names(MuonBlocks) {
  return std::to_array<EnumName<MuonBlocks>>({{MuonBlocks::kWhole, "whole"},
                                              {MuonBlocks::kProjections, "projections"},
                                              {MuonBlocks::kHeads, "heads"}});
}
/// Section optim: optimizer, schedule, clipping (`clip` in the `clip_p`-norm of all gradients; 0: none).
struct OptimConfig {
  OptimizerName name = OptimizerName::kAdamW;
  /// Betas: of lion as well, and of the AdamW beside muon; the decay: of all.
  optim::AdamWOptions adamw = {.beta2 = 0.95, .weight_decay = 0.1};
  optim::SgdOptions sgd = {.momentum = 0.9};
  optim::MuonOptions muon;  ///< without rate and decay
  MuonBlocks muon_blocks = MuonBlocks::kProjections;
  optim::ScheduleOptions schedule = {.final_lr = 1e-4};
  std::string groups;  ///< of parameters, see `parse_groups`
  bool stochastic_rounding = false;
  double clip = 1.0, clip_p = 2, warmup_ratio = 0;
};

/// Wrap policies of dist/fsdp/wrap.h by name.
enum class Wrap : unsigned char {
  kTransformerBlock,
  kEveryNBlocks,
  kMinNumParams,
  kClass,
  kWholeModel
};
constexpr auto enum_names(Wrap) {
  return std::to_array<EnumName<Wrap>>({{Wrap::kTransformerBlock, "transformer_block"},
                                        {Wrap::kEveryNBlocks, "every_n_blocks"},
                                        {Wrap::kMinNumParams, "min_num_params"},
                                        {Wrap::kClass, "class"},
                                        {Wrap::kWholeModel, "whole_model"}});
}
/// Section fsdp, and of precision what `dist::PrecisionOptions` has.
struct FsdpConfig {
  FsdpConfig() { options.precision.reduce_dtype = kF32; }
  dist::FsdpOptions options;  ///< without `wrap`, `ignored` and the dtype of parameters
  Wrap wrap = Wrap::kTransformerBlock;
  int wrap_every = 2;
  int64_t min_num_params = 1000000;
  std::string wrap_class;  ///< names of classes of modules
  std::string ignored;     ///< patterns of parameters
};
/// What `FsdpConfig::options` has not.
struct PrecisionConfig {
  std::optional<DType> param_dtype;             ///< none: see `resolve_param_dtype`
  std::optional<dist::LossScaling> loss_scale;  ///< none: see `loss_scaling`
  dist::LossScaleOptions scaler;                ///< without `scaling`
};
/// `loss_scale`, or dynamic for f16 and none else.
dist::LossScaling loss_scaling(const PrecisionConfig& config);

/// Section memory, beside the limits of the Context: steps after which cached memory goes back; 0: never.
struct MemoryConfig {
  int64_t empty_cache_every = 0;
};
/// Section output: where a run writes. `peak_tflops` is that of one device, TFLOP/s, for MFU; 0: unknown.
struct OutputConfig {
  std::string dir = "out/run";
  bool overwrite = false, tensorboard = false, unit_norms = false;
  double peak_tflops = 0;
};

/// What becomes of a run whose checkpoint cannot be written.
enum class OnError : unsigned char { kWarn, kStop };
constexpr auto enum_names(OnError) {
  return std::to_array<EnumName<OnError>>({{OnError::kWarn, "warn"}, {OnError::kStop, "stop"}});
}
/// Section checkpoint: when the state is saved, where, and what a start goes on from.
struct CheckpointConfig {
  std::string dir, resume = "none";
  OnError on_error = OnError::kWarn;  ///< of a checkpoint that cannot be written
  int64_t every = 0, per_epoch = 0, keep = 3, max_errors = 0;
  double every_minutes = 30;
  bool best = true, last = true, resume_override = false, resume_skip_unreadable = false;
};

/// What becomes of a step whose loss is far above the last ones.
enum class SpikeAction : unsigned char {
  kOff,
  kSkip,    ///< it changes nothing
  kRewind,  ///< back to a copy in memory, and on with later data
};
constexpr auto enum_names(SpikeAction) {
  return std::to_array<EnumName<SpikeAction>>(
      {{SpikeAction::kOff, "off"}, {SpikeAction::kSkip, "skip"}, {SpikeAction::kRewind, "rewind"}});
}
/// Section guard: when a run stops, skips a step or warns.
struct GuardConfig {
  int64_t max_skips = 0, max_spikes = 3, spike_window = 50, snapshot_every = 10;
  int64_t first_steps = 50;
  SpikeAction spike = SpikeAction::kOff;
  double spike_z = 6;
  dist::StateGuardOptions state = {.replica_every = 100};
};
/// Section dist, beside the backends of the Context.
struct DistConfig {
  double timeout = 600;  ///< seconds
  bool single_process = false;
};
/// Whether each new value is looked at, until the first one that is not finite.
enum class NanCheck : unsigned char { kOff, kOn };
constexpr auto enum_names(NanCheck) {
  return std::to_array<EnumName<NanCheck>>({{NanCheck::kOff, "off"}, {NanCheck::kOn, "on"}});
}
/// Section profile: a timeline of some steps, and what took their time.
struct ProfileConfig {
  std::string steps;  ///< "10..13"; empty: none
  std::string trace;  ///< a file; empty: trace.json of output.dir
};
/// Section kernels, beside the backends of the Context.
struct KernelsConfig {
  std::string tuning_file;  ///< choices of timed GEMMs; empty: none are timed
};
/// Section debug: checks that cost time, and faults that are made on purpose. Steps count from 1; 0: none.
struct DebugConfig {
  NanCheck nan = NanCheck::kOff;
  bool dist = false;
  int64_t exposed_units = 0;
  int64_t nan_step = 0, nan_rank = 0, flip_step = 0, flip_rank = 0, slow_rank = 0, slow_ms = 0;
  int64_t slow_data_ms = 0, slow_link_us = 0;
};

/// All settings of a run, with their defaults. Parsed, checked and printed by the rows of config_table.h.
struct Config {
  std::string device = "auto";
  ModelConfig model;
  LoraConfig lora;
  DataConfig data;
  TrainConfig train;
  PreferenceConfig dpo;
  EvalConfig eval;
  SampleConfig sample;
  OptimConfig optim;
  FsdpConfig fsdp;
  PrecisionConfig precision;
  nn::RecomputePolicy recompute = {.every = 2};
  MemoryConfig memory;
  OutputConfig output;
  CheckpointConfig checkpoint;
  GuardConfig guard;
  DistConfig dist;
  ProfileConfig profile;
  KernelsConfig kernels;
  DebugConfig debug;
  /// Samples of an epoch and of a step over all ranks, once `resolve_budget` (budget.h) knows them.
  int64_t samples_per_epoch = 0, samples_per_step = 0;
  /// Keys of train, memory, kernels and debug; without `device`. `num_threads` 0: a share of the
  /// node's.
  ContextOptions runtime;

  /// Where a key was set: "configs/a.toml:12" or "command line"; "default" if nowhere.
  const std::string& origin(std::string_view key) const;
  /// Whether a file or the command line sets it.
  bool is_given(std::string_view key) const { return origins.contains(key); }
  std::map<std::string, std::string, std::less<>> origins;
  /// Model and data are a program's own (trainer.h): no key describes them.
  bool is_own = false;
  bool is_resolved = false;  ///< read from what `dump_config` wrote, which has every key
};

/// The configuration of a TOML file ("" for none) with overrides `--section.key=value` or
/// `--section.key value`, checked. On the command line an integer may have an exponent (1e3).
/// Defaults that depend on other keys: `optim.lr` is 1e-5 with `model.from`, 2e-4 with adapters,
/// `optim.final_lr` a tenth of `optim.lr`. ConfigError, with key, place and what is allowed, for an unknown key (it
/// names the nearest one), a wrong type, a value out of range, a key given twice in the file, and
/// values that contradict each other.
Config load_config(const std::string& path, std::span<const std::string> overrides = {});

/// The same from text; `name` stands for the file in messages.
Config parse_config(std::string_view toml, const std::string& name,
                    std::span<const std::string> overrides = {});

/// `load_config` over the values of `defaults`, which may say `is_own`.
Config load_config_over(Config defaults, const std::string& path,
                        std::span<const std::string> overrides);

/// Contradictions between keys; called by those above.
void check_config(const Config& config);
/// Gives `precision.param_dtype = auto` its value: `stored`, which a checkpoint was trained with,
/// or bf16 on cuda and f32 on the CPU. ConfigError for what that contradicts.
void resolve_param_dtype(Config& config, bool is_cuda, std::optional<DType> stored = {});
/// "optim.lr = 1e-05 (model.from is given, optim.lr is not); ...": defaults that came from other
/// keys; empty without any.
std::string derived_defaults(const Config& config);

/// The whole configuration as TOML that `load_config` reads to the same values.
std::string dump_config(const Config& config);
bool is_dump(std::string_view text);  ///< written by it

/// Keys with defaults, ranges and meaning, for --help: all, or those of a section ("optim") or one
/// ("optim.lr"). ConfigError that names the nearest one if there is neither.
std::string config_help(std::string_view what = "");

/// The numbers of a text such as "128001,128008"; none for "". ConfigError for anything else.
std::vector<int64_t> parse_ids(std::string_view text);

/// Which keys somebody means who writes `word`: the same last component in another section, the
/// name that other trainers have for it (`Field::other_names`), a last component with few typing
/// errors, else the fewest edits. Several are joined by commas.
std::string nearest_keys(std::string_view word);

/// "optim.momentum = 0.9 (needs optim.name = sgd)", one for each key that the command line or the
/// file gives (not what `dump_config` wrote, not what model.from sets) and that has no effect
/// (`Field::needs`). For a configuration whose `param_dtype` is resolved.
std::vector<std::string> keys_without_effect(const Config& config, bool is_cuda);

}  // namespace tessera::apps
