#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dist/comm/world.h"
#include "dist/fsdp/order.h"
#include "dist/fsdp/program.h"
#include "dist/fsdp/unit.h"

namespace tessera::dist {

/// Executes a program, action by action, on the units of a rank, and compares it with those of the
/// other ranks: in step 0 each collective is announced before it is issued, so that a rank that
/// would issue another one is named before anybody hangs; afterwards a hash of all of them once a
/// step.
class Runtime final : public Issuer {
 public:
  /// What is given outlives this.
  Runtime(World& world, const std::vector<std::unique_ptr<Unit>>& units,
          std::vector<std::string> unit_names);

  void act(const Action& action) override;
  bool agree(const Turns::Hashes& mine) override;

  /// What was written to shards so far is what the next gathers send.
  void shards_changed() { shards_ready_ = {}; }
  /// Ends the step, and the program with it. CommError (status 6) on all ranks if they have issued
  /// different collectives.
  void end_step();

  int64_t step() const { return step_; }
  const Program& program() const { return program_; }

  /// For tests: what to do instead of an action.
  std::function<std::vector<Action>(const Action&)> edit;

 private:
  void perform(const Action& action);
  void gather(Unit& unit, const char* phase);
  void announce() const;
  [[noreturn]] void throw_disagreement() const;

  World& world_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  Program program_;
  Event shards_ready_;  // what gathers wait for; none until the first since the last change
  int64_t step_ = 0;
};

}  // namespace tessera::dist
