#include "core/runtime/cpu/affinity.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/check.h"

namespace tessera {
namespace {

std::vector<int> find_allowed() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> processors;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(i, &set)) processors.push_back(i);
    }
  }
  if (processors.empty()) processors.push_back(0);
  return processors;
}

/// 0 or the error.
int pin_this_thread(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

}  // namespace

const std::vector<int>& allowed_processors() {
  static const std::vector<int> processors = find_allowed();
  return processors;
}

const CpuQuota& cpu_quota() {
  static const CpuQuota quota = find_cpu_quota();
  return quota;
}

int num_usable_processors() {
  const int allowed = num_allowed_processors();
  const double quota = cpu_quota().processors;
  return quota > 0 ? std::min(allowed, num_quota_threads(quota)) : allowed;
}

void pin_threads(const Stream& stream, const std::vector<int>& processors) {
  allowed_processors();  // before a thread of ours has fewer
  stream.submit("pin_threads", [processors] {
    std::atomic<int> error{0};
#pragma omp parallel num_threads(static_cast <int>(processors.size()))
    {
      const auto i = static_cast<size_t>(omp_get_thread_num());
      if (const int mine = pin_this_thread(processors[i]); mine != 0) error = mine;
    }
    if (error != 0) throw Error(fmt::format("pin_threads: {}", std::strerror(error)));
  });
}

}  // namespace tessera
