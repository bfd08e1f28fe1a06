#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <new>

#include "dist/checkpoint/export_dir.h"
#include "dist/checkpoint/reshard.h"
#include "test/dist/checkpoint/cases.h"

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

void export_parameters(const ParameterSource& source, const std::string& path) {
  SafetensorsWriter writer(path, f32_entries(source));
  copy_parameters(source, writer);
}

TEST_CASE("checkpoint export: the parameters in one file, to the bit", "[checkpoint]") {
  for (const bool freezes : {false, true}) {
    const Example example(freezes ? Precision::kMixed : Precision::kF32, freezes);
    const dist::CheckpointReader reader(example.checkpoint());
    const std::string path = example.dir / "model.safetensors";
    export_parameters(reader, path);
    const SafetensorsFile file(path);
    size_t num_tensors = 0, num_low = 0;
    for (const auto& [name, bytes] : example.state.tensors()) {
      if (!name.starts_with("parameters/")) continue;
      ++num_tensors;
      CAPTURE(name);
      const SafetensorsEntry& entry = file.find(name.substr(11));
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

TEST_CASE("checkpoint export: a parameter that is not there, or elements of it, are named",
          "[checkpoint]") {
  const Example example;
  const dist::CheckpointReader reader(example.checkpoint());
  const std::string name = reader.names().front();
  const int64_t numel = reader.shape_of(name).numel();
  std::vector<float> values(static_cast<size_t>(numel));
  const auto error = [&](const std::string& of, int64_t begin, int64_t end) {
    return error_of([&] { reader.read(of, begin, end, values.data()); });
  };
  CHECK(error("none", 0, 1) == example.checkpoint() + ": no tensor none, expected it");
  CHECK(error(name, 1, numel + 1) == fmt::format("{}: elements [1, {}) of {}, expected some of its "
                                                 "{}",
                                                 example.checkpoint(), numel + 1, name, numel));
  CHECK(error(name, 2, 1) != "");
  CHECK(error(name, -1, 1) != "");
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
  export_parameters(reader, example.dir / "model.safetensors");
  const int64_t headers = 64 << 10;  // names and JSON
  CHECK(peak - before >= largest);
  CHECK(peak - before <= 2 * largest + headers);
  CHECK(total > 4 * (2 * largest + headers) / 3);
}

namespace fs = std::filesystem;

/// An export of two files.
void make_export(const std::string& target, const std::string& text,
                 const std::string& extra = "") {
  dist::ExportDirectory place(target);
  std::ofstream(place.path() + "/model.safetensors") << text;
  std::ofstream(place.path() + "/config.json") << "{}";
  if (!extra.empty()) std::ofstream(place.path() + "/" + extra) << "more";
  place.commit();
}

std::string contents(const std::string& dir) {
  std::vector<std::string> lines;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (name == dist::kExportListName) continue;
    lines.push_back(name + "=" + (entry.is_directory() ? "/" : read_file(entry.path().string())));
  }
  std::sort(lines.begin(), lines.end());
  return fmt::format("{}", fmt::join(lines, " "));
}

TEST_CASE("checkpoint export: an earlier export is replaced whole", "[checkpoint]") {
  const TempDir dir;
  const std::string target = dir / "a/model";
  make_export(target + "/", "one", "model-00001-of-00002.safetensors");
  CHECK(contents(target) ==
        "config.json={} model-00001-of-00002.safetensors=more "
        "model.safetensors=one");
  make_export(target, "two");
  CHECK(contents(target) == "config.json={} model.safetensors=two");
  fs::create_directory_symlink(target, dir / "link");
  make_export(dir / "link", "three");
  CHECK(fs::is_symlink(dir / "link"));
  CHECK(contents(target) == "config.json={} model.safetensors=three");
  fs::create_directory(dir / "empty");
  make_export(dir / "empty", "four");
  CHECK(contents(dir / "empty") == "config.json={} model.safetensors=four");
  {
    const dist::ExportDirectory given_up(target);
    std::ofstream(given_up.path() + "/model.safetensors") << "half";
    CHECK(contents(target) == "config.json={} model.safetensors=three");
  }
  CHECK(contents(target) == "config.json={} model.safetensors=three");
  CHECK(std::distance(fs::directory_iterator(dir / "a"), fs::directory_iterator()) == 1);
}

TEST_CASE("checkpoint export: what no export has written is never replaced", "[checkpoint]") {
  const TempDir dir;
  const std::string target = dir / "model";
  const auto refusal = [&](const std::string& to) {
    return error_of([&] { make_export(to, "new"); });
  };
  const std::string expected =
      "; expected none, an empty directory, or an earlier export, which is replaced whole";
  fs::create_directory(target);
  dir.write("model/model.safetensors", "somebody's");
  CHECK(refusal(target) ==
        target + ": has model.safetensors, which no export has written" + expected);
  CHECK(contents(target) == "model.safetensors=somebody's");
  CHECK(refusal(dir.write("file", "x")) == dir / "file: no directory" + expected);
  // Beside an export, or in it.
  make_export(dir / "ours", "one");
  dir.write("ours/README.md", "notes");
  CHECK(refusal(dir / "ours") ==
        dir / "ours: has README.md, which no export has written" + expected);
  fs::remove(dir / "ours/README.md");
  fs::create_directory(dir / "ours/more");
  CHECK(refusal(dir / "ours") == dir / "ours: has more, which no export has written" + expected);
  fs::remove(dir / "ours/more");
  dir.write("ours/config.json", "[]");
  CHECK(refusal(dir / "ours") ==
        dir / "ours: has config.json, changed since its export" + expected);
  CHECK(contents(dir / "ours") == "config.json=[] model.safetensors=one");
  // While it is written, somebody puts something there.
  dist::ExportDirectory late(dir / "late");
  fs::create_directory(dir / "late");
  dir.write("late/notes", "mine");
  CHECK(error_of([&] { late.commit(); }) ==
        dir / "late: has notes, which no export has written" + expected);
  CHECK(contents(dir / "late") == "notes=mine");
  CHECK(refusal(dir / "late") == dir / "late: has notes, which no export has written" + expected);
  fs::create_directory(dir / "other");
  CHECK(dist::ExportDirectory(dir / "other/../new/").path() == dir / "new.partial");
  fs::create_directory(dir / "killed.partial");
  CHECK(refusal(dir / "killed") ==
        dir /
            "killed.partial: is there, of an export that is running or was killed; expected none");
  CHECK(fs::exists(dir / "killed.partial"));
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
      again.read_tensor(name, 0, tensor->shape.numel(), read.data());
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
