#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/check.h"

// Configuration of a training run: TOML with strict keys. Every key is described once, in
// `config_fields`; parsing, ranges, --help, the printed form and the checks all read that table.

namespace tessera::apps {

inline constexpr int64_t kMaxConfigNbytes = 1 << 20;  ///< of the text of one

struct ModelConfig {
  std::string from;         ///< a model of transformers; the other keys are then its
  std::string source;       ///< where that was; goes into checkpoints
  std::string ignore_keys;  ///< of its config.json
  std::string kind = "llama";
  int64_t layers = 4, heads = 4, kv_heads = 0, head_width = 0, width = 128, ffn = 0;
  int64_t context = 64, max_positions = 0, vocab = 0;
  std::string gelu = "tanh";
  bool tied = true, bias = true, qkv_bias = false, qk_norm = false;
  double rope_theta = 10000, norm_eps = 1e-5, dropout = 0;
  std::string rope_scaling = "none";
  double rope_factor = 1, rope_low_freq_factor = 1, rope_high_freq_factor = 4;
  int64_t rope_original_context = 8192;
  std::string bos_ids, eos_ids, pad_ids;
  std::string frozen;  ///< patterns of parameters that stay as they are
};
struct DataConfig {
  std::string text, tokens, val_tokens, tokenizer = "byte";
  double val_fraction = 0.1;
  std::string val_split = "tail";
  int64_t separator = -1;
  bool restart_positions = false;
};
struct TrainConfig {
  int64_t steps = 1000, micro_batch = 8, grad_accum_steps = 1, global_batch = 0, seed = 1;
  int64_t eval_every = 0, eval_batches = 0, log_every = 1, threads = 0;
  double max_minutes = 0;
  bool reproducible = false, pin_threads = true;
};
struct SampleConfig {
  int64_t tokens = 0, top_k = 0;
  std::string prompt = "\n";
  double temperature = 0.8, top_p = 1;
};
struct OptimConfig {
  std::string name = "adamw", schedule = "cosine";
  double lr = 1e-3, final_lr = 1e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  bool nesterov = false;
  double momentum = 0.9, clip = 1.0, clip_p = 2;
  int64_t warmup_steps = 0, decay_steps = 0;
  bool stochastic_rounding = false;
};
struct FsdpConfig {
  std::string strategy = "full_shard", wrap = "transformer_block";
  int64_t wrap_every = 2, min_num_params = 1000000, shard_size = 0;
  std::string sync_every_micro_batch = "auto", reshard_after_forward = "auto";
  int64_t prefetch_forward = 1, prefetch_backward = 1, communicators = 2;
  std::string offload = "none";
  std::string wire_dtype = "same", ignored;
};
struct PrecisionConfig {
  std::string param_dtype = "auto", reduce_dtype = "f32", output_dtype = "same";
  std::string buffer_dtype = "same", loss_scale = "auto";
  bool cast_forward_inputs = true, norm_fp32 = false;
  double loss_scale_init = 65536;
  int64_t loss_scale_interval = 2000;
};
struct RecomputeConfig {
  std::string policy = "none";
  int64_t every_n = 2;
};
struct MemoryConfig {
  std::string limit = "none", split = "1MiB";
  int64_t empty_cache_every = 0;
};
struct OutputConfig {
  std::string dir = "out/run";
  bool overwrite = false;
  double peak_tflops = 0;
};
struct CheckpointConfig {
  std::string dir, on_error = "warn", resume = "none";
  int64_t every = 0, keep = 3, max_errors = 0;
  double every_minutes = 30;
  bool best = true, last = true, resume_override = false, resume_skip_unreadable = false;
};
struct GuardConfig {
  int64_t max_skips = 0, max_spikes = 3, spike_window = 50, snapshot_every = 10;
  int64_t replica_every = 100;
  bool state_checksum = false;
  std::string spike = "off";
  double spike_z = 6;
};
struct KernelsConfig {
  std::string attention = "own", gemm = "auto";
};
struct DistConfig {
  double timeout = 600;
  std::string nccl_reduce = "tree";
  int64_t nccl_max_ctas = 0;
  bool single_process = false;
};
struct DebugConfig {
  bool poison = false, order_check = false, dist = false;
  std::string trace;
  int64_t trace_from = 3, trace_steps = 3;
  int64_t exposed_units = 0;
  int64_t nan_step = 0, nan_rank = 0, flip_step = 0, flip_rank = 0, slow_rank = 0, slow_ms = 0;
};

struct Config {
  std::string device = "auto";
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  SampleConfig sample;
  OptimConfig optim;
  FsdpConfig fsdp;
  PrecisionConfig precision;
  RecomputeConfig recompute;
  MemoryConfig memory;
  OutputConfig output;
  CheckpointConfig checkpoint;
  GuardConfig guard;
  KernelsConfig kernels;
  DistConfig dist;
  DebugConfig debug;

  /// Where a key was set: "configs/a.toml:12" or "command line"; "default" if nowhere.
  const std::string& origin(std::string_view key) const;
  /// Whether a file or the command line sets it.
  bool is_given(std::string_view key) const { return origins.contains(key); }
  std::map<std::string, std::string, std::less<>> origins;
  bool is_resolved = false;  ///< read from what `dump_config` wrote, which has every key
};

/// Allowed numbers: from `low` to `high`, ends included unless open.
struct Range {
  double low, high;
  bool low_open = false, high_open = false;
};

/// One key: where its value lives, what it may be, and its line of --help.
struct Field {
  std::string_view key;  ///< "model.layers"
  std::variant<bool*, int64_t*, double*, std::string*> value;
  Range range;                            ///< numbers
  std::vector<std::string_view> choices;  ///< strings; empty: any
  std::string_view doc;
};

/// The value as TOML: "full_shard" in quotes, 2.0, true.
std::string value_text(const Field& field);

/// ConfigError that begins with `where` unless the number is in the range of its field.
void check_in_range(const Field& field, const std::string& where);

/// The table of all keys, in the order in which they are printed.
std::vector<Field> config_fields(Config& config);

/// The configuration of a TOML file ("" for none) with overrides `--section.key=value` or
/// `--section.key value`, checked. On the command line an integer may have an exponent (1e3).
/// Defaults that depend on other keys: `optim.lr` is 1e-5 with `model.from`, `optim.final_lr` a
/// tenth of `optim.lr`. ConfigError, with key, place and what is allowed, for an unknown key (it
/// names the nearest one), a wrong type, a value out of range, a key given twice in the file, and
/// values that contradict each other.
Config load_config(const std::string& path, std::span<const std::string> overrides = {});

/// The same from text; `name` stands for the file in messages.
Config parse_config(std::string_view toml, const std::string& name,
                    std::span<const std::string> overrides = {});

/// Contradictions between keys; called by the two above.
void check_config(const Config& config);
/// Gives `precision.param_dtype = auto` its meaning: `stored`, which a checkpoint was trained with,
/// or bf16 on cuda and f32 on the CPU. ConfigError for what that contradicts.
void resolve_param_dtype(Config& config, bool is_cuda, const std::string& stored = "");
/// "optim.lr = 1e-05 (model.from is given, optim.lr is not); ...": defaults that came from other
/// keys; empty without any.
std::string derived_defaults(const Config& config);

/// Every key with its value as TOML, in the order of `config_fields`.
std::vector<std::pair<std::string, std::string>> config_values(const Config& config);

/// The whole configuration as TOML that `load_config` reads to the same values.
std::string dump_config(const Config& config);

/// Keys with defaults, ranges and meaning, for --help: all, or those of a section ("optim") or one
/// ("optim.lr"). ConfigError that names the nearest one if there is neither.
std::string config_help(std::string_view what = "");

/// The numbers of a text such as "128001,128008"; none for "". ConfigError for anything else.
std::vector<int64_t> parse_ids(std::string_view text);

/// The candidate with the smallest edit distance to `word`.
std::string_view nearest_name(std::string_view word, std::span<const std::string_view> candidates);

/// Which of `keys` somebody means who writes `word`: the same last component in another section,
/// the name that other trainers have for it (Hugging Face's TrainingArguments, torchtitan,
/// nanoGPT), a last component with few typing errors, else the fewest edits. Several are joined by
/// commas.
std::string nearest_keys(std::string_view word, std::span<const std::string_view> keys);

}  // namespace tessera::apps
