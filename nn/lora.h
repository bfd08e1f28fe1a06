#pragma once

#include <string>
#include <vector>

#include "kernels/lora/lora.h"
#include "nn/module.h"

// Low-rank adaptation (LoRA; Hu et al. 2021, arXiv:2106.09685): a frozen linear layer and a small
// trained product beside it,
//   y = x W^T + scale (dropout(x) A^T) B^T,   scale = alpha / rank, or alpha / sqrt(rank)
// with A [rank, in] uniform in +-1 / sqrt(in) and B [out, rank] zero at the start, as peft has it.
//
//   nn::add_lora(model, {.targets = "q_proj,v_proj", .rank = 16, .alpha = 32});   // or "all-linear"
//   auto fsdp = dist::fully_shard(model, world, options);

namespace tessera::nn {

class Linear;

/// Which layers get adapters, and of what kind.
struct LoraOptions {
  /// Linear layers, separated by commas: a name, or the end of one behind a dot ("q_proj",
  /// "mlp.down"), or a pattern (core/glob.h) of whole names. Of a model of a family (family.h) both
  /// its names here and those of transformers count; the layers that are packed here are apart
  /// there, and have adapters of their own. "all-linear": all but the head.
  std::string targets;
  int64_t rank = 8;
  double alpha = 8;
  bool rslora = false;  ///< scale = alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732)
  double dropout = 0;   ///< probability, of the adapters' input
  /// Modules that are trained whole beside the adapters, named like `targets`.
  std::string modules_to_save = {};

  double scale() const;
};

/// Rows [first, first + count) of a linear layer's weight, which one adapter changes.
struct LoraPart {
  std::string name;  ///< of the layer, or of what transformers calls that part of it
  LoraColumns rows;
};

/// The adapters of one linear layer, next to each other: rows [p rank, (p + 1) rank) of A and the
/// rows of B that follow those of part p - 1 are part p's. They read the same input with the same
/// mask of dropout. A child "lora" of the layer.
class Lora : public Module {
 public:
  /// Parts in order of their rows.
  Lora(int64_t num_inputs, DType dtype, std::vector<LoraPart> parts, const LoraOptions& options);

  /// y + scale (dropout(x) A^T) B^T in the memory of y, see `lora_add_`.
  Tensor forward(const Tensor& y, const Tensor& x);

  std::string kind() const override;
  const std::vector<LoraPart>& parts() const { return parts_; }
  int64_t rank() const { return options_.rank; }
  double scale() const { return options_.scale(); }

 private:
  std::vector<LoraPart> parts_;
  LoraOptions options_;
  std::vector<LoraColumns> columns_;
  Tensor &a_, &b_;
};

/// While one lives on this thread, linear layers leave their adapters out: the model is the one that
/// they were added to, but for modules_to_save. Error where a forward would be recorded for backward.
class LoraOff {
 public:
  LoraOff();
  ~LoraOff();
  LoraOff(const LoraOff&) = delete;
  LoraOff& operator=(const LoraOff&) = delete;
  static bool is_active();
};

/// Adds adapters to linear layers of `root` and freezes all that is neither theirs nor of
/// `modules_to_save`. Before `fully_shard`. Adapters of layers that have bytes get theirs and their
/// values, by (seed, full name, element).
/// Errors   ConfigError "LoraOptions::targets: ..." for a name that no linear layer has, a layer
///          that has adapters or is sharded; the same of the other options if they are out of range
///          or name no module
void add_lora(Module& root, const LoraOptions& options, uint64_t seed = 0);

/// A linear layer of a model, and what transformers has it in; of a layer that transformers does not
/// know itself, under its name here.
struct LoraLayer {
  std::string name;
  Linear* linear;
  std::vector<LoraPart> parts;  ///< in order of their rows
};
/// All linear layers below `root`, with adapters or without.
std::vector<LoraLayer> lora_layers(Module& root);

/// Whether a parameter is that of an adapter.
bool is_lora(const NamedParameter& parameter);

}  // namespace tessera::nn
