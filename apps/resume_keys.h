#pragma once

#include <string>
#include <vector>

#include "apps/config.h"

namespace tessera::apps {

/// The keys that differ, "optim.lr 0.001 there, 0.0003 here", by what becomes of them. Refused is
/// an identity, a key of the schedule that was given for the checkpoint and is now at its default
/// (a forgotten argument), and train.steps below the checkpoint's step. A last line of `told` has
/// the learning rate of the next step with the checkpoint's settings and with these, if it differs.
struct ResumeChanges {
  std::vector<std::string> refused, told;
};
ResumeChanges compare_for_resume(const Config& there, const Config& here, int64_t step);

}  // namespace tessera::apps
