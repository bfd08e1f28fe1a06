#include "core/runtime/allocator.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/log.h"
#include "core/profiler.h"
#include "core/runtime/memory_timeline.h"

namespace tessera {
namespace {

constexpr size_t kGranule = 512;
constexpr size_t kSegmentNbytes = size_t{2} << 20;  // also the size of a huge page
constexpr size_t kSmallNbytes = size_t{1} << 20;    // blocks up to this share 2 MiB segments

thread_local MemoryClass memory_class_now = MemoryClass::kActivations;

size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

class CpuBackend final : public MemoryBackend {
 public:
  void* allocate(size_t nbytes) override {
    // Aligned to a huge page by hand: mmap aligns to 4 KiB only.
    const size_t padded = nbytes + kSegmentNbytes;
    void* raw = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    const auto address = reinterpret_cast<uintptr_t>(raw);
    const uintptr_t aligned = round_up(address, kSegmentNbytes);
    if (aligned > address) munmap(raw, aligned - address);
    const uintptr_t end = address + padded;
    if (aligned + nbytes < end)
      munmap(reinterpret_cast<void*>(aligned + nbytes), end - aligned - nbytes);
    void* data = reinterpret_cast<void*>(aligned);
    // Whole huge pages only, so that resident memory stays what was asked for.
    if (nbytes >= kSegmentNbytes)
      madvise(data, nbytes / kSegmentNbytes * kSegmentNbytes, MADV_HUGEPAGE);
    return data;
  }
  void free(void* data, size_t nbytes) noexcept override { munmap(data, nbytes); }
};

/// What this process may still take: of the machine's memory, or of its own limit (`ulimit -v`). -1
/// if the system does not say.
int64_t free_host_nbytes() {
  int64_t available = -1;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; available < 0 && std::getline(meminfo, line);) {
    constexpr std::string_view kKey = "MemAvailable:";
    if (line.starts_with(kKey)) available = std::atoll(line.c_str() + kKey.size()) * 1024;
  }
  rlimit limit{};
  int64_t used_pages = 0;
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      !(std::ifstream("/proc/self/statm") >> used_pages)) {
    return available;
  }
  const int64_t left = static_cast<int64_t>(limit.rlim_cur) -
                       used_pages * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  return available < 0 ? left : std::min(available, left);
}

}  // namespace

std::unique_ptr<MemoryBackend> make_cpu_backend() {
  return std::make_unique<CpuBackend>();
}

const char* name_of(MemoryClass memory_class) {
  switch (memory_class) {
    case MemoryClass::kParameters:
      return "parameters";
    case MemoryClass::kGradients:
      return "gradients";
    case MemoryClass::kOptimizer:
      return "optimizer";
    case MemoryClass::kGathered:
      return "gathered units";
    case MemoryClass::kActivations:
      return "activations";
    case MemoryClass::kOther:
      return "other";
  }
  return "?";
}

MemoryScope::MemoryScope(MemoryClass memory_class) : previous_(memory_class_now) {
  memory_class_now = memory_class;
}
MemoryScope::~MemoryScope() {
  memory_class_now = previous_;
}
MemoryClass MemoryScope::current() {
  return memory_class_now;
}

int64_t parse_nbytes(std::string_view text) {
  if (text.empty() || text == "none") return 0;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  const std::pair<const char*, double> units[] = {{"", 1.0},       {"B", 1.0},      {"KiB", 0x1p10},
                                                  {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
                                                  {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9}};
  for (const auto& [name, factor] : units) {
    if (error == std::errc() && unit == name && value >= 0 && value * factor < 0x1p62) {
      return static_cast<int64_t>(value * factor);
    }
  }
  throw ConfigError(fmt::format(
      "\"{}\" is not a number of bytes such as \"512MiB\", \"2GiB\" or \"none\"", text));
}

std::string format_nbytes(int64_t nbytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(nbytes);
  int unit = 0;
  while (std::fabs(value) >= 1024 && unit < 4) value /= 1024, ++unit;
  return unit == 0 ? fmt::format("{} B", nbytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

struct Allocator::Block {
  char* data;
  size_t nbytes;
  bool is_small;  // its segment serves small requests
  Stream stream;
  MemoryClass memory_class = MemoryClass::kOther;
  bool is_free = false;
  std::shared_ptr<MemoryBackend> own_backend = nullptr;  // of allocate_segment
  Block *previous = nullptr, *next = nullptr;            // neighbours in the segment

  bool is_whole_segment() const { return previous == nullptr && next == nullptr; }
};

struct Allocator::State {
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return a->nbytes != b->nbytes ? a->nbytes < b->nbytes : a->data < b->data;
    }
  };
  using Pool = std::set<Block*, BySize>;
  struct PoolKey {
    int stream_id;
    bool is_small;
    auto operator<=>(const PoolKey&) const = default;
  };

  std::unique_ptr<MemoryBackend> backend;
  mutable std::mutex mutex;
  std::map<PoolKey, Pool> free_blocks;
  AllocatorStats stats;
  Advice advice;
  const Allocator* owner = nullptr;
  int traced_for = -1;  // whose counter of memory this is; -1: nobody's

  Pool& pool_of(const Block& b) { return free_blocks[{b.stream.id(), b.is_small}]; }
  Block* take_cached(size_t nbytes, PoolKey pool_key);
  Block* new_segment(size_t nbytes, const Stream& stream, const Options& options);
  void split(Block* block, size_t nbytes, const Options& options);
  void count(const Block& block, int64_t sign);
  std::vector<Block*> cached_segments() const;
};

Allocator::Allocator(std::unique_ptr<MemoryBackend> backend, const Options& options)
    : options_(options), state_(std::make_unique<State>()) {
  state_->backend = std::move(backend);
  state_->owner = this;
  if (options.is_traced) state_->traced_for = profiler::thread_owner();
}

Allocator::~Allocator() {
  try {
    empty_cache();
  } catch (...) {
    log_error("allocator {}: could not give its cache back", options_.name);
  }
  if (state_->stats.allocated != 0) {
    log_error("allocator {}: ended with {} still in use", options_.name,
              format_nbytes(state_->stats.allocated));
  }
}

Allocator::Block* Allocator::State::take_cached(size_t nbytes, PoolKey pool_key) {
  const auto pool = free_blocks.find(pool_key);
  if (pool == free_blocks.end()) return nullptr;
  Block probe{};
  probe.nbytes = nbytes;
  const auto it = pool->second.lower_bound(&probe);
  if (it == pool->second.end()) return nullptr;
  Block* block = *it;
  pool->second.erase(it);
  return block;
}

Allocator::Block* Allocator::State::new_segment(size_t nbytes, const Stream& stream,
                                                const Options& options) {
  const bool is_small = nbytes <= kSmallNbytes;
  const size_t segment_nbytes = is_small ? kSegmentNbytes : round_up(nbytes, 4096);
  const auto reserved = stats.reserved + static_cast<int64_t>(segment_nbytes);
  if (options.limit > 0 && reserved > options.limit) return nullptr;
  void* data = backend->allocate(segment_nbytes);
  if (data == nullptr) return nullptr;
  ++stats.num_backend_allocations;
  stats.reserved = reserved;
  stats.peak_reserved = std::max(stats.peak_reserved, reserved);
  if (options.poison) stream.fill_bytes("poison", data, 0xff, segment_nbytes);
  return new Block{static_cast<char*>(data), segment_nbytes, is_small, stream};
}

void Allocator::State::split(Block* block, size_t nbytes, const Options& options) {
  const size_t rest = block->nbytes - nbytes;
  const size_t least = std::max(static_cast<size_t>(options.split_nbytes), kGranule);
  if (rest < (block->is_small ? kGranule : least)) return;
  auto* tail = new Block(*block);
  tail->data += nbytes;
  tail->nbytes = rest;
  tail->is_free = true;
  tail->previous = block;
  if (tail->next != nullptr) tail->next->previous = tail;
  block->next = tail;
  block->nbytes = nbytes;
  pool_of(*tail).insert(tail);
}

void Allocator::State::count(const Block& block, int64_t sign) {
  const int64_t nbytes = sign * static_cast<int64_t>(block.nbytes);
  stats.allocated += nbytes;
  stats.allocated_by_class[static_cast<size_t>(block.memory_class)] += nbytes;
  if (stats.allocated > stats.peak_allocated) {
    stats.peak_allocated = stats.allocated;
    stats.peak_by_class = stats.allocated_by_class;
  }
  MemoryTimeline::note(owner, stats.allocated_by_class);
  if (profiler::is_on() && traced_for >= 0) {
    static_assert(kNumMemoryClasses == profiler::kNumCounters);
    profiler::add_counter({traced_for, profiler::now_ns(), stats.allocated_by_class});
  }
}

std::vector<Allocator::Block*> Allocator::State::cached_segments() const {
  std::vector<Block*> whole;
  for (const auto& [_, pool] : free_blocks) {
    for (Block* block : pool) {
      if (block->is_whole_segment()) whole.push_back(block);
    }
  }
  return whole;
}

Allocator::Block* Allocator::allocate(size_t nbytes, const Stream& stream,
                                      MemoryClass memory_class) {
  const size_t rounded = round_up(std::max<size_t>(nbytes, 1), kGranule);
  for (int attempt = 0; attempt < 2; ++attempt) {
    {
      std::lock_guard lock(state_->mutex);
      Block* block = state_->take_cached(rounded, {stream.id(), rounded <= kSmallNbytes});
      if (block == nullptr) block = state_->new_segment(rounded, stream, options_);
      if (block != nullptr) {
        block->is_free = false;
        state_->split(block, rounded, options_);
        block->memory_class = memory_class;
        state_->count(*block, 1);
        ++state_->stats.num_allocations;
        return block;
      }
    }
    if (attempt == 0) empty_cache();  // fragments may be in the way
  }
  throw_out_of_memory(nbytes, memory_class);
}

Allocator::Block* Allocator::allocate_segment(std::shared_ptr<MemoryBackend> backend, size_t nbytes,
                                              const Stream& stream, MemoryClass memory_class) {
  const size_t rounded = round_up(std::max<size_t>(nbytes, 1), kGranule);
  const auto count = static_cast<int64_t>(rounded);
  for (int attempt = 0; attempt < 2; ++attempt) {
    {
      std::lock_guard lock(state_->mutex);
      AllocatorStats& s = state_->stats;
      const bool fits = options_.limit == 0 || s.reserved + count <= options_.limit;
      if (void* data = fits ? backend->allocate(rounded) : nullptr; data != nullptr) {
        ++s.num_backend_allocations;
        ++s.num_allocations;
        s.reserved += count;
        s.peak_reserved = std::max(s.peak_reserved, s.reserved);
        auto* block = new Block{static_cast<char*>(data), rounded, false, stream, memory_class};
        block->own_backend = std::move(backend);
        state_->count(*block, 1);
        if (options_.poison) stream.fill_bytes("poison", data, 0xff, rounded);
        return block;
      }
    }
    if (attempt == 0) empty_cache();
  }
  throw_out_of_memory(nbytes, memory_class);
}

void Allocator::throw_out_of_memory(size_t nbytes, MemoryClass memory_class) const {
  const AllocatorStats now = stats();
  const bool is_host = dynamic_cast<const CpuBackend*>(state_->backend.get()) != nullptr;
  const int64_t available = options_.limit > 0 ? options_.limit - now.reserved
                            : is_host          ? free_host_nbytes()
                                               : -1;
  std::string text =
      fmt::format("out of memory on {}: requested {}, allocated {}, limit {}", options_.name,
                  format_nbytes(static_cast<int64_t>(nbytes)), format_nbytes(now.allocated),
                  options_.limit > 0 ? format_nbytes(options_.limit) : "none");
  if (available >= 0) text += fmt::format(", free {}", format_nbytes(available));
  if (nbytes <= kSmallNbytes) {
    text += fmt::format(
        "; blocks of up to {} are cut from segments of {}: none has room, and another does not fit",
        format_nbytes(kSmallNbytes), format_nbytes(kSegmentNbytes));
  }
  text += "\n" + report();
  Advice advice;
  {
    std::lock_guard lock(state_->mutex);
    advice = state_->advice;
  }
  const auto largest =
      std::max_element(now.allocated_by_class.begin(), now.allocated_by_class.end());
  if (advice) {
    text += advice({static_cast<int64_t>(nbytes), memory_class, now});
  } else if (now.allocated > 0) {
    text += fmt::format(
        "  most is in {}\n",
        tessera::name_of(static_cast<MemoryClass>(largest - now.allocated_by_class.begin())));
  }
  throw OutOfMemoryError(text);
}

void Allocator::free(Block* block) noexcept {
  if (block->own_backend != nullptr) {
    block->stream.drain();
    std::lock_guard lock(state_->mutex);
    state_->count(*block, -1);
    state_->stats.reserved -= static_cast<int64_t>(block->nbytes);
    block->own_backend->free(block->data, block->nbytes);
    delete block;
    return;
  }
  if (options_.poison) block->stream.fill_bytes("poison", block->data, 0xff, block->nbytes);
  std::lock_guard lock(state_->mutex);
  state_->count(*block, -1);
  block->is_free = true;
  if (Block* next = block->next; next != nullptr && next->is_free) {
    state_->pool_of(*next).erase(next);
    block->nbytes += next->nbytes;
    block->next = next->next;
    if (block->next != nullptr) block->next->previous = block;
    delete next;
  }
  if (Block* previous = block->previous; previous != nullptr && previous->is_free) {
    state_->pool_of(*previous).erase(previous);
    previous->nbytes += block->nbytes;
    previous->next = block->next;
    if (previous->next != nullptr) previous->next->previous = previous;
    delete block;
    block = previous;
  }
  state_->pool_of(*block).insert(block);
}

void* Allocator::data(const Block* block) {
  return block->data;
}
const Stream& Allocator::stream(const Block* block) {
  return block->stream;
}

void Allocator::empty_cache() {
  std::vector<Stream> streams;
  {
    std::lock_guard lock(state_->mutex);
    for (Block* block : state_->cached_segments()) streams.push_back(block->stream);
  }
  for (const Stream& stream : streams) stream.drain();
  std::lock_guard lock(state_->mutex);
  for (Block* block : state_->cached_segments()) {
    state_->pool_of(*block).erase(block);
    state_->stats.reserved -= static_cast<int64_t>(block->nbytes);
    state_->backend->free(block->data, block->nbytes);
    delete block;
  }
}

AllocatorStats Allocator::stats() const {
  std::lock_guard lock(state_->mutex);
  AllocatorStats s = state_->stats;
  for (const auto& [_, pool] : state_->free_blocks) {
    if (pool.empty()) continue;
    s.largest_free = std::max(s.largest_free, static_cast<int64_t>((*pool.rbegin())->nbytes));
  }
  return s;
}

void Allocator::reset_peak() {
  std::lock_guard lock(state_->mutex);
  AllocatorStats& s = state_->stats;
  s.peak_allocated = s.allocated;
  s.peak_by_class = s.allocated_by_class;
  s.peak_reserved = s.reserved;
}

std::string Allocator::report() const {
  const AllocatorStats now = stats();
  std::string text = fmt::format("  {:<16} {:>12} {:>12}\n", "class", "now", "at peak");
  for (int c = 0; c < kNumMemoryClasses; ++c) {
    const auto i = static_cast<size_t>(c);
    text +=
        fmt::format("  {:<16} {:>12} {:>12}\n", tessera::name_of(static_cast<MemoryClass>(c)),
                    format_nbytes(now.allocated_by_class[i]), format_nbytes(now.peak_by_class[i]));
  }
  text += fmt::format("  {:<16} {:>12} {:>12}\n", "total", format_nbytes(now.allocated),
                      format_nbytes(now.peak_allocated));
  text += fmt::format("  {:<16} {:>12} {:>12}\n", "reserved", format_nbytes(now.reserved),
                      format_nbytes(now.peak_reserved));
  if (now.reserved > now.allocated) {
    text +=
        fmt::format("  {:<16} {:>12}, the largest block {}\n", "cached",
                    format_nbytes(now.reserved - now.allocated), format_nbytes(now.largest_free));
  }
  return text;
}

Allocator::Advice Allocator::set_advice(Advice advice) {
  std::lock_guard lock(state_->mutex);
  return std::exchange(state_->advice, std::move(advice));
}

}  // namespace tessera
