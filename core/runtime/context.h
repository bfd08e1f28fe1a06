#pragma once

#include <memory>
#include <string>

#include "core/runtime/allocator.h"
#include "core/runtime/backends.h"
#include "core/runtime/stream.h"

namespace tessera {

class HostStaging;
class OrderCheck;

/// What a Context is made of.
struct ContextOptions {
  Device device = {};
  int num_threads = 0;       ///< CPU threads of the compute stream; 0 = all allowed processors
  int64_t memory_limit = 0;  ///< bytes of the device allocator; 0 = no limit
  /// `Allocator::Options::split_nbytes` of the device allocator.
  int64_t memory_split = int64_t{1} << 20;
  bool poison = false;       ///< fill freed memory with NaN in stream order
  bool order_check = false;  ///< run the happens-before checker (core/runtime/order_check.h)
  Backends backends = {};    ///< on CUDA; those of operations submitted under this Context
};

/// What one rank owns on its device: the compute stream, the allocators and the checker. Each
/// thread has a current Context: the one of its innermost Scope, else one for the whole process
/// with default options (replaced by `set_process_context`). Thread ranks open a Scope each.
class Context {
 public:
  explicit Context(const ContextOptions& options);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  static const std::shared_ptr<Context>& current();
  /// The Context of threads outside any Scope, from now on.
  static void set_process_context(std::shared_ptr<Context> context);

  /// Makes a Context that of this thread for a scope.
  class Scope {
   public:
    explicit Scope(std::shared_ptr<Context> context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::shared_ptr<Context> context_;
    const std::shared_ptr<Context>* previous_;
  };

  Device device() const { return options_.device; }
  const ContextOptions& options() const { return options_; }
  /// For operations that the calling thread submits under this Context from now on; one thread at
  /// a time, as for all that a rank owns.
  void set_backends(const Backends& backends) { options_.backends = backends; }
  const Stream& compute() const { return compute_; }
  const std::shared_ptr<Allocator>& allocator() const { return allocator_; }
  /// Host memory for copies to and from the device: pinned beside CUDA, a second pool on `cpu`.
  const std::shared_ptr<Allocator>& host_allocator() const { return host_allocator_; }
  /// Buffers through which values pass between the host and the device.
  const std::shared_ptr<HostStaging>& staging() const { return staging_; }
  /// Null unless `order_check` is on.
  OrderCheck* order_check() const { return order_check_.get(); }
  /// A stream on this device that the checker sees.
  Stream make_stream(std::string name, StreamOptions options = {}) const;

 private:
  ContextOptions options_;
  std::shared_ptr<OrderCheck> order_check_;  // streams of live memory may outlive the Context
  Stream compute_;
  std::shared_ptr<Allocator> allocator_, host_allocator_;
  std::shared_ptr<HostStaging> staging_;
};

}  // namespace tessera
