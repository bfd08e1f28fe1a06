#include "dist/checkpoint/choose.h"

#include <sstream>

#include "core/check.h"
#include "core/log.h"

namespace tessera::dist {
namespace {

std::unique_ptr<CheckpointReader> open_and_check(World& world, const std::string& dir,
                                                 const std::string& run) {
  auto reader = std::make_unique<CheckpointReader>(dir);
  if (!run.empty() && reader->manifest().run != run) {
    throw CheckpointError(fmt::format("{}/{}: manifest of run {}, expected run {}", dir,
                                      kManifestName, reader->manifest().run, run));
  }
  reader->check_sizes();
  reader->check_files(world.rank(), world.world_size());
  return reader;
}

}  // namespace

ChosenCheckpoint choose_checkpoint(World& world, const std::string& dir, const std::string& run) {
  Control& control = world.control();
  std::string names;  // what rank 0 sees, in its order
  if (world.rank() == 0) {
    for (const CheckpointPlace& place : list_checkpoints(dir)) names += place.dir + "\n";
  }
  std::istringstream lines(control.broadcast(names, 0));
  ChosenCheckpoint chosen;
  std::string last_error;
  for (std::string candidate; std::getline(lines, candidate);) {
    std::string error;
    try {
      chosen.reader = open_and_check(world, candidate, run);
    } catch (const Error& e) {
      error = e.what();
    }
    for (const std::string& text : control.all_gather(error)) {
      if (!text.empty()) last_error = text;
    }
    if (control.all_agree(error.empty())) return chosen;
    chosen.reader.reset();
    chosen.damaged.push_back(candidate);
    if (world.rank() == 0) log_warning("{}; it is passed over", last_error);
  }
  if (!chosen.damaged.empty()) {
    const CheckpointError error(
        fmt::format("{}: none of {} checkpoints can be used, expected a whole one; the oldest: {}",
                    dir, chosen.damaged.size(), last_error));
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
