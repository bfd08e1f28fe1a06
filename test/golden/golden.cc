#include "test/golden/golden.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/random.h"

namespace tessera::testing {

std::vector<double> uniform(const std::string& name, int64_t numel) {
  std::vector<double> values(static_cast<size_t>(numel));
  const uint64_t hash = hash_name(name);
  for (size_t i = 0; i < values.size(); ++i) {
    uint64_t z = hash + i * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z = z ^ (z >> 31);
    values[i] = static_cast<double>(z >> 40) * 0x1p-24;
  }
  return values;
}

namespace {

using nlohmann::json;

/// As `initial` in common.py: the same bits.
std::vector<float> initial(const std::string& name, const Shape& shape, double stddev) {
  std::vector<float> values;
  const bool is_vector = shape.num_dims() == 1;
  const double scale = is_vector ? 0.2 : stddev * std::sqrt(12.0);
  const double center = is_vector && name.ends_with("weight") ? 1.0 : 0.0;
  for (const double value : uniform(name, shape.numel())) {
    values.push_back(static_cast<float>((value - 0.5) * scale + center));
  }
  return values;
}

std::variant<nn::Gpt2Config, nn::LlamaConfig> config_from(const json& c) {
  if (c["kind"] == "gpt2") {
    nn::Gpt2Config config;
    config.vocab_size = c["vocab_size"];
    config.context_length = c["context_length"];
    config.num_layers = c["num_layers"];
    config.num_heads = c["num_heads"];
    config.width = c["width"];
    config.ffn_width = c["ffn_width"];
    return config;
  }
  nn::LlamaConfig config;
  config.vocab_size = c["vocab_size"];
  config.context_length = c["context_length"];
  config.num_layers = c["num_layers"];
  config.num_heads = c["num_heads"];
  config.num_kv_heads = c["num_kv_heads"];
  config.width = c["width"];
  config.head_width = c["head_width"];
  config.ffn_width = c["ffn_width"];
  config.tied = c["tied"];
  config.qkv_bias = c["qkv_bias"];
  config.qk_norm = c["qk_norm"];
  config.norm_eps = c["norm_eps"];
  config.rope.theta = c["rope_theta"];
  return config;
}

Tensor rows_of(const std::vector<int32_t>& batch, int64_t num_tokens, int64_t first_row,
               int64_t num_rows) {
  const auto rows = std::span<const int32_t>(batch).subspan(
      static_cast<size_t>(first_row * num_tokens), static_cast<size_t>(num_rows * num_tokens));
  return from_values(rows, {num_rows, num_tokens});
}

}  // namespace

Golden load_golden(const std::string& name) {
  const std::string path = std::string(TESSERA_GOLDEN_DIR) + "/" + name;
  std::ifstream text(path + ".json"), grads(path + ".grads.bin", std::ios::binary);
  TESSERA_CHECK_AS(InputError, text.good() && grads.good(), "golden: cannot read {}.*", path);
  const json j = json::parse(text);
  Golden golden;
  golden.config = config_from(j["config"]);
  golden.num_tokens = j["config"]["num_tokens"];
  const json& optimizer = j["optimizer"];
  golden.beta1 = optimizer["beta1"];
  golden.beta2 = optimizer["beta2"];
  golden.eps = optimizer["eps"];
  golden.weight_decay = optimizer["weight_decay"];
  golden.clip = optimizer["clip"];
  j["lr"].get_to(golden.lr);
  j["loss"].get_to(golden.loss);
  j["grad_norm"].get_to(golden.grad_norm);
  j["ids"].get_to(golden.ids);
  j["targets"].get_to(golden.targets);
  golden.num_steps = static_cast<int64_t>(golden.loss.size());
  golden.batch = static_cast<int64_t>(golden.ids[0].size()) / golden.num_tokens;
  for (const json& p : j["parameters"]) {
    GoldenParameter parameter;
    parameter.name = p["name"];
    parameter.shape = Shape(std::span<const int64_t>(p["shape"].get<std::vector<int64_t>>()));
    parameter.initial = initial(parameter.name, parameter.shape, j["init_stddev"]);
    parameter.grad.resize(parameter.initial.size());
    grads.read(reinterpret_cast<char*>(parameter.grad.data()),
               static_cast<std::streamsize>(parameter.grad.size() * sizeof(float)));
    TESSERA_CHECK_AS(InputError, grads.good(), "golden: {}.grads.bin is too short", path);
    golden.parameters.push_back(std::move(parameter));
  }
  TESSERA_CHECK_AS(InputError, grads.peek() == std::ifstream::traits_type::eof(),
                   "golden: {}.grads.bin is too long", path);
  return golden;
}

std::vector<Fsdp2Run> load_fsdp2_runs() {
  const std::string path = std::string(TESSERA_GOLDEN_DIR) + "/fsdp2.json";
  std::ifstream text(path);
  TESSERA_CHECK_AS(InputError, text.good(), "golden: cannot read {}", path);
  std::vector<Fsdp2Run> runs;
  const json all = json::parse(text);
  for (const json& j : all["runs"]) {
    Fsdp2Run& run = runs.emplace_back();
    run.world_size = j["world"];
    run.grad_accum_steps = j["grad_accum_steps"];
    run.param_dtype = j["param_dtype"] == "bf16" ? kBF16 : kF32;
    j["loss"].get_to(run.loss);
    j["grad_norm"].get_to(run.grad_norm);
  }
  return runs;
}

std::unique_ptr<nn::LanguageModel> Golden::make_model() const {
  if (const auto* gpt2 = std::get_if<nn::Gpt2Config>(&config)) {
    return std::make_unique<nn::Gpt2>(*gpt2);
  }
  return std::make_unique<nn::Llama>(std::get<nn::LlamaConfig>(config));
}

optim::AdamWOptions Golden::adamw_options() const {
  optim::AdamWOptions options;
  options.beta1 = beta1;
  options.beta2 = beta2;
  options.eps = eps;
  options.weight_decay = static_cast<float>(weight_decay);
  return options;
}

void Golden::load_initial(nn::Module& model) const {
  for (const nn::NamedParameter& entry : model.named_parameters()) {
    const GoldenParameter& source = parameter(entry.name);
    Tensor target = entry.parameter->tensor.detach();
    target.copy_(from_values(std::span<const float>(source.initial), source.shape));
  }
}

const GoldenParameter& Golden::parameter(const std::string& name) const {
  const auto found = std::find_if(parameters.begin(), parameters.end(),
                                  [&](const GoldenParameter& p) { return p.name == name; });
  TESSERA_CHECK_AS(InputError, found != parameters.end(), "golden: no parameter '{}'", name);
  return *found;
}

Tensor Golden::ids_BT(int64_t step, int64_t first_row, int64_t num_rows) const {
  return rows_of(ids[static_cast<size_t>(step)], num_tokens, first_row, num_rows);
}

Tensor Golden::targets_BT(int64_t step, int64_t first_row, int64_t num_rows) const {
  return rows_of(targets[static_cast<size_t>(step)], num_tokens, first_row, num_rows);
}

int64_t Golden::num_valid(int64_t step) const {
  const std::vector<int32_t>& row = targets[static_cast<size_t>(step)];
  return static_cast<int64_t>(row.size()) - std::count(row.begin(), row.end(), -100);
}

Tensor rows_of(const nlohmann::json& rows) {
  std::vector<int32_t> values;
  for (const auto& row : rows) {
    for (const auto& value : row) values.push_back(value);
  }
  const auto num_rows = static_cast<int64_t>(rows.size());
  return from_values(std::span<const int32_t>(values),
                     {num_rows, static_cast<int64_t>(values.size()) / num_rows});
}

std::string golden_dir() {
  return TESSERA_GOLDEN_DIR;
}

}  // namespace tessera::testing
