#include "apps/profile_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>

namespace tessera::apps {
namespace {

using Span = std::pair<int64_t, int64_t>;
using Wait = profiler::TaskLabel::Wait;

double ms_of(int64_t ns) {
  return static_cast<double>(ns) * 1e-6;
}

/// The part of [begin, end) that spans, which do not overlap, cover.
int64_t overlap_ns(int64_t begin, int64_t end, std::span<const Span> spans) {
  int64_t total = 0;
  for (const auto& [first, last] : spans) {
    total += std::max<int64_t>(0, std::min(end, last) - std::max(begin, first));
  }
  return total;
}

/// Collectives that the compute stream takes part in itself: losses and norms of all ranks.
bool is_collective(std::string_view task) {
  return task.starts_with("all_gather") || task.starts_with("all_reduce") ||
         task.starts_with("reduce_scatter");
}

double& part_of(StepTimes& times, const TraceEvent& task, const profiler::TaskLabel& label) {
  const std::string_view name = task.name, phase = label.phase;
  if (label.wait == Wait::kGather) return times.gather_ms;
  if (label.wait == Wait::kReduce || is_collective(name)) return times.reduce_ms;
  // What is left to wait for are shards and states on their way from host memory, or the norm.
  if (phase == "optimizer") return times.optimizer_ms;
  return times.compute_ms;
}

}  // namespace

std::vector<StepTimes> step_times(std::span<const TraceEvent> tasks,
                                  std::span<const Span> reads_ns) {
  std::vector<StepTimes> steps;
  int64_t last_ns = -1;
  int64_t step_now = -1;
  for (const TraceEvent& task : tasks) {
    if (task.label == 0) continue;  // somebody else's, such as a thread that frees memory
    const profiler::TaskLabel label = profiler::label_of(task.label);
    if (label.step < 0) {
      step_now = -1;
      continue;
    }
    if (label.step != step_now) {
      if (step_now < 0) last_ns = task.begin_ns;  // nobody knows what came between
      step_now = label.step;
      steps.emplace_back().step = step_now;
    }
    StepTimes& times = steps.back();
    const int64_t begin = std::max(task.begin_ns, last_ns), end = std::max(task.end_ns, begin);
    const int64_t idle = begin - last_ns, read = overlap_ns(last_ns, begin, reads_ns);
    times.data_ms += ms_of(read);
    times.host_ms += ms_of(idle - read);
    part_of(times, task, label) += ms_of(end - begin);
    if (label.is_recomputed && label.wait == Wait::kNone) times.recompute_ms += ms_of(end - begin);
    last_ns = end;
  }
  return steps;
}

StepTimes mean_times(std::span<const StepTimes> steps) {
  StepTimes mean;
  if (steps.empty()) return mean;
  mean.step = steps.front().step;
  for (double StepTimes::*part :
       {&StepTimes::compute_ms, &StepTimes::gather_ms, &StepTimes::reduce_ms, &StepTimes::data_ms,
        &StepTimes::host_ms, &StepTimes::optimizer_ms, &StepTimes::recompute_ms}) {
    for (const StepTimes& s : steps) mean.*part += s.*part;
    mean.*part /= static_cast<double>(steps.size());
  }
  return mean;
}

std::string Advice::to_string() const {
  std::string text = fmt::format("limited by {}: {}", limit, why);
  for (size_t i = 0; i < keys.size(); ++i) text += (i == 0 ? "; try --" : " --") + keys[i];
  return text;
}

Advice advise(const StepTimes& m, const Tuning& t) {
  /// A change, and how much of a step it may save.
  struct Candidate {
    double gain_ms;
    const char* limit;
    double share_ms;
    std::string why;
    std::vector<std::string> keys;
  };
  std::vector<Candidate> candidates;
  const double exposed = m.gather_ms + m.reduce_ms;
  const bool has_prefetch = t.prefetch_forward > 0 && t.prefetch_backward > 0;
  // Below this a collective costs its start, not its bytes.
  constexpr int64_t kSmallUnit = int64_t{1} << 20;
  const bool is_small = t.num_units > 2 && t.mean_unit_nbytes < kSmallUnit;
  if (m.data_ms > 0) {
    const int64_t ahead = std::max<int64_t>(4, 2 * t.read_ahead);
    candidates.push_back(
        {0.9 * m.data_ms,
         "data",
         m.data_ms,
         "compute waits until the host has read the next batch; more steps are read "
         "ahead at once",
         {fmt::format("data.read_ahead={}", ahead)}});
  }
  if (t.is_sharded && is_small) {
    const int64_t blocks = t.is_wrap_fine ? 1 : 4 * t.blocks_in_unit;
    std::vector<std::string> keys = {"fsdp.wrap=transformer_block"};
    if (!t.is_wrap_fine) {
      keys = {"fsdp.wrap=every_n_blocks", fmt::format("fsdp.wrap_every={}", blocks)};
    }
    candidates.push_back({0.7 * (exposed + m.host_ms), "units that are too small",
                          exposed + m.host_ms,
                          fmt::format("{} units of {:.0f} KiB each cost a gather and a reduce that "
                                      "hardly move anything; larger ones are fewer",
                                      t.num_units, static_cast<double>(t.mean_unit_nbytes) / 1024),
                          keys});
  }
  if (t.is_sharded && m.gather_ms > 0) {
    if (!has_prefetch) {
      candidates.push_back({0.75 * m.gather_ms,
                            "exposed gathers",
                            m.gather_ms,
                            "no unit is gathered while the one before it computes",
                            {"fsdp.prefetch_forward=1", "fsdp.prefetch_backward=1"}});
    } else {
      candidates.push_back({0.4 * m.gather_ms,
                            "exposed gathers",
                            m.gather_ms,
                            "a unit's gather takes longer than the one before it computes; kept "
                            "parameters are gathered once a step (more memory)",
                            {"fsdp.strategy=shard_grad_op"}});
    }
  }
  if (m.reduce_ms > 0 && t.world_size > 1) {
    if (t.reduces_each_pass) {
      candidates.push_back({0.6 * m.reduce_ms,
                            "exposed reduces",
                            m.reduce_ms,
                            "gradients are reduced after each pass of a step (once: more memory)",
                            {"fsdp.sync_every_micro_batch=false"}});
    } else if (!t.has_low_wire) {
      candidates.push_back({0.4 * m.reduce_ms,
                            "exposed reduces",
                            m.reduce_ms,
                            "gradients travel in f32; half the bytes lose digits of the sums",
                            {"fsdp.wire_dtype=bf16"}});
    }
  }
  if (t.has_recompute) {
    candidates.push_back(
        {0.8 * m.recompute_ms,
         "compute that is done twice",
         m.recompute_ms,
         "whole blocks are computed again in backward; less of it needs more memory",
         {"recompute.policy=selective"}});
  }
  candidates.push_back({0.5 * m.host_ms,
                        "the host",
                        m.host_ms,
                        "compute has nothing to do while the host submits; more samples in a pass "
                        "(more memory) give it more",
                        {fmt::format("train.micro_batch={}", 2 * t.micro_batch)}});
  if (t.is_offloaded) {
    candidates.push_back({0.5 * m.optimizer_ms,
                          "the optimizer",
                          m.optimizer_ms,
                          "its states come from the host's memory and go back; on the device they "
                          "stay where they are (more memory)",
                          {"fsdp.offload=none"}});
  } else {
    candidates.push_back({0.3 * m.optimizer_ms,
                          "the optimizer",
                          m.optimizer_ms,
                          "an update takes the same time whatever the samples of its step; more of "
                          "them (another training: a larger batch) need fewer updates",
                          {fmt::format("train.grad_accum_steps={}", 2 * t.num_passes)}});
  }
  const double total = m.total_ms();
  const auto best =
      std::max_element(candidates.begin(), candidates.end(),
                       [](const auto& a, const auto& b) { return a.gain_ms < b.gain_ms; });
  const auto percent = [&](double part) {
    return fmt::format("{:.0f} % of a step", total > 0 ? 100 * part / total : 0.0);
  };
  constexpr double kWorthwhile = 0.03;
  if (total <= 0 || best->gain_ms < kWorthwhile * total) {
    return {fmt::format("compute ({})", percent(m.compute_ms)),
            "nothing else takes much of a step: a lower precision, or more devices",
            {}};
  }
  Advice advice{fmt::format("{} ({})", best->limit, percent(best->share_ms)), best->why,
                best->keys};
  return advice;
}

std::string profile_table(std::span<const StepTimes> steps) {
  const auto row = [](const std::string& title, const StepTimes& s) {
    return fmt::format("{:>6} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f}",
                       title, s.total_ms(), s.compute_ms, s.gather_ms, s.reduce_ms, s.data_ms,
                       s.host_ms, s.optimizer_ms);
  };
  std::string text = fmt::format("{:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}", "step", "ms",
                                 "compute", "gather", "reduce", "data", "host", "optimizer");
  for (const StepTimes& s : steps) text += "\n" + row(fmt::format("{}", s.step), s);
  if (steps.size() > 1) text += "\n" + row("mean", mean_times(steps));
  return text;
}

std::string profile_json(std::span<const StepTimes> steps, const Advice& advice) {
  nlohmann::ordered_json object;
  const auto add = [](const StepTimes& s) {
    return nlohmann::ordered_json{{"step", s.step},
                                  {"ms", s.total_ms()},
                                  {"compute_ms", s.compute_ms},
                                  {"recompute_ms", s.recompute_ms},
                                  {"gather_ms", s.gather_ms},
                                  {"reduce_ms", s.reduce_ms},
                                  {"data_ms", s.data_ms},
                                  {"host_ms", s.host_ms},
                                  {"optimizer_ms", s.optimizer_ms}};
  };
  for (const StepTimes& s : steps) object["steps"].push_back(add(s));
  object["limited_by"] = advice.limit;
  object["why"] = advice.why;
  object["try"] = advice.keys;
  return object.dump() + "\n";
}

}  // namespace tessera::apps
