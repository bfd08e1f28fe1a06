#include "core/runtime/cpu/quota.h"

#include <filesystem>

#include "core/runtime/cpu/affinity.h"
#include "test/temp_dir.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::TempDir;

/// A machine with the control groups that `files` describe, path below / and text.
CpuQuota quota_of(const std::vector<std::pair<std::string, std::string>>& files,
                  std::string* where = nullptr) {
  const TempDir root;
  for (const auto& [path, text] : files) {
    std::filesystem::create_directories(std::filesystem::path(root / path).parent_path());
    root.write(path, text);
  }
  CpuQuota quota = find_cpu_quota(root.path());
  if (where != nullptr && !quota.group.empty()) *where = quota.group.substr(root.path().size());
  return quota;
}

const std::pair<std::string, std::string> kMountV2{
    "proc/self/mountinfo",
    "23 1 8:1 / / rw - ext4 /dev/sda rw\n"
    "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n"};

TEST_CASE("cpu_quota: version 2: the smallest of the group and those around it", "[cpu_quota]") {
  std::string where;
  const std::pair<std::string, std::string> group{"proc/self/cgroup", "0::/a/b/c\n"};
  CHECK(quota_of({kMountV2, group, {"sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n"}}).processors ==
        0);
  CHECK(quota_of({kMountV2,
                  group,
                  {"sys/fs/cgroup/a/b/c/cpu.max", "350000 100000\n"},
                  {"sys/fs/cgroup/a/b/cpu.max", "50000 20000\n"},
                  {"sys/fs/cgroup/a/cpu.max", "max 100000\n"}},
                 &where)
            .processors == 2.5);
  CHECK(where == "/sys/fs/cgroup/a/b");
  CHECK(quota_of({kMountV2, group, {"sys/fs/cgroup/a/b/c/cpu.max", "150000 100000\n"}}, &where)
            .processors == 1.5);
  CHECK(where == "/sys/fs/cgroup/a/b/c");
  CHECK(
      quota_of({kMountV2, group, {"sys/fs/cgroup/other/cpu.max", "150000 100000\n"}}).processors ==
      0);
  // In a container: the root of what is seen.
  CHECK(
      quota_of(
          {kMountV2, {"proc/self/cgroup", "0::/\n"}, {"sys/fs/cgroup/cpu.max", "400000 100000\n"}})
          .processors == 4);
  CHECK(quota_of({kMountV2,
                  {"proc/self/cgroup", "0::/../../a\n"},
                  {"sys/fs/cgroup/cpu.max", "400000 100000\n"}})
            .processors == 4);
}

TEST_CASE("cpu_quota: version 1: quota over period, from the mount of the controller cpu",
          "[cpu_quota]") {
  const std::pair<std::string, std::string> mounts{
      "proc/self/mountinfo",
      "31 30 0:28 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
      "32 31 0:29 /docker/x /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
      "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"};
  const std::pair<std::string, std::string> group{
      "proc/self/cgroup", "9:memory:/docker/x\n4:cpu,cpuacct:/docker/x/job\n0::/\n"};
  const std::string dir = "sys/fs/cgroup/cpu,cpuacct/";
  CHECK(quota_of({mounts,
                  group,
                  {dir + "job/cpu.cfs_quota_us", "-1\n"},
                  {dir + "job/cpu.cfs_period_us", "100000\n"},
                  {dir + "cpu.cfs_quota_us", "300000\n"},
                  {dir + "cpu.cfs_period_us", "100000\n"}})
            .processors == 3);
  CHECK(quota_of({mounts,
                  group,
                  {dir + "job/cpu.cfs_quota_us", "25000\n"},
                  {dir + "job/cpu.cfs_period_us", "50000\n"}})
            .processors == 0.5);
}

TEST_CASE("cpu_quota: what is missing or no number limits nothing", "[cpu_quota]") {
  const std::pair<std::string, std::string> group{"proc/self/cgroup", "0::/a\n"};
  CHECK(quota_of({}).processors == 0);
  CHECK(quota_of({group}).processors == 0);
  CHECK(quota_of({kMountV2}).processors == 0);
  CHECK(quota_of({kMountV2, {"proc/self/cgroup", "\n:\n0:\n0::\n"}}).processors == 0);
  for (const char* text : {"", "max", "100000", "x 100000", "100000 0", "-5 100000",
                           "100000 100000 1", "99999999999999999999 100000"}) {
    CAPTURE(text);
    CHECK(quota_of({kMountV2, group, {"sys/fs/cgroup/a/cpu.max", text}}).processors == 0);
  }
}

TEST_CASE("cpu_quota: whole threads, at least one; as many as this process may use",
          "[cpu_quota]") {
  CHECK(num_quota_threads(0.3) == 1);
  CHECK(num_quota_threads(1.99) == 1);
  CHECK(num_quota_threads(2) == 2);
  CHECK(num_quota_threads(3.5) == 3);
  CHECK(num_quota_threads(1e12) == 1'000'000);
  CHECK(num_usable_processors() >= 1);
  CHECK(num_usable_processors() <= num_allowed_processors());
  if (cpu_quota().processors == 0) CHECK(num_usable_processors() == num_allowed_processors());
}

TEST_CASE("cpu_quota: processes of one group know that they share its time", "[cpu_quota]") {
  const TempDir root;
  for (const char* dir : {"proc/self", "sys/fs/cgroup/a/1", "sys/fs/cgroup/a/2"}) {
    std::filesystem::create_directories(root / dir);
  }
  root.write(kMountV2.first, kMountV2.second);
  root.write("sys/fs/cgroup/a/cpu.max", "200000 100000\n");
  const auto id_in = [&](const std::string& group) {
    root.write("proc/self/cgroup", "0::" + group + "\n");
    return find_cpu_quota(root.path()).group_id;
  };
  const uint64_t first = id_in("/a/1");
  CHECK(first != 0);
  CHECK(id_in("/a/2") == first);
  root.write("sys/fs/cgroup/a/2/cpu.max", "100000 100000\n");
  CHECK(id_in("/a/2") != first);
}

}  // namespace
}  // namespace tessera
