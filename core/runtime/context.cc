#include "core/runtime/context.h"

#include <atomic>
#include <mutex>

#include "core/log.h"
#include "core/runtime/cpu/affinity.h"
#include "core/runtime/cpu/check.h"
#include "core/runtime/cuda/cuda.h"
#include "core/runtime/order_check.h"
#include "core/runtime/staging.h"

namespace tessera {
namespace {

std::mutex process_context_mutex;
// Leaked on purpose: streams and storages of static objects may outlive any destruction order.
std::shared_ptr<Context>& process_context() {
  static auto* context = new std::shared_ptr<Context>;
  return *context;
}
std::atomic<uint64_t> process_context_version{1};

thread_local const std::shared_ptr<Context>* scoped_context = nullptr;
// A copy a thread, so that `current` takes no lock; renewed when the version has moved on.
thread_local std::shared_ptr<Context> cached_process_context;
thread_local uint64_t cached_version = 0;

}  // namespace

Context::Context(const ContextOptions& options) : options_(options) {
  check_processor();
  if (options_.num_threads <= 0) options_.num_threads = num_usable_processors();
  if (options_.order_check) order_check_ = std::make_shared<OrderCheck>();
  // Spinning bridges the gap between two small ops; with one thread a rank others need the core.
  compute_ = make_stream("compute", {.num_threads = options_.num_threads,
                                     .spin_us = options_.num_threads > 1 ? 20 : 0});
  const bool is_cuda = options_.device.type == DeviceType::kCuda;
  allocator_ =
      std::make_shared<Allocator>(is_cuda ? make_cuda_backend(options_.device) : make_cpu_backend(),
                                  Allocator::Options{.limit = options_.memory_limit,
                                                     .poison = options_.poison,
                                                     .split_nbytes = options_.memory_split,
                                                     .name = tessera::name_of(options_.device),
                                                     .is_traced = true});
  host_allocator_ = std::make_shared<Allocator>(
      is_cuda ? make_pinned_backend(options_.device) : make_cpu_backend(),
      Allocator::Options{.limit = 0, .poison = options_.poison, .name = "host"});
  staging_ = std::make_shared<HostStaging>(is_cuda ? make_pinned_backend(options_.device)
                                                   : make_cpu_backend());
}

Context::~Context() {
  compute_.drain();
}

Stream Context::make_stream(std::string name, StreamOptions options) const {
  options.observer = order_check_;
  return tessera::make_stream(options_.device, std::move(name), options);
}

const std::shared_ptr<Context>& Context::current() {
  if (scoped_context != nullptr) return *scoped_context;
  if (cached_version != process_context_version.load(std::memory_order_acquire)) {
    std::lock_guard lock(process_context_mutex);
    auto& context = process_context();
    if (context == nullptr) context = std::make_shared<Context>(ContextOptions{});
    cached_process_context = context;
    cached_version = process_context_version.load(std::memory_order_relaxed);
  }
  return cached_process_context;
}

void Context::set_process_context(std::shared_ptr<Context> context) {
  // Swapped, so that the old one ends outside of the lock.
  std::lock_guard lock(process_context_mutex);
  process_context().swap(context);
  process_context_version.fetch_add(1, std::memory_order_release);
}

Context::Scope::Scope(std::shared_ptr<Context> context)
    : context_(std::move(context)), previous_(scoped_context) {
  scoped_context = &context_;
  if (context_->device().type == DeviceType::kCuda) use_cuda_device(context_->device());
}

Context::Scope::~Scope() {
  scoped_context = previous_;
  if (previous_ == nullptr || (*previous_)->device().type != DeviceType::kCuda) return;
  try {
    use_cuda_device((*previous_)->device());
  } catch (const Error& error) {
    log_error("{}", error.what());
  }
}

}  // namespace tessera
