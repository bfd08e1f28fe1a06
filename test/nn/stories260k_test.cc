// A pretrained model against figures of an f64 implementation. The files are not part of the
// project: TESSERA_STORIES260K names a folder with stories260K.bin and reference.json.

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/autograd.h"
#include "nn/generate.h"
#include "test/golden/golden.h"
#include "test/nn/llama2c.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

/// The folder with the files, or empty.
std::string stories_folder() {
  const char* const folder = std::getenv("TESSERA_STORIES260K");
  if (folder == nullptr) return "";
  const bool has_both = fs::exists(fs::path(folder) / "stories260K.bin") &&
                        fs::exists(fs::path(folder) / "reference.json");
  return has_both ? folder : "";
}

nlohmann::json read_reference(const std::string& folder) {
  std::ifstream file(folder + "/reference.json");
  return nlohmann::json::parse(file);
}

/// True, with a line that says so, if the files are missing.
bool is_skipped() {
  if (!stories_folder().empty()) return false;
  WARN("skipped: TESSERA_STORIES260K names no folder with stories260K.bin and reference.json");
  return true;
}

TEST_CASE("stories260K: the mean NLL of the reference text", "[stories260k]") {
  if (is_skipped()) return;
  const auto reference = read_reference(stories_folder());
  const auto model = load_llama2c(stories_folder() + "/stories260K.bin");
  const std::vector<int32_t> text = reference["text_ids"];
  const auto T = static_cast<int64_t>(text.size()) - 1;
  const Tensor ids_BT = from_values(std::span(text).first(static_cast<size_t>(T)), {1, T});
  const Tensor targets_BT = from_values(std::span(text).subspan(1), {1, T});
  NoGrad no_grad;
  const LossSum loss = model->loss(ids_BT, targets_BT);
  CHECK(loss.count.item() == T);
  const double mean_nll = loss.sum.item() / static_cast<double>(T);
  CAPTURE(mean_nll);
  CHECK(std::abs(mean_nll - reference["text_mean_nll_float64"].get<double>()) < 1e-5);

  const std::vector<double> expected = reference["logits_pos0_first8"];
  const std::vector<double> logits = model->logits(ids_BT).to_vector();
  check_close(std::vector<double>(logits.begin(), logits.begin() + 8), expected, 1e-5, "logits");
}

TEST_CASE("stories260K: 200 greedy tokens", "[stories260k]") {
  if (is_skipped()) return;
  const auto reference = read_reference(stories_folder());
  const auto model = load_llama2c(stories_folder() + "/stories260K.bin");
  const std::vector<int32_t> expected = reference["greedy_ids_200"];
  nn::GenerateOptions options;
  options.num_tokens = static_cast<int64_t>(expected.size()) - 1;
  options.sampling.temperature = 0;
  std::vector<int32_t> text = nn::generate(*model, std::span(expected).first(1), options);
  text.insert(text.begin(), expected[0]);
  CHECK(text == expected);
}

TEST_CASE("stories260K: 500 greedy tokens of transformers", "[stories260k]") {
  if (is_skipped()) return;
  const auto model = load_llama2c(stories_folder() + "/stories260K.bin");
  std::ifstream file(golden_dir() + "/stories_greedy.json");
  const std::vector<int32_t> expected = nlohmann::json::parse(file)["greedy_ids"];
  REQUIRE(expected.size() == 501);
  nn::GenerateOptions options;
  options.num_tokens = 500;
  options.sampling.temperature = 0;
  std::vector<int32_t> text = nn::generate(*model, std::span(expected).first(1), options);
  text.insert(text.begin(), expected[0]);
  CHECK(text == expected);
}

/// Writes a file of the format for a model with one layer.
std::string write_model(int32_t vocab, size_t num_extra_floats) {
  const std::string path =
      (fs::temp_directory_path() / fmt::format("tessera_llama2c_{}.bin", ::getpid())).string();
  const int32_t C = 4, F = 6, H = 2, G = 1, D = 2, T = 3;
  const int32_t header[] = {C, F, 1, H, G, vocab, T};
  const int32_t numel =
      std::abs(vocab) * C + C + H * D * C + 2 * G * D * C + C * H * D + C + 3 * F * C + C + T * D;
  std::vector<float> values(static_cast<size_t>(numel) + num_extra_floats);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(header), sizeof(header));
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(float)));
  return path;
}

TEST_CASE("llama2c: every weight comes from its place in the file", "[stories260k]") {
  const std::string path = write_model(-5, 5 * 4);
  const auto model = load_llama2c(path);
  const auto first = [&](const std::string& name, int64_t row = 0) {
    const Tensor& tensor = model->parameter(name).tensor;
    const int64_t row_numel = tensor.numel() / tensor.dim(0);
    return tensor.to_vector()[static_cast<size_t>(row * row_numel)];
  };
  CHECK(first("embed.weight") == 0);
  CHECK(first("blocks.0.norm1.weight") == 20);
  CHECK(first("blocks.0.attn.qkv.weight", 0) == 24);
  CHECK(first("blocks.0.attn.qkv.weight", 4) == 40);
  CHECK(first("blocks.0.attn.qkv.weight", 6) == 48);
  CHECK(first("blocks.0.attn.out.weight") == 56);
  CHECK(first("blocks.0.norm2.weight") == 72);
  CHECK(first("blocks.0.mlp.gate_up.weight", 0) == 76);
  CHECK(first("blocks.0.mlp.down.weight") == 100);
  CHECK(first("blocks.0.mlp.gate_up.weight", 6) == 124);
  CHECK(first("norm.weight") == 148);
  CHECK(first("head.weight") == 158);
  CHECK_FALSE(model->config().tied);
  CHECK(load_llama2c(write_model(5, 0))->config().tied);
  fs::remove(path);
}

TEST_CASE("llama2c: damaged files are named", "[stories260k]") {
  CHECK(error_of([] {
          load_llama2c("/nowhere/x.bin");
        }).starts_with("llama2c: cannot read /nowhere/x.bin"));
  const std::string path = write_model(5, 1);
  CHECK(error_of([&] { load_llama2c(path); }).find("bytes, expected ") != std::string::npos);
  fs::resize_file(path, fs::file_size(path) - 8);
  CHECK(error_of([&] { load_llama2c(path); }).find(" ends after ") != std::string::npos);
  fs::resize_file(path, 27);
  CHECK(error_of([&] { load_llama2c(path); }).find("has 27 bytes, expected a header of 28") !=
        std::string::npos);
  write_model(0, 0);
  CHECK(error_of([&] { load_llama2c(path); }).find("field 5 of the header is 0") !=
        std::string::npos);
  fs::remove(path);
}

}  // namespace
}  // namespace tessera::testing
