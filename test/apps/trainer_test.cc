#include "apps/trainer.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <any>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/loss.h"
#include "apps/options.h"
#include "apps/run_control.h"
#include "apps/saved_model.h"
#include "core/autograd.h"
#include "dist/comm/local.h"
#include "kernels/attention/attention.h"
#include "kernels/matmul/backend.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "nn/linear.h"
#include "test/apps/runs.h"
#include "test/stderr_of.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::read_file;
using tessera::testing::stderr_of;
using tessera::testing::TempDir;

namespace {

std::string example_text() {
  std::string text;
  for (int i = 0; i < 60; ++i) {
    text += "line " + std::to_string(i * i) + " of a text that is easy to learn\n";
  }
  return text;
}

/// A small run with the debug aids on; `extra` overrides.
Config small_config(const TempDir& dir, std::vector<std::string> extra = {}) {
  std::vector<std::string> overrides = {
      "--data.text=" + dir.write("text.txt", example_text()),
      "--output.dir=" + dir / "out",
      "--device=cpu",
      "--model.layers=2",
      "--model.heads=2",
      "--model.width=24",
      "--model.context=16",
      "--train.steps=12",
      "--train.micro_batch=4",
      "--train.log_every=1000",
      "--optim.lr=0.01",
      "--optim.warmup_steps=2",
      "--debug.poison=true",
      "--debug.order_check=true",
  };
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return load_config("", overrides);
}

std::vector<nlohmann::json> read_metrics(const TempDir& dir) {
  std::vector<nlohmann::json> steps;
  std::istringstream lines(read_file(dir / "out/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) steps.push_back(nlohmann::json::parse(line));
  return steps;
}

/// The metrics of a run on `world_size` thread ranks.
std::vector<nlohmann::json> run(int world_size, const std::vector<std::string>& extra) {
  const TempDir dir;
  const Config config = small_config(dir, extra);
  dist::run_ranks(world_size, [&](dist::World& world) { train(config, world); });
  return read_metrics(dir);
}

void check_same_curve(const std::vector<nlohmann::json>& a, const std::vector<nlohmann::json>& b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    for (const char* key : {"loss", "grad_norm"}) {
      const double x = a[i][key].get<double>(), y = b[i][key].get<double>();
      CAPTURE(i, key, x, y);
      CHECK(std::abs(x - y) <= 1e-4 * std::abs(x));
    }
  }
}

}  // namespace

TEST_CASE("trainer: the loss falls and everything is written", "[trainer]") {
  for (const char* kind : {"llama", "gpt2"}) {
    CAPTURE(kind);
    const TempDir dir;
    const Config config =
        small_config(dir, {"--train.steps=40", "--train.eval_every=20", "--data.tokenizer=char",
                           std::string("--model.kind=") + kind});
    dist::run_ranks(1, [&](dist::World& world) {
      const TrainResult result = train(config, world);
      CHECK(result.steps == 40);
      CHECK(result.val_loss.has_value());
    });
    const auto steps = read_metrics(dir);
    REQUIRE(steps.size() == 40);
    CHECK(steps.back()["step"] == 40);
    CHECK(steps.back()["loss"].get<double>() < steps.front()["loss"].get<double>() - 0.5);
    CHECK(steps[0]["peak_bytes"].get<int64_t>() > 0);
    CHECK(steps[19].contains("val_loss"));
    CHECK(steps[39].contains("val_loss"));
    CHECK_FALSE(steps[20].contains("val_loss"));
    const auto status = nlohmann::json::parse(read_file(dir / "out/status.json"));
    CHECK(status["state"] == "finished");
    CHECK(status["step"] == 40);
    Config resolved = config;
    resolve_param_dtype(resolved, /*is_cuda=*/false);
    CHECK(dump_config(load_config(dir / "out/config.toml")) == dump_config(resolved));

    const SavedModel saved = load_model(dir / "out");
    CHECK(saved.tokenizer->name() == "char");
    CHECK(saved.model->num_parameters() > 0);
    // The saved model is the trained one: its loss on the start of the text is that of training.
    const std::string text = example_text().substr(0, 17);
    const std::vector<int32_t> ids = saved.tokenizer->encode(text);
    const std::span<const int32_t> span(ids);
    NoGrad no_grad;
    const LossSum loss = saved.model->loss(from_values(span.subspan(0, 16), {1, 16}),
                                           from_values(span.subspan(1, 16), {1, 16}));
    CHECK(loss.sum.item() / 16 < steps.front()["loss"].get<double>() - 0.5);
  }
}

TEST_CASE("trainer: ranks, passes and strategies give the same curve", "[trainer]") {
  const auto one = run(1, {"--train.micro_batch=8"});
  check_same_curve(one, run(2, {"--train.micro_batch=4"}));
  check_same_curve(one, run(1, {"--train.micro_batch=2", "--train.grad_accum_steps=4"}));
  check_same_curve(one, run(2, {"--train.micro_batch=2", "--train.global_batch=8"}));
  check_same_curve(one, run(2, {"--train.micro_batch=4", "--fsdp.strategy=no_shard"}));
  check_same_curve(one, run(1, {"--train.micro_batch=8", "--recompute.policy=full"}));
  const double val = one.back()["val_loss"].get<double>();
  const double other = run(2, {"--train.micro_batch=4"}).back()["val_loss"].get<double>();
  CHECK(std::abs(val - other) <= 1e-4 * val);
}

TEST_CASE("trainer: masked tokens are learned, the same on 1 to 4 ranks", "[trainer]") {
  const std::vector<std::string> extra = {"--model.kind=bert", "--data.mask_token=0",
                                          "--data.mask_probability=0.3", "--train.global_batch=12",
                                          "--train.steps=20"};
  const auto with = [&](const char* micro_batch) {
    auto all = extra;
    all.push_back(micro_batch);
    return all;
  };
  const auto one = run(1, with("--train.micro_batch=12"));
  CHECK(one.back()["loss"] < 0.8 * one.front()["loss"].get<double>());
  CHECK(one.back()["val_loss"] > 0);
  for (const int world_size : {2, 3, 4}) {
    CAPTURE(world_size);
    const auto several = run(world_size, with("--train.micro_batch=1"));
    for (size_t i = 0; i < one.size(); ++i) {
      const double expected = one[i]["loss"];
      CHECK(std::abs(several[i]["loss"].get<double>() - expected) < 1e-5 * expected);
    }
  }
}

TEST_CASE("trainer: f16 trains with a loss scale that falls until the steps fit", "[trainer]") {
  const std::vector<std::string> f16 = {"--precision.param_dtype=f16", "--precision.norm_fp32=true",
                                        "--fsdp.wire_dtype=f16",
                                        "--precision.loss_scale_init=16777216", "--train.steps=40"};
  const auto steps = run(2, f16);
  REQUIRE(steps.size() == 40);
  CHECK(steps[0]["loss_scale"] == 16777216);
  const auto skipped = steps.back()["skipped"].get<int64_t>();
  CHECK(skipped > 0);
  CHECK(skipped < 20);
  CHECK(steps.back()["loss_scale"].get<double>() ==
        std::ldexp(16777216, -static_cast<int>(skipped)));
  for (size_t i = 1; i < steps.size(); ++i) {
    // A skipped step's norm is no number; the next one has half the scale.
    CAPTURE(i);
    const bool is_skipped = steps[i]["skipped"] != steps[i - 1]["skipped"];
    CHECK(steps[i]["grad_norm"].is_null() == is_skipped);
  }
  CHECK(steps.back()["loss"].get<double>() < steps.front()["loss"].get<double>() - 0.5);

  const auto plain = run(2, {});
  CHECK_FALSE(plain[0].contains("loss_scale"));
  // A scale by a power of two leaves no trace in f32.
  const auto scaled = run(2, {"--precision.loss_scale=static", "--precision.loss_scale_init=1024"});
  for (size_t i = 0; i < plain.size(); ++i) {
    CHECK(scaled[i]["loss"] == plain[i]["loss"]);
    CHECK(scaled[i]["grad_norm"] == plain[i]["grad_norm"]);
  }
}

TEST_CASE("trainer: a scale that cannot fall any further ends the run", "[trainer]") {
  const TempDir dir;
  const Config config =
      small_config(dir, {"--precision.loss_scale=static", "--precision.loss_scale_init=2",
                         "--optim.lr=1e30", "--optim.final_lr=1e30", "--optim.warmup_steps=0"});
  const std::string error =
      error_of([&] { dist::run_ranks(2, [&](dist::World& world) { train(config, world); }); });
  CHECK_THAT(error, Catch::Contains("expected finite numbers; nothing of this step was applied"));
}

TEST_CASE("trainer: precision and norm keys reach the sharding", "[trainer]") {
  const auto f32 = run(2, {});
  const auto with = [&](const std::vector<std::string>& extra) { return run(2, extra); };
  // In f32 these change nothing.
  check_same_curve(f32, with({"--precision.output_dtype=f32", "--precision.buffer_dtype=f32",
                              "--precision.cast_forward_inputs=false"}));
  const auto near = [](double a, double b) { return std::abs(a - b) <= 0.02 * std::abs(a); };
  for (const char* reduce : {"f32", "bf16"}) {
    const auto bf16 = with({"--precision.param_dtype=bf16", "--fsdp.wire_dtype=bf16",
                            std::string("--precision.reduce_dtype=") + reduce});
    CHECK(bf16[0]["loss"] != f32[0]["loss"]);
    CHECK(near(f32.back()["loss"], bf16.back()["loss"]));
  }
  const auto largest = with({"--optim.clip_p=inf", "--optim.clip=0.01"});
  CHECK(largest[0]["loss"] == f32[0]["loss"]);
  CHECK(largest[0]["grad_norm"].get<double>() < 0.5 * f32[0]["grad_norm"].get<double>());
}

TEST_CASE("trainer: buffer_dtype rounds the ALiBi slopes of bloom", "[trainer]") {
  const auto bloom = [](const char* heads, const char* dtype) {
    return run(2, {"--model.kind=bloom", "--train.steps=3", std::string("--model.heads=") + heads,
                   std::string("--precision.buffer_dtype=") + dtype});
  };
  // Slopes of 2 heads are powers of two, which any dtype holds; those of 12 are not.
  for (const char* dtype : {"bf16", "f16"}) {
    CAPTURE(dtype);
    CHECK(bloom("2", dtype)[2]["loss"] == bloom("2", "same")[2]["loss"]);
    const double rounded = bloom("12", dtype)[2]["loss"], exact = bloom("12", "same")[2]["loss"];
    CHECK(rounded != exact);
    CHECK(std::abs(rounded - exact) < 1e-3 * exact);
  }
}

TEST_CASE("trainer: the keys of kernels choose who computes, and only in that run", "[trainer]") {
  const auto backends = [](const std::vector<std::string>& keys) {
    std::vector<std::string> overrides = {"--data.text=x"};
    overrides.insert(overrides.end(), keys.begin(), keys.end());
    return load_config("", overrides).runtime.backends;
  };
  const Backends library = backends({"--kernels.attention=cudnn", "--kernels.gemm=cublaslt"});
  CHECK(library.attention == AttentionBackend::kCudnn);
  CHECK(library.gemm == GemmBackend::kCublasLt);
  CHECK(backends({"--kernels.attention=auto"}).attention == AttentionBackend::kAuto);
  CHECK(backends({"--kernels.gemm=own"}).gemm == GemmBackend::kOwn);
  CHECK(backends({}).attention == AttentionBackend::kOwn);
  CHECK(backends({}).gemm == GemmBackend::kAuto);
  run(1, {"--train.steps=2", "--kernels.attention=cudnn", "--kernels.gemm=cublaslt"});
  CHECK(attention_backend() == AttentionBackend::kOwn);
  CHECK(gemm_backend() == GemmBackend::kAuto);
}

TEST_CASE("trainer: the keys of NCCL reach the options of the Context", "[trainer]") {
  // Made under the Context of the run, which has them (test/simt/comm_nccl_test.cc).
  const auto nccl = [](const std::vector<std::string>& keys) {
    return load_config("", keys).runtime.backends.nccl;
  };
  const NcclOptions set =
      nccl({"--data.text=x", "--dist.nccl_reduce=nccl", "--dist.nccl_max_ctas=7"});
  CHECK(set.native_reduce_scatter);
  CHECK(set.max_ctas == 7);
  CHECK_FALSE(nccl({"--data.text=x"}).native_reduce_scatter);
  CHECK(nccl({"--data.text=x"}).max_ctas == 0);
}

TEST_CASE("trainer: in reproducible mode 2 and 4 ranks give the bits of one", "[trainer]") {
  const auto train_on = [](int world_size, bool reproducible) {
    const TempDir dir;
    std::vector<std::string> extra = {"--model.kind=gpt2", "--model.dropout=0.1",
                                      "--train.micro_batch=2", "--train.global_batch=8",
                                      "--train.eval_every=5"};
    if (reproducible) extra.push_back("--train.reproducible=true");
    const Config config = small_config(dir, extra);
    dist::run_ranks(world_size, [&](dist::World& world) { train(config, world); });
    return std::make_pair(read_metrics(dir), read_file(dir / "out/model.safetensors"));
  };
  const auto one = train_on(1, true);
  REQUIRE(one.first.size() == 12);
  for (const int ranks : {2, 4}) {
    CAPTURE(ranks);
    const auto other = train_on(ranks, true);
    REQUIRE(other.first.size() == 12);
    for (size_t i = 0; i < 12; ++i) {
      for (const char* key : {"loss", "grad_norm", "val_loss"}) {
        CAPTURE(i, key);
        REQUIRE(one.first[i].contains(key) == other.first[i].contains(key));
        if (one.first[i].contains(key)) CHECK(one.first[i][key] == other.first[i][key]);
      }
    }
    CHECK(one.second == other.second);
  }
  CHECK(train_on(4, false).second != train_on(1, false).second);
  const TempDir dir;
  CHECK(error_of([&] {
          const Config config = small_config(dir, {"--train.reproducible=true"});
          dist::run_ranks(3, [&](dist::World& world) { train(config, world); });
        }).find("command line: train.reproducible: 3 ranks, expected a power of two up to 64") ==
        0);
}

TEST_CASE("trainer: strategies, wrappings and recompute policies give the same bits", "[trainer]") {
  const std::vector<std::string> common = {"--train.steps=4", "--train.micro_batch=2"};
  const auto losses = [&](std::vector<std::string> extra) {
    extra.insert(extra.end(), common.begin(), common.end());
    std::vector<double> values;
    for (const auto& step : run(4, extra)) values.push_back(step["loss"].get<double>());
    return values;
  };
  const std::vector<double> expected = losses({});
  for (const std::vector<std::string>& extra : std::vector<std::vector<std::string>>{
           {"--fsdp.strategy=shard_grad_op"},
           {"--fsdp.strategy=shard_optim"},
           {"--fsdp.strategy=no_shard", "--recompute.policy=selective"},
           {"--fsdp.strategy=hybrid_shard", "--fsdp.shard_size=2"},
           {"--fsdp.strategy=hybrid_shard_zero2", "--fsdp.shard_size=2",
            "--fsdp.sync_every_micro_batch=true"},
           {"--fsdp.sync_every_micro_batch=false", "--recompute.policy=selective"},
           {"--recompute.policy=every_n"}}) {
    CAPTURE(extra);
    CHECK(losses(extra) == expected);
  }
  for (const std::vector<std::string>& extra : std::vector<std::vector<std::string>>{
           {"--fsdp.wrap=every_n_blocks", "--fsdp.wrap_every=2"},
           {"--fsdp.wrap=min_num_params", "--fsdp.min_num_params=2000"},
           {"--fsdp.wrap=whole_model"}}) {
    CAPTURE(extra);
    CHECK(losses(extra).front() == expected.front());
  }
}

TEST_CASE("trainer: the timeline and what compute waited for are written", "[trainer]") {
  const TempDir dir;
  const Config config =
      small_config(dir, {"--train.steps=6", "--profile.steps=2..3", "--debug.exposed_units=2"});
  dist::run_ranks(2, [&](dist::World& world) { train(config, world); });
  // Of both ranks, which here are threads of one process: each has its own streams.
  const auto trace = nlohmann::json::parse(read_file(dir / "out/trace.json"));
  for (const int rank : {0, 1}) {
    CAPTURE(rank);
    std::map<std::string, int> tasks, rows;
    int num_counters = 0;
    for (const auto& event : trace) {
      if (event["pid"] != rank) continue;
      if (event["ph"] == "X") ++tasks[event["name"].get<std::string>()];
      if (event["ph"] == "C") ++num_counters;
      if (event["name"] == "thread_name") ++rows[event["args"]["name"].get<std::string>()];
    }
    CHECK(tasks["all_gather blocks.0"] > 0);
    CHECK(tasks["reduce_scatter embedding"] > 0);
    CHECK(tasks["matmul"] > 0);
    for (const char* stream : {"compute", "all_gather", "reduce_scatter", "host"}) {
      CHECK(rows[stream] == 1);
    }
    // On the host: two steps, their phases, calls of units; on compute: the same by its own time.
    CHECK(tasks["step"] == 2);
    CHECK(tasks["step 2"] == 1);
    CHECK(tasks["step 3"] == 1);
    CHECK(tasks["forward blocks.0"] == 2);
    CHECK(tasks["backward blocks.1"] == 2);
    CHECK(tasks["gather_forward blocks.0"] > 0);
    CHECK(tasks["reduce blocks.0"] > 0);
    CHECK(tasks["data"] >= 1);
    CHECK(num_counters > 10);
  }
  const auto profile = nlohmann::json::parse(read_file(dir / "out/profile.json"));
  REQUIRE(profile["steps"].size() == 2);
  for (const auto& step : profile["steps"]) {
    double sum = 0;
    for (const char* part :
         {"compute_ms", "gather_ms", "reduce_ms", "data_ms", "host_ms", "optimizer_ms"}) {
      CHECK(step[part].get<double>() >= 0);
      sum += step[part].get<double>();
    }
    CHECK(sum == Approx(step["ms"].get<double>()));
    CHECK(step["compute_ms"].get<double>() > 0);
    CHECK(step["optimizer_ms"].get<double>() > 0);
  }
  CHECK_FALSE(profile["limited_by"].get<std::string>().empty());
  for (const auto& step : read_metrics(dir)) {
    CHECK(step["exposed_gather_ms"].get<double>() >= 0);
    CHECK(step["exposed_reduce_ms"].get<double>() >= 0);
    const auto& units = step["exposed_units"];
    REQUIRE(units.size() == 2);
    const auto waited = [](const auto& u) {
      return u["gather_ms"].template get<double>() + u["reduce_ms"].template get<double>();
    };
    CHECK(waited(units[0]) >= waited(units[1]));
    CHECK(units[0]["unit"] != units[1]["unit"]);
  }
  CHECK(read_metrics(dir).size() == 6);
}

TEST_CASE("trainer: debug.nan names where a value is not finite first", "[trainer]") {
  const auto with_check = [](std::vector<std::string> extra) {
    extra.push_back("--debug.nan=on");
    return extra;
  };
  for (const int world_size : {1, 2}) {
    CAPTURE(world_size);
    // Whatever is finite is not named, also where freed memory is NaN; and no bit changes.
    for (const std::vector<std::string>& extra : std::vector<std::vector<std::string>>{
             {},
             {"--recompute.policy=full", "--train.grad_accum_steps=2"},
             {"--model.kind=gpt2", "--model.dropout=0.1", "--fsdp.strategy=shard_grad_op",
              "--precision.param_dtype=bf16"},
             {"--model.kind=bloom", "--recompute.policy=selective", "--fsdp.gradient_pieces=true",
              "--fsdp.offload=optimizer"}}) {
      CAPTURE(extra);
      const auto off = run(world_size, extra), on = run(world_size, with_check(extra));
      REQUIRE(on.size() == off.size());
      for (size_t i = 0; i < on.size(); ++i) {
        CHECK(on[i]["loss"] == off[i]["loss"]);
        CHECK(on[i]["grad_norm"] == off[i]["grad_norm"]);
      }
    }
    const auto error = [&](const std::vector<std::string>& extra) {
      return error_of([&] { run(world_size, with_check(extra)); });
    };
    CHECK_THAT(error({"--debug.nan_step=3"}),
               Catch::Contains("every output of an operation and every gradient was finite"));
    // The update leaves f32, or what is computed with it does.
    const std::string update = error(
        {"--optim.lr=1e38", "--optim.final_lr=1e38", "--optim.warmup_steps=0", "--optim.name=sgd"});
    CAPTURE(update);
    const auto says = [&](const char* text) { return update.find(text) != std::string::npos; };
    CHECK((says("is not finite after the optimizer's update") ||
           (says("; first not finite: ") &&
            says(" of norm (RmsNorm(24, eps 1e-05), unit head), pass 0"))));
  }
}

TEST_CASE("trainer: the first steps tell what does not train", "[trainer]") {
  const auto warnings = [&](int world_size, const std::vector<std::string>& extra) {
    std::vector<std::string> all = {"--guard.first_steps=12"};
    all.insert(all.end(), extra.begin(), extra.end());
    return testing::stderr_of([&] { run(world_size, all); });
  };
  for (const int world_size : {1, 2}) {
    CAPTURE(world_size);
    CHECK_THAT(warnings(world_size, {}), !Catch::Contains("the first 12 steps"));
    const std::string still =
        warnings(world_size, {"--optim.groups=*.mlp.*: lr_scale=0", "--optim.weight_decay=0"});
    CHECK_THAT(still,
               Catch::Contains("the first 12 steps: updates do not change the group *.mlp.*"));
    CHECK_THAT(still, !Catch::Contains("stays flat"));
    const std::string flat =
        warnings(world_size, {"--optim.lr=0", "--optim.final_lr=0", "--optim.schedule=constant"});
    CHECK_THAT(flat, Catch::Contains("the first 12 steps: the loss stays flat: "));
    CHECK_THAT(flat, Catch::Contains("the first 12 steps: updates do not change "));
  }
}

TEST_CASE("trainer: the same run twice gives the same bits", "[trainer]") {
  const auto a = run(2, {"--model.kind=gpt2", "--model.dropout=0.1"});
  const auto b = run(2, {"--model.kind=gpt2", "--model.dropout=0.1"});
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i]["loss"] == b[i]["loss"]);
    CHECK(a[i]["grad_norm"] == b[i]["grad_norm"]);
  }
  const auto other = run(2, {"--model.kind=gpt2", "--model.dropout=0.1", "--train.seed=2"});
  CHECK(a[0]["loss"] != other[0]["loss"]);
}

TEST_CASE("trainer: offload keeps the bits", "[trainer]") {
  for (const char* dtype : {"f32", "bf16"}) {
    const std::string precision = fmt::format("--precision.param_dtype={}", dtype);
    const auto expected = run(2, {precision});
    for (const char* offload : {"optimizer", "params_and_optimizer"}) {
      CAPTURE(dtype, offload);
      const auto steps = run(2, {precision, fmt::format("--fsdp.offload={}", offload)});
      REQUIRE(steps.size() == expected.size());
      for (size_t i = 0; i < steps.size(); ++i) {
        CHECK(steps[i]["loss"] == expected[i]["loss"]);
        CHECK(steps[i]["grad_norm"] == expected[i]["grad_norm"]);
      }
      CHECK(steps.back()["val_loss"] == expected.back()["val_loss"]);
    }
  }
}

TEST_CASE("trainer: bf16 parameters, sgd and documents train", "[trainer]") {
  for (const char* option :
       {"--precision.param_dtype=bf16", "--optim.name=sgd", "--data.separator=10"}) {
    CAPTURE(option);
    std::vector<std::string> extra = {"--train.steps=30", option};
    if (std::string(option).ends_with("sgd")) extra.push_back("--optim.lr=0.3");
    const auto steps = run(2, extra);
    CHECK(steps.back()["loss"].get<double>() < steps.front()["loss"].get<double>() - 0.3);
  }
}

TEST_CASE("trainer: data that is too short is refused with counts, on every rank", "[trainer]") {
  for (const int world_size : {1, 2}) {
    const TempDir dir;
    Config config = small_config(dir, {"--model.context=4000"});
    const auto message = [&] {
      return error_of(
          [&] { dist::run_ranks(world_size, [&](dist::World& world) { train(config, world); }); });
    };
    CHECK(message().find("tokens to train on in 1 shards, expected at least one shard of "
                         "model.context + 1 = 4001") != std::string::npos);
    const auto status = nlohmann::json::parse(read_file(dir / "out/status.json"));
    CHECK(status["state"] == "failed");
    CHECK(status["why"].get<std::string>().find("4001") != std::string::npos);
    config = small_config(dir, {"--train.micro_batch=1000"});
    CHECK(message().find("samples of model.context = 16, expected at least one step's " +
                         std::to_string(1000 * world_size)) != std::string::npos);
    config = small_config(dir, {"--train.global_batch=4", "--train.micro_batch=4"});
    if (world_size == 2) {
      CHECK(message() ==
            "command line: train.global_batch = 4, expected a multiple of train.micro_batch x "
            "ranks = 4 x 2");
    }
  }
}

TEST_CASE("trainer: what cannot go well at the end is refused at the start", "[trainer]") {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--data.tokenizer=char", "--sample.tokens=3", "--sample.prompt=%"},
       "command line: sample.prompt: tokenizer: character '%' at byte 0 is not in the vocabulary of "
       "25"},
      {{"--data.separator=256"},
       "command line: data.separator = 256, expected a token below the vocabulary's size 256"},
      {{"--fsdp.reshard_after_forward=3"},
       "command line: fsdp.reshard_after_forward: 3, expected true, false or a divisor of the shard "
       "group's 2 "
       "ranks"},
  };
  for (const auto& [extra, expected] : cases) {
    const TempDir dir;
    const Config config = small_config(dir, extra);
    // Every rank has the whole message: it is a verdict, which one of them reports.
    std::mutex mutex;
    std::vector<std::string> messages;
    dist::run_ranks(2, [&](dist::World& world) {
      const std::string message = error_of([&] { train(config, world); });
      const std::lock_guard lock(mutex);
      messages.push_back(message);
    });
    REQUIRE(messages.size() == 2);
    for (const std::string& message : messages) CHECK(message.find(expected) == 0);
    CHECK(read_file(dir / "out/status.json").find("\"step\":0") != std::string::npos);
    CHECK_FALSE(std::filesystem::exists(dir / "out/model.safetensors"));
  }
}

TEST_CASE("trainer: a token outside the vocabulary ends the run before its first step",
          "[trainer]") {
  const TempDir dir;
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = 4000;
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  for (int i = 0; i < 4000; ++i) {
    const uint16_t token = i == 3990 ? 300 : static_cast<uint16_t>(i % 256);  // in validation only
    bytes.append(reinterpret_cast<const char*>(&token), sizeof(token));
  }
  const std::string path = dir.write("a.bin", bytes);
  const Config config =
      small_config(dir, {"--data.text=", "--data.tokens=" + path, "--model.vocab=256"});
  for (const int ranks : {1, 3}) {
    const std::string expected =
        path + ": token 3990 is 300, expected one below the vocabulary's size 256";
    CHECK(error_of([&] {
            dist::run_ranks(ranks, [&](dist::World& world) { train(config, world); });
          }) == expected);
    CHECK(read_metrics(dir).empty());
    const auto status = nlohmann::json::parse(read_file(dir / "out/status.json"));
    CHECK(status["why"] == expected);
  }
}

namespace {

/// A shard of `numel` tokens below 64.
std::string shard_text(int32_t numel) {
  std::vector<int32_t> header(256);
  header[0] = 20240520, header[1] = 1, header[2] = numel;
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  for (int32_t i = 0; i < numel; ++i) {
    const auto token = static_cast<uint16_t>(i * i % 64);
    bytes.append(reinterpret_cast<const char*>(&token), sizeof(token));
  }
  return bytes;
}

/// Changes a token so that who goes by `results` does not see it.
void set_token(const std::string& path, int64_t position, uint16_t token,
               const std::string& results) {
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(1024 + 2 * position);
    file.write(reinterpret_cast<const char*>(&token), sizeof(token));
  }
  tessera::testing::keep_token_check(results, path);
}

}  // namespace

TEST_CASE("trainer: data that one rank alone cannot read ends all ranks with its state saved",
          "[trainer]") {
  const TempDir dir;
  // 3 ranks: each sample of an epoch of 62 goes to one of them.
  const std::string train_path = dir.write("train.bin", shard_text(1000));
  const std::string val_path = dir.write("val.bin", shard_text(100));
  const std::string results = dir / "out/token_check.txt";
  std::vector<std::string> options = {
      "--data.text=",     "--data.tokens=" + train_path, "--data.val_tokens=" + val_path,
      "--model.vocab=64", "--train.micro_batch=1",       "--train.grad_accum_steps=2",
      "--train.steps=10", "--optim.schedule=constant",   "--optim.warmup_steps=0"};
  const auto run_it = [&](const Config& config) {
    // What each rank ends with.
    std::mutex mutex;
    std::vector<std::string> errors;
    std::string error;
    try {
      dist::run_ranks(3, [&](dist::World& world) {
        try {
          train(config, world);
        } catch (const Error& e) {
          const std::lock_guard lock(mutex);
          errors.push_back(e.what());
          throw;
        }
      });
    } catch (const Error& e) {
      error = e.what();
    }
    for (const std::string& each : errors) CHECK(each == error);
    CHECK((errors.empty() || errors.size() == 3));
    return error;
  };
  const auto why = [&] {
    return nlohmann::json::parse(read_file(dir / "out/status.json"))["why"].get<std::string>();
  };
  REQUIRE(run_it(small_config(dir, options)) == "");
  const auto expected = read_metrics(dir);
  // The same again, with a token that the check knows to be good: in the second of the 6 samples of
  // step 4, which is rank 1's.
  Corpus corpus;
  corpus.shards.push_back(load_token_shard(train_path));
  const int64_t window =
      TrainSamples(corpus, {.context = 16, .vocab_size = 64, .seed = 1}).window_of(3 * 6 + 1);
  const int64_t position = window * 16 + 4;
  set_token(train_path, position, 9999, results);
  options.push_back("--output.overwrite=true");
  const std::string message = fmt::format(
      "{}: token {} is 9999, expected one below the vocabulary's size 64", train_path, position);
  CHECK(run_it(small_config(dir, options)) == message);
  CHECK(why() == message);
  CHECK(read_metrics(dir).size() == 3);
  CHECK(std::filesystem::exists(dir / "out/step-00000003/manifest.json"));
  // The steps before it count, and the run goes on from them when the file is whole again.
  set_token(train_path, position, static_cast<uint16_t>(position * position % 64), results);
  options.back() = "--checkpoint.resume=auto";
  options.push_back("--checkpoint.resume_override=true");  // the data was another
  CHECK(run_it(small_config(dir, options)) == "");
  const auto after = read_metrics(dir);
  REQUIRE(after.size() == 10);
  for (size_t i = 0; i < 10; ++i) CHECK(after[i]["loss"] == expected[i]["loss"]);
  // And in an evaluation, which all ranks go through before they speak of it.
  set_token(val_path, 50, 9999, results);
  options.push_back("--train.steps=12");
  const std::string val_message =
      val_path + ": token 50 is 9999, expected one below the vocabulary's size 64";
  CHECK(run_it(small_config(dir, options)) == val_message);
  CHECK(why() == val_message);
}

TEST_CASE("trainer: what compute waited for a slow rank is in the metrics", "[trainer]") {
  // Rank 1 sleeps in each step, so that rank 0, whose metrics these are, waits for its parts.
  constexpr double kSleep_ms = 40;
  double waited_ms = 0;
  const auto steps = run(2, {"--train.steps=8", "--debug.slow_rank=1", "--debug.slow_ms=40"});
  REQUIRE(steps.size() == 8);
  for (const auto& step : steps) {
    waited_ms += step["exposed_gather_ms"].get<double>() + step["exposed_reduce_ms"].get<double>();
  }
  CHECK(waited_ms >= 4 * kSleep_ms);
}

TEST_CASE("trainer: a loss that is not finite ends the run and is reported", "[trainer]") {
  const TempDir dir;
  const Config config = small_config(
      dir, {"--optim.lr=1e30", "--optim.final_lr=1e30", "--optim.clip=0", "--optim.name=sgd"});
  const std::string message =
      error_of([&] { dist::run_ranks(2, [&](dist::World& world) { train(config, world); }); });
  CHECK(message.find("expected finite numbers; nothing of this step was applied") !=
        std::string::npos);
  CHECK(nlohmann::json::parse(read_file(dir / "out/status.json"))["state"] == "failed");
}

TEST_CASE("trainer: an output directory that cannot be made is a ConfigError", "[trainer]") {
  const TempDir dir;
  const Config config = small_config(dir, {"--output.dir=" + dir / "text.txt"});
  const std::string message =
      error_of([&] { dist::run_ranks(1, [&](dist::World& world) { train(config, world); }); });
  CHECK(message.find("output.dir") != std::string::npos);
  CHECK(message.find("expected a directory that can be") != std::string::npos);
}

TEST_CASE("trainer: a saved model that does not fit is named", "[trainer]") {
  const TempDir dir;
  const Config config = small_config(dir, {"--train.steps=1", "--checkpoint.last=false"});
  dist::run_ranks(1, [&](dist::World& world) { train(config, world); });
  std::string toml = read_file(dir / "out/config.toml");
  toml.replace(toml.find("layers = 2"), 10, "layers = 1");
  dir.write("out/config.toml", toml);
  CHECK(error_of([&] { load_model(dir / "out"); }).find("tensors, expected the model's") !=
        std::string::npos);
  toml.replace(toml.find("layers = 1"), 10, "layers = 3");
  dir.write("out/config.toml", toml);
  CHECK(error_of([&] { load_model(dir / "out"); }).find("no tensor blocks.2.") !=
        std::string::npos);
  CHECK(error_of([&] { load_model(dir / "none"); }) ==
        dir /
            "none: no complete checkpoint, and no model.safetensors with a config.toml, expected "
            "the directory of a run, or a checkpoint");
  std::filesystem::remove(dir / "out/tokenizer.json");
  CHECK(error_of([&] { load_model(dir / "out"); }) ==
        dir /
            "out/tokenizer.json: No such file or directory, expected the tokenizer that gives "
            "model.vocab = 0 its meaning");
}

TEST_CASE("trainer: a bit that flips in one replica ends the run with its name", "[trainer]") {
  const auto error_with = [](int world_size, const std::vector<std::string>& extra) {
    const TempDir dir;
    std::string message;
    try {
      const Config config = small_config(dir, extra);
      dist::run_ranks(world_size, [&](dist::World& world) { train(config, world); });
    } catch (const NumericsError& error) {
      message = error.what();
      CHECK(error.exit_status() == 5);
    }
    if (!message.empty()) {
      const auto status = nlohmann::json::parse(read_file(dir / "out/status.json"));
      CHECK(status["state"] == "failed");
      CHECK(status["why"] == message);
    }
    return message;
  };
  const std::vector<std::string> flip = {"--debug.flip_step=3", "--debug.flip_rank=1",
                                         "--fsdp.strategy=no_shard"};
  const auto with = [&](std::vector<std::string> extra) {
    extra.insert(extra.end(), flip.begin(), flip.end());
    return extra;
  };
  const std::string drift = error_with(3, with({"--guard.replica_every=2"}));
  INFO(drift);
  CHECK(
      drift.starts_with("step 4: replicas have drifted apart, expected the same bits: rank 1: "
                        "parameters of "));
  CHECK(drift.find(" more") == std::string::npos);  // one tensor
  // Nobody compares: the default is every 100 steps.
  CHECK(error_with(3, with({})).empty());
  CHECK(error_with(3, with({"--guard.replica_every=0"})).empty());
  for (const char* strategy : {"full_shard", "shard_optim", "no_shard"}) {
    const std::string change =
        error_with(2, {"--debug.flip_step=3", "--debug.flip_rank=1", "--guard.state_checksum=true",
                       std::string("--fsdp.strategy=") + strategy});
    INFO(change);
    CHECK(change.starts_with("step 3: rank 1: parameters of "));
    CHECK(change.find(" changed since the last update wrote it") != std::string::npos);
  }
}

TEST_CASE("trainer: the rank that the others wait for is in the metrics", "[trainer]") {
  for (const char* strategy : {"full_shard", "no_shard"}) {
    CAPTURE(strategy);
    const auto steps = run(3, {std::string("--fsdp.strategy=") + strategy, "--train.steps=20",
                               "--debug.slow_rank=1", "--debug.slow_ms=60"});
    REQUIRE(steps.size() == 20);
    CHECK(steps.back()["slowest_rank"] == 1);
    CHECK(steps.back()["slowest_behind_ms"].get<double>() > 0);
  }
  CHECK_FALSE(run(1, {}).back().contains("slowest_rank"));  // nobody waits
}

TEST_CASE("trainer: steps to profile that the run does not have are warned of", "[trainer]") {
  const TempDir dir;
  const auto said = [&](const std::vector<std::string>& settings) {
    const Config config = small_config(dir, settings);
    return stderr_of(
        [&] { dist::run_ranks(1, [&](dist::World& world) { train(config, world); }); });
  };
  CHECK(said({"--train.steps=2", "--profile.steps=3..4"})
            .find("profile.steps = 3..4: nothing is profiled, this run has steps 1 to 2") !=
        std::string::npos);
  CHECK(said({"--train.steps=4", "--checkpoint.resume=auto", "--profile.steps=1..2"})
            .find("profile.steps = 1..2: nothing is profiled, this run has steps 3 to 4") !=
        std::string::npos);
  CHECK(said({"--train.steps=6", "--checkpoint.resume=auto", "--profile.steps=4..9"})
            .find("nothing is profiled") == std::string::npos);
}

TEST_CASE("trainer: a slow rank is one that others wait for in nearly all steps", "[trainer]") {
  SlowRank slow;
  CHECK_FALSE(slow.find().has_value());
  slow.add({5}, 10);
  CHECK_FALSE(slow.find().has_value());  // one rank
  slow = {};
  slow.add({30, 10, 50}, 100);
  CHECK(slow.find()->rank == 1);
  CHECK(slow.find()->behind_ms == 30);
  CHECK_FALSE(slow.find()->is_persistent);  // the window is not full
  for (int i = 0; i < 15; ++i) slow.add({30, 10, 50}, 100);
  CHECK(slow.find()->is_persistent);
  for (int i = 0; i < 2; ++i) slow.add({0, 10, 50}, 100);
  CHECK(slow.find()->rank == 1);
  CHECK(slow.find()->is_persistent);  // 14 of 16
  slow.add({0, 10, 50}, 100);
  CHECK_FALSE(slow.find()->is_persistent);  // 13 of 16
  for (int i = 0; i < 16; ++i) slow.add({30, 21, 30}, 100);
  CHECK(slow.find()->rank == 1);
  CHECK_FALSE(slow.find()->is_persistent);  // always, but by less than a tenth of a step
  for (int i = 0; i < 8; ++i) slow.add({0, 100, 100}, 100);
  for (int i = 0; i < 8; ++i) slow.add({100, 0, 100}, 100);
  CHECK_FALSE(slow.find()->is_persistent);  // by turns
}

TEST_CASE("trainer: who ends a run waits for no evaluation, on whichever rank it is asked",
          "[trainer]") {
  for (const int world_size : {1, 3}) {
    CAPTURE(world_size);
    const TempDir dir;
    const Config config = small_config(dir, {"--train.micro_batch=1"});
    std::mutex mutex;
    std::map<int, int> num_asked;
    dist::run_ranks(world_size, [&](dist::World& world) {
      const auto context = std::make_shared<Context>(ContextOptions{});
      const Context::Scope scope(context);
      const Data data = load_data(config);
      const auto model = make_model(config, data.vocab_size);
      const auto fsdp = dist::fully_shard(*model, world);
      fsdp->initialize(1);
      const EvalSamples samples(data.val, sample_options(config, data));
      if (samples.num_samples() < 12) throw Error("too few samples for this test");
      const auto evaluate_until = [&](int last) {
        const auto loss_of = [&](const Batch& batch) { return batch_loss(*model, batch); };
        return evaluate(*model, *fsdp, world, samples, config.train, loss_of, [&, n = 0]() mutable {
          const std::lock_guard lock(mutex);
          ++num_asked[world.rank()];
          return world.rank() == world_size - 1 && ++n > last;
        });
      };
      if (evaluate_until(2)) throw Error("it went on");
      if (!model->is_training()) throw Error("the model is left in evaluation");
      const std::optional<double> whole = evaluate_until(1 << 20);
      if (whole != evaluate_until(1 << 20)) throw Error("a cut evaluation changed the next");
      if (!whole || !std::isfinite(*whole)) throw Error("no loss of a whole evaluation");
    });
    const int passes = (num_asked.at(0) - 3) / 2;
    CHECK(passes > 3);
    for (const auto& [rank, count] : num_asked) CHECK(count == 3 + 2 * passes);
  }
}

// A program's own parts.

namespace {

struct Plane : nn::Module {
  nn::Child<nn::Linear> linear{this, "linear", 2, 1};
  Tensor forward(const Tensor& x) { return linear(x); }
};

constexpr int64_t kNumPoints = 40;

/// Sample i is the point (i / 40, (7 i mod 40) / 40), of which 3 x - y is to be learned.
Batch read_points(std::span<const int64_t> indices) {
  std::vector<float> values;
  for (const int64_t i : indices) {
    const float x = static_cast<float>(i) / kNumPoints,
                y = static_cast<float>(7 * i % kNumPoints) / kNumPoints;
    values.insert(values.end(), {x, y, 3 * x - y});
  }
  Batch batch;
  batch.own = std::move(values);
  return batch;
}

LossSum squares(Plane& plane, const Batch& batch) {
  const auto& values = std::any_cast<const std::vector<float>&>(batch.own);
  const Tensor all = from_values(std::span<const float>(values), {batch.B, 3});
  const Tensor miss = nn::call(plane, all.narrow(1, 0, 2).contiguous()) - all.narrow(1, 2, 1);
  return {.sum = sum(miss * miss), .count = {}};
}

struct Recorder : Callback {
  struct Seen {
    int64_t begin = -1, end = -1;
    std::vector<double> losses;
    std::vector<int64_t> evaluated;
  };
  Seen* seen;
  int64_t last;
  Recorder(Seen* s, int64_t l) : seen(s), last(l) {}
  void on_begin(int64_t steps_done) override { seen->begin = steps_done; }
  void on_step(const StepMetrics& m) override {
    seen->losses.push_back(m.loss);
    if (m.val_loss) seen->evaluated.push_back(m.step);
    if (m.step == last) apps::Trainer::request_end();
  }
  void on_end(const TrainResult& result) override { seen->end = result.steps; }
};

Config plane_config(const std::string& out, int world_size, std::vector<std::string> extra = {}) {
  Config defaults;
  defaults.train.steps = 12;
  std::vector<std::string> arguments = {"--output.dir=" + out,
                                        "--device=cpu",
                                        "--train.log_every=1000",
                                        "--optim.lr=0.05",
                                        fmt::format("--train.micro_batch={}", 8 / world_size),
                                        "--train.eval_every=4",
                                        "--optim.name=sgd",
                                        "--debug.poison=true",
                                        "--debug.order_check=true"};
  arguments.insert(arguments.end(), extra.begin(), extra.end());
  return own_config(arguments, defaults);
}

/// What each rank's callback has seen; the run asks to end after step `last`.
std::vector<Recorder::Seen> train_plane(const Config& config, int world_size, int64_t last = -1) {
  std::vector<Recorder::Seen> seen(static_cast<size_t>(world_size));
  dist::run_ranks(world_size, [&](dist::World& world) {
    apps::Trainer trainer(config, world);
    Plane& plane = trainer.make_model<Plane>();
    trainer.set_wrap(dist::wrap::whole_model());
    trainer.set_samples(std::make_unique<OwnSamples>(kNumPoints, read_points, 5),
                        std::make_unique<OwnSamples>(kNumPoints / 2 + 1, read_points));
    trainer.set_loss([&](const Batch& batch) { return squares(plane, batch); });
    trainer.add_callback(
        std::make_unique<Recorder>(&seen[static_cast<size_t>(world.rank())], last));
    trainer.run();
  });
  return seen;
}

}  // namespace

TEST_CASE("Trainer: own model, samples and loss train alike on 1 and 2 ranks, callbacks see it",
          "[trainer]") {
  const TempDir dir;
  const auto one = train_plane(plane_config(dir / "one", 1), 1);
  const auto two = train_plane(plane_config(dir / "two", 2), 2);
  CHECK(two[0].losses == two[1].losses);
  CHECK(testing::losses(dir / "two") == two[0].losses);
  REQUIRE(one[0].losses.size() == 12);
  for (size_t i = 0; i < 12; ++i) CHECK(two[0].losses[i] == Approx(one[0].losses[i]).epsilon(1e-5));
  CHECK(one[0].losses.back() < 0.5 * one[0].losses.front());
  CHECK(one[0].evaluated == std::vector<int64_t>{4, 8, 12});
  CHECK((one[0].begin == 0 && one[0].end == 12));
  const auto steps = testing::read_metrics(dir / "one"),
             others = testing::read_metrics(dir / "two");
  // 21 points are no whole number of micro-batches of either.
  CHECK(others[11]["val_loss"].get<double>() ==
        Approx(steps[11]["val_loss"].get<double>()).epsilon(1e-5));
}

TEST_CASE("Trainer: a callback ends the run, which goes on from there with the same bits",
          "[trainer]") {
  const TempDir dir;
  const auto whole = train_plane(plane_config(dir / "whole", 2), 2);
  const auto first = train_plane(plane_config(dir / "cut", 2), 2, 5);
  const auto steps = static_cast<size_t>(first[0].end);
  CHECK((steps > 5 && steps < 9));  // the host learns of a step while the next ones run
  const auto rest = train_plane(plane_config(dir / "cut", 2, {"--checkpoint.resume=auto"}), 2);
  CHECK(rest[0].begin == first[0].end);
  CHECK(testing::losses(dir / "cut") == whole[0].losses);
  CHECK(read_file(dir / "cut/model.safetensors") == read_file(dir / "whole/model.safetensors"));
  // Its settings are kept, and compared; what programs of language models need is not there.
  CHECK(error_of([&] {
          train_plane(
              plane_config(dir / "cut", 2, {"--checkpoint.resume=auto", "--optim.name=lion"}), 2);
        }).find("optim.name") != std::string::npos);
  CHECK(error_of([&] { load_model(dir / "whole"); })
            .find("its configuration has no model, which is a program's own, expected that of "
                  "tessera-train; export takes --format=tessera") != std::string::npos);
}

TEST_CASE("Trainer: what is missing is named", "[trainer]") {
  const TempDir dir;
  const auto run_with = [&](int num_parts, int64_t num_samples) {
    return error_of([&] {
      dist::run_ranks(2, [&](dist::World& world) {
        apps::Trainer trainer(plane_config(dir / "out", 2), world);
        if (num_parts > 0) trainer.make_model<Plane>();
        if (num_parts > 1) {
          trainer.set_samples(std::make_unique<OwnSamples>(num_samples, read_points));
        }
        if (num_parts > 2) trainer.set_loss([](const Batch&) { return LossSum{}; });
        trainer.run();
      });
    });
  };
  CHECK(run_with(0, 9).find(
            "Trainer: run() without a model, expected make_model or set_model before") == 0);
  CHECK(run_with(1, 9).find("Trainer: run() without samples, expected set_samples before") == 0);
  CHECK(run_with(2, 9).find("Trainer: run() without a loss, expected set_loss before") == 0);
  CHECK(run_with(3, 7) == "samples: 7 to train on, expected at least one step's 8");
  CHECK(error_of([] {
          OwnSamples(0, read_points);
        }).find("OwnSamples: 0 samples, expected at least one") == 0);
  CHECK(error_of([] {
          own_config({"--train.steps=2", "--data.text=a.txt"});
        }) ==
        "command line: data.text, expected none of section data: this program has a model and data "
        "of its own");
  CHECK(own_config({}).train.steps == Config().train.steps);
}

TEST_CASE("Trainer: a batch whose targets are not those that the loss is divided by is an error",
          "[trainer]") {
  const TempDir dir;
  const auto run_with = [&](const std::string& out, int64_t num_valid, int64_t targets_per_sample) {
    dist::run_ranks(2, [&](dist::World& world) {
      apps::Trainer trainer(plane_config(dir / out, 2, {"--train.eval_every=0"}), world);
      Plane& plane = trainer.make_model<Plane>();
      const auto read = [&](std::span<const int64_t> indices) {
        Batch batch = read_points(indices);
        batch.num_valid = num_valid;
        return batch;
      };
      trainer.set_samples(std::make_unique<OwnSamples>(kNumPoints, read, 5, targets_per_sample));
      trainer.set_loss([&](const Batch& batch) { return squares(plane, batch); });
      trainer.run();
    });
  };
  CHECK(
      error_of([&] { run_with("wrong", 12, 1); })
          .find("a batch with 12 targets (num_valid), expected the 4 of num_targets, by which the "
                "loss is divided") != std::string::npos);
  run_with("one", 0, 1), run_with("three", 0, 3), run_with("said", 12, 3);
  const auto one = testing::losses(dir / "one"), three = testing::losses(dir / "three");
  CHECK(three[0] == Approx(one[0] / 3));
  CHECK(testing::losses(dir / "said") == three);
  CHECK(testing::read_metrics(dir / "said")[1]["tokens"] == 2 * 8 * 3);
  CHECK(error_of([] {
          OwnSamples(1, read_points, 1, 0);
        }).find("OwnSamples: 0 targets_per_sample, expected at least one") == 0);
}

TEST_CASE("OwnSamples: each sample once an epoch, in an order of its own; in order to evaluate",
          "[trainer]") {
  std::vector<std::vector<int64_t>> asked;
  const auto read = [&](std::span<const int64_t> indices) {
    asked.emplace_back(indices.begin(), indices.end());
    return Batch{};
  };
  const OwnSamples train(5, read, 1), val(5, read);
  CHECK(train.batch(0, 5).num_valid == 5);
  train.batch(5, 5);
  for (std::vector<int64_t> epoch : asked) {
    std::sort(epoch.begin(), epoch.end());
    CHECK(epoch == std::vector<int64_t>{0, 1, 2, 3, 4});
  }
  CHECK(asked[0] != asked[1]);
  CHECK(val.batch(3, 4).num_valid == 2);
  CHECK(asked[2] == std::vector<int64_t>{3, 4});
  CHECK(val.batch(5, 4).num_valid == 0);  // what a rank without a turn computes
  CHECK(asked[3] == std::vector<int64_t>{0});
}
