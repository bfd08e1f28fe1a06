#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/runtime/stream.h"
#include "core/tensor.h"
#include "dist/fsdp/options.h"
#include "dist/fsdp/shard.h"
#include "dist/fsdp/waits.h"
#include "optim/shard_store.h"

// [Note: Offload]
// What a rank keeps of its shards in device memory and in host memory, bytes an element with
// AdamW; rings come on top of the device's (`FsdpOptions::offload_window`):
//
//                          device, f32          host   device, bf16            host
//   none                   4 + 4 (grad) + 8     0      2 + 4 (grad) + 4 + 8    0
//   optimizer              4 + 4 (grad)         8      2 + 4 (grad)            4 + 8
//   params_and_optimizer   0                    16     0                       2 + 4 + 4 + 8
//
// Parameters in f32 are their own master. Under `optimizer` they stay on the device, since gathers
// read them there: a second copy would cost bytes and traffic and save nothing. Under
// `params_and_optimizer` a rank copies its shard into its chunk of the gathered slot and the
// gather runs in place, so that no buffer is added; with one rank in a shard group this copy is the
// whole gather. A gradient shard is on the device while a reduce adds to it (its old values are
// brought back first), and once more when its norm is taken.
//
// The update passes windows of all that is in host memory through a ring of three: while one is
// updated on the compute stream, the next comes in on `h2d` and the previous goes out on `d2h`.
// Kernel and order of sums do not change, and so neither do the bits.

namespace tessera::dist {

/// The places where a stream waits for what moves; see `WaitPoint`.
enum class OffloadWait : unsigned char {
  kNone,
  kSlotFree,         ///< h2d: the gathered slot's last unit was computed with
  kShardsReady,      ///< h2d: the optimizer has written the shards
  kLoaded,           ///< all_gather: this rank's chunk is in the slot
  kGradientFree,     ///< h2d: the gradient shard that was in the slot is home
  kGradientHome,     ///< h2d: the gradient shard is home
  kGradientHere,     ///< the summing stream: the gradient shard is on the device
  kReplicaHere,      ///< all_reduce: the same, to complete it with the other replicas' parts
  kNormHere,         ///< compute: the same, for its norm
  kGradientWritten,  ///< d2h: the sum is complete
  kStatesReady,      ///< h2d: gradients are home, states were set
  kWindowFree,       ///< h2d: what was updated in the window is stored
  kWindowHere,       ///< compute: the window is on the device
  kWindowUpdated,    ///< d2h: the window is updated
  kStored,           ///< compute: all windows are stored
  kCount
};

/// Uninitialized host memory that kernels can address, of the current Context's host allocator.
Tensor empty_on_host(int64_t numel, DType dtype);

/// Gradient shards that are on the device at a time: one is written while the other goes home.
inline constexpr int kHostGradientSlots = 2;
/// Windows of what the optimizer updates: one comes in, one is updated, one goes out.
inline constexpr int kOffloadWindows = 3;

/// A gradient shard whose place is in host memory; its device tensor has bytes from `bring` to
/// `send_home` or `drop`.
struct HostGradient {
  Tensor home;    // f32
  Event is_home;  // `home` has the values
  Event is_here;  // the device tensor has them
  Slot* slot = nullptr;
};

/// Moves shards between host and device on the streams `h2d` and `d2h`. Nothing waits on the host.
class Offloader final : public optim::ShardStore {
 public:
  /// `with_gradients`: kParamsAndOptimizer moves gradient shards (else they stay on the device).
  Offloader(Offload offload, int64_t window_numel, bool with_gradients, bool poison);
  ~Offloader() override;

  bool has_parameters() const { return offload_ == Offload::kParamsAndOptimizer; }
  bool has_gradients() const { return has_parameters() && with_gradients_; }

  /// dst (device) = shard (host), in order after `is_free` and `is_ready`.
  Event load(void* dst, const Tensor& shard, const Event& is_free, const Event& is_ready);

  /// Makes room on the device for gradient shards of up to `numel` elements.
  void make_gradient_ring(int64_t numel);
  /// Gives `grad` bytes, from `is_here` on; the values too if `with_values`.
  void bring(HostGradient& host, const Tensor& grad, bool with_values);
  /// Writes the values home after `is_written` and takes the bytes.
  void send_home(HostGradient& host, const Tensor& grad, const Event& is_written);
  /// Takes the bytes of unchanged values once the current stream is done with them.
  void drop(HostGradient& host, const Tensor& grad);

  Tensor make_state(int64_t numel, DType dtype) override;
  void for_each_window(std::span<const optim::ShardParts> parts, const Update& update) override;

  const Stream& h2d() const { return h2d_; }
  const Stream& d2h() const { return d2h_; }
  Waits<OffloadWait> wait;

  void drain() const noexcept;

 private:
  struct Part;
  std::vector<Part> parts_on_host(const optim::ShardParts& shard) const;
  static int64_t part_numel(const Part& part, int64_t count);
  static Tensor part_values(const Part& part, int64_t first, int64_t count);
  static std::vector<Tensor> values_of(const optim::ShardParts& shard);
  void reserve_windows(int64_t nbytes);

  const Offload offload_;
  const int64_t window_numel_;
  const bool with_gradients_, poison_;
  Stream h2d_;  // brings shards while other units or windows compute
  Stream d2h_;  // takes back what the compute or a reduce stream has finished
  std::unique_ptr<SlotPool> windows_, gradients_;
};

}  // namespace tessera::dist
