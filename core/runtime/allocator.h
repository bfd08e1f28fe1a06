#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "core/runtime/stream.h"

namespace tessera {

/// What bytes are for; the table of an out-of-memory error and the metrics count by it.
enum class MemoryClass : unsigned char {
  kParameters,
  kGradients,
  kOptimizer,
  kGathered,
  kActivations,
  kOther
};
/// How many MemoryClass has.
inline constexpr int kNumMemoryClasses = 6;
/// As tables and metrics print it.
const char* name_of(MemoryClass memory_class);

/// Allocations of this thread count as `memory_class` for a scope (kActivations outside of any).
class MemoryScope {
 public:
  explicit MemoryScope(MemoryClass memory_class);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;
  static MemoryClass current();

 private:
  MemoryClass previous_;
};

/// "2GiB", "512MiB", "1.5GiB", "64KiB", "1000" as bytes; 0 for "" and "none". ConfigError else.
int64_t parse_nbytes(std::string_view text);
/// 1536 -> "1.5 KiB".
std::string format_nbytes(int64_t nbytes);

/// Where an Allocator gets its segments: the heap, cudaMalloc, pinned host memory.
class MemoryBackend {
 public:
  virtual ~MemoryBackend() = default;
  /// Null when there is none; aligned to 512 bytes.
  virtual void* allocate(size_t nbytes) = 0;
  /// What `allocate` gave.
  virtual void free(void* data, size_t nbytes) noexcept = 0;
};
/// Memory of the host.
std::unique_ptr<MemoryBackend> make_cpu_backend();

/// What an allocator holds, in bytes.
struct AllocatorStats {
  std::array<int64_t, kNumMemoryClasses> allocated_by_class{};  ///< live now, bytes
  std::array<int64_t, kNumMemoryClasses> peak_by_class{};  ///< at the moment of `peak_allocated`
  int64_t allocated = 0;       ///< bytes handed out (rounded to the 512-byte granule)
  int64_t peak_allocated = 0;  ///< its maximum since `reset_peak`
  int64_t reserved = 0;        ///< bytes taken from the backend
  int64_t peak_reserved = 0;
  int64_t largest_free = 0;             ///< the largest block of the cache, `reserved - allocated`
  int64_t num_allocations = 0;          ///< calls of `allocate` since the start
  int64_t num_backend_allocations = 0;  ///< calls of the backend since the start
};

/// What an allocator could not give, for who advises on it.
struct OutOfMemory {
  int64_t nbytes;  ///< asked for
  MemoryClass memory_class;
  AllocatorStats stats;
};

/// Caching allocator of one rank on one device: blocks of 512-byte granules cut from segments and
/// merged again on free; a pool a stream, so that memory freed while its stream still uses it is
/// reused in stream order without waiting. Thread-safe. The code is the same on all devices.
/// With `poison`, new segments and freed bytes are filled with NaN (0xff) in stream order.
class Allocator {
 public:
  /// Options of an Allocator.
  struct Options {
    int64_t limit = 0;    ///< bytes the backend may be asked for in total; 0 = no limit
    bool poison = false;  ///< fill new and freed memory with 0xff in stream order
    /// A cached block is cut if that leaves as many bytes, else handed out whole: more of it is
    /// wasted inside blocks, less in fragments. Blocks of up to 1 MiB are always cut.
    int64_t split_nbytes = int64_t{1} << 20;
    std::string name = "device";
    bool is_traced = false;  ///< its bytes by class are the counters of the thread's timeline
  };
  struct Block;

  Allocator(std::unique_ptr<MemoryBackend> backend, const Options& options);
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  /// `nbytes` > 0 that belong to `stream`, aligned to 512. OutOfMemoryError with requested, free,
  /// the limit, the bytes by class, and advice.
  Block* allocate(size_t nbytes, const Stream& stream, MemoryClass memory_class);
  /// The same from another backend, which gets the bytes back when the block is freed, once the
  /// stream is through: long-lived memory of a special kind. Counted like all other.
  Block* allocate_segment(std::shared_ptr<MemoryBackend> backend, size_t nbytes,
                          const Stream& stream, MemoryClass memory_class);
  /// Hands the block back to its stream's pool at once; the caller has ordered other streams' uses
  /// before the owner's next task.
  void free(Block* block) noexcept;
  /// Where its bytes begin.
  static void* data(const Block* block);
  /// The stream whose tasks may use it.
  static const Stream& stream(const Block* block);

  /// Gives segments without live blocks back to the backend; waits for their streams first.
  void empty_cache();
  AllocatorStats stats() const;
  void reset_peak();
  /// The table by class, with what is cached and its largest block, that is also in an
  /// out-of-memory error.
  std::string report() const;

  /// What follows the table of an out-of-memory error: lines that say which settings would help.
  /// Called on the thread that ran out, which may be any. Null: only which class is the largest.
  /// FSDP sets it. Returns the one before.
  using Advice = std::function<std::string(const OutOfMemory&)>;
  /// What an out-of-memory error says besides; returns the one before.
  Advice set_advice(Advice advice);
  int64_t limit() const { return options_.limit; }

 private:
  struct State;
  [[noreturn]] void throw_out_of_memory(size_t nbytes, MemoryClass memory_class) const;

  Options options_;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
