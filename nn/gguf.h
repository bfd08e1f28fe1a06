#pragma once

#include <string>
#include <vector>

#include "core/formats/gguf.h"
#include "nn/hf/parameters.h"

// What llama.cpp calls the parts of a model: a family that it knows says it (FamilyTraits::gguf).

namespace tessera::nn {

/// A tensor that is not a parameter: what llama.cpp reads in place of a setting.
struct GgufConstant {
  std::string name;
  std::vector<float> values;
};

struct GgufModel {
  std::string architecture;
  GgufFields fields = {};                    ///< of the architecture
  std::vector<HfParameter> parameters = {};  ///< the tensors that ours become, by their names there
  std::vector<GgufConstant> constants = {};

  /// A field of the architecture, by the rest of its key.
  void add(const std::string& key, GgufValue value) {
    fields.emplace_back(architecture + "." + key, std::move(value));
  }
};

/// The blocks of models with LayerNorm, packed projections and biases: "blk.0.attn_qkv.weight" from
/// blocks.0.attn.qkv.weight, and so on.
void add_gguf_blocks(HfParameterList& all, int64_t num_layers, int64_t width, int64_t ffn_width);

}  // namespace tessera::nn
