#include "test/fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "apps/data.h"
#include "core/check.h"
#include "dist/checkpoint/hf_config.h"
#include "dist/checkpoint/manifest.h"
#include "dist/checkpoint/safetensors.h"

namespace tessera::fuzz {
namespace {

/// The bytes as a file; its path. The next call replaces it.
std::string as_file(std::string_view bytes) {
  static int fd = -1;
  if (fd >= 0) ::close(fd);
  fd = ::memfd_create("input", MFD_CLOEXEC);
  if (fd < 0 || ::write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    std::abort();
  }
  return "/proc/self/fd/" + std::to_string(fd);
}

volatile unsigned sink;

/// Reads every byte, so that a range outside of the file is found.
void touch(const void* data, int64_t nbytes) {
  unsigned sum = 0;
  for (int64_t i = 0; i < nbytes; ++i) sum += static_cast<const unsigned char*>(data)[i];
  sink = sum;
}

void run_safetensors(std::string_view bytes) {
  const dist::SafetensorsFile file(as_file(bytes));
  int64_t total = 0;
  for (const dist::SafetensorsEntry& entry : file.entries()) {
    touch(file.data(entry), entry.nbytes());
    total += entry.nbytes();
    if (&file.find(entry.name) != &entry) std::abort();
  }
  if (total > static_cast<int64_t>(bytes.size())) std::abort();
}

std::vector<std::string> seeds_safetensors() {
  std::vector<std::string> seeds;
  for (const int count : {0, 1, 5, 60}) {
    std::vector<dist::SafetensorsEntry> entries;
    int64_t nbytes = 0;
    for (int i = 0; i < count; ++i) {
      const DType dtype = i % 3 == 0 ? kF32 : i % 3 == 1 ? kBF16 : kI64;
      entries.push_back({"blocks." + std::to_string(i) + ".weight", dtype, Shape{i % 4, 3, 2}});
      nbytes += entries.back().nbytes();
    }
    seeds.push_back(dist::safetensors_header(entries, {{"format", "pt"}}) +
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
  dist::parse_hf_config("config.json", bytes);
  dist::parse_hf_token_ids("config.json", bytes);
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

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all = {
      {"safetensors", run_safetensors, seeds_safetensors},
      {"manifest", run_manifest, seeds_manifest},
      {"hf_config", run_hf_config, seeds_hf_config},
      {"token_shard", run_token_shard, seeds_token_shard},
  };
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
