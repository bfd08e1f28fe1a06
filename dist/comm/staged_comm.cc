#include "dist/comm/staged_comm.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/runtime/context.h"
#include "core/runtime/cuda/cuda.h"
#include "core/runtime/staging.h"

// [Note: Collectives through host memory]
// The CUDA stream copies the input into a page-locked buffer and then stands at a gate. A worker
// thread waits for the copy, runs the collective between host buffers, and opens the gate; the
// stream copies the result back. Each communicator has a worker and a gate of its own, so that
// collectives of different streams do not wait for each other. When one fails, the stream is
// poisoned and all later gates open at once.

namespace tessera::dist {

namespace {

int64_t aligned(int64_t nbytes) {
  return (nbytes + 511) / 512 * 512;
}

class StagedComm final : public Comm {
 public:
  StagedComm(std::shared_ptr<HostTransport> transport, std::shared_ptr<Watchdog> watchdog)
      : Comm(std::move(transport), std::move(watchdog), DeviceType::kCuda),
        state_(std::make_shared<State>(this->transport(), log(), Context::current()->device())),
        worker_(make_stream({}, "host_comm")) {}

 private:
  /// What the worker's tasks need: they outlive the communicator.
  struct State {
    State(std::shared_ptr<HostTransport> t, std::shared_ptr<CollectiveLog> l, Device d)
        : transport(std::move(t)), log(std::move(l)), device(d), gate(d) {}
    ~State() {
      try {
        last.synchronize();  // the stream is through with the gate and the buffers
      } catch (...) {        // its error is the stream's to tell
      }
    }

    const std::shared_ptr<HostTransport> transport;
    const std::shared_ptr<CollectiveLog> log;
    const Device device;
    HostGate gate;
    std::vector<HostBuffer> buffers;  // the last is in use, the others were too small
    int64_t buffer_nbytes = 0;
    Event last;               // of the stream: all gates and copies before
    bool has_failed = false;  // the worker's
  };

  // One buffer serves all calls: those of one communicator run in order.
  char* buffer(int64_t nbytes) {
    State& s = *state_;
    if (s.buffers.empty() || nbytes > s.buffer_nbytes) {
      s.buffer_nbytes = std::max(nbytes, 2 * s.buffer_nbytes);
      s.buffers.push_back(
          Context::current()->staging()->acquire(static_cast<size_t>(s.buffer_nbytes)));
    }
    return static_cast<char*>(s.buffers.back().data());
  }

  void do_run(const Call& call) override {
    const Collective& on_device = call.collective;
    const int64_t src_nbytes = on_device.src_nbytes(world_size());
    const int64_t dst_nbytes = on_device.dst_nbytes(world_size());
    // The result, the source unless it has a place there, and the staging buffer of the host.
    const int64_t place = on_device.src_place_in_dst(rank());
    const int64_t src_begin = place >= 0 ? place : aligned(dst_nbytes);
    const int64_t staging_begin = aligned(place >= 0 ? dst_nbytes : src_begin + src_nbytes);
    char* const host =
        buffer(staging_begin + on_device.staging_nbytes(*transport(), /*is_allocated=*/false));
    Collective on_host = on_device;
    on_host.dst = host;
    on_host.src = host + src_begin;
    on_host.staging = host + staging_begin;

    const auto copy = [&](void* dst, const void* src, int64_t nbytes) {
      if (nbytes > 0)
        call.stream.impl()->copy_bytes(call.tag.op, dst, src, static_cast<size_t>(nbytes));
    };
    const CudaTask traced(call.stream, call.tag.op, call.info.unit);
    copy(host + src_begin, on_device.src, src_nbytes);
    if (on_device.accumulate) copy(host, on_device.dst, dst_nbytes);
    const Event copied = Event(call.stream.impl()->record());
    const uint32_t ticket = state_->gate.wait_on(call.stream);
    worker_.submit(call.tag.op, [state = state_, stream = call.stream, copied, ticket, on_host,
                                 tag = call.tag, info = call.info, nbytes = call.nbytes] {
      if (!state->has_failed) {
        try {
          ensure_cuda_device(state->device);
          copied.synchronize();
          const CollectiveScope scope(*state->log, tag.op, info, nbytes);
          state->transport->run(tag, on_host);
        } catch (...) {
          state->has_failed = true;
          poison_cuda_stream(stream, std::current_exception());
        }
      }
      state->gate.open(ticket);
    });
    copy(on_device.dst, host, dst_nbytes);
    state_->last = Event(call.stream.impl()->record());
  }
  // Staging is in host memory.
  int64_t do_staging_nbytes(const Collective&, bool) const override { return 0; }
  std::shared_ptr<MemoryBackend> do_memory(int64_t) override { return nullptr; }
  std::unique_ptr<Comm> do_split(std::shared_ptr<HostTransport> child, int, int) override {
    return make_staged_comm(std::move(child), watchdog());
  }

  const std::shared_ptr<State> state_;
  Stream worker_;
};

}  // namespace

std::unique_ptr<Comm> make_staged_comm(std::shared_ptr<HostTransport> transport,
                                       std::shared_ptr<Watchdog> watchdog) {
  return std::make_unique<StagedComm>(std::move(transport), std::move(watchdog));
}

}  // namespace tessera::dist
