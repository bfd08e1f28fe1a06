#include "core/runtime/cpu/quota.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace tessera {
namespace {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (;;) {
    const size_t end = text.find(separator);
    parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

bool contains(const std::vector<std::string>& all, std::string_view one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

/// A positive number of microseconds; nothing for "max", -1 and what is no number.
std::optional<double> parse_us(std::string_view text) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value <= 0) return std::nullopt;
  return static_cast<double>(value);
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// Processors that the group in `dir` may use; 0 for any number.
double read_quota(const std::string& dir, bool is_v2) {
  std::optional<double> quota, period;
  if (is_v2) {
    const auto words = split(first_line(dir + "/cpu.max"), ' ');  // "150000 100000"
    if (words.size() == 2) quota = parse_us(words[0]), period = parse_us(words[1]);
  } else {
    quota = parse_us(first_line(dir + "/cpu.cfs_quota_us"));
    period = parse_us(first_line(dir + "/cpu.cfs_period_us"));
  }
  return quota && period ? *quota / *period : 0;
}

/// A hierarchy of groups that may limit processor time, and where this process is in it.
struct Hierarchy {
  bool is_v2 = false;
  std::string group;              // as /proc/self/cgroup names it
  std::string mount, mount_root;  // a directory, and which group it is
};

std::vector<Hierarchy> find_hierarchies(const std::string& root) {
  std::vector<Hierarchy> found;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "4:cpu,cpuacct:/a/b" or "0::/a/b"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = line.substr(0, first) == "0" && controllers.empty();
    if (is_v2 || contains(split(controllers, ','), "cpu")) {
      found.push_back({is_v2, line.substr(second + 1), "", ""});
    }
  }
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    // "33 31 0:30 ROOT MOUNT options [more] - TYPE source OPTIONS"
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto before = split(line.substr(0, dash), ' ');
    const auto after = split(line.substr(dash + 3), ' ');
    if (before.size() < 5 || after.size() < 3) continue;
    for (Hierarchy& h : found) {
      const bool is_its = h.is_v2 ? after[0] == "cgroup2"
                                  : after[0] == "cgroup" && contains(split(after[2], ','), "cpu");
      if (is_its && h.mount.empty()) h.mount_root = before[3], h.mount = before[4];
    }
  }
  return found;
}

}  // namespace

CpuQuota find_cpu_quota(const std::string& root) {
  CpuQuota quota;
  for (const Hierarchy& h : find_hierarchies(root)) {
    if (h.mount.empty()) continue;
    // In a container the mount may begin at the own group, or at one that the path does not name.
    std::string below = h.group;
    if (h.mount_root != "/") {
      const bool is_below = below.compare(0, h.mount_root.size(), h.mount_root) == 0;
      below = is_below ? below.substr(h.mount_root.size()) : "";
    }
    if (below[0] != '/' || below.find("..") != std::string::npos) below.clear();
    for (;;) {
      const std::string dir = root + h.mount + below;
      const double processors = read_quota(dir, h.is_v2);
      if (processors > 0 && (quota.processors == 0 || processors < quota.processors)) {
        struct stat status {};
        const bool is_there = ::stat(dir.c_str(), &status) == 0;
        quota = {processors, dir,
                 is_there ? status.st_dev * 0x9e3779b97f4a7c15u + status.st_ino : 1};
      }
      if (below.empty() || below == "/") break;
      below.resize(below.rfind('/'));
    }
  }
  return quota;
}

int num_quota_threads(double processors) {
  return std::max(1, static_cast<int>(std::min(processors, 1e6) + 1e-6));
}

}  // namespace tessera
