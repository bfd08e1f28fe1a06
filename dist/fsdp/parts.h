#pragma once

#include <memory>
#include <vector>

#include "dist/fsdp/exchange.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/grad_norm.h"
#include "dist/fsdp/hooks.h"
#include "dist/fsdp/life.h"
#include "dist/fsdp/order.h"
#include "dist/fsdp/plan.h"
#include "dist/fsdp/runtime.h"
#include "dist/fsdp/scalars.h"
#include "dist/fsdp/unit.h"
#include "dist/fsdp/values.h"

namespace tessera::dist {

/// What an Fsdp is made of, for dist/fsdp alone and its tests. Members are made in this order, and
/// whatever is collective in making them is issued in it. Each knows only those above it:
///
///   policy    what the options mean for this rank
///   lanes     streams, communicators, scratch
///   plan      sizes of units, slots and scratch
///   pools     the slots
///   units     shards, and two state machines each: gathered parameters, gradients
///   runtime   executes actions on the units
///   order     makes actions of calls
///   values    of the model as a whole
///   hooks     make calls of what the model does
struct FsdpParts {
  FsdpParts(nn::Module& root, World& world, const FsdpOptions& options);
  ~FsdpParts();
  FsdpParts(const FsdpParts&) = delete;
  FsdpParts& operator=(const FsdpParts&) = delete;

  /// The shards were written from outside: what is gathered is out of date.
  void shards_changed();

  nn::Module& root;
  World& world;
  const std::shared_ptr<Life> life;
  const Policy policy;
  Scalars scalars;
  Lanes lanes;
  int64_t num_ignored = 0;  // trainable elements that no norm and no optimizer sees
  const std::vector<nn::NamedParameter> ignored;  // in the order of `FsdpOptions::ignored`
  const ParameterTable table;
  const std::vector<UnitSpec> specs;
  const Plan plan;
  std::vector<std::unique_ptr<SlotPool>> pools;
  std::vector<std::unique_ptr<Unit>> units;
  std::vector<optim::FlatShard> shards;
  Runtime runtime;
  Order order;
  std::unique_ptr<Values> values;
  std::unique_ptr<GradNorm> grad_norm;
  std::unique_ptr<Hooks> hooks;

 private:
  void make_units();
  void make_slots();
  void make_shards();
  void make_buffers();
};

FsdpParts& parts_of(Fsdp& fsdp);
const FsdpParts& parts_of(const Fsdp& fsdp);

/// What it keeps in device memory on this rank.
MemoryPlan memory_plan(const FsdpParts& parts);
/// Which settings would cost less, for the end of an out-of-memory error. Only of what does not
/// change after set-up: the thread that ran out may be any.
std::string memory_advice(const FsdpParts& parts, const OutOfMemory& oom);

}  // namespace tessera::dist
