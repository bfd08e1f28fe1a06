#include "dist/comm/nccl.h"

#if __has_include(<nccl.h>)
#define TESSERA_HAS_NCCL 1
#include <nccl.h>
#if !defined(TESSERA_SIMT)
#include <dlfcn.h>
#endif
#endif

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/log.h"
#include "core/runtime/context.h"
#include "core/runtime/cuda.h"

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

namespace {

std::mutex options_mutex;
NcclOptions options_now;

}  // namespace

NcclOptions nccl_options() {
  const std::lock_guard lock(options_mutex);
  return options_now;
}

void set_nccl_options(const NcclOptions& options) {
  const std::lock_guard lock(options_mutex);
  options_now = options;
}

#if TESSERA_HAS_NCCL

namespace {

// clang-format off
#define TESSERA_NCCL_FUNCTIONS(X)                                                                \
  X(ncclGetErrorString) X(ncclGetLastError) X(ncclGetVersion) X(ncclGetUniqueId)                 \
  X(ncclCommInitRankConfig) X(ncclCommSplit) X(ncclCommDestroy) X(ncclCommAbort)                 \
  X(ncclCommGetAsyncError) X(ncclMemAlloc) X(ncclMemFree) X(ncclCommRegister)                    \
  X(ncclCommDeregister) X(ncclGroupStart) X(ncclGroupEnd) X(ncclAllGather) X(ncclReduceScatter)  \
  X(ncclBroadcast) X(ncclSend) X(ncclRecv)
// clang-format on

struct Library {
#define TESSERA_NCCL_FIELD(name) decltype(&::name) name = nullptr;
  TESSERA_NCCL_FUNCTIONS(TESSERA_NCCL_FIELD)
#undef TESSERA_NCCL_FIELD
  std::string problem;
};

Library open_library() {
  Library library;
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);  // see [Note: Collectives over NCCL]
#if defined(TESSERA_SIMT)
#define TESSERA_NCCL_LOAD(name) library.name = &::name;
#else
  // The build needs the header only: a binary with NCCL starts where it is not installed.
  void* handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) handle = dlopen("/usr/local/cuda/lib64/libnccl.so.2", RTLD_NOW);
  if (handle == nullptr) {
    library.problem = "libnccl.so.2 cannot be loaded";
    return library;
  }
#define TESSERA_NCCL_LOAD(name)                                                  \
  library.name = reinterpret_cast<decltype(library.name)>(dlsym(handle, #name)); \
  if (library.name == nullptr) library.problem = "libnccl.so.2 lacks " #name;
#endif
  TESSERA_NCCL_FUNCTIONS(TESSERA_NCCL_LOAD)
#undef TESSERA_NCCL_LOAD
  if (!library.problem.empty()) return library;
  int version = 0;
  library.ncclGetVersion(&version);
  constexpr int kOldest = 22600;  // the first with an implicit launch order
  if (version < kOldest) {
    library.problem =
        fmt::format("NCCL is {}.{}, expected 2.26 or newer", version / 10000, version / 100 % 100);
  }
  return library;
}

const Library& nccl() {
  static const Library& library = *new Library(open_library());
  return library;
}

[[noreturn]] void fail_nccl(ncclResult_t result, ncclComm_t comm, const char* call) {
  const char* details = nccl().ncclGetLastError(comm);
  throw CommError(fmt::format("{}: {}{}{}", call, nccl().ncclGetErrorString(result),
                              details != nullptr && *details != '\0' ? "; " : "",
                              details != nullptr ? details : ""));
}

#define TESSERA_NCCL_CHECK(comm, call)                                     \
  do {                                                                     \
    const ncclResult_t nccl_result_ = nccl().call;                         \
    if (nccl_result_ != ncclSuccess) fail_nccl(nccl_result_, comm, #call); \
  } while (0)

ncclConfig_t make_config() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  if (const int max_ctas = nccl_options().max_ctas; max_ctas > 0) config.maxCTAs = max_ctas;
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

/// One communicator of NCCL, what is in flight on it, and how it ends.
class NcclState final : public CollectivePoller, public std::enable_shared_from_this<NcclState> {
 public:
  NcclState(std::shared_ptr<HostTransport> host, std::shared_ptr<CollectiveLog> collectives,
            ncclComm_t nccl_comm)
      : transport(std::move(host)), log(std::move(collectives)), comm(nccl_comm) {}

  ~NcclState() override {
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

  /// `call` puts its work into `stream`.
  template <class F>
  void run(const Stream& stream, const char* op, int64_t nbytes, const CollectiveInfo& info,
           const F& call) {
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

  void poll() override {
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

  bool is_over() const {
    const std::lock_guard lock(mutex_);
    return is_over_;
  }

  /// Null if NCCL does not take the memory, which not every transport knows: then it copies through
  /// its own buffers.
  void* register_memory(void* data, size_t nbytes) {
    const HostCallScope scope(*log, "ncclCommRegister", {}, static_cast<int64_t>(nbytes));
    const std::lock_guard host_lock(call_mutex_);
    void* handle = nullptr;
    const ncclComm_t now = comm;
    if (now == nullptr || nccl().ncclCommRegister(now, data, nbytes, &handle) != ncclSuccess)
      return nullptr;
    return handle;
  }
  /// A communicator that has ended has let go of all memory.
  void deregister(void* handle) noexcept {
    const std::lock_guard host_lock(call_mutex_);
    if (const ncclComm_t now = comm; now != nullptr) nccl().ncclCommDeregister(now, handle);
  }

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
  void remember(const Stream& stream) {
    {
      const std::lock_guard lock(mutex_);
      if (std::find(streams_.begin(), streams_.end(), stream) != streams_.end()) return;
      streams_.push_back(stream);
    }
    watch_cuda_stream(stream, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->poll();
    });
  }

  bool poison_if_over(const Stream& stream) {
    const std::lock_guard lock(mutex_);
    if (is_over_) poison_cuda_stream(stream, over_);
    return is_over_;
  }

  bool is_idle() {
    progress();
    const std::lock_guard lock(mutex_);
    return in_flight_.empty();
  }

  void progress() {
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

  void end(const std::string& reason) {
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
class NcclBackend final : public MemoryBackend {
 public:
  explicit NcclBackend(std::vector<std::shared_ptr<NcclState>> states)
      : states_(std::move(states)) {}

  void* allocate(size_t nbytes) override {
    void* data = nullptr;
    if (nccl().ncclMemAlloc(&data, nbytes) != ncclSuccess) return nullptr;
    for (const auto& state : states_) {
      if (void* handle = state->register_memory(data, nbytes); handle != nullptr)
        handles_[data].emplace_back(state.get(), handle);
    }
    return data;
  }

  void free(void* data, size_t) noexcept override {
    ensure_cuda_device(device_);
    if (const auto it = handles_.find(data); it != handles_.end()) {
      for (const auto& [state, handle] : it->second) state->deregister(handle);
      handles_.erase(it);
    }
    if (const ncclResult_t result = nccl().ncclMemFree(data); result != ncclSuccess)
      log_error("ncclMemFree: {}", nccl().ncclGetErrorString(result));
  }

 private:
  const Device device_ = Context::current()->device();
  const std::vector<std::shared_ptr<NcclState>> states_;
  std::map<void*, std::vector<std::pair<NcclState*, void*>>> handles_;
};

class NcclComm final : public Comm {
 public:
  NcclComm(std::shared_ptr<HostTransport> transport, std::shared_ptr<Watchdog> watchdog,
           ncclComm_t comm, std::shared_ptr<NcclFamily> family)
      : transport_(std::move(transport)),
        watchdog_(std::move(watchdog)),
        state_(std::make_shared<NcclState>(transport_, watchdog_->make_log(transport_->group()),
                                           comm)),
        family_(std::move(family)) {
    watchdog_->add_poller(state_);
    if (comm != nullptr) family_->members.emplace_back(state_);
  }

  int rank() const override { return transport_->rank(); }
  int world_size() const override { return transport_->world_size(); }

  void all_gather(const Stream& stream, void* full, const void* shard, int64_t shard_numel,
                  DType dtype, const CollectiveInfo& info) override {
    const int64_t nbytes = nbytes_of(shard_numel, dtype);
    run(stream, "all_gather", nbytes, info,
        Cost().read(shard, nbytes).write(full, nbytes * world_size()), [&] {
          if (nbytes == 0) return;
          if (world_size() > 1) {
            TESSERA_NCCL_CHECK(comm(), ncclAllGather(shard, full, static_cast<size_t>(nbytes),
                                                     ncclUint8, comm(), stream.cuda()));
          } else if (full != shard) {
            stream.impl()->copy_bytes("all_gather", full, shard, static_cast<size_t>(nbytes));
          }
        });
  }

  void reduce_scatter(const Stream& stream, void* shard, const void* full, int64_t shard_numel,
                      DType wire, DType out, bool accumulate, void* staging,
                      const CollectiveInfo& info) override {
    TESSERA_CHECK_DTYPE(is_floating(wire) && is_floating(out),
                        "reduce_scatter: wire and out must be floating, got {} and {}", wire, out);
    check_sum("reduce_scatter", wire, out);
    const int64_t nbytes = nbytes_of(shard_numel, wire);
    Cost cost(static_cast<double>(shard_numel) * (world_size() - 1 + (accumulate ? 1 : 0)));
    cost.read(full, nbytes * world_size())
        .write(staging, reduce_scatter_staging_nbytes(shard_numel, wire, false))
        .write_or_accumulate(shard, nbytes_of(shard_numel, out), accumulate);
    const bool is_native = nccl_options().native_reduce_scatter && wire == out && !accumulate;
    run(stream, "reduce_scatter", nbytes * world_size(), info, cost, [&] {
      if (nbytes == 0) return;
      if (is_native && world_size() > 1) {
        TESSERA_NCCL_CHECK(comm(),
                           ncclReduceScatter(full, shard, static_cast<size_t>(shard_numel),
                                             nccl_type(wire), ncclSum, comm(), stream.cuda()));
        return;
      }
      const auto* chunks = static_cast<const std::byte*>(full);
      exchange(
          stream,
          [&](int r) {
            return Piece{staged(staging, r, nbytes), nbytes};
          },
          [&](int r) {
            return ConstPiece{chunks + r * nbytes, nbytes};
          });
      kernels::rank_reduce(stream, {.dst = shard,
                                    .own = chunks + rank() * nbytes,
                                    .others = staging,
                                    .others_stride = nbytes,
                                    .rank = rank(),
                                    .num_ranks = world_size(),
                                    .numel = shard_numel,
                                    .src_dtype = wire,
                                    .dst_dtype = out,
                                    .accumulate = accumulate});
    });
  }

  int64_t reduce_scatter_staging_nbytes(int64_t shard_numel, DType wire, bool) const override {
    return (world_size() - 1) * nbytes_of(shard_numel, wire);
  }

  void all_reduce(const Stream& stream, void* data, int64_t numel, DType dtype, void* staging,
                  const CollectiveInfo& info) override {
    TESSERA_CHECK_DTYPE(is_floating(dtype), "all_reduce: expected a floating dtype, got {}", dtype);
    run_all_reduce(stream, "all_reduce", {data, numel, dtype, Reduction::kSum, staging}, info);
  }

  void all_reduce_max(const Stream& stream, void* data, int64_t numel, DType dtype, void* staging,
                      const CollectiveInfo& info) override {
    TESSERA_CHECK_DTYPE(dtype == kF32 || dtype == kI32 || dtype == kU8,
                        "all_reduce_max: expected f32, i32 or u8, got {}", dtype);
    run_all_reduce(stream, "all_reduce_max", {data, numel, dtype, Reduction::kMax, staging}, info);
  }

  int64_t all_reduce_staging_nbytes(int64_t numel, DType dtype) const override {
    const int64_t nbytes = nbytes_of(numel, dtype);
    return (world_size() - 1) *
           (is_one_hop(nbytes) ? nbytes : nbytes_of(chunk_numel(numel), dtype));
  }

  void broadcast(const Stream& stream, void* data, int64_t nbytes, int root,
                 const CollectiveInfo& info) override {
    TESSERA_CHECK(root >= 0 && root < world_size(), "broadcast: root {} is not in [0, {})", root,
                  world_size());
    run(stream, "broadcast", nbytes, info,
        root == rank() ? Cost().read(data, nbytes) : Cost().write(data, nbytes), [&] {
          if (nbytes == 0 || world_size() == 1) return;
          TESSERA_NCCL_CHECK(comm(), ncclBroadcast(data, data, static_cast<size_t>(nbytes),
                                                   ncclUint8, root, comm(), stream.cuda()));
        });
  }

  std::shared_ptr<Storage> allocate(int64_t nbytes, MemoryClass memory_class) override {
    auto storage =
        std::make_shared<Storage>(static_cast<size_t>(nbytes), Context::current()->device());
    if (comm() != nullptr && nbytes > 0 && nbytes >= nccl_options().min_registered_nbytes) {
      storage->materialize_segment(std::make_shared<NcclBackend>(family_->alive()), memory_class);
    } else if (nbytes > 0) {
      storage->materialize(memory_class);
    }
    return storage;
  }

  std::unique_ptr<Comm> split(int color, int key) override {
    TESSERA_CHECK(color >= 0, "split: expected a color that is not negative, got {}", color);
    std::shared_ptr<HostTransport> host = transport_->split(color, key);
    ncclComm_t child = nullptr;
    if (world_size() > 1) {
      ncclConfig_t config = make_config();
      const HostCallScope scope(*state_->log, "ncclCommSplit", {}, 0);
      TESSERA_CHECK_AS(CommError, !state_->is_over(), "split: the communicator has ended");
      TESSERA_NCCL_CHECK(comm(), ncclCommSplit(comm(), color, key, &child, &config));
    }
    return std::make_unique<NcclComm>(std::move(host), watchdog_, child, family_);
  }

  std::unique_ptr<Comm> duplicate() override { return split(0, rank()); }

  void abort(const std::string& reason) noexcept override {
    transport_->abort(reason);
    state_->poll();
  }

 private:
  struct Piece {
    void* data;
    int64_t nbytes;
  };
  struct ConstPiece {
    const void* data;
    int64_t nbytes;
  };

  static void check_sum(const char* op, DType wire, DType out) {
    if (wire != out && (wire == kF64 || out == kF64))
      TESSERA_UNIMPLEMENTED("{}: no sum of {} into {} on CUDA", op, wire, out);
  }
  static int64_t nbytes_of(int64_t numel, DType dtype) {
    return numel * static_cast<int64_t>(size_of(dtype));
  }
  // All-reduces of up to this many bytes over all ranks send everything to everybody: one hop.
  bool is_one_hop(int64_t nbytes) const { return nbytes * world_size() <= 64 * 1024; }
  int64_t chunk_numel(int64_t numel) const { return (numel + world_size() - 1) / world_size(); }
  ncclComm_t comm() const { return state_->comm; }

  // Where the bytes of rank r lie in the staging buffer, which has no place for the own ones.
  std::byte* staged(void* staging, int r, int64_t nbytes) const {
    return static_cast<std::byte*>(staging) + (r < rank() ? r : r - 1) * nbytes;
  }

  template <class F>
  void run(const Stream& stream, const char* op, int64_t nbytes, const CollectiveInfo& info,
           const Cost& cost, const F& call) {
    if (stream.device().type != DeviceType::kCuda) {
      TESSERA_UNIMPLEMENTED(
          "{}: this communicator moves memory of CUDA devices, the stream is on {}", op,
          stream.device());
    }
    stream.declare(op, cost);
    state_->run(stream, op, nbytes, info, call);
  }

  // Receives from, and sends to, every other rank, as one operation.
  template <class In, class Out>
  void exchange(const Stream& stream, const In& in, const Out& out) {
    if (world_size() == 1) return;
    TESSERA_NCCL_CHECK(comm(), ncclGroupStart());
    try {
      add_transfers(stream, in, out);
    } catch (...) {
      nccl().ncclGroupEnd();  // the thread's next group begins as a group again
      throw;
    }
    TESSERA_NCCL_CHECK(comm(), ncclGroupEnd());
  }

  template <class In, class Out>
  void add_transfers(const Stream& stream, const In& in, const Out& out) {
    for (int i = 1; i < world_size(); ++i) {
      const int from = (rank() - i + world_size()) % world_size();
      const int to = (rank() + i) % world_size();
      const Piece piece = in(from);
      const ConstPiece own = out(to);
      if (piece.nbytes > 0) {
        TESSERA_NCCL_CHECK(comm(), ncclRecv(piece.data, static_cast<size_t>(piece.nbytes),
                                            ncclUint8, from, comm(), stream.cuda()));
      }
      if (own.nbytes > 0) {
        TESSERA_NCCL_CHECK(comm(), ncclSend(own.data, static_cast<size_t>(own.nbytes), ncclUint8,
                                            to, comm(), stream.cuda()));
      }
    }
  }

  void run_all_reduce(const Stream& stream, const char* op, const AllReduceCall& call,
                      const CollectiveInfo& info) {
    const int64_t nbytes = nbytes_of(call.numel, call.dtype);
    Cost cost(static_cast<double>(call.numel) * (world_size() - 1));
    cost.read(call.data, nbytes)
        .write(call.data, nbytes)
        .write(call.staging, all_reduce_staging_nbytes(call.numel, call.dtype));
    run(stream, op, nbytes, info, cost, [&] {
      if (nbytes == 0 || world_size() == 1) return;
      is_one_hop(nbytes) ? reduce_in_one_hop(stream, call) : reduce_and_gather(stream, call);
    });
  }

  void reduce(const Stream& stream, const AllReduceCall& call, void* own, int64_t numel,
              int64_t stride) {
    kernels::rank_reduce(stream, {.dst = own,
                                  .own = own,
                                  .others = call.staging,
                                  .others_stride = stride,
                                  .rank = rank(),
                                  .num_ranks = world_size(),
                                  .numel = numel,
                                  .src_dtype = call.dtype,
                                  .dst_dtype = call.dtype,
                                  .reduction = call.reduction});
  }

  void reduce_in_one_hop(const Stream& stream, const AllReduceCall& call) {
    const int64_t nbytes = nbytes_of(call.numel, call.dtype);
    exchange(
        stream,
        [&](int r) {
          return Piece{staged(call.staging, r, nbytes), nbytes};
        },
        [&](int) {
          return ConstPiece{call.data, nbytes};
        });
    reduce(stream, call, call.data, call.numel, nbytes);
  }

  // Chunk r of everybody's data to rank r, its sum to everybody.
  void reduce_and_gather(const Stream& stream, const AllReduceCall& call) {
    const int64_t chunk = chunk_numel(call.numel), item = nbytes_of(1, call.dtype);
    auto* data = static_cast<std::byte*>(call.data);
    const auto begin_of = [&](int r) { return std::min(r * chunk, call.numel) * item; };
    const auto piece_of = [&](int r) {
      return Piece{data + begin_of(r), begin_of(r + 1) - begin_of(r)};
    };
    const auto const_piece_of = [&](int r) {
      return ConstPiece{data + begin_of(r), begin_of(r + 1) - begin_of(r)};
    };
    const Piece own = piece_of(rank());
    exchange(
        stream,
        [&](int r) {
          return Piece{staged(call.staging, r, chunk * item), own.nbytes};
        },
        const_piece_of);
    reduce(stream, call, own.data, own.nbytes / item, chunk * item);
    exchange(stream, piece_of, [&](int) { return const_piece_of(rank()); });
  }

  const std::shared_ptr<HostTransport> transport_;
  const std::shared_ptr<Watchdog> watchdog_;
  const std::shared_ptr<NcclState> state_;
  const std::shared_ptr<NcclFamily> family_;
};

}  // namespace

const std::string& nccl_problem() {
  return nccl().problem;
}

std::unique_ptr<Comm> make_nccl_comm(std::shared_ptr<HostTransport> transport,
                                     std::shared_ptr<Watchdog> watchdog) {
  ncclComm_t comm = nullptr;
  if (transport->world_size() > 1) {
    TESSERA_CHECK_AS(CommError, nccl_problem().empty(), "NCCL: {}", nccl_problem());
    const auto log = watchdog->make_log(transport->group().of_its_own("init"));
    const HostCallScope scope(*log, "ncclCommInit", {}, 0);
    ncclUniqueId id{};
    if (transport->rank() == 0) TESSERA_NCCL_CHECK(nullptr, ncclGetUniqueId(&id));
    transport->broadcast(&id, sizeof id, 0);
    ncclConfig_t config = make_config();
    use_cuda_device(Context::current()->device());
    TESSERA_NCCL_CHECK(nullptr, ncclCommInitRankConfig(&comm, transport->world_size(), id,
                                                       transport->rank(), &config));
  }
  return std::make_unique<NcclComm>(std::move(transport), std::move(watchdog), comm,
                                    std::make_shared<NcclFamily>());
}

#else  // a build without NCCL's header

const std::string& nccl_problem() {
  static const std::string problem = "this build has no NCCL";
  return problem;
}

std::unique_ptr<Comm> make_nccl_comm(std::shared_ptr<HostTransport>, std::shared_ptr<Watchdog>) {
  throw CommError("NCCL: " + nccl_problem());
}

#endif

std::unique_ptr<Comm> make_device_comm(std::shared_ptr<HostTransport> transport,
                                       std::shared_ptr<Watchdog> watchdog) {
  struct Place {
    char host[64] = {}, device[32] = {};
    char problem[96] = {};
    bool operator==(const Place& other) const {
      return std::strcmp(host, other.host) == 0 && std::strcmp(device, other.device) == 0;
    }
  };
  const auto num_ranks = static_cast<size_t>(transport->world_size());
  std::vector<Place> places(num_ranks);
  Place mine;
  gethostname(mine.host, sizeof mine.host - 1);
  cuda_device_id(Context::current()->device()).copy(mine.device, sizeof mine.device - 1);
  if (num_ranks > 1) nccl_problem().copy(mine.problem, sizeof mine.problem - 1);
  transport->all_gather(places.data(), &mine, sizeof mine);
  std::string problem;
  for (size_t i = 0; i < num_ranks && problem.empty(); ++i) {
    problem = places[i].problem;
    for (size_t j = 0; j < i; ++j) {
      if (places[i] == places[j]) problem = fmt::format("ranks {} and {} share a device", j, i);
    }
  }
  if (problem.empty()) return make_nccl_comm(std::move(transport), std::move(watchdog));
  if (transport->rank() == 0) log_warning("collectives go through host memory, since {}", problem);
  return make_staged_comm(std::move(transport), std::move(watchdog));
}

}  // namespace tessera::dist
