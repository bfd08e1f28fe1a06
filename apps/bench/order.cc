// tessera-bench-order: the order of a step (dist/fsdp/order.h) for as many ranks and units as asked
// for, without a tensor: each rank calls the units of a model in two micro-batches, skips some that
// others call, and its program is checked action by action (states and slots, dist/fsdp/ledger.h)
// and compared with that of the first rank.

#include "dist/fsdp/order.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "apps/bench/bench.h"
#include "apps/command_line.h"
#include "apps/program.h"
#include "core/check.h"
#include "dist/fsdp/ledger.h"
#include "dist/fsdp/program.h"

namespace tessera::apps {
namespace {

using dist::Action;
using dist::Order;

constexpr int kMicroBatches = 2;
constexpr int kSkipped = 3;  // units of a rank and micro-batch

struct Shape {
  int ranks = 4096, units = 1000, prefetch = 1;

  std::vector<dist::UnitUse> uses() const {
    dist::UnitUse use;
    use.pool = 0;
    use.gathered_nbytes = use.sent_nbytes = 1 << 20;
    use.gradient_nbytes = 1 << 21;
    return std::vector<dist::UnitUse>(static_cast<size_t>(units), use);
  }
  std::vector<int> num_slots() const { return {prefetch + 1}; }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (int u = 0; u < units; ++u) names.push_back(fmt::format("blocks.{}", u));
    return names;
  }
  /// The first unit is called by all ranks, or one would have no pass.
  bool is_skipped(int rank, int micro_batch, int unit) const {
    const int64_t drawn = (int64_t{7919} * rank + int64_t{104729} * micro_batch) % units;
    return unit > 0 && (unit + units - drawn) % units < kSkipped;
  }
};

/// A rank that checks what it is told to do.
class Checker final : public dist::Issuer {
 public:
  explicit Checker(const Shape& shape)
      : program_(shape.names()), ledger_(shape.uses(), shape.num_slots()) {}

  void act(const Action& action) override {
    const char* refusal = ledger_.apply(action);
    TESSERA_CHECK_AS(InternalError, refusal == nullptr, "{} of {}: {}", name_of(action),
                     program_.unit(action.unit), refusal);
    most_nbytes_ = std::max(most_nbytes_, ledger_.gathered_nbytes());
    program_.add(action);
  }
  bool agree(const dist::Turns::Hashes& mine) override {
    issued_ = mine.issued;
    return false;  // others have skipped other units
  }

  const dist::Program& program() const { return program_; }
  uint64_t issued() const { return issued_; }
  int64_t most_nbytes() const { return most_nbytes_; }
  int64_t nbytes_left() const { return ledger_.gathered_nbytes(); }

 private:
  dist::Program program_;
  dist::Ledger ledger_;
  uint64_t issued_ = 0;
  int64_t most_nbytes_ = 0;
};

void run_step(Order& order, const Shape& shape, int rank) {
  std::vector<size_t> calls;
  for (int m = 0; m < kMicroBatches; ++m) {
    order.accumulation.is_last = m + 1 == kMicroBatches;
    calls.clear();
    for (int u = 0; u < shape.units; ++u) {
      if (shape.is_skipped(rank, m, u)) continue;
      order.begin_call(u, Order::Mode::kTrain);
      calls.push_back(order.end_call(u, Order::Mode::kTrain));
    }
    const int64_t generation = order.generation();
    for (size_t i = calls.size(); i-- > 0;) order.enter_backward(generation, calls[i]);
    order.end_backward(true);
  }
  order.complete_gradients();
}

int run(int argc, char** argv) {
  CommandLine app("Order and program of a step without a tensor, checked for all ranks.",
                  "tessera-bench-order");
  Shape shape;
  bool as_json = false;
  app.add_option("--ranks", shape.ranks, "ranks of a shard group")
      ->check(in_range(1, std::optional(1000000)));
  app.add_option("--units", shape.units, "units of the model")
      ->check(in_range(kSkipped + 1, std::optional(1000000)));
  app.add_option("--prefetch", shape.prefetch, "units gathered ahead")
      ->check(in_range(0, std::optional(1024)));
  app.add_flag("--json", as_json, "one JSON object instead of text");
  if (const auto status = app.read(argc, argv)) return *status;

  const auto begin = std::chrono::steady_clock::now();
  int64_t num_actions = 0, num_collectives = 0, most_nbytes = 0;
  uint64_t hash = 0, issued = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    Checker checker(shape);
    Order order(shape.uses(), shape.num_slots(), {shape.prefetch, shape.prefetch}, checker);
    run_step(order, shape, rank);
    if (rank == 0) hash = checker.program().hash(), issued = checker.issued();
    TESSERA_CHECK(checker.program().hash() == hash && checker.issued() == issued,
                  "rank {} issues other collectives than rank 0", rank);
    TESSERA_CHECK(checker.nbytes_left() == 0, "rank {} ends with gathered units", rank);
    num_actions += static_cast<int64_t>(checker.program().actions().size());
    num_collectives = checker.program().num_collectives();
    most_nbytes = std::max(most_nbytes, checker.most_nbytes());
  }
  TESSERA_CHECK(most_nbytes <= (int64_t{shape.prefetch} + 1) << 20,
                "{} bytes are gathered at once, more than the ring has", most_nbytes);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const double resident_mib = static_cast<double>(usage.ru_maxrss) / 1024;
  if (as_json) {
    fmt::print("{}\n", nlohmann::json{{"bench", "order"},
                                      {"ranks", shape.ranks},
                                      {"units", shape.units},
                                      {"prefetch", shape.prefetch},
                                      {"actions", num_actions},
                                      {"collectives_of_a_rank", num_collectives},
                                      {"seconds", seconds.count()},
                                      {"resident_mib", resident_mib}}
                           .dump());
  } else {
    fmt::print(
        "{} ranks x {} units, {} micro-batches, prefetch {}: {} actions made and checked, {} "
        "collectives a rank, the same on all\n"
        "  {:.2f} s, {:.0f} ns an action, {:.0f} MiB resident\n",
        shape.ranks, shape.units, kMicroBatches, shape.prefetch, num_actions, num_collectives,
        seconds.count(), seconds.count() * 1e9 / static_cast<double>(num_actions), resident_mib);
  }
  return 0;
}

}  // namespace
}  // namespace tessera::apps

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] { return tessera::apps::run(argc, argv); });
}
