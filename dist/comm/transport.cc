#include "dist/comm/transport.h"

#include <map>
#include <mutex>

#include "core/random.h"
#include "core/runtime/context.h"

namespace tessera::dist {

namespace {

int64_t nbytes_of(int64_t numel, DType dtype) {
  return numel * static_cast<int64_t>(size_of(dtype));
}

/// "all_gather blocks.3": what a timeline shows. Lives for ever.
const char* trace_name(const char* op, const char* unit) {
  if (*unit == '\0') return op;
  static std::mutex mutex;
  static auto* names = new std::map<std::pair<std::string, std::string>, std::string>;
  const std::lock_guard lock(mutex);
  std::string& name = (*names)[{op, unit}];
  if (name.empty()) name = fmt::format("{} {}", op, unit);
  return name.c_str();
}

}  // namespace

CallTag::CallTag(int64_t sequence, const char* op, const CollectiveInfo& info)
    : sequence(sequence), op(op), phase(info.phase), unit(info.unit) {
  hash = hash_name(op) * 0x100000001b3u;
  hash = (hash ^ hash_name(phase)) * 0x100000001b3u;
  hash ^= hash_name(unit);
}

std::string CallTag::to_string() const {
  std::string text = op;
  if (*unit != '\0') text += fmt::format(" of {}", unit);
  if (*phase != '\0') text += fmt::format(", {}", phase);
  return text;
}

CommGroup HostTransport::make_child_group(int color, const std::vector<int>& ranks,
                                          int child_rank) {
  auto world_ranks = std::make_shared<std::vector<int>>();
  for (const int r : ranks) world_ranks->push_back(world_rank(r));
  CommGroup child = group_.of_its_own(fmt::format("split {} {}", num_splits_++, color).c_str());
  child.world_rank = (*world_ranks)[static_cast<size_t>(child_rank)];
  child.world_ranks = std::move(world_ranks);
  return child;
}

HostComm::HostComm(std::shared_ptr<HostTransport> transport, std::shared_ptr<Watchdog> watchdog)
    : transport_(std::move(transport)),
      watchdog_(std::move(watchdog)),
      log_(watchdog_->make_log(transport_->group())) {}

template <class F>
void HostComm::enqueue(const Stream& stream, const char* op, int64_t nbytes,
                       const CollectiveInfo& info, const Cost& cost, F call) {
  if (stream.device().type != DeviceType::kCpu) {
    TESSERA_UNIMPLEMENTED("{}: this communicator moves host memory, the stream is on {}", op,
                          stream.device());
  }
  stream.declare(op, cost);
  const CallTag tag(next_sequence_++, op, info);
  stream.submit(trace_name(op, info.unit),
                [transport = transport_, log = log_, tag, nbytes, info, call] {
                  const CollectiveScope scope(*log, tag.op, info, nbytes);
                  transport->set_tag(tag);
                  call(*transport);
                });
}

void HostComm::all_gather(const Stream& stream, void* full, const void* shard, int64_t shard_numel,
                          DType dtype, const CollectiveInfo& info) {
  const int64_t nbytes = nbytes_of(shard_numel, dtype);
  enqueue(stream, "all_gather", nbytes, info,
          Cost().read(shard, nbytes).write(full, nbytes * world_size()),
          [=](HostTransport& t) { t.all_gather(full, shard, nbytes); });
}

void HostComm::reduce_scatter(const Stream& stream, void* shard, const void* full,
                              int64_t shard_numel, DType wire, DType out, bool accumulate,
                              void* staging, const CollectiveInfo& info) {
  TESSERA_CHECK_DTYPE(is_floating(wire) && is_floating(out),
                      "reduce_scatter: wire and out must be floating, got {} and {}", wire, out);
  const int64_t full_nbytes = nbytes_of(shard_numel, wire) * world_size();
  Cost cost(static_cast<double>(shard_numel) * (world_size() - 1 + (accumulate ? 1 : 0)));
  const int64_t staging_nbytes =
      staging == nullptr
          ? 0
          : reduce_scatter_staging_nbytes(shard_numel, wire, transport_->is_shared(full));
  cost.read(full, full_nbytes)
      .write(staging, staging_nbytes)
      .write_or_accumulate(shard, nbytes_of(shard_numel, out), accumulate);
  const ReduceScatterCall call{shard, full, shard_numel, wire, out, accumulate, staging};
  enqueue(stream, "reduce_scatter", full_nbytes, info, cost,
          [call](HostTransport& t) { t.reduce_scatter(call); });
}

int64_t HostComm::reduce_scatter_staging_nbytes(int64_t shard_numel, DType wire,
                                                bool full_is_allocated) const {
  return transport_->reduce_scatter_staging_nbytes(shard_numel, wire, full_is_allocated);
}

void HostComm::all_reduce(const Stream& stream, void* data, int64_t numel, DType dtype,
                          void* staging, const CollectiveInfo& info) {
  TESSERA_CHECK_DTYPE(is_floating(dtype), "all_reduce: expected a floating dtype, got {}", dtype);
  enqueue_all_reduce(stream, "all_reduce", {data, numel, dtype, Reduction::kSum, staging}, info);
}

void HostComm::all_reduce_max(const Stream& stream, void* data, int64_t numel, DType dtype,
                              void* staging, const CollectiveInfo& info) {
  TESSERA_CHECK_DTYPE(dtype == kF32 || dtype == kI32 || dtype == kU8,
                      "all_reduce_max: expected f32, i32 or u8, got {}", dtype);
  enqueue_all_reduce(stream, "all_reduce_max", {data, numel, dtype, Reduction::kMax, staging},
                     info);
}

void HostComm::enqueue_all_reduce(const Stream& stream, const char* op, const AllReduceCall& call,
                                  const CollectiveInfo& info) {
  const int64_t nbytes = nbytes_of(call.numel, call.dtype);
  Cost cost(static_cast<double>(call.numel) * (world_size() - 1));
  cost.read(call.data, nbytes)
      .write(call.data, nbytes)
      .write(call.staging, all_reduce_staging_nbytes(call.numel, call.dtype));
  enqueue(stream, op, nbytes, info, cost, [call](HostTransport& t) { t.all_reduce(call); });
}

int64_t HostComm::all_reduce_staging_nbytes(int64_t numel, DType dtype) const {
  return transport_->all_reduce_staging_nbytes(numel, dtype);
}

void HostComm::broadcast(const Stream& stream, void* data, int64_t nbytes, int root,
                         const CollectiveInfo& info) {
  TESSERA_CHECK(root >= 0 && root < world_size(), "broadcast: root {} is not in [0, {})", root,
                world_size());
  const Cost cost = root == rank() ? Cost().read(data, nbytes) : Cost().write(data, nbytes);
  enqueue(stream, "broadcast", nbytes, info, cost,
          [=](HostTransport& t) { t.broadcast(data, nbytes, root); });
}

std::shared_ptr<Storage> HostComm::allocate(int64_t nbytes, MemoryClass memory_class) {
  auto storage =
      std::make_shared<Storage>(static_cast<size_t>(nbytes), Context::current()->device());
  if (nbytes == 0) return storage;
  if (auto shared = transport_->shared_memory()) {
    storage->materialize_segment(std::move(shared), memory_class);
  } else {
    storage->materialize(memory_class);
  }
  return storage;
}

std::unique_ptr<Comm> HostComm::split(int color, int key) {
  TESSERA_CHECK(color >= 0, "split: expected a color that is not negative, got {}", color);
  return std::make_unique<HostComm>(transport_->split(color, key), watchdog_);
}

std::unique_ptr<Comm> HostComm::duplicate() {
  return split(0, rank());
}

void HostComm::abort(const std::string& reason) noexcept {
  transport_->abort(reason);
}

}  // namespace tessera::dist
