#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <variant>
#include <vector>

#include "nn/gpt2/gpt2.h"
#include "nn/llama/llama.h"
#include "optim/adamw.h"

// Golden curves (test/golden/README.md) for tests on one rank or several.

namespace tessera::testing {

struct GoldenParameter {
  std::string name;
  Shape shape;
  std::vector<float> initial;
  std::vector<float> grad;  ///< at step 0, before clipping
};

/// One case. Its loss is the mean over the targets that count, of the whole batch.
struct Golden {
  std::variant<nn::Gpt2Config, nn::LlamaConfig> config;
  int64_t num_steps = 0, batch = 0, num_tokens = 0;
  double beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, clip = 0;
  std::vector<double> lr, loss, grad_norm;         ///< by step
  std::vector<GoldenParameter> parameters;         ///< in the order of `named_parameters`
  std::vector<std::vector<int32_t>> ids, targets;  ///< by step, row after row; -100 is ignored

  /// The model of `config`, not yet with the initial weights.
  std::unique_ptr<nn::LanguageModel> make_model() const;
  /// Of the optimizer, but for the learning rates.
  optim::AdamWOptions adamw_options() const;
  /// Writes the initial weights into the parameters, which have bytes.
  void load_initial(nn::Module& model) const;
  const GoldenParameter& parameter(const std::string& name) const;

  /// Rows [first_row, first_row + num_rows) of a step, i32 [num_rows, num_tokens].
  Tensor ids_BT(int64_t step, int64_t first_row, int64_t num_rows) const;
  Tensor targets_BT(int64_t step, int64_t first_row, int64_t num_rows) const;
  /// Targets of the whole step that count.
  int64_t num_valid(int64_t step) const;
};

/// A curve of FSDP2 on several ranks with the model, tokens and learning rates of "llama": each
/// step's rows are dealt pass by pass, rank by rank.
struct Fsdp2Run {
  int world_size = 0, grad_accum_steps = 0;
  DType param_dtype = kF32;
  std::vector<double> loss, grad_norm;  ///< by step
};
std::vector<Fsdp2Run> load_fsdp2_runs();

/// As `uniform` in common.py: values in [0, 1) that the name alone gives, the same bits.
std::vector<double> uniform(const std::string& name, int64_t numel);

/// The folder in the source tree.
std::string golden_dir();

/// The integers of rows of the same length, i32 [rows, length].
Tensor rows_of(const nlohmann::json& rows);

/// Reads a case ("gpt2", "llama", "qwen") from the folder of the source tree.
Golden load_golden(const std::string& name);

}  // namespace tessera::testing
