#include "apps/agreement.h"

#include <algorithm>
#include <filesystem>

#include "apps/config_table.h"
#include "apps/trainer.h"
#include "core/build_id.h"
#include "dist/comm/local.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::TempDir;

namespace {

/// The message of thread ranks with these facts, or "".
std::string compare(const std::vector<std::vector<Fact>>& by_rank) {
  std::string message;
  dist::run_ranks(static_cast<int>(by_rank.size()), [&](dist::World& world) {
    try {
      check_agreement(world.control(), by_rank[static_cast<size_t>(world.rank())]);
    } catch (const ConfigError& error) {
      CHECK(world.control().verdict_rank(error) == 0);  // all ranks have it
      if (world.rank() == 0) message = error.what();
    }
  });
  return message;
}

Config small_config(const TempDir& dir, const std::string& text, const std::string& extra) {
  return load_config(
      "", std::vector<std::string>{"--data.text=" + text, "--output.dir=" + dir / "out",
                                   "--device=cpu", "--model.layers=1", "--model.heads=2",
                                   "--model.width=16", "--model.context=8", "--train.steps=1",
                                   "--train.micro_batch=1", extra});
}

/// The error of a training on two ranks, the second of which has one more argument.
std::string train_with(const TempDir& dir, const std::string& text, const std::string& extra,
                       const std::string& other_text = "") {
  const Config first = small_config(dir, text, "--train.seed=1");
  const Config second = small_config(dir, other_text.empty() ? text : other_text, extra);
  return error_of([&] {
    dist::run_ranks(2,
                    [&](dist::World& world) { train(world.rank() == 0 ? first : second, world); });
  });
}

}  // namespace

TEST_CASE("agreement: what differs is named with ranks, values and where they were set",
          "[agreement]") {
  const Fact lr{"optim.lr", "0.001"}, other_lr{"optim.lr", "0.1", "command line"};
  const Fact seed{"train.seed", "1"}, other_seed{"train.seed", "7", "a.toml:3"};
  CHECK(compare({{lr, seed}, {lr, seed}, {lr, seed}}).empty());
  CHECK(compare({{lr, seed}, {other_lr, seed}, {lr, seed}}) ==
        "the ranks disagree: optim.lr = 0.001 on ranks 0, 2, 0.1 (command line) on rank 1; "
        "expected the same on all ranks");
  CHECK(compare({{lr, seed}, {other_lr, other_seed}, {other_lr, seed}}) ==
        "the ranks disagree: optim.lr = 0.001 on rank 0, 0.1 (command line) on ranks 1 to 2; "
        "train.seed = 1 on ranks 0, 2, 7 (a.toml:3) on rank 1; expected the same on all ranks");
  CHECK(compare({{lr, seed}, {lr}}) ==
        "the ranks disagree: train.seed = 1 on rank 0, absent on rank 1; expected the same on all "
        "ranks");
}

TEST_CASE("agreement: a message stays short, however much differs", "[agreement]") {
  std::vector<std::vector<Fact>> by_rank(7);
  for (size_t r = 0; r < by_rank.size(); ++r) {
    for (int i = 0; i < 50; ++i) {
      const std::string value = std::to_string(r) + std::string(100'000, 'x');
      by_rank[r].push_back({"key" + std::to_string(i), value});
    }
  }
  const std::string message = compare(by_rank);
  CHECK(message.size() < 1200);
  CHECK(message.starts_with("the ranks disagree: key0 = 0xxx"));
  CHECK(message.find(" on rank 0, 1xxx") != std::string::npos);
  CHECK(message.ends_with(" more; expected the same on all ranks"));
}

TEST_CASE("agreement: every key of the configuration is compared but those of one rank",
          "[agreement]") {
  Config config;
  const auto facts = facts_of(config);
  const auto fields = config_fields(config);
  const auto num_free = std::count_if(fields.begin(), fields.end(),
                                      [](const Field& field) { return field.may_differ; });
  CHECK(num_free == 5);
  CHECK(facts.size() + static_cast<size_t>(num_free) == fields.size() + 1);  // the program
  CHECK(facts[0].key == "program");
  CHECK(facts[0].value.find(build_id()) != std::string::npos);
  CHECK(build_id().size() >= 16);
  CHECK(build_id().find_first_not_of("0123456789abcdef") == std::string::npos);
  for (const Field& field : fields) {
    CAPTURE(field.key);
    const bool is_compared = std::any_of(facts.begin(), facts.end(),
                                         [&](const Fact& fact) { return fact.key == field.key; });
    CHECK(is_compared != field.may_differ);
  }
}

TEST_CASE("agreement: ranks with other settings do not train, and nothing is written",
          "[agreement]") {
  const TempDir dir;
  const std::string text = dir.write("text", std::string(500, 'a'));
  for (const std::string extra :
       {"optim.lr=0.01", "train.seed=7", "model.heads=1", "model.rope_theta=5.0",
        "recompute.policy=\"full\"", "guard.max_skips=5", "train.steps=2", "dist.timeout=5.0"}) {
    const size_t equals = extra.find('=');
    CAPTURE(extra);
    std::string argument = "--" + extra;  // strings are quoted in messages only
    std::erase(argument, '"');
    const std::string message = train_with(dir, text, argument);
    CHECK(message.find("the ranks disagree: " + extra.substr(0, equals) + " = ") == 0);
    CHECK(message.find(extra.substr(equals + 1) + " (command line) on rank 1; ") !=
          std::string::npos);
    CHECK_FALSE(std::filesystem::exists(dir / "out"));
  }
  // The same path, as nodes see it, with other contents.
  const Config config = small_config(dir, text, "--train.threads=1");
  const Data data = load_data(config);
  Data other = data;
  other.train = Data(load_data(small_config(dir, dir.write("other", std::string(500, 'b')),
                                            "--train.threads=1")))
                    .train;
  const Device cpu{};
  const std::string message = compare({facts_of(config, data, cpu), facts_of(config, other, cpu)});
  CHECK(message.find("the ranks disagree: the training data = 450 tokens, ") == 0);
  CHECK(message.find("validation") == std::string::npos);
  CHECK(message.find(" on rank 1; expected the same") != std::string::npos);
  const std::string devices =
      compare({facts_of(config, data, cpu), facts_of(config, data, {DeviceType::kCuda, 0})});
  CHECK(
      devices ==
      "the ranks disagree: the device = cpu on rank 0, cuda on rank 1; expected the same on all ranks");
  Config with_threads = small_config(dir, text, "--train.threads=2");
  CHECK(compare({facts_of(config), facts_of(with_threads)}).empty());
}
