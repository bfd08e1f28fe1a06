#include "dist/comm/clocks.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>
#include <string>
#include <thread>

#include "core/profiler.h"
#include "dist/comm/control.h"

namespace tessera::dist {
namespace {

/// The same for processes that read the same steady clock.
std::string clock_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  char time_namespace[128] = {};
  if (::readlink("/proc/self/ns/time", time_namespace, sizeof time_namespace - 1) < 0) return boot;
  return boot + " " + time_namespace;
}

}  // namespace

ClockOffset clock_offset(std::span<const ClockExchange> exchanges) {
  int64_t most = std::numeric_limits<int64_t>::max(), least = std::numeric_limits<int64_t>::min();
  for (const ClockExchange& e : exchanges) {
    most = std::min(most, e.received_ns - e.other_sent_ns);
    least = std::max(least, e.sent_ns - e.other_received_ns);
  }
  return {least + (most - least) / 2, (most - least + 1) / 2};
}

ClockOffset measure_clock(Control& control) {
  const std::vector<std::string> identities = control.all_gather(clock_identity());
  const bool is_one = std::all_of(identities.begin(), identities.end(), [&](const std::string& id) {
    return !id.empty() && id == identities[0];
  });
  if (is_one) return {};
  const int world_size = control.world_size(), rank = control.rank();
  constexpr int kTimesLast = 4;
  std::vector<ClockExchange> exchanges;
  std::vector<int64_t> sent(static_cast<size_t>(world_size)), received(sent);
  for (int round = 0; round < kTimesLast * world_size; ++round) {
    // For the message of whoever comes last all others wait: they read it as soon as it is there.
    if (round % world_size == rank) std::this_thread::sleep_for(std::chrono::microseconds(200));
    const int64_t mine = profiler::now_ns();
    control.all_gather(sent.data(), &mine, sizeof mine, "clocks");
    const int64_t now = profiler::now_ns();
    control.all_gather(received.data(), &now, sizeof now, "clocks");
    exchanges.push_back({mine, now, sent[0], received[0]});
  }
  if (rank == 0) return {};
  return clock_offset(exchanges);
}

}  // namespace tessera::dist
