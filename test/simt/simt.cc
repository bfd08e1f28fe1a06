// Launches and their settings.
#include "test/simt/simt.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "test/simt/machine.h"

namespace simt {

constinit thread_local Thread* current_thread = nullptr;
constinit thread_local Block* current_block = nullptr;

namespace {

constexpr int64_t kMaxGridX = 2147483647, kMaxGridYz = 65535, kMaxBlock = 1024;

thread_local Settings settings;
Launcher launcher;

std::vector<int64_t> blocks_to_run(const char* name, int64_t num_blocks, const Settings& s) {
  std::vector<int64_t> blocks = s.only_blocks;
  for (int64_t& block : blocks) {
    const int64_t wrapped = block < 0 ? block + num_blocks : block;
    if (wrapped < 0 || wrapped >= num_blocks) {
      throw Error(fmt::format("{}: OnlyBlocks: block {} of a grid of {}", name, block, num_blocks));
    }
    block = wrapped;
  }
  if (blocks.empty()) {
    blocks.resize(static_cast<size_t>(num_blocks));
    std::iota(blocks.begin(), blocks.end(), int64_t{0});
  }
  if (s.order == Order::kReverse) std::reverse(blocks.begin(), blocks.end());
  if (s.order == Order::kRandom) {
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(s.seed));
  }
  return blocks;
}

void check_geometry(const char* name, const Geometry& g) {
  const auto check = [&](bool is_valid, const char* limit) {
    if (is_valid) return;
    throw Error(fmt::format(
        "{}: grid [{}, {}, {}], block [{}, {}, {}], {} bytes of shared memory: "
        "expected {}",
        name, g.grid.x, g.grid.y, g.grid.z, g.block.x, g.block.y, g.block.z, g.smem_bytes, limit));
  };
  check(volume(g.grid) > 0, "at least one block");
  check(g.grid.x <= kMaxGridX, "at most 2147483647 blocks along x");
  check(g.grid.y <= kMaxGridYz && g.grid.z <= kMaxGridYz, "at most 65535 blocks along y and z");
  check(volume(g.block) > 0 && volume(g.block) <= kMaxBlock, "1 to 1024 threads");
  check(volume(g.block) % kWarpSize == 0, "whole warps of 32 threads");
  check(g.smem_bytes <= max_shared_bytes(),
        fmt::format("at most {} bytes of shared memory", max_shared_bytes()).c_str());
}

/// The most dynamic shared memory that each kernel was launched with on each device, and its
/// threads: a line "name device threads bytes". Written at
/// the end of the process to the file that TESSERA_SIMT_LAUNCHES names, for resources.py.
class Launches {
 public:
  ~Launches() {
    const char* path = std::getenv("TESSERA_SIMT_LAUNCHES");
    if (path == nullptr) return;
    std::ofstream file(path);
    for (const auto& [key, most] : most_) {
      file << key.first << ' ' << key.second << ' ' << most.second << ' ' << most.first << '\n';
    }
  }
  void add(const char* name, const Geometry& g) {
    const std::lock_guard lock(mutex_);
    auto& most = most_[{name, settings.device.compute_capability}];
    most = std::max(most, {g.smem_bytes, volume(g.block)});
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, int>, std::pair<size_t, int64_t>> most_;
};
Launches launches;

void run_grid(const char* name, const Geometry& geometry, const std::function<void()>& body,
              const Settings& s) {
  if (current_block != nullptr) throw Error(fmt::format("{}: a launch from inside a kernel", name));
  Machine machine(name, geometry, body);
  struct Restore {
    ~Restore() {
      current_block = nullptr;
      current_thread = nullptr;
    }
  } restore;
  current_block = &machine;
  for (const int64_t block : blocks_to_run(name, volume(geometry.grid), s)) {
    machine.run_block(block, s);
  }
}

}  // namespace

OnDevice::OnDevice(const Device& device) : previous_(std::exchange(settings.device, device)) {}
OnDevice::~OnDevice() {
  settings.device = previous_;
}
size_t max_shared_bytes() {
  return settings.device.max_shared_bytes;
}

Schedule::Schedule(Order order, uint64_t seed)
    : previous_order_(std::exchange(settings.order, order)),
      previous_seed_(std::exchange(settings.seed, seed)) {}

Schedule::~Schedule() {
  settings.order = previous_order_;
  settings.seed = previous_seed_;
}

OnlyBlocks::OnlyBlocks(std::vector<int64_t> blocks)
    : previous_(std::exchange(settings.only_blocks, std::move(blocks))) {}

OnlyBlocks::~OnlyBlocks() {
  settings.only_blocks = std::move(previous_);
}

ReservedBuffer::ReservedBuffer(int64_t nbytes)
    : data_(mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
      nbytes_(nbytes) {
  if (data_ == MAP_FAILED) {
    throw Error(fmt::format("ReservedBuffer: {} bytes of address space are not there", nbytes));
  }
}

ReservedBuffer::~ReservedBuffer() {
  munmap(data_, static_cast<size_t>(nbytes_));
}

void* ReservedBuffer::data() const {
  return data_;
}

void set_launcher(Launcher new_launcher) {
  launcher = std::move(new_launcher);
}

void enqueue(cudaStream_t stream, std::function<void()> work) {
  if (launcher) {
    launcher(stream, std::move(work));
  } else {
    work();
  }
}

void launch(const char* name, const Geometry& geometry, cudaStream_t stream,
            std::function<void()> body) {
  check_geometry(name, geometry);
  launches.add(name, geometry);
  enqueue(stream, [name, geometry, body = std::move(body), s = settings] {
    run_grid(name, geometry, body, s);
  });
}

}  // namespace simt
