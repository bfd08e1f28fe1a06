// A run that ends early and goes on: the same losses, the next samples, refusals, faults.

#include <sys/resource.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "apps/checkpointing.h"
#include "apps/run_control.h"
#include "apps/saved_model.h"
#include "apps/trainer.h"
#include "core/formats/durable_file.h"
#include "dist/checkpoint/reader.h"
#include "dist/comm/local.h"
#include "test/apps/runs.h"
#include "test/core/formats/event_reader.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::error_on;
using tessera::testing::losses;
using tessera::testing::read_file;
using tessera::testing::read_metrics;
using tessera::testing::saved_steps;
using tessera::testing::TempDir;
using tessera::testing::train_on;

namespace {

constexpr int kSteps = 20, kSaved = 10;

std::string example_text() {
  std::string text;
  for (int i = 0; i < 120; ++i) {
    text += "line " + std::to_string(i * i) + " of a text that is easy to learn\n";
  }
  return text;
}

/// A small run of kSteps with 24 samples a step on any of 1, 2, 3, 4, 8 ranks.
Config small_config(const TempDir& dir, const std::vector<std::string>& extra = {}) {
  std::vector<std::string> overrides = {
      "--data.text=" + dir.write("text.txt", example_text()),
      "--output.dir=" + dir / "out",
      "--device=cpu",
      "--model.layers=2",
      "--model.heads=2",
      "--model.width=24",
      "--model.context=16",
      "--train.steps=20",
      "--train.micro_batch=1",
      "--train.global_batch=24",
      "--train.log_every=1000",
      "--optim.lr=0.01",
      "--optim.warmup_steps=2",
      "--checkpoint.every=10",
      "--debug.poison=true",
  };
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return load_config("", overrides);
}

std::string state_of(const std::string& out) {
  return nlohmann::json::parse(read_file(out + "/status.json"))["state"].get<std::string>();
}

/// A run that was saved after kSaved steps and went on to the end, and copies of its directory as
/// they were after the save.
struct SavedRun {
  TempDir dir;
  Config config;
  std::vector<double> expected;

  explicit SavedRun(int world_size, const std::vector<std::string>& extra = {})
      : config(small_config(dir, extra)) {
    train_on(world_size, config);
    expected = losses(dir / "out");
    REQUIRE(expected.size() == kSteps);
  }
  /// A directory with the checkpoint of step kSaved only.
  std::string copy(const std::string& name) const {
    const std::string out = dir / name;
    std::filesystem::copy(dir / "out", out, std::filesystem::copy_options::recursive);
    std::filesystem::remove_all(out + "/" + dist::step_directory_name(kSteps));
    return out;
  }
  Config resumed(const std::string& out, std::vector<std::string> extra = {}) const {
    extra.push_back("--output.dir=" + out);
    extra.push_back("--checkpoint.resume=auto");
    return small_config(dir, extra);
  }
};

void check_near(const std::vector<double>& actual, const std::vector<double>& expected,
                double tolerance) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    CAPTURE(i, actual[i], expected[i]);
    CHECK(std::abs(actual[i] - expected[i]) <= tolerance * std::abs(expected[i]));
  }
}

}  // namespace

TEST_CASE("resume: 20 steps on 4 ranks are 10, a checkpoint, and 10 more, to the bit", "[resume]") {
  const std::vector<std::string> gpt2 = {"--model.kind=gpt2", "--model.dropout=0.1",
                                         "--train.eval_every=5", "--checkpoint.best=false"};
  const SavedRun saved(4, gpt2);
  CHECK(saved_steps(saved.dir / "out") == std::vector<int64_t>{20, 10});
  const std::string out = saved.copy("again");
  train_on(4, saved.resumed(out, gpt2));
  CHECK(losses(out) == saved.expected);
  CHECK(read_file(out + "/model.safetensors") == read_file(saved.dir / "out/model.safetensors"));
  CHECK(state_of(out) == "finished");
  // Nothing of a step is trained twice or left out of the log.
  const auto steps = read_metrics(out), whole = read_metrics(saved.dir / "out");
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const char* key : {"step", "tokens", "lr", "grad_norm", "val_loss"}) {
      CAPTURE(i, key);
      CHECK(steps[i].value(key, 0.0) == whole[i].value(key, 0.0));
    }
  }
}

TEST_CASE(
    "resume: the event file has every tag and step of the log, over a resume and an overwrite",
    "[resume]") {
  const std::vector<std::string> keys = {"--output.tensorboard=true", "--output.unit_norms=true",
                                         "--train.eval_every=5", "--checkpoint.best=false",
                                         "--sample.tokens=5"};
  const SavedRun saved(2, keys);
  const std::string out = saved.copy("again");
  train_on(2, saved.resumed(out, keys));
  CHECK(testing::event_files(out).size() == 2);
  // Numbers of a line, but for the step and what is no value of a step.
  const std::function<size_t(const nlohmann::json&)> count = [&](const nlohmann::json& value) {
    size_t sum = value.is_number() ? 1 : 0;
    for (const auto& [key, member] : value.items()) {
      if (value.is_structured() && key != "step" && key != "memory_over_step") sum += count(member);
    }
    return sum;
  };
  const auto check_run = [&](const std::string& dir) {
    const auto shown = testing::shown_scalars(dir);
    const auto at = [&](const std::string& tag, int64_t step) { return shown.at(tag).at(step); };
    const auto lines = read_metrics(dir);
    REQUIRE(lines.size() == kSteps);
    for (const auto& line : lines) {
      const auto step = line["step"].get<int64_t>();
      CAPTURE(dir, step);
      size_t num_shown = 0;
      for (const auto& [_, steps] : shown) num_shown += steps.count(step);
      CHECK(num_shown == count(line));
      CHECK(at("loss/train", step) == line["loss"].get<float>());
      CHECK(at("optimizer/grad_norm", step) == line["grad_norm"].get<float>());
      CHECK(at("exposed/gather_ms", step) == line["exposed_gather_ms"].get<float>());
      CHECK(line.contains("val_loss") == (step % 5 == 0));
      if (step % 5 == 0) CHECK(at("loss/validation", step) == line["val_loss"].get<float>());
      double bytes = 0, squares = 0;
      for (const auto& [name, value] : line["memory"].items()) {
        bytes += value.get<double>();
        CHECK(at("memory/" + name, step) == value.get<float>());
      }
      CHECK(bytes == line["peak_bytes"].get<double>());
      for (const auto& [unit, value] : line["unit_norms"].items()) {
        squares += value.get<double>() * value.get<double>();
        CHECK(at("unit_norms/" + unit, step) == value.get<float>());
      }
      CHECK(line["unit_norms"].size() == 4);  // embedding, two blocks, head
      CHECK(std::sqrt(squares) == Approx(line["grad_norm"].get<double>()).epsilon(1e-5));
    }
    const auto events = testing::read_events(testing::event_files(dir).back());
    CHECK(events.at(2).texts.at("config").find("tensorboard = true") != std::string::npos);
    CHECK(std::get<bool>(events.at(3).settings.at("output.tensorboard")));
    CHECK(events.back().texts.count("sample") == 1);
  };
  check_run(out);
  auto anew = keys;
  anew.insert(anew.end(), {"--output.dir=" + out, "--output.overwrite=true"});
  train_on(2, small_config(saved.dir, anew));
  CHECK(testing::event_files(out).size() == 1);
  check_run(out);
  // How the bytes change in the course of the third step.
  const auto over_step = read_metrics(out).at(2)["memory_over_step"];
  CHECK(over_step["classes"].size() == 6);
  CHECK(over_step["bytes"].size() > 20);
  CHECK(over_step["marks"].size() == 25);  // forward and backward of 12 micro-batches, optimizer
  CHECK(over_step["marks"][1]["begins"] == "backward");
}

TEST_CASE("resume: case 35: uneven shards on the same ranks go on with the same bits", "[resume]") {
  // Chunks are whole blocks of 256 elements: some ranks have less of a unit, or nothing.
  const std::vector<std::string> extra = {"--model.kind=gpt2",
                                          "--model.dropout=0.1",
                                          "--model.width=26",
                                          "--precision.param_dtype=f16",
                                          "--precision.loss_scale_init=16777216",
                                          "--precision.loss_scale_interval=3"};
  for (const int world_size : {3, 5}) {
    auto settings = extra;
    if (world_size == 5) settings.push_back("--train.global_batch=25");
    const SavedRun saved(world_size, settings);
    const std::string out = saved.copy("again");
    train_on(world_size, saved.resumed(out, settings));
    const auto steps = read_metrics(out), whole = read_metrics(saved.dir / "out");
    REQUIRE(steps.size() == whole.size());
    for (size_t i = kSaved; i < steps.size(); ++i) {
      for (const char* key : {"loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens"}) {
        CAPTURE(world_size, i, key);
        CHECK(steps[i].contains(key) == whole[i].contains(key));
        CHECK(steps[i].value(key, nlohmann::json()) == whole[i].value(key, nlohmann::json()));
      }
    }
    CHECK(read_file(out + "/model.safetensors") == read_file(saved.dir / "out/model.safetensors"));
  }
}

TEST_CASE("resume: on 1, 2, 3 and 8 ranks, with other settings (case 34)", "[resume]") {
  const SavedRun saved(4);
  const std::vector<std::vector<std::string>> settings = {
      {"--fsdp.strategy=no_shard"},
      {"--fsdp.strategy=shard_grad_op", "--fsdp.offload=optimizer"},
      {"--fsdp.wrap=every_n_blocks", "--fsdp.offload=params_and_optimizer"},
      {"--fsdp.strategy=hybrid_shard", "--fsdp.shard_size=4", "--recompute.policy=full"}};
  const std::vector<int> world_sizes = {1, 2, 3, 8};
  for (size_t i = 0; i < settings.size(); ++i) {
    CAPTURE(world_sizes[i]);
    const std::string out = saved.copy(fmt::format("on-{}", world_sizes[i]));
    train_on(world_sizes[i], saved.resumed(out, settings[i]));
    check_near(losses(out), saved.expected, 1e-5);
  }
}

TEST_CASE("resume: reproducible runs keep their bits on other numbers of ranks", "[resume]") {
  const std::vector<std::string> reproducible = {"--train.reproducible=true",
                                                 "--train.global_batch=8"};
  const SavedRun saved(4, reproducible);
  for (const int world_size : {1, 2, 8}) {
    CAPTURE(world_size);
    const std::string out = saved.copy(fmt::format("on-{}", world_size));
    train_on(world_size, saved.resumed(out, reproducible));
    CHECK(losses(out) == saved.expected);
    CHECK(read_file(out + "/model.safetensors") == read_file(saved.dir / "out/model.safetensors"));
  }
}

TEST_CASE("resume: no sample comes twice and none is left out", "[resume]") {
  // Which samples a step has follows from its first one, which the checkpoint holds.
  const SavedRun saved(2);
  const dist::CheckpointReader reader(saved.dir / "out/step-00000010");
  const dist::Progress& p = reader.manifest().progress;
  CHECK(p.step == 10);
  CHECK(p.next_sample == 240);
  CHECK(p.samples_per_step == 24);
  CHECK(p.tokens == 240 * 16);
  const Data data = load_data(saved.config);
  TrainSamples samples(data.train, {.context = 16, .vocab_size = 256, .seed = 1});
  std::multiset<int64_t> epoch, seen;
  for (int64_t g = 0; g < samples.num_samples(); ++g) epoch.insert(samples.window_of(g));
  for (int64_t g = 0; g < std::min<int64_t>(p.next_sample, samples.num_samples()); ++g) {
    seen.insert(samples.window_of(g));
  }
  for (int64_t g = p.next_sample; g < samples.num_samples(); ++g) seen.insert(samples.window_of(g));
  CHECK(seen == epoch);
  CHECK(std::set<int64_t>(epoch.begin(), epoch.end()).size() == epoch.size());
  // The steps after it are those of the run that went on: their losses say which data they saw.
  const std::string out = saved.copy("again");
  train_on(2, saved.resumed(out));
  CHECK(losses(out) == saved.expected);
  CHECK(read_metrics(out).back()["tokens"] == 20 * 24 * 16);
}

TEST_CASE("resume: f16 goes on with its loss scale, sgd with its momentum", "[resume]") {
  const std::vector<std::vector<std::string>> settings = {
      {"--precision.param_dtype=f16", "--precision.norm_fp32=true",
       "--precision.loss_scale_init=16777216", "--precision.loss_scale_interval=3"},
      {"--precision.param_dtype=bf16"},
      {"--optim.name=sgd", "--optim.lr=0.1"},
      {"--optim.name=adamw_8bit"},
      {"--optim.name=adafactor"},
      {"--optim.name=muon"},
      {"--optim.groups=*norm*: optimizer=lion, lr_scale=0.5; blocks.0.*.out.*: frozen"}};
  for (const auto& extra : settings) {
    CAPTURE(extra.front());
    const SavedRun saved(2, extra);
    const std::string out = saved.copy("again");
    train_on(2, saved.resumed(out, extra));
    CHECK(losses(out) == saved.expected);
    const auto a = read_metrics(out), b = read_metrics(saved.dir / "out");
    for (size_t i = 0; i < a.size(); ++i) {
      CHECK(a[i].value("loss_scale", 0.0) == b[i].value("loss_scale", 0.0));
      CHECK(a[i].value("skipped", 0) == b[i].value("skipped", 0));
    }
  }
}

TEST_CASE("resume: stochastic rounding throws what it threw, with states in host memory too",
          "[resume]") {
  const std::vector<std::string> extra = {"--precision.param_dtype=bf16",
                                          "--optim.stochastic_rounding=true"};
  const SavedRun saved(2, extra);
  for (const char* offload : {"none", "optimizer", "params_and_optimizer"}) {
    CAPTURE(offload);
    auto settings = extra;
    settings.push_back(std::string("--fsdp.offload=") + offload);
    const std::string out = saved.copy(offload);
    train_on(2, saved.resumed(out, settings));
    CHECK(losses(out) == saved.expected);
  }
  const SavedRun nearest(2, {"--precision.param_dtype=bf16"});
  CHECK(nearest.expected[0] == saved.expected[0]);
  CHECK(nearest.expected != saved.expected);
}

TEST_CASE("resume: F41: twice from the same step is the same; other data, seed or batch is refused",
          "[resume]") {
  const SavedRun saved(2);
  for (const char* name : {"first", "second"}) {
    const std::string out = saved.copy(name);
    train_on(2, saved.resumed(out));
    CHECK(losses(out) == saved.expected);
  }
  const std::string out = saved.copy("other"), step = out + "/step-00000010";
  CHECK(error_on(2, saved.resumed(out, {"--train.seed=7"})) ==
        step + ": train.seed 1 there, 7 here; expected the same, or --resume.override");
  CHECK(
      error_on(2, saved.resumed(out, {"--train.global_batch=12"})) ==
      step +
          ": samples a step (train.micro_batch x passes x ranks, or train.global_batch) 24 there, "
          "12 here; expected the same, or --resume.override");
  CHECK_THAT(error_on(2, saved.resumed(out, {"--model.context=8"})),
             Catch::Contains("model.context 16 there, 8 here"));
  const std::string other = saved.dir.write("other.txt", example_text() + "more");
  CHECK_THAT(error_on(2, saved.resumed(out, {"--data.text=" + other})),
             Catch::Contains(step + ": training data ") && Catch::Contains(" tokens, ") &&
                 Catch::Contains(" here; expected the same, or --resume.override"));
  try {
    train_on(2, saved.resumed(out, {"--train.seed=7"}));
    FAIL("resumed");
  } catch (const ConfigError& error) {
    CHECK(error.exit_status() == 2);
  }
  train_on(2, saved.resumed(out, {"--train.seed=7", "--checkpoint.resume_override=true"}));
  CHECK(losses(out) != saved.expected);
  CHECK(losses(out).size() == kSteps);
}

namespace {

/// A shard of llm.c, of which `changed` has another token.
std::string write_shard(const TempDir& dir, const char* name, int32_t numel, int32_t changed = -1) {
  std::string bytes(1024, '\0');
  const int32_t header[3] = {20240520, 1, numel};
  std::memcpy(bytes.data(), header, sizeof(header));
  for (int64_t i = 0; i < numel; ++i) {
    const auto token = static_cast<uint16_t>((i * i + (i == changed ? 1 : 0)) % 64);
    bytes.append(reinterpret_cast<const char*>(&token), sizeof(token));
  }
  return dir.write(name, bytes);
}

}  // namespace

TEST_CASE("resume: other tokens in the middle of the data are found", "[resume]") {
  constexpr int32_t kNumel = 200'000;  // more than what is looked at first at both ends
  const TempDir dir;
  const std::string path = write_shard(dir, "a.bin", kNumel);
  const auto time = std::filesystem::last_write_time(path);
  std::vector<std::string> options = {"--data.text=",           "--data.tokens=" + path,
                                      "--model.vocab=64",       "--train.steps=2",
                                      "--train.eval_batches=1", "--optim.schedule=constant",
                                      "--checkpoint.every=0"};
  train_on(2, small_config(dir, options));
  const std::string step = dir / "out/step-00000002";
  options.insert(options.end(), {"--checkpoint.resume=auto", "--train.steps=3"});
  write_shard(dir, "a.bin", kNumel, kNumel / 2);
  std::filesystem::last_write_time(path, time);
  for (const int ranks : {1, 2}) {
    CHECK(error_on(ranks, small_config(dir, options)) ==
          step +
              ": training data: the number of tokens, the first and the last are the same, "
              "others are not; expected the same, or --resume.override");
  }
  CHECK(state_of(dir / "out") == "finished");  // nothing was touched
  // What is gone on with all the same is the data of the next checkpoint.
  options.push_back("--checkpoint.resume_override=true");
  train_on(2, small_config(dir, options));
  options.back() = "--train.steps=4";
  train_on(2, small_config(dir, options));
  CHECK(losses(dir / "out").size() == 4);
}

TEST_CASE("resume: losses of other validation data are not compared", "[resume]") {
  const TempDir dir;
  std::vector<std::string> options = {
      "--data.text=",
      "--data.tokens=" + write_shard(dir, "a.bin", 1000),
      "--data.val_tokens=" + write_shard(dir, "b.bin", 200),
      "--model.vocab=64",
      "--train.steps=4",
      "--optim.schedule=constant",
      "--train.eval_every=2",
      "--checkpoint.every=2",
      "--checkpoint.keep=1",
  };
  train_on(2, small_config(dir, options));
  const auto best = [&] {
    const auto found = dist::list_checkpoints(dir / "out");
    return dist::CheckpointReader(found.front().dir).manifest().progress.best_val_loss.value_or(0);
  };
  const double before = best();
  REQUIRE(before > 0);
  // The model has never seen these, so that their loss is higher.
  std::string bytes = read_file(dir / "b.bin");
  for (size_t i = 1024; i < bytes.size(); i += 2) bytes[i] = static_cast<char>(i * 37 % 61);
  const std::string other = dir.write("other.bin", bytes);
  options.insert(options.end(), {"--checkpoint.resume=auto", "--train.steps=6"});
  SECTION("the same file") {
    train_on(2, small_config(dir, options));
    CHECK(best() <= before);
  }
  SECTION("another file") {
    options.push_back("--data.val_tokens=" + other);
    train_on(2, small_config(dir, options));
    CHECK(best() > before);
    // Nor does it keep a checkpoint.
    CHECK(saved_steps(dir / "out") == std::vector<int64_t>{6});
  }
  SECTION("another part of it") {
    options.push_back("--train.eval_batches=1");
    train_on(2, small_config(dir, options));
    const auto metrics = read_metrics(dir / "out");
    CHECK(best() == metrics.back()["val_loss"].get<double>());
  }
}

TEST_CASE("resume: param_dtype that is not given is the checkpoint's", "[resume]") {
  const SavedRun run(2, {"--precision.param_dtype=bf16"});
  const std::string out = run.copy("again");
  train_on(2, run.resumed(out));
  CHECK(load_config(out + "/config.toml").precision.param_dtype == kBF16);
  CHECK(losses(out) == run.expected);
}

TEST_CASE("resume: from a path, on into another directory", "[resume]") {
  const SavedRun saved(2);
  for (const char* from : {"out/step-00000010", "out/step-00000010/"}) {
    const std::string out = saved.dir / fmt::format("from{}", std::string(from).size());
    std::vector<std::string> extra = {"--output.dir=" + out,
                                      "--checkpoint.resume=" + saved.dir / from};
    train_on(2, small_config(saved.dir, extra));
    const auto tail = losses(out);
    REQUIRE(tail.size() == kSteps - kSaved);
    CHECK(std::equal(tail.begin(), tail.end(), saved.expected.begin() + kSaved));
    CHECK(saved_steps(out) == std::vector<int64_t>{20});
  }
  // "latest" is the newest complete one: of a finished run, nothing is left to do but to save it.
  const std::string done = saved.dir / "done";
  train_on(1, small_config(saved.dir, {"--output.dir=" + done,
                                       "--checkpoint.resume=" + saved.dir / "out/latest"}));
  CHECK(read_file(done + "/model.safetensors") == read_file(saved.dir / "out/model.safetensors"));
  CHECK(saved_steps(done) == std::vector<int64_t>{20});
  CHECK(error_on(1, small_config(saved.dir, {"--output.dir=" + done + "2",
                                             "--checkpoint.resume=" + saved.dir / "none"})) ==
        saved.dir / "none: no complete checkpoint, expected step directories with a manifest.json");
}

TEST_CASE("resume: auto goes on from where a run began that died before its first checkpoint",
          "[resume]") {
  const SavedRun saved(2, {"--precision.param_dtype=bf16"});
  const std::string out = saved.dir / "new", origin = saved.dir / "out/step-00000010";
  const auto start = [&](const std::string& resume, std::vector<std::string> extra = {}) {
    extra.insert(extra.end(), {"--output.dir=" + out, "--checkpoint.resume=" + resume});
    return small_config(saved.dir, extra);
  };
  const std::vector<std::string> dies = {"--debug.nan_step=13"};
  CHECK_THAT(error_on(2, start(origin, dies)), Catch::StartsWith("step 13: loss nan"));
  CHECK_THAT(error_on(2, start("auto", dies)), Catch::StartsWith("step 13: loss nan"));
  CHECK(saved_steps(out).empty());

  // Without it nothing is trained from zero.
  std::filesystem::rename(origin, origin + "-away");
  CHECK(error_on(2, start("auto")) ==
        out + ": no checkpoint in it, and the one that its run began with is gone (" + origin +
            ": no complete checkpoint, expected step directories with a manifest.json), expected "
            "it back, or --output.overwrite with another start");
  std::filesystem::rename(origin + "-away", origin);

  train_on(2, start("auto"));
  const auto tail = losses(out);
  REQUIRE(tail.size() == kSteps - kSaved);
  CHECK(std::equal(tail.begin(), tail.end(), saved.expected.begin() + kSaved));
  // Its own checkpoint counts from then on.
  std::filesystem::remove_all(origin);
  train_on(2, start("auto", {"--train.steps=21"}));
  CHECK(losses(out).size() == kSteps - kSaved + 1);
}

TEST_CASE("resume: auto without checkpoints starts; damaged ones are passed over, or exit 4",
          "[resume]") {
  const TempDir dir;
  const Config config = small_config(dir, {"--checkpoint.resume=auto", "--checkpoint.every=5"});
  train_on(2, config);
  const std::vector<double> expected = losses(dir / "out");
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{20, 15, 10});
  const auto damage = [&](int64_t step) {
    const std::string path =
        dir / ("out/" + dist::step_directory_name(step) + "/rank-00001.safetensors");
    std::string bytes = read_file(path);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    std::ofstream(path, std::ios::binary) << bytes;
  };
  damage(20);
  damage(15);
  train_on(2, config);  // from 10
  CHECK(losses(dir / "out") == expected);
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{20, 15, 10});
  dist::CheckpointReader(dir / "out/step-00000020").check_files();
  for (const int64_t step : {20, 15, 10}) damage(step);
  try {
    train_on(2, config);
    FAIL("resumed");
  } catch (const CheckpointError& error) {
    CHECK(error.exit_status() == 4);
    CHECK_THAT(error.what(), Catch::Contains("none of 3 checkpoints can be used"));
  }
  // A path is that one or none.
  CHECK_THAT(error_on(2, small_config(dir, {"--checkpoint.resume=" + dir / "out/step-00000015",
                                            "--output.dir=" + dir / "new"})),
             Catch::Contains("step-00000015/rank-00001.safetensors: tensor "));
}

TEST_CASE("resume: damaged ones are kept beside, under a name that no resume takes", "[resume]") {
  const SavedRun saved(2);
  const std::string out = saved.dir / "out", step = out + "/step-00000020";
  std::filesystem::resize_file(step + "/rank-00001.safetensors", 1000);
  train_on(1, saved.resumed(out, {"--fsdp.strategy=no_shard"}));
  CHECK(saved_steps(out) == std::vector<int64_t>{20, 10});
  CHECK(std::filesystem::file_size(step + ".damaged/rank-00001.safetensors") == 1000);
  CHECK(std::filesystem::exists(step + ".damaged/manifest.json"));
}

TEST_CASE("resume: a checkpoint that cannot be read ends it with status 4 unless it may be skipped",
          "[resume]") {
  const SavedRun saved(2);
  const std::string out = saved.dir / "out", manifest = out + "/step-00000020/manifest.json";
  nlohmann::json object = nlohmann::json::parse(read_file(manifest));
  object["version"] = 3;
  object.erase("xxh64");
  const std::string newer = object.dump();
  std::ofstream(manifest) << newer;
  try {
    train_on(2, saved.resumed(out));
    FAIL("resumed");
  } catch (const CheckpointError& error) {
    CHECK(error.exit_status() == 4);
    CHECK(std::string(error.what()) ==
          manifest +
              ": format version 3, expected at most 2; it may be whole, so nothing older is "
              "used and it stays as it is: mend what keeps it from being read, or go on from "
              "the one before it with --resume.skip_unreadable");
  }
  train_on(2, saved.resumed(out, {"--checkpoint.resume_skip_unreadable=true"}));
  CHECK(losses(out) == saved.expected);
  CHECK(read_file(manifest) == newer);
}

TEST_CASE("resume: rewinds below complete checkpoints fail no save and leave whole ones",
          "[resume]") {
  const TempDir dir;
  // Half of all losses are spikes, soon each is; one checkpoint stays, so that each save removes
  // one. A save that fails would end the run with another error.
  const Config config =
      small_config(dir, {"--train.steps=60", "--checkpoint.every=1", "--checkpoint.keep=1",
                         "--checkpoint.best=false", "--checkpoint.on_error=stop",
                         "--guard.spike=rewind", "--guard.spike_window=4", "--guard.spike_z=0.5",
                         "--guard.max_spikes=30", "--guard.snapshot_every=10", "--optim.lr=0.02"});
  try {
    train_on(2, config);
    FAIL("no spike");
  } catch (const NumericsError& error) {
    CHECK_THAT(error.what(), Catch::Contains("standard deviations above the last 4"));
  }
  const std::vector<int64_t> steps = saved_steps(dir / "out");
  REQUIRE(steps.size() == 1);
  CHECK(dist::list_incomplete(dir / "out").empty());
  const dist::CheckpointReader reader(dir / ("out/" + dist::step_directory_name(steps[0])));
  reader.check_sizes();
  reader.check_files();
  // Steps were saved again, with other samples.
  CHECK(reader.manifest().sequence > steps[0]);
  CHECK(reader.manifest().progress.next_sample > steps[0] * 24);
}

TEST_CASE("resume: no save, snapshot, evaluation or sample races with a gather", "[resume]") {
  // At the end, train() throws what the order checker has found.
  for (const char* strategy : {"full_shard", "shard_grad_op", "shard_optim", "no_shard",
                               "hybrid_shard", "hybrid_shard_zero2"}) {
    for (const int communicators : {1, 2}) {
      CAPTURE(strategy, communicators);
      const TempDir dir;
      const bool is_hybrid = std::string_view(strategy).starts_with("hybrid");
      std::vector<std::string> extra = {"--train.steps=6",
                                        "--train.global_batch=8",
                                        "--checkpoint.every=2",
                                        "--train.eval_every=3",
                                        "--guard.spike=rewind",
                                        "--guard.spike_window=2",
                                        "--guard.spike_z=0.5",
                                        "--guard.snapshot_every=2",
                                        "--guard.max_spikes=1000",
                                        "--sample.tokens=3",
                                        "--sample.prompt=l",
                                        "--debug.order_check=true",
                                        "--fsdp.prefetch_forward=5",
                                        fmt::format("--fsdp.strategy={}", strategy),
                                        fmt::format("--fsdp.communicators={}", communicators)};
      if (is_hybrid) extra.push_back("--fsdp.shard_size=2");
      const int world_size = is_hybrid ? 4 : 2;
      train_on(world_size, small_config(dir, extra));
      extra.push_back("--train.steps=8");
      extra.erase(extra.begin());
      extra.push_back("--checkpoint.resume=auto");
      train_on(world_size, small_config(dir, extra));
      CHECK(saved_steps(dir / "out").front() == 8);
    }
  }
}

TEST_CASE("resume: F33: checkpoints of another run are not mixed with new ones", "[resume]") {
  const SavedRun saved(1);
  const std::string before = read_file(saved.dir / "out/status.json");
  CHECK(
      error_on(1, saved.config) ==
      fmt::format("command line: output.dir = {} has a run that finished at step 20, expected "
                  "--resume=auto to go on, another directory, or --output.overwrite to replace it",
                  saved.dir / "out"));
  CHECK(read_file(saved.dir / "out/status.json") == before);  // nothing was touched
  const std::string file = saved.dir.write("file", "x");
  CHECK_THAT(error_on(1, small_config(saved.dir, {"--checkpoint.dir=" + file + "/x"})),
             Catch::Contains("checkpoint.dir = ") &&
                 Catch::Contains("expected a directory that can be made"));
  // The newest is the whole checkpoint of another run: the one before it is used.
  const SavedRun other(1, {"--train.seed=3"});
  const std::string out = saved.copy("mixed");
  std::filesystem::copy(other.dir / "out/step-00000020", out + "/step-00000020",
                        std::filesystem::copy_options::recursive);
  train_on(1, saved.resumed(out));
  CHECK(losses(out) == saved.expected);
}

TEST_CASE("resume: the last K and the best stay; the best is saved when it comes", "[resume]") {
  const TempDir dir;
  train_on(2, small_config(dir, {"--checkpoint.every=4", "--checkpoint.keep=2",
                                 "--train.eval_every=3", "--optim.lr=0.05"}));
  const std::vector<int64_t> steps = saved_steps(dir / "out");
  int64_t best_step = 0;
  double best = 1e9;
  for (const auto& m : read_metrics(dir / "out")) {
    if (m.contains("val_loss") && m["val_loss"].get<double>() < best) {
      best = m["val_loss"].get<double>();
      best_step = m["step"].get<int64_t>();
    }
  }
  CHECK(std::find(steps.begin(), steps.end(), best_step) != steps.end());
  CHECK(steps.size() <= 3);
  CHECK(steps[0] == 20);
  const dist::CheckpointReader reader(dir / ("out/" + dist::step_directory_name(best_step)));
  CHECK(reader.manifest().progress.val_loss == best);
}

TEST_CASE("resume: a run that was killed in its last evaluation is evaluated", "[resume]") {
  const TempDir dir;
  train_on(2, small_config(dir));
  const std::string out = dir / "out", whole = read_file(out + "/metrics.jsonl");
  // What is on the disk then: the last step's line and checkpoint, without a validation loss.
  const std::string step = out + "/" + dist::step_directory_name(kSteps);
  dist::Manifest manifest = dist::CheckpointReader(step).manifest();
  const auto val_loss = manifest.progress.val_loss;
  REQUIRE(val_loss);
  manifest.progress.val_loss.reset();
  write_durably(step + "/manifest.json", dist::to_json(manifest));
  const size_t at = whole.rfind(",\"val_loss\":");
  REQUIRE(at != std::string::npos);
  REQUIRE(whole.find('\n', at) == whole.size() - 1);
  write_durably(out + "/metrics.jsonl", whole.substr(0, at) + "}\n");
  for (int life = 0; life < 2; ++life) {
    train_on(3, small_config(dir, {"--checkpoint.resume=auto"}));
    CHECK(read_metrics(out).size() == kSteps);
    CHECK(std::abs(read_metrics(out).back()["val_loss"].get<double>() - *val_loss) < 1e-6);
    const auto again = dist::CheckpointReader(step).manifest().progress.val_loss;
    REQUIRE(again);
    CHECK(std::abs(*again - *val_loss) < 1e-6);
  }
}

TEST_CASE("resume: F28: a preempted run saves, says so, and goes on to the same bits", "[resume]") {
  for (const int world_size : {1, 3}) {
    for (const char* every : {"--checkpoint.every=0", "--checkpoint.every=3"}) {
      const TempDir dir;
      const std::vector<std::string> extra = {every, "--output.dir=" + dir / "whole"};
      train_on(world_size, small_config(dir, extra));
      const std::vector<double> expected = losses(dir / "whole");
      const Config config = small_config(dir, {every, "--checkpoint.resume=auto"});
      int num_runs = 0;
      for (bool is_over = false; !is_over; ++num_runs) {
        request_preemption();
        if (num_runs == 3) forget_preemption();
        dist::run_ranks(world_size, [&](dist::World& world) {
          const TrainResult result = train(config, world);
          if (world.rank() == 0) is_over = !result.is_preempted;
        });
        if (is_over) break;
        CHECK(state_of(dir / "out") == "preempted");
        CHECK(saved_steps(dir / "out").front() == num_runs + 1);
        CHECK_FALSE(std::filesystem::exists(dir / "out/model.safetensors"));
      }
      CHECK(num_runs == 3);
      CHECK(state_of(dir / "out") == "finished");
      CHECK(losses(dir / "out") == expected);
      CHECK(read_file(dir / "out/model.safetensors") == read_file(dir / "whole/model.safetensors"));
    }
  }
}

TEST_CASE("resume: train.max_minutes ends in good order and the run goes on", "[resume]") {
  const TempDir dir;
  const Config whole = small_config(dir, {"--output.dir=" + dir / "whole"});
  train_on(2, whole);
  train_on(2, small_config(dir, {"--train.max_minutes=1e-9"}));
  CHECK(state_of(dir / "out") == "finished");
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{1});
  train_on(2, small_config(dir, {"--checkpoint.resume=auto"}));
  CHECK(losses(dir / "out") == losses(dir / "whole"));
}

TEST_CASE("guard: F24: a loss that is not finite on one rank changes nothing and is named",
          "[guard]") {
  for (const int world_size : {1, 3}) {
    const TempDir dir;
    const Config good = small_config(
        dir, {"--output.dir=" + dir / "good", "--train.steps=6", "--optim.schedule=constant",
              "--checkpoint.every=1", "--checkpoint.keep=100"});
    train_on(world_size, good);
    const int rank = world_size - 1;
    const auto with_nan = [&](std::vector<std::string> extra) {
      for (const char* option :
           {"--train.steps=6", "--optim.schedule=constant", "--checkpoint.every=1",
            "--checkpoint.keep=100", "--debug.nan_step=4"}) {
        extra.emplace_back(option);
      }
      extra.push_back(fmt::format("--debug.nan_rank={}", rank));
      return small_config(dir, extra);
    };
    // Stop: the status of numerics, step, rank and samples; the last state is that before the step.
    try {
      train_on(world_size, with_nan({}));
      FAIL("trained on");
    } catch (const NumericsError& error) {
      CHECK(error.exit_status() == 5);
      const int64_t first = 3 * 24 + 23;  // the last micro-batch of the step
      CHECK_THAT(
          error.what(),
          Catch::StartsWith("step 4: loss nan, gradient norm nan, expected finite numbers; "
                            "nothing of this step was applied; samples 72 to 95; not "
                            "finite: ") &&
              Catch::Contains(fmt::format("rank {}, samples {} to {}; ", rank, first, first)) &&
              Catch::Contains("more often than the data the cause is: a learning rate that "
                              "is too high (0.01 in this step; lower optim.lr = 0.01 or "
                              "raise optim.warmup_steps = 2)"));
    }
    CHECK(saved_steps(dir / "out") == std::vector<int64_t>{3, 2, 1});
    // Skip: parameters and optimizer after step 4 are those after step 3, to the bit.
    train_on(world_size, with_nan({"--output.dir=" + dir / "skip", "--guard.max_skips=1"}));
    const auto tensors = [&](const std::string& out, int64_t step) {
      const dist::CheckpointReader reader(out + "/" + dist::step_directory_name(step));
      std::map<std::string, std::string> all;
      for (const auto& t : reader.manifest().tensors) {
        std::string& bytes = all[t.name];
        bytes.resize(static_cast<size_t>(t.shape.numel()) * size_of(t.dtype));
        reader.read_tensor(t.name, 0, t.shape.numel(), bytes.data());
      }
      return all;
    };
    const auto before = tensors(dir / "skip", 3);
    CHECK(before == tensors(dir / "good", 3));
    CHECK(tensors(dir / "skip", 4) == before);
    CHECK(tensors(dir / "skip", 5) != before);
    const auto steps = read_metrics(dir / "skip");
    CHECK(steps[3]["loss"].is_null());
    CHECK(steps[3]["skipped"] == 1);
    CHECK(steps[5]["skipped"] == 1);
    CHECK(std::isfinite(steps[5]["loss"].get<double>()));
  }
}

TEST_CASE("guard: case 40: up to N steps in a row are skipped, then the run stops", "[guard]") {
  // From the start the update overflows: every later step is not finite.
  const TempDir dir;
  const std::vector<std::string> overflow = {"--optim.lr=1e30", "--optim.final_lr=1e30",
                                             "--optim.clip=0", "--optim.name=sgd",
                                             "--optim.warmup_steps=0"};
  auto extra = overflow;
  extra.push_back("--guard.max_skips=2");
  const std::string message = error_on(2, small_config(dir, extra));
  CHECK_THAT(message, Catch::Contains("nothing of this step was applied; samples "));
  const auto steps = read_metrics(dir / "out");
  CHECK(steps.back()["skipped"] == 2);
  CHECK(message.starts_with(fmt::format("step {}: ", steps.back()["step"].get<int64_t>() + 1)));
}

TEST_CASE("guard: F26: a spike's score", "[guard]") {
  GuardConfig config;
  config.spike = SpikeAction::kSkip;
  config.spike_window = 4;
  config.spike_z = 3;
  SpikeGuard guard(config);
  for (const double loss : {2.0, 4.0, 2.0}) {
    guard.add(loss);
    CHECK_FALSE(guard.score(100).has_value());
    CHECK_FALSE(guard.is_spike(100));
  }
  guard.add(4.0);  // mean 3, standard deviation 1
  CHECK(guard.score(5.0).value() == Approx(2.0));
  CHECK_FALSE(guard.is_spike(5.9));
  CHECK(guard.is_spike(6.1));
  CHECK_FALSE(guard.is_spike(-100));
  guard.add(3.0);  // the oldest goes: 4, 2, 4, 3
  CHECK(guard.score(3.25).value() == Approx(0).margin(1e-12));
  config.spike = SpikeAction::kOff;
  CHECK_FALSE(SpikeGuard(config).is_spike(1e9));
  // A window of equal losses has a smallest spread.
  config.spike = SpikeAction::kRewind;
  SpikeGuard flat(config);
  for (int i = 0; i < 4; ++i) flat.add(2.0);
  CHECK_FALSE(flat.is_spike(2.001));
  CHECK(flat.is_spike(2.1));
}

namespace {

/// Text in which a stretch is noise, so that the samples there have a far larger loss.
std::string poisoned_text() {
  std::string text;
  for (int i = 0; i < 400; ++i) text += "abcdefgh";
  for (int i = 0; i < 40; ++i) text[static_cast<size_t>(1600 + i)] = static_cast<char>(33 + i * 2);
  return text;
}

}  // namespace

TEST_CASE("guard: F26: a loss spike is skipped or rewound as configured, with the batch named",
          "[guard]") {
  for (const char* action : {"skip", "rewind"}) {
    CAPTURE(action);
    const TempDir dir;
    const std::vector<std::string> extra = {
        "--data.text=" + dir.write("poisoned.txt", poisoned_text()),
        "--train.steps=60",
        "--train.global_batch=2",
        "--optim.lr=0.02",
        "--optim.schedule=constant",
        "--guard.spike_window=5",
        "--guard.spike_z=8",
        "--guard.snapshot_every=4",
        "--guard.max_spikes=5",
        "--checkpoint.every=0",
        std::string("--guard.spike=") + action};
    const Config config = small_config(dir, extra);
    train_on(2, config);
    const auto steps = read_metrics(dir / "out");
    const auto spiked = steps.back()["skipped"].get<int64_t>();
    CHECK(spiked >= 1);
    CHECK(spiked <= 6);
    CHECK(steps.back()["step"] == 60);
    int64_t num_back = 0;
    for (size_t i = 1; i < steps.size(); ++i) {
      const auto step = steps[i]["step"].get<int64_t>(), last = steps[i - 1]["step"].get<int64_t>();
      if (step == last + 1) continue;
      ++num_back;
      CHECK((step - 1) % 4 == 0);  // to a snapshot
      CHECK(step <= last + 1);
    }
    // Data never comes again: as many samples as steps that ran.
    CHECK(steps.back()["tokens"] == static_cast<int64_t>(steps.size()) * 2 * 16);
    if (std::string_view(action) == "skip") {
      CHECK(num_back == 0);
      CHECK(steps.size() == 60);
    } else {
      CHECK(num_back >= 1);
      CHECK(steps.size() > 60);
    }
    // And none at all are allowed: the run stops and names it.
    auto strict = extra;
    strict.push_back("--guard.max_spikes=0");
    strict.push_back("--output.dir=" + dir / "strict");
    CHECK_THAT(error_on(2, small_config(dir, strict)),
               Catch::Contains("standard deviations above the last 5, expected at most 8; nothing "
                               "of this step was applied; samples ") &&
                   Catch::Contains("; largest ("));
  }
}

TEST_CASE("guard: a rewind from the last step goes on to it, and what is saved is of then",
          "[guard]") {
  const TempDir dir;
  std::vector<std::string> options = {"--data.text=" + dir.write("poisoned.txt", poisoned_text()),
                                      "--train.steps=60",
                                      "--train.global_batch=2",
                                      "--optim.lr=0.02",
                                      "--optim.schedule=constant",
                                      "--guard.spike_window=5",
                                      "--guard.spike_z=8",
                                      "--guard.snapshot_every=4",
                                      "--guard.max_spikes=5",
                                      "--checkpoint.every=0",
                                      "--guard.spike=rewind"};
  train_on(2, small_config(dir, options));
  const auto steps = read_metrics(dir / "out");
  int64_t spike = 0;  // the first step that was gone back from
  for (size_t i = 1; i < steps.size() && spike == 0; ++i) {
    const auto step = steps[i - 1]["step"].get<int64_t>();
    if (steps[i]["step"].get<int64_t>() <= step) spike = step;
  }
  REQUIRE(spike > 5);
  options.push_back(fmt::format("--train.steps={}", spike));
  options.push_back("--output.dir=" + dir / "last");
  train_on(2, small_config(dir, options));
  const auto last = read_metrics(dir / "last");
  CHECK(state_of(dir / "last") == "finished");
  REQUIRE(static_cast<int64_t>(last.size()) > spike);
  for (int64_t i = 0; i < spike; ++i) {  // the same way there
    CHECK(last[static_cast<size_t>(i)]["loss"] == steps[static_cast<size_t>(i)]["loss"]);
  }
  CHECK(last[static_cast<size_t>(spike) - 1]["step"] == spike);
  CHECK(last[static_cast<size_t>(spike)]["step"].get<int64_t>() <= spike);
  CHECK(last.back()["step"] == spike);
  // What is saved is the state at the end, after all samples that were read.
  CHECK(saved_steps(dir / "last") == std::vector<int64_t>{spike});
  const dist::CheckpointReader reader(dir / ("last/" + dist::step_directory_name(spike)));
  CHECK(reader.manifest().progress.next_sample == static_cast<int64_t>(last.size()) * 2);
  CHECK(model_step(dir / "last") == spike);
}

TEST_CASE("resume: F31: a checkpoint that cannot be written warns or stops as configured",
          "[resume]") {
  for (const int world_size : {1, 2}) {
    const TempDir dir;
    train_on(world_size, small_config(dir, {"--output.dir=" + dir / "good"}));
    const auto blocked = [&](const std::string& name, std::vector<std::string> extra) {
      // A file is where the directory of step 20 should be.
      std::filesystem::create_directories(dir / name);
      dir.write(name + "/step-00000020", "in the way");
      extra.push_back("--output.dir=" + dir / name);
      return small_config(dir, extra);
    };
    train_on(world_size, blocked("warn", {}));
    CHECK(losses(dir / "warn") == losses(dir / "good"));
    CHECK(saved_steps(dir / "warn") == std::vector<int64_t>{10});
    CHECK(state_of(dir / "warn") == "finished");
    for (const char* option : {"--checkpoint.on_error=stop", "--checkpoint.max_errors=1"}) {
      const std::string name = std::string(option).substr(13);
      try {
        train_on(world_size, blocked(name, {option}));
        FAIL("went on");
      } catch (const IoError& error) {
        CHECK(error.exit_status() == 7);
        CHECK_THAT(error.what(),
                   Catch::StartsWith("checkpoint of step 20: " + dir / (name + "/step-00000020")));
      }
      CHECK(state_of(dir / name) == "failed");
      CHECK(saved_steps(dir / name) == std::vector<int64_t>{10});
    }
  }
}

TEST_CASE("resume: F42: out of memory names what was asked for and leaves checkpoints alone",
          "[resume]") {
  const SavedRun saved(2);
  const std::string out = saved.copy("small");
  const std::string message = error_on(2, saved.resumed(out, {"--memory.limit=64KiB"}));
  CHECK_THAT(message, Catch::Contains("64.0 KiB"));
  train_on(2, saved.resumed(out));
  CHECK(losses(out) == saved.expected);
}
