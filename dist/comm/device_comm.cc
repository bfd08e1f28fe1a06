#include "dist/comm/device_comm.h"

#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/log.h"
#include "core/runtime/context.h"
#include "core/runtime/cuda/cuda.h"
#include "dist/comm/nccl.h"
#include "dist/comm/staged_comm.h"

namespace tessera::dist {

std::unique_ptr<Comm> make_device_comm(std::shared_ptr<HostTransport> transport,
                                       std::shared_ptr<Watchdog> watchdog) {
  struct Place {
    char host[64] = {}, device[32] = {};
    char problem[512] = {};
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
  transport->all_gather({}, places.data(), &mine, sizeof mine);
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
