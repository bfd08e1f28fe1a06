#include "dist/comm/nccl_state.h"

#if TESSERA_HAS_NCCL

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/log.h"
#include "core/runtime/cuda/cuda.h"

namespace tessera::dist {

void NcclState::run(const Stream& stream, const char* op, int64_t nbytes,
                    const CollectiveInfo& info, const std::function<void()>& call) {
  {
    const HostCallScope scope(*log, op, info, nbytes);
    const std::lock_guard host_lock(call_mutex_);
    remember(stream);
    if (poison_if_over(stream)) return;
    InFlight item{op, info.phase, info.unit, info.step, nbytes, Event(stream.impl()->record())};
    try {
      const CudaTask traced(stream, op, info.unit);
      call();
    } catch (const Error&) {  // also that of a call which the end of the communicator cut short
      if (poison_if_over(stream)) return;
      throw;
    }
    item.end = stream.impl()->record();
    const std::lock_guard lock(mutex_);
    in_flight_.push_back(std::move(item));
  }
  progress();
}

NcclState::~NcclState() {
  while (!is_idle()) {  // calls may still be queued; the World may end meanwhile
    poll();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  const ncclComm_t last = comm.exchange(nullptr);
  if (last == nullptr) return;
  ensure_cuda_device(device_);
  const HostCallScope scope(*log, "ncclCommDestroy", {}, 0);
  if (const ncclResult_t result = nccl().ncclCommDestroy(last); result != ncclSuccess)
    log_error("ncclCommDestroy: {}", nccl().ncclGetErrorString(result));
}

void NcclState::poll() {
  if (device_.type == DeviceType::kCuda) ensure_cuda_device(device_);  // from any thread
  progress();
  std::string reason = transport->abort_reason();
  if (reason.empty()) {
    // Who is inside a call finds its error itself.
    const std::unique_lock host_lock(call_mutex_, std::try_to_lock);
    const ncclComm_t now = comm;
    ncclResult_t error = ncclSuccess;
    if (host_lock.owns_lock() && now != nullptr &&
        nccl().ncclCommGetAsyncError(now, &error) == ncclSuccess && error != ncclSuccess &&
        error != ncclInProgress) {
      reason = fmt::format("NCCL: {}; {}", nccl().ncclGetErrorString(error),
                           nccl().ncclGetLastError(now));
    }
  }
  if (reason.empty()) return;
  transport->abort(reason);
  end(reason);
}

void* NcclState::register_memory(void* data, size_t nbytes) {
  const HostCallScope scope(*log, "ncclCommRegister", {}, static_cast<int64_t>(nbytes));
  const std::lock_guard host_lock(call_mutex_);
  void* handle = nullptr;
  const ncclComm_t now = comm;
  if (now == nullptr || nccl().ncclCommRegister(now, data, nbytes, &handle) != ncclSuccess)
    return nullptr;
  return handle;
}

void NcclState::deregister(void* handle) noexcept {
  const std::lock_guard host_lock(call_mutex_);
  if (const ncclComm_t now = comm; now != nullptr) nccl().ncclCommDeregister(now, handle);
}

bool NcclState::is_over() const {
  const std::lock_guard lock(mutex_);
  return is_over_;
}

void NcclState::remember(const Stream& stream) {
  {
    const std::lock_guard lock(mutex_);
    if (std::find(streams_.begin(), streams_.end(), stream) != streams_.end()) return;
    streams_.push_back(stream);
  }
  watch_cuda_stream(stream, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->poll();
  });
}

bool NcclState::poison_if_over(const Stream& stream) {
  const std::lock_guard lock(mutex_);
  if (is_over_) poison_cuda_stream(stream, over_);
  return is_over_;
}

bool NcclState::is_idle() {
  progress();
  const std::lock_guard lock(mutex_);
  return in_flight_.empty();
}

void NcclState::progress() {
  const std::lock_guard lock(mutex_);
  while (!in_flight_.empty()) {
    InFlight& item = in_flight_.front();
    if (!item.has_begun) {
      if (!item.begin.is_done()) return;
      log->begin(item.op, {item.phase.c_str(), item.unit.c_str(), item.step}, item.nbytes);
      item.has_begun = true;
    }
    if (!item.end.is_done()) return;
    log->end();
    in_flight_.pop_front();
  }
}

void NcclState::end(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (is_over_) return;
    is_over_ = true;
    over_ = std::make_exception_ptr(CommError(reason));
    for (const Stream& stream : streams_) poison_cuda_stream(stream, over_);
  }
  std::unique_lock host_lock(call_mutex_, std::defer_lock);
  (void)host_lock.try_lock_for(std::chrono::milliseconds(200));
  if (const ncclComm_t last = comm.exchange(nullptr); last != nullptr) nccl().ncclCommAbort(last);
}

void* NcclMemory::allocate(size_t nbytes) {
  void* data = nullptr;
  if (nccl().ncclMemAlloc(&data, nbytes) != ncclSuccess) return nullptr;
  for (const auto& state : states_) {
    if (void* handle = state->register_memory(data, nbytes); handle != nullptr)
      handles_[data].emplace_back(state.get(), handle);
  }
  return data;
}

void NcclMemory::free(void* data, size_t) noexcept {
  ensure_cuda_device(device_);
  if (const auto it = handles_.find(data); it != handles_.end()) {
    for (const auto& [state, handle] : it->second) state->deregister(handle);
    handles_.erase(it);
  }
  if (const ncclResult_t result = nccl().ncclMemFree(data); result != ncclSuccess)
    log_error("ncclMemFree: {}", nccl().ncclGetErrorString(result));
}

}  // namespace tessera::dist

#endif
