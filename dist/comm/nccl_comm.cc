#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/runtime/context.h"
#include "core/runtime/cuda/cuda.h"
#include "dist/comm/nccl.h"
#include "dist/comm/nccl_state.h"

// [Note: Collectives over NCCL]
// A call puts NCCL's work and, for reductions, one kernel of ours into the stream and returns. No
// thread of ours runs it, so its begin and end are read from events, by whoever comes next: the
// next call, or the watchdog's poller. That thread also looks for NCCL's asynchronous errors and
// for the end of the World; either ends the communicator (ncclCommAbort lets its kernels exit) and
// poisons the streams it was used on.
//
// Calls of NCCL block the host for as long as a peer takes to come: the first collective of a
// communicator and the first transfer between two ranks connect them inside the call, and a full
// launch queue waits for the device. So the log says that the host is inside before it is, the lock
// held there is no other's than that of calls, and the poller only tries to take it. Who ends a
// communicator gives a call in progress a moment; then ncclCommAbort makes it return.
//
// Communicators are split from one in program order, so their order is the same on all ranks.
// NCCL_LAUNCH_ORDER_IMPLICIT makes kernels of two communicators start in the host's order on every
// device: without it, two collectives at work on two streams may wait for each other's blocks.
//
// What NCCL moves best is memory of its own that is registered with the communicator that moves it.
// Which one that is depends on the settings (a slot is gathered into by one and, in parts, by
// another), so `allocate` registers with all that were split from the same one so far.

namespace tessera::dist {

#if TESSERA_HAS_NCCL

namespace {

ncclConfig_t make_config(const NcclOptions& options) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
  return config;
}

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case kF32:
      return ncclFloat32;
    case kBF16:
      return ncclBfloat16;
    case kF16:
      return ncclFloat16;
    case kF64:
      return ncclFloat64;
    case kI32:
      return ncclInt32;
    case kI64:
      return ncclInt64;
    case kU8:
      return ncclUint8;
  }
  return ncclUint8;
}

/// Messages of NCCL and a kernel of ours, in one stream.
class NcclMover final : public Mover {
 public:
  NcclMover(int rank, int world_size, const NcclState& state, const Stream* stream)
      : rank_(rank), world_size_(world_size), state_(state), stream_(stream) {}

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  /// Receives and sends as one operation.
  void start(const Messages& messages) override {
    TESSERA_NCCL_CHECK(comm(), ncclGroupStart());
    try {
      for (const Messages::Receive& r : messages.receives) {
        TESSERA_NCCL_CHECK(comm(), ncclRecv(r.data, static_cast<size_t>(r.nbytes), ncclUint8,
                                            r.from, comm(), stream_->cuda()));
      }
      for (const Messages::Send& s : messages.sends) {
        TESSERA_NCCL_CHECK(comm(), ncclSend(s.data, static_cast<size_t>(s.nbytes), ncclUint8, s.to,
                                            comm(), stream_->cuda()));
      }
    } catch (...) {
      nccl().ncclGroupEnd();  // the thread's next group begins as a group again
      throw;
    }
    TESSERA_NCCL_CHECK(comm(), ncclGroupEnd());
  }

  void copy(void* dst, const void* src, int64_t nbytes) override {
    if (dst != src && nbytes > 0)
      stream_->impl()->copy_bytes("all_gather", dst, src, static_cast<size_t>(nbytes));
  }

  void reduce(const kernels::TreeReduce& sum) override {
    // Those of others are equally far apart.
    const auto source = [&](int r) {
      return static_cast<const std::byte*>(sum.sources[r < rank_ ? r : r + 1]);
    };
    kernels::rank_reduce(*stream_, {.dst = sum.dst,
                                    .own = sum.sources[rank_],
                                    .others = world_size_ > 1 ? source(0) : nullptr,
                                    .others_stride = world_size_ > 2 ? source(1) - source(0) : 0,
                                    .rank = rank_,
                                    .num_ranks = world_size_,
                                    .numel = sum.numel,
                                    .src_dtype = sum.src_dtype,
                                    .dst_dtype = sum.dst_dtype,
                                    .accumulate = sum.accumulate});
  }

 private:
  ncclComm_t comm() const { return state_.comm; }

  const int rank_, world_size_;
  const NcclState& state_;
  const Stream* const stream_;
};

class NcclComm final : public Comm {
 public:
  NcclComm(std::shared_ptr<HostTransport> transport, std::shared_ptr<Watchdog> watchdog,
           ncclComm_t comm, std::shared_ptr<NcclFamily> family, const NcclOptions& options)
      : Comm(std::move(transport), std::move(watchdog), DeviceType::kCuda),
        state_(std::make_shared<NcclState>(this->transport(), log(), comm)),
        family_(std::move(family)),
        options_(options) {
    this->watchdog()->add_poller(state_);
    if (comm != nullptr) family_->members.emplace_back(state_);
  }

 private:
  ncclComm_t comm() const { return state_->comm; }

  void do_run(const Call& call) override {
    const Collective& c = call.collective;
    state_->run(call.stream, call.tag.op, call.nbytes, call.info, [&] {
      if (c.numel == 0 || run_natively(call.stream, c)) return;
      NcclMover mover(rank(), world_size(), *state_, &call.stream);
      run_collective(mover, call.tag, c);
    });
  }

  // What NCCL does by itself with the same bits, or is told to do.
  bool run_natively(const Stream& stream, const Collective& c) {
    if (world_size() == 1) return false;
    const auto numel = static_cast<size_t>(c.numel);
    if (c.kind == Collective::Kind::kAllGather) {
      TESSERA_NCCL_CHECK(comm(), ncclAllGather(c.src, c.dst, static_cast<size_t>(c.nbytes()),
                                               ncclUint8, comm(), stream.cuda()));
      return true;
    }
    if (c.kind == Collective::Kind::kReduceScatter && c.wire == c.out && !c.accumulate &&
        options_.native_reduce_scatter) {
      TESSERA_NCCL_CHECK(comm(), ncclReduceScatter(c.src, c.dst, numel, nccl_type(c.wire), ncclSum,
                                                   comm(), stream.cuda()));
      return true;
    }
    return false;
  }

  int64_t do_staging_nbytes(const Collective& collective, bool) const override {
    return collective.staging_nbytes(NcclMover(rank(), world_size(), *state_, nullptr), false);
  }

  std::shared_ptr<MemoryBackend> do_memory(int64_t nbytes) override {
    if (comm() == nullptr || nbytes < options_.min_registered_nbytes) return nullptr;
    return std::make_shared<NcclMemory>(family_->alive());
  }

  std::unique_ptr<Comm> do_split(std::shared_ptr<HostTransport> host, int color, int key) override {
    ncclComm_t child = nullptr;
    if (world_size() > 1) {
      ncclConfig_t config = make_config(options_);
      const HostCallScope scope(*log(), "ncclCommSplit", {}, 0);
      TESSERA_CHECK_AS(CommError, !state_->is_over(), "split: the communicator has ended");
      TESSERA_NCCL_CHECK(comm(), ncclCommSplit(comm(), color, key, &child, &config));
    }
    return std::make_unique<NcclComm>(std::move(host), watchdog(), child, family_, options_);
  }

  void do_abort() noexcept override { state_->poll(); }

  const std::shared_ptr<NcclState> state_;
  const std::shared_ptr<NcclFamily> family_;
  const NcclOptions options_;
};

}  // namespace

std::unique_ptr<Comm> make_nccl_comm(std::shared_ptr<HostTransport> transport,
                                     std::shared_ptr<Watchdog> watchdog) {
  const NcclOptions options = Context::current()->options().backends.nccl;
  ncclComm_t comm = nullptr;
  if (transport->world_size() > 1) {
    TESSERA_CHECK_AS(CommError, nccl_problem().empty(), "NCCL: {}", nccl_problem());
    const auto log = watchdog->make_log(transport->group().of_its_own("init"));
    const HostCallScope scope(*log, "ncclCommInit", {}, 0);
    ncclUniqueId id{};
    if (transport->rank() == 0) TESSERA_NCCL_CHECK(nullptr, ncclGetUniqueId(&id));
    transport->broadcast({}, &id, sizeof id, 0);
    ncclConfig_t config = make_config(options);
    use_cuda_device(Context::current()->device());
    TESSERA_NCCL_CHECK(nullptr, ncclCommInitRankConfig(&comm, transport->world_size(), id,
                                                       transport->rank(), &config));
  }
  return std::make_unique<NcclComm>(std::move(transport), std::move(watchdog), comm,
                                    std::make_shared<NcclFamily>(), options);
}

#else  // a build without NCCL's header

std::unique_ptr<Comm> make_nccl_comm(std::shared_ptr<HostTransport>, std::shared_ptr<Watchdog>) {
  throw CommError("NCCL: " + nccl_problem());
}

#endif

}  // namespace tessera::dist
