#pragma once

#include "dist/comm/nccl_library.h"

#if TESSERA_HAS_NCCL

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/runtime/context.h"
#include "dist/comm/transport.h"
#include "dist/comm/watchdog.h"

namespace tessera::dist {

/// One communicator of NCCL, what is in flight on it, and how it ends.
class NcclState final : public CollectivePoller, public std::enable_shared_from_this<NcclState> {
 public:
  NcclState(std::shared_ptr<HostTransport> host, std::shared_ptr<CollectiveLog> collectives,
            ncclComm_t nccl_comm)
      : transport(std::move(host)), log(std::move(collectives)), comm(nccl_comm) {}

  ~NcclState() override;

  /// `call` puts its work into `stream`.
  void run(const Stream& stream, const char* op, int64_t nbytes, const CollectiveInfo& info,
           const std::function<void()>& call);

  void poll() override;
  bool is_over() const;

  /// Null if NCCL does not take the memory, which not every transport knows: then it copies through
  /// its own buffers.
  void* register_memory(void* data, size_t nbytes);
  /// A communicator that has ended has let go of all memory.
  void deregister(void* handle) noexcept;

  const std::shared_ptr<HostTransport> transport;
  const std::shared_ptr<CollectiveLog> log;
  std::atomic<ncclComm_t> comm;  // null for one rank alone, and once it is over

 private:
  struct InFlight {
    const char* op;
    std::string phase, unit;
    int64_t step, nbytes;
    Event begin, end = {};
    bool has_begun = false;
  };

  /// Under `call_mutex_`.
  void remember(const Stream& stream);
  bool poison_if_over(const Stream& stream);
  bool is_idle();
  void progress();
  void end(const std::string& reason);

  const Device device_ = Context::current()->device();
  std::timed_mutex call_mutex_;  // of NCCL's calls by the rank's host thread, which may block
  mutable std::mutex mutex_;     // of what follows; nobody who holds it calls NCCL
  std::deque<InFlight> in_flight_;
  std::vector<Stream> streams_;
  bool is_over_ = false;
  std::exception_ptr over_;
};

/// The communicators that were split from one, on this rank. Used by the rank's host thread.
struct NcclFamily {
  std::vector<std::weak_ptr<NcclState>> members;

  std::vector<std::shared_ptr<NcclState>> alive() const {
    std::vector<std::shared_ptr<NcclState>> states;
    for (const auto& member : members) {
      if (auto state = member.lock(); state != nullptr && !state->is_over())
        states.push_back(std::move(state));
    }
    return states;
  }
};

/// One piece of memory that NCCL may address directly, registered with several communicators, which
/// live as long as it does.
class NcclMemory final : public MemoryBackend {
 public:
  explicit NcclMemory(std::vector<std::shared_ptr<NcclState>> states)
      : states_(std::move(states)) {}

  void* allocate(size_t nbytes) override;
  void free(void* data, size_t nbytes) noexcept override;

 private:
  const Device device_ = Context::current()->device();
  const std::vector<std::shared_ptr<NcclState>> states_;
  std::map<void*, std::vector<std::pair<NcclState*, void*>>> handles_;
};

}  // namespace tessera::dist

#endif
