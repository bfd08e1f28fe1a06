#include "test/nn/llama2c.h"

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

namespace tessera::testing {
namespace {

/// Floats of a file, taken from front to back.
class Reader {
 public:
  Reader(std::string path, const std::vector<char>& bytes, size_t offset)
      : path_(std::move(path)), bytes_(bytes), offset_(offset) {}

  std::vector<float> take(int64_t numel) {
    const size_t nbytes = static_cast<size_t>(numel) * sizeof(float);
    TESSERA_CHECK_AS(InputError, nbytes <= bytes_.size() - offset_,
                     "llama2c: {} ends after {} bytes, expected more than {}", path_, bytes_.size(),
                     offset_ + nbytes);
    std::vector<float> values(static_cast<size_t>(numel));
    std::memcpy(values.data(), bytes_.data() + offset_, nbytes);
    offset_ += nbytes;
    return values;
  }
  void expect_end() const {
    TESSERA_CHECK_AS(InputError, offset_ == bytes_.size(), "llama2c: {} has {} bytes, expected {}",
                     path_, bytes_.size(), offset_);
  }

 private:
  std::string path_;
  const std::vector<char>& bytes_;
  size_t offset_;
};

/// Writes values to rows [first_row, ...) of a parameter, counted in its leading dimension.
void fill(nn::Module& model, const std::string& name, const std::vector<float>& values,
          int64_t first_row = 0) {
  const Tensor whole = model.parameter(name).tensor.detach();
  const int64_t row_numel = whole.numel() / whole.dim(0);
  const int64_t num_rows = static_cast<int64_t>(values.size()) / row_numel;
  Tensor rows = whole.narrow(0, first_row, num_rows);
  rows.copy_(from_values(std::span<const float>(values), rows.shape()));
}

}  // namespace

std::unique_ptr<nn::Llama> load_llama2c(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TESSERA_CHECK_AS(InputError, file.good(), "llama2c: cannot read {}", path);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::array<int32_t, 7> header{};
  TESSERA_CHECK_AS(InputError, bytes.size() >= sizeof(header),
                   "llama2c: {} has {} bytes, expected a header of {}", path, bytes.size(),
                   sizeof(header));
  std::memcpy(header.data(), bytes.data(), sizeof(header));
  for (size_t i = 0; i < header.size(); ++i) {
    const bool is_vocab = i == 5;
    TESSERA_CHECK_AS(InputError,
                     (header[i] > 0 && header[i] < (1 << 24)) ||
                         (is_vocab && header[i] < 0 && header[i] > -(1 << 24)),
                     "llama2c: {}: field {} of the header is {}", path, i, header[i]);
  }
  nn::LlamaConfig c;
  c.width = header[0];
  c.ffn_width = header[1];
  c.num_layers = header[2];
  c.num_heads = header[3];
  c.num_kv_heads = header[4];
  c.vocab_size = std::abs(header[5]);
  c.context_length = header[6];
  c.tied = header[5] > 0;
  c.rope.interleaved = true;
  auto model = std::make_unique<nn::Llama>(c);

  Reader reader(path, bytes, sizeof(header));
  const int64_t C = c.width, D = C / c.num_heads, HD = C, GD = c.num_kv_heads * D;
  fill(*model, "embed.weight", reader.take(c.vocab_size * C));
  const auto each_layer = [&](const char* name, int64_t numel, int64_t first_row) {
    for (int64_t layer = 0; layer < c.num_layers; ++layer) {
      fill(*model, fmt::format("blocks.{}.{}.weight", layer, name), reader.take(numel), first_row);
    }
  };
  each_layer("norm1", C, 0);
  each_layer("attn.qkv", HD * C, 0);
  each_layer("attn.qkv", GD * C, HD);
  each_layer("attn.qkv", GD * C, HD + GD);
  each_layer("attn.out", C * HD, 0);
  each_layer("norm2", C, 0);
  each_layer("mlp.gate_up", c.ffn_width * C, 0);
  each_layer("mlp.down", C * c.ffn_width, 0);
  each_layer("mlp.gate_up", c.ffn_width * C, c.ffn_width);
  fill(*model, "norm.weight", reader.take(C));
  reader.take(2 * c.context_length * (D / 2));
  if (!c.tied) fill(*model, "head.weight", reader.take(c.vocab_size * C));
  reader.expect_end();
  return model;
}

}  // namespace tessera::testing
