#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dist/fsdp/coded.h"
#include "dist/fsdp/exposure.h"
#include "dist/fsdp/gathered.h"
#include "dist/fsdp/gradients.h"
#include "dist/fsdp/lanes.h"
#include "dist/fsdp/reproducible.h"
#include "dist/fsdp/whole.h"

namespace tessera::dist {

/// One group's buffers on this rank. Elements as in [Note: Flat layout].
struct Group : GroupPlan {
  Tensor master;                 // f32 shard; undefined for frozen groups of a lower dtype
  Tensor shard;                  // param_dtype shard that gathers send; the master itself in f32
  std::unique_ptr<Coded> coded;  // in place of both where the group is kept as codes
  Tensor grad;                   // f32 gradient shard; undefined for frozen groups
  std::unique_ptr<HostGradient> host_grad;  // where `grad` lives if not on the device
  // Gathered parameters; the views that modules use. It has bytes only where modules can read them;
  // gathers go to where those bytes will be.
  std::shared_ptr<Storage> full;
  std::shared_ptr<Storage> memory;     // of them, where they do not take a slot
  std::shared_ptr<Storage> full_grad;  // gradients before the reduce
  Tensor part;                   // 1 / part_size of what was gathered, kept for the next gathers
  Tensor unreduced;              // f32: gradients of the whole group that `no_sync` keeps here
  std::vector<bool> is_written;  // a placement's gradient, since the slot was acquired
  LeafTree leaves;               // reproducible: this rank's part of the step's sum

  /// What the optimizer updates, or of a frozen group what is saved; undefined of codes.
  const Tensor& values() const { return master.is_defined() ? master : shard; }
  /// `shard` is rounded from a master.
  bool has_low_copy() const { return master.is_defined() && master.impl() != shard.impl(); }
  const Tensor& home_of_grad() const { return host_grad != nullptr ? host_grad->home : grad; }
};

/// A unit: the parameters that are gathered and reduced together. Its shards, and the modules' views
/// into what is gathered; `gathered`, `gradients` and `whole` are its state machines.
class Unit {
 public:
  /// `plan` and `lanes` outlive this.
  Unit(const UnitSpec& spec, const UnitPlan& plan, Lanes& lanes);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  /// Memory for shards, with what values there are, and views in place of the modules' parameters.
  /// Returns the full names of parameters that had no values.
  std::vector<std::string> shard_parameters();
  /// This rank's part of the full parameters becomes that of its shards, where a placement (in the
  /// order of groups) is written.
  void write_shards(const std::vector<bool>& is_written);
  /// Values that were written become codes where they are kept so. Collective.
  void finish_codes();
  /// Takes the unit out of the modules' parameters; they have no bytes after this.
  void detach();

  const UnitPlan& plan() const { return plan_; }
  const UnitSpec& spec() const { return spec_; }
  const std::string& name() const { return spec_.name; }
  const char* static_name() const { return static_name_; }  ///< for traces and the watchdog
  Lanes& lanes() const { return lanes_; }
  std::vector<Group>& groups() { return groups_; }
  /// The first element of a shard in its group.
  int64_t shard_begin(const Group& g) const;
  /// This rank's part of a shard whose gradient it sums and whose norm it takes.
  int64_t own_begin(const Group& g) const;
  int64_t own_numel(const Group& g) const;

 private:
  void make_memory(Group& g);
  void make_gradient_memory(Group& g);
  void take_values(Group& g, std::vector<std::string>* missing);
  void make_views();
  void make_codes(Group& g);

  const UnitSpec spec_;
  const UnitPlan& plan_;
  const char* static_name_;
  Lanes& lanes_;
  std::vector<Group> groups_;

 public:
  Exposure exposure;  ///< since the last `Fsdp::exposed_times`
  Gathered gathered;
  Gradients gradients;
  Whole whole;
};

/// A copy of `text` that lives for ever (names for traces and the watchdog).
const char* intern(const std::string& text);

}  // namespace tessera::dist
