#include "nn/gguf.h"

#include <fmt/format.h>

namespace tessera::nn {

void add_gguf_blocks(HfParameterList& all, int64_t num_layers, int64_t width, int64_t ffn_width) {
  for (int64_t i = 0; i < num_layers; ++i) {
    const std::string ours = fmt::format("blocks.{}.", i), theirs = fmt::format("blk.{}.", i);
    const auto linear = [&](const char* name, const char* gguf_name, int64_t rows, int64_t cols) {
      all.matrix(ours + name + ".weight", cols, {{theirs + gguf_name + ".weight", rows}});
      all.vector(ours + name + ".bias", {{theirs + gguf_name + ".bias", rows}});
    };
    all.norm(ours + "norm1", theirs + "attn_norm", width, true);
    linear("attn.qkv", "attn_qkv", 3 * width, width);
    linear("attn.out", "attn_output", width, width);
    all.norm(ours + "norm2", theirs + "ffn_norm", width, true);
    linear("mlp.up", "ffn_up", ffn_width, width);
    linear("mlp.down", "ffn_down", width, ffn_width);
  }
}

void add_gguf_end(HfParameterList& all, int64_t width, bool norm_has_bias, bool is_tied,
                  int64_t vocab_size) {
  all.norm("norm", "output_norm", width, norm_has_bias);
  if (!is_tied) all.matrix("head.weight", width, {{"output.weight", vocab_size}});
}

}  // namespace tessera::nn
