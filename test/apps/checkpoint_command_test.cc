#include "apps/checkpoint_command.h"

#include <filesystem>

#include "apps/saved_model.h"
#include "apps/trainer.h"
#include "dist/checkpoint/huggingface.h"
#include "dist/checkpoint/reader.h"
#include "dist/comm/local.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::read_file;
using tessera::testing::TempDir;

namespace {

/// What the command prints; its status in `status`.
std::string output_of(const std::vector<std::string>& arguments, int* status = nullptr) {
  const TempDir dir;
  std::FILE* file = std::fopen((dir / "out").c_str(), "w");
  const int result = checkpoint_command(arguments, file);
  std::fclose(file);
  if (status != nullptr) *status = result;
  return read_file(dir / "out");
}

/// A short run of 2 ranks with checkpoints of steps 2 and 4.
void train_example(const TempDir& dir) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "line " + std::to_string(i) + " of a text\n";
  const Config config =
      load_config("", std::vector<std::string>{
                          "--data.text=" + dir.write("text", text), "--output.dir=" + dir / "out",
                          "--device=cpu", "--model.layers=1", "--model.heads=2", "--model.width=16",
                          "--model.context=16", "--train.steps=4", "--train.micro_batch=2",
                          "--train.log_every=1000", "--checkpoint.every=2"});
  dist::run_ranks(2, [&](dist::World& world) { train(config, world); });
}

}  // namespace

TEST_CASE("tessera-checkpoint: inspect, verify, export, reshard", "[checkpoint]") {
  const TempDir dir;
  train_example(dir);
  const std::string out = dir / "out";
  const std::string text = output_of({"inspect", out + "/latest"});
  CHECK(text.starts_with(out + "/step-00000004\nrun "));
  for (const char* part :
       {"written by 2 ranks", "step 4, 256 tokens, next sample 16, 4 samples a step", "2 files, ",
        "xxh64 as written", "rank-00001.safetensors  ", "parameters/embed.weight  f32 [256, 16]  ",
        "optimizer/step_count  i64 []  1 slices"}) {
    CHECK_THAT(text, Catch::Contains(part));
  }
  int status = -1;
  // Names out of files are shown, whatever they would do to a terminal.
  const std::string odd = dir / "odd\x1b[2J\nerror: forged";
  std::filesystem::create_directory(odd);
  std::filesystem::copy(out + "/step-00000004", odd + "/step-00000004");
  dist::Manifest manifest = dist::CheckpointReader(out + "/step-00000004").manifest();
  manifest.project_version = "a\x1b]0;run\x07\nerror: forged" + std::string(5000, 'r');
  dir.write("odd\x1b[2J\nerror: forged/step-00000004/manifest.json", dist::to_json(manifest));
  for (const char* command : {"inspect", "verify"}) {
    const std::string shown = output_of({command, odd});
    CHECK_THAT(shown, Catch::Contains("odd\\x1b[2J\\nerror: forged"));
    CHECK(shown.find('\x1b') == std::string::npos);
    CHECK(shown.find("\nerror: ") == std::string::npos);
    CHECK(shown.find(std::string(250, 'r')) == std::string::npos);
  }
  CHECK(output_of({"verify", out}, &status) ==
        output_of({"verify", out + "/step-00000004"}) +
            output_of({"verify", out + "/step-00000002"}) + out +
            "/model.safetensors: whole (8 tensors of step 4; it has no checksum)\n");
  CHECK(status == 0);

  // The exported directory is one that models are loaded from, the checkpoint itself as well.
  CHECK(output_of({"export", out, dir / "exported", "--format=tessera"}) ==
        dir / "exported: parameters of step 4, from " + out + "/model.safetensors\n");
  const auto values_of = [](const SavedModel& saved) {
    std::vector<std::vector<double>> values;
    for (const auto& p : saved.model->named_parameters()) {
      values.push_back(p.parameter->tensor.to_vector());
    }
    return values;
  };
  const auto expected = values_of(load_model(out));
  CHECK(values_of(load_model(dir / "exported")) == expected);
  CHECK(load_model(dir / "exported").tokenizer->name() == "byte");
  CHECK(values_of(load_model(out + "/step-00000004")) == expected);
  CHECK(values_of(load_model(out + "/latest")) == expected);
  CHECK(load_model(out + "/step-00000002").tokenizer->name() == "byte");
  CHECK(values_of(load_model(out + "/step-00000002")) != expected);

  // For transformers: names and layouts are theirs, the values ours.
  output_of({"export", out + "/step-00000004", dir / "hf"});
  const dist::HfReader hf(dir / "hf");
  const SavedModel model = load_model(out);
  for (const auto& p : model.model->named_parameters()) {
    CAPTURE(p.name);
    std::vector<float> values(static_cast<size_t>(hf.shape_of(p.name).numel()));
    hf.read(p.name, 0, static_cast<int64_t>(values.size()), values.data());
    CHECK(std::vector<double>(values.begin(), values.end()) == p.parameter->tensor.to_vector());
  }
  // With a tokenizer that transformers loads.
  for (const auto& [name, file_text] : text::make_byte_tokenizer()->hf_files()) {
    CHECK(read_file(dir / "hf/" + name) == file_text);
  }
  CHECK(read_file(dir / "hf/generation_config.json") == "{}\n");
  // Not over a model that no export has made, nor half over an earlier one.
  std::filesystem::create_directory(dir / "other");
  dir.write("other/model.safetensors", "somebody's");
  for (const char* format : {"hf", "tessera"}) {
    CHECK(error_of([&] {
            output_of({"export", out, dir / "other", std::string("--format=") + format});
          }) == dir /
                    "other: has model.safetensors, which no export has written; expected none, an "
                    "empty directory, or an earlier export, which is replaced whole");
  }
  output_of({"export", out, dir / "hf", "--max-file-bytes=9000"});
  CHECK_FALSE(std::filesystem::exists(dir / "hf/model.safetensors"));
  output_of({"export", out, dir / "hf", "--format=tessera"});
  CHECK_FALSE(std::filesystem::exists(dir / "hf/model.safetensors.index.json"));
  CHECK(values_of(load_model(dir / "hf")) == expected);
  output_of({"export", out, dir / "hf16", "--dtype=bf16", "--max-file-bytes=9000"});
  CHECK(std::filesystem::exists(dir / "hf16/model.safetensors.index.json"));
  CHECK_NOTHROW(dist::HfReader(dir / "hf16"));

  CHECK(output_of({"reshard", out, dir / "five", "--ranks", "5"}) ==
        dir / "five/step-00000004: 5 files\n");
  CHECK_THAT(output_of({"verify", dir / "five"}), Catch::Contains(": whole (5 files, "));

  // Damage, and what was left half-written.
  std::filesystem::create_directory(out + "/step-00000009");
  std::filesystem::remove(out + "/step-00000002/rank-00000.safetensors");
  const std::string damaged = output_of({"verify", out}, &status);
  CHECK(status == 4);
  CHECK_THAT(damaged, Catch::Contains("step-00000009: incomplete, never used\n") &&
                          Catch::Contains("step-00000004: whole (2 files, ") &&
                          Catch::Contains("step-00000002/rank-00000.safetensors: No such file"));
  CHECK_THAT(
      error_of([&] {
        output_of({"inspect", out + "/step-00000002"});
      }),
      Catch::Contains("rank-00000.safetensors: No such file or directory, expected a file of "));
  CHECK_THAT(error_of([&] { load_model(out + "/step-00000002"); }),
             Catch::Contains("rank-00000.safetensors: No such file"));
}

TEST_CASE("tessera-checkpoint: the command line", "[checkpoint]") {
  CHECK_THAT(output_of({"--help"}), Catch::Contains("inspect") && Catch::Contains("reshard"));
  CHECK_THAT(output_of({"reshard", "--help"}), Catch::Contains("--ranks"));
  const auto error = [](const std::vector<std::string>& arguments) {
    return error_of([&] { output_of(arguments); });
  };
  CHECK(error({}) == "command line: A subcommand is required (see --help)");
  CHECK(error({"inspect"}) == "command line: DIR is required (see --help)");
  CHECK_THAT(error({"reshard", "a", "b", "--ranks", "0"}),
             Catch::StartsWith("command line: --ranks: Value 0 not in range"));
  for (const char* command : {"verify", "inspect"}) {
    CHECK(
        error({command, "/none"}) ==
        "/none: no complete checkpoint, and no model.safetensors with a config.toml, expected the "
        "directory of a run, or a checkpoint");
  }
}
