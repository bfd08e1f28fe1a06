#include "dist/comm/transport.h"

#include <cstring>
#include <utility>

#include "core/check.h"

namespace tessera::dist {

std::vector<int> HostTransport::world_ranks(const std::vector<int>& ranks) const {
  std::vector<int> result;
  for (const int r : ranks) result.push_back(world_rank(r));
  return result;
}

void HostTransport::run(const CallTag& tag, const Collective& collective) {
  tag_ = tag;
  run_collective(*this, tag, collective);
}

void HostTransport::all_gather(const CallTag& tag, void* full, const void* shard,
                               int64_t shard_nbytes) {
  run(tag,
      {.kind = Collective::Kind::kAllGather, .dst = full, .src = shard, .numel = shard_nbytes});
}

void HostTransport::broadcast(const CallTag& tag, void* data, int64_t nbytes, int root) {
  run(tag, {.kind = Collective::Kind::kBroadcast,
            .dst = data,
            .src = data,
            .numel = nbytes,
            .root = root});
}

void HostTransport::start(const Messages&) {
  throw InternalError("HostTransport: messages between ranks that all meet at one board");
}

void HostTransport::copy(void* dst, const void* src, int64_t nbytes) {
  if (dst != src && nbytes > 0) std::memcpy(dst, src, static_cast<size_t>(nbytes));
}

CommGroup HostTransport::make_child_group(int color, const std::vector<int>& ranks,
                                          int child_rank) {
  auto child_ranks = std::make_shared<std::vector<int>>(world_ranks(ranks));
  CommGroup child = group_.of_its_own(fmt::format("split {} {}", num_splits_++, color).c_str());
  child.world_rank = (*child_ranks)[static_cast<size_t>(child_rank)];
  child.world_ranks = std::move(child_ranks);
  return child;
}

}  // namespace tessera::dist
