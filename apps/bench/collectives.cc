// tessera-bench-collectives: all_gather, reduce_scatter and all_reduce of all ranks (mpirun -n N,
// or thread ranks with --ranks), 1 KiB to 1 GiB, results checked. Latency and bandwidths as
// nccl-tests define them: algorithm bandwidth = bytes / time with bytes of the full buffer; bus
// bandwidth = that x (N - 1) / N, for all_reduce x 2 (N - 1) / N, which does not depend on N on
// good hardware.

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "apps/bench/bench.h"
#include "apps/command_line.h"
#include "apps/program.h"
#include "core/log.h"
#include "core/profiler.h"
#include "core/runtime/context.h"
#include "core/tensor.h"
#include "dist/comm/local.h"
#if TESSERA_MPI
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#endif

namespace tessera::apps {
namespace {

enum class Collective { kAllGather, kReduceScatter, kAllReduce };

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllReduce:
      return "all_reduce";
  }
  return "";
}

struct Options {
  std::string device = "auto", filter;
  int64_t min_nbytes = 1 << 10, max_nbytes = int64_t{1} << 30;
  int num_thread_ranks = 0;
  int runs = 20;
  bool has_raw = false, as_json = false;
};

/// One collective on one size; every rank has one.
class Case {
 public:
  Case(dist::World& world, dist::Comm& comm, Collective collective, DType dtype, int64_t nbytes)
      : world_(world), comm_(comm), collective_(collective), dtype_(dtype) {
    const int64_t world_size = world.world_size(), size = static_cast<int64_t>(size_of(dtype));
    shard_numel_ = std::max<int64_t>(1, nbytes / (size * world_size));
    full_numel_ = shard_numel_ * world_size;
    full_ = comm.allocate(full_numel_ * size, MemoryClass::kOther);
    shard_ = comm.allocate(shard_numel_ * size, MemoryClass::kOther);
    const int64_t staging = collective == Collective::kReduceScatter
                                ? comm.reduce_scatter_staging_nbytes(shard_numel_, dtype, true)
                            : collective == Collective::kAllReduce
                                ? comm.all_reduce_staging_nbytes(full_numel_, dtype)
                                : 0;
    if (staging > 0) staging_ = comm.allocate(staging, MemoryClass::kOther);
  }

  double full_nbytes() const {
    return static_cast<double>(full_numel_) * static_cast<double>(size_of(dtype_));
  }
  double bus_factor() const {
    const double n = world_.world_size();
    return (collective_ == Collective::kAllReduce ? 2 : 1) * (n - 1) / n;
  }

  void submit() const {
    const Stream& s = current_stream();
    void* const staging = staging_ == nullptr ? nullptr : staging_->data();
    switch (collective_) {
      case Collective::kAllGather:
        return comm_.all_gather(s, full_->data(), shard_->data(), shard_numel_, dtype_, kInfo);
      case Collective::kReduceScatter:
        return comm_.reduce_scatter(s, shard_->data(), full_->data(), shard_numel_, dtype_, dtype_,
                                    false, staging, kInfo);
      case Collective::kAllReduce:
        return comm_.all_reduce(s, full_->data(), full_numel_, dtype_, staging, kInfo);
    }
  }

#if TESSERA_MPI
  /// The library's own call in the same place, f32 only.
  void submit_raw() const {
    const auto count = static_cast<int>(shard_numel_);
    switch (collective_) {
      case Collective::kAllGather:
        MPI_Allgather(shard_->data(), count, MPI_FLOAT, full_->data(), count, MPI_FLOAT,
                      MPI_COMM_WORLD);
        return;
      case Collective::kReduceScatter:
        MPI_Reduce_scatter_block(full_->data(), shard_->data(), count, MPI_FLOAT, MPI_SUM,
                                 MPI_COMM_WORLD);
        return;
      case Collective::kAllReduce:
        MPI_Allreduce(MPI_IN_PLACE, full_->data(), static_cast<int>(full_numel_), MPI_FLOAT,
                      MPI_SUM, MPI_COMM_WORLD);
        return;
    }
  }
#endif

  /// Runs it once on values whose results are exact: whether this rank's are right.
  bool is_right() const {
    const auto rank = static_cast<double>(world_.rank()),
               n = static_cast<double>(world_.world_size());
    Tensor full = view_of_storage(full_, 0, {full_numel_}, dtype_);
    Tensor shard = view_of_storage(shard_, 0, {shard_numel_}, dtype_);
    const bool is_gather = collective_ == Collective::kAllGather;
    full.fill_(is_gather ? -1 : rank + 1);
    shard.fill_(rank + 1);
    submit();
    bool ok = true;
    const auto expect = [&](const Tensor& t, double value) {
      const int64_t last = t.numel() - 1;
      for (const int64_t i : {int64_t{0}, last / 2, last}) {
        ok = ok && t.narrow(0, i, 1).item() == value;
      }
    };
    if (is_gather) {
      for (int r = 0; r < world_.world_size(); ++r) {
        expect(full.narrow(0, r * shard_numel_, shard_numel_), r + 1);
      }
    } else {
      expect(collective_ == Collective::kReduceScatter ? shard : full, n * (n + 1) / 2);
    }
    full.fill_(1);  // what is summed over and over stays finite
    shard.fill_(1);
    current_stream().synchronize();
    return ok;
  }

  /// Times of the slowest rank of each run.
  Timing time(const std::function<void()>& run, int runs) const {
    std::vector<double> times_ms;
    for (int i = -2; i < runs; ++i) {
      world_.control().barrier();
      const int64_t begin = profiler::now_ns();
      run();
      current_stream().synchronize();
      const auto taken = static_cast<int64_t>(profiler::now_ns() - begin);
      const int64_t slowest = world_.control().max(taken);
      if (i >= 0) times_ms.push_back(static_cast<double>(slowest) * 1e-6);
      if (collective_ == Collective::kAllReduce) {
        view_of_storage(full_, 0, {full_numel_}, dtype_).fill_(1);
        current_stream().synchronize();
      }
    }
    return summarize(std::move(times_ms));
  }

 private:
  static constexpr dist::CollectiveInfo kInfo{"bench", "", -1};

  dist::World& world_;
  dist::Comm& comm_;
  const Collective collective_;
  const DType dtype_;
  int64_t shard_numel_ = 0, full_numel_ = 0;
  std::shared_ptr<Storage> full_, shard_, staging_;
};

void report(const std::string& name, const Case& one, const Timing& t, bool as_json) {
  const double algorithm = one.full_nbytes() / t.median_ms * 1e-6;
  if (as_json) {
    fmt::print("{}\n", nlohmann::json{{"bench", name},
                                      {"nbytes", one.full_nbytes()},
                                      {"us", t.median_ms * 1e3},
                                      {"min_us", t.min_ms * 1e3},
                                      {"max_us", t.max_ms * 1e3},
                                      {"algorithm_gbytes_per_s", algorithm},
                                      {"bus_gbytes_per_s", algorithm * one.bus_factor()}}
                           .dump());
  } else {
    fmt::print("{:<34} {:>13.0f} {:>11.1f} {:>10.1f}-{:<11.1f} {:>9.2f} {:>9.2f}\n", name,
               one.full_nbytes(), t.median_ms * 1e3, t.min_ms * 1e3, t.max_ms * 1e3, algorithm,
               algorithm * one.bus_factor());
  }
  std::fflush(stdout);
}

/// Calls `f` with collective, dtype, size and name of each case that is wanted.
template <class F>
void for_each_case(const Options& options, F&& f) {
  for (const Collective collective :
       {Collective::kAllGather, Collective::kReduceScatter, Collective::kAllReduce}) {
    for (const DType dtype : {kF32, kBF16}) {
      for (int64_t nbytes = options.min_nbytes; nbytes <= options.max_nbytes; nbytes *= 4) {
        const std::string name =
            fmt::format("{}/{}/{}", name_of(collective), tessera::name_of(dtype), nbytes);
        if (name.find(options.filter) == std::string::npos) continue;
        f(collective, dtype, nbytes, name);
      }
    }
  }
}

int num_runs(const Options& options, int64_t nbytes) {
  return nbytes >= int64_t{64} << 20 ? std::min(options.runs, 5) : options.runs;
}

/// Of all cases, from one run of each collective on at most 4 MiB.
double estimate_seconds(dist::World& world, dist::Comm& comm, const Options& options) {
  const int64_t sample_nbytes = std::clamp(int64_t{4} << 20, options.min_nbytes,
                                           std::max(options.min_nbytes, options.max_nbytes));
  std::map<Collective, double> sample_s;
  double total = 0;
  for_each_case(
      options, [&](Collective collective, DType dtype, int64_t nbytes, const std::string&) {
        if (!sample_s.contains(collective)) {
          const Case one(world, comm, collective, kF32, sample_nbytes);
          sample_s[collective] = one.time([&] { one.submit(); }, 1).median_ms * 1e-3;
        }
        constexpr double kLeast = 1e-4, kMpiFactor = 5;  // MPI's reductions are slower
        const double once = std::max(kLeast, sample_s[collective] * static_cast<double>(nbytes) /
                                                 static_cast<double>(sample_nbytes));
        const bool has_raw = options.has_raw && dtype == kF32;
        total += once * (num_runs(options, nbytes) + 4) * (has_raw ? 1 + kMpiFactor : 1);
      });
  return total;
}

/// All cases on this rank; false if a result was wrong on any.
bool run_cases(dist::World& world, const Options& options) {
  const std::unique_ptr<dist::Comm> comm = world.make_comm();
  const bool prints = world.rank() == 0;
  if (prints && world.world_size() == 1) {
    log_warning(
        "one rank: nothing travels, so no collective is measured; expected mpirun -n N "
        "tessera-bench-collectives, or --ranks=N thread ranks");
  }
  const double seconds = estimate_seconds(world, *comm, options);
  if (prints) say_estimate(seconds);
  if (prints && !options.as_json) {
    fmt::print("{} ranks\n{:<34} {:>13} {:>11} {:>22} {:>9} {:>9}\n", world.world_size(),
               "collective", "bytes", "us", "min-max", "alg GB/s", "bus GB/s");
  }
  int64_t num_wrong = 0;
  for_each_case(options,
                [&](Collective collective, DType dtype, int64_t nbytes, const std::string& name) {
                  const Case one(world, *comm, collective, dtype, nbytes);
                  const bool wrong = world.control().max(one.is_right() ? 0 : 1) != 0;
                  num_wrong += wrong;
                  if (wrong && prints) log_error("{}: wrong result", name);
                  const int runs = num_runs(options, nbytes);
                  const Timing ours = one.time([&] { one.submit(); }, runs);
                  if (prints) report(name, one, ours, options.as_json);
#if TESSERA_MPI
                  if (options.has_raw && dtype == kF32) {
                    const Timing raw = one.time([&] { one.submit_raw(); }, runs);
                    if (prints) report("mpi_" + name, one, raw, options.as_json);
                  }
#endif
                });
  return num_wrong == 0;
}

/// "64K", "1M", "1G" or a number of bytes.
int64_t parse_nbytes(const std::string& text) {
  size_t end = 0;
  int64_t value = -1;
  try {
    value = std::stoll(text, &end);
  } catch (const std::exception&) {
  }
  const std::string unit = value < 0 ? "?" : text.substr(end);
  const int shift = unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : unit.empty() ? 0 : -1;
  if (value < 1 || shift < 0) {
    throw ConfigError(
        fmt::format("command line: {} is no size, expected bytes as in 1024, 64K, 1M or 1G", text));
  }
  return value << shift;
}

int run(int argc, char** argv) {
  CommandLine app(
      "Times collectives of all ranks (mpirun -n N, or --ranks=N threads). Exit status 1 "
      "if a result is wrong.",
      "tessera-bench-collectives");
  Options options;
  std::string min_size = "1K", max_size = "1G";
  app.add_option("--min", min_size, "smallest full buffer, as in 1K");
  app.add_option("--max", max_size, "largest; each size is four times the one before");
  app.add_option("--filter", options.filter, "only cases whose name contains this");
  app.add_option("--runs", options.runs, "runs of each case (5 at most from 64M on)")
      ->check(in_range(1, std::optional(10000)));
  app.add_option("--ranks", options.num_thread_ranks,
                 "thread ranks of this process instead of those of mpirun")
      ->check(in_range(1, std::optional(64)));
  app.add_option("--device", options.device, "auto, cpu or cuda");
  app.add_flag("--raw", options.has_raw, "also MPI's own calls (under mpirun, f32)");
  app.add_flag("--json", options.as_json, "one JSON object a line instead of a table");
  if (const auto status = app.read(argc, argv)) return *status;
  const auto read_sizes = [&] {
    options.min_nbytes = parse_nbytes(min_size);
    options.max_nbytes = parse_nbytes(max_size);
    if (options.has_raw && options.num_thread_ranks > 0) {
      throw ConfigError("command line: --raw with --ranks, expected ranks of mpirun");
    }
  };
  bool ok = true;
  if (options.num_thread_ranks > 0) {
    read_sizes();
    dist::LocalOptions local;
    local.context.poison = local.context.order_check = false;
    local.context.device = device_from_name(options.device);
    dist::run_ranks(options.num_thread_ranks, local, [&](dist::World& world) {
      const bool is_right = run_cases(world, options);
      if (world.rank() == 0) ok = is_right;
    });
    return ok ? 0 : 1;
  }
  return dist::run_main(argc, argv, [&](dist::World& world) {
    std::shared_ptr<Context> context;
    world.control().verdict([&] {
      read_sizes();
      ContextOptions context_options;
      context_options.device = world.device(options.device);
      context_options.num_threads = world.num_threads(0);
      context = std::make_shared<Context>(context_options);
    });
    const Context::Scope scope(context);
    return run_cases(world, options) ? 0 : 1;
  });
}

}  // namespace
}  // namespace tessera::apps

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] { return tessera::apps::run(argc, argv); });
}
