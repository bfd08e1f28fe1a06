#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/runtime/staging.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"

namespace tessera::dist {

/// Watches the first steps of a training for parameters that do not train: a module that nothing
/// calls, a `detach` too many, a learning rate of zero, updates that rounding swallows. All ranks
/// make the same calls. One step:
///
///   clip_grad_norm(); watch.before_update(); optimizer.step(); watch.after_update(); end_step();
///
/// Cost     two checksums of the masters in all; a pass over the gradients in a few of the steps
/// Memory   16 bytes a tensor, and 8 a tensor and step that is looked at
class FirstSteps {
 public:
  /// `fsdp` outlives this. Looks at `num_steps` steps.
  FirstSteps(Fsdp& fsdp, World& world, int64_t num_steps);

  /// After the gradients are complete, before the optimizer. Enqueues.
  void before_update();
  /// After the optimizer. Enqueues.
  void after_update();
  /// All that it looks at is submitted: `find` says what there was.
  bool is_over() const { return step_ == num_steps_; }

  struct Found {
    std::vector<std::string> without_gradient = {};  ///< zero in all steps that were looked at
    std::vector<std::string> unchanged =
        {};  ///< others, whose bits the steps have left as they were
  };
  /// Parameters by full name, in the order of the model. Waits for the device. Collective.
  Found find() const;

 private:
  struct Part {  // of a shard, as its segments have them
    Tensor master, grad;
    Tensor checked;                // for checksums: begin, end, offset
    std::vector<Tensor> segments;  // for norms, one each
    int64_t first = 0;             // of names_
  };
  bool is_looked_at() const;
  void add_checksums_to(const Tensor& sums) const;

  World& world_;
  const int64_t num_steps_;
  std::vector<Part> parts_;
  std::vector<std::string> names_;  // a segment of this rank each
  std::vector<std::string> order_;  // names of all parameters that are trained, whosever
  Tensor before_, after_;           // checksums
  HostCopy before_copy_, after_copy_;
  std::vector<HostCopy> largest_;  // magnitudes of gradients
  int64_t step_ = 0;
};

}  // namespace tessera::dist
