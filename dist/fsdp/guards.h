#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "dist/fsdp/fully_shard.h"

namespace tessera::dist {

class Life;

/// While alive, the parameters of units have all their elements (in param_dtype): what
/// `Parameter::tensor` of a module shows can be read, and with kWrite be changed in place, by tasks
/// of the compute stream. All ranks make the same guards at the same place of the program and with
/// kWrite write the same values: on destruction each rank takes its part of every parameter that
/// was written into its shards (masters of parameters nobody wrote keep their bits). Guards may
/// enclose forwards and backwards and each other; a guard that writes encloses none.
///
///   UnshardGuard unshard(*fsdp, "blocks.3");
///   std::vector<double> w = model.parameter("blocks.3.mlp.up.weight").tensor.to_vector();
///
/// Not between the optimizer's step and `end_step`, which makes what is gathered out of date.
class UnshardGuard {
 public:
  enum class Access : unsigned char { kRead, kWrite };

  /// Error if no unit has this name.
  UnshardGuard(Fsdp& fsdp, std::string_view unit, Access access = Access::kRead);
  /// The units of all parameters of `module` and the modules below it.
  UnshardGuard(Fsdp& fsdp, nn::Module& module, Access access = Access::kRead);
  ~UnshardGuard();
  UnshardGuard(const UnshardGuard&) = delete;
  UnshardGuard& operator=(const UnshardGuard&) = delete;

 private:
  struct Held {
    size_t unit;
    bool was_gathered, was_open;
    std::vector<uint32_t> versions;  // of the parameters' tensors when the guard was made
  };
  void hold(size_t unit);
  void end_hold(const Held& held);

  FsdpParts& parts_;
  const std::shared_ptr<Life> life_;
  const Access access_;
  std::vector<Held> held_;
};

/// While alive, backwards keep their gradients on this rank, unreduced, in f32: 4 bytes x
/// parameters, from the first use on. The next backward outside, or else `clip_grad_norm`, reduces
/// them with its own. Exact wherever it begins and ends; with `sync_every_micro_batch = false`
/// nothing changes but that the last micro-batch does not reduce. All ranks make the same guards.
/// Errors   ConfigError in reproducible mode, whose sums have one shape
class NoSync {
 public:
  explicit NoSync(Fsdp& fsdp);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  FsdpParts& parts_;
  const std::shared_ptr<Life> life_;
};

}  // namespace tessera::dist
