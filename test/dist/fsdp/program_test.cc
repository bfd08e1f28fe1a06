// The order of a step as a pure state machine, and the program that comes of it.

#include "dist/fsdp/program.h"

#include <algorithm>
#include <memory>
#include <random>
#include <set>

#include "dist/fsdp/ledger.h"
#include "dist/fsdp/order.h"
#include "dist/fsdp/turns.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::Action;
using dist::ActionKind;
using dist::Ledger;
using dist::Order;
using dist::ParamState;
using dist::Phase;
using dist::Residence;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<std::string> letters(int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(1, static_cast<char>('a' + i));
  return names;
}

/// Takes down what an Order decides; the ranks of a test agree as it says.
struct Scribe final : dist::Issuer {
  explicit Scribe(int num_units) : program(letters(num_units)) {}
  void act(const Action& action) override { program.add(action); }
  bool agree(const dist::Turns::Hashes& mine) override {
    hashes = mine;
    return all_call_the_same;
  }
  dist::Program program;
  dist::Turns::Hashes hashes{};
  bool all_call_the_same = true;
};

struct Machine {
  int num_units;
  Scribe scribe;
  Order order;

  Machine(const std::vector<dist::UnitUse>& uses, const std::vector<int>& num_slots,
          const dist::OrderOptions& options)
      : num_units(static_cast<int>(uses.size())),
        scribe(num_units),
        order(uses, num_slots, options, scribe) {}
  /// `units` units that share a ring of `num_slots`.
  Machine(int units, int num_slots, const dist::OrderOptions& options,
          Residence residence = Residence::kReshard)
      : Machine(std::vector<dist::UnitUse>(
                    static_cast<size_t>(units),
                    {residence, residence == Residence::kReshard ? 0 : -1, true, false, 64, 32}),
                std::vector<int>{num_slots}, options) {}

  /// Forward and backward that call the units of `called` in turn.
  void pass(const std::vector<int>& called) {
    std::vector<size_t> calls;
    for (const int unit : called) {
      order.begin_call(unit, Order::Mode::kTrain);
      calls.push_back(order.end_call(unit, Order::Mode::kTrain));
    }
    const int64_t generation = order.generation();
    for (size_t i = calls.size(); i-- > 0;) order.enter_backward(generation, calls[i]);
    order.end_backward(true);
  }
  void pass() { pass(all()); }
  std::vector<int> all() const {
    std::vector<int> units;
    for (int u = 0; u < num_units; ++u) units.push_back(u);
    return units;
  }
  /// The program of the step, which is over.
  std::string end_step() {
    order.complete_gradients();
    std::string text = scribe.program.to_string();
    order.end_step();
    scribe.program.clear();
    return text;
  }
  /// Step 0, in which turns are learned.
  void warm_up() {
    pass();
    end_step();
  }
};

TEST_CASE("fsdp program: a step without prefetch, action by action", "[fsdp]") {
  Machine m(3, 1, {.prefetch_forward = 0, .prefetch_backward = 0});
  m.warm_up();
  m.pass();
  // The last unit keeps its slot over to backward.
  CHECK(m.end_step() ==
        "gather_forward a\nwait a\nrelease a\ngather_forward b\nwait b\nrelease b\n"
        "gather_forward c\nwait c\n"
        "reduce c\nrelease c\ngather_backward b\nwait b\n"
        "reduce b\nrelease b\ngather_backward a\nwait a\n"
        "reduce a\nrelease a\n"
        "finish a\nfinish b\nfinish c\n");
}

TEST_CASE("fsdp program: prefetch gathers ahead as far as the ring has slots", "[fsdp]") {
  Machine m(3, 2, {.prefetch_forward = 1, .prefetch_backward = 1});
  m.warm_up();
  m.pass();
  CHECK(m.end_step() ==
        "gather_forward a\ngather_forward b\nwait a\nrelease a\ngather_forward c\nwait b\n"
        "release b\nwait c\ngather_backward b\nreduce c\nrelease c\ngather_backward a\nwait b\n"
        "reduce b\nrelease b\nwait a\nreduce a\nrelease a\nfinish a\nfinish b\nfinish c\n");
}

TEST_CASE("fsdp program: a ring shorter than the depth of prefetch does not grow", "[fsdp]") {
  Machine m(4, 2, {.prefetch_forward = 3, .prefetch_backward = 3});
  m.warm_up();
  m.pass();
  CHECK(!contains(m.end_step(), "add_slot"));
  CHECK(m.order.ledger().num_slots(0) == 2);
}

TEST_CASE("fsdp program: what stayed does not count as gathered ahead", "[fsdp]") {
  const dist::UnitUse block{Residence::kReshard, 0, true, false, 64, 32};
  dist::UnitUse head = block;
  head.pool = 1;
  Machine m({block, block, block, head}, {2, 1}, {.prefetch_forward = 1, .prefetch_backward = 1});
  m.warm_up();
  m.pass();
  // Backward begins with head and last block, which are there, and gathers one more.
  CHECK(contains(m.end_step(), "wait d\ngather_backward b\nreduce d\n"));
}

TEST_CASE("fsdp program: a unit that stays is gathered once and closed, and expires", "[fsdp]") {
  Machine m(2, 0, {.prefetch_forward = 1, .prefetch_backward = 1}, Residence::kKeep);
  m.warm_up();
  m.pass();
  m.pass();
  m.order.complete_gradients();
  m.order.end_step();
  const std::string pass =
      "wait a\nclose a\nwait b\nreduce b\nclose b\nwait a\nreduce a\nclose a\n";
  CHECK(m.scribe.program.to_string() == "gather_forward a\ngather_forward b\n" + pass + pass +
                                            "finish a\nfinish b\nexpire a\nexpire b\n");
}

TEST_CASE("fsdp program: ranks that call different units issue the same collectives", "[fsdp]") {
  std::mt19937 random(5);
  const auto draw = [&random](int count) { return static_cast<int>(random() % unsigned(count)); };
  for (int trial = 0; trial < 300; ++trial) {
    const int num_units = 1 + draw(9), num_ranks = 2 + draw(4);
    const dist::OrderOptions options{.prefetch_forward = draw(4), .prefetch_backward = draw(4)};
    const int num_slots = std::max(options.prefetch_forward, options.prefetch_backward) + 1;
    const bool skips_first = draw(2) == 1;
    std::vector<std::unique_ptr<Machine>> ranks;
    for (int r = 0; r < num_ranks; ++r) {
      ranks.push_back(std::make_unique<Machine>(num_units, num_slots, options));
      ranks.back()->scribe.all_call_the_same = !skips_first;
    }
    for (int step = 0; step < 3; ++step) {
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        for (const auto& rank : ranks) {
          std::vector<int> called;
          for (const int unit : rank->all()) {
            // Unit 0 is called by all, or a rank would have no pass at all.
            if (unit == 0 || (step == 0 && !skips_first) || draw(3) > 0) called.push_back(unit);
            if (called.back() == unit && draw(4) == 0) called.push_back(unit);  // twice in a row
          }
          rank->order.accumulation.is_last = micro_batch == 1;
          rank->pass(called);
          CHECK(rank->order.ledger().gathered_nbytes() == 0);
        }
      }
      for (const auto& rank : ranks) {
        rank->order.complete_gradients();
        CHECK(rank->scribe.program.collectives() == ranks[0]->scribe.program.collectives());
        CHECK(rank->scribe.program.hash() == ranks[0]->scribe.program.hash());
        CHECK(rank->order.ledger().num_slots(0) == num_slots);
        if (step == 0) CHECK(rank->scribe.hashes.issued == ranks[0]->scribe.hashes.issued);
      }
      for (const auto& rank : ranks) rank->end_step();
    }
  }
}

TEST_CASE("fsdp program: a unit at both ends of the model stays in between", "[fsdp]") {
  Machine m({{Residence::kReshard, 1, true, false, 64, 32},
             {Residence::kReshard, 0, true, false, 64, 32}},
            {1, 1}, {.prefetch_forward = 0, .prefetch_backward = 0});
  m.pass({0, 1, 0});
  m.end_step();
  m.pass({0, 1, 0});
  CHECK(m.end_step() ==
        "gather_forward a\nwait a\ngather_forward b\nwait b\nreduce b\nrelease b\n"
        "reduce a\nrelease a\nfinish a\nfinish b\n");
}

TEST_CASE("fsdp program: turns that this rank skips before a unit it is at take no slot from it",
          "[fsdp]") {
  Machine m(2, 2, {.prefetch_forward = 0, .prefetch_backward = 0});
  m.pass({0, 1, 0});
  m.end_step();
  m.pass({0, 0});  // the other unit and the third turn are skipped
  CHECK(m.end_step() ==
        "gather_forward a\nwait a\nrelease a\ngather_forward b\njoin b\nrelease b\n"
        "gather_forward a\ngather_backward b\nreduce b\njoin b\nrelease b\n"
        "wait a\nreduce a\nrelease a\nfinish a\nfinish b\n");
}

TEST_CASE("fsdp program: an evaluation that is through leaves nothing gathered", "[fsdp]") {
  Machine m(2, 1, {.prefetch_forward = 0, .prefetch_backward = 0});
  const auto evaluate = [&m](const std::vector<int>& called) {
    for (const int unit : called) {
      m.order.begin_call(unit, Order::Mode::kEval);
      CHECK(m.order.end_call(unit, Order::Mode::kEval) == Order::kNoCall);
    }
  };
  // Before turns are known the root says when.
  evaluate({0});
  m.order.end_root_call();
  CHECK(m.order.ledger().gathered_nbytes() == 64);
  evaluate({1, 1});
  CHECK(m.order.ledger().gathered_nbytes() == 64);
  m.order.end_root_call();
  CHECK(m.order.ledger().gathered_nbytes() == 0);
  m.pass({0, 1, 1});
  m.end_step();
  evaluate({0, 1});
  CHECK(m.order.ledger().gathered_nbytes() == 64);  // the second call of the last unit is to come
  evaluate({1});
  CHECK(m.order.ledger().gathered_nbytes() == 0);
  CHECK(m.scribe.program.to_string() ==
        "gather_forward a\nwait a\nrelease a\ngather_forward b\nwait b\nrelease b\n");
}

TEST_CASE("fsdp program: a second run of a region gathers its unit once for both", "[fsdp]") {
  Machine m(2, 1, {.prefetch_forward = 0, .prefetch_backward = 0});
  m.warm_up();
  for (const int unit : {0, 1}) {
    m.order.begin_call(unit, Order::Mode::kTrain, 5 + unit);
    m.order.end_call(unit, Order::Mode::kTrain);
  }
  const int64_t generation = m.order.generation();
  for (const int unit : {1, 0}) {
    m.order.begin_call(unit, Order::Mode::kReplay, 5 + unit);
    const size_t call = m.order.end_call(unit, Order::Mode::kReplay);
    CHECK(call == static_cast<size_t>(unit));
    m.order.enter_backward(generation, call);
  }
  m.order.end_backward(true);
  CHECK(m.end_step() ==
        "gather_forward a\nwait a\nrelease a\ngather_forward b\nwait b\nreduce b\nrelease b\n"
        "gather_backward a\nwait a\nreduce a\nrelease a\nfinish a\nfinish b\n");
}

TEST_CASE("fsdp program: what is held stays until its last holder is gone", "[fsdp]") {
  const auto take = [](Machine& m) {
    const std::string text = m.scribe.program.to_string();
    m.scribe.program.clear();
    return text;
  };
  Machine m(2, 1, {.prefetch_forward = 0, .prefetch_backward = 0});
  const Order::Before outer = m.order.hold(0), inner = m.order.hold(0);
  CHECK(take(m) == "gather_unshard a\nwait a\n");
  m.order.end_hold(0, inner, false);
  CHECK(take(m).empty());
  m.order.end_hold(0, outer, false);
  CHECK(take(m) == "release a\n");
  // Its turn is over while it is held: the other unit needs a slot more.
  m.order.begin_call(0, Order::Mode::kTrain);
  m.order.end_call(0, Order::Mode::kTrain);
  CHECK(take(m) == "gather_forward a\nwait a\n");
  m.order.end_hold(0, m.order.hold(0), false);  // stays open between calls
  CHECK(take(m).empty());
  const Order::Before between = m.order.hold(0);
  m.order.begin_call(1, Order::Mode::kTrain);
  m.order.end_call(1, Order::Mode::kTrain);
  CHECK(take(m) == "add_slot b\ngather_forward b\nwait b\n");
  m.order.end_hold(0, between, false);
  CHECK(take(m) == "release a\n");
  m.order.end_forward();
  CHECK(take(m) == "release b\n");
  // Gathered ahead of its turn: not to be read before that.
  Machine ahead(2, 2, {.prefetch_forward = 1, .prefetch_backward = 1});
  ahead.order.begin_call(0, Order::Mode::kTrain);
  CHECK(take(ahead) == "gather_forward a\ngather_forward b\nwait a\n");
  ahead.order.end_hold(1, ahead.order.hold(1), false);
  CHECK(take(ahead) == "wait b\nclose b\n");
  ahead.order.end_hold(0, ahead.order.hold(0), false);  // in use, and goes on
  CHECK(take(ahead).empty());
  // Written: what is gathered, and stays, is out of date.
  Machine keeps(1, 0, {}, Residence::kKeep);
  keeps.order.end_hold(0, keeps.order.hold(0), true);
  CHECK(take(keeps) == "gather_unshard a\nwait a\nclose a\nexpire a\n");
}

TEST_CASE("fsdp program: gradients that no backward sends are reduced when the step is completed",
          "[fsdp]") {
  const std::string forward = "gather_forward a\nwait a\n";
  const auto program_of = [](const dist::OrderOptions& options, int num_no_sync, bool is_last) {
    Machine m(1, 1, options);
    m.warm_up();
    m.order.accumulation.num_no_sync = num_no_sync;
    m.order.accumulation.is_last = is_last;
    m.pass();
    m.order.complete_gradients();  // the second time there is nothing to do
    return m.end_step();
  };
  const std::string kept = forward + "keep a\nrelease a\nreduce a\nfinish a\n";
  const std::string collected = forward + "release a\nreduce a\nfinish a\n";
  const std::string reduced = forward + "reduce a\nrelease a\nfinish a\n";
  CHECK(program_of({}, 0, true) == reduced);
  CHECK(program_of({}, 0, false) == reduced);
  CHECK(program_of({}, 1, true) == kept);
  CHECK(program_of({.is_alone = true}, 1, true) == reduced);
  const dist::OrderOptions whole{.keeps_whole_gradients = true};
  CHECK(program_of(whole, 0, true) == reduced);
  CHECK(program_of(whole, 0, false) == collected);
  CHECK(program_of(whole, 1, true) == collected);

  // Only a reduce of the step's last micro-batch is one.
  Machine m(1, 1, {});
  m.order.accumulation.is_last = false;
  m.pass();
  m.order.accumulation.is_last = true;
  m.pass();
  std::vector<Phase> phases;
  for (const Action& a : m.scribe.program.actions()) {
    if (a.kind == ActionKind::kReduce) phases.push_back(a.phase);
  }
  CHECK(phases == std::vector<Phase>{Phase::kNone, Phase::kLast});

  // A backward that fails takes whole gradients with it; the next step is as any other.
  Machine failed(1, 1, whole);
  failed.warm_up();
  failed.order.accumulation.is_last = false;
  failed.pass();
  failed.order.begin_call(0, Order::Mode::kTrain);
  const size_t call = failed.order.end_call(0, Order::Mode::kTrain);
  failed.order.enter_backward(failed.order.generation(), call);
  failed.order.end_backward(false);
  CHECK(failed.end_step() == forward + "release a\n" + forward + "release a\nfinish a\n");
  failed.pass();
  CHECK(failed.end_step() == reduced);
}

TEST_CASE("fsdp program: the hash tells kind, unit, bytes and order of collectives", "[fsdp]") {
  const auto hash_of = [](const std::vector<Action>& actions) {
    dist::Program program(letters(3));
    for (const Action& a : actions) program.add(a);
    return program.hash();
  };
  const Action gather{ActionKind::kGather, Phase::kForward, 0, 64};
  const Action reduce{ActionKind::kReduce, Phase::kLast, 1, 32};
  std::set<uint64_t> hashes = {hash_of({}), hash_of({gather, reduce}), hash_of({reduce, gather}),
                               hash_of({gather})};
  Action other = gather;
  other.phase = Phase::kBackward;
  hashes.insert(hash_of({other, reduce}));
  other = gather, other.unit = 2;
  hashes.insert(hash_of({other, reduce}));
  other = gather, other.nbytes = 65;
  hashes.insert(hash_of({other, reduce}));
  other = gather, other.kind = ActionKind::kReduce;
  hashes.insert(hash_of({other, reduce}));
  CHECK(hashes.size() == 8);
  // What a rank does alone does not count.
  CHECK(hash_of({gather, {ActionKind::kWait}, {ActionKind::kRelease}, reduce}) ==
        hash_of({gather, reduce}));
}

TEST_CASE("fsdp program: the first difference names number, ranks and collectives", "[fsdp]") {
  const std::string same = "gather_forward a (64 bytes)\nreduce a (32 bytes)\n";
  CHECK(dist::first_difference(std::vector<std::string>{
            same, same, "gather_forward a (64 bytes)\nreduce b (32 bytes)\n"}) ==
        "as number 2, rank 0 \"reduce a (32 bytes)\" and rank 2 \"reduce b (32 bytes)\"");
  CHECK(dist::first_difference(std::vector<std::string>{same, "gather_forward a (64 bytes)\n"}) ==
        "as number 2, rank 0 \"reduce a (32 bytes)\" and rank 1 \"nothing\"");
}

TEST_CASE("fsdp program: evaluations without end take bounded memory and keep the hash", "[fsdp]") {
  dist::Program bounded(letters(3), 4), whole(letters(3));
  size_t most = 0;
  int unit = 0;
  for (int i = 0; i < 1000; ++i) {
    for (const ActionKind kind : {ActionKind::kGather, ActionKind::kWait, ActionKind::kRelease}) {
      bounded.add({kind, Phase::kNone, unit, 64 + i}),
          whole.add({kind, Phase::kNone, unit, 64 + i});
    }
    unit = (unit + 1) % 3;
    most = std::max(most, bounded.actions().size());
    if (i == 2) CHECK(bounded.to_string() == whole.to_string());
  }
  CHECK(most == 3 * 8);  // twice 4 collectives
  CHECK(bounded.actions() ==
        std::vector<Action>(whole.actions().end() - std::ssize(bounded.actions()),
                            whole.actions().end()));
  CHECK(bounded.hash() == whole.hash());
  CHECK(bounded.num_collectives() == 1000);
  CHECK(bounded.num_forgotten() == 992);
  CHECK(whole.num_forgotten() == 0);
  CHECK(bounded.collectives() == whole.collectives(992));
  CHECK(bounded.collectives(999) == "gather a (1063 bytes)\n");

  // Ranks that have issued more and less than one that has forgotten.
  const auto difference = [](const dist::Program& a, const dist::Program& b) {
    const int64_t num_skipped = std::max(a.num_forgotten(), b.num_forgotten());
    return dist::first_difference(
        std::vector<std::string>{a.collectives(num_skipped), b.collectives(num_skipped)},
        num_skipped);
  };
  dist::Program shorter(letters(3), 4);
  for (int i = 0; i < 999; ++i) shorter.add({ActionKind::kGather, Phase::kNone, i % 3, 64 + i});
  CHECK(difference(bounded, shorter) ==
        "as number 1000, rank 0 \"gather a (1063 bytes)\" and rank 1 \"nothing\"");
  dist::Program other(letters(3), 4);
  for (int i = 0; i < 1000; ++i) {
    other.add({ActionKind::kGather, Phase::kNone, i % 3, i == 5 ? 1 : 64 + i});
  }
  CHECK(difference(bounded, other) == "before number 993, of which no rank has kept all");
  bounded.clear();
  CHECK(bounded.num_forgotten() == 0);
  CHECK(bounded.actions().empty());
  // From there on it is a new one.
  dist::Program fresh(letters(3), 4);
  for (int i = 0; i < 11; ++i) {
    for (dist::Program* program : {&bounded, &fresh}) {
      program->add({ActionKind::kGather, Phase::kNone, i % 3, 64 + i});
    }
    CHECK(bounded.actions() == fresh.actions());
    CHECK(bounded.num_forgotten() == (i < 8 ? 0 : 4));
  }
}

TEST_CASE("fsdp program: which action can follow on which state", "[fsdp]") {
  using enum ParamState;
  const std::vector<ParamState> states = {kSharded, kStale, kGathering, kGathered, kOpen};
  const auto from = [&](Residence residence, ActionKind kind) {
    std::vector<std::pair<ParamState, ParamState>> pairs;
    for (const ParamState state : states) {
      const auto next = dist::next_state(residence, state, kind);
      if (next) pairs.emplace_back(state, *next);
    }
    return pairs;
  };
  using Pairs = std::vector<std::pair<ParamState, ParamState>>;
  for (const Residence residence : {Residence::kReshard, Residence::kKeep}) {
    CHECK(from(residence, ActionKind::kGather) ==
          Pairs{{kSharded, kGathering}, {kStale, kGathering}});
    CHECK(from(residence, ActionKind::kExpire) ==
          Pairs{{kSharded, kSharded}, {kStale, kStale}, {kGathered, kStale}, {kOpen, kStale}});
  }
  for (const Residence residence : {Residence::kReshard, Residence::kKeep, Residence::kWhole}) {
    CHECK(from(residence, ActionKind::kWait) == Pairs{{kGathering, kOpen}, {kGathered, kOpen}});
    CHECK(from(residence, ActionKind::kJoin) == Pairs{{kGathering, kGathered}});
    CHECK(from(residence, ActionKind::kClose) == Pairs{{kOpen, kGathered}});
    const bool reshards = residence == Residence::kReshard;
    CHECK(from(residence, ActionKind::kRelease) ==
          (reshards ? Pairs{{kGathered, kSharded}, {kOpen, kSharded}} : Pairs{}));
  }
  CHECK(from(Residence::kWhole, ActionKind::kGather).empty());
  CHECK(from(Residence::kWhole, ActionKind::kExpire).empty());
}

TEST_CASE("fsdp program: a ledger counts slots and bytes and says what does not fit", "[fsdp]") {
  Ledger ledger({{Residence::kReshard, 0, true, false, 64, 32},
                 {Residence::kReshard, 0, true, false, 16, 32},
                 {Residence::kKeep, -1, true, false, 8, 32}},
                {1});
  const auto apply = [&ledger](ActionKind kind, int unit) {
    const char* refusal = ledger.apply({kind, Phase::kNone, unit, 0});
    return std::string(refusal == nullptr ? "" : refusal);
  };
  CHECK(apply(ActionKind::kWait, 0) == "its parameters are sharded");
  CHECK(apply(ActionKind::kGather, 0).empty());
  CHECK((ledger.num_free(0) == 0 && ledger.gathered_nbytes() == 64));
  CHECK((!ledger.can_gather(1) && ledger.can_gather(0) && ledger.can_gather(2)));
  CHECK(apply(ActionKind::kGather, 1) == "no slot of its ring is free");
  CHECK(apply(ActionKind::kGather, 0) == "its parameters are being gathered");
  CHECK(apply(ActionKind::kAddSlot, 2) == "its memory is its own");
  CHECK(apply(ActionKind::kAddSlot, 1).empty());
  CHECK(ledger.num_slots(0) == 2);
  CHECK(apply(ActionKind::kGather, 1).empty());
  CHECK(apply(ActionKind::kGather, 2).empty());
  CHECK(ledger.gathered_nbytes() == 88);
  CHECK(apply(ActionKind::kWait, 1).empty());
  CHECK(apply(ActionKind::kWait, 1) == "its parameters are open");
  CHECK(apply(ActionKind::kExpire, 1).empty());
  CHECK((ledger.num_free(0) == 0 && !ledger.is_gathered(1)));  // stale, with its slot
  CHECK(apply(ActionKind::kRelease, 1) == "its parameters are out of date");
  CHECK(apply(ActionKind::kGather, 1).empty());
  CHECK(apply(ActionKind::kJoin, 1).empty());
  CHECK(apply(ActionKind::kJoin, 1) == "its parameters are gathered");
  CHECK(apply(ActionKind::kRelease, 1).empty());
  CHECK((ledger.num_free(0) == 1 && ledger.gathered_nbytes() == 72));
  CHECK(apply(ActionKind::kRelease, 2) == "its parameters are being gathered");
}

TEST_CASE("fsdp program: turns of the first step replace registration", "[fsdp]") {
  const auto order_of = [](dist::Turns& turns) {
    std::vector<int> units;
    for (int p = 0; p < turns.size(); ++p) units.push_back(turns.unit_at(p));
    return units;
  };
  const auto call = [](int unit, bool is_skipped = false) {
    return dist::Call{unit, 0, 0, is_skipped, true};
  };
  const std::vector<dist::Call> calls = {call(2), call(2), call(0), call(1, true), call(3)};
  dist::Turns turns(5);
  CHECK((!turns.is_known() && turns.find(3, 0) == 3 && turns.find(1, 2) == 5));
  turns.learn(calls, /*all_called_the_same=*/true);
  // Units 1 and 4, which nobody called, follow on their predecessors.
  CHECK(order_of(turns) == std::vector<int>{2, 0, 1, 3, 4});
  CHECK((turns.is_known() && turns.num_calls_at(0) == 2 && turns.num_calls_at(2) == 0));
  dist::Turns issued(5);
  issued.learn(calls, /*all_called_the_same=*/false);
  CHECK(order_of(issued) == std::vector<int>{2, 0, 1, 3});
  CHECK((issued.num_calls_at(0) == 2 && issued.num_calls_at(2) == 0));
  std::vector<dist::Call> others = calls;
  others[3].is_skipped = false;
  CHECK(dist::Turns::hashes_of(calls).issued == dist::Turns::hashes_of(others).issued);
  CHECK(dist::Turns::hashes_of(calls).called != dist::Turns::hashes_of(others).called);
}

TEST_CASE("fsdp program: a gather that nobody reads is joined before its slot goes back",
          "[fsdp]") {
  Machine m(3, 2, {.prefetch_forward = 1, .prefetch_backward = 1});
  m.warm_up();
  m.pass({0, 1});
  const std::string program = m.end_step();
  CHECK(contains(program, "join c\nrelease c\n"));
  Ledger ledger({{Residence::kReshard, 0, true, false, 64, 32}}, {1});
  CHECK(ledger.apply({ActionKind::kGather, Phase::kForward, 0, 64}) == nullptr);
  CHECK(ledger.apply({ActionKind::kRelease}) == std::string("its parameters are being gathered"));
  CHECK(ledger.apply({ActionKind::kExpire}) == std::string("its parameters are being gathered"));
}

}  // namespace
}  // namespace tessera::testing
