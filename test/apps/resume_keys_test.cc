#include "apps/resume_keys.h"

#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;

namespace {

Config config_of(std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), "--data.text=x");
  return parse_config("", "", overrides);
}

/// As a checkpoint has it: every key is given.
Config stored(const std::vector<std::string>& overrides) {
  return parse_config(dump_config(config_of(overrides)), "checkpoint");
}

using Lines = std::vector<std::string>;

}  // namespace

TEST_CASE("resume_keys: the same settings change nothing", "[resume]") {
  const ResumeChanges changes = compare_for_resume(stored({}), config_of({}), 10);
  CHECK(changes.refused.empty());
  CHECK(changes.told.empty());
}

TEST_CASE("resume_keys: another model is refused, also by keys without a shape", "[resume]") {
  for (const auto& [override, text] : std::vector<std::pair<std::string, std::string>>{
           {"--model.heads=2", "model.heads 4 there, 2 here"},
           {"--model.rope_theta=500", "model.rope_theta 10000.0 there, 500.0 here"},
           {"--model.norm_eps=1e-6", "model.norm_eps 1e-05 there, 1e-06 here"},
           {"--model.rope_scaling=linear", "model.rope_scaling \"none\" there, \"linear\" here"},
           {"--model.context=32", "model.context 64 there, 32 here"},
           {"--data.separator=3", "data.separator -1 there, 3 here"},
           {"--optim.name=sgd", "optim.name \"adamw\" there, \"sgd\" here"}}) {
    CAPTURE(override);
    const ResumeChanges changes = compare_for_resume(stored({}), config_of({override}), 10);
    CHECK(changes.refused == Lines{text});
  }
  // Key/value heads that are left out are the heads.
  CHECK(compare_for_resume(stored({}), config_of({"--model.kv_heads=4"}), 10).refused.empty());
}

TEST_CASE("resume_keys: another schedule is said with the rate before and after", "[resume]") {
  const auto told = [](const Lines& there, const Lines& here) {
    const ResumeChanges changes = compare_for_resume(stored(there), config_of(here), 10);
    CHECK(changes.refused.empty());
    return changes.told;
  };
  const Lines constant = {"--optim.schedule=constant", "--optim.lr=0.001"};
  CHECK(told(constant, {"--optim.schedule=constant", "--optim.lr=0.002"}) ==
        Lines{"optim.lr 0.001 there, 0.002 here", "optim.final_lr 0.0001 there, 0.0002 here",
              "learning rate of step 11: 0.001 with the checkpoint's settings, 0.002 with these"});
  CHECK(told({"--train.steps=11", "--optim.schedule=linear"},
             {"--train.steps=21", "--optim.schedule=linear"}) ==
        Lines{"train.steps 11 there, 21 here",
              "learning rate of step 11: 0.0001 with the checkpoint's settings, 0.00055 with "
              "these"});
  CHECK(told({}, {"--optim.beta2=0.99"}) == Lines{"optim.beta2 0.95 there, 0.99 here"});
}

TEST_CASE("resume_keys: a setting of the checkpoint that was forgotten is refused", "[resume]") {
  const ResumeChanges changes = compare_for_resume(
      stored({"--optim.lr=0.0003", "--optim.weight_decay=0"}), config_of({}), 10);
  CHECK(changes.refused ==
        Lines{"optim.lr 0.0003 there, 0.001 here (the default, since it is not given)",
              "optim.weight_decay 0.0 there, 0.1 here (the default, since it is not given)"});
  CHECK(compare_for_resume(stored({"--train.steps=20"}), config_of({"--train.steps=5"}), 10)
            .refused == Lines{"train.steps 5 here, the checkpoint is that of step 10"});
}

TEST_CASE("resume_keys: where and how it runs is free", "[resume]") {
  const Config here = config_of({"--fsdp.strategy=no_shard", "--train.log_every=5", "--device=cpu",
                                 "--recompute.policy=full", "--checkpoint.every=3",
                                 "--output.dir=other", "--model.eos_ids=2"});
  const ResumeChanges changes = compare_for_resume(stored({}), here, 10);
  CHECK(changes.refused.empty());
  CHECK(changes.told.empty());
}
