#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <new>

#include "dist/checkpoint/export.h"
#include "test/dist/checkpoint_cases.h"

namespace {

/// Bytes that `new` has given out and not got back, and the most there were.
std::atomic<int64_t> live{0}, peak{0};

}  // namespace

void* operator new(size_t nbytes) {
  auto* base = static_cast<size_t*>(std::malloc(nbytes + 16));
  if (base == nullptr) throw std::bad_alloc();
  *base = nbytes;
  const int64_t now = live += static_cast<int64_t>(nbytes);
  int64_t most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
  return base + 2;
}
void operator delete(void* data) noexcept {
  if (data == nullptr) return;
  size_t* base = static_cast<size_t*>(data) - 2;
  live -= static_cast<int64_t>(*base);
  std::free(base);
}
void operator delete(void* data, size_t) noexcept {
  operator delete(data);
}

namespace tessera::testing {
namespace {

/// A checkpoint of 3 ranks after 2 steps; `prepare` freezes.
struct Example {
  TempDir dir;
  WholeState state;
  FsdpRun run;

  explicit Example(Precision precision = Precision::kF32, bool freezes = false, int width = 24) {
    run.samples_per_step = kSharedSamples;
    run.num_steps = 2;
    run.model.width = width;
    set_precision(run, precision);
    if (freezes) {
      run.prepare = [](nn::LanguageModel& model) {
        model.named_parameters()[3].parameter->tensor.set_requires_grad(false);
      };
    }
    save_at(run, 2, {.dir = dir.path(), .run = "r"}, &state);
    run_fsdp_on_threads(3, run);
  }
  std::string checkpoint() const { return dir / "step-00000002"; }
};

TEST_CASE("checkpoint export: the parameters in one file, to the bit", "[checkpoint]") {
  for (const bool freezes : {false, true}) {
    const Example example(freezes ? Precision::kMixed : Precision::kF32, freezes);
    const dist::CheckpointReader reader(example.checkpoint());
    const std::string path = example.dir / "model.safetensors";
    dist::export_parameters(reader, path);
    const dist::SafetensorsFile file(path);
    size_t num_tensors = 0, num_low = 0;
    for (const auto& [name, bytes] : example.state.tensors()) {
      if (!name.starts_with("parameters/")) continue;
      ++num_tensors;
      CAPTURE(name);
      const dist::SafetensorsEntry& entry = file.find(name.substr(11));
      CHECK(entry.dtype == kF32);
      CHECK(entry.shape == reader.manifest().find(name)->shape);
      if (reader.manifest().find(name)->dtype == kF32) {
        CHECK(std::memcmp(file.data(entry), bytes.data(), bytes.size()) == 0);
        continue;
      }
      ++num_low;  // a frozen one of bf16
      std::vector<float> values(static_cast<size_t>(entry.shape.numel()));
      std::memcpy(values.data(), file.data(entry), values.size() * sizeof(float));
      for (size_t i = 0; i < values.size(); ++i) {
        BFloat16 low;
        std::memcpy(&low, bytes.data() + 2 * i, 2);
        REQUIRE(values[i] == static_cast<float>(low));
      }
    }
    CHECK(file.entries().size() == num_tensors);
    CHECK(num_low == (freezes ? 1 : 0));
  }
}

TEST_CASE("checkpoint export: no more than two of the largest tensors are in memory",
          "[checkpoint]") {
  const Example example(Precision::kF32, false, 96);
  const dist::CheckpointReader reader(example.checkpoint());
  int64_t largest = 0, total = 0;
  for (const dist::TensorRecord& t : reader.manifest().tensors) {
    if (!t.name.starts_with("parameters/")) continue;
    largest = std::max(largest, t.shape.numel() * 4);
    total += t.shape.numel() * 4;
  }
  const int64_t before = live;
  peak = before;
  dist::export_parameters(reader, example.dir / "model.safetensors");
  const int64_t headers = 64 << 10;  // names and JSON
  CHECK(peak - before >= largest);
  CHECK(peak - before <= 2 * largest + headers);
  CHECK(total > 4 * (2 * largest + headers) / 3);
}

TEST_CASE("checkpoint reshard: the same state in any number of files", "[checkpoint]") {
  const Example example;
  const dist::CheckpointReader reader(example.checkpoint());
  for (const int num_ranks : {1, 2, 5, 64}) {
    CAPTURE(num_ranks);
    const std::string out = example.dir / fmt::format("as-{}", num_ranks);
    const std::string dir = dist::reshard_checkpoint(reader, out, num_ranks);
    CHECK(dir == out + "/step-00000002");
    const dist::CheckpointReader again(dir);
    again.check_sizes();
    again.check_files();
    CHECK(again.manifest().files.size() == static_cast<size_t>(num_ranks));
    CHECK(again.manifest().world_size == num_ranks);
    CHECK(again.manifest().run == "r");
    for (const auto& [name, bytes] : example.state.tensors()) {
      std::string read(bytes.size(), '\0');
      const dist::TensorRecord* tensor = again.manifest().find(name);
      REQUIRE(tensor != nullptr);
      again.read(name, 0, tensor->shape.numel(), read.data());
      CHECK(read == bytes);
    }
    // Training goes on from it.
    WholeState state;
    FsdpRun run = example.run;
    run.num_steps = 3;
    run.after_step = nullptr;
    resume_from(run, dir, &state);
    run_fsdp_on_threads(2, run);
    CHECK(state.tensors() == example.state.tensors());
    CHECK(error_of([&] { dist::reshard_checkpoint(reader, out, 2); }) ==
          dir + ": a checkpoint of this step is there already, expected none");
  }
}

}  // namespace
}  // namespace tessera::testing
