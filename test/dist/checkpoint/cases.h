#pragma once

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "dist/checkpoint/writer.h"
#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/harness.h"
#include "test/temp_dir.h"
#include "test/testing.h"

// Trainings that are saved and go on elsewhere.

namespace tessera::testing {

/// Samples a step that 1, 2, 3, 4 and 8 ranks can share.
inline constexpr int kSharedSamples = 24;

/// The bytes of all tensors of a state, whole, put together from what ranks hold.
class WholeState {
 public:
  /// The part of one rank; any thread.
  void add(const dist::TrainingState& state) {
    for (const dist::Slice& s : dist::held_slices(state)) {
      const Tensor values = s.values.clone();
      current_stream().synchronize();
      const std::lock_guard lock(mutex_);
      std::string& bytes = tensors_[s.tensor];
      const size_t width = size_of(s.values.dtype());
      bytes.resize(static_cast<size_t>(s.shape.numel()) * width, '\0');
      std::memcpy(bytes.data() + static_cast<size_t>(s.begin) * width, values.raw_data(),
                  static_cast<size_t>(values.nbytes()));
    }
  }
  const std::map<std::string, std::string>& tensors() const { return tensors_; }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> tensors_;
};

inline dist::Progress progress_of(int64_t step) {
  dist::Progress progress;
  progress.step = step;
  progress.next_sample = step * kSharedSamples;
  progress.samples_per_step = kSharedSamples;
  return progress;
}

/// Saves after `step` (counted from 1) while training goes on, and ends the save at the last step.
inline void save_at(FsdpRun& run, int step, const dist::CheckpointOptions& options,
                    WholeState* state_then = nullptr) {
  auto writers = std::make_shared<std::map<int, std::unique_ptr<dist::CheckpointWriter>>>();
  auto mutex = std::make_shared<std::mutex>();
  const int num_steps = run.num_steps;
  run.after_step = [=](int done, const dist::TrainingState& state, dist::World& world) {
    dist::CheckpointWriter* writer = nullptr;
    {
      const std::lock_guard lock(*mutex);
      auto& mine = (*writers)[world.rank()];
      if (mine == nullptr) {
        mine = std::make_unique<dist::CheckpointWriter>(world, state, options);
      }
      writer = mine.get();
    }
    std::optional<dist::SaveResult> result = writer->poll();
    if (done + 1 == step) {
      if (state_then != nullptr) state_then->add(state);
      writer->begin(progress_of(step));
    }
    if (done + 1 == num_steps) {
      if (const auto last = writer->finish()) result = last;
      if (writer->is_saving()) throw InternalError("a save after finish");
      const std::lock_guard lock(*mutex);
      writers->erase(world.rank());
    }
    if (result && !result->error.empty()) throw IoError(result->error);
  };
}

/// Loads a checkpoint before the first step, which is the one after it.
inline void resume_from(FsdpRun& run, const std::string& dir, WholeState* state_then = nullptr) {
  run.first_step = static_cast<int>(dist::CheckpointReader(dir).manifest().progress.step);
  run.on_state = [=](const dist::TrainingState& state, dist::World& world) {
    const dist::CheckpointReader reader(dir);
    world.control().verdict([&] {
      reader.check_sizes();
      reader.check_files(world.rank(), world.world_size());
      dist::check_tensors(reader, state);
      dist::load_state(reader, state);
    });
    if (state_then != nullptr) state_then->add(state);
  };
}

}  // namespace tessera::testing
