#include "apps/run_dir.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "apps/saved_model.h"
#include "core/check.h"
#include "core/fatal_signals.h"
#include "core/files.h"
#include "core/formats/event_file.h"
#include "core/formats/strict_json.h"
#include "core/log.h"
#include "core/text.h"
#include "dist/checkpoint/reader.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxWhyNbytes = 4096;
constexpr const char* kLockFile = "/run.lock";
constexpr const char* kRunFile = "/run.json";
constexpr std::array kStateNames = {"running", "finished", "preempted", "failed"};
/// What a run writes beside its checkpoints, what goes with its tokenizer among it.
std::vector<std::string_view> artefacts() {
  std::vector<std::string_view> names = {
      "status.json",     "config.toml",       "run.json", "metrics.jsonl",  "tokenizer.json",
      "token_check.txt", "model.safetensors", "run.lock", "references.bin", "profile.json"};
  names.insert(names.end(), text::kCompanionFiles.begin(), text::kCompanionFiles.end());
  return names;
}

/// A small text; empty if there is none.
std::string read_small(const std::string& path) {
  constexpr int64_t kMaxNbytes = 1 << 16;
  try {
    return read_regular_file(path, kMaxNbytes);
  } catch (const InputError&) {
    return "";
  }
}

/// A JSON object; null for anything else.
nlohmann::json parse_object(std::string_view text) {
  constexpr int kMaxDepth = 4;
  try {
    auto object = parse_strict_json("", text, kMaxDepth, "an object");
    return object.is_object() ? object : nlohmann::json();
  } catch (const InputError&) {
    return {};
  }
}

std::string text_of(const nlohmann::json& object, const char* key) {
  return object.contains(key) && object[key].is_string() ? object[key].get<std::string>() : "";
}
int64_t integer_of(const nlohmann::json& object, const char* key) {
  return object.contains(key) ? std::max<int64_t>(json_size(object[key]), 0) : 0;
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

std::string dump(const nlohmann::ordered_json& object) {
  return object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string process_text(const RunHolder& holder) {
  return fmt::format("process {} on {}", holder.pid, holder.host);
}

bool is_same_dir(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) && !error;
}

std::string parent_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

/// Of a run that got no further than that: with who held it, or not yet.
bool is_lock_of_a_run(const std::string& dir) {
  const std::string path = dir + kLockFile;
  std::error_code ignored;
  if (fs::symlink_status(path, ignored).type() != fs::file_type::regular) return false;
  return fs::file_size(path, ignored) == 0 || integer_of(parse_object(read_small(path)), "pid") > 0;
}

bool is_of_a_run(const std::string& dir) {
  return read_status(dir) || !read_run(dir).empty();
}

}  // namespace

void write_status(const std::string& dir, RunState state, int64_t step, const std::string& why,
                  std::optional<double> loss) {
  nlohmann::ordered_json status = {{"state", kStateNames[static_cast<size_t>(state)]},
                                   {"step", step},
                                   {"why", shorten(why, kMaxWhyNbytes)}};
  if (loss) status["loss"] = *loss;
  status["time"] = utc_now();
  status["host"] = host_name();
  status["pid"] = ::getpid();
  write_short_file(dir + "/status.json", dump(status));
}

std::string fatal_status_text() {
  return dump({{"state", kStateNames[static_cast<size_t>(RunState::kFailed)]},
               {"step", "@step@"},
               {"why", FatalReport::kWhy},
               {"host", host_name()},
               {"pid", ::getpid()}});
}

std::optional<RunStatus> parse_status(std::string_view text) {
  const nlohmann::json object = parse_object(text);
  const std::string name = text_of(object, "state");
  const auto found = std::find(kStateNames.begin(), kStateNames.end(), name);
  if (found == kStateNames.end()) return std::nullopt;
  RunStatus status;
  status.state = static_cast<RunState>(found - kStateNames.begin());
  status.step = integer_of(object, "step");
  status.why = text_of(object, "why");
  if (object.contains("loss") && object["loss"].is_number()) {
    status.loss = object["loss"].get<double>();
  }
  status.time = text_of(object, "time");
  status.host = text_of(object, "host");
  status.pid = integer_of(object, "pid");
  return status;
}

std::optional<RunStatus> read_status(const std::string& dir) {
  return parse_status(read_small(dir + "/status.json"));
}

std::string parse_run(std::string_view text) {
  return text_of(parse_object(text), "run");
}
std::string read_run(const std::string& dir) {
  return parse_run(read_small(dir + kRunFile));
}

std::string read_origin(const std::string& dir) {
  return text_of(parse_object(read_small(dir + kRunFile)), "from");
}

void write_run(const std::string& dir, const std::string& run, const std::string& origin) {
  nlohmann::ordered_json object = {{"run", run}};
  if (!origin.empty()) object["from"] = origin;
  write_file_atomically(dir + kRunFile, dump(object));
}

namespace {

int call_fcntl(int fd, int command, struct flock* lock) {
  return ::fcntl(fd, command, lock);
}

/// 0 or errno. `type` is F_WRLCK, F_RDLCK or F_UNLCK.
int lock_byte(RunLock::Call call, int fd, short type, int64_t byte) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return call(fd, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
}

bool is_held_by_another(int error) {
  return error == EAGAIN || error == EACCES;
}

int open_lock(const std::string& dir, int flags) {
  return ::open((dir + kLockFile).c_str(), flags | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0644);
}

constexpr int64_t kWriterByte = 0, kRanksByte = 1;

}  // namespace

std::unique_ptr<RunLock> RunLock::try_hold(const std::string& dir, double wait_s, Call call) {
  if (call == nullptr) call = call_fcntl;
  const int fd = open_lock(dir, O_RDWR | O_CREAT);
  if (fd < 0) throw IoError(fmt::format("{}{}: {}", dir, kLockFile, std::strerror(errno)));
  std::unique_ptr<RunLock> lock(new RunLock(fd));
  int error = lock_byte(call, fd, F_WRLCK, kWriterByte);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(wait_s);
  // Ranks of a run whose writer is gone are about to go as well.
  while (error == 0 && is_held_by_another(error = lock_byte(call, fd, F_WRLCK, kRanksByte)) &&
         std::chrono::steady_clock::now() < end) {
    constexpr std::chrono::milliseconds kPeriod{50};
    std::this_thread::sleep_for(kPeriod);
    error = 0;
  }
  if (is_held_by_another(error)) return nullptr;
  if (error == 0) {
    lock_byte(call, fd, F_UNLCK, kRanksByte);
  } else {
    log_warning(
        "{}{}: this file system has no locks ({}): a second run in this directory would "
        "not be noticed",
        dir, kLockFile, std::strerror(error));
  }
  const std::string text = dump({{"host", host_name()}, {"pid", ::getpid()}, {"time", utc_now()}});
  const bool is_written = ::ftruncate(fd, 0) == 0 && ::pwrite(fd, text.data(), text.size(), 0) ==
                                                         static_cast<ssize_t>(text.size());
  if (!is_written) {
    throw IoError(fmt::format("{}{}: cannot be written: {}", dir, kLockFile, std::strerror(errno)));
  }
  return lock;
}

std::unique_ptr<RunLock> RunLock::share(const std::string& dir) {
  const int fd = open_lock(dir, O_RDONLY);
  if (fd < 0) return nullptr;
  std::unique_ptr<RunLock> lock(new RunLock(fd));
  return lock_byte(call_fcntl, fd, F_RDLCK, kRanksByte) == 0 ? std::move(lock) : nullptr;
}

std::optional<RunHolder> RunLock::holder(const std::string& dir, Call call) {
  if (call == nullptr) call = call_fcntl;
  const RunLock file(open_lock(dir, O_RDONLY));
  if (file.fd_ < 0) return std::nullopt;
  const nlohmann::json object = parse_object(read_small(dir + kLockFile));
  const RunHolder named{text_of(object, "host"), integer_of(object, "pid")};
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = kWriterByte;
  lock.l_len = 2;
  if (call(file.fd_, F_OFD_GETLK, &lock) == 0) {
    if (lock.l_type == F_UNLCK) return std::nullopt;
    return named;
  }
  const bool is_gone = named.pid <= 0 || named.pid > INT32_MAX ||
                       (named.host == host_name() &&
                        ::kill(static_cast<pid_t>(named.pid), 0) != 0 && errno == ESRCH);
  if (is_gone) return std::nullopt;
  return named;
}

RunLock::~RunLock() {
  if (fd_ >= 0) ::close(fd_);
}

namespace {

/// Of the last whole line of `metrics.jsonl`, which has every step; 0 without one.
int64_t last_logged_step(const std::string& dir) {
  constexpr std::streamoff kTail = 65536;
  std::ifstream file(dir + "/metrics.jsonl", std::ios::binary | std::ios::ate);
  const std::streamoff nbytes = file ? std::streamoff(file.tellg()) : 0;
  file.seekg(std::max<std::streamoff>(0, nbytes - kTail));
  int64_t step = 0;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    step = std::max(step, integer_of(parse_object(line), "step"));
  }
  return step;
}

}  // namespace

std::string describe_run(const std::string& dir, bool is_mine) {
  const std::optional<RunStatus> status = read_status(dir);
  if (!status) return "";
  switch (status->state) {
    case RunState::kFinished:
      return fmt::format("finished at step {}", status->step);
    case RunState::kPreempted:
      return fmt::format("was preempted at step {}", status->step);
    case RunState::kFailed: {
      constexpr size_t kLongest = 200;
      return fmt::format("failed at step {}: {}", status->step, shorten(status->why, kLongest));
    }
    case RunState::kRunning:
      break;
  }
  const std::optional<RunHolder> holder = is_mine ? std::nullopt : RunLock::holder(dir);
  const int64_t step = std::max(status->step, last_logged_step(dir));
  return fmt::format("{} at step {} ({})", holder ? "is" : "died", step,
                     process_text(holder ? *holder : RunHolder{status->host, status->pid}));
}

std::string describe_unfinished(const std::string& path) {
  const std::string dir = run_dir_of(path);
  const std::optional<RunStatus> status = read_status(dir);
  return status && status->state != RunState::kFinished ? describe_run(dir) : "";
}

std::string run_dir_of(const std::string& path) {
  const fs::path dir(path);
  std::error_code ignored;
  return dir.filename() == "latest" && !fs::exists(dir, ignored) ? parent_of(path) : path;
}

void check_export_target(const std::string& target) {
  std::error_code ignored;
  if (is_of_a_run(target)) {
    const std::string run = describe_run(target);
    throw ConfigError(
        fmt::format("{}: the directory of a run{}{}, whose files would be replaced, expected "
                    "another one",
                    target, run.empty() ? "" : " that ", run));
  }
  if (fs::exists(fs::path(target) / dist::kManifestName, ignored)) {
    throw ConfigError(fmt::format("{}: a checkpoint, expected another directory", target));
  }
}

RunDir::RunDir(const Config& config, dist::World& world) : config_(config), world_(world) {
  places_.push_back({"output.dir", config.output.dir, nullptr});
  world_.control().verdict([&] {
    if (world_.rank() == 0) hold();
  });
  const int64_t begins = world_.control().max(world_.rank() == 0 && !has_earlier_ ? 1 : 0);
  if (world_.rank() != 0) {
    for (const std::string& dir : {config.output.dir, config.checkpoint.dir}) {
      if (dir.empty()) continue;
      if (auto lock = RunLock::share(dir)) places_.push_back({"", dir, std::move(lock)});
    }
  }
  is_begun_ = begins != 0;
}

/// On rank 0.
void RunDir::hold() {
  const std::string& other = config_.checkpoint.dir;
  for (size_t i = 0; i < 2; ++i) {
    if (i == 1) {  // made only now: whether it is the same shows when the first is there
      if (other.empty() || is_same_dir(other, config_.output.dir)) break;
      places_.push_back({"checkpoint.dir", other, nullptr});
    }
    Place& place = places_.back();
    const std::string name = fmt::format("{} = {}", place.key, place.dir);
    const std::string& origin = config_.origin(place.key);
    std::error_code error;
    fs::create_directories(place.dir, error);
    if (error) {
      throw ConfigError(fmt::format("{}: {}: {}, expected a directory that can be made", origin,
                                    name, error.message()));
    }
    if (i == 1 && is_same_dir(other, config_.output.dir)) {
      places_.pop_back();
      break;
    }
    check_place(place);
    try {
      place.lock = RunLock::try_hold(place.dir);
    } catch (const IoError& e) {
      throw ConfigError(fmt::format("{}: {}: {}, expected a directory that can be written", origin,
                                    place.key, e.what()));
    }
    if (place.lock == nullptr) {
      const std::optional<RunHolder> holder = RunLock::holder(place.dir);
      throw ConfigError(fmt::format(
          "{}: {} is in use by {}, expected another directory, or the end of that run first",
          origin, name, holder ? process_text(*holder) : "another run"));
    }
  }
  check_earlier();
  if (has_earlier_) return;
  try {
    write_status(config_.output.dir, RunState::kRunning, 0);
    write_file_atomically(config_.output.dir + "/config.toml", dump_config(config_));
  } catch (const IoError& e) {
    throw ConfigError(fmt::format("{}: output.dir: {}, expected a directory that can be written",
                                  config_.origin("output.dir"), e.what()));
  }
}

/// Before it is touched: nothing in it may be another's.
void RunDir::check_place(const Place& place) const {
  const std::string where =
      fmt::format("{}: {} = {}", config_.origin(place.key), place.key, place.dir);
  if (!config_.model.from.empty() && is_same_dir(config_.model.from, place.dir)) {
    throw ConfigError(fmt::format(
        "{} is the directory of model.from, whose files the run would replace, expected another",
        where));
  }
  const bool is_ours = is_of_a_run(place.dir);
  for (const std::string_view name : artefacts()) {
    std::error_code ignored;
    const fs::path path = fs::path(place.dir) / name;
    if (fs::is_directory(path, ignored)) {
      throw ConfigError(fmt::format("{}: {} in it is a directory, expected none", where, name));
    }
    if (is_ours || !fs::exists(fs::symlink_status(path, ignored))) continue;
    if (kLockFile + 1 == name && is_lock_of_a_run(place.dir)) continue;
    throw ConfigError(
        fmt::format("{} has a {} that no run of ours made, expected an empty directory, or one of "
                    "a run",
                    where, name));
  }
}

/// What is there of an earlier run, and whether this one may come after it.
void RunDir::check_earlier() {
  std::error_code ignored;
  const std::string& out = config_.output.dir;
  const std::optional<RunStatus> status = read_status(out);
  const Place& last = places_.back();
  const auto checkpoints = dist::list_checkpoints(last.dir);
  const bool has_metrics = fs::exists(out + "/metrics.jsonl", ignored) &&
                           fs::file_size(out + "/metrics.jsonl", ignored) > 0;
  has_earlier_ = (status && status->step > 0) || has_metrics || !checkpoints.empty() ||
                 fs::exists(out + "/model.safetensors", ignored);
  if (!has_earlier_) return;
  if (places_.size() == 2 && config_.checkpoint.resume == "auto" && !checkpoints.empty()) {
    const std::string here = read_run(out), there = read_run(last.dir);
    if (!here.empty() && !there.empty() && here != there) {
      throw ConfigError(
          fmt::format("{}: checkpoint.dir = {} has the checkpoints of another run "
                      "than output.dir = {}, expected those of the same",
                      config_.origin("checkpoint.dir"), last.dir, out));
    }
  }
  if (config_.output.overwrite || resumes_in_place()) return;
  const bool is_output = status || checkpoints.empty();
  const Place& place = is_output ? places_.front() : last;
  const std::string run = describe_run(out, /*is_mine=*/true);
  throw ConfigError(fmt::format(
      "{}: {} = {} has {}, expected --resume=auto to go on, another directory, or "
      "--output.overwrite to replace it",
      config_.origin(place.key), place.key, place.dir,
      is_output ? "a run that " + (run.empty() ? "ended" : run)
                : fmt::format("checkpoints of a run (up to step {})", checkpoints.front().step)));
}

bool RunDir::resumes_in_place() const {
  const std::string& resume = config_.checkpoint.resume;
  if (resume == "none" || resume == "auto") return resume == "auto";
  try {
    return is_same_dir(parent_of(dist::resolve_checkpoint(resume)), places_.back().dir);
  } catch (const CheckpointError&) {
    return false;  // it is named when it is to be read
  }
}

/// Of all states that the directories have; -1 without one.
int64_t RunDir::newest_step() const {
  int64_t newest = model_step(config_.output.dir);
  for (const Place& place : places_) {
    for (const auto& found : dist::list_checkpoints(place.dir)) {
      newest = std::max(newest, found.step);
    }
  }
  return newest;
}

/// On rank 0, with `output.overwrite`.
void RunDir::remove_newer(int64_t step) const {
  std::vector<std::pair<std::string, std::string>> newer;  // and the run
  for (const Place& place : places_) {
    const std::string run = read_run(place.dir);
    for (const dist::CheckpointPlace& found : dist::list_checkpoints(place.dir)) {
      if (found.step <= step) continue;
      if (dist::CheckpointReader(found.dir).manifest().run != run) {
        throw ConfigError(
            fmt::format("{}: output.overwrite = true, but {} is of another run, expected "
                        "checkpoints of run {} only",
                        config_.origin("output.overwrite"), found.dir, run));
      }
      newer.emplace_back(found.dir, run);
    }
  }
  for (const auto& [dir, run] : newer) dist::remove_checkpoint(dir, run);
  const std::string& out = config_.output.dir;
  if (model_step(out) > step) fs::remove(out + "/model.safetensors");
}

void RunDir::begin(int64_t step, const std::string& from, const std::string& run) {
  world_.control().verdict([&] {
    if (world_.rank() != 0) return;
    const std::string& out = config_.output.dir;
    const std::string& home = places_.back().dir;  // of the checkpoints
    const bool may_replace = config_.output.overwrite;
    const bool is_in_place = !from.empty() && is_same_dir(parent_of(from), home);
    if (has_earlier_ && !is_in_place && config_.checkpoint.resume == "auto" && !may_replace &&
        model_step(out) >= 0) {
      throw CheckpointError(fmt::format(
          "{}: the model of step {}, but no checkpoint to go on from, expected one, another "
          "output.dir, or --output.overwrite to start from nothing",
          out, model_step(out)));
    }
    const bool goes_back = config_.checkpoint.resume != "auto" && step < newest_step();
    if (has_earlier_ && goes_back && !may_replace) {
      throw ConfigError(fmt::format(
          "{}: checkpoint.resume = {} is of step {}, but {} has come to step {}, expected "
          "--resume=auto, another output.dir, or --output.overwrite to drop the later ones",
          config_.origin("checkpoint.resume"), config_.checkpoint.resume, step, out,
          newest_step()));
    }
    const bool starts_anew = from.empty() || config_.checkpoint.resume != "auto";
    if (has_earlier_ && may_replace && starts_anew) {
      remove_newer(is_in_place ? step : -1);
      if (!is_in_place) {
        fs::remove(out + "/metrics.jsonl");
        remove_event_files(out);
      }
    }
    write_status(out, RunState::kRunning, step);
    write_file_atomically(out + "/config.toml", dump_config(config_));
    const std::string origin = is_in_place    ? read_origin(home)
                               : from.empty() ? ""
                                              : fs::absolute(from).lexically_normal().string();
    for (const Place& place : places_) write_run(place.dir, run, origin);
  });
  is_begun_ = true;
}

std::string trace_path(const Config& config) {
  return config.profile.trace.empty() ? config.output.dir + "/trace.json" : config.profile.trace;
}

void check_trace_path(const Config& config) {
  if (config.profile.steps.empty()) return;
  const std::string name = trace_path(config);
  const bool is_given = !config.profile.trace.empty();
  const auto fail = [&](const std::string& what) {
    throw ConfigError(fmt::format("{}: profile.trace = {}: {}, expected a file that can be written",
                                  config.origin("profile.trace"), name, what));
  };
  const fs::path path(name);
  const std::string parent = parent_of(name);
  std::error_code ignored;
  if (!fs::is_directory(parent, ignored)) {
    if (!is_given) return;  // which the run makes
    fail("no directory " + parent);
  }
  const std::vector<std::string_view> own = artefacts();
  if (is_same_dir(parent, config.output.dir) &&
      std::find(own.begin(), own.end(), path.filename().string()) != own.end()) {
    fail("a file of the run itself");
  }
  if (fs::is_directory(path, ignored)) fail("a directory");
  const bool exists = fs::exists(path, ignored);
  // The end would wait for somebody who reads it.
  if (fs::is_fifo(path, ignored) || fs::is_socket(path, ignored)) fail("no regular file");
  if (::access(exists ? name.c_str() : parent.c_str(), W_OK) != 0) fail(std::strerror(errno));
  if (!fs::is_regular_file(path, ignored) || fs::file_size(path, ignored) == 0) return;
  std::ifstream file(name, std::ios::binary);
  std::array<char, 2> begin{};
  if (!file.read(begin.data(), begin.size()) || begin[0] != '[' || begin[1] != '\n') {
    fail("a file with something else than a timeline in it");
  }
}

}  // namespace tessera::apps
