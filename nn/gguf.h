#pragma once

#include <cstdint>
#include <string>
#include <utility>
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
  void add_count(const std::string& key, int64_t count) { add(key, static_cast<uint32_t>(count)); }
  /// The sizes that configurations of all families have.
  template <class Config>
  void add_sizes(const Config& c, int64_t ffn_width) {
    add_count("vocab_size", c.vocab_size);
    add_count("context_length", c.context_length);
    add_count("embedding_length", c.width);
    add_count("block_count", c.num_layers);
    add_count("feed_forward_length", ffn_width);
    add_count("attention.head_count", c.num_heads);
  }
};

/// The blocks of models with LayerNorm, packed projections and biases: "blk.0.attn_qkv.weight" from
/// blocks.0.attn.qkv.weight, and so on.
void add_gguf_blocks(HfParameterList& all, int64_t num_layers, int64_t width, int64_t ffn_width);
/// What stands behind the blocks: the last norm, and a head of its own.
void add_gguf_end(HfParameterList& all, int64_t width, bool norm_has_bias, bool is_tied,
                  int64_t vocab_size);

}  // namespace tessera::nn
