#include "test/fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "apps/config.h"
#include "apps/config_table.h"
#include "apps/data.h"
#include "apps/run_dir.h"
#include "apps/text/pretokenize.h"
#include "apps/text/tokenizer.h"
#include "core/check.h"
#include "core/formats/safetensors.h"
#include "core/utf8.h"
#include "dist/checkpoint/manifest.h"
#include "nn/hf/config.h"

namespace tessera::fuzz {
namespace {
volatile unsigned sink;
}  // namespace

std::string as_file(std::string_view bytes) {
  static int fd = -1;
  if (fd >= 0) ::close(fd);
  fd = ::memfd_create("input", MFD_CLOEXEC);
  if (fd < 0 || ::write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    std::abort();
  }
  return "/proc/self/fd/" + std::to_string(fd);
}

void touch(const void* data, int64_t nbytes) {
  unsigned sum = 0;
  for (int64_t i = 0; i < nbytes; ++i) sum += static_cast<const unsigned char*>(data)[i];
  sink = sum;
}

namespace {

void run_safetensors(std::string_view bytes) {
  const SafetensorsFile file(as_file(bytes));
  int64_t total = 0;
  for (const SafetensorsEntry& entry : file.entries()) {
    touch(file.data(entry), entry.nbytes());
    total += entry.nbytes();
    if (&file.find(entry.name) != &entry) std::abort();
  }
  if (total > static_cast<int64_t>(bytes.size())) std::abort();
}

std::vector<std::string> seeds_safetensors() {
  std::vector<std::string> seeds;
  for (const int count : {0, 1, 5, 60}) {
    std::vector<SafetensorsEntry> entries;
    int64_t nbytes = 0;
    for (int i = 0; i < count; ++i) {
      const DType dtype = i % 3 == 0 ? kF32 : i % 3 == 1 ? kBF16 : kI64;
      entries.push_back({"blocks." + std::to_string(i) + ".weight", dtype, Shape{i % 4, 3, 2}});
      nbytes += entries.back().nbytes();
    }
    seeds.push_back(safetensors_header(entries, {{"format", "pt"}}) +
                    std::string(static_cast<size_t>(nbytes), 'x'));
  }
  return seeds;
}

void run_manifest(std::string_view bytes) {
  const dist::Manifest manifest = dist::parse_manifest("manifest.json", bytes);
  // What was taken is written and read to the same text.
  const std::string text = dist::to_json(manifest);
  if (dist::to_json(dist::parse_manifest("manifest.json", text)) != text) std::abort();
}

std::vector<std::string> seeds_manifest() {
  std::vector<std::string> seeds;
  for (const int64_t num_ranks : {1, 3, 40}) {
    dist::Manifest manifest;
    manifest.project_version = "1.0";
    manifest.run = "0123456789abcdef";
    manifest.world_size = num_ranks;
    manifest.progress.val_loss = 1.5;
    manifest.progress.config = "[model]\nlayers = 2\n";
    std::vector<dist::RankRecord> records;
    for (int64_t r = 0; r < num_ranks; ++r) {
      dist::RankRecord record;
      record.file = {dist::rank_file_name(r), 1000 + r, 77};
      record.slices.push_back({"parameters/w", kF32, {num_ranks, 8}, r * 8, r * 8 + 8, 5});
      if (r == 0) record.slices.push_back({"optimizer/step_count", kI64, {}, 0, 1, 6});
      records.push_back(record);
    }
    dist::add_records(manifest, records);
    seeds.push_back(dist::to_json(manifest));
    // Without a hash of its own, as it was once, mutations come further.
    std::string first = seeds.back();
    first.resize(first.rfind(",\n \"xxh64\""));
    first += "\n}\n";
    first[first.find("\"version\": ") + 11] = '1';
    seeds.push_back(first);
  }
  return seeds;
}

void run_hf_config(std::string_view bytes) {
  nn::parse_hf_config("config.json", bytes);
  nn::parse_hf_token_ids("config.json", bytes);
}

std::vector<std::string> seeds_hf_config() {
  return {
      R"({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257,
 "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": null,
 "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "resid_pdrop": 0.1})",
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
 "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 131072,
 "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": false,
 "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
 "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "attention_bias": false})",
      R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 100,
 "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-06,
 "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": true})",
      R"({"architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 100,
 "hidden_size": 32, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-05})"};
}

void run_token_shard(std::string_view bytes) {
  const apps::TokenArray tokens = apps::load_token_shard(as_file(bytes));
  int64_t sum = 0;
  for (int64_t i = 0; i < tokens.num_tokens(); ++i) sum += tokens[i];
  sink = static_cast<unsigned>(sum);
}

std::vector<std::string> seeds_token_shard() {
  std::vector<std::string> seeds;
  for (const bool is_wide : {false, true}) {
    for (const int32_t count : {0, 1, 700}) {
      int32_t header[256] = {is_wide ? 20240801 : 20240520, is_wide ? 7 : 1, count};
      std::string bytes(reinterpret_cast<const char*>(header), sizeof(header));
      for (int32_t i = 0; i < count * (is_wide ? 4 : 2); ++i) bytes += static_cast<char>(i * 7);
      seeds.push_back(bytes);
    }
  }
  return seeds;
}

/// What a tokenizer gives for a text are tokens, the same from what it writes of itself.
void run_tokenizer(std::string_view bytes) {
  const auto tokenizer = text::parse_tokenizer(bytes, "tokenizer.json");
  const std::string written = tokenizer->to_json();
  const auto again = text::parse_tokenizer(written, "tokenizer.json");
  if (again->to_json() != written) std::abort();
  std::vector<int32_t> ids;
  if (tokenizer->name() == "byte" || tokenizer->name() == "char") {  // these know each of their ids
    for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) ids.push_back(id);
    if (tokenizer->encode(tokenizer->decode(ids)) != ids) std::abort();
    return;
  }
  for (const std::string_view text :
       {std::string_view(" Hello,  w\xc3\xb6rld's 1234th\n\n<s>[UNK]\xe2\x96\x81 \xf0\x9f\x98\x80"
                         "e\xcc\x81"),
        bytes.substr(0, 300)}) {
    const std::string valid = replace_invalid_utf8(text);
    try {
      ids = tokenizer->encode(valid, {.add_special_tokens = true});
    } catch (const InputError&) {
      continue;  // what the vocabulary lacks
    }
    for (const int32_t id : ids) {
      if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
    }
    if (again->encode(valid, {.add_special_tokens = true}) != ids) std::abort();
    sink = static_cast<unsigned>(tokenizer->decode(ids).size());
    const size_t cut = tokenizer->next_cut(valid, 1);
    if (cut < std::min<size_t>(1, valid.size()) || cut > valid.size()) std::abort();
  }
}

/// A text whose words are of the alphabet of small vocabularies, and what comes back.
void use_byte_level(const text::Tokenizer& tokenizer) {
  for (const std::string_view text : {"hello hell  ab\nabab", "caf\xc3\xa9 <|endoftext|>"}) {
    try {
      const std::vector<int32_t> ids = tokenizer.encode(text);
      for (const int32_t id : ids) {
        if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
      }
      sink = static_cast<unsigned>(tokenizer.decode(ids).size());
    } catch (const InputError&) {  // what the vocabulary lacks
    }
  }
}

/// GPT-2's vocab.bpe, and its encoder.json behind a zero.
void run_merges(std::string_view bytes) {
  const size_t zero = std::min(bytes.find('\0'), bytes.size());
  use_byte_level(*text::parse_gpt2(bytes.substr(0, zero),
                                   bytes.substr(std::min(zero + 1, bytes.size())), "vocab.bpe"));
}

std::vector<std::string> seeds_merges() {
  return {"#version: 0.2\nh e\nl l\nhe ll\nhell o\n\xc4\xa0 hell\n",
          std::string("a b\nab ab\n") + '\0' +
              R"({"a": 0, "b": 1, "ab": 2, "abab": 3, "<|endoftext|>": 4})"};
}

/// Ranks of tiktoken.
void run_ranks(std::string_view bytes) {
  use_byte_level(*text::parse_tiktoken(bytes, text::pattern_by_name("gpt4"),
                                       {{"<|endoftext|>", 300}}, "ranks"));
}

std::vector<std::string> seeds_ranks() {
  return {"YQ== 0\nYg== 1\nYw== 2\nYWI= 3\nYWJj 4\nYmM= 5\n", "aA== 0\nZQ== 1\nbA== 2\naGVs 3\n"};
}

std::vector<std::string> seeds_tokenizer() {
  return {
      text::make_byte_tokenizer()->to_json(),
      text::make_char_tokenizer("a few of them\n\xc3\xa9\xe2\x82\xac")->to_json(),
      text::make_char_tokenizer("Helo, wrd1")->hf_files().at("tokenizer.json"),
      // GPT-2's kind, with tokens of its own.
      R"({"version": "1.0", "added_tokens": [{"id": 8, "content": "<s>", "special": true,
 "normalized": false, "lstrip": true, "rstrip": true, "single_word": false}],
 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
 "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}},
 {"Sequence": {"id": "A"}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [8]}}},
 "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "unk_token": null, "vocab":
 {"H": 0, "e": 1, "l": 2, "o": 3, "\u0120": 4, "ll": 5, "ello": 6, "ell": 7},
 "merges": [["l", "l"], "e ll", ["ell", "o"]]}})",
      // SentencePiece's.
      R"({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
 {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}, "pre_tokenizer": null,
 "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"},
 "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ",
 "start": 1, "stop": 0}]}, "model": {"type": "BPE", "unk_token": "[UNK]", "fuse_unk": true,
 "byte_fallback": true, "vocab": {"[UNK]": 0, "<0x0A>": 1, "\u2581": 2, "H": 3, "e": 4, "\u2581H": 5},
 "merges": ["\u2581 H"]}})",
      // BERT's.
      R"({"normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
 "strip_accents": null, "lowercase": true}, "pre_tokenizer": {"type": "Sequence", "pretokenizers":
 [{"type": "BertPreTokenizer"}, {"type": "Digits", "individual_digits": true}]},
 "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true}, "model": {"type": "WordPiece",
 "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 20,
 "vocab": {"[UNK]": 0, "hel": 1, "##lo": 2, "1": 3}}})",
      // A regular expression that is not one of the known.
      R"({"normalizer": {"type": "NFKC"}, "pre_tokenizer": {"type": "Split", "pattern":
 {"Regex": "(?i:[a-z]+)|\\p{N}{1,2}|\\s+(?!\\S)|[^\\s\\p{L}]"}, "behavior": "MergedWithNext",
 "invert": false}, "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "Hello": 1}}})"};
}

/// run.json, run.lock and status.json: what does not say what they do is none, never an error.
void run_run(std::string_view bytes) {
  sink = static_cast<unsigned>(apps::parse_run(bytes).size());
  const auto status = apps::parse_status(bytes);
  if (!status) throw InputError("no status");
  if (status->step < 0 || status->pid < 0) std::abort();
}

std::vector<std::string> seeds_run() {
  return {
      R"({"state":"running","step":12,"why":"","time":"2026-11-30T04:05:06Z","host":"a","pid":99})",
      R"({"state":"failed","step":7,"why":"loss is \"NaN\"","loss":2.5,"host":"a","pid":1})",
      R"({"state":"finished","run":"0123456789abcdef"})"};
}

void run_config(std::string_view bytes) {
  const apps::Config config = apps::parse_config(bytes, "config.toml");
  // What was taken is written and read to the same text.
  const std::string text = apps::dump_config(config);
  if (apps::dump_config(apps::parse_config(text, "config.toml")) != text) std::abort();
}

std::vector<std::string> seeds_config() {
  apps::Config config;
  config.data.text = "a.txt";
  return {apps::dump_config(config),
          "data.text = \"a.txt\"\n[model]\nlayers = 3 # three\nkind = 'gpt2'\n[optim]\nlr = 1e-3\n"
          "name = \"\"\"\nsgd\"\"\"\n",
          "data = { tokens = \"[x]/*.bin\" }\nmodel.vocab = 1_000\n[train]\nsteps = 0x10\n"};
}

std::vector<std::string> words_config() {
  apps::Config config;
  std::vector<std::string> words = {
      "true",   "false", "nan",     "inf",         "1e999", "0x7fffffffffffffff",
      "[[",     "]]",    "{",       "}",           " = ",   ".",
      "\"\"\"", "'''",   "\\u0000", "\\U0010ffff", "# ",    "1979-05-27"};
  for (const apps::Field& field : apps::config_fields(config)) {
    words.emplace_back(field.key);
    for (const std::string_view choice : field.choices) words.emplace_back(choice);
  }
  return words;
}

std::vector<std::string> words_safetensors() {
  return {"__metadata__", R"("dtype")", R"("shape")", R"("data_offsets")", R"("F32")",
          R"("BF16")",    R"("I8")",    "[0,0]",      R"("format")"};
}

std::vector<std::string> words_manifest() {
  return {R"("format")",      R"("version")", R"("sequence")", R"("run")",    R"("world_size")",
          R"("progress")",    R"("step")",    R"("files")",    R"("name")",   R"("nbytes")",
          R"("tensors")",     R"("dtype")",   R"("shape")",    R"("slices")", R"("begin")",
          R"("end")",         R"("xxh64")",   R"("config")",   R"("file")",   "tessera checkpoint",
          R"("next_sample")", R"("seed")"};
}

std::vector<std::string> words_hf_config() {
  return {R"("architectures")",
          R"("model_type")",
          R"("vocab_size")",
          R"("num_hidden_layers")",
          R"("num_attention_heads")",
          R"("num_key_value_heads")",
          R"("head_dim")",
          R"("rope_scaling")",
          R"("rope_parameters")",
          R"("rope_type")",
          R"("factor")",
          R"("sliding_window")",
          R"("use_sliding_window")",
          R"("layer_types")",
          R"("tie_word_embeddings")",
          R"("eos_token_id")",
          R"("quantization_config")",
          R"("logits_scaling")",
          "NaN",
          "-Infinity",
          R"("LlamaForCausalLM")",
          R"("MistralForCausalLM")",
          R"("full_attention")"};
}

std::vector<std::string> words_tokenizer() {
  std::vector<std::string> words = {R"("\u0000")", R"("\ud83d\ude00")", R"("\ud83d")", "[]",
                                    "{}",          R"("\\p{L}+")",      R"("(a*)*b")"};
  for (const char* word : {"type",
                           "byte",
                           "char",
                           "chars",
                           "model",
                           "vocab",
                           "merges",
                           "added_tokens",
                           "content",
                           "special",
                           "normalized",
                           "lstrip",
                           "normalizer",
                           "normalizers",
                           "NFC",
                           "NFKD",
                           "Lowercase",
                           "Strip",
                           "StripAccents",
                           "Prepend",
                           "Replace",
                           "pattern",
                           "Regex",
                           "String",
                           "BertNormalizer",
                           "pre_tokenizer",
                           "pretokenizers",
                           "Sequence",
                           "ByteLevel",
                           "Metaspace",
                           "replacement",
                           "prepend_scheme",
                           "first",
                           "Split",
                           "behavior",
                           "Removed",
                           "Contiguous",
                           "invert",
                           "Digits",
                           "Punctuation",
                           "Whitespace",
                           "WhitespaceSplit",
                           "CharDelimiterSplit",
                           "FixedLength",
                           "length",
                           "decoder",
                           "decoders",
                           "ByteFallback",
                           "Fuse",
                           "BPEDecoder",
                           "suffix",
                           "WordPiece",
                           "WordLevel",
                           "BPE",
                           "unk_token",
                           "byte_fallback",
                           "ignore_merges",
                           "continuing_subword_prefix",
                           "end_of_word_suffix",
                           "post_processor",
                           "TemplateProcessing",
                           "BertProcessing",
                           "special_tokens"}) {
    words.push_back('"' + std::string(word) + '"');
  }
  return words;
}

std::vector<std::string> words_merges() {
  return {"#version", " ", "\n", "\r\n", "h e", "he l", "\xc4\xa0", "<|endoftext|>", "a b\nab c\n"};
}

std::vector<std::string> words_ranks() {
  return {"YQ==", "YWI=", "YWJj", "=", " 0\n", " 1\n", "\n", "AA==", "/w==", "\r\n"};
}

std::vector<std::string> words_run() {
  return {R"("state")",     R"("running")", R"("failed")", R"("finished")",
          R"("preempted")", R"("step")",    R"("why")",    R"("loss")",
          R"("host")",      R"("pid")",     R"("run")",    R"("time")"};
}

std::vector<std::string> words_token_shard() {
  const auto word = [](int32_t value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  return {word(20240520), word(20240801), word(1), word(7), word(-1), word(INT32_MAX)};
}

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all = [] {
    std::vector<Target> list = {
        {"safetensors", run_safetensors, seeds_safetensors, words_safetensors},
        {"manifest", run_manifest, seeds_manifest, words_manifest},
        {"hf_config", run_hf_config, seeds_hf_config, words_hf_config},
        {"token_shard", run_token_shard, seeds_token_shard, words_token_shard},
        // A cache of words has a MiB.
        {"tokenizer", run_tokenizer, seeds_tokenizer, words_tokenizer, 2 << 20},
        {"merges", run_merges, seeds_merges, words_merges, 2 << 20},
        {"ranks", run_ranks, seeds_ranks, words_ranks, 2 << 20},
        {"run", run_run, seeds_run, words_run},
        {"config", run_config, seeds_config, words_config},
    };
    for (const Target& target : data_targets()) list.push_back(target);
    for (const Target& target : chat_targets()) list.push_back(target);
    return list;
  }();
  return all;
}

bool accepts(const Target& target, std::string_view bytes) {
  try {
    target.run(bytes);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace tessera::fuzz
