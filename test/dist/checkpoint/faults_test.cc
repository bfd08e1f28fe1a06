// What can go wrong with files: calls of the system that fail, a process that is killed between any
// two of them, and files that are not as they were written. The calls are replaced in this program.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/formats/durable_file.h"
#include "dist/checkpoint/choose.h"
#include "dist/checkpoint/save_parameters.h"
#include "test/dist/checkpoint/cases.h"

namespace {

/// What the replaced calls do to files of checkpoints (paths with "step-").
struct Faults {
  enum Kind {
    kNone,
    kKill,        ///< from call `at` on nothing happens any more: the process is dead
    kKillShort,   ///< the same, but call `at` still writes half of its bytes
    kFail,        ///< call `at` of `call` fails with `error`
    kShort,       ///< every write takes at most 1000 bytes
    kNoDirect,    ///< writes past the page cache fail with EINVAL, as on a disk with larger blocks
    kHold,        ///< every fsync and pwrite waits for `set_faults(kNone)`, at most kLongestHold
    kNoExchange,  ///< renameat2 knows no flags, as on NFS
    kInterrupt,   ///< every second call of `call` fails with EINTR
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
  if (kind == Faults::kNoExchange) return Verdict::kGo;
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

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) noexcept {
  static const auto real = next<int (*)(int, const char*, int, const char*, unsigned)>("renameat2");
  if (!is_checkpoint(to)) return real(from_dir, from, to_dir, to, flags);
  const bool exchanges = flags == RENAME_EXCHANGE;
  if (faults.kind == Faults::kNoExchange && flags != 0) {
    errno = EINVAL;
    return -1;
  }
  return judge(exchanges ? "exchange" : "renameat2") == Verdict::kFail
             ? -1
             : real(from_dir, from, to_dir, to, flags);
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
                      const std::string& run = "r", int64_t keep = 3,
                      const std::vector<std::string>& leave_alone = {}) {
  std::mutex mutex;
  std::optional<dist::SaveResult> result;
  run_fsdp_on_threads(num_ranks, still_run([&](const dist::TrainingState& state, dist::World& w) {
                        Tensor master = state.fsdp->shards()[0].master;
                        master.fill_(static_cast<double>(step));
                        dist::CheckpointWriter writer(
                            w, state,
                            {.dir = dir, .run = run, .keep = keep, .leave_alone = leave_alone});
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
  std::vector<std::string> damaged, unreadable;
};

/// Chooses and loads on `num_ranks` ranks.
Loaded load(const std::string& dir, int num_ranks = 1, const std::string& run = "r",
            bool skips_unreadable = false) {
  std::mutex mutex;
  Loaded loaded;
  run_fsdp_on_threads(num_ranks, still_run([&](const dist::TrainingState& state, dist::World& w) {
                        const dist::ChosenCheckpoint chosen =
                            dist::choose_checkpoint(w, dir, run, skips_unreadable);
                        if (chosen.reader == nullptr) return;
                        dist::check_tensors(*chosen.reader, state);
                        dist::load_state(*chosen.reader, state);
                        const std::vector<double> values =
                            state.fsdp->shards()[0].master.to_vector();
                        const std::lock_guard lock(mutex);
                        loaded = {chosen.reader->manifest().progress.step, values[0],
                                  chosen.damaged, chosen.unreadable};
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
  constexpr int64_t kNbytes = int64_t{3} << 20, kAlign = DurableFile::kDirectNbytes;
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
        DurableFile file(path, kNbytes);
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

TEST_CASE("durable file: what is logged stays out of it where standard descriptors are closed",
          "[checkpoint]") {
  const TempDir dir;
  const pid_t child = ::fork();
  if (child == 0) {
    for (const int fd : {0, 1, 2}) ::close(fd);
    DurableFile file(dir / "file", 8);
    SafetensorsWriter writer(dir / "weights", {{"w", kU8, {2}}});
    for (const int fd : {0, 1, 2}) {
      if (::write(fd, "log", 3) >= 0) ::_exit(1);
    }
    file.write("contents", 8);
    file.commit();
    writer.write("w", "ab", 2);
    writer.finish();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(read_file(dir / "file") == "contents");
  CHECK(read_file(dir / "weights").ends_with("ab"));
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
                        Case{"exchange", 1, EIO, "cannot get the name "},
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
  CHECK_THAT(error, Catch::StartsWith(fmt::format("{}.partial/rank-00000.safetensors: cannot be "
                                                  "written: "
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
    const SafetensorsFile file(path);
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
    "checkpoint faults: F14: a cut file is named and the previous one used, a missing one ends it "
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
    // It may be on a disk that is not mounted: nothing older is used without being asked for.
    try {
      load(dir.path(), num_ranks);
      FAIL("loaded");
    } catch (const CheckpointError& error) {
      CHECK(error.exit_status() == 4);
      CHECK(std::string(error.what()) ==
            fmt::format("{}: No such file or directory, expected a file of {} bytes; it may be "
                        "whole, so nothing older is used and it stays as it is: mend what keeps it "
                        "from being read, or go on from the one before it with "
                        "--resume.skip_unreadable",
                        path, size));
    }
    const Loaded skipped = load(dir.path(), num_ranks, "r", true);
    CHECK(skipped.step == 1);
    CHECK(skipped.damaged.empty());
    std::filesystem::resize_file(step_dir(dir, 1) + "/rank-00000.safetensors", 9);
    std::ofstream(path) << "cut";
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
  const Loaded loaded = load(dir.path(), 2);
  CHECK(loaded.step == 1);
  CHECK(loaded.damaged.empty());  // it is somebody's
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

std::vector<int64_t> steps_in(const std::string& dir) {
  std::vector<int64_t> steps;
  for (const auto& place : dist::list_checkpoints(dir)) steps.push_back(place.step);
  return steps;
}

TEST_CASE("checkpoint faults: damaged ones are set aside and do not count as kept",
          "[checkpoint]") {
  const TempDir dir;
  for (const int64_t step : {1, 2, 3}) REQUIRE(save(dir.path(), step).error.empty());
  const std::string damaged = step_dir(dir, 3);
  std::filesystem::resize_file(damaged + "/rank-00000.safetensors", 100);
  CHECK(dist::set_checkpoint_aside(damaged) == damaged + ".damaged");
  CHECK(read_file(damaged + ".damaged/rank-00000.safetensors").size() == 100);
  REQUIRE(save(dir.path(), 3).error.empty());
  CHECK(dist::set_checkpoint_aside(damaged) == damaged + ".damaged-2");
  REQUIRE(save(dir.path(), 4).error.empty());
  CHECK(steps_in(dir.path()) == std::vector<int64_t>{4, 2, 1});
  REQUIRE(save(dir.path(), 5, 1, "r", 1).error.empty());
  CHECK(steps_in(dir.path()) == std::vector<int64_t>{5});
  for (const char* suffix : {".damaged", ".damaged-2"}) {
    CHECK(std::filesystem::exists(damaged + suffix + "/manifest.json"));
  }
  CHECK_THAT(error_of([&] { dist::set_checkpoint_aside(dir / "step-9"); }),
             Catch::StartsWith(dir / "step-9: cannot be renamed to " + (dir / "step-9.damaged: ")));
}

TEST_CASE("checkpoint faults: what cannot be read ends a resume and is never touched",
          "[checkpoint]") {
  struct Case {
    const char* what;
    std::function<void(const std::string& dir)> make;
    std::string text;
  };
  const auto edit = [](const std::string& dir, const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json object = nlohmann::json::parse(read_file(dir + "/manifest.json"));
    object["version"] = 1;  // without a hash of its own
    change(object);
    std::ofstream(dir + "/manifest.json") << object.dump();
  };
  const Case cases[] = {
      {"newer version", [&](const std::string& d) { edit(d, [](auto& m) { m["version"] = 3; }); },
       "/manifest.json: format version 3, expected at most 2; it may be whole, "},
      {"other format", [&](const std::string& d) { edit(d, [](auto& m) { m["format"] = "x"; }); },
       "/manifest.json: format \"x\", expected \"tessera checkpoint\"; it may be whole, "},
      {"other step",
       [&](const std::string& d) { edit(d, [](auto& m) { m["progress"]["step"] = 7; }); },
       "/manifest.json: manifest of step 7 (run r), expected step 2; it may be whole, "},
      {"a directory as a file",
       [](const std::string& d) {
         std::filesystem::remove(d + "/rank-00000.safetensors");
         std::filesystem::create_directory(d + "/rank-00000.safetensors");
       },
       "/rank-00000.safetensors: no regular file, expected one of "},
      {"a manifest that is a directory",
       [](const std::string& d) {
         std::filesystem::remove(d + "/manifest.json");
         std::filesystem::create_directory(d + "/manifest.json");
       },
       "/manifest.json: "},
  };
  for (const Case& c : cases) {
    CAPTURE(c.what);
    const TempDir dir;
    for (const int64_t step : {1, 2}) REQUIRE(save(dir.path(), step).error.empty());
    c.make(step_dir(dir, 2));
    std::filesystem::path odd = step_dir(dir, 2);
    const auto list = [&] {
      std::vector<std::string> names;
      for (const auto& entry : std::filesystem::recursive_directory_iterator(odd)) {
        names.push_back(entry.path().string());
      }
      std::sort(names.begin(), names.end());
      return names;
    };
    const auto before = list();
    CHECK_THAT(refusal(dir), Catch::StartsWith(odd.string() + c.text));
    const Loaded loaded = load(dir.path(), 1, "r", true);
    CHECK(loaded.step == 1);
    CHECK(loaded.damaged.empty());
    CHECK(loaded.unreadable == std::vector<std::string>{odd});
    // Its place is taken: a save of that step fails, others go on, and none removes it.
    CHECK(save(dir.path(), 2, 1, "r", 1, loaded.unreadable).error ==
          odd.string() +
              ": a checkpoint that could not be read, expected none, or a checkpoint of "
              "run r that can be read");
    REQUIRE(save(dir.path(), 3, 1, "r", 1, loaded.unreadable).error.empty());
    CHECK(list() == before);
  }
}

TEST_CASE("checkpoint faults: nothing is removed that this run has not made", "[checkpoint]") {
  const TempDir dir, other;
  REQUIRE(save(other.path(), 1, 1, "s").error.empty());
  REQUIRE(save(dir.path(), 2).error.empty());
  namespace fs = std::filesystem;
  fs::copy(step_dir(other, 1), step_dir(dir, 1), fs::copy_options::recursive);  // another run's
  fs::create_directory_symlink(step_dir(dir, 2), step_dir(dir, 3));             // a link to ours
  fs::create_directories(step_dir(dir, 4) + "/notes");                          // somebody's
  std::ofstream(step_dir(dir, 4) + "/notes/text") << "mine";
  std::ofstream(step_dir(dir, 2) + "/notes") << "beside ours";
  fs::create_directory(step_dir(dir, 5) + ".partial");  // half of a save of another run
  fs::copy(step_dir(other, 1) + "/rank-00000.safetensors",
           step_dir(dir, 5) + ".partial/rank-00001.safetensors.tmp");
  for (const int64_t step : {7, 8}) REQUIRE(save(dir.path(), step, 1, "r", 1).error.empty());
  CHECK(fs::exists(step_dir(dir, 1) + "/manifest.json"));
  CHECK(fs::is_symlink(step_dir(dir, 3)));
  CHECK(read_file(step_dir(dir, 4) + "/notes/text") == "mine");
  CHECK(fs::exists(step_dir(dir, 5) + ".partial/rank-00001.safetensors.tmp"));
  // Of our own, all but what is not of a save.
  CHECK(read_file(step_dir(dir, 2) + "/notes") == "beside ours");
  CHECK_FALSE(fs::exists(step_dir(dir, 2) + "/manifest.json"));
  CHECK_FALSE(fs::exists(step_dir(dir, 7)));
  // Nor is any of them written into.
  const auto refused = [&](int64_t step) { return save(dir.path(), step).error; };
  const std::string expected = ", expected none, or a checkpoint of run r that can be read";
  CHECK(refused(1) == step_dir(dir, 1) + ": a checkpoint of run s" + expected);
  CHECK(refused(3) == step_dir(dir, 3) + ": a link" + expected);
  CHECK(refused(4) == step_dir(dir, 4) + ": a directory of something else" + expected);
  CHECK(load(dir.path()).step == 8);
  std::ofstream(step_dir(dir, 9)) << "a file";
  CHECK(refused(9) == step_dir(dir, 9) + ": no directory" + expected);
  fs::create_directory_symlink(step_dir(dir, 4), step_dir(dir, 10) + ".partial");
  CHECK(refused(10) == step_dir(dir, 10) + ".partial: a link, expected none, or a directory");
  // A link under the name of a file that is being written is replaced, not followed.
  fs::create_directory(step_dir(dir, 11) + ".partial");
  fs::create_symlink(step_dir(dir, 4) + "/notes/text",
                     step_dir(dir, 11) + ".partial/rank-00000.safetensors.tmp");
  CHECK(refused(11).empty());
  CHECK(read_file(step_dir(dir, 4) + "/notes/text") == "mine");
}

TEST_CASE("checkpoint faults: after a step back the newest is what was saved last",
          "[checkpoint]") {
  for (const Faults::Kind kind : {Faults::kNone, Faults::kNoExchange}) {
    const TempDir dir;
    for (const int64_t step : {10, 20, 30}) REQUIRE(save(dir.path(), step).error.empty());
    // Somebody goes on from 10: 20 and 30 are theirs until they are saved again.
    set_faults(kind);
    REQUIRE(save(dir.path(), 15, 1, "r", 1).error.empty());
    CHECK(steps_in(dir.path()) == std::vector<int64_t>{15, 30, 20});
    CHECK(load(dir.path()).step == 15);
    // The run itself goes back: what it has saved in between is old.
    std::mutex mutex;
    run_fsdp_on_threads(2, still_run([&](const dist::TrainingState& state, dist::World& w) {
                          dist::CheckpointWriter writer(w, state,
                                                        {.dir = dir.path(), .run = "r", .keep = 2});
                          std::string errors;
                          bool newest_is_last = true;
                          for (const int64_t step : {16, 17, 18, 17, 18}) {
                            writer.begin(progress_of(step));
                            errors += writer.finish().value().error;
                            newest_is_last &= steps_in(dir.path()).front() == step;
                            w.control().barrier();
                          }
                          const std::lock_guard lock(mutex);
                          CHECK(errors.empty());
                          CHECK(newest_is_last);
                        }));
    set_faults(Faults::kNone);
    CHECK(steps_in(dir.path()) == std::vector<int64_t>{18, 17, 30, 20});
    for (const int64_t step : {17, 18, 20, 30}) check_whole(dir, step);
    CHECK(dist::list_incomplete(dir.path()).empty());
    CHECK(dist::CheckpointReader(step_dir(dir, 18)).manifest().sequence == 9);
  }
}

TEST_CASE("checkpoint faults: a file that is cut while it is read is named", "[checkpoint]") {
  const TempDir dir;
  FsdpRun run = still_run(nullptr);
  run.model.width = 96;  // files of several pages
  run.on_state = [&](const dist::TrainingState& state, dist::World& w) {
    dist::CheckpointWriter writer(w, state, {.dir = dir.path(), .run = "r"});
    writer.begin(progress_of(1));
    writer.finish();
  };
  run_fsdp_on_threads(1, run);
  const dist::CheckpointReader reader(step_dir(dir, 1));
  reader.check_files();
  const std::string path = step_dir(dir, 1) + "/rank-00000.safetensors";
  const auto nbytes = std::filesystem::file_size(path);
  REQUIRE(nbytes > 5 * 4096);
  std::filesystem::resize_file(path, 4096);
  const dist::TensorRecord& tensor = *reader.manifest().find("parameters/embed.weight");
  std::vector<float> values(static_cast<size_t>(tensor.shape.numel()));
  const std::string expected =
      fmt::format("{}: cut to 4096 bytes while it was read, expected {} as before", path, nbytes);
  CHECK(error_of([&] {
          reader.read_tensor(tensor.name, 0, tensor.shape.numel(), values.data());
        }) == expected);
  CHECK(error_of([&] { reader.check_files(); }) == expected);
  CHECK_THROWS_AS(reader.check_files(), dist::UnreadableCheckpointError);
}

TEST_CASE("checkpoint faults: no manifest is written where a file of a rank is gone",
          "[checkpoint]") {
  const TempDir dir;
  std::mutex mutex;
  std::string error;
  run_fsdp_on_threads(
      2, still_run([&](const dist::TrainingState& state, dist::World& w) {
        dist::CheckpointWriter writer(w, state, {.dir = dir.path(), .run = "r"});
        writer.begin(progress_of(3));
        while (writer.state() == dist::CheckpointWriter::State::kBusy) std::this_thread::yield();
        w.control().barrier();
        if (w.rank() == 0) {
          std::filesystem::remove(step_dir(dir, 3) + ".partial/rank-00001.safetensors");
        }
        w.control().barrier();
        const auto result = writer.finish();
        const std::lock_guard lock(mutex);
        error = result.value().error;
      }));
  CHECK(error == step_dir(dir, 3) +
                     ".partial/rank-00001.safetensors: cannot be written: No such file or "
                     "directory");
  CHECK(std::filesystem::is_empty(dir.path()));
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
        std::vector<SafetensorsEntry> entries;
        for (const nn::NamedParameter& p : state.model->named_parameters()) {
          entries.push_back({p.name, kF32, p.parameter->tensor.shape()});
        }
        num_parameters = entries.size();
        dist::save_parameters(
            *state.fsdp, w, [&] { return std::make_unique<SafetensorsWriter>(path, entries); },
            // In a collective that waits for the disk, rank 1 would never come here to free it.
            [&] {
              if (w.rank() == 1 && ++num_turns == 3) set_faults(Faults::kNone);
            });
      }));
  set_faults(Faults::kNone);
  CHECK(num_turns >= 3);
  CHECK(SafetensorsFile(path).entries().size() == num_parameters);
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
