#include "dist/checkpoint/writer.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "core/check.h"
#include "core/formats/durable_file.h"
#include "core/log.h"
#include "core/profiler.h"
#include "dist/checkpoint/reader.h"

namespace tessera::dist {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBlockNbytes = int64_t{4} << 20;   // of a write
constexpr int64_t kHashNbytes = int64_t{256} << 10;  // is in the cache for the second hash
constexpr std::chrono::milliseconds kPollPeriod{20};

static_assert(Snapshot::kAlignment % DurableFile::kDirectNbytes == 0 &&
              kBlockNbytes % DurableFile::kDirectNbytes == 0);

/// This thread only gets what others leave of the processors, and of the disk.
void step_back() {
  constexpr int kNice = 10;  // not the last: the next save waits for this one
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kNice);
  const sched_param none{};
  ::sched_setscheduler(0, SCHED_BATCH, &none);  // its waking up interrupts nobody
  constexpr int kThisThread = 1, kBestEffortLast = (2 << 13) | 7;  // of linux/ioprio.h
  ::syscall(SYS_ioprio_set, kThisThread, 0, kBestEffortLast);
}

/// The hash of each slice of a snapshot and of the file that it is in, in one pass over its bytes.
class SliceHasher {
 public:
  SliceHasher(const Snapshot& snapshot, Hasher& file) : snapshot_(snapshot), file_(file) {
    end_slices();
  }

  /// The next bytes.
  void update(const char* data, int64_t nbytes) {
    while (nbytes > 0) {
      const int64_t left = snapshot_.offset(hashes_.size() + 1) - done_;
      const int64_t count = std::min({nbytes, left, kHashNbytes});
      file_.update(data, count);
      slice_->update(data, count);
      data += count;
      nbytes -= count;
      done_ += count;
      end_slices();
    }
  }
  const std::vector<uint64_t>& hashes() const { return hashes_; }

 private:
  void end_slices() {
    if (!slice_) slice_.emplace();
    const size_t num_slices = snapshot_.slices().size();
    while (hashes_.size() < num_slices && snapshot_.offset(hashes_.size() + 1) == done_) {
      hashes_.push_back(slice_->digest());
      slice_.emplace();
    }
  }

  const Snapshot& snapshot_;
  Hasher& file_;
  std::optional<Hasher> slice_;
  std::vector<uint64_t> hashes_;  // of the slices that are through
  int64_t done_ = 0;
};

}  // namespace

/// A complete checkpoint of this run.
struct CheckpointWriter::Known {
  std::string dir;
  int64_t step, sequence;
  std::optional<double> val_loss;  // of the validation data that the last one saved has
};

/// Runs jobs one after the other, below the priority of the threads that compute.
class CheckpointWriter::Thread {
 public:
  Thread() : thread_([this] { run(); }) {}
  ~Thread() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  /// A job whose end `state` shows.
  void start(std::function<void()> job) {
    state_ = State::kBusy;
    push([this, job = std::move(job)] {
      try {
        job();
        finish(State::kDone, "");
      } catch (const std::exception& error) {
        finish(State::kFailed, error.what());
      }
    });
  }
  State state() const { return state_; }
  void set_idle() { state_ = State::kIdle; }
  std::string error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  void wait(std::chrono::milliseconds timeout) const {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [this] { return state_ != State::kBusy; });
  }

 private:
  void push(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_all();
  }
  void finish(State state, std::string error) {
    {
      const std::lock_guard lock(mutex_);
      error_ = std::move(error);
      state_ = state;
    }
    changed_.notify_all();
  }
  void run() {
    step_back();
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job();
    }
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::atomic<State> state_{State::kIdle};
  std::string error_;
  bool stop_ = false;
  std::thread thread_;
};

CheckpointWriter::CheckpointWriter(World& world, const TrainingState& state,
                                   CheckpointOptions options)
    : world_(world),
      state_(state),
      options_(std::move(options)),
      thread_(std::make_unique<Thread>()) {}

CheckpointWriter::~CheckpointWriter() {
  thread_.reset();  // before the snapshot goes
}

std::optional<SaveResult> CheckpointWriter::begin(const Progress& progress) {
  std::optional<SaveResult> last = finish();
  if (snapshot_ == nullptr) snapshot_ = std::make_unique<Snapshot>(owned_slices(state_));
  snapshot_->capture();
  phase_ = Phase::kFiles;
  progress_ = progress;
  begin_ns_ = profiler::now_ns();
  thread_->start([this, progress] { record_ = write_file(progress); });
  return last;
}

CheckpointWriter::State CheckpointWriter::state() const {
  return thread_->state();
}

std::optional<SaveResult> CheckpointWriter::advance(std::span<const State> states) {
  if (phase_ == Phase::kIdle) return std::nullopt;
  const auto any = [&](State state) {
    return std::find(states.begin(), states.end(), state) != states.end();
  };
  if (any(State::kBusy)) return std::nullopt;
  if (phase_ == Phase::kCleanup) {
    if (thread_->state() == State::kFailed) log_warning("{}", thread_->error());
    return end(std::exchange(error_, ""));
  }
  if (any(State::kFailed)) {
    std::string error;
    for (const std::string& text : world_.control().all_gather(thread_->error())) {
      if (error.empty()) error = text;  // of the lowest rank that has one
    }
    error_ = std::move(error);
    phase_ = Phase::kCleanup;
    thread_->set_idle();
    if (world_.rank() == 0) {  // what is there of it takes room and will never be complete
      thread_->start([dir = partial_dir(), run = options_.run] {
        if (!fs::exists(dir)) return;
        remove_checkpoint(dir, run);
        ::rmdir(dir.c_str());  // no rank may have come to a file in it
      });
    }
    return std::nullopt;
  }
  if (phase_ == Phase::kManifest) return end("");
  // All files are on the disk.
  std::vector<RankRecord> records;
  for (const std::string& text : world_.control().all_gather(to_json(record_))) {
    records.push_back(rank_record_from_json(text));
  }
  nbytes_ = 0;
  for (const RankRecord& record : records) nbytes_ += record.file.nbytes;
  phase_ = Phase::kManifest;
  thread_->set_idle();
  if (world_.rank() == 0) {
    Manifest manifest;
    manifest.project_version = TESSERA_VERSION;
    manifest.run = options_.run;
    manifest.world_size = world_.world_size();
    manifest.progress = progress_;
    add_records(manifest, records);
    thread_->start([this, manifest = std::move(manifest)] { commit(manifest); });
  }
  return std::nullopt;
}

std::optional<SaveResult> CheckpointWriter::poll() {
  if (phase_ == Phase::kIdle) return std::nullopt;
  const State mine = state();
  std::vector<State> states(static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(states.data(), &mine, sizeof(mine));
  return advance(states);
}

std::optional<SaveResult> CheckpointWriter::finish() {
  while (phase_ != Phase::kIdle) {
    // In turns of a short wait and a short exchange, so that a slow disk is no collective that
    // does not end.
    thread_->wait(kPollPeriod);
    if (std::optional<SaveResult> result = poll()) return result;
  }
  return std::nullopt;
}

SaveResult CheckpointWriter::end(std::string error) {
  phase_ = Phase::kIdle;
  thread_->set_idle();
  return {progress_.step, std::move(error),
          static_cast<double>(profiler::now_ns() - begin_ns_) * 1e-9, nbytes_};
}

RankRecord CheckpointWriter::write_file(const Progress& progress) const {
  check_place();
  const std::string dir = partial_dir();
  if (fs::is_symlink(dir)) throw IoError(dir + ": a link, expected none, or a directory");
  make_directory_durably(dir);
  const std::string header = safetensors_header(snapshot_->entries(),
                                                {{"format", "tessera checkpoint"},
                                                 {"run", options_.run},
                                                 {"step", std::to_string(progress.step)},
                                                 {"rank", std::to_string(world_.rank())}},
                                                DurableFile::kDirectNbytes);
  RankRecord record;
  record.file.name = rank_file_name(world_.rank());
  record.file.nbytes = static_cast<int64_t>(header.size()) + snapshot_->nbytes();
  snapshot_->wait();
  DurableFile file(dir + "/" + record.file.name, record.file.nbytes);
  Hasher hasher;
  hasher.update(header.data(), static_cast<int64_t>(header.size()));
  file.write(header.data(), static_cast<int64_t>(header.size()));
  SliceHasher slices(*snapshot_, hasher);
  const char* data = static_cast<const char*>(snapshot_->data());
  for (int64_t first = 0; first < snapshot_->nbytes(); first += kBlockNbytes) {
    const int64_t count = std::min(kBlockNbytes, snapshot_->nbytes() - first);
    slices.update(data + first, count);
    file.write(data + first, count);
  }
  for (size_t i = 0; i < snapshot_->slices().size(); ++i) {
    const Slice& s = snapshot_->slices()[i];
    record.slices.push_back(
        {s.tensor, s.values.dtype(), s.shape, s.begin, s.end(), slices.hashes()[i]});
  }
  record.file.hash = hasher.digest();
  file.commit();
  return record;
}

/// IoError if a checkpoint of this run cannot take the name: what is there is not of this run, or
/// cannot be told to be.
void CheckpointWriter::check_place() const {
  const std::string dir = final_dir(), &run = options_.run;
  std::error_code error;
  const fs::file_status status = fs::symlink_status(dir, error);
  if (status.type() == fs::file_type::not_found) return;
  const auto refuse = [&](const std::string& found) {
    throw IoError(fmt::format("{}: {}, expected none, or a checkpoint of run {} that can be read",
                              dir, found, run));
  };
  if (status.type() == fs::file_type::symlink) refuse("a link");
  if (status.type() != fs::file_type::directory) refuse("no directory");
  if (is_left_alone(dir)) refuse("a checkpoint that could not be read");
  if (fs::is_empty(dir, error) || is_checkpoint_of(dir, run)) return;
  std::string found = "a directory of something else";
  try {
    found = "a checkpoint of run " + CheckpointReader(dir).manifest().run;
  } catch (const UnreadableCheckpointError&) {
    if (fs::exists(dir + "/" + kManifestName)) found = "a checkpoint that cannot be read";
  } catch (const CheckpointError&) {
    found = "a damaged checkpoint";
  }
  refuse(found);
}

bool CheckpointWriter::is_left_alone(const std::string& dir) const {
  const auto& all = options_.leave_alone;
  return std::find(all.begin(), all.end(), dir) != all.end();
}

std::string CheckpointWriter::final_dir() const {
  return options_.dir + "/" + step_directory_name(progress_.step);
}
std::string CheckpointWriter::partial_dir() const {
  return final_dir() + std::string(kPartialSuffix);
}

void CheckpointWriter::commit(Manifest manifest) {
  const std::string dir = partial_dir();
  std::set<std::string> names;
  for (const FileRecord& file : manifest.files) {
    names.insert(file.name);
    const std::string path = dir + "/" + file.name;
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) throw IoError(describe_io_error(path, errno, 0));
    if (status.st_size != file.nbytes) {
      throw IoError(fmt::format("{}: {} bytes, expected the {} that its rank has written", path,
                                status.st_size, file.nbytes));
    }
  }
  // Files that an earlier process with more ranks left here.
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (!names.contains(name) && is_checkpoint_file_name(name)) fs::remove(entry.path());
  }
  std::vector<Known> known = known_checkpoints(manifest.progress);
  for (const Known& k : known) manifest.sequence = std::max(manifest.sequence, k.sequence);
  ++manifest.sequence;
  if (first_sequence_ == 0) first_sequence_ = manifest.sequence;
  write_durably(dir + "/" + kManifestName, to_json(manifest));
  check_place();
  replace_directory(dir, final_dir());
  try {
    if (fs::exists(dir)) {  // an earlier save of this step
      remove_checkpoint(dir, options_.run);
      ::rmdir(dir.c_str());
    }
    prune(manifest, std::move(known));
  } catch (const std::exception& error) {  // the checkpoint is complete all the same
    log_warning("{}", error.what());
  }
}

std::vector<size_t> superfluous_checkpoints(std::span<const CheckpointRank> checkpoints,
                                            int64_t keep, bool keep_best) {
  size_t best = checkpoints.size();
  for (size_t i = 0; i < checkpoints.size() && keep_best; ++i) {
    const std::optional<double>& loss = checkpoints[i].val_loss;
    if (!loss || std::isnan(*loss)) continue;
    if (best == checkpoints.size() || *loss < *checkpoints[best].val_loss) best = i;
  }
  std::vector<size_t> superfluous;
  for (size_t i = static_cast<size_t>(std::max<int64_t>(keep, 0)); i < checkpoints.size(); ++i) {
    if (i != best) superfluous.push_back(i);
  }
  return superfluous;
}

std::vector<CheckpointWriter::Known> CheckpointWriter::known_checkpoints(
    const Progress& saved) const {
  std::vector<Known> known;
  for (const CheckpointPlace& place : list_checkpoints(options_.dir)) {
    if (fs::is_symlink(place.dir) || is_left_alone(place.dir)) continue;
    try {
      const Manifest manifest = CheckpointReader(place.dir).manifest();
      if (manifest.run != options_.run) continue;
      const Progress& p = manifest.progress;
      known.push_back({place.dir, place.step, manifest.sequence,
                       is_same_validation(p, saved) ? p.val_loss : std::nullopt});
    } catch (const CheckpointError&) {  // nothing that this run has made, as far as can be told
    }
  }
  return known;
}

/// After a save, with those before it, the newest first.
void CheckpointWriter::prune(const Manifest& saved, std::vector<Known> known) const {
  const int64_t step = saved.progress.step;
  // Of this step: it has been replaced. Later ones: somebody went back to before them on purpose,
  // unless it was this run itself.
  std::erase_if(known, [&](const Known& k) {
    return k.step == step || (k.step > step && k.sequence < first_sequence_);
  });
  known.insert(known.begin(), {final_dir(), step, saved.sequence, saved.progress.val_loss});
  std::vector<CheckpointRank> ranks;
  for (const Known& k : known) ranks.push_back({k.step, k.val_loss});
  for (const size_t i : superfluous_checkpoints(ranks, options_.keep, options_.keep_best)) {
    remove_checkpoint(known[i].dir, options_.run);
  }
  // What earlier saves left half-written. This one was the only one in the making.
  for (const CheckpointPlace& place : list_incomplete(options_.dir)) {
    remove_checkpoint(place.dir, options_.run);
  }
}

}  // namespace tessera::dist
