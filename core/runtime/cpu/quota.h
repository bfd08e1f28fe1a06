#pragma once

#include <cstdint>
#include <string>

namespace tessera {

/// The processor time that control groups of Linux grant this process: a container may see 64
/// processors and have the time of two.
struct CpuQuota {
  double processors = 0;  ///< as many may run all the time; 0: no limit
  std::string group;      ///< the directory of the group that limits
  uint64_t group_id = 0;  ///< the same for all processes that share its time
};

/// The smallest quota of the process's own group and the groups around it, version 1
/// (cpu.cfs_quota_us over cpu.cfs_period_us) and 2 (cpu.max). What cannot be read or understood
/// limits nothing. `root`: the directory that holds proc and sys, for tests.
CpuQuota find_cpu_quota(const std::string& root = "");

/// Threads that a quota of so many processors has time for: whole ones, since threads that work in
/// step all wait for the one whose time is used up; at least one.
int num_quota_threads(double processors);

}  // namespace tessera
