#include "dist/comm/comm.h"

#include <utility>

#include "core/runtime/context.h"
#include "dist/comm/collective.h"
#include "dist/comm/transport.h"
#include "dist/comm/watchdog.h"

namespace tessera::dist {

using Kind = Collective::Kind;

Comm::Comm(std::shared_ptr<HostTransport> transport, std::shared_ptr<Watchdog> watchdog,
           DeviceType device_type)
    : transport_(std::move(transport)),
      watchdog_(std::move(watchdog)),
      log_(watchdog_->make_log(transport_->group())),
      device_type_(device_type) {}

Comm::~Comm() = default;

int Comm::rank() const {
  return transport_->rank();
}
int Comm::world_size() const {
  return transport_->world_size();
}

void Comm::all_gather(const Stream& stream, void* full, const void* shard, int64_t shard_numel,
                      DType dtype, const CollectiveInfo& info) {
  run(stream,
      {.kind = Kind::kAllGather,
       .dst = full,
       .src = shard,
       .numel = shard_numel,
       .wire = dtype,
       .out = dtype},
      info);
}

void Comm::reduce_scatter(const Stream& stream, void* shard, const void* full, int64_t shard_numel,
                          DType wire, DType out, bool accumulate, void* staging,
                          const CollectiveInfo& info) {
  TESSERA_CHECK_DTYPE(is_floating(wire) && is_floating(out),
                      "reduce_scatter: wire and out must be floating, got {} and {}", wire, out);
  run(stream,
      {.kind = Kind::kReduceScatter,
       .dst = shard,
       .src = full,
       .numel = shard_numel,
       .wire = wire,
       .out = out,
       .accumulate = accumulate,
       .staging = staging},
      info);
}

int64_t Comm::reduce_scatter_staging_nbytes(int64_t shard_numel, DType wire,
                                            bool full_is_allocated) const {
  return do_staging_nbytes({.kind = Kind::kReduceScatter, .numel = shard_numel, .wire = wire},
                           full_is_allocated);
}

void Comm::all_reduce(const Stream& stream, void* data, int64_t numel, DType dtype, void* staging,
                      const CollectiveInfo& info) {
  TESSERA_CHECK_DTYPE(is_floating(dtype), "all_reduce: expected a floating dtype, got {}", dtype);
  run(stream,
      {.kind = Kind::kAllReduce,
       .dst = data,
       .src = data,
       .numel = numel,
       .wire = dtype,
       .out = dtype,
       .staging = staging},
      info);
}

int64_t Comm::all_reduce_staging_nbytes(int64_t numel, DType dtype) const {
  return do_staging_nbytes({.kind = Kind::kAllReduce, .numel = numel, .wire = dtype}, false);
}

void Comm::run(const Stream& stream, const Collective& collective, const CollectiveInfo& info) {
  const char* const op = collective.op();
  TESSERA_CHECK(collective.numel >= 0, "{}: expected a number of elements, got {}", op,
                collective.numel);
  const bool is_on_cpu = device_type_ == DeviceType::kCpu;
  if (stream.device().type != device_type_) {
    TESSERA_UNIMPLEMENTED("{}: this communicator moves {} memory, the stream is on {}", op,
                          is_on_cpu ? "host" : "CUDA", stream.device());
  }
  const DType wire = collective.wire, out = collective.out;
  if (!is_on_cpu && wire != out && (wire == kF64 || out == kF64))
    TESSERA_UNIMPLEMENTED("{}: no sum of {} into {} on CUDA", op, wire, out);
  if (stream.is_observed()) {
    const int64_t staging_nbytes =
        collective.staging == nullptr
            ? 0
            : do_staging_nbytes(collective, transport_->is_shared(collective.src));
    stream.declare(op, collective.cost(world_size(), staging_nbytes));
  }
  const CallTag tag(next_sequence_++, op, info);
  do_run({stream, collective, tag, info, collective.src_nbytes(world_size())});
}

std::shared_ptr<Storage> Comm::allocate(int64_t nbytes, MemoryClass memory_class) {
  TESSERA_CHECK(nbytes >= 0, "allocate: expected a number of bytes, got {}", nbytes);
  auto storage =
      std::make_shared<Storage>(static_cast<size_t>(nbytes), Context::current()->device());
  if (nbytes == 0) return storage;
  if (auto memory = do_memory(nbytes)) {
    storage->materialize_segment(std::move(memory), memory_class);
  } else {
    storage->materialize(memory_class);
  }
  return storage;
}

std::unique_ptr<Comm> Comm::split(int color, int key) {
  TESSERA_CHECK(color >= 0, "split: expected a color that is not negative, got {}", color);
  return do_split(transport_->split(color, key), color, key);
}

std::unique_ptr<Comm> Comm::duplicate() {
  return split(0, rank());
}

void Comm::abort(const std::string& reason) noexcept {
  transport_->abort(reason);
  do_abort();
}

}  // namespace tessera::dist
