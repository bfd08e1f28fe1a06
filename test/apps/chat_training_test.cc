// Training on conversations: what the loss is of, on any number of ranks, and what goes on.

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>

#include "apps/budget.h"
#include "apps/checkpoint_command.h"
#include "apps/loss.h"
#include "apps/options.h"
#include "apps/packed_samples.h"
#include "apps/preferences.h"
#include "core/autograd.h"
#include "core/runtime/context.h"
#include "test/apps/runs.h"
#include "test/golden/golden.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::error_on;
using tessera::testing::losses;
using tessera::testing::read_file;
using tessera::testing::read_metrics;
using tessera::testing::TempDir;
using tessera::testing::train_on;

namespace {

const char* const kTemplate =
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ '$' if m.role == 'assistant' }}\n"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

/// Conversations of many lengths, some of several turns.
std::string many_chats() {
  std::string lines;
  for (int i = 0; i < 90; ++i) {
    const std::string n = std::to_string(i * i);
    nlohmann::json row;
    if (i % 3 == 0) {
      row = {{"prompt", "square of " + std::to_string(i)}, {"completion", n}};
    } else {
      const auto turn = [](const std::string& role, const std::string& content) {
        return nlohmann::json{{"role", role}, {"content", content}};
      };
      row["messages"] = {turn("user", n), turn("assistant", std::string(i % 17, 'x') + "y"),
                         turn("user", "and"), turn("assistant", "no")};
    }
    lines += row.dump() + "\n";
  }
  return lines;
}

Config chat_config(const TempDir& dir, const std::vector<std::string>& extra = {}) {
  return testing::six_step_config(dir,
                                  {"--data.chat=" + dir.write("chats.jsonl", many_chats()),
                                   "--data.chat_template=" + dir.write("chat.jinja", kTemplate),
                                   "--data.restart_positions=true", "--model.context=48"},
                                  extra);
}

/// Floating-point operations of what the compute stream is given.
class FlopCounter final : public StreamObserver {
 public:
  FlopCounter() {
    Context::current()->compute().impl()->observer =
        std::shared_ptr<FlopCounter>(this, [](FlopCounter*) {});
  }
  ~FlopCounter() override { Context::current()->compute().impl()->observer = nullptr; }
  void on_task(const Stream&, const char* name, const Cost& cost) override {
    const std::lock_guard lock(mutex_);
    by_task_[name] += cost.flops();
  }
  void on_record(const Stream&, const Event&) override {}
  void on_wait(const Stream&, const Event&) override {}
  void on_host_wait(const Stream&) override {}
  void on_host_wait(const Event&) override {}
  double of(const std::string& task) { return by_task_[task]; }

 private:
  std::mutex mutex_;
  std::map<std::string, double> by_task_;
};

void run_export(const std::string& from, const std::string& to) {
  std::FILE* const out = std::tmpfile();
  CHECK(checkpoint_command({"export", from, to}, out) == 0);
  std::fclose(out);
}

struct LossRun {
  double loss, matmul_flops;
  int64_t peak_nbytes;
  std::vector<Tensor> gradients;
};

/// Forward and backward of a micro-batch: as the trainer does it, or the head on all positions.
LossRun run_loss(const ModelConfig& config, const Batch& batch, bool on_all) {
  const auto context = std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = 1});
  const Context::Scope scope(context);
  const auto model = make_model(config, config.vocab);
  model->initialize(1);
  const int64_t before = context->allocator()->stats().allocated;
  context->allocator()->reset_peak();
  LossRun result;
  {
    FlopCounter flops;
    const Tensor scale = full({}, 1.0 / static_cast<double>(batch.num_valid));
    LossSum loss;
    if (on_all) {
      const Shape shape{batch.B, batch.T};
      loss = model->loss(from_values(std::span<const int32_t>(batch.inputs), shape),
                         from_values(std::span<const int32_t>(batch.targets), shape), {},
                         {.ignore_index = kIgnoredTarget, .grad_scale = scale});
    } else {
      loss = batch_loss(*model, batch, scale);
    }
    backward(loss.sum, scale);
    context->compute().synchronize();
    result.loss = loss.sum.item(), result.matmul_flops = flops.of("matmul");
    CHECK(loss.count.item() == static_cast<double>(batch.num_valid));
  }
  result.peak_nbytes = context->allocator()->stats().peak_allocated - before;
  for (const auto& p : model->named_parameters())
    result.gradients.push_back(p.parameter->tensor.grad());
  return result;
}

}  // namespace

TEST_CASE("loss rows: few numbers of them, none smaller than the targets", "[chat][loss]") {
  std::set<int64_t> numbers;
  for (int64_t targets = 0; targets <= 4096; ++targets) {
    const int64_t rows = num_loss_rows(4096, targets);
    CHECK((rows >= targets && rows < targets + 256 + (targets == 0 ? 1 : 0)));
    numbers.insert(rows);
  }
  CHECK(numbers.size() == 16);
  CHECK(num_loss_rows(4096, 4096) == 4096);
  CHECK(num_loss_rows(100, 65) == 100);  // never more than there are
  CHECK(num_loss_rows(100, 64) == 64);
  CHECK(num_loss_rows(30, 0) == 30);
}

TEST_CASE("loss rows: head and loss of a chat or of masked tokens run on targets alone, counted",
          "[chat][loss]") {
  const bool is_bert = GENERATE(false, true);
  constexpr int64_t B = 2, T = 160, C = 16, V = 500, kTargets = 60;
  const Config config = load_config(
      "", std::vector<std::string>{is_bert ? "--model.kind=bert" : "--model.kind=llama",
                                   is_bert ? "--data.mask_token=0" : "--data.mask_token=-1",
                                   "--model.layers=1", "--model.heads=2", "--model.width=16",
                                   "--model.context=160", "--model.vocab=500", "--data.tokens=x"});
  Batch batch;
  batch.B = B, batch.T = T;
  for (int64_t i = 0; i < B * T; ++i) {
    batch.inputs.push_back(static_cast<int32_t>(i * 7 % V));
    batch.targets.push_back(i % 5 == 3 && batch.num_valid < kTargets ? static_cast<int32_t>(i % V)
                                                                     : kIgnoredTarget);
    batch.num_valid += batch.targets.back() == kIgnoredTarget ? 0 : 1;
  }
  REQUIRE(batch.num_valid == kTargets);
  const LossRun all = run_loss(config.model, batch, true),
                few = run_loss(config.model, batch, false);
  // A token's loss has the same bits whatever is beside it, and their sum the same order.
  CHECK(few.loss == all.loss);
  for (size_t i = 0; i < all.gradients.size(); ++i) {
    testing::check_close(few.gradients[i], all.gradients[i], testing::tol(kF32, B * T));
  }
  // Forward, and in backward dx and dw, of each position that is left out: of the head, and of the
  // linear before it that a bert has.
  constexpr int64_t kRows = 64;
  static_assert(kTargets <= kRows);
  const double per_row = 6.0 * C * (V + (is_bert ? C : 0));
  CHECK(all.matmul_flops - few.matmul_flops == (B * T - kRows) * per_row);
  CHECK(few.peak_nbytes + (B * T - kRows) * V * 4 <= all.peak_nbytes + 4 * B * T * C * 4);
}

TEST_CASE("chat training: z-loss and label smoothing are of training, not of validation",
          "[chat][loss]") {
  const TempDir dir;
  const auto run = [&](const std::string& name, std::vector<std::string> extra) {
    extra.insert(extra.end(), {"--output.dir=" + dir / name, "--train.steps=1", "--optim.lr=0",
                               "--optim.final_lr=0"});
    train_on(1, chat_config(dir, extra));
    return read_metrics(dir / name).at(0);
  };
  const auto plain = run("plain", {}), z = run("z", {"--train.z_loss=0.01"}),
             smooth = run("smooth", {"--train.label_smoothing=0.1"});
  CHECK(z["loss"] > plain["loss"].get<double>());
  CHECK(smooth["loss"] != plain["loss"]);
  for (const auto& other : {z, smooth}) {
    CHECK(other["val_loss"] == plain["val_loss"]);
    CHECK(other["grad_norm"] != plain["grad_norm"]);
  }
}

TEST_CASE("chat training: the loss is the mean over the trained tokens of the whole batch",
          "[chat]") {
  const TempDir dir;
  const Config config = chat_config(dir);
  const Data data = load_data(config);
  const PackedSamples samples(data.sources, sample_options(config, data), config.data.val_fraction,
                              SplitPart::kTrain);
  const Batch batch = samples.batch(0, 8);
  // Rows of different numbers of targets, so that a mean of means is another number.
  std::vector<int64_t> counts;
  for (int64_t row = 0; row < 8; ++row) counts.push_back(samples.num_targets(row, 1));
  CHECK(*std::max_element(counts.begin(), counts.end()) >
        *std::min_element(counts.begin(), counts.end()));
  const auto model = make_model(config, data.vocab_size);
  model->initialize(static_cast<uint64_t>(config.train.seed));
  const NoGrad no_grad;
  const double expected =
      batch_loss(*model, batch).sum.item() / static_cast<double>(batch.num_valid);
  for (const int ranks : {1, 2, 4}) {
    train_on(ranks,
             chat_config(dir, {"--output.dir=" + dir / std::to_string(ranks), "--train.steps=1"}));
    const double loss = losses(dir / std::to_string(ranks)).at(0);
    CAPTURE(ranks, loss, expected);
    CHECK(std::abs(loss - expected) <= 1e-5 * expected);
  }
}

TEST_CASE(
    "chat training: in reproducible mode 1, 2 and 4 ranks give the same bits, resumed as well",
    "[chat]") {
  const TempDir dir;
  const auto run = [&](int ranks, const std::string& name, std::vector<std::string> extra = {}) {
    extra.push_back("--train.reproducible=true");
    extra.push_back("--output.dir=" + dir / name);
    train_on(ranks, chat_config(dir, extra));
    return read_metrics(dir / name);
  };
  const auto one = run(1, "1");
  REQUIRE(one.size() == 6);
  CHECK(one[2].contains("val_loss"));
  const auto check = [&](const std::vector<nlohmann::json>& other, const std::string& name) {
    CAPTURE(name);
    REQUIRE(other.size() == 6);
    for (size_t i = 0; i < 6; ++i) {
      for (const char* key : {"loss", "grad_norm", "val_loss"}) {
        CHECK(one[i].value(key, 0.0) == other[i].value(key, 0.0));
      }
    }
    CHECK(read_file(dir / name + "/model.safetensors") == read_file(dir / "1/model.safetensors"));
  };
  for (const int ranks : {2, 4}) check(run(ranks, std::to_string(ranks)), std::to_string(ranks));
  // The checkpoint of step 3, on another number of ranks.
  std::filesystem::copy(dir / "1", dir / "again", std::filesystem::copy_options::recursive);
  std::filesystem::remove_all(dir / "again/" + dist::step_directory_name(6));
  check(run(2, "again", {"--checkpoint.resume=auto"}), "again");
}

TEST_CASE("chat training: an epoch has each conversation once, apart from those of validation",
          "[chat]") {
  const TempDir dir;
  const Config config = chat_config(dir);
  const Data data = load_data(config);
  const SampleOptions options = sample_options(config, data);
  std::map<std::string, int> found;
  int64_t num_val = 0;
  for (const SplitPart part : {SplitPart::kTrain, SplitPart::kVal}) {
    const PackedSamples samples(data.sources, options, config.data.val_fraction, part);
    for (int64_t i = 0; i < samples.num_samples(); ++i) {
      const Batch batch = samples.batch(i, 1);
      std::string text;
      for (size_t t = 0; t < batch.inputs.size(); ++t) {
        if (batch.positions[t] == 0 && !text.empty()) {
          ++found[text], num_val += part == SplitPart::kVal ? 1 : 0, text.clear();
        }
        if (batch.inputs[t] != 0) text += static_cast<char>(batch.inputs[t]);
      }
      if (!text.empty()) ++found[text], num_val += part == SplitPart::kVal ? 1 : 0;
    }
  }
  CHECK(found.size() == 90);
  for (const auto& [text, count] : found) CHECK(count == 1);
  CHECK(num_val == 18);
}

TEST_CASE("chat training: other conversations, or another part of them, are not gone on with",
          "[chat]") {
  const TempDir dir;
  train_on(1, chat_config(dir, {"--train.steps=3"}));
  const auto again = [&](std::vector<std::string> extra) {
    extra.push_back("--checkpoint.resume=auto");
    return error_on(1, chat_config(dir, extra));
  };
  CHECK_THAT(again({"--data.train_on=all"}),
             Catch::Contains("data.train_on \"assistant\" there, \"all\" here"));
  CHECK_THAT(again({"--data.long_chats=drop"}),
             Catch::Contains("data.long_chats \"cut\" there, \"drop\" here"));
  // The same tokens, of which others are learned.
  const std::string marked =
      "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}"
      "{% generation %}$\n{% endgeneration %}{% else %}{{ '\n' }}{% endif %}{% endfor %}";
  CHECK_THAT(again({"--data.chat_template=" + dir.write("other.jinja", marked)}),
             Catch::Contains(": training data "));
  train_on(1, chat_config(dir, {"--checkpoint.resume=auto"}));
}

TEST_CASE("chat training: how many conversations there are is said", "[chat]") {
  const TempDir dir;
  const Config config = chat_config(dir, {"--model.context=30"});
  const Data data = load_data(config);
  CHECK(data.chats.find("chats: 90 conversations of 1 files, ") == 0);
  CHECK(data.chats.find(" longer than model.context + 1 = 31 tokens: cut") != std::string::npos);
  CHECK(data.tokenizer->name() == "byte");
}

TEST_CASE("chat training: the template goes with the model and its exports", "[chat]") {
  const TempDir dir;
  const std::map<std::string, std::string> bytes = text::make_byte_tokenizer()->hf_files();
  const std::string first = dir / "out", second = dir / "again";
  train_on(1, chat_config(dir, {"--train.steps=1"}));
  const auto run = [](const std::vector<std::string>& arguments) {
    std::FILE* const out = std::tmpfile();
    CHECK(checkpoint_command(arguments, out) == 0);
    std::fclose(out);
  };
  CHECK(read_file(first + "/chat_template.jinja") == kTemplate);
  run({"export", first, dir / "hf"});
  run({"export", first, dir / "tessera", "--format=tessera"});
  CHECK(read_file(dir / "hf/chat_template.jinja") == kTemplate);
  CHECK(read_file(dir / "tessera/chat_template.jinja") == kTemplate);
  // From there the template and the tokenizer are the model's own.
  std::ofstream(dir / "hf/tokenizer_config.json") << R"({"eos_token": "$"})";
  const std::vector<std::string> again = {"--model.from=" + dir / "hf",
                                          "--data.chat=" + dir / "chats.jsonl",
                                          "--output.dir=" + second,
                                          "--device=cpu",
                                          "--train.steps=1",
                                          "--train.micro_batch=1",
                                          "--model.context=40"};
  train_on(1, load_config("", again));
  CHECK(read_file(second + "/chat_template.jinja") == kTemplate);
  CHECK(read_file(second + "/tokenizer.json") == bytes.at("tokenizer.json"));
  run({"export", second, dir / "hf2"});
  CHECK(read_file(dir / "hf2/chat_template.jinja") == kTemplate);
  CHECK(read_file(dir / "hf2/tokenizer_config.json") == R"({"eos_token": "$"})");
  CHECK(read_file(dir / "hf2/tokenizer.json") == bytes.at("tokenizer.json"));
}

// ---- preferences

namespace {

/// Pairs in each of their shapes: by turns a prompt and answers as texts, as messages, conversations
/// that begin alike, and ShareGPT's.
std::string many_pairs() {
  const auto turn = [](const std::string& role, const std::string& content) {
    return nlohmann::json{{"role", role}, {"content", content}};
  };
  std::string lines;
  for (int i = 0; i < 60; ++i) {
    const std::string question = "what of " + std::to_string(i * i);
    const std::string good(1 + static_cast<size_t>(i % 13), static_cast<char>('a' + i % 7));
    const std::string bad = "no" + std::string(static_cast<size_t>(i % 5), 'z');
    nlohmann::json row;
    if (i % 4 == 0) {
      row = {{"prompt", question}, {"chosen", good}, {"rejected", bad}};
    } else if (i % 4 == 1) {
      row["prompt"] = {turn("user", question)};
      row["chosen"] = {turn("assistant", good)};
      row["rejected"] = {turn("assistant", bad)};
    } else if (i % 4 == 2) {
      row["chosen"] = {turn("user", question), turn("assistant", good)};
      row["rejected"] = {turn("user", question), turn("assistant", bad)};
    } else {
      row["conversations"] = {{{"from", "human"}, {"value", question}}};
      row["chosen"] = {{"from", "gpt"}, {"value", good}};
      row["rejected"] = {{"from", "gpt"}, {"value", bad}};
    }
    lines += row.dump() + "\n";
  }
  return lines;
}

Config pair_config(const TempDir& dir, std::vector<std::string> extra = {}) {
  const std::vector<std::string> own = {
      "--data.chat=", "--data.preference=" + dir.write("p.jsonl", many_pairs()),
      "--data.restart_positions=false"};
  extra.insert(extra.begin(), own.begin(), own.end());
  return chat_config(dir, extra);
}

/// As make_trl.py has it.
const std::vector<std::string> kAsTrl = {"--train.steps=30",          "--train.micro_batch=1",
                                         "--train.global_batch=12",   "--data.val_fraction=0",
                                         "--train.eval_every=0",      "--checkpoint.every=0",
                                         "--optim.lr=5e-3",           "--optim.beta1=0.9",
                                         "--optim.beta2=0.95",        "--optim.eps=1e-8",
                                         "--optim.weight_decay=0.1",  "--optim.clip=1",
                                         "--optim.schedule=constant", "--dpo.beta=0.2"};

/// A copy of the golden's model, with a tokenizer of bytes, as model.from.
std::vector<std::string> from_golden(const TempDir& dir) {
  const std::string model = dir / "model";
  std::filesystem::create_directories(model);
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::copy_file(std::string(testing::golden_dir()) + "/trl/" + name,
                               model + "/" + name,
                               std::filesystem::copy_options::overwrite_existing);
  }
  for (const auto& [name, content] : text::make_byte_tokenizer()->hf_files()) {
    std::ofstream(model + "/" + name) << content;
  }
  std::vector<std::string> all = kAsTrl;
  all.push_back("--model.from=" + model);
  return all;
}

/// The configuration without what model.from has, of chats or pairs.
Config golden_config(const TempDir& dir, bool is_pairs, std::vector<std::string> extra = {}) {
  std::vector<std::string> overrides = {
      is_pairs ? "--data.preference=" + dir.write("p.jsonl", many_pairs())
               : "--data.chat=" + dir.write("chats.jsonl", many_chats()),
      "--data.chat_template=" + dir.write("chat.jinja", kTemplate),
      is_pairs ? "--data.restart_positions=false" : "--data.restart_positions=true",
      "--model.context=48",
      "--device=cpu",
      "--train.log_every=1000"};
  const std::vector<std::string> from = from_golden(dir);
  overrides.insert(overrides.end(), from.begin(), from.end());
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return load_config("", overrides);
}

struct Sequence {
  std::vector<int32_t> ids, is_trained;
};

/// The sequences of a batch, each with the token that its last target is; 0 for one that is none.
std::vector<Sequence> sequences_of(const Batch& batch) {
  std::vector<Sequence> all;
  for (int64_t row = 0; row < batch.B; ++row) {
    int64_t t = 0;
    while (t < batch.T) {
      const auto at = [&](const std::vector<int32_t>& values, int64_t i) {
        return values[static_cast<size_t>(row * batch.T + i)];
      };
      int64_t end = t + 1;
      if (batch.document_starts.empty()) {
        for (end = batch.T; at(batch.targets, end - 1) == kIgnoredTarget;) --end;
      } else {
        while (end < batch.T && at(batch.document_starts, end) == at(batch.document_starts, t))
          ++end;
      }
      Sequence sequence{{}, {0}};
      bool has_target = false;
      for (int64_t i = t; i < end; ++i) {
        const int32_t target = at(batch.targets, i);
        sequence.ids.push_back(at(batch.inputs, i));
        sequence.is_trained.push_back(target == kIgnoredTarget ? 0 : 1);
        has_target |= target != kIgnoredTarget;
      }
      sequence.ids.push_back(std::max(at(batch.targets, end - 1), 0));
      if (has_target) all.push_back(std::move(sequence));
      t = batch.document_starts.empty() ? batch.T : end;
    }
  }
  return all;
}

/// The sequences of each of the 30 steps.
std::vector<std::vector<Sequence>> golden_batches(const Config& config) {
  const Data data = load_data(config);
  const SampleOptions options = sample_options(config, data);
  std::unique_ptr<Samples> samples;
  if (data.pairs != nullptr) {
    samples = std::make_unique<PreferenceSamples>(data.pairs, options, 0, SplitPart::kTrain);
  } else {
    samples = std::make_unique<PackedSamples>(data.sources, options, 0, SplitPart::kTrain);
  }
  std::vector<std::vector<Sequence>> steps;
  for (int64_t step = 0; step < config.train.steps; ++step) {
    steps.push_back(
        sequences_of(samples->batch(step * config.train.global_batch, config.train.global_batch)));
  }
  return steps;
}

nlohmann::json trl_golden() {
  return nlohmann::json::parse(read_file(std::string(testing::golden_dir()) + "/trl.json"));
}

void check_as_trl(const char* name, const std::vector<std::string>& extra, bool is_pairs) {
  const nlohmann::json golden = trl_golden()[name];
  const TempDir dir;
  {
    const auto steps = golden_batches(golden_config(dir, is_pairs, extra));
    REQUIRE(steps.size() == 30);
    for (size_t i = 0; i < steps.size(); ++i) {
      uint32_t checksum = 0;
      for (const Sequence& s : steps[i]) {
        for (size_t k = 0; k < s.ids.size(); ++k) {
          checksum = checksum * 1000003u + 2 * static_cast<uint32_t>(s.ids[k]) +
                     static_cast<uint32_t>(s.is_trained[k]);
        }
      }
      CHECK(checksum == golden["batches"][i].get<uint32_t>());
    }
  }
  for (const int ranks : {1, 2, 3, 4}) {
    CAPTURE(name, ranks);
    auto with_dir = extra;
    with_dir.push_back("--output.dir=" + dir / std::to_string(ranks));
    train_on(ranks, golden_config(dir, is_pairs, with_dir));
    const auto steps = read_metrics(dir / std::to_string(ranks));
    REQUIRE(steps.size() == 30);
    double worst = 0;
    for (size_t i = 0; i < 30; ++i) {
      const double expected = golden["losses"][i], loss = steps[i]["loss"];
      worst = std::max(worst, std::abs(loss - expected) / expected);
      if (!is_pairs) continue;
      for (const char* key : {"chosen", "rejected", "margin"}) {
        CHECK(std::abs(steps[i][key].get<double>() - golden[key][i].get<double>()) <= 1e-4);
      }
      CHECK(steps[i]["accuracy"] == golden["accuracy"][i]);
    }
    CHECK(worst <= 1e-5);
  }
}

}  // namespace

TEST_CASE("trl: batches for the golden", "[.batches]") {
  const char* const path = std::getenv("TESSERA_BATCHES");
  REQUIRE(path != nullptr);
  const TempDir dir;
  nlohmann::json all;
  for (const bool is_pairs : {false, true}) {
    nlohmann::json& steps = all[is_pairs ? "dpo" : "sft"] = nlohmann::json::array();
    for (const auto& step : golden_batches(golden_config(dir, is_pairs))) {
      nlohmann::json& sequences = steps.emplace_back(nlohmann::json::array());
      for (const Sequence& s : step) sequences.push_back({s.ids, s.is_trained});
    }
  }
  std::ofstream(path) << all;
}

TEST_CASE("trl: 30 steps on chats are SFTTrainer's within 1e-5, on 1 to 4 ranks",
          "[chat][golden]") {
  check_as_trl("sft", {}, false);
}

TEST_CASE("trl: 30 steps on pairs are DPOTrainer's within 1e-5, on 1 to 4 ranks",
          "[preference][golden]") {
  check_as_trl("sigmoid", {"--optim.lr=1e-3"}, true);
  check_as_trl("ipo", {"--optim.lr=1e-3", "--dpo.loss=ipo"}, true);
}

TEST_CASE("preferences: a pair in each shape has its prompt once, and both answers",
          "[preference]") {
  const auto parse = [](const char* row) {
    return text::parse_preference(text::jinja::parse_json("the row", row));
  };
  for (const char* row :
       {R"({"prompt": "q", "chosen": "a", "rejected": "b"})",
        R"({"prompt": [{"role": "user", "content": "q"}],
            "chosen": [{"role": "assistant", "content": "a"}],
            "rejected": [{"role": "assistant", "content": "b"}]})",
        R"({"prompt": "q", "chosen": [{"role": "user", "content": "q"},
                                      {"role": "assistant", "content": "a"}],
            "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]})",
        R"({"chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]})",
        R"({"conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}})"}) {
    CAPTURE(row);
    const text::Preference pair = parse(row);
    CHECK(text::describe(pair.chosen) == "user: 'q', assistant: 'a'");
    CHECK(text::describe(pair.rejected) == "user: 'q', assistant: 'b'");
    CHECK(pair.chosen.num_prompt_messages == 1);
    CHECK(pair.rejected.num_prompt_messages == 1);
  }
}

TEST_CASE("preferences: what is wrong with a pair is said with file and row", "[preference]") {
  const TempDir dir;
  const std::string good = R"({"prompt": "q", "chosen": "a", "rejected": "b"})"
                           "\n";
  const auto error_of_row = [&](std::string row) {
    std::replace(row.begin(), row.end(), '\n', ' ');
    const std::string path = dir.write("bad.jsonl", good + row + "\n");
    const std::string error = error_on(2, pair_config(dir, {"--data.preference=" + path}));
    const std::string begin = path + ": line 2: ";
    CHECK(error.starts_with(begin));
    CHECK(error.find('\n') == std::string::npos);
    return error.substr(std::min(begin.size(), error.size()));
  };
  CHECK(error_of_row(R"({"prompt": "q", "chosen": "a"})") ==
        "no \"rejected\", expected a prompt with \"chosen\" and \"rejected\"");
  CHECK(error_of_row(R"({"prompt": "q", "completion": "a"})") ==
        "no \"chosen\", expected a prompt with \"chosen\" and \"rejected\"");
  const std::string no_prompt =
      "an empty prompt, expected \"prompt\", or messages that \"chosen\" and \"rejected\" both begin "
      "with";
  CHECK(error_of_row(R"({"prompt": "", "chosen": "a", "rejected": "b"})") == no_prompt);
  CHECK(error_of_row(R"({"prompt": [], "chosen": "a", "rejected": "b"})") == no_prompt);
  CHECK(error_of_row(R"({"chosen": "a", "rejected": "b"})") == no_prompt);
  const std::string equal = "\"chosen\" and \"rejected\" are equal, expected two answers";
  CHECK(error_of_row(R"({"prompt": "q", "chosen": "a", "rejected": "a"})") == equal);
  CHECK(error_of_row(R"({"chosen": [{"role": "user", "content": "q"}],
                         "rejected": [{"role": "user", "content": "q"}]})") == equal);
  CHECK(error_of_row(R"({"prompt": "q", "chosen": "", "rejected": "b"})") ==
        "\"chosen\" is empty, expected an answer");
  CHECK(error_of_row(R"({"prompt": "q", "chosen": "a", "rejected": []})") ==
        "\"rejected\" is empty, expected an answer");
  CHECK(error_of_row(R"({"chosen": [{"role": "user", "content": "q"}],
      "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]})") ==
        "\"chosen\" is the beginning of \"rejected\", expected an answer of its own");
  CHECK(error_of_row(R"({"prompt": "q", "chosen": 3, "rejected": "b"})") ==
        "\"chosen\" is int, expected a list of messages");
  CHECK_THAT(
      error_on(1, pair_config(dir, {"--model.context=2", "--data.long_chats=drop"})),
      Catch::Contains("data.preference = ") &&
          Catch::Contains("60 longer than model.context + 1 = 3 tokens: dropped; expected at "
                          "least one"));
}

TEST_CASE("preferences: the first loss is log 2, references are kept and read again",
          "[preference]") {
  const TempDir dir;
  train_on(2, pair_config(dir));
  const auto steps = read_metrics(dir / "out");
  REQUIRE(steps.size() == 6);
  CHECK(std::abs(steps[0]["loss"].get<double>() - std::log(2.0)) < 1e-6);
  CHECK(std::abs(steps[0]["margin"].get<double>()) < 1e-6);
  CHECK(steps[5]["loss"] < steps[0]["loss"].get<double>());
  CHECK(steps[5]["margin"] > 0.0);
  CHECK(steps[2].contains("val_loss"));
  const std::string kept = read_file(dir / "out/references.bin");
  CHECK(kept.starts_with("log-probabilities of a reference "));
  // A run that goes on starts from the same references, be they there, gone or damaged.
  for (const char* what : {"there", "gone", "damaged"}) {
    CAPTURE(what);
    const std::string again = dir / what;
    std::filesystem::copy(dir / "out", again, std::filesystem::copy_options::recursive);
    std::filesystem::remove_all(again + "/" + dist::step_directory_name(6));
    std::string bad = kept;
    bad[bad.size() / 2] ^= 1;
    if (*what == 'g') std::filesystem::remove(again + "/references.bin");
    if (*what == 'd') std::ofstream(again + "/references.bin") << bad;
    train_on(2, pair_config(dir, {"--output.dir=" + again, "--checkpoint.resume=auto"}));
    const auto gone_on = read_metrics(again);
    for (size_t i = 0; i < 6; ++i) {
      for (const char* key : {"loss", "margin", "accuracy"})
        CHECK(gone_on[i][key] == steps[i][key]);
    }
    CHECK(read_file(again + "/references.bin") == kept);
  }
  // Of another seed, so of another model, they are others.
  train_on(1, pair_config(dir, {"--train.seed=2", "--output.dir=" + dir / "other"}));
  CHECK(read_file(dir / "other/references.bin").substr(0, 50) != kept.substr(0, 50));
}

TEST_CASE("preferences: in reproducible mode 1, 2 and 4 ranks give the same bits", "[preference]") {
  const TempDir dir;
  std::vector<nlohmann::json> one;
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    const std::string out = dir / std::to_string(ranks);
    train_on(ranks, pair_config(dir, {"--train.reproducible=true", "--output.dir=" + out}));
    const auto steps = read_metrics(out);
    if (ranks == 1) one = steps;
    for (size_t i = 0; i < 6; ++i) {
      for (const char* key : {"loss", "grad_norm", "chosen", "rejected", "accuracy", "val_loss"}) {
        CHECK(steps[i].value(key, 0.0) == one[i].value(key, 0.0));
      }
    }
    CHECK(read_file(out + "/model.safetensors") == read_file(dir / "1/model.safetensors"));
    CHECK(read_file(out + "/references.bin") == read_file(dir / "1/references.bin"));
  }
}

TEST_CASE("preferences: label smoothing and a model of its own as reference", "[preference]") {
  const TempDir dir;
  const auto first = [&](const std::string& name, std::vector<std::string> extra) {
    extra.insert(extra.end(), {"--output.dir=" + dir / name, "--train.steps=2"});
    train_on(1, golden_config(dir, true, extra));
    return read_metrics(dir / name);
  };
  const auto plain = first("plain", {}), smooth = first("smooth", {"--dpo.label_smoothing=0.1"});
  // (1 - e) f(d) + e f(-d) = f(d) + e d, with f(d) = -log sigmoid(d): both are log 2 at d = 0.
  CHECK(std::abs(smooth[0]["loss"].get<double>() - plain[0]["loss"].get<double>()) < 1e-6);
  CHECK(smooth[0]["grad_norm"] < plain[0]["grad_norm"].get<double>());
  CHECK(smooth[0]["grad_norm"].get<double>() ==
        Approx(0.8 * plain[0]["grad_norm"].get<double>()).epsilon(1e-4));
  // After training towards the chosen answers, the model that it started from is another reference.
  run_export(dir / "plain", dir / "hf");
  const auto other = first("other", {"--dpo.reference=" + dir / "hf"});
  CHECK(std::abs(other[0]["loss"].get<double>() - std::log(2.0)) > 1e-3);
  CHECK(other[0]["margin"] < 0.0);
}

// ---- budgets

TEST_CASE("budget: epochs, tokens and shares become steps, and it is said", "[budget]") {
  const auto resolve = [](std::vector<std::string> keys, const BudgetFacts& facts, Config* out) {
    keys.push_back("--data.text=x");
    Config config = load_config("", keys);
    const std::string text = resolve_budget(config, facts);
    if (out != nullptr) *out = config;
    return text;
  };
  const BudgetFacts facts{.samples_per_epoch = 100, .tokens_per_sample = 64, .world_size = 2};
  Config c;
  CHECK(resolve({"--train.micro_batch=4"}, facts, &c) == "");
  CHECK(c.train.steps == 1000);
  CHECK(resolve({"--train.micro_batch=4", "--train.epochs=3"}, facts, &c) ==
        "train.epochs = 3: train.steps = 38, 300 samples of 100 in steps of 8, the last one with 4 "
        "more");
  CHECK(c.train.steps == 38);
  CHECK(resolve({"--train.micro_batch=5", "--train.epochs=0.5"}, facts, &c) ==
        "train.epochs = 0.5: train.steps = 5, 50 samples of 100 in steps of 10");
  CHECK(resolve({"--train.micro_batch=4", "--train.tokens=5120", "--optim.warmup_ratio=0.03"},
                facts, &c) ==
        "train.tokens = 5120: train.steps = 10 of 512 tokens, 0.80 epochs\n"
        "optim.warmup_ratio = 0.03: optim.warmup_steps = 1 of 10");
  CHECK(c.train.steps == 10);
  CHECK(c.optim.schedule.warmup_steps == 1);
  CHECK(resolve({"--train.micro_batch=4", "--train.global_batch_tokens=2048"}, facts, &c) ==
        "train.global_batch_tokens = 2048: train.global_batch = 32");
  CHECK(c.train.global_batch == 32);
  CHECK(resolve({"--train.micro_batch=4", "--train.epochs=2", "--train.evals_per_epoch=2",
                 "--checkpoint.per_epoch=5"},
                facts, &c) ==
        "train.epochs = 2: train.steps = 25, 200 samples of 100 in steps of 8\n"
        "train.evals_per_epoch = 2: after steps 7, 13, 19, 25\n"
        "checkpoint.per_epoch = 5: after steps 3, 5, 8, 10, ...");
  std::vector<int64_t> evals;
  for (int64_t step = 1; step <= c.train.steps; ++step) {
    if (completes_part_of_epoch(c, 2, step)) evals.push_back(step);
  }
  CHECK(evals == std::vector<int64_t>{7, 13, 19, 25});  // 50, 100, 150, 200 samples in steps of 8
  CHECK(!completes_part_of_epoch(c, 0, 7));

  const auto error = [&](std::vector<std::string> keys) {
    return error_of([&] { resolve(std::move(keys), facts, nullptr); });
  };
  CHECK(
      error({"--train.micro_batch=4", "--train.tokens=5000"}) ==
      "command line: train.tokens = 5000, expected a multiple of a step's 8 samples x 64 tokens = "
      "512, such as 4608 or 5120");
  CHECK(error({"--train.micro_batch=4", "--train.tokens=100"}) ==
        "command line: train.tokens = 100, expected a multiple of a step's 8 samples x 64 tokens = "
        "512, such as 512");
  CHECK(
      error({"--train.micro_batch=4", "--train.global_batch_tokens=2000"}) ==
      "command line: train.global_batch_tokens = 2000, expected a multiple of train.micro_batch x "
      "ranks x tokens of a sample = 4 x 2 x 64 = 512, such as 1536 or 2048");
  CHECK(
      error({"--train.micro_batch=4", "--train.evals_per_epoch=13"}) ==
      "command line: train.evals_per_epoch = 13, but an epoch of 100 samples has 12.50 steps of 8 "
      "samples, expected at most 12");
  CHECK(error({"--train.micro_batch=4", "--checkpoint.per_epoch=13"})
            .starts_with("command line: checkpoint.per_epoch = 13, but an epoch of 100 samples"));
  CHECK(error({"--train.epochs=1", "--train.steps=5"}) ==
        "command line: train.steps beside train.epochs, which sets it, expected one of them");
  CHECK(error({"--train.tokens=512", "--train.steps=5"}) ==
        "command line: train.steps beside train.tokens, which sets it, expected one of them");
  CHECK(error({"--train.tokens=512", "--train.epochs=5"}) ==
        "command line: train.tokens = 512 beside train.epochs = 5, expected one of them");
  CHECK(
      error({"--train.global_batch_tokens=512", "--train.global_batch=8"}) ==
      "command line: train.global_batch beside train.global_batch_tokens, which sets it, expected "
      "one of them");
  CHECK(error({"--train.global_batch_tokens=512", "--train.grad_accum_steps=2"}) ==
        "command line: train.grad_accum_steps beside train.global_batch_tokens, which sets it, "
        "expected one of them");
  CHECK(
      error({"--optim.warmup_ratio=0.1", "--optim.warmup_steps=2"}) ==
      "command line: optim.warmup_steps beside optim.warmup_ratio, which sets it, expected one of "
      "them");
}

TEST_CASE("budget: a run in epochs evaluates and saves by parts, and is gone on with", "[budget]") {
  const TempDir dir;
  const auto budget = [&](std::vector<std::string> extra) {
    extra.insert(extra.end(),
                 {"--train.epochs=2", "--train.evals_per_epoch=2", "--checkpoint.per_epoch=1",
                  "--train.eval_every=0", "--checkpoint.every=0", "--optim.warmup_ratio=0.25",
                  "--checkpoint.keep=9", "--train.global_batch=4"});
    std::vector<std::string> keys = {"--data.text=" + dir.write("t.txt", std::string(331, 'x')),
                                     "--output.dir=" + dir / "out",
                                     "--device=cpu",
                                     "--model.layers=1",
                                     "--model.heads=1",
                                     "--model.width=8",
                                     "--model.context=10",
                                     "--train.micro_batch=2",
                                     "--train.log_every=1000",
                                     "--data.val_fraction=0.1",
                                     "--checkpoint.best=false"};
    keys.insert(keys.end(), extra.begin(), extra.end());
    return load_config("", keys);
  };
  // 297 tokens to train on: 29 samples an epoch, 58 in steps of 4.
  train_on(2, budget({}));
  const auto steps = read_metrics(dir / "out");
  REQUIRE(steps.size() == 15);
  std::vector<int64_t> evals;
  for (const auto& step : steps) {
    if (step.contains("val_loss")) evals.push_back(step["step"]);
  }
  CHECK(evals == std::vector<int64_t>{4, 8, 11, 15});
  CHECK(testing::saved_steps(dir / "out") == std::vector<int64_t>{15, 8});
  CHECK(steps[3]["lr"] > steps[2]["lr"].get<double>());
  CHECK(steps[4]["lr"] < steps[3]["lr"].get<double>());
  // What it was resolved to is in config.toml, which starts the same run again.
  const Config again = load_config(dir / "out/config.toml", std::vector<std::string>{});
  CHECK(again.train.steps == 15);
  CHECK(again.optim.schedule.warmup_steps == 4);
  std::filesystem::remove_all(dir / "out/" + dist::step_directory_name(15));
  train_on(1, load_config(dir / "out/config.toml",
                          std::vector<std::string>{"--checkpoint.resume=auto"}));
  const auto second = read_metrics(dir / "out");
  REQUIRE(second.size() == 15);
  CHECK(second[14]["lr"] == steps[14]["lr"]);
}
