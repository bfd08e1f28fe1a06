#include "apps/config_table.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <set>

#include "core/runtime/allocator.h"

namespace tessera::apps {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Bytes as "2GiB", with the largest unit that divides them; 0 as "none".
std::string nbytes_text(int64_t nbytes) {
  if (nbytes == 0) return "none";
  for (const auto& [unit, shift] : {std::pair{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}}) {
    if (nbytes % (int64_t{1} << shift) == 0) return fmt::format("{}{}", nbytes >> shift, unit);
  }
  return fmt::format("{}", nbytes);
}

Field& add_nbytes(ConfigTable& t, std::string_view key, int64_t& nbytes, std::string_view doc) {
  return t.add_text(
      key, {}, [&nbytes] { return nbytes_text(nbytes); },
      [&nbytes](const std::string& text) { nbytes = parse_nbytes(text); }, doc);
}

using Reshard = std::optional<std::variant<bool, int>>;

std::string reshard_text(const Reshard& reshard) {
  if (!reshard) return "auto";
  return std::visit([](auto value) { return fmt::format("{}", value); }, *reshard);
}

Reshard reshard_from_text(const std::string& text) {
  if (text == "auto") return std::nullopt;
  if (text == "true" || text == "false") return text == "true";
  return std::stoi(text);
}

void add_general(ConfigTable& t, Config& c) {
  t.add("device", c.device, {"auto", "cpu", "cuda"},
        "device that computes; auto: cuda if there is one, else cpu");
}

/// Text that outlives every table, each once.
std::string_view kept(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string> all;
  const std::lock_guard lock(mutex);
  return *all.insert(text).first;
}

/// The settings of all families. One that several have is one key: it has the value of the selected
/// family if that has it, and sets all of them.
void add_families(ConfigTable& t, ModelConfig& m) {
  struct Shared {
    std::vector<const nn::Family*> families;
    std::vector<nn::ModelSetting> rows;
  };
  std::vector<std::pair<std::string_view, Shared>> keys;
  for (nn::FamilyConfig& config : m.families) {
    const nn::ModelSettings settings = config.settings();
    for (const nn::ModelSetting& row : settings.rows()) {
      auto at = std::find_if(keys.begin(), keys.end(),
                             [&](const auto& entry) { return entry.first == row.key; });
      if (at == keys.end()) at = keys.insert(keys.end(), {row.key, {}});
      at->second.families.push_back(&config.family());
      at->second.rows.push_back(row);
    }
  }
  for (const auto& [key, shared] : keys) {
    std::vector<std::string_view> names;
    for (const nn::Family* family : shared.families) names.push_back(family->name);
    const std::string all = fmt::format("{}", fmt::join(names, ", "));
    const bool is_everywhere = names.size() == m.families.size();
    const auto selected = [&m, families = shared.families]() -> size_t {
      for (size_t i = 0; i < families.size(); ++i) {
        if (families[i]->name == m.kind) return i;
      }
      return families.size();
    };
    const size_t own = selected();
    const bool is_own = own < names.size();
    const nn::ModelSetting& row = shared.rows[is_own ? own : 0];
    Field field;
    static_cast<Setting&>(field) = row;
    field.key = kept(fmt::format("model.{}", key));
    field.doc = is_everywhere ? row.doc : kept(fmt::format("{}: {}", all, row.doc));
    field.get = [selected, rows = shared.rows] {
      const size_t at = selected();
      return rows[at < rows.size() ? at : 0].get();
    };
    field.assign = [rows = shared.rows](const SettingValue& value) {
      for (const nn::ModelSetting& each : rows) each.assign(value);
    };
    field.other_names = row.other_names;
    field.is_essential = row.is_essential;
    field.is_of_model = is_own;
    if (row.may_change) field.resume = ResumeKind::kSchedule;
    if (!row.is_essential || !row.condition.empty()) {
      std::string condition;
      if (!is_everywhere) condition = fmt::format("model.kind = {}", fmt::join(names, " or "));
      if (!row.condition.empty()) {
        condition += fmt::format("{}model.{}", condition.empty() ? "" : " and ", row.condition);
      }
      field.needs(is_own && row.has_effect, kept(condition));
    }
    t.rows().push_back(std::move(field));
  }
}

void add_model(ConfigTable& t, Config& c) {
  ModelConfig& m = c.model;
  t.add("model.from", m.from,
        "fine-tune: directory with config.json and model.safetensors of Hugging Face's "
        "transformers, which sets all model keys (model.context may be shorter)")
      .on_resume(ResumeKind::kFree)
      .not_stored()
      .also("model_name_or_path pretrained_model_name_or_path init_from");
  t.add("model.ignore_keys", m.ignore_keys,
        "keys of model.from's config.json, separated by commas, of which nothing is known here and "
        "that change no numbers: no warning")
      .on_resume(ResumeKind::kFree)
      .not_stored();
  t.add("model.source", m.source,
        "directory from which an export takes the tokenizer's files; set by model.from");
  t.add(
       "model.classes", m.classes,
       "names of the classes of data.classify, separated by commas, in the order of their numbers; empty: "
       "those of model.from, else the labels that there are")
      .also("num_labels id2label");
  t.add(
       "model.pooling", m.pooling, "auto",
       "states that stand for a text to classify: of its first token (cls), of the last, or their mean; "
       "auto: last for a causal model, else cls")
      .needs(!c.data.classify.empty(), "data.classify");
  t.add("model.frozen", m.frozen,
        "parameters that are not trained, such as \"embed.*,blocks.0.*\": names, * for any "
        "characters, separated by commas");
  t.add(
       "model.quantize", m.quantize,
       "weights of linear layers in blocks, which must be frozen: nf4 keeps and gathers 4-bit codes "
       "with double quantization (QLoRA), 0.52 bytes each")
      .also("load_in_4bit bnb_4bit_quant_type");
  std::vector<std::string_view> kinds;
  for (const nn::Family* family : nn::families()) kinds.push_back(family->name);
  t.add("model.kind", m.kind, kinds, "model architecture");
  add_families(t, m);
  t.add("model.context", m.context, {1, 16777216},
        "sequence length of a training sample, in tokens")
      .also("max_seq_length seq_len block_size")
      .field("sequence");
  t.add("model.max_positions", m.max_positions, {0, 16777216},
        "positions that the model can tell apart (its position embeddings, the limit in exports); "
        "0: model.context; set by model.from")
      .on_resume(ResumeKind::kFree)
      .also("max_position_embeddings");
  t.add("model.vocab", m.vocab, {0, 2147483647}, "vocabulary size; 0: that of the tokenizer")
      .also("vocab_size");
  t.add("model.bos_ids", m.bos_ids,
        "token ids that begin a text, such as 1 or 1,7, for config.json of exports; set by "
        "model.from")
      .on_resume(ResumeKind::kFree);
  t.add("model.eos_ids", m.eos_ids,
        "token ids that end a text, such as 2 or 2,7, for config.json of exports; set by "
        "model.from")
      .on_resume(ResumeKind::kFree);
  t.add("model.pad_ids", m.pad_ids,
        "token ids of padding, such as 0, for config.json of exports; set by model.from")
      .on_resume(ResumeKind::kFree);
}

void add_lora(ConfigTable& t, Config& c) {
  nn::LoraOptions& o = c.lora.options;
  const bool is_on = c.lora.is_on();
  t.add(
       "lora.targets", o.targets,
       "low-rank adapters (LoRA) beside these linear layers, all else is frozen: names of "
       "transformers such as q_proj,v_proj, of the module tree such as mlp.down, patterns with *, or "
       "all-linear; empty: none")
      .also("lora_target_modules lora_target target_modules lora_target_linear");
  t.add("lora.rank", o.rank, {1, 65536}, "rank of the adapters")
      .needs(is_on, "lora.targets")
      .also("lora_r lora_rank");
  t.add("lora.alpha", o.alpha, kF32Positive, "the adapters' product is scaled by alpha / rank")
      .needs(is_on, "lora.targets")
      .also("lora_alpha");
  t.add("lora.rslora", o.rslora, "scales by alpha / sqrt(rank) (rsLoRA)")
      .needs(is_on, "lora.targets")
      .also("use_rslora peft_use_rslora");
  t.add("lora.dropout", o.dropout, kFraction, "dropout probability of the adapters' input")
      .needs(is_on, "lora.targets")
      .on_resume(ResumeKind::kSchedule)
      .also("lora_dropout")
      .field("LoraOptions::dropout");
  t.add(
       "lora.modules_to_save", o.modules_to_save,
       "modules that are trained whole beside the adapters, named like lora.targets; what classifies is, "
       "with data.classify")
      .needs(is_on, "lora.targets")
      .also("modules_to_save lora_modules_to_save");
  t.add(
       "lora.from", c.lora.from,
       "adapters to begin with: directory with adapter_config.json and adapter_model.safetensors of "
       "Hugging Face's peft, which sets the other keys")
      .on_resume(ResumeKind::kFree)
      .not_stored()
      .also("lora_model_dir adapter_name_or_path");
}

void add_data(ConfigTable& t, Config& c) {
  DataConfig& d = c.data;
  t.add("data.text", d.text,
        "text to train on, a path or a glob: one text, or the documents of several texts (.txt, "
        ".md), of JSON lines (.jsonl) or .parquet, each also .gz or .zst")
      .also("train_file dataset dataset_name");
  t.add("data.tokens", d.tokens,
        "token shards to train on (.bin format of llm.c), a path or a glob such as "
        "'data/train_*.bin'");
  t.add(
       "data.sources", d.sources,
       "token shards (.bin) or documents (.txt, .jsonl, .parquet) of several sources, shuffled by "
       "document and packed into windows: globs separated by commas, each with ': WEIGHT' behind it, "
       "or none; in a file [[data.source]] with path and weight")
      .on_resume(ResumeKind::kIdentity);
  t.add("data.chat", d.chat,
        "conversations to train on: JSON lines or Parquet files, a path or a glob; each row has "
        "messages, prompt and completion, conversations (ShareGPT), or instruction and output "
        "(Alpaca)");
  t.add(
      "data.preference", d.preference,
      "pairs of answers to train on by their preference (DPO): JSON lines or Parquet files, a path or "
      "a glob; each row has chosen and rejected, and prompt, or conversations that begin alike");
  t.add("data.classify", d.classify,
        "texts to classify: JSON lines or Parquet files, a path or a glob; each row has a text "
        "(data.field) and a label (data.label_field)");
  t.add("data.label_field", d.label_field,
        "the label's field or column in data.classify: a text or a whole number")
      .on_resume(ResumeKind::kFree)
      .needs(!d.classify.empty(), "data.classify");
  const bool has_pairs = !d.preference.empty(), has_chats = !d.chat.empty();
  t.add("data.chat_template", d.chat_template,
        "chat template (.jinja), or a directory with one; empty: that beside the tokenizer")
      .needs(has_chats || has_pairs, "data.chat or data.preference");
  t.add(
       "data.train_on", d.train_on,
       "part of a conversation that is learned: the turns of the assistant, what follows the prompt, the "
       "last turn, or everything")
      .on_resume(ResumeKind::kIdentity)
      .needs(has_chats, "data.chat");
  t.add(
       "data.long_chats", d.long_chats,
       "conversations or texts longer than model.context: their beginnings are kept, or they are left out")
      .on_resume(ResumeKind::kIdentity)
      .needs(has_chats || has_pairs || !d.classify.empty(),
             "data.chat, data.preference or data.classify");
  t.add("data.val_tokens", d.val_tokens,
        "token shards for validation, a glob; empty: a part of data.tokens (data.val_fraction)");
  t.add("data.tokenizer", d.tokenizer,
        "tokens of texts: byte, char (the characters that occur in them), or the path of a "
        "tokenizer.json or of a directory with one; with model.from: that of the model")
      .on_resume(ResumeKind::kFree)  // other tokens are other data
      .expects("byte, char or a path")
      .needs(d.tokens.empty(), "data.text, data.sources or data.chat");
  t.add("data.field", d.field, "the text's field in a JSON line, or column of .parquet")
      .on_resume(ResumeKind::kFree)
      .needs(d.tokens.empty() && !has_chats && !has_pairs,
             "data.text, data.sources or data.classify");
  t.add("data.invalid", d.invalid,
        "bytes of texts that are not UTF-8: an error, or each becomes U+FFFD")
      .on_resume(ResumeKind::kFree)
      .needs(d.tokens.empty() && !has_chats && !has_pairs && d.classify.empty(),
             "data.text or data.sources");
  t.add("data.val_fraction", d.val_fraction, kFraction,
        "fraction of the data kept back for validation")
      .needs(d.val_tokens.empty(), "no data.val_tokens");
  t.add("data.val_split", d.val_split,
        "validation data: the end of the data, or the end of each of many pieces of it")
      .needs(
          d.val_tokens.empty() && d.val_fraction > 0 && d.sources.empty() && !has_chats &&
              !has_pairs && d.classify.empty(),
          "data.val_fraction > 0 and no data.val_tokens, data.sources, data.chat, data.preference "
          "or data.classify");
  t.add("data.separator", d.separator, {-1, 2147483647},
        "token id that ends a document and begins the next: attention stays inside a "
        "document; -1: no separator")
      .on_resume(ResumeKind::kIdentity);
  t.add("data.document_tokens", d.document_tokens,
        "tokens around documents of texts without data.separator: the tokenizer's end of a text "
        "behind each and its beginning (else that end) before, or none")
      .on_resume(ResumeKind::kIdentity)
      .needs(d.tokens.empty() && !has_chats && d.classify.empty() && d.separator < 0,
             "documents of data.text or data.sources and no data.separator");
  t.add("data.read_ahead", d.read_ahead, {0, 64},
        "steps whose batches threads read ahead, one each, where reading takes longer than a step; "
        "0: the next step's batch is read while a step runs")
      .on_resume(ResumeKind::kFree);
  t.add("data.restart_positions", d.restart_positions, "positions restart at 0 with each document")
      .on_resume(ResumeKind::kIdentity)
      .needs(!c.model.selected().family().has_alibi,
             "a model with positions; one with ALiBi has none");
  t.add("data.mask_token", d.mask_token, {-1, 2147483647},
        "id of the mask token, for encoders, which predict masked tokens; -1: the next token is "
        "predicted")
      .on_resume(ResumeKind::kIdentity)
      .also("mask_token_id");
  t.add("data.mask_probability", d.mask_probability, {0, 1, true, false},
        "share of a sample's tokens that are predicted; of these 80 % become data.mask_token, 10 % "
        "any token, 10 % stay")
      .on_resume(ResumeKind::kIdentity)
      .needs(d.mask_token >= 0, "data.mask_token >= 0")
      .also("mlm_probability");
}

void add_train(ConfigTable& t, Config& c, bool is_cuda) {
  const bool has_validation = c.data.val_fraction > 0 || !c.data.val_tokens.empty();
  t.add("train.steps", c.train.steps, at_least(1), "optimizer steps of the whole run")
      .on_resume(ResumeKind::kSchedule)
      .also("max_steps max_iters iters lr_decay_iters");
  t.add(
       "train.epochs", c.train.epochs, {0, 1e6},
       "passes over the data, which set train.steps: the last step is filled up from the next epoch; 0: "
       "train.steps as it is")
      .on_resume(ResumeKind::kSchedule)
      .also("num_train_epochs num_epochs");
  t.add(
       "train.tokens", c.train.tokens, at_least(0),
       "tokens of the whole run, a multiple of a step's, which set train.steps; 0: train.steps as it "
       "is")
      .on_resume(ResumeKind::kSchedule)
      .also("max_tokens target_tokens");
  t.add("train.micro_batch", c.train.micro_batch, {1, 1048576},
        "samples of a rank in one forward and backward pass")
      .also("per_device_train_batch_size per_device_eval_batch_size local_batch_size batch_size")
      .field("batch");
  t.add("train.grad_accum_steps", c.train.grad_accum_steps, {1, 1048576},
        "gradient accumulation: forward and backward passes of a step")
      .also("gradient_accumulation_steps");
  t.add("train.global_batch", c.train.global_batch, at_least(0),
        "samples of a step over all ranks, which sets grad_accum_steps; 0: micro_batch x "
        "grad_accum_steps x ranks")
      .also("train_batch_size global_batch_size");
  t.add(
       "train.global_batch_tokens", c.train.global_batch_tokens, at_least(0),
       "tokens of a step over all ranks, which set train.global_batch: a multiple of micro_batch x ranks "
       "x model.context; 0: train.global_batch as it is")
      .also("total_batch_size batch_size_tokens");
  t.add("train.seed", c.train.seed, at_least(0), "seed of initialization, data order and dropout");
  t.add(
       "train.z_loss", c.train.z_loss, kNotNegative,
       "weight of log(Z)^2 in the loss of training, Z the sum of a token's exponentials, which keeps "
       "logits from drifting; 1e-4 is usual; 0: none")
      .on_resume(ResumeKind::kSchedule)
      .needs(c.data.preference.empty(), "no data.preference, whose loss is another");
  t.add("train.label_smoothing", c.train.label_smoothing, kFraction,
        "share of a target's probability that all tokens get alike, in the loss of training")
      .on_resume(ResumeKind::kSchedule)
      .needs(c.data.preference.empty(), "no data.preference, which has dpo.label_smoothing")
      .also("label_smoothing_factor");
  t.add("train.eval_every", c.train.eval_every, at_least(0),
        "steps from one evaluation to the next; 0: only after the last step")
      .needs(has_validation, "data.val_fraction > 0 or data.val_tokens")
      .also("eval_steps eval_interval");
  t.add(
       "train.evals_per_epoch", c.train.evals_per_epoch, at_least(0),
       "evaluations an epoch, each after the step that completes a part of it; 0: train.eval_every alone")
      .needs(has_validation, "data.val_fraction > 0 or data.val_tokens");
  t.add("train.eval_batches", c.train.eval_batches, at_least(0),
        "micro-batches in one evaluation, over all ranks; 0: the whole validation split")
      .needs(has_validation, "data.val_fraction > 0 or data.val_tokens")
      .also("eval_iters");
  t.add("train.log_every", c.train.log_every, at_least(1),
        "steps from one printed line to the next")
      .also("logging_steps log_freq log_interval");
  t.add("train.threads", c.runtime.num_threads, {0, 4096},
        "CPU threads of a rank; 0: allowed processors / ranks of the node")
      .of_one_rank();
  t.add("train.pin_threads", c.train.pin_threads,
        "binds each CPU thread to a processor of its own, where train.threads is 0")
      .of_one_rank()
      .needs(c.runtime.num_threads == 0 && !is_cuda, "train.threads = 0 and device = cpu");
  t.add("train.reproducible", c.fsdp.options.reproducible,
        "bitwise the same results on any power of two of ranks with the same micro_batch and "
        "global_batch");
  t.add("train.max_minutes", c.train.max_minutes, kNotNegative,
        "wall-clock minutes after which the run ends in good order; 0: no limit");
}

void add_eval(ConfigTable& t, Config& c) {
  EvalConfig& e = c.eval;
  t.add(
       "eval.tasks", e.tasks,
       "tasks that judge the model, \"FORM=FILE,FORM=FILE\": JSON lines in the shape of hellaswag, arc, "
       "mmlu, piqa, lambada, winogrande, choice, generate or text, as tessera-eval has them")
      .on_resume(ResumeKind::kFree)
      .also("tasks");
  t.add(
       "eval.tokenizer", e.tokenizer,
       "tokens of eval.tasks: the path of a tokenizer.json or of a directory with one; empty: the data's")
      .on_resume(ResumeKind::kFree)
      .needs(e.is_on(), "eval.tasks");
  t.add("eval.every", e.every, at_least(0),
        "steps from one round of eval.tasks to the next; 0: only after the last step")
      .on_resume(ResumeKind::kFree)
      .needs(e.is_on(), "eval.tasks");
  t.add("eval.per_epoch", e.per_epoch, at_least(0),
        "rounds an epoch, each after the step that completes a part of it; 0: eval.every alone")
      .on_resume(ResumeKind::kFree)
      .needs(e.is_on(), "eval.tasks");
  t.add("eval.fewshot", e.fewshot, {0, 1000}, "examples before each row")
      .on_resume(ResumeKind::kFree)
      .needs(e.is_on(), "eval.tasks")
      .also("num_fewshot");
  t.add("eval.fewshot_file", e.fewshot_file,
        "file of the examples; empty: the task's own, without the row that is asked")
      .on_resume(ResumeKind::kFree)
      .needs(e.is_on() && e.fewshot > 0, "eval.tasks and eval.fewshot > 0");
  t.add("eval.fewshot_seed", e.fewshot_seed, {0, 4294967295}, "seed of the examples that are drawn")
      .on_resume(ResumeKind::kFree)
      .needs(e.is_on() && e.fewshot > 0, "eval.tasks and eval.fewshot > 0");
  t.add("eval.limit", e.limit, at_least(0), "rows of each file; 0: all")
      .on_resume(ResumeKind::kFree)
      .needs(e.is_on(), "eval.tasks");
  t.add("eval.max_tokens", e.max_tokens, at_least(1), "tokens of an answer of generate at most")
      .on_resume(ResumeKind::kFree)
      .needs(e.tasks.find("generate=") != std::string::npos, "eval.tasks with generate");
}

void add_dpo(ConfigTable& t, Config& c) {
  PreferenceConfig& p = c.dpo;
  const bool is_on = !c.data.preference.empty();
  t.add(
       "dpo.beta", p.beta, kPositive,
       "strength of the pull towards the reference: rewards are beta (log p - log p of the reference)")
      .on_resume(ResumeKind::kSchedule)
      .needs(is_on, "data.preference");
  t.add("dpo.loss", p.loss,
        "loss of a pair: sigmoid (DPO), or ipo, a square of mean log-probabilities")
      .on_resume(ResumeKind::kSchedule)
      .needs(is_on, "data.preference")
      .also("loss_type pref_loss");
  t.add("dpo.label_smoothing", p.label_smoothing, {0, 0.5, false, true},
        "share of pairs that are taken to be the wrong way around")
      .on_resume(ResumeKind::kSchedule)
      .needs(is_on && p.loss == PreferenceLoss::kSigmoid, "data.preference and dpo.loss = sigmoid");
  t.add("dpo.reference", p.reference,
        "model of transformers of the same shape, a directory, that gives the reference's "
        "log-probabilities; empty: the model as training starts")
      .on_resume(ResumeKind::kSchedule)
      .needs(is_on, "data.preference")
      .also("ref_model");
}

void add_sample(ConfigTable& t, Config& c) {
  SampleConfig& s = c.sample;
  const bool is_on = s.options.num_tokens > 0;
  const bool is_random = is_on && s.options.sampling.temperature > 0;
  t.add("sample.tokens", s.options.num_tokens, at_least(0),
        "tokens to generate from sample.prompt after training; 0: none");
  t.add("sample.prompt", s.prompt, "text that the sample continues")
      .needs(is_on, "sample.tokens > 0");
  t.add("sample.temperature", s.options.sampling.temperature, kNotNegative,
        "sampling temperature; 0: greedy, the likeliest token")
      .needs(is_on, "sample.tokens > 0");
  t.add("sample.top_k", s.options.sampling.top_k, at_least(0),
        "top-k sampling: draws from the k likeliest tokens; 0: from all")
      .needs(is_random, "sample.tokens > 0 and sample.temperature > 0");
  t.add("sample.top_p", s.options.sampling.top_p, {0, 1, true, false},
        "nucleus sampling: draws from the likeliest tokens with this total probability")
      .needs(is_random, "sample.tokens > 0 and sample.temperature > 0");
}

void add_optim(ConfigTable& t, Config& c) {
  using Kind = optim::ScheduleKind;
  OptimConfig& o = c.optim;
  const Kind kind = o.schedule.kind;
  const bool has_groups = !o.groups.empty();  // which may name any of them
  const bool is_sgd = o.name == OptimizerName::kSgd || has_groups;
  const bool is_muon = o.name == OptimizerName::kMuon || has_groups;
  // Beside muon AdamW updates vectors, embeddings and the head.
  const bool is_adamw =
      o.name == OptimizerName::kAdamW || o.name == OptimizerName::kAdamW8bit || is_muon;
  const bool has_betas = is_adamw || o.name == OptimizerName::kLion;
  constexpr std::string_view kAdamWNames = "optim.name = adamw, adamw_8bit or muon";
  const int64_t steps_to_decay = c.train.steps - o.schedule.warmup_steps;
  t.add("optim.name", o.name, "optimizer").on_resume(ResumeKind::kIdentity).also("optimizer");
  t.add("optim.lr", o.schedule.peak_lr, kNotNegative,
        "peak learning rate; not given with model.from: 1e-5")
      .also("learning_rate");
  t.add("optim.final_lr", o.schedule.final_lr, kNotNegative,
        "learning rate at the last step, absolute; not given: a tenth of optim.lr")
      .needs(kind != Kind::kConstant && kind != Kind::kRangeTest,
             "optim.schedule = linear, cosine or wsd")
      .also("min_lr_factor min_lr");
  t.add("optim.warmup_steps", o.schedule.warmup_steps, at_least(0),
        "steps of the linear warm-up from 0 to optim.lr")
      .needs(o.schedule.warmup_steps <= c.train.steps && kind != Kind::kRangeTest,
             "at least as many train.steps, else optim.lr is never reached; no range_test")
      .also("warmup_iters");
  t.add(
       "optim.warmup_ratio", o.warmup_ratio, {0, 1},
       "share of train.steps that the warm-up takes, rounded up, which sets optim.warmup_steps; 0: "
       "optim.warmup_steps as it is")
      .needs(kind != Kind::kRangeTest, "optim.schedule other than range_test")
      .also("warmup_fraction");
  t.add("optim.first_lr", o.schedule.first_lr, kF32Positive,
        "schedule range_test: learning rate of the first step, from which it rises exponentially "
        "to optim.lr; tessera-report draws the losses over the rates")
      .needs(kind == Kind::kRangeTest, "optim.schedule = range_test");
  t.add("optim.decay_steps", o.schedule.decay_steps, at_least(0),
        "schedule wsd: steps of the decay at the end; 0: a fifth of train.steps")
      .needs(kind == Kind::kWsd && o.schedule.decay_steps <= steps_to_decay,
             "optim.schedule = wsd and at least as many steps after the warm-up")
      .also("decay_ratio");
  t.add("optim.schedule", o.schedule.kind, "learning rate schedule after the warm-up")
      .needs(steps_to_decay > 0 || kind == Kind::kConstant || kind == Kind::kRangeTest,
             "train.steps > optim.warmup_steps")
      .also("lr_scheduler_type");
  t.add("optim.beta1", o.adamw.beta1, kFraction,
        "adamw: decay rate of the first moment; lion: of the momentum in the update")
      .needs(has_betas, "optim.name = adamw, adamw_8bit, lion or muon")
      .also("adam_beta1");
  t.add("optim.beta2", o.adamw.beta2, kFraction,
        "adamw: decay rate of the second moment; lion: of the momentum, not given: 0.99")
      .needs(has_betas, "optim.name = adamw, adamw_8bit, lion or muon")
      .also("adam_beta2");
  t.add("optim.eps", o.adamw.eps, kPositive, "adamw: epsilon")
      .needs(is_adamw, kAdamWNames)
      .also("adam_epsilon epsilon");
  t.add("optim.momentum", o.sgd.momentum, kFraction, "sgd: momentum")
      .needs(is_sgd, "optim.name = sgd");
  t.add("optim.nesterov", o.sgd.nesterov, "sgd: Nesterov momentum")
      .needs(is_sgd && o.sgd.momentum > 0, "optim.name = sgd and optim.momentum > 0");
  t.add("optim.muon_momentum", o.muon.momentum, kFraction, "muon: momentum")
      .needs(is_muon, "optim.name = muon");
  t.add("optim.muon_nesterov", o.muon.nesterov, "muon: Nesterov momentum")
      .needs(is_muon, "optim.name = muon");
  t.add("optim.muon_coefficients", o.muon.coefficients,
        "muon: polynomials of the five Newton-Schulz steps")
      .needs(is_muon, "optim.name = muon");
  t.add("optim.muon_scale", o.muon.scale,
        "muon: size of an update; original: sqrt(max(1, rows / columns)), for rates near 0.02; "
        "match_rms_adamw: 0.2 sqrt(max(rows, columns)), for rates of adamw")
      .needs(is_muon, "optim.name = muon");
  t.add("optim.muon_blocks", o.muon_blocks,
        "muon: what is a matrix of its own in a fused projection: nothing, each of query, key, "
        "value, gate and up, or each head too")
      .needs(is_muon, "optim.name = muon");
  t.add("optim.weight_decay", o.adamw.weight_decay, kNotNegative,
        "decoupled weight decay of matrices (not of norms and biases)");
  t.add(
       "optim.groups", o.groups,
       "groups of parameters: patterns, a colon and what is another for them: lr_scale=X, "
       "weight_decay=X (also of vectors), optimizer=NAME, frozen; groups separated by ';', such as "
       "'*.norm.*: weight_decay=0; head.*: lr_scale=0.5'; in a file [[optim.group]] with match")
      .field("FsdpOptions::parameters");
  t.add("optim.stochastic_rounding", c.optim.stochastic_rounding,
        "stochastic rounding of bf16 and f16 parameters, so that they follow the f32 "
        "masters on average");
  t.add("optim.clip", c.optim.clip, kNotNegative,
        "gradient clipping: largest norm of all gradients; 0: no clipping")
      .also("max_grad_norm max_norm grad_clip");
  t.add("optim.clip_p", c.optim.clip_p, {1, kInfinity},
        "p of the p-norm of gradients for clipping and the log; inf: the largest magnitude");
}

void add_fsdp(ConfigTable& t, Config& c) {
  dist::FsdpOptions& o = c.fsdp.options;
  const bool shards_parameters = o.strategy != dist::Strategy::kNoShard;
  t.add("fsdp.strategy", o.strategy,
        "sharding strategy: what of parameters, gradients and optimizer states is sharded "
        "over ranks")
      .also("zero_stage sharding_strategy");
  t.add("fsdp.shard_size", o.shard_size, {0, 1048576},
        "hybrid strategies: ranks in a shard group; 0: the ranks of a node")
      .needs(is_hybrid(o.strategy), "fsdp.strategy = hybrid_shard or hybrid_shard_zero2")
      .also("data_parallel_shard_degree");
  t.add("fsdp.wrap", c.fsdp.wrap,
        "wrap policy: the modules whose parameters form a unit, gathered together")
      .also("auto_wrap_policy");
  t.add("fsdp.wrap_every", c.fsdp.wrap_every, {1, 10000}, "wrap every_n_blocks: blocks in a unit")
      .needs(c.fsdp.wrap == Wrap::kEveryNBlocks, "fsdp.wrap = every_n_blocks");
  t.add("fsdp.min_num_params", c.fsdp.min_num_params, at_least(1),
        "wrap min_num_params: parameters from which a module is a unit")
      .needs(c.fsdp.wrap == Wrap::kMinNumParams, "fsdp.wrap = min_num_params");
  t.add("fsdp.wrap_class", c.fsdp.wrap_class,
        "wrap class: classes of modules that are a unit each, as the tree at the start of a run "
        "names them, such as Attention,SwiGlu")
      .needs(c.fsdp.wrap == Wrap::kClass, "fsdp.wrap = class")
      .also("transformer_layer_cls_to_wrap");
  t.add("fsdp.sync_every_micro_batch", o.sync_every_micro_batch, "auto",
        "gradient reduction in accumulation: true: over all ranks after each pass; shard: "
        "inside shard groups; false: after the last pass only; auto: by the strategy");
  t.add("fsdp.gradient_pieces", o.gradient_pieces,
        "gradients of an embedding and a head that are larger than any block's are computed and "
        "reduced in pieces: less memory, a head's logits computed again")
      .needs(o.sync_every_micro_batch != dist::GradSync::kLast &&
                 (o.sync_every_micro_batch || o.strategy != dist::Strategy::kShardOptim) &&
                 o.offload != dist::Offload::kParamsAndOptimizer,
             "fsdp.sync_every_micro_batch = true or shard, and gradients on the device");
  t.add_text(
       "fsdp.reshard_after_forward",
       {"auto", "true", "false", "2", "3", "4", "6", "8", "12", "16", "32", "64"},
       [&o] { return reshard_text(o.reshard_after_forward); },
       [&o](const std::string& text) { o.reshard_after_forward = reshard_from_text(text); },
       "freeing of gathered parameters after forward; true, false: as the strategy says; g: "
       "keep 1/g of each unit and gather it from g ranks in backward")
      .also("fsdp_reshard_after_forward");
  t.add("fsdp.prefetch_forward", o.prefetch_forward, {0, 1024},
        "units that are gathered ahead of the one that computes, in forward")
      .needs(shards_parameters, "a strategy that shards parameters");
  t.add("fsdp.prefetch_backward", o.prefetch_backward, {0, 1024},
        "units that are gathered ahead of the one that computes, in backward")
      .needs(shards_parameters, "a strategy that shards parameters");
  t.add("fsdp.offload", o.offload,
        "shards kept in host memory: optimizer states and masters, or parameters and "
        "gradients too")
      .also("enable_cpu_offload");
  t.add("fsdp.communicators", o.communicators, {1, 2},
        "communicators of a rank; 2: all-gather and reduce-scatter overlap; 1: one after the "
        "other");
  t.add("fsdp.wire_dtype", o.precision.wire_dtype, "same",
        "dtype of gradients on the wire, which are summed in f32; same: "
        "precision.reduce_dtype");
  t.add("fsdp.ignored", c.fsdp.ignored,
        "parameters that every rank keeps whole and nobody trains, such as \"embed.*\": "
        "names, * for any characters, separated by commas");
}

void add_precision(ConfigTable& t, Config& c) {
  using dist::LossScaling;
  PrecisionConfig& p = c.precision;
  dist::PrecisionOptions& o = c.fsdp.options.precision;
  const bool is_low = p.param_dtype != kF32;
  t.add("precision.param_dtype", p.param_dtype, "auto",
        "dtype of gathered parameters and activations (masters are f32); auto: bf16 on cuda, "
        "f32 on cpu, on a resume that of the checkpoint")
      .also("bf16 fp16 mixed_precision_param dtype");
  t.add("precision.reduce_dtype", o.reduce_dtype, "dtype of gradients that are reduced over ranks")
      .also("mixed_precision_reduce");
  t.add("precision.output_dtype", o.output_dtype, "same",
        "dtype of the model's outputs (losses stay f32); same: as computed");
  t.add("precision.buffer_dtype", o.buffer_dtype, "same",
        "dtype to which the slopes of ALiBi are rounded; same: f32")
      .needs(c.model.selected().family().has_alibi, "a model with ALiBi");
  t.add("precision.cast_forward_inputs", o.cast_forward_inputs,
        "casts the floating-point inputs of a unit to param_dtype")
      .needs(is_low, "precision.param_dtype = bf16 or f16");
  t.add("precision.norm_fp32", o.norm_fp32, "norm parameters stay f32 beside bf16 and f16")
      .needs(is_low, "precision.param_dtype = bf16 or f16");
  t.add("precision.loss_scale", p.loss_scale, "auto",
        "loss scaling, which keeps small gradients in range; steps that overflow are skipped; "
        "auto: dynamic for f16");
  t.add("precision.loss_scale_init", p.scaler.init, {0, 16777216, true, false},
        "loss scale at the start, best a power of two")
      .field("LossScaleOptions::init")
      .needs(loss_scaling(p) != LossScaling::kNone,
             "precision.loss_scale = static or dynamic, or precision.param_dtype = f16");
  t.add("precision.loss_scale_interval", p.scaler.rule.interval, at_least(1),
        "loss_scale dynamic: finite steps until the scale doubles")
      .field("LossScaleRule::interval")
      .needs(loss_scaling(p) == LossScaling::kDynamic,
             "precision.loss_scale = dynamic, or precision.param_dtype = f16");
}

void add_memory(ConfigTable& t, Config& c) {
  t.add("recompute.policy", c.recompute.kind,
        "activation recompute (checkpointing): blocks whose activations are computed again in "
        "backward; selective: only norms and activation functions, of all blocks")
      .also("gradient_checkpointing activation_checkpoint")
      .field("RecomputePolicy::kind");
  t.add("recompute.every_n", c.recompute.every, at_least(1),
        "policy every_n: every n-th block is recomputed")
      .needs(c.recompute.kind == nn::RecomputePolicy::Kind::kEveryN, "recompute.policy = every_n")
      .also("selective_ac_option");
  t.add("recompute.offload", c.recompute.offload,
        "inputs of recomputed blocks are kept in host memory until backward and copied while other "
        "blocks compute: two are on the device at a time; on cpu, a second pool of the same memory")
      .needs(c.recompute.applies_to(0), "recompute.policy = full or every_n")
      .also("activation_offloading activations_checkpoint_offload");
  t.add(
       "recompute.mlp_tile", c.recompute.mlp_tile, at_least(0),
       "tokens for which MLPs compute at a time, in forward and again in backward, keeping nothing "
       "as wide as model.ffn; gradients of their weights add up in another order; 0: all at once")
      .field("RecomputePolicy::mlp_tile")
      .also("tiled_mlp use_tiled_mlp");

  add_nbytes(t, "memory.limit", c.runtime.memory_limit,
             "device memory that a rank may allocate, such as \"2GiB\"; none: no limit")
      .of_one_rank();
  add_nbytes(t, "memory.split", c.runtime.memory_split,
             "allocator: smallest remainder for which a cached block is split, else it is used "
             "whole: more leaves fewer fragments and wastes more inside blocks");
  t.add("memory.empty_cache_every", c.memory.empty_cache_every, at_least(0),
        "steps after which cached memory is returned to the system, which waits for the "
        "device; 0: never");
}

void add_output(ConfigTable& t, Config& c) {
  t.add("output.dir", c.output.dir, "directory for metrics, status, configuration and model")
      .one_line()
      .also("output_dir dump_folder out_dir");
  t.add("output.overwrite", c.output.overwrite,
        "starts anew although a run is in output.dir, whose model, metrics and checkpoints "
        "are then removed; not stored")
      .not_stored()
      .also("overwrite_output_dir");
  t.add("output.tensorboard", c.output.tensorboard,
        "also writes an event file of TensorBoard into output.dir: all of metrics.jsonl, the "
        "configuration, the sample")
      .also("report_to enable_tensorboard tensorboard_dir logging_dir");
  t.add("output.unit_norms", c.output.unit_norms,
        "gradient norm of each unit in each line of metrics.jsonl");
  t.add("output.peak_tflops", c.output.peak_tflops, kNotNegative,
        "peak TFLOP/s of one rank's device, for MFU in the log; 0: no MFU")
      .of_one_rank();
}

void add_checkpoint(ConfigTable& t, Config& c) {
  CheckpointConfig& k = c.checkpoint;
  t.add("checkpoint.every", k.every, at_least(0),
        "steps from one checkpoint to the next; 0: none by steps")
      .also("save_steps save_interval");
  t.add(
       "checkpoint.per_epoch", k.per_epoch, at_least(0),
       "checkpoints an epoch, each after the step that completes a part of it; 0: checkpoint.every "
       "alone")
      .also("saves_per_epoch");
  t.add("checkpoint.every_minutes", k.every_minutes, kNotNegative,
        "wall-clock minutes after a checkpoint until the next, if none came by steps; 0: none "
        "by time");
  t.add("checkpoint.last", k.last, "saves a checkpoint after the last step");
  t.add("checkpoint.keep", k.keep, at_least(1), "number of newest checkpoints that are kept")
      .also("save_total_limit keep_latest_k");
  t.add("checkpoint.best", k.best,
        "keeps the checkpoint with the lowest validation loss and, with checkpoint.every, "
        "saves after each evaluation that is the best so far");
  t.add("checkpoint.dir", k.dir, "directory for checkpoints; empty: output.dir").one_line();
  t.add("checkpoint.on_error", k.on_error,
        "a checkpoint that cannot be written: warn and go on, or stop the run");
  t.add("checkpoint.max_errors", k.max_errors, at_least(0),
        "on_error warn: failed checkpoints in a row that end the run; 0: no limit")
      .needs(k.on_error == OnError::kWarn, "checkpoint.on_error = warn");
  t.add("checkpoint.resume", k.resume,
        "(also --resume) none; auto: from the newest whole checkpoint, or, without one, from that "
        "which the run there began with, else from the start; or the path of a checkpoint")
      .one_line()
      .expects("auto, none or the path of a checkpoint")
      .also("resume_from_checkpoint");
  t.add("checkpoint.resume_override", k.resume_override,
        "(also --resume.override) resume although data, seed, batch or other settings are not "
        "those of the checkpoint")
      .needs(k.resume != "none", "checkpoint.resume (--resume)");
  t.add("checkpoint.resume_skip_unreadable", k.resume_skip_unreadable,
        "(also --resume.skip_unreadable) auto passes over checkpoints that cannot be read (of "
        "a newer version, with a file missing) and leaves them alone, instead of ending");
}

void add_guard(ConfigTable& t, Config& c) {
  GuardConfig& g = c.guard;
  const bool is_on = g.spike != SpikeAction::kOff;
  t.add("guard.max_skips", g.max_skips, at_least(0),
        "skipped steps in a row (non-finite loss or gradient norm) before the run stops");
  t.add("guard.first_steps", g.first_steps, at_least(0),
        "steps of a run after which it warns of a loss that stays flat and of parameters (or "
        "groups of them) without gradient or that do not change; 0: never")
      .needs(g.first_steps <= c.train.steps, "guard.first_steps <= train.steps");
  t.add("guard.spike", g.spike,
        "a step whose loss is far above the last ones: skip changes nothing, rewind goes back "
        "to a copy in memory and on with later data; the host waits for each step");
  t.add("guard.spike_z", g.spike_z, kPositive,
        "guard.spike: standard deviations above the mean from which a loss is a spike")
      .needs(is_on, "guard.spike = skip or rewind");
  t.add("guard.spike_window", g.spike_window, {2, 1e6},
        "guard.spike: last losses that a loss is compared with")
      .needs(is_on, "guard.spike = skip or rewind");
  t.add("guard.max_spikes", g.max_spikes, at_least(0),
        "guard.spike: spikes in a row before the run stops")
      .needs(is_on, "guard.spike = skip or rewind");
  t.add("guard.snapshot_every", g.snapshot_every, at_least(1),
        "guard.spike rewind: steps from one copy of the state in memory to the next")
      .needs(g.spike == SpikeAction::kRewind, "guard.spike = rewind");
  t.add("guard.replica_every", g.state.replica_every, at_least(0),
        "steps from one comparison of what replicas hold to the next; one that differs ends "
        "the run with status 5 and is named; 0: none");
  t.add("guard.state_checksum", g.state.checks_state,
        "each step, checks that nothing has changed parameters and optimizer states since the "
        "last update; takes two more passes over them");
}

void add_libraries(ConfigTable& t, Config& c, bool is_cuda) {
  t.add("kernels.attention", c.runtime.backends.attention,
        "attention backend on CUDA: this project's kernels (bitwise repeatable), cuDNN where "
        "it takes the problem, or the faster of both, timed after the first step by rank 0")
      .needs(is_cuda, "device = cuda");
  t.add("kernels.gemm", c.runtime.backends.gemm,
        "GEMM backend on CUDA: cuBLASLt where it is installed, this project's kernel, or "
        "cuBLASLt and an error without it")
      .needs(is_cuda, "device = cuda");
  t.add("kernels.gemm_tf32", c.runtime.backends.gemm_tf32,
        "cuBLASLt may round the operands of f32 GEMMs to TF32, which has 10 bits of fraction: "
        "up to 8 times as fast")
      .also("tf32")
      .needs(is_cuda && c.runtime.backends.gemm != GemmBackend::kOwn,
             "device = cuda and kernels.gemm = auto or cublaslt");
  t.add("kernels.tuning_file", c.kernels.tuning_file,
        "file of the fastest algorithms of cuBLASLt, with fused or separate epilogues, by device, "
        "library and shape: rank 0 times what is not in it after the step that meets it, and all "
        "ranks use its choices; runs with the same file repeat each other bit by bit; empty: "
        "cuBLASLt's first proposal")
      .needs(is_cuda && c.runtime.backends.gemm != GemmBackend::kOwn,
             "device = cuda and kernels.gemm = auto or cublaslt");

  t.add("dist.timeout", c.dist.timeout, {0.001, 1e9},
        "seconds until a collective that is not complete counts as hung")
      .also("ddp_timeout");
  t.add("dist.nccl_reduce", c.runtime.backends.nccl.native_reduce_scatter, {"tree", "nccl"},
        "gradient sums on CUDA: this project's fixed tree over ranks, or NCCL in an order of "
        "its own")
      .needs(is_cuda, "device = cuda");
  t.add("dist.nccl_max_ctas", c.runtime.backends.nccl.max_ctas, {0, 64},
        "thread blocks (CTAs) that a NCCL communicator may use at once; 0: NCCL's choice")
      .needs(is_cuda, "device = cuda");
  t.add("dist.single_process", c.dist.single_process,
        "this process is meant to be alone, although a launcher that MPI does not know says "
        "that it started several");
}

void add_profile(ConfigTable& t, Config& c) {
  ProfileConfig& p = c.profile;
  t.add("profile.steps", p.steps,
        "steps such as 10..13 of which a timeline of all ranks and streams is written, and printed "
        "what took their time and what to change; empty: none")
      .one_line();
  t.add("profile.trace", p.trace,
        "file of the timeline (Chrome trace, opens in Perfetto); empty: trace.json in output.dir")
      .one_line()
      .needs(!p.steps.empty(), "profile.steps");
}

void add_debug(ConfigTable& t, Config& c, bool is_cuda) {
  DebugConfig& d = c.debug;
  t.add("debug.poison", c.runtime.poison, "fills freed memory with NaN");
  t.add("debug.order_check", c.runtime.order_check,
        "checks that events order all accesses of streams to the same memory");
  t.add("debug.dist", d.dist, "logs each collective as it starts").of_one_rank();
  t.add("debug.nan", d.nan,
        "names the first operation, module and unit whose output or gradient is not finite, and "
        "parameters that are not: before the first step, and after each update");
  t.add("debug.nan_step", d.nan_step, at_least(0),
        "fault injection: step whose loss becomes NaN; 0: none")
      .needs(d.nan_step <= c.train.steps, "debug.nan_step <= train.steps");
  t.add("debug.nan_rank", d.nan_rank, {0, 1048576},
        "fault injection: rank whose loss becomes NaN at debug.nan_step")
      .needs(d.nan_step > 0, "debug.nan_step > 0");
  t.add("debug.flip_step", d.flip_step, at_least(0),
        "fault injection: step before which a bit of a parameter flips; 0: none");
  t.add("debug.flip_rank", d.flip_rank, {0, 1048576},
        "fault injection: rank whose parameter changes at debug.flip_step");
  t.add("debug.slow_rank", d.slow_rank, {0, 1048576},
        "fault injection: rank that sleeps debug.slow_ms in each step");
  t.add("debug.slow_ms", d.slow_ms, {0, 1e6},
        "fault injection: milliseconds that debug.slow_rank sleeps in each step");
  t.add("debug.slow_data_ms", d.slow_data_ms, {0, 1e6},
        "fault injection: milliseconds that a rank's batch of a pass takes longer to read");
  t.add("debug.slow_link_us", d.slow_link_us, {0, 1e9},
        "fault injection: microseconds that each collective of the CPU takes longer")
      .needs(!is_cuda, "device = cpu");
  t.add("debug.exposed_units", d.exposed_units, at_least(0),
        "units in each line of metrics.jsonl whose collectives compute waited for longest");
}

}  // namespace

std::deque<Field> config_fields(Config& c, bool is_cuda) {
  ConfigTable t;
  // What another value means to a resume, of the rows since the last call that do not say it.
  auto resume_as = [&, begin = size_t{0}](ResumeKind kind) mutable {
    for (; begin < t.rows().size(); ++begin) {
      Field& row = t.rows()[begin];
      if (!row.resume) row.resume = kind;
    }
  };
  add_general(t, c);
  resume_as(ResumeKind::kFree);
  add_model(t, c);
  add_lora(t, c);
  resume_as(ResumeKind::kIdentity);
  add_data(t, c);
  add_train(t, c, is_cuda);
  add_eval(t, c);
  add_dpo(t, c);
  add_sample(t, c);
  resume_as(ResumeKind::kFree);
  add_optim(t, c);
  resume_as(ResumeKind::kSchedule);
  add_fsdp(t, c);
  add_precision(t, c);
  add_memory(t, c);
  add_output(t, c);
  add_checkpoint(t, c);
  add_guard(t, c);
  add_libraries(t, c, is_cuda);
  add_profile(t, c);
  add_debug(t, c, is_cuda);
  resume_as(ResumeKind::kFree);
  return std::move(t.rows());
}

std::string key_of_option(std::string_view option) {
  const size_t colons = option.find("::");
  const std::string_view name =
      colons == std::string_view::npos ? std::string_view() : option.substr(colons + 2);
  Config config;
  std::string key;
  for (const Field& field : config_fields(config)) {
    if (!field.option.empty() && field.option == option) return std::string(field.key);
    const bool has_name = field.key.substr(field.key.rfind('.') + 1) == name;
    if (field.option.empty() && has_name && key.empty()) key = field.key;
  }
  return key;
}

std::vector<std::pair<std::string, SettingValue>> given_settings(const Config& config) {
  Config copy = config;
  std::vector<std::pair<std::string, SettingValue>> given;
  for (const Field& field : config_fields(copy)) {
    if (config.is_given(field.key)) given.emplace_back(field.key, field.get());
  }
  return given;
}

std::string in_keys(const Config& config, const std::string& message) {
  const size_t colons = message.find("::"), end = message.find(": ");
  if (colons == std::string::npos || end == std::string::npos || colons > end) return message;
  const std::string key = key_of_option(std::string_view(message).substr(0, end));
  if (key.empty()) return message;
  return fmt::format("{}: {}{}", config.origin(key), key, message.substr(end));
}

}  // namespace tessera::apps
