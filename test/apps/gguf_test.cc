#include "core/formats/gguf.h"

#include <cstring>
#include <filesystem>
#include <numbers>

#include "apps/text/gguf_tokenizer.h"
#include "apps/text/tokenizer.h"
#include "apps/text/train.h"
#include "dist/checkpoint/gguf.h"
#include "dist/checkpoint/huggingface.h"
#include "nn/bert/bert.h"
#include "nn/llama/llama.h"
#include "test/golden/golden.h"
#include "test/temp_dir.h"
#include "test/testing.h"

// Models in the form of llama.cpp: the format, which tensor is which, and tokenizers.

using namespace tessera;
using tessera::testing::error_of;
using tessera::testing::read_file;
using tessera::testing::TempDir;

namespace {

/// A file taken apart by the letter of the format.
class View {
 public:
  struct Tensor {
    std::vector<uint64_t> sizes;
    uint32_t type = 0;
    uint64_t offset = 0;
  };

  explicit View(const std::string& path) : bytes_(read_file(path)) {
    REQUIRE(bytes_.substr(0, 4) == "GGUF");
    at_ = 4;
    REQUIRE(next<uint32_t>() == 3);
    const auto num_tensors = next<uint64_t>(), num_fields = next<uint64_t>();
    for (uint64_t i = 0; i < num_fields; ++i) {
      const std::string key = text();
      fields[key] = value(next<uint32_t>());
    }
    for (uint64_t i = 0; i < num_tensors; ++i) {
      const std::string name = text();
      Tensor tensor;
      for (auto dims = next<uint32_t>(); dims > 0; --dims) tensor.sizes.push_back(next<uint64_t>());
      tensor.type = next<uint32_t>(), tensor.offset = next<uint64_t>();
      CHECK(tensor.offset % 32 == 0);
      tensors[name] = tensor;
    }
    first_ = (at_ + 31) / 32 * 32;
  }

  std::vector<float> values(const std::string& name) const {
    INFO(name);
    REQUIRE(tensors.count(name) == 1);
    const Tensor& tensor = tensors.at(name);
    REQUIRE(tensor.type == 0);
    size_t count = 1;
    for (const uint64_t size : tensor.sizes) count *= size;
    std::vector<float> out(count);
    REQUIRE(first_ + tensor.offset + 4 * count <= bytes_.size());
    std::memcpy(out.data(), bytes_.data() + first_ + tensor.offset, 4 * count);
    return out;
  }

  std::map<std::string, std::string> fields;  // arrays as their elements, separated by |
  std::map<std::string, Tensor> tensors;

 private:
  template <class T>
  T next() {
    T value;
    REQUIRE(at_ + sizeof value <= bytes_.size());
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string text() {
    const auto size = next<uint64_t>();
    REQUIRE(at_ + size <= bytes_.size());
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }
  std::string value(uint32_t type) {
    switch (type) {
      case 4:
        return std::to_string(next<uint32_t>());
      case 5:
        return std::to_string(next<int32_t>());
      case 6:
        return fmt::format("{}", next<float>());
      case 7:
        return next<bool>() ? "true" : "false";
      case 8:
        return text();
      default: {
        REQUIRE(type == 9);
        const auto of = next<uint32_t>();
        std::string all;
        const auto count = next<uint64_t>();
        for (uint64_t i = 0; i < count; ++i) all += (i > 0 ? "|" : "") + value(of);
        return all;
      }
    }
  }

  std::string bytes_;
  size_t at_ = 0, first_ = 0;
};

std::string hf_folder(const std::string& family) {
  return testing::golden_dir() + "/hf/" + family;
}

/// The golden model of a family, written for llama.cpp.
View exported(const std::string& family, const TempDir& dir) {
  const dist::HfReader reader(hf_folder(family));
  dist::GgufExport writer(dir / family, reader.config());
  copy_parameters(reader, writer);
  return View(dir / family + "/model.gguf");
}

/// A tensor of the golden model as transformers stores it.
std::vector<float> stored(const std::string& family, const std::string& name) {
  const SafetensorsFile file(hf_folder(family) + "/model.safetensors");
  std::vector<float> values(static_cast<size_t>(file.shape_of(name).numel()));
  file.read(name, 0, std::ssize(values), values.data());
  return values;
}

}  // namespace

TEST_CASE("gguf: fields, tensors and their places are where the format has them", "[gguf]") {
  const TempDir dir;
  const std::string path = dir / "x.gguf";
  {
    GgufWriter writer(path,
                      {{"a", uint32_t{7}},
                       {"b", 1.5f},
                       {"c", true},
                       {"d", std::string("text")},
                       {"e", std::vector<int32_t>{1, -2}},
                       {"f", std::vector<float>{0.5f}},
                       {"g", std::vector<std::string>{"x", "", "yz"}}},
                      {{"m", kF32, {2, 3}}, {"h", kF16, {5}}, {"n", kBF16, {1}}, {"v", kF32, {1}}});
    const float m[] = {1, 2, 3, 4, 5, 6}, v = 9;
    const uint16_t h[5] = {}, n = 0;
    writer.write("v", &v, sizeof v);
    writer.write("m", m, sizeof m);
    CHECK_THAT(error_of([&] { writer.write("m", m, sizeof m); }),
               Catch::Contains("gguf: tensor m written twice"));
    CHECK_THAT(error_of([&] { writer.write("h", m, 4); }),
               Catch::Contains("gguf: tensor h of 4 bytes, expected 10"));
    CHECK_THAT(error_of([&] { writer.write("w", m, 4); }),
               Catch::Contains("gguf: no tensor w among 4"));
    CHECK_THAT(error_of([&] { writer.finish(); }),
               Catch::Contains("gguf: tensor h was not written"));
    writer.write("h", h, sizeof h);
    writer.write("n", &n, sizeof n);
    writer.finish();
  }
  const View view(path);
  CHECK(view.fields == std::map<std::string, std::string>{{"a", "7"},
                                                          {"b", "1.5"},
                                                          {"c", "true"},
                                                          {"d", "text"},
                                                          {"e", "1|-2"},
                                                          {"f", "0.5"},
                                                          {"g", "x||yz"}});
  CHECK(view.tensors.at("m").sizes == std::vector<uint64_t>{3, 2});
  CHECK(view.values("m") == std::vector<float>{1, 2, 3, 4, 5, 6});
  CHECK(view.values("v") == std::vector<float>{9});
  CHECK(view.tensors.at("h").type == 1);
  CHECK(view.tensors.at("n").type == 30);
  CHECK(std::filesystem::file_size(path) % 32 == 0);
  CHECK_THAT(error_of([&] {
               GgufWriter(dir / "y", {}, {{std::string(64, 'x'), kF32, {1}}});
             }),
             Catch::Contains("has 64 bytes, expected at most 63"));
  CHECK_THAT(error_of([&] {
               GgufWriter(dir / "y", {}, {{"x", kI32, {1}}});
             }),
             Catch::Contains("gguf: tensor x of i32, expected f32, bf16 or f16"));
  { GgufWriter unfinished(dir / "z", {}, {{"x", kF32, {1}}}); }
  CHECK(!std::filesystem::exists(dir / "z"));
  CHECK(!std::filesystem::exists(dir / "z.tmp"));
}

TEST_CASE("gguf: Llama's queries and keys are in the order of neighbours, all else as it is",
          "[gguf]") {
  const TempDir dir;
  const View view = exported("llama2", dir);
  CHECK(view.fields.at("general.architecture") == "llama");
  const int64_t C = std::stoi(view.fields.at("llama.embedding_length"));
  const int64_t D = std::stoi(view.fields.at("llama.attention.key_length"));
  for (const auto& [theirs, hf] :
       {std::pair<std::string, std::string>{"attn_q", "q_proj"}, {"attn_k", "k_proj"}}) {
    const std::vector<float> found = view.values("blk.1." + theirs + ".weight");
    const std::vector<float> rows = stored("llama2", "model.layers.1.self_attn." + hf + ".weight");
    REQUIRE(found.size() == rows.size());
    const int64_t heads = std::ssize(rows) / (C * D);
    bool all = true;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < D / 2; ++i) {
        for (int64_t j = 0; j < 2; ++j) {
          for (int64_t c = 0; c < C; ++c) {
            all = all && found[static_cast<size_t>((h * D + 2 * i + j) * C + c)] ==
                             rows[static_cast<size_t>((h * D + j * D / 2 + i) * C + c)];
          }
        }
      }
    }
    CHECK(all);
  }
  for (const auto& [theirs, hf] :
       {std::pair<std::string, std::string>{"attn_v", "self_attn.v_proj"},
        {"attn_output", "self_attn.o_proj"},
        {"ffn_gate", "mlp.gate_proj"},
        {"ffn_up", "mlp.up_proj"},
        {"ffn_down", "mlp.down_proj"},
        {"attn_norm", "input_layernorm"},
        {"ffn_norm", "post_attention_layernorm"}}) {
    CHECK(view.values("blk.0." + theirs + ".weight") ==
          stored("llama2", "model.layers.0." + hf + ".weight"));
  }
  CHECK(view.values("token_embd.weight") == stored("llama2", "model.embed_tokens.weight"));
}

TEST_CASE("gguf: Qwen3 keeps its order and has norms of queries and keys", "[gguf]") {
  const TempDir dir;
  const View view = exported("qwen3", dir);
  CHECK(view.fields.at("general.architecture") == "qwen3");
  for (const auto& [theirs, hf] : {std::pair<std::string, std::string>{"attn_q", "q_proj"},
                                   {"attn_k", "k_proj"},
                                   {"attn_q_norm", "q_norm"},
                                   {"attn_k_norm", "k_norm"}}) {
    CHECK(view.values("blk.0." + theirs + ".weight") ==
          stored("qwen3", "model.layers.0.self_attn." + hf + ".weight"));
  }
}

TEST_CASE("gguf: GPT-2's matrices are rows of outputs, BLOOM's heads stand apart", "[gguf]") {
  const TempDir dir;
  const View gpt2 = exported("gpt2", dir);
  const std::vector<float> found = gpt2.values("blk.0.attn_qkv.weight");
  const std::vector<float> conv = stored("gpt2", "transformer.h.0.attn.c_attn.weight");
  const int64_t C = std::stoi(gpt2.fields.at("gpt2.embedding_length"));
  bool all = found.size() == conv.size();
  for (int64_t out = 0; all && out < 3 * C; ++out) {
    for (int64_t in = 0; in < C; ++in) {
      all = all &&
            found[static_cast<size_t>(out * C + in)] == conv[static_cast<size_t>(in * 3 * C + out)];
    }
  }
  CHECK(all);
  CHECK(gpt2.values("position_embd.weight") == stored("gpt2", "transformer.wpe.weight"));
  CHECK(gpt2.values("output_norm.bias") == stored("gpt2", "transformer.ln_f.bias"));

  const View bloom = exported("bloom", dir);
  const std::vector<float> bias = bloom.values("blk.0.attn_qkv.bias");
  const std::vector<float> packed =
      stored("bloom", "transformer.h.0.self_attention.query_key_value.bias");
  const int64_t heads = std::stoi(bloom.fields.at("bloom.attention.head_count"));
  const int64_t D = std::ssize(bias) / 3 / heads;
  all = bias.size() == packed.size();
  for (int64_t part = 0; all && part < 3; ++part) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < D; ++d) {
        all = all && bias[static_cast<size_t>((part * heads + h) * D + d)] ==
                         packed[static_cast<size_t>((h * 3 + part) * D + d)];
      }
    }
  }
  CHECK(all);
}

TEST_CASE("gguf: scaled positions are a tensor of divisors, as transformers computes them",
          "[gguf]") {
  nn::LlamaConfig c;
  c.vocab_size = 8, c.num_layers = 1, c.num_heads = c.num_kv_heads = 1, c.width = c.head_width = 8;
  c.ffn_width = 8;
  c.rope = {.theta = 10000,
            .scaling = RopeScaling::kLlama3,
            .factor = 8,
            .low_freq_factor = 1,
            .high_freq_factor = 4,
            .original_max_position = 1000};
  const nn::GgufModel model = nn::FamilyConfig(c).family().gguf(c);
  REQUIRE(model.constants.size() == 1);
  CHECK(model.constants[0].name == "rope_freqs.weight");
  // Wavelengths 2 pi 10^i: below 250 as they are, above 1000 divided by the factor, 628 between.
  const double smooth = (1000 / (200 * std::numbers::pi) - 1) / 3;
  const std::vector<double> expected = {1, 1, 1 / ((1 - smooth) / 8 + smooth), 8};
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(model.constants[0].values[i] == Approx(expected[i]).epsilon(1e-6));
  }
}

TEST_CASE("gguf: what llama.cpp computes otherwise is refused", "[gguf]") {
  const TempDir dir;
  const auto error = [&](const nn::FamilyConfig& config) {
    return error_of([&] { dist::GgufExport(dir / "x", config); });
  };
  nn::LlamaConfig c;
  c.window = 8, c.context_length = 64;
  CHECK_THAT(error(c), Catch::Contains("export: window 8 below the context of 64"));
  c.window = 0, c.attn_softcap = 30;
  CHECK_THAT(error(c), Catch::Contains("export: soft-caps of 30"));
  c.attn_softcap = 0, c.qk_norm = true, c.rope.scaling = RopeScaling::kLlama3;
  CHECK_THAT(error(c), Catch::Contains("export: rope_scaling llama3 with qk_norm"));
  CHECK(error(nn::BertConfig{}) == "export: llama.cpp has no model like bert");
  CHECK(!std::filesystem::exists(dir / "x"));
}

TEST_CASE("gguf: tokenizers over bytes have tokens, merges, types and the pattern's name",
          "[gguf]") {
  const auto train = [](const std::string& pattern) {
    text::BpeTrainer trainer({.vocab_size = 262, .pattern = pattern});
    trainer.add("low lower lowest low low");
    return trainer.train();
  };
  const std::unique_ptr<text::Tokenizer> tokenizer = train("qwen2");
  std::map<std::string, std::string> files = tokenizer->hf_files();
  const auto find = [](const GgufFields& fields, const std::string& key) -> const GgufValue* {
    for (const auto& [name, value] : fields) {
      if (name == key) return &value;
    }
    return nullptr;
  };
  const auto field = [&]<class T>(const GgufFields& fields, const std::string& key, T) {
    const GgufValue* const found = find(fields, key);
    INFO(key);
    REQUIRE(found != nullptr);
    return std::get<T>(*found);
  };
  const GgufFields fields = text::gguf_tokenizer(files, {{}, {0, 5}, {}}, 264);
  CHECK(field(fields, "tokenizer.ggml.model", std::string()) == "gpt2");
  CHECK(field(fields, "tokenizer.ggml.pre", std::string()) == "qwen2");
  const auto tokens = field(fields, "tokenizer.ggml.tokens", std::vector<std::string>());
  const auto types = field(fields, "tokenizer.ggml.token_type", std::vector<int32_t>());
  REQUIRE(tokens.size() == 264);
  for (int32_t id = 0; id < 262; ++id)
    CHECK(tokens[static_cast<size_t>(id)] == tokenizer->token(id));
  CHECK(types[0] == 3);  // <|endoftext|>
  CHECK(types[261] == 1);
  CHECK(types[263] == 5);
  CHECK(tokens[263] == "[PAD263]");
  const auto merges = field(fields, "tokenizer.ggml.merges", std::vector<std::string>());
  REQUIRE(merges.size() == 5);
  CHECK(merges[0] == "l o");
  CHECK(field(fields, "tokenizer.ggml.eos_token_id", uint32_t{}) == 0);
  CHECK(field(fields, "tokenizer.ggml.eot_token_id", uint32_t{}) == 5);
  CHECK(find(fields, "tokenizer.ggml.bos_token_id") == nullptr);
  CHECK(!field(fields, "tokenizer.ggml.add_bos_token", bool{}));
  // Without ids of the model, that of the token which usually ends a text.
  CHECK(field(text::gguf_tokenizer(files, {}, 262), "tokenizer.ggml.eos_token_id", uint32_t{}) ==
        0);
  files["chat_template.jinja"] = "{{ messages }}";
  CHECK(field(text::gguf_tokenizer(files, {}, 262), "tokenizer.chat_template", std::string()) ==
        "{{ messages }}");
  CHECK_THAT(error_of([&] { text::gguf_tokenizer(files, {}, 261); }),
             Catch::Contains("has id 261, the model's vocabulary is 261"));

  const auto bytes = text::make_byte_tokenizer()->hf_files();
  CHECK(field(text::gguf_tokenizer(bytes, {}, 256), "tokenizer.ggml.merges",
              std::vector<std::string>())
            .empty());
  const auto chars = text::make_char_tokenizer("abc")->hf_files();
  CHECK(field(text::gguf_tokenizer(chars, {}, 3), "tokenizer.ggml.model", std::string()) == "none");
  const auto own = train(R"(\S+|\s+)")->hf_files();
  CHECK_THAT(error_of([&] { text::gguf_tokenizer(own, {}, 262); }),
             Catch::Contains("llama.cpp has no tokenizer like this one: words are cut by a pattern "
                             "of its own"));
}

TEST_CASE("gguf: BPE with a fallback to bytes has scores by the rank of merges", "[gguf]") {
  const std::string json = R"({"normalizer": {"type": "Sequence", "normalizers": [
      {"type": "Prepend", "prepend": "▁"},
      {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
    "pre_tokenizer": null, "added_tokens": [
      {"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "<s>", "special": true}],
    "post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
      "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
    "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab":
      {"<unk>": 0, "<s>": 1, "<0x41>": 2, "a": 3, "b": 4, "▁": 5, "ab": 6, "▁ab": 7},
      "merges": ["a b", "▁ ab"]}})";
  const GgufFields fields = text::gguf_tokenizer({{"tokenizer.json", json}}, {}, 8);
  std::map<std::string, GgufValue> by_key(fields.begin(), fields.end());
  CHECK(std::get<std::string>(by_key.at("tokenizer.ggml.model")) == "llama");
  CHECK(std::get<std::vector<float>>(by_key.at("tokenizer.ggml.scores")) ==
        std::vector<float>{0, 0, 0, 0, 0, 0, -1, -2});
  CHECK(std::get<std::vector<int32_t>>(by_key.at("tokenizer.ggml.token_type")) ==
        std::vector<int32_t>{2, 3, 6, 1, 1, 1, 1, 1});
  CHECK(std::get<bool>(by_key.at("tokenizer.ggml.add_bos_token")));
  CHECK(std::get<bool>(by_key.at("tokenizer.ggml.add_space_prefix")));
  CHECK(std::get<uint32_t>(by_key.at("tokenizer.ggml.bos_token_id")) == 1);
}
