// What can go wrong with files: calls of the system that fail, a process that is killed between any
// two of them, and files that are not as they were written. The calls are replaced in this program.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "dist/checkpoint/choose.h"
#include "dist/checkpoint/durable_file.h"
#include "dist/checkpoint/stream_full.h"
#include "test/dist/checkpoint_cases.h"

namespace {

/// What the replaced calls do to files of checkpoints (paths with "step-").
struct Faults {
  enum Kind {
    kNone,
    kKill,       ///< from call `at` on nothing happens any more: the process is dead
    kKillShort,  ///< the same, but call `at` still writes half of its bytes
    kFail,       ///< call `at` of `call` fails with `error`
    kShort,      ///< every write takes at most 1000 bytes
    kNoDirect,   ///< writes past the page cache fail with EINVAL, as on a disk with larger blocks
    kHold,       ///< every fsync and pwrite waits for `set_faults(kNone)`, at most kLongestHold
    kInterrupt,  ///< every second call of `call` fails with EINTR
  };
  std::atomic<Kind> kind{kNone};
  std::atomic<int64_t> at{0};
  std::atomic<int> error{0};
  std::atomic<const char*> call{""};
  std::atomic<int64_t> count{0};
} faults;

void set_faults(Faults::Kind kind, int64_t at = 0, const char* call = "", int error = 0) {
  faults.kind = Faults::kNone;
  faults.at = at;
  faults.call = call;
  faults.error = error;
  faults.count = 0;
  faults.kind = kind;
}

bool is_checkpoint(const char* path) {
  return path != nullptr && std::strstr(path, "/step-") != nullptr;
}
bool is_checkpoint(int fd) {
  char path[512];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = ::readlink(link.c_str(), path, sizeof(path) - 1);
  if (length <= 0) return false;
  path[length] = '\0';
  return is_checkpoint(path);
}

/// Directories are opened to be synced only; nothing is lost where their close fails.
bool is_directory(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && S_ISDIR(status.st_mode);
}

constexpr std::chrono::seconds kLongestHold{30};

/// Waits until the faults are over; an error where that takes too long: somebody waits for us.
bool hold() {
  const auto end = std::chrono::steady_clock::now() + kLongestHold;
  while (faults.kind == Faults::kHold) {
    if (std::chrono::steady_clock::now() > end) {
      errno = ETIMEDOUT;
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

constexpr size_t kDiskBlock = 4096;

enum class Verdict { kGo, kFail, kHalf };

/// Counts the call and says what becomes of it.
Verdict judge(const char* call) {
  const Faults::Kind kind = faults.kind;
  if (kind == Faults::kNone) return Verdict::kGo;
  if (kind == Faults::kKill || kind == Faults::kKillShort) {
    const int64_t n = ++faults.count;
    if (n < faults.at) return Verdict::kGo;
    errno = EIO;
    return kind == Faults::kKillShort && n == faults.at ? Verdict::kHalf : Verdict::kFail;
  }
  if (kind == Faults::kShort) return Verdict::kHalf;
  if (kind == Faults::kNoDirect) {
    if (std::string_view(call) != "write") return Verdict::kGo;
    ++faults.count;
    errno = EINVAL;
    return Verdict::kFail;
  }
  if (kind == Faults::kHold) {
    const bool is_held = std::string_view(call) == "fsync" || std::string_view(call) == "pwrite";
    return !is_held || hold() ? Verdict::kGo : Verdict::kFail;
  }
  if (std::string_view(call) != faults.call.load()) return Verdict::kGo;
  const int64_t n = ++faults.count;
  if (kind == Faults::kInterrupt) {
    if (n % 2 == 0) return Verdict::kGo;
    errno = EINTR;
    return Verdict::kFail;
  }
  if (n != faults.at) return Verdict::kGo;
  errno = faults.error;
  return Verdict::kFail;
}

template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

ssize_t write(int fd, const void* data, size_t nbytes) {
  static const auto real = next<ssize_t (*)(int, const void*, size_t)>("write");
  if (faults.kind == Faults::kNone || !is_checkpoint(fd)) return real(fd, data, nbytes);
  if (faults.kind == Faults::kNoDirect && (::fcntl(fd, F_GETFL) & O_DIRECT) == 0) {
    return real(fd, data, nbytes);
  }
  switch (judge("write")) {
    case Verdict::kGo:
      return real(fd, data, nbytes);
    case Verdict::kFail:
      return -1;
    case Verdict::kHalf:
      if (faults.kind == Faults::kShort) return real(fd, data, std::min<size_t>(nbytes, 1000));
      // Whole blocks of a disk, if it is that much: past the page cache nothing else is written.
      nbytes = nbytes / 2 < kDiskBlock ? nbytes / 2 : nbytes / 2 / kDiskBlock * kDiskBlock;
      if (real(fd, data, nbytes) < 0) return -1;
      errno = EIO;
      return -1;
  }
  return -1;
}

ssize_t pwrite(int fd, const void* data, size_t nbytes, off_t offset) {
  static const auto real = next<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  if (faults.kind != Faults::kHold || !is_checkpoint(fd)) return real(fd, data, nbytes, offset);
  return judge("pwrite") == Verdict::kFail ? -1 : real(fd, data, nbytes, offset);
}

int fsync(int fd) {
  static const auto real = next<int (*)(int)>("fsync");
  if (faults.kind == Faults::kNone || !is_checkpoint(fd)) return real(fd);
  return judge("fsync") == Verdict::kFail ? -1 : real(fd);
}

int close(int fd) {
  static const auto real = next<int (*)(int)>("close");
  if (faults.kind == Faults::kNone || !is_checkpoint(fd) || is_directory(fd)) return real(fd);
  const Verdict verdict = judge("close");
  const int error = errno;
  const int status = real(fd);  // a descriptor is gone in any case
  errno = error;
  return verdict == Verdict::kFail ? -1 : status;
}

int rename(const char* from, const char* to) noexcept {
  static const auto real = next<int (*)(const char*, const char*)>("rename");
  if (!is_checkpoint(to)) return real(from, to);
  return judge("rename") == Verdict::kFail ? -1 : real(from, to);
}

int mkdir(const char* path, mode_t mode) noexcept {
  static const auto real = next<int (*)(const char*, mode_t)>("mkdir");
  if (!is_checkpoint(path)) return real(path, mode);
  return judge("mkdir") == Verdict::kFail ? -1 : real(path, mode);
}

int unlink(const char* path) noexcept {
  static const auto real = next<int (*)(const char*)>("unlink");
  if (!is_checkpoint(path)) return real(path);
  return judge("unlink") == Verdict::kFail ? -1 : real(path);
}

int remove(const char* path) noexcept {
  static const auto real = next<int (*)(const char*)>("remove");
  if (!is_checkpoint(path)) return real(path);
  return judge("remove") == Verdict::kFail ? -1 : real(path);
}

int unlinkat(int dir, const char* path, int flags) noexcept {
  static const auto real = next<int (*)(int, const char*, int)>("unlinkat");
  if (faults.kind == Faults::kNone || (!is_checkpoint(dir) && !is_checkpoint(path))) {
    return real(dir, path, flags);
  }
  return judge("unlinkat") == Verdict::kFail ? -1 : real(dir, path, flags);
}

int open(const char* path, int flags, ...) {
  static const auto real = next<int (*)(const char*, int, ...)>("open");
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  const bool counts = (flags & O_CREAT) != 0 && is_checkpoint(path);
  if (counts && judge("open") == Verdict::kFail) return -1;
  return real(path, flags, mode);
}

}  // extern "C"

namespace tessera::testing {
namespace {

/// A training of one step size that only saves and loads: shards and optimizer with values of
/// `version`.
FsdpRun still_run(const std::function<void(const dist::TrainingState&, dist::World&)>& body) {
  FsdpRun run;
  run.num_steps = 0;
  run.samples_per_step = kSharedSamples;
  run.model.num_layers = 1;
  run.on_state = body;
  return run;
}

/// Saves step `step` on `num_ranks` ranks; the result.
dist::SaveResult save(const std::string& dir, int64_t step, int num_ranks = 1,
                      const std::string& run = "r", int64_t keep = 3) {
  std::mutex mutex;
  std::optional<dist::SaveResult> result;
  run_fsdp_on_threads(num_ranks, still_run([&](const dist::TrainingState& state, dist::World& w) {
                        Tensor master = state.fsdp->shards()[0].master;
                        master.fill_(static_cast<double>(step));
                        dist::CheckpointWriter writer(w, state,
                                                      {.dir = dir, .run = run, .keep = keep});
                        const bool is_first = !writer.begin(progress_of(step)).has_value();
                        const auto mine = writer.finish();
                        const std::lock_guard lock(mutex);
                        CHECK(is_first);
                        result = mine;
                      }));
  REQUIRE(result.has_value());
  return *result;
}

struct Loaded {
  int64_t step = -1;  ///< -1: nothing chosen
  double value = 0;   ///< of the first shard
  std::vector<std::string> damaged;
};

/// Chooses and loads on `num_ranks` ranks.
Loaded load(const std::string& dir, int num_ranks = 1, const std::string& run = "r") {
  std::mutex mutex;
  Loaded loaded;
  run_fsdp_on_threads(
      num_ranks, still_run([&](const dist::TrainingState& state, dist::World& w) {
        const dist::ChosenCheckpoint chosen = dist::choose_checkpoint(w, dir, run);
        if (chosen.reader == nullptr) return;
        dist::check_tensors(*chosen.reader, state);
        dist::load_state(*chosen.reader, state);
        const std::vector<double> values = state.fsdp->shards()[0].master.to_vector();
        const std::lock_guard lock(mutex);
        loaded = {chosen.reader->manifest().progress.step, values[0], chosen.damaged};
      }));
  return loaded;
}

std::string step_dir(const TempDir& dir, int64_t step) {
  return dir / dist::step_directory_name(step);
}

void check_whole(const TempDir& dir, int64_t step) {
  const dist::CheckpointReader reader(step_dir(dir, step));
  reader.check_sizes();
  reader.check_files();
}

/// The message of a load that finds nothing to use.
std::string refusal(const TempDir& dir, int num_ranks = 1) {
  return error_of([&] { load(dir.path(), num_ranks); });
}

TEST_CASE("checkpoint faults: F30: killed at every call of a save, the newest whole one loads",
          "[checkpoint]") {
  for (const int num_ranks : {1, 2}) {
    for (const Faults::Kind kind : {Faults::kKill, Faults::kKillShort}) {
      int64_t num_points = 0;
      for (bool is_over = false; !is_over; ++num_points) {
        CAPTURE(num_ranks, num_points);
        const TempDir dir;
        REQUIRE(save(dir.path(), 4, num_ranks).error.empty());
        set_faults(kind, num_points + 1);
        save(dir.path(), 8, num_ranks);
        is_over = faults.count < num_points + 1;
        set_faults(Faults::kNone);
        const Loaded loaded = load(dir.path(), num_ranks);
        CHECK(loaded.damaged.empty());
        REQUIRE((loaded.step == 4 || loaded.step == 8));
        CHECK(loaded.value == static_cast<double>(loaded.step));
        if (is_over) CHECK(loaded.step == 8);
        if (num_points == 0) CHECK(loaded.step == 4);
        // The same step again works and leaves nothing half-written behind.
        REQUIRE(save(dir.path(), 8, num_ranks).error.empty());
        CHECK(load(dir.path(), num_ranks).step == 8);
        CHECK(dist::list_incomplete(dir.path()).empty());
        for (const auto& entry : std::filesystem::recursive_directory_iterator(dir.path())) {
          CHECK(entry.path().extension() != ".tmp");
        }
      }
      CHECK(num_points > 10);
    }
  }
}

TEST_CASE("checkpoint faults: F30: killed while a step is saved again or old ones are removed",
          "[checkpoint]") {
  // Step 8 is there (a run that went back), 2 and 4 fall out of the last two.
  int64_t num_points = 0;
  for (bool is_over = false; !is_over; ++num_points) {
    CAPTURE(num_points);
    const TempDir dir;
    for (const int64_t step : {2, 4, 8}) REQUIRE(save(dir.path(), step).error.empty());
    set_faults(Faults::kKill, num_points + 1);
    save(dir.path(), 8, 1, "r", 1);
    is_over = faults.count < num_points + 1;
    set_faults(Faults::kNone);
    const Loaded loaded = load(dir.path());
    REQUIRE((loaded.step == 4 || loaded.step == 8));
    CHECK(loaded.value == static_cast<double>(loaded.step));
    REQUIRE(save(dir.path(), 10, 1, "r", 1).error.empty());
    CHECK(dist::list_checkpoints(dir.path()).size() == 1);
    CHECK(dist::list_incomplete(dir.path()).empty());
  }
  CHECK(num_points > 15);
}

TEST_CASE("durable file: the same bytes past the page cache, through it, and in turns",
          "[checkpoint]") {
  constexpr int64_t kNbytes = int64_t{3} << 20, kAlign = dist::DurableFile::kDirectNbytes;
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(kAlign, kNbytes)), &std::free);
  for (int64_t i = 0; i < kNbytes; ++i) memory.get()[i] = static_cast<char>(i * 2654435761 >> 11);
  const TempDir dir;
  const std::string path = dir / "step-file";
  // In one block; with an end that is no whole one; from a place that is not aligned, and back.
  const std::vector<std::vector<int64_t>> patterns = {
      {kNbytes}, {kNbytes - 5}, {kAlign, 100, 8 * kAlign, kAlign - 100, 1 << 21}, {7, 9, 1 << 20}};
  for (const Faults::Kind kind : {Faults::kNone, Faults::kNoDirect, Faults::kShort}) {
    for (size_t p = 0; p < patterns.size(); ++p) {
      CAPTURE(kind, p);
      set_faults(kind);
      int64_t done = 0;
      {
        dist::DurableFile file(path, kNbytes);
        for (const int64_t count : patterns[p]) {
          file.write(memory.get() + done, count);
          done += count;
        }
        file.commit();
      }
      const int64_t num_refused = faults.count;
      set_faults(Faults::kNone);
      if (kind == Faults::kNoDirect) CHECK(num_refused <= 1);  // then no more of them
      CHECK(read_file(path) == std::string(memory.get(), static_cast<size_t>(done)));
    }
  }
}

TEST_CASE("checkpoint faults: F32: short writes and interrupted calls go on", "[checkpoint]") {
  const TempDir dir;
  set_faults(Faults::kShort);
  CHECK(save(dir.path(), 1, 2).error.empty());
  for (const char* call : {"write", "fsync"}) {
    set_faults(Faults::kInterrupt, 0, call);
    CHECK(save(dir.path(), 2, 2).error.empty());
    CHECK(faults.count > 0);
  }
  set_faults(Faults::kNone);
  check_whole(dir, 1);
  check_whole(dir, 2);
}

TEST_CASE("checkpoint faults: F32: a call that fails is reported and changes nothing",
          "[checkpoint]") {
  struct Case {
    const char* call;
    int64_t at;
    int error;
    const char* text;
  };
  const TempDir dir;
  REQUIRE(save(dir.path(), 1, 2).error.empty());
  for (const Case& c : {Case{"fsync", 2, EIO, "cannot be written: Input/output error"},
                        Case{"close", 2, EIO, "cannot be written: Input/output error"},
                        Case{"write", 1, EFBIG, "cannot be written: File too large"},
                        Case{"write", 2, EIO, "cannot be written: Input/output error"},
                        Case{"rename", 1, EIO, "cannot be written: Input/output error"},
                        Case{"rename", 2, EDQUOT, "bytes needed, "},
                        Case{"rename", 3, EIO, "manifest.json: cannot be written: Input/output"},
                        Case{"open", 1, EACCES, "cannot be written: Permission denied"},
                        Case{"mkdir", 1, EROFS, "cannot be written: Read-only file system"}}) {
    CAPTURE(c.call, c.at, c.error);
    set_faults(Faults::kFail, c.at, c.call, c.error);
    const dist::SaveResult result = save(dir.path(), 5, 2);
    set_faults(Faults::kNone);
    CHECK_THAT(result.error, Catch::Contains(c.text) && Catch::StartsWith(step_dir(dir, 5)));
    CHECK(load(dir.path(), 2).step == 1);
    CHECK_FALSE(std::filesystem::exists(step_dir(dir, 5)));  // its room is free again
  }
  CHECK(save(dir.path(), 5, 2).error.empty());
  CHECK(load(dir.path(), 2).step == 5);
}

TEST_CASE("checkpoint faults: F31: a full disk is named with bytes needed and free",
          "[checkpoint]") {
  const TempDir dir;
  REQUIRE(save(dir.path(), 1).error.empty());
  set_faults(Faults::kFail, 2, "write", ENOSPC);
  const std::string error = save(dir.path(), 2).error;
  set_faults(Faults::kNone);
  const int64_t nbytes = dist::CheckpointReader(step_dir(dir, 1)).manifest().files[0].nbytes;
  CHECK_THAT(error, Catch::StartsWith(fmt::format("{}/rank-00000.safetensors: cannot be written: "
                                                  "No space left on device ({} bytes needed, ",
                                                  step_dir(dir, 2), nbytes)) &&
                        Catch::EndsWith(" free)"));
  CHECK(load(dir.path()).step == 1);
}

TEST_CASE("checkpoint faults: F11: any flipped byte is found, named, and the previous one used",
          "[checkpoint]") {
  const TempDir dir;
  REQUIRE(save(dir.path(), 1, 2).error.empty());
  REQUIRE(save(dir.path(), 2, 2).error.empty());
  const std::string path = step_dir(dir, 2) + "/rank-00001.safetensors";
  const std::string bytes = read_file(path);
  const auto write_bytes = [&](const std::string& content) {
    std::ofstream(path, std::ios::binary) << content;
  };
  for (size_t at = 0; at < bytes.size(); at += bytes.size() / 97) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
    write_bytes(damaged);
    CAPTURE(at);
    const std::string message = error_of([&] {
      const dist::CheckpointReader reader(step_dir(dir, 2));
      reader.check_sizes();
      reader.check_files();
    });
    CHECK(message.starts_with(path + ": "));
    const Loaded loaded = load(dir.path(), 2);
    CHECK(loaded.step == 1);
    CHECK(loaded.damaged == std::vector<std::string>{step_dir(dir, 2)});
  }
  // In the data, the tensor is named.
  std::string damaged = bytes;
  damaged.back() = static_cast<char>(damaged.back() ^ 1);
  write_bytes(damaged);
  std::string last;
  write_bytes(bytes);
  {
    const dist::SafetensorsFile file(path);
    last = file.entries().back().name;
  }
  write_bytes(damaged);
  CHECK(error_of([&] { dist::CheckpointReader(step_dir(dir, 2)).check_files(); }) ==
        fmt::format("{}: tensor {}: its bytes do not have the manifest's xxh64, expected them "
                    "as they were written",
                    path, last));
  write_bytes(bytes);
  CHECK(load(dir.path(), 2).step == 2);
}

TEST_CASE(
    "checkpoint faults: F14: a missing or cut file is named and the previous one used "
    "(case 37)",
    "[checkpoint]") {
  for (const int num_ranks : {1, 3}) {
    const TempDir dir;
    REQUIRE(save(dir.path(), 1, 3).error.empty());
    REQUIRE(save(dir.path(), 2, 3).error.empty());
    const std::string path = step_dir(dir, 2) + "/rank-00002.safetensors";
    const auto size = std::filesystem::file_size(path);
    for (const auto length : {size - 1, size / 2, uintmax_t{9}, uintmax_t{0}}) {
      std::filesystem::resize_file(path, length);
      CHECK(error_of([&] { dist::CheckpointReader(step_dir(dir, 2)).check_sizes(); }) ==
            fmt::format("{}: {} bytes, expected {} as in the manifest", path, length, size));
      CHECK(load(dir.path(), num_ranks).step == 1);
    }
    std::filesystem::remove(path);
    CHECK(error_of([&] { dist::CheckpointReader(step_dir(dir, 2)).check_sizes(); }) ==
          fmt::format("{}: No such file or directory, expected a file of {} bytes", path, size));
    CHECK(load(dir.path(), num_ranks).step == 1);
    std::filesystem::remove(step_dir(dir, 1) + "/rank-00000.safetensors");
    // None is whole: all ranks end with the same error (F38), with the status of checkpoints.
    try {
      load(dir.path(), num_ranks);
      FAIL("loaded");
    } catch (const CheckpointError& error) {
      CHECK(error.exit_status() == 4);
      CHECK_THAT(error.what(), Catch::StartsWith(dir.path() +
                                                 ": none of 2 checkpoints can be used, expected a "
                                                 "whole one; the oldest: " +
                                                 step_dir(dir, 1) + "/rank-00000.safetensors: "));
    }
  }
}

TEST_CASE("checkpoint faults: F15: a file of another step or run is named", "[checkpoint]") {
  const TempDir dir;
  REQUIRE(save(dir.path(), 1, 2).error.empty());
  REQUIRE(save(dir.path(), 2, 2).error.empty());
  const std::string path = step_dir(dir, 2) + "/rank-00000.safetensors";
  const auto overwrite = std::filesystem::copy_options::overwrite_existing;
  std::filesystem::copy(step_dir(dir, 1) + "/rank-00000.safetensors", path, overwrite);
  CHECK(error_of([&] { dist::CheckpointReader(step_dir(dir, 2)).check_files(); }) ==
        path + ": of run r, step 1, expected run r, step 2 as in the manifest");
  CHECK(load(dir.path(), 2).step == 1);
  const TempDir other;
  REQUIRE(save(other.path(), 2, 2, "s").error.empty());
  std::filesystem::copy(step_dir(other, 2) + "/rank-00000.safetensors", path, overwrite);
  CHECK(error_of([&] { dist::CheckpointReader(step_dir(dir, 2)).check_files(); }) ==
        path + ": of run s, step 2, expected run r, step 2 as in the manifest");
  // The whole checkpoint of another run.
  std::filesystem::copy(step_dir(other, 2), step_dir(dir, 2),
                        overwrite | std::filesystem::copy_options::recursive);
  CHECK(load(dir.path(), 2).step == 1);
  CHECK(load(dir.path(), 2, "s").step == 2);
  std::filesystem::remove_all(step_dir(dir, 1));
  CHECK(refusal(dir).ends_with(step_dir(dir, 2) +
                               "/manifest.json: manifest of run s, expected run r"));
  // Its manifest alone, with the files of this one.
  const TempDir mixed;
  REQUIRE(save(mixed.path(), 1).error.empty());
  REQUIRE(save(mixed.path(), 2).error.empty());
  std::filesystem::copy(step_dir(other, 2) + "/manifest.json",
                        step_dir(mixed, 2) + "/manifest.json", overwrite);
  CHECK(load(mixed.path()).step == 1);
}

TEST_CASE("checkpoint faults: a damaged manifest is named and the previous one used",
          "[checkpoint]") {
  const TempDir dir;
  REQUIRE(save(dir.path(), 1).error.empty());
  REQUIRE(save(dir.path(), 2).error.empty());
  const std::string path = step_dir(dir, 2) + "/manifest.json", text = read_file(path);
  for (size_t length = 0; length < text.size() - 2; length += text.size() / 50) {
    std::ofstream(path) << text.substr(0, length);
    CHECK(load(dir.path()).step == 1);
  }
  nlohmann::json object = nlohmann::json::parse(text);
  object["tensors"][0]["slices"][0]["xxh64"] = "0000000000000000";
  object["files"][0]["xxh64"] = "0000000000000000";
  std::ofstream(path) << object.dump();
  CHECK(load(dir.path()).step == 1);
  std::ofstream(path) << text;
  CHECK(load(dir.path()).step == 2);
}

TEST_CASE("checkpoint faults: damaged ones go and do not count as kept", "[checkpoint]") {
  const TempDir dir;
  for (const int64_t step : {1, 2, 3}) REQUIRE(save(dir.path(), step).error.empty());
  std::filesystem::remove(step_dir(dir, 2) + "/rank-00000.safetensors");
  run_fsdp_on_threads(
      1, still_run([&](const dist::TrainingState& state, dist::World& w) {
        dist::CheckpointWriter writer(
            w, state, {.dir = dir.path(), .run = "r", .keep = 3, .damaged = {step_dir(dir, 2)}});
        writer.begin(progress_of(4));
        CHECK(writer.finish()->error.empty());
      }));
  std::vector<int64_t> steps;
  for (const auto& place : dist::list_checkpoints(dir.path())) steps.push_back(place.step);
  CHECK(steps == std::vector<int64_t>{4, 3, 1});
  // Later ones, of a run that went back, neither count nor go.
  REQUIRE(save(dir.path(), 2, 1, "r", 1).error.empty());
  steps.clear();
  for (const auto& place : dist::list_checkpoints(dir.path())) steps.push_back(place.step);
  CHECK(steps == std::vector<int64_t>{4, 3, 2});
}

TEST_CASE("checkpoint faults: a slow disk holds up no step, only the next save (case 36)",
          "[checkpoint]") {
  const TempDir dir;
  set_faults(Faults::kHold);
  std::mutex mutex;
  run_fsdp_on_threads(2, still_run([&](const dist::TrainingState& state, dist::World& w) {
                        dist::CheckpointWriter writer(w, state, {.dir = dir.path(), .run = "r"});
                        writer.begin(progress_of(1));
                        // The ends of three steps, while no file gets on the disk.
                        bool is_held_up = false;
                        for (int i = 0; i < 3; ++i) is_held_up |= writer.poll().has_value();
                        if (w.rank() == 0) set_faults(Faults::kNone);
                        const auto first = writer.finish();
                        // Two in a row: the second begins when the first is complete.
                        writer.begin(progress_of(2));
                        const auto before = writer.begin(progress_of(3));
                        const auto last = writer.finish();
                        const bool is_idle = !writer.finish().has_value();
                        const std::lock_guard lock(mutex);
                        CHECK_FALSE(is_held_up);
                        CHECK(first.value().error.empty());
                        CHECK(first.value().step == 1);
                        CHECK(first.value().nbytes > 0);
                        CHECK(before.value().step == 2);
                        CHECK(last.value().step == 3);
                        CHECK(is_idle);
                      }));
  for (const int64_t step : {1, 2, 3}) check_whole(dir, step);
}

TEST_CASE("checkpoint faults: case 36: a slow disk under a full save holds up no collective",
          "[checkpoint]") {
  const TempDir dir;
  const std::string path = dir / "step-1.safetensors";
  set_faults(Faults::kHold);
  std::atomic<int> num_turns = 0;
  std::atomic<size_t> num_parameters = 0;
  run_fsdp_on_threads(
      3, still_run([&](const dist::TrainingState& state, dist::World& w) {
        std::vector<dist::SafetensorsEntry> entries;
        for (const nn::NamedParameter& p : state.model->named_parameters()) {
          entries.push_back({p.name, kF32, p.parameter->tensor.shape()});
        }
        num_parameters = entries.size();
        std::unique_ptr<dist::SafetensorsWriter> writer;
        dist::FullSink sink;
        sink.begin = [&] { writer = std::make_unique<dist::SafetensorsWriter>(path, entries); };
        sink.write = [&](const std::string& name, const float* values, int64_t numel) {
          writer->write(name, values, numel * static_cast<int64_t>(sizeof(float)));
        };
        sink.finish = [&] { writer->finish(); };
        // In a collective that waits for the disk, rank 1 would never come here to free it.
        sink.waiting = [&] {
          if (w.rank() == 1 && ++num_turns == 3) set_faults(Faults::kNone);
        };
        dist::stream_full(*state.fsdp, w, sink);
      }));
  set_faults(Faults::kNone);
  CHECK(num_turns >= 3);
  CHECK(dist::SafetensorsFile(path).entries().size() == num_parameters);
}

TEST_CASE("checkpoint faults: F38: a file that one rank alone finds damaged is the verdict of all",
          "[checkpoint]") {
  const TempDir dir;
  REQUIRE(save(dir.path(), 1, 3).error.empty());
  const std::string path = step_dir(dir, 1) + "/rank-00002.safetensors";
  std::string bytes = read_file(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  std::ofstream(path, std::ios::binary) << bytes;
  std::mutex mutex;
  std::vector<std::string> messages;
  std::vector<int> statuses;
  run_fsdp_on_threads(3, still_run([&](const dist::TrainingState&, dist::World& w) {
                        std::string message;
                        int status = 0;
                        try {
                          dist::choose_checkpoint(w, dir.path(), "r");
                        } catch (const Error& error) {
                          message = error.what();
                          status = error.exit_status();
                        }
                        w.control().barrier();  // nobody is left behind in a collective
                        const std::lock_guard lock(mutex);
                        messages.push_back(message);
                        statuses.push_back(status);
                      }));
  CHECK(statuses == std::vector<int>{4, 4, 4});
  CHECK_THAT(messages[0], Catch::Contains(path + ": tensor "));
  CHECK(messages == std::vector<std::string>(3, messages[0]));
}

}  // namespace
}  // namespace tessera::testing
