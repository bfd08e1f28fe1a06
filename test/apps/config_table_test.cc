#include "apps/config_table.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;

namespace {

/// A key as given, settings under which it does nothing, and settings under which it does.
struct Example {
  std::string key, value;
  std::vector<std::string> without, with;
  bool is_cuda_with = false, is_cuda_without = false;
};

const std::vector<std::string> kGpt2 = {"--model.kind=gpt2"}, kBloom = {"--model.kind=bloom"},
                               kF32 = {"--precision.param_dtype=f32"},
                               kBf16 = {"--precision.param_dtype=bf16"},
                               kLlama3 = {"--model.rope_scaling=llama3"},
                               kSample = {"--sample.tokens=5"}, kSgd = {"--optim.name=sgd"},
                               kMuon = {"--optim.name=muon"}, kLora = {"--lora.targets=all-linear"},
                               kChats = {"--data.text=", "--data.chat=y", "--data.tokenizer=t",
                                         "--model.vocab=9"},
                               kSkip = {"--guard.spike=skip"},
                               kPairs = {"--data.text=", "--data.preference=y",
                                         "--data.tokenizer=t", "--model.vocab=9"},
                               kClasses = {"--data.text=", "--data.classify=y"},
                               kTasks = {"--eval.tasks=piqa=x"},
                               kMasked = {"--model.kind=bert", "--data.mask_token=3"};

std::vector<Example> examples() {
  return {
      {"model.bias", "true", {}, kGpt2},
      {"model.gelu", "tanh", {}, kGpt2},
      {"model.window_layers", "wf", {}, {"--model.window=4"}},
      {"model.rope_theta", "500", kGpt2, {}},
      {"model.rope_scaling", "linear", kBloom, {}},
      {"model.rope_factor", "2", {}, {"--model.rope_scaling=linear"}},
      {"model.rope_low_freq_factor", "1", {"--model.rope_scaling=linear"}, kLlama3},
      {"model.rope_high_freq_factor", "8", {}, kLlama3},
      {"model.rope_original_context", "32", {}, kLlama3},
      {"lora.rank", "4", {}, kLora},
      {"lora.alpha", "4", {}, kLora},
      {"lora.rslora", "true", {}, kLora},
      {"lora.dropout", "0.1", {}, kLora},
      {"lora.modules_to_save", "lm_head", {}, kLora},
      {"data.tokenizer", "byte", {"--data.text=", "--data.tokens=y", "--model.vocab=9"}, {}},
      {"data.field", "body", {"--data.text=", "--data.tokens=y", "--model.vocab=9"}, {}},
      {"data.invalid", "replace", {"--data.text=", "--data.tokens=y", "--model.vocab=9"}, {}},
      {"data.field", "body", kChats, {}},
      {"data.invalid", "replace", kChats, {}},
      {"data.document_tokens", "none", {"--data.text=", "--data.tokens=y", "--model.vocab=9"}, {}},
      {"data.document_tokens", "none", kChats, {}},
      {"data.document_tokens", "none", {"--data.separator=3"}, {}},
      {"data.chat_template", "t.jinja", {}, kChats},
      {"data.train_on", "all", {}, kChats},
      {"data.long_chats", "drop", {}, kChats},
      {"data.long_chats", "drop", {}, kPairs},
      {"data.field", "body", kPairs, {}},
      {"data.long_chats", "drop", {}, kClasses},
      {"data.label_field", "class", {}, kClasses},
      {"model.pooling", "mean", {}, kClasses},
      {"data.document_tokens", "none", kClasses, {}},
      {"data.invalid", "replace", kClasses, {}},
      {"data.val_split", "interleave", kClasses, {}},
      {"dpo.beta", "0.2", {}, kPairs},
      {"dpo.loss", "ipo", {}, kPairs},
      {"dpo.label_smoothing", "0.1", {}, kPairs},
      {"dpo.reference", "d", {}, kPairs},
      {"train.z_loss", "1e-4", kPairs, {}},
      {"train.label_smoothing", "0.1", kPairs, {}},
      {"eval.tokenizer", "t", {}, kTasks},
      {"eval.every", "5", {}, kTasks},
      {"eval.per_epoch", "2", {}, kTasks},
      {"eval.fewshot", "2", {}, kTasks},
      {"eval.fewshot_file", "f", kTasks, {"--eval.tasks=piqa=x", "--eval.fewshot=2"}},
      {"eval.fewshot_seed", "3", kTasks, {"--eval.tasks=piqa=x", "--eval.fewshot=2"}},
      {"eval.limit", "3", {}, kTasks},
      {"eval.max_tokens", "3", kTasks, {"--eval.tasks=piqa=x,generate=y"}},
      {"train.evals_per_epoch", "2", {"--data.val_fraction=0"}, {}},
      {"data.val_fraction",
       "0.2",
       {"--data.text=", "--data.tokens=y", "--data.val_tokens=z", "--model.vocab=9"},
       {}},
      {"data.val_split", "interleave", {"--data.val_fraction=0"}, {}},
      {"data.mask_probability", "0.2", {}, kMasked},
      {"data.restart_positions",
       "true",
       {"--model.kind=bloom", "--data.separator=1"},
       {"--data.separator=1"}},
      {"train.eval_every", "5", {"--data.val_fraction=0"}, {}},
      {"train.eval_batches", "5", {"--data.val_fraction=0"}, {}},
      {"train.pin_threads", "true", {"--train.threads=2"}, {}},
      {"sample.prompt", "x", {}, kSample},
      {"sample.temperature", "0.5", {}, kSample},
      {"sample.top_k", "5", {"--sample.tokens=5", "--sample.temperature=0"}, kSample},
      {"sample.top_p", "0.5", {}, kSample},
      {"optim.final_lr", "1e-5", {"--optim.schedule=constant"}, {}},
      {"optim.warmup_steps", "20", {"--train.steps=10"}, {"--train.steps=20"}},
      {"optim.schedule", "cosine", {"--train.steps=10", "--optim.warmup_steps=10"}, {}},
      {"optim.decay_steps", "5", {}, {"--optim.schedule=wsd"}},
      {"optim.final_lr", "1e-5", {"--optim.schedule=range_test"}, {}},
      {"optim.first_lr", "1e-5", {}, {"--optim.schedule=range_test"}},
      {"optim.warmup_steps", "5", {"--optim.schedule=range_test"}, {}},
      {"optim.warmup_ratio", "0.1", {"--optim.schedule=range_test"}, {}},
      {"optim.beta1", "0.8", kSgd, {"--optim.name=lion"}},
      {"optim.beta2", "0.8", kSgd, {"--optim.name=lion"}},
      {"optim.eps", "1e-6", kSgd, {}},
      {"optim.momentum", "0.8", {}, kSgd},
      {"optim.muon_momentum", "0.8", {}, kMuon},
      {"optim.muon_nesterov", "false", {}, kMuon},
      {"optim.muon_coefficients", "original", {}, kMuon},
      {"optim.muon_scale", "original", {}, kMuon},
      {"optim.muon_blocks", "heads", {}, kMuon},
      {"optim.nesterov", "true", {"--optim.name=sgd", "--optim.momentum=0"}, kSgd},
      {"fsdp.shard_size", "2", {}, {"--fsdp.strategy=hybrid_shard"}},
      {"fsdp.wrap_every", "3", {}, {"--fsdp.wrap=every_n_blocks"}},
      {"fsdp.min_num_params", "5", {}, {"--fsdp.wrap=min_num_params"}},
      {"fsdp.wrap_class", "Attention", {}, {"--fsdp.wrap=class"}},
      {"fsdp.gradient_pieces", "true", {"--fsdp.strategy=shard_optim"}, {}},
      {"fsdp.gradient_pieces", "true", {"--fsdp.sync_every_micro_batch=false"}, {}},
      {"fsdp.gradient_pieces", "true", {"--fsdp.offload=params_and_optimizer"}, {}},
      {"fsdp.prefetch_forward", "2", {"--fsdp.strategy=no_shard"}, {}},
      {"fsdp.prefetch_backward", "2", {"--fsdp.strategy=no_shard"}, {}},
      {"precision.buffer_dtype", "bf16", {}, kBloom},
      {"precision.cast_forward_inputs", "false", kF32, kBf16},
      {"precision.norm_fp32", "true", kF32, kBf16},
      {"precision.loss_scale_init", "64", kBf16, {"--precision.param_dtype=f16"}},
      {"precision.loss_scale_interval",
       "64",
       {"--precision.loss_scale=static"},
       {"--precision.loss_scale=dynamic"}},
      {"recompute.every_n", "3", {"--recompute.policy=full"}, {"--recompute.policy=every_n"}},
      {"recompute.offload",
       "true",
       {"--recompute.policy=selective"},
       {"--recompute.policy=every_n"}},
      {"checkpoint.max_errors", "3", {"--checkpoint.on_error=stop"}, {}},
      {"checkpoint.resume_override", "true", {}, {"--checkpoint.resume=auto"}},
      {"guard.first_steps", "30", {"--train.steps=20"}, {}},
      {"guard.spike_z", "3", {}, kSkip},
      {"guard.spike_window", "30", {}, kSkip},
      {"guard.max_spikes", "3", {}, kSkip},
      {"guard.snapshot_every", "3", kSkip, {"--guard.spike=rewind"}},
      {"kernels.attention", "auto", {}, {}, true},
      {"kernels.gemm", "own", {}, {}, true},
      {"kernels.gemm_tf32", "true", {}, {}, true},
      {"kernels.tuning_file", "gemm.txt", {}, {}, true},
      {"dist.nccl_reduce", "nccl", {}, {}, true},
      {"dist.nccl_max_ctas", "4", {}, {}, true},
      {"profile.trace", "t.json", {}, {"--profile.steps=2..3"}},
      {"debug.slow_link_us", "5", {}, {}, false, true},
      {"debug.nan_step", "20", {"--train.steps=10"}, {}},
      {"debug.nan_rank", "1", {}, {"--debug.nan_step=3"}},
  };
}

std::vector<std::string> idle(std::vector<std::string> overrides, bool is_cuda = false,
                              const std::string& toml = "") {
  overrides.insert(overrides.begin(), "--data.text=x");
  return keys_without_effect(parse_config(toml, "f.toml", overrides), is_cuda);
}

bool names(const std::vector<std::string>& lines, const std::string& key) {
  return std::any_of(lines.begin(), lines.end(),
                     [&](const std::string& line) { return line.starts_with(key + " = "); });
}

}  // namespace

TEST_CASE("config_table: each key is named where it does nothing, and only there", "[config]") {
  for (const Example& e : examples()) {
    CAPTURE(e.key);
    const std::string given = "--" + e.key + "=" + e.value;
    std::vector<std::string> without = e.without, with = e.with;
    CHECK_FALSE(names(idle(without, e.is_cuda_without), e.key));  // not given
    without.push_back(given);
    with.push_back(given);
    CHECK(names(idle(without, e.is_cuda_without), e.key));
    CHECK_FALSE(names(idle(with, e.is_cuda_with), e.key));
  }
  const std::vector<std::string> threads = {"--train.pin_threads=true"};
  CHECK(names(idle(threads, /*is_cuda=*/true), "train.pin_threads"));
}

TEST_CASE("config_table: each condition of a key has an example", "[config]") {
  std::set<std::string> with_example, conditional;
  for (const Example& e : examples()) with_example.insert(e.key);
  Config config;
  for (const Field& field : config_fields(config)) {
    if (!field.condition.empty()) conditional.emplace(field.key);
  }
  CHECK(with_example == conditional);
}

TEST_CASE("config_table: a key and a name of another trainer stand in one row", "[config]") {
  Config config;
  std::set<std::string> keys, others;
  for (const Field& field : config_fields(config)) {
    CAPTURE(field.key);
    CHECK(keys.emplace(field.key).second);
    std::istringstream names{std::string(field.other_names)};
    for (std::string name; names >> name;) CHECK(others.insert(name).second);
  }
  CHECK(others.size() > 50);
}

TEST_CASE("config_table: every row says what another value means to a resume", "[config]") {
  Config config;
  std::map<ResumeKind, int> count;
  for (const Field& field : config_fields(config)) {
    CAPTURE(field.key);
    REQUIRE(field.resume.has_value());
    ++count[*field.resume];
    const bool is_free = field.key.starts_with("debug.") || field.key.starts_with("fsdp.");
    if (is_free) CHECK(*field.resume == ResumeKind::kFree);
    if (field.key.starts_with("optim.")) CHECK(*field.resume != ResumeKind::kFree);
  }
  CHECK(count.size() == 3);
}

TEST_CASE("config_table: a library's message about a field is said with key and place",
          "[config]") {
  const Config config =
      parse_config("[fsdp]\nshard_size = 3", "f.toml", std::vector<std::string>{"--data.text=x"});
  CHECK(in_keys(config, "FsdpOptions::shard_size: 3 does not divide the 4 ranks") ==
        "f.toml:2: fsdp.shard_size: 3 does not divide the 4 ranks");
  CHECK(in_keys(config, "FsdpOptions::reproducible: 3 ranks") ==
        "default: train.reproducible: 3 ranks");
  CHECK(in_keys(config, "LossScaleOptions::init: 0, expected more") ==
        "default: precision.loss_scale_init: 0, expected more");
  for (const char* other : {"fully_shard: a::b is shared", "AdamW: beta1 must be in [0, 1)",
                            "FsdpOptions::average_gradients: no key", "x"}) {
    CHECK(in_keys(config, other) == other);
  }
}

TEST_CASE("config_table: one line names the key, its value and what it needs", "[config]") {
  CHECK(idle({"--optim.momentum=0.9", "--fsdp.wrap_every=3"}) ==
        std::vector<std::string>{"optim.momentum = 0.9 (needs optim.name = sgd)",
                                 "fsdp.wrap_every = 3 (needs fsdp.wrap = every_n_blocks)"});
  CHECK(idle({}, false, "[optim]\nmomentum = 0.9") ==
        std::vector<std::string>{"optim.momentum = 0.9 (needs optim.name = sgd)"});
  // A resolved configuration has every key; what the command line adds to it still counts.
  const std::string dump =
      dump_config(parse_config("", "", std::vector<std::string>{"--data.text=x"}));
  CHECK(idle({}, false, dump).empty());
  CHECK(idle({"--optim.momentum=0.9"}, false, dump).size() == 1);
}
