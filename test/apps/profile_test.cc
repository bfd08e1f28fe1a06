#include "apps/profile.h"

#include <atomic>
#include <nlohmann/json.hpp>
#include <thread>

#include "apps/batch_reader.h"
#include "apps/config.h"
#include "test/testing.h"

namespace tessera::apps {
namespace {

using profiler::TaskLabel;
using testing::error_of;

TEST_CASE("profile: a range of steps, one step, none, and what is neither", "[profile]") {
  CHECK(parse_step_range("10..13").first == 10);
  CHECK(parse_step_range("10..13").last == 13);
  CHECK(parse_step_range("7").first == 7);
  CHECK(parse_step_range("7").last == 7);
  CHECK(parse_step_range("").is_empty());
  for (const std::string text :
       {"0..3", "5..4", "1...3", "1..", "..3", "a", "1..3..5", "-1", "1-3"}) {
    CAPTURE(text);
    CHECK(error_of([&] {
            load_config("", std::vector<std::string>{"--data.text=x", "--profile.steps=" + text});
          }) == "command line: profile.steps = \"" + text +
                    "\", expected steps such as 10..13, counted from 1, or one step");
  }
}

/// Tasks of one stream, in microseconds, of labels that are made for them.
class Timeline {
 public:
  Timeline() { profiler::start(); }
  ~Timeline() { profiler::stop(); }
  void add(const char* name, const TaskLabel& label, int64_t begin_us, int64_t end_us) {
    tasks.push_back({name, 3, begin_us * 1000, end_us * 1000, "", profiler::set_label(label)});
  }
  std::vector<TraceEvent> tasks;
};

TEST_CASE("profile: each moment of a step is of one kind", "[profile]") {
  Timeline t;
  const auto of = [](int64_t step, const char* phase,
                     TaskLabel::Wait wait = TaskLabel::Wait::kNone) {
    TaskLabel label{.step = step, .phase = phase};
    label.wait = wait;
    return label;
  };
  t.add("before", of(-1, ""), 0, 900);
  t.add("matmul", of(5, "forward"), 1000, 4000);  // what was before it nobody knows
  t.add("wait", of(5, "forward", TaskLabel::Wait::kGather), 4000, 4500);
  t.add("matmul", of(5, "forward"), 4500, 6000);
  TaskLabel again = of(5, "backward");
  again.is_recomputed = true;
  t.add("matmul", again, 6100, 7100);
  t.add("wait", of(5, "backward", TaskLabel::Wait::kReduce), 7100, 7400);
  t.add("all_reduce", of(5, "optimizer"), 7400, 7500);
  t.add("adamw_step", of(5, "optimizer"), 7500, 9500);
  t.tasks.push_back({"poison", 3, 9500 * 1000, 9600 * 1000});  // of nobody: time of the host's
  t.add("matmul", of(6, "forward"), 12500, 13500);
  const std::pair<int64_t, int64_t> reads[] = {{2000 * 1000, 3000 * 1000},
                                               {10000 * 1000, 12000 * 1000}};
  const std::vector<StepTimes> steps = step_times(t.tasks, reads);
  REQUIRE(steps.size() == 2);
  CHECK(steps[0].step == 5);
  CHECK(steps[0].compute_ms == Approx(5.5));
  CHECK(steps[0].recompute_ms == Approx(1.0));
  CHECK(steps[0].gather_ms == Approx(0.5));
  CHECK(steps[0].reduce_ms == Approx(0.4));
  CHECK(steps[0].optimizer_ms == Approx(2.0));
  CHECK(steps[0].host_ms == Approx(0.1));
  CHECK(steps[0].data_ms == 0);  // it was read while compute had something to do
  CHECK(steps[0].total_ms() == Approx(8.5));
  CHECK(steps[1].data_ms == Approx(2.0));
  CHECK(steps[1].host_ms == Approx(1.0));
  CHECK(steps[1].compute_ms == Approx(1.0));
  const StepTimes mean = mean_times(steps);
  CHECK(mean.compute_ms == Approx(3.25));
  CHECK(mean.total_ms() == Approx((8.5 + 4.0) / 2));
  const std::string table = profile_table(steps);
  CHECK(std::count(table.begin(), table.end(), '\n') == 3);
  CHECK_THAT(table, Catch::Contains("optimizer\n     5      8.50      5.50      0.50      0.40"));
}

TEST_CASE("profile: the advice of figures", "[profile]") {
  const StepTimes even{.step = 1, .compute_ms = 90, .host_ms = 2, .optimizer_ms = 8};
  Tuning sharded{
      .world_size = 2, .is_sharded = true, .num_units = 8, .mean_unit_nbytes = int64_t{64} << 20};
  using Keys = std::vector<std::string>;

  Advice a = advise(even, sharded);
  CHECK(a.keys.empty());
  CHECK(a.limit == "compute (90 % of a step)");

  StepTimes slow = even;
  slow.gather_ms = 40;
  Tuning t = sharded;
  t.prefetch_forward = t.prefetch_backward = 0;
  a = advise(slow, t);
  CHECK(a.limit == "exposed gathers (29 % of a step)");
  CHECK(a.keys == Keys{"fsdp.prefetch_forward=1", "fsdp.prefetch_backward=1"});
  CHECK_THAT(a.to_string(),
             Catch::EndsWith("; try --fsdp.prefetch_forward=1 --fsdp.prefetch_backward=1"));
  CHECK(advise(slow, sharded).keys == Keys{"fsdp.strategy=shard_grad_op"});

  slow.host_ms = 30;
  t = sharded;
  t.num_units = 48, t.mean_unit_nbytes = 40000;
  a = advise(slow, t);
  CHECK(a.limit == "units that are too small (42 % of a step)");
  CHECK(a.keys == Keys{"fsdp.wrap=every_n_blocks", "fsdp.wrap_every=4"});
  t.is_wrap_fine = true;
  CHECK(advise(slow, t).keys == Keys{"fsdp.wrap=transformer_block"});

  slow = even;
  slow.recompute_ms = 25;
  t = sharded;
  t.has_recompute = true;
  a = advise(slow, t);
  CHECK(a.limit == "compute that is done twice (25 % of a step)");
  CHECK(a.keys == Keys{"recompute.policy=selective"});

  slow = even;
  slow.data_ms = 60;
  CHECK(advise(slow, sharded).keys == Keys{"data.read_ahead=4"});
  t = {.read_ahead = 4};
  CHECK(advise(slow, t).keys == Keys{"data.read_ahead=8"});

  slow = even;
  slow.reduce_ms = 50;
  t = sharded;
  t.reduces_each_pass = true;
  CHECK(advise(slow, t).keys == Keys{"fsdp.sync_every_micro_batch=false"});
  CHECK(advise(slow, sharded).keys == Keys{"fsdp.wire_dtype=bf16"});

  slow = even;
  slow.host_ms = 50;
  CHECK(advise(slow, {.micro_batch = 4}).keys == Keys{"train.micro_batch=8"});
  slow = even;
  slow.optimizer_ms = 70;
  a = advise(slow, {.num_passes = 3});
  CHECK(a.limit == "the optimizer (43 % of a step)");
  CHECK(a.keys == Keys{"train.grad_accum_steps=6"});
  CHECK(advise(slow, {.is_offloaded = true}).keys == Keys{"fsdp.offload=none"});
  // Of several the one that gains most.
  slow.optimizer_ms = 8, slow.host_ms = 50;
  slow.gather_ms = 80, slow.data_ms = 40;
  t = sharded;
  t.prefetch_backward = 0;
  CHECK(advise(slow, t).keys == Keys{"fsdp.prefetch_forward=1", "fsdp.prefetch_backward=1"});
}

/// Sample s of a batch is the number s.
struct Counting final : Samples {
  int64_t num_samples() const override { return 1000; }
  int64_t num_targets(int64_t, int64_t count) const override { return count; }
  Batch batch(int64_t first, int64_t B) const override {
    ++num_reads;
    if (first >= bad) throw InputError("a token out of range");
    Batch batch;
    batch.B = B;
    for (int64_t i = 0; i < B; ++i) batch.inputs.push_back(static_cast<int32_t>(first + i));
    return batch;
  }
  int64_t bad = 1000;
  mutable std::atomic<int> num_reads = 0;
};

TEST_CASE("batch_reader: what is read is the same however far ahead", "[profile]") {
  const RankRows rows{.micro_batch = 2, .num_passes = 2, .world_size = 3, .rank = 1};
  for (const int64_t num_ahead : {0, 1, 3, 20}) {
    CAPTURE(num_ahead);
    const Counting samples;
    BatchReader reader(samples, rows, num_ahead, 0);
    for (int64_t step = 0; step < 5; ++step) {
      const std::vector<Batch> batches = reader.take(12 * step, 4 - step);
      REQUIRE(batches.size() == 2);
      const auto first = static_cast<int32_t>(12 * step + 2);
      CHECK(batches[0].inputs == std::vector<int32_t>{first, first + 1});
      CHECK(batches[1].inputs == std::vector<int32_t>{first + 6, first + 7});
    }
    CHECK(samples.num_reads == 10);  // nothing behind the last step
    // Somewhere else it begins anew.
    CHECK(reader.take(120, 0)[0].inputs == std::vector<int32_t>{122, 123});
  }
}

TEST_CASE("batch_reader: an error comes with its step", "[profile]") {
  Counting samples;
  samples.bad = 24;
  BatchReader reader(samples, {.micro_batch = 4}, 3, 0);
  for (int64_t step = 0; step < 6; ++step) CHECK(reader.take(4 * step, 10).size() == 1);
  CHECK(error_of([&] { reader.take(24, 4); }) == "a token out of range");
}

}  // namespace
}  // namespace tessera::apps
