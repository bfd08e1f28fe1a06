#pragma once

#include <functional>
#include <string>

#include "dist/fsdp/fully_shard.h"

namespace tessera::dist {

/// What rank 0 does with a model that streams by: on a thread of its own, one after the other. Each
/// may throw IoError.
struct FullSink {
  std::function<void()> begin;
  /// f32 values of one parameter, by its full name; they live for the call.
  std::function<void(const std::string& name, const float* values, int64_t numel)> write;
  std::function<void()> finish;
  /// Every rank, in each turn of waiting for rank 0's disk; null: nothing.
  std::function<void()> waiting = nullptr;
};

/// Gathers the f32 parameters unit by unit and hands them to `sink` on rank 0, one at a time.
/// Collective. No gather waits for the disk, however slow it is: while rank 0 writes, all ranks
/// meet in short exchanges. After an IoError the gathers go on, so that no rank waits; then every
/// rank throws it.
void stream_full(Fsdp& fsdp, World& world, const FullSink& sink);

}  // namespace tessera::dist
