#include <algorithm>
#include <utility>
#include <vector>

#include "core/runtime/context.h"
#include "core/runtime/cuda.h"
#include "core/runtime/staging.h"
#include "dist/comm/nccl.h"

// [Note: Collectives through host memory]
// The CUDA stream copies the input into a page-locked buffer and then stands at a gate. A worker
// thread waits for the copy, runs the collective between host buffers, and opens the gate; the
// stream copies the result back. Each communicator has a worker and a gate of its own, so that
// collectives of different streams do not wait for each other. When one fails, the stream is
// poisoned and all later gates open at once.

namespace tessera::dist {

namespace {

class StagedComm final : public Comm {
 public:
  StagedComm(std::shared_ptr<HostTransport> transport, std::shared_ptr<Watchdog> watchdog)
      : watchdog_(std::move(watchdog)),
        state_(std::make_shared<State>(std::move(transport), Context::current()->device())) {
    state_->log = watchdog_->make_log(state_->transport->group());
    worker_ = make_stream({}, "host_comm");
  }

  int rank() const override { return state_->transport->rank(); }
  int world_size() const override { return state_->transport->world_size(); }

  void all_gather(const Stream& stream, void* full, const void* shard, int64_t shard_numel,
                  DType dtype, const CollectiveInfo& info) override {
    const int64_t nbytes = nbytes_of(shard_numel, dtype), full_nbytes = nbytes * world_size();
    char* host = buffer(full_nbytes);
    char* own = host + rank() * nbytes;
    run(stream, {"all_gather", nbytes, info}, Cost().read(shard, nbytes).write(full, full_nbytes),
        {{own, shard, nbytes}}, {{full, host, full_nbytes}},
        [=](HostTransport& t) { t.all_gather(host, own, nbytes); });
  }

  void reduce_scatter(const Stream& stream, void* shard, const void* full, int64_t shard_numel,
                      DType wire, DType out, bool accumulate, void*,
                      const CollectiveInfo& info) override {
    TESSERA_CHECK_DTYPE(is_floating(wire) && is_floating(out),
                        "reduce_scatter: wire and out must be floating, got {} and {}", wire, out);
    const int64_t full_nbytes = nbytes_of(shard_numel, wire) * world_size();
    const int64_t shard_nbytes = nbytes_of(shard_numel, out);
    char* host = buffer(aligned(full_nbytes) + aligned(shard_nbytes) +
                        state_->transport->reduce_scatter_staging_nbytes(shard_numel, wire, false));
    char* host_shard = host + aligned(full_nbytes);
    std::vector<Copy> inputs = {{host, full, full_nbytes}};
    if (accumulate) inputs.push_back({host_shard, shard, shard_nbytes});
    Cost cost(static_cast<double>(shard_numel) * (world_size() - 1 + (accumulate ? 1 : 0)));
    cost.read(full, full_nbytes).write_or_accumulate(shard, shard_nbytes, accumulate);
    const ReduceScatterCall call{
        host_shard, host, shard_numel, wire, out, accumulate, host_shard + aligned(shard_nbytes)};
    run(stream, {"reduce_scatter", full_nbytes, info}, cost, inputs,
        {{shard, host_shard, shard_nbytes}}, [call](HostTransport& t) { t.reduce_scatter(call); });
  }
  // Staging is in host memory.
  int64_t reduce_scatter_staging_nbytes(int64_t, DType, bool) const override { return 0; }
  int64_t all_reduce_staging_nbytes(int64_t, DType) const override { return 0; }

  void all_reduce(const Stream& stream, void* data, int64_t numel, DType dtype, void*,
                  const CollectiveInfo& info) override {
    TESSERA_CHECK_DTYPE(is_floating(dtype), "all_reduce: expected a floating dtype, got {}", dtype);
    run_all_reduce(stream, "all_reduce", data, numel, dtype, Reduction::kSum, info);
  }

  void all_reduce_max(const Stream& stream, void* data, int64_t numel, DType dtype, void*,
                      const CollectiveInfo& info) override {
    TESSERA_CHECK_DTYPE(dtype == kF32 || dtype == kI32 || dtype == kU8,
                        "all_reduce_max: expected f32, i32 or u8, got {}", dtype);
    run_all_reduce(stream, "all_reduce_max", data, numel, dtype, Reduction::kMax, info);
  }

  void broadcast(const Stream& stream, void* data, int64_t nbytes, int root,
                 const CollectiveInfo& info) override {
    TESSERA_CHECK(root >= 0 && root < world_size(), "broadcast: root {} is not in [0, {})", root,
                  world_size());
    char* host = buffer(nbytes);
    std::vector<Copy> inputs, outputs;
    (root == rank() ? inputs : outputs)
        .push_back(root == rank() ? Copy{host, data, nbytes} : Copy{data, host, nbytes});
    run(stream, {"broadcast", nbytes, info},
        root == rank() ? Cost().read(data, nbytes) : Cost().write(data, nbytes), inputs, outputs,
        [=](HostTransport& t) { t.broadcast(host, nbytes, root); });
  }

  std::shared_ptr<Storage> allocate(int64_t nbytes, MemoryClass memory_class) override {
    auto storage =
        std::make_shared<Storage>(static_cast<size_t>(nbytes), Context::current()->device());
    if (nbytes > 0) storage->materialize(memory_class);
    return storage;
  }

  std::unique_ptr<Comm> split(int color, int key) override {
    TESSERA_CHECK(color >= 0, "split: expected a color that is not negative, got {}", color);
    return std::make_unique<StagedComm>(state_->transport->split(color, key), watchdog_);
  }
  std::unique_ptr<Comm> duplicate() override { return split(0, rank()); }

  void abort(const std::string& reason) noexcept override { state_->transport->abort(reason); }

 private:
  struct Copy {
    void* dst;
    const void* src;
    int64_t nbytes;
  };
  struct Call {
    const char* op;
    int64_t nbytes;
    const CollectiveInfo& info;
  };
  /// What the worker's tasks need: they outlive the communicator.
  struct State {
    State(std::shared_ptr<HostTransport> t, Device d)
        : transport(std::move(t)), device(d), gate(d) {}
    ~State() {
      try {
        last.synchronize();  // the stream is through with the gate and the buffers
      } catch (...) {        // its error is the stream's to tell
      }
    }

    const std::shared_ptr<HostTransport> transport;
    const Device device;
    std::shared_ptr<CollectiveLog> log;
    HostGate gate;
    std::vector<HostBuffer> buffers;  // the last is in use, the others were too small
    int64_t buffer_nbytes = 0;
    Event last;               // of the stream: all gates and copies before
    bool has_failed = false;  // the worker's
  };

  static int64_t nbytes_of(int64_t numel, DType dtype) {
    return numel * static_cast<int64_t>(size_of(dtype));
  }
  static int64_t aligned(int64_t nbytes) { return (nbytes + 511) / 512 * 512; }

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

  template <class F>
  void run(const Stream& stream, const Call& call, const Cost& cost,
           const std::vector<Copy>& inputs, const std::vector<Copy>& outputs, F work) {
    stream.declare(call.op, cost);
    const auto copy = [&](const std::vector<Copy>& copies) {
      for (const Copy& c : copies) {
        if (c.nbytes > 0)
          stream.impl()->copy_bytes(call.op, c.dst, c.src, static_cast<size_t>(c.nbytes));
      }
    };
    const CudaTask traced(stream, call.op, call.info.unit);
    copy(inputs);
    const Event copied = Event(stream.impl()->record());
    const CallTag tag(next_sequence_++, call.op, call.info);
    const uint32_t ticket = state_->gate.wait_on(stream);
    worker_.submit(call.op, [state = state_, stream, copied, tag, ticket, nbytes = call.nbytes,
                             info = call.info, work] {
      if (!state->has_failed) {
        try {
          ensure_cuda_device(state->device);
          copied.synchronize();
          const CollectiveScope scope(*state->log, tag.op, info, nbytes);
          state->transport->set_tag(tag);
          work(*state->transport);
        } catch (...) {
          state->has_failed = true;
          poison_cuda_stream(stream, std::current_exception());
        }
      }
      state->gate.open(ticket);
    });
    copy(outputs);
    state_->last = Event(stream.impl()->record());
  }

  void run_all_reduce(const Stream& stream, const char* op, void* data, int64_t numel, DType dtype,
                      Reduction reduction, const CollectiveInfo& info) {
    const int64_t nbytes = nbytes_of(numel, dtype);
    char* host =
        buffer(aligned(nbytes) + state_->transport->all_reduce_staging_nbytes(numel, dtype));
    const AllReduceCall call{host, numel, dtype, reduction, host + aligned(nbytes)};
    run(stream, {op, nbytes, info},
        Cost(static_cast<double>(numel) * (world_size() - 1))
            .read(data, nbytes)
            .write(data, nbytes),
        {{host, data, nbytes}}, {{data, host, nbytes}},
        [call](HostTransport& t) { t.all_reduce(call); });
  }

  const std::shared_ptr<Watchdog> watchdog_;
  const std::shared_ptr<State> state_;
  Stream worker_;
  int64_t next_sequence_ = 0;
};

}  // namespace

std::unique_ptr<Comm> make_staged_comm(std::shared_ptr<HostTransport> transport,
                                       std::shared_ptr<Watchdog> watchdog) {
  return std::make_unique<StagedComm>(std::move(transport), std::move(watchdog));
}

}  // namespace tessera::dist
