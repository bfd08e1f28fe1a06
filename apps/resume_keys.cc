#include "apps/resume_keys.h"

#include <algorithm>

#include "apps/config_table.h"
#include "apps/options.h"

namespace tessera::apps {

ResumeChanges compare_for_resume(const Config& there, const Config& here, int64_t step) {
  Config a = there, b = here;
  const auto old_fields = config_fields(a), fields = config_fields(b);
  ResumeChanges changes;
  for (size_t i = 0; i < fields.size(); ++i) {
    const std::string_view key = fields[i].key;
    const ResumeKind kind = *fields[i].resume;
    const std::string before = old_fields[i].value_text(), now = fields[i].value_text();
    if (kind == ResumeKind::kFree || before == now) continue;
    // 0 and what it stands for are the same model.
    if (key == "model.kv_heads") {
      const auto heads = std::find_if(fields.begin(), fields.end(), [](const Field& field) {
        return field.key == "model.heads";
      });
      const auto x = std::get<int64_t>(old_fields[i].get()), y = std::get<int64_t>(fields[i].get());
      if (std::min(x, y) == 0 && std::max(x, y) == std::get<int64_t>(heads->get())) continue;
    }
    std::string text = fmt::format("{} {} there, {} here", key, before, now);
    // What follows from other keys is as they are.
    const bool is_forgotten = !here.is_given(key) && key != "optim.final_lr";
    const bool is_derived_lr = key == "optim.lr" && !here.model.from.empty();
    if (kind == ResumeKind::kIdentity) {
      changes.refused.push_back(std::move(text));
    } else if (is_forgotten && !is_derived_lr) {
      changes.refused.push_back(text + " (the default, since it is not given)");
    } else {
      changes.told.push_back(std::move(text));
    }
  }
  if (here.train.steps < step) {
    changes.refused.push_back(fmt::format("train.steps {} here, the checkpoint is that of step {}",
                                          here.train.steps, step));
  }
  const float before = make_schedule(there).lr(step), now = make_schedule(here).lr(step);
  if (before != now && step < here.train.steps) {
    changes.told.push_back(fmt::format(
        "learning rate of step {}: {:g} with the checkpoint's settings, {:g} with these", step + 1,
        before, now));
  }
  return changes;
}

}  // namespace tessera::apps
