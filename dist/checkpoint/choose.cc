#include "dist/checkpoint/choose.h"

#include <sstream>

#include "core/check.h"
#include "core/log.h"
#include "core/text.h"

namespace tessera::dist {
namespace {

/// The checkpoint of somebody else: neither damaged nor in the way.
class OtherRunError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

std::unique_ptr<CheckpointReader> open_and_check(World& world, const std::string& dir,
                                                 const std::string& run) {
  auto reader = std::make_unique<CheckpointReader>(dir);
  if (!run.empty() && reader->manifest().run != run) {
    throw OtherRunError(fmt::format("{}/{}: manifest of run {}, expected run {}", dir,
                                    kManifestName, reader->manifest().run, run));
  }
  reader->check_sizes();
  reader->check_files(world.rank(), world.world_size());
  return reader;
}

/// What a rank finds out about a candidate; over all ranks the last of these counts.
enum class Finding : int64_t { kWhole, kOtherRun, kDamaged, kUnreadable };

}  // namespace

ChosenCheckpoint choose_checkpoint(World& world, const std::string& dir, const std::string& run,
                                   bool skips_unreadable) {
  Control& control = world.control();
  std::string names;  // what rank 0 sees, in its order
  if (world.rank() == 0) {
    for (const CheckpointPlace& place : list_checkpoints(dir)) names += place.dir + '\0';
  }
  std::istringstream lines(control.broadcast(names, 0));
  ChosenCheckpoint chosen;
  std::string last_error;
  int num_refused = 0;
  for (std::string candidate; std::getline(lines, candidate, '\0');) {
    std::string error;
    Finding finding = Finding::kWhole;
    try {
      chosen.reader = open_and_check(world, candidate, run);
    } catch (const OtherRunError& e) {
      error = e.what();
      finding = Finding::kOtherRun;
    } catch (const UnreadableCheckpointError& e) {
      error = e.what();
      finding = Finding::kUnreadable;
    } catch (const CheckpointError& e) {
      error = e.what();
      finding = Finding::kDamaged;
    } catch (const std::exception&
                 e) {  // such as no memory: nothing that the checkpoint is to blame for
      error = e.what();
      finding = Finding::kUnreadable;
    }
    const auto worst = static_cast<Finding>(control.max(static_cast<int64_t>(finding)));
    if (worst == Finding::kWhole) return chosen;
    error = finding == worst ? shorten(error, Control::kMaxVerdictNbytes) : "";
    for (const std::string& text : control.all_gather(error)) {
      if (!text.empty()) last_error = text;
    }
    chosen.reader.reset();
    ++num_refused;
    if (worst == Finding::kUnreadable && !skips_unreadable) {
      const UnreadableCheckpointError stop(fmt::format(
          "{}; it may be whole, so nothing older is used and it stays as it is: mend what keeps it "
          "from being read, or go on from the one before it with --resume.skip_unreadable",
          last_error));
      control.verdict(&stop);
    }
    if (worst == Finding::kDamaged) chosen.damaged.push_back(candidate);
    if (worst == Finding::kUnreadable) chosen.unreadable.push_back(candidate);
    if (world.rank() == 0) log_warning("{}; it is passed over", last_error);
  }
  if (num_refused > 0) {
    const CheckpointError error(
        fmt::format("{}: none of {} checkpoints can be used, expected a whole one; the oldest: {}",
                    dir, num_refused, last_error));
    control.verdict(&error);
  }
  return chosen;
}

std::unique_ptr<CheckpointReader> open_checkpoint(World& world, const std::string& dir) {
  std::unique_ptr<CheckpointReader> reader;
  world.control().verdict([&] { reader = open_and_check(world, dir, ""); });
  return reader;
}

}  // namespace tessera::dist
