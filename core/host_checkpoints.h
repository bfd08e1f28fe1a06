#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/runtime/stream.h"
#include "core/tensor.h"

// [Note: Checkpoints in host memory]
// What recomputed blocks keep for backward are their inputs, the residual stream: layers * T * C
// elements, which of a long context is most of what is left. Each is read once, in the opposite
// order, so it can be elsewhere meanwhile:
//   forward of block i   `d2h` copies its input while the block computes; when block i + 1 begins,
//                        compute waits for the copy and the bytes are free
//   backward of block i  `h2d` brings the input of block i - 1 while block i runs again
// So no more than two are on the device, whatever the depth. That of the last block still is when its
// backward begins: it is not brought back. Nothing waits on the host, and no bit changes.
// Beside the CPU "host" is a second pool of the same memory: the same program, which saves nothing.

namespace tessera {

class HostCheckpoint;

/// Keeps inputs of `recompute` in host memory (`Context::host_allocator`) between a forward and its
/// backward; see [Note: Checkpoints in host memory]. Of one rank and host thread, which may keep
/// several forwards at a time. The streams are made for the Context of the first checkpoint.
class HostCheckpoints : public std::enable_shared_from_this<HostCheckpoints> {
 public:
  /// Bytes copied so far.
  struct Traffic {
    int64_t d2h_nbytes = 0, h2d_nbytes = 0;
  };

  /// Held by a shared_ptr, which its checkpoints share.
  static std::shared_ptr<HostCheckpoints> make();

  /// Begins to copy x, whose bytes the next checkpoint lets go, unless somebody else holds them.
  std::shared_ptr<HostCheckpoint> keep(const Tensor& x);

  const Traffic& traffic() const { return traffic_; }
  int num_live() const { return static_cast<int>(live_.size()); }

 private:
  friend class HostCheckpoint;
  HostCheckpoints() = default;

  Stream d2h_;                         // takes inputs away while their blocks compute
  Stream h2d_;                         // brings them back while later blocks run again
  std::vector<HostCheckpoint*> live_;  // as they were kept
  HostCheckpoint* leaving_ = nullptr;  // its copy may not be over yet
  Traffic traffic_;
};

/// One of them.
class HostCheckpoint {
 public:
  HostCheckpoint(std::shared_ptr<HostCheckpoints> owner, const Tensor& x);
  ~HostCheckpoint();
  HostCheckpoint(const HostCheckpoint&) = delete;
  HostCheckpoint& operator=(const HostCheckpoint&) = delete;

  /// Its values, for tasks of the stream that kept them from now on; begins to bring back the one
  /// that was kept before it. Error if x was changed in place while it was copied.
  const Tensor& bring();

 private:
  friend class HostCheckpoints;
  void let_go();
  void fetch();

  const std::shared_ptr<HostCheckpoints> owner_;
  const Stream stream_;  // which has the memory on the device, and computes with it
  const Shape shape_;
  const DType dtype_;
  Tensor on_device_;
  std::shared_ptr<uint32_t> version_;
  const uint32_t kept_version_;
  bool is_changed_ = false;
  Storage home_;
  Event is_home_;  // the host has the values
  Event is_here_;  // the device has them again
};

}  // namespace tessera
