#include "apps/profile.h"

#include <charconv>
#include <fstream>

#include "apps/run_dir.h"
#include "core/files.h"
#include "core/log.h"
#include "core/profiler.h"
#include "core/runtime/context.h"
#include "dist/comm/clocks.h"
#include "dist/fsdp/shard_view.h"

namespace tessera::apps {

StepRange parse_step_range(const std::string& text) {
  if (text.empty()) return {};
  StepRange range;
  const auto fail = [&] {
    throw ConfigError(
        fmt::format("\"{}\", expected steps such as 10..13, counted from 1, or one step", text));
  };
  const auto number = [&](std::string_view part) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc() || end != part.data() + part.size() || value < 1) fail();
    return value;
  };
  const size_t dots = text.find("..");
  range.first = number(std::string_view(text).substr(0, dots));
  range.last =
      dots == std::string::npos ? range.first : number(std::string_view(text).substr(dots + 2));
  if (range.last < range.first) fail();
  return range;
}

Profile::Profile(const Config& config, int64_t first_step, dist::World& world, nn::Module& model,
                 const dist::Fsdp& fsdp, OpObserver* next,
                 std::function<void(const std::string&)> print)
    : config_(config),
      world_(world),
      fsdp_(fsdp),
      print_(std::move(print)),
      range_(parse_step_range(config.profile.steps)),
      next_(next),
      labels_(std::make_unique<dist::TaskLabels>(model, fsdp, next)) {
  profiler::claim_thread();
  if (world.rank() == 0 && (range_.last < first_step || range_.first > config.train.steps)) {
    log_warning("profile.steps = {}: nothing is profiled, this run has steps {} to {}",
                config.profile.steps, first_step, config.train.steps);
  }
}

Profile::~Profile() {
  if (is_recording_) profiler::stop();
}

OpObserver* Profile::observer() {
  return is_recording_ ? labels_.get() : next_;
}

void Profile::enter(int64_t step, const char* phase) {
  if (is_recording_) labels_->begin(step, phase);
}

void Profile::before_step(int64_t step) {
  if (is_recording_ && step > range_.last) finish();
  if (!is_recording_ && step >= range_.first && step <= range_.last) begin();
}

void Profile::begin() {
  clock_ahead_ns_ = dist::measure_clock(world_.control()).offset_ns;
  Context::current()->compute().synchronize();
  profiler::start();
  is_recording_ = true;
}

void Profile::finish() {
  if (!is_recording_) return;
  Context::current()->compute().synchronize();
  is_recording_ = false;
  profiler::stop();
  const int64_t first = profiler::first_event_ns() - clock_ahead_ns_;
  write_trace(world_.control().min(first) + clock_ahead_ns_);
  report();
}

/// One file, to which the ranks add one after the other.
void Profile::write_trace(int64_t origin_ns) {
  const int rank = world_.rank(), world_size = world_.world_size();
  profiler::TraceProcess process{.id = rank,
                                 .name = world_size == 1 ? "tessera" : fmt::format("rank {}", rank),
                                 .origin_ns = origin_ns,
                                 .owner = profiler::thread_owner()};
  for (size_t c = 0; c < process.counters.size(); ++c) {
    process.counters[c] = name_of(static_cast<MemoryClass>(c));
  }
  const std::string mine = profiler::chrome_events(process), path = trace_path(config_);
  std::ofstream file;
  if (rank == 0) file.open(path, std::ios::binary | std::ios::trunc);
  for (int r = 0; r < world_size; ++r) {
    const std::string events = world_.control().broadcast(mine, r);
    if (rank == 0) file << (r == 0 ? "[\n" : ",\n") << events;
  }
  world_.control().verdict([&] {
    if (rank != 0) return;
    file << "\n]\n" << std::flush;
    TESSERA_CHECK_AS(IoError, file.good(), "profile.trace: cannot write {}", path);
  });
  if (rank == 0) print_("trace: " + path);
}

Tuning Profile::tuning() const {
  const dist::ShardView view(fsdp_);
  const dist::FsdpOptions& o = fsdp_.options();
  Tuning t;
  t.world_size = world_.world_size();
  t.is_sharded = t.world_size > 1 && o.strategy != dist::Strategy::kNoShard;
  t.num_units = view.num_units();
  t.mean_unit_nbytes = view.num_parameters() / std::max<int64_t>(1, t.num_units) *
                       static_cast<int64_t>(size_of(o.precision.param_dtype));
  t.is_wrap_fine = config_.fsdp.wrap == Wrap::kClass || config_.fsdp.wrap == Wrap::kMinNumParams;
  t.blocks_in_unit = config_.fsdp.wrap == Wrap::kEveryNBlocks ? config_.fsdp.wrap_every : 1;
  t.prefetch_forward = o.prefetch_forward, t.prefetch_backward = o.prefetch_backward;
  t.has_recompute = config_.recompute.kind == nn::RecomputePolicy::Kind::kFull ||
                    config_.recompute.kind == nn::RecomputePolicy::Kind::kEveryN;
  t.num_passes = config_.samples_per_step / (config_.train.micro_batch * t.world_size);
  t.is_offloaded = o.offload != dist::Offload::kNone;
  t.reduces_each_pass =
      t.num_passes > 1 && o.sync_every_micro_batch == dist::GradSync::kEveryMicroBatch;
  t.has_low_wire =
      size_of(o.precision.wire_dtype.value_or(o.precision.reduce_dtype.value_or(kF32))) == 2;
  t.read_ahead = config_.data.read_ahead;
  t.micro_batch = config_.train.micro_batch;
  return t;
}

void Profile::report() {
  const int compute = Context::current()->compute().id(), owner = profiler::thread_owner();
  std::vector<TraceEvent> tasks;
  std::vector<std::pair<int64_t, int64_t>> reads;
  for (const TraceEvent& e : profiler::events_of(owner)) {
    if (e.stream_id == compute && e.label != 0) tasks.push_back(e);
    if (e.stream_id == profiler::host_row(owner) && std::string_view(e.name) == "data") {
      reads.emplace_back(e.begin_ns, e.end_ns);
    }
  }
  const std::vector<StepTimes> steps = step_times(tasks, reads);
  const StepTimes mine = mean_times(steps);
  std::vector<StepTimes> all(static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(all.data(), &mine, sizeof mine, "profile");
  const StepTimes mean = mean_times(all);
  if (world_.rank() != 0 || steps.empty()) return;
  const Advice advice = advise(mean, tuning());
  print_(profile_table(steps));
  if (all.size() > 1) {
    for (size_t r = 0; r < all.size(); ++r) {
      print_(fmt::format("rank {}: {:.2f} ms a step, compute {:.2f}, waits {:.2f}", r,
                         all[r].total_ms(), all[r].compute_ms,
                         all[r].gather_ms + all[r].reduce_ms));
    }
  }
  print_(advice.to_string());
  write_file_atomically(config_.output.dir + "/profile.json", profile_json(steps, advice));
}

}  // namespace tessera::apps
