// What a start may do to a directory, who holds it, and what is in it when a run has ended.

#include "apps/run_dir.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "apps/checkpoint_command.h"
#include "apps/run_control.h"
#include "apps/saved_model.h"
#include "apps/trainer.h"
#include "core/formats/durable_file.h"
#include "dist/checkpoint/reader.h"
#include "dist/comm/local.h"
#include "test/apps/runs.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::error_on;
using tessera::testing::losses;
using tessera::testing::read_file;
using tessera::testing::saved_steps;
using tessera::testing::TempDir;
using tessera::testing::train_on;

namespace fs = std::filesystem;

namespace {

std::string example_text() {
  std::string text;
  for (int i = 0; i < 80; ++i) text += "line " + std::to_string(i * i) + " of a text\n";
  return text;
}

/// A run of 6 steps with the settings that a user gets who sets none.
Config small_config(const TempDir& dir, const std::vector<std::string>& extra = {}) {
  std::vector<std::string> overrides = {
      "--data.text=" + dir.write("text", example_text()),
      "--output.dir=" + dir / "out",
      "--device=cpu",
      "--model.layers=1",
      "--model.heads=2",
      "--model.width=16",
      "--model.context=16",
      "--train.steps=6",
      "--train.micro_batch=2",
      "--train.log_every=1000",
      "--train.eval_batches=1",
      "--optim.schedule=constant",
  };
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return load_config("", overrides);
}

int status_of(const Config& config) {
  try {
    train_on(1, config);
  } catch (const Error& error) {
    return error.exit_status();
  }
  return 0;
}

/// Every file with its bytes, but for those of the lock.
std::map<std::string, std::string> bytes_of(const std::string& dir) {
  std::map<std::string, std::string> all;
  for (const auto& entry : fs::recursive_directory_iterator(dir)) {
    const std::string name = entry.path().string();
    if (entry.is_regular_file() && !name.ends_with("run.lock")) all[name] = read_file(name);
  }
  return all;
}

std::string output_of(const std::vector<std::string>& arguments) {
  const TempDir dir;
  std::FILE* file = std::fopen((dir / "out").c_str(), "w");
  checkpoint_command(arguments, file);
  std::fclose(file);
  return read_file(dir / "out");
}

std::string this_process() {
  char name[256] = {};
  REQUIRE(::gethostname(name, sizeof(name) - 1) == 0);
  return fmt::format("process {} on {}", ::getpid(), name);
}

/// A process that holds `dir` until it is killed.
class Holder {
 public:
  explicit Holder(const std::string& dir) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      const auto lock = RunLock::try_hold(dir, 0);
      const char is_held = lock != nullptr ? 'y' : 'n';
      if (::write(ends[1], &is_held, 1) == 1) ::pause();
      ::_exit(0);
    }
    char is_held = 0;
    REQUIRE(::read(ends[0], &is_held, 1) == 1);
    REQUIRE(is_held == 'y');
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~Holder() {
    if (pid_ > 0) kill();
  }
  pid_t pid() const { return pid_; }
  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_;
};

int no_locks(int, int, struct flock*) {
  errno = ENOLCK;
  return -1;
}

}  // namespace

TEST_CASE("run lock: one holds a directory, until its process is gone, however that ends",
          "[run_dir]") {
  const TempDir dir;
  CHECK_FALSE(RunLock::holder(dir.path()).has_value());
  auto lock = RunLock::try_hold(dir.path(), 0);
  REQUIRE(lock != nullptr);
  CHECK(RunLock::try_hold(dir.path(), 0) == nullptr);
  CHECK(RunLock::holder(dir.path()).value().pid == ::getpid());
  lock.reset();
  CHECK_FALSE(RunLock::holder(dir.path()).has_value());
  Holder other(dir.path());
  CHECK(RunLock::try_hold(dir.path(), 0) == nullptr);
  CHECK(RunLock::holder(dir.path()).value().pid == other.pid());
  other.kill();
  CHECK_FALSE(RunLock::holder(dir.path()).has_value());
  CHECK(RunLock::try_hold(dir.path(), 0) != nullptr);
  CHECK(error_of([&] { RunLock::try_hold(dir / "none", 0); }) ==
        dir / "none/run.lock: No such file or directory");
}

TEST_CASE("run lock: ranks of a run whose writer is gone keep the next one waiting", "[run_dir]") {
  const TempDir dir;
  CHECK(RunLock::share(dir.path()) == nullptr);  // nobody has held it
  auto writer = RunLock::try_hold(dir.path(), 0);
  auto rank = RunLock::share(dir.path()), other_rank = RunLock::share(dir.path());
  REQUIRE(rank != nullptr);
  REQUIRE(other_rank != nullptr);
  writer.reset();
  CHECK(RunLock::try_hold(dir.path(), 0) == nullptr);
  CHECK(RunLock::holder(dir.path()).has_value());
  rank.reset();
  CHECK(RunLock::try_hold(dir.path(), 0) == nullptr);
  other_rank.reset();
  CHECK(RunLock::try_hold(dir.path(), 0) != nullptr);
}

TEST_CASE("run lock: without locks it says so, and goes by the process that is named",
          "[run_dir]") {
  const TempDir dir;
  CHECK(RunLock::try_hold(dir.path(), 0, no_locks) != nullptr);
  CHECK(RunLock::holder(dir.path(), no_locks).value().pid == ::getpid());
  const pid_t gone = ::fork();
  if (gone == 0) ::_exit(0);
  ::waitpid(gone, nullptr, 0);
  std::string text = read_file(dir / "run.lock");
  const std::string mine = fmt::format("\"pid\":{}", ::getpid());
  REQUIRE(text.find(mine) != std::string::npos);
  text.replace(text.find(mine), mine.size(), fmt::format("\"pid\":{}", gone));
  dir.write("run.lock", text);
  CHECK_FALSE(RunLock::holder(dir.path(), no_locks).has_value());
  // Of another host nobody can say.
  dir.write("run.lock", fmt::format("{{\"host\":\"elsewhere\",\"pid\":{}}}", gone));
  CHECK(RunLock::holder(dir.path(), no_locks).value().host == "elsewhere");
}

TEST_CASE("run status: replaced whole, read back, and told in words", "[run_dir]") {
  const TempDir dir;
  CHECK(describe_run(dir.path()).empty());
  write_status(dir.path(), RunState::kRunning, 7, "", 2.5);
  const auto status = nlohmann::json::parse(read_file(dir / "status.json"));
  CHECK(status["state"] == "running");
  CHECK(status["step"] == 7);
  CHECK(status["loss"] == 2.5);
  CHECK(status["pid"] == ::getpid());
  CHECK(status["time"].get<std::string>().size() == 20);
  CHECK(status["time"].get<std::string>().ends_with("Z"));
  CHECK(fmt::format("process {} on {}", ::getpid(), status["host"].get<std::string>()) ==
        this_process());
  CHECK(read_status(dir.path()).value().step == 7);
  CHECK(read_status(dir.path()).value().loss == 2.5);
  // Nobody holds it. What was logged after the last status counts, but for half a line.
  CHECK(describe_run(dir.path()) == "died at step 7 (" + this_process() + ")");
  dir.write("metrics.jsonl", "{\"step\":8}\n{\"step\":9}\n{\"step\":10");
  CHECK(describe_run(dir.path()) == "died at step 9 (" + this_process() + ")");
  {
    const auto lock = RunLock::try_hold(dir.path(), 0);
    CHECK(describe_run(dir.path()) == "is at step 9 (" + this_process() + ")");
  }
  write_status(dir.path(), RunState::kFailed, 12, "loss is \"NaN\" \xff");
  CHECK(nlohmann::json::parse(read_file(dir / "status.json"))["state"] == "failed");
  CHECK(describe_run(dir.path()).starts_with("failed at step 12: loss is \"NaN\" "));
  CHECK_FALSE(fs::exists(dir / "status.json.tmp"));
  write_status(dir.path(), RunState::kPreempted, 1);
  CHECK(describe_run(dir.path()) == "was preempted at step 1");
  write_status(dir.path(), RunState::kFinished, 20);
  CHECK(describe_run(dir.path()) == "finished at step 20");
  CHECK(error_of([&] { write_status(dir / "none", RunState::kFinished, 1); }) ==
        dir / "none/status.json: cannot be written: No such file or directory");
  for (const char* other : {"", "[]", "{\"state\":\"open\"}", "{\"state\":3}"}) {
    dir.write("status.json", other);
    CHECK_FALSE(read_status(dir.path()).has_value());
  }
}

TEST_CASE("run status: what nobody has written is no status, however large or deep", "[run_dir]") {
  const TempDir dir;
  const auto has_status = [&](const std::string& text) {
    dir.write("status.json", text);
    dir.write("run.json", text);
    CHECK(read_run(dir.path()).empty());
    return read_status(dir.path()).has_value();
  };
  CHECK(has_status(R"({"state":"running"})"));
  CHECK_FALSE(has_status(R"({"state":"running","state":"failed"})"));
  CHECK_FALSE(has_status(R"({"state":"running","x":)" + std::string(60'000, '[')));
  CHECK_FALSE(has_status(R"({"state":"running"})" + std::string(70'000, ' ')));
  REQUIRE(has_status(R"({"state":"failed","step":-5,"pid":18446744073709551615,"why":")" +
                     std::string(20'000, 'x') + "\"}"));
  CHECK(read_status(dir.path()).value().step == 0);
  CHECK(read_status(dir.path()).value().pid == 0);
  CHECK(describe_run(dir.path()).size() < 300);
  write_status(dir.path(), RunState::kFailed, 1, std::string(10'000'000, 'x'));
  CHECK(read_status(dir.path()).value().why.size() < 5000);
}

TEST_CASE("run lock: while ranks train, the writer's byte and that of the others are locked",
          "[run_dir]") {
  const TempDir dir;
  std::thread run([&] { train_on(3, small_config(dir, {"--train.steps=100000000"})); });
  while (!fs::exists(dir / "out/metrics.jsonl") || fs::file_size(dir / "out/metrics.jsonl") == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const int fd = ::open((dir / "out/run.lock").c_str(), O_RDWR | O_CLOEXEC);
  const auto kind_of = [&](int64_t byte) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return ::fcntl(fd, F_OFD_GETLK, &lock) == 0 ? lock.l_type : -1;
  };
  const int of_writer = kind_of(0), of_ranks = kind_of(1);
  request_preemption("the test");
  run.join();
  CHECK(of_writer == F_WRLCK);
  CHECK(of_ranks == F_RDLCK);
  CHECK(kind_of(0) == F_UNLCK);
  CHECK(kind_of(1) == F_UNLCK);
  ::close(fd);
}

TEST_CASE("run dir: a configuration of more than is stored is named before a model is made",
          "[run_dir]") {
  const TempDir dir;
  train_on(1, small_config(dir));
  const std::string path = dir / "out/config.toml", text = read_file(path);
  const auto error_with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    REQUIRE(changed.find(from) != std::string::npos);
    dir.write("out/config.toml", changed.replace(changed.find(from), from.size(), to));
    return error_of([&] { load_model(dir / "out"); });
  };
  CHECK(error_with("\nlayers = 1\n", "\nlayers = 10000\n") ==
        dir / "out/model.safetensors: 8 tensors, expected those of model.layers = 10000");
  // 256 GiB of embeddings alone
  CHECK(error_with("\nvocab = 0\n", "\nvocab = 2147483647\n") ==
        dir / "out/model.safetensors: tensor embed.weight is [256, 16], expected [2147483647, 16]");
  CHECK(error_with("\nlayers = 1\n", "\nlayers = 2\n") ==
        dir / "out/model.safetensors: no tensor blocks.1.norm1.weight among 8, expected it");
}

TEST_CASE("run dir: no start over a run without --resume or --output.overwrite", "[run_dir]") {
  const TempDir dir;
  const Config config = small_config(dir);
  train_on(2, config);
  const auto before = bytes_of(dir / "out");
  const std::string refusal = fmt::format(
      "command line: output.dir = {} has a run that finished at step 6, expected --resume=auto to "
      "go on, another directory, or --output.overwrite to replace it",
      dir / "out");
  CHECK(error_on(2, config) == refusal);
  CHECK(status_of(config) == 2);
  // Another name for the directory is the same directory.
  fs::create_directory_symlink(dir / "out", dir / "link");
  CHECK_THAT(error_on(1, small_config(dir, {"--output.dir=" + dir / "link"})),
             Catch::Contains("link has a run that finished at step 6"));
  CHECK(bytes_of(dir / "out") == before);
  // One that failed later than at its start, one that died.
  write_status(dir / "out", RunState::kFailed, 3, "no reason");
  CHECK_THAT(error_on(1, config), Catch::Contains("has a run that failed at step 3: no reason, "));
  write_status(dir / "out", RunState::kRunning, 3);
  CHECK_THAT(error_on(1, config), Catch::Contains("has a run that died at step 6 (process "));

  auto overwrite = small_config(dir, {"--output.overwrite=true", "--train.steps=4",
                                      "--train.seed=9", "--data.tokenizer=char"});
  CHECK(dump_config(overwrite).find("overwrite") == std::string::npos);
  // A start that goes wrong has not touched anything either.
  const auto dead = bytes_of(dir / "out");
  auto bad = overwrite;
  bad.data.text = dir / "none";
  CHECK_THAT(error_on(1, bad), Catch::Contains("none: No such file"));
  CHECK(bytes_of(dir / "out") == dead);
  train_on(1, overwrite);
  CHECK(losses(dir / "out").size() == 4);
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{4});
  CHECK(model_step(dir / "out") == 4);
  CHECK(load_model(dir / "out").tokenizer->name() == "char");
  CHECK(describe_run(dir / "out") == "finished at step 4");
  // The old checkpoints go where they are, those of another run among them stay.
  const std::string elsewhere = "--checkpoint.dir=" + dir / "elsewhere";
  train_on(1, small_config(dir, {"--output.overwrite=true", "--train.steps=2", elsewhere}));
  CHECK(saved_steps(dir / "out").empty());
  CHECK(saved_steps(dir / "elsewhere") == std::vector<int64_t>{2});
  train_on(1, small_config(dir, {"--output.dir=" + dir / "second"}));
  fs::copy(dir / "second/step-00000006", dir / "elsewhere/step-00000006");
  const auto mixed = bytes_of(dir / "elsewhere");
  CHECK_THAT(error_on(1, small_config(dir, {"--output.overwrite=true", elsewhere})),
             Catch::StartsWith("command line: output.overwrite = true, but " +
                               dir / "elsewhere/step-00000006 is of another run, expected "));
  CHECK(bytes_of(dir / "elsewhere") == mixed);
  // What failed before its first step has left nothing: the next start may come.
  const std::string fresh = "--output.dir=" + dir / "fresh";
  CHECK(status_of(small_config(dir, {fresh, "--model.context=40000"})) == 3);
  train_on(1, small_config(dir, {fresh}));
}

TEST_CASE("run dir: a resume that is refused leaves the run as it was", "[run_dir]") {
  const TempDir dir;
  train_on(1, small_config(dir));
  const auto before = bytes_of(dir / "out");
  CHECK_THAT(error_on(1, small_config(dir, {"--checkpoint.resume=auto", "--train.seed=5"})),
             Catch::Contains("train.seed 1 there, 5 here"));
  CHECK(bytes_of(dir / "out") == before);
}

TEST_CASE("run dir: a directory in use is refused, with who uses it", "[run_dir]") {
  const TempDir dir;
  fs::create_directory(dir / "out");
  Holder holder(dir / "out");
  const std::string who = fmt::format(" is in use by process {} on ", holder.pid());
  for (const char* resume : {"none", "auto"}) {
    const std::string option = std::string("--checkpoint.resume=") + resume;
    const std::string error = error_on(2, small_config(dir, {option}));
    CHECK_THAT(error, Catch::StartsWith("command line: output.dir = " + dir / "out" + who) &&
                          Catch::EndsWith(", expected another directory, or the end of that run "
                                          "first"));
  }
  const Config elsewhere =
      small_config(dir, {"--output.dir=" + dir / "other", "--checkpoint.dir=" + dir / "out"});
  CHECK_THAT(error_on(2, elsewhere),
             Catch::StartsWith("command line: checkpoint.dir = " + dir / "out" + who));
  CHECK(status_of(elsewhere) == 2);
  holder.kill();
  train_on(2, elsewhere);
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{6});
}

TEST_CASE("run dir: files of others and the model it starts from are left alone", "[run_dir]") {
  const TempDir dir;
  for (const char* name : {"config.toml", "model.safetensors", "tokenizer.json", "status.json",
                           "run.json", "metrics.jsonl", "token_check.txt", "run.lock"}) {
    CAPTURE(name);
    const std::string out = dir / (std::string("with-") + name);
    fs::create_directory(out);
    std::ofstream(out + "/" + name) << "mine";
    for (const char* key : {"output.dir", "checkpoint.dir"}) {
      for (const char* option : {"--output.overwrite=true", "--checkpoint.resume=auto"}) {
        const Config config = small_config(dir, {fmt::format("--{}={}", key, out), option});
        CHECK(error_on(1, config) ==
              fmt::format("command line: {} = {} has a {} that no run of ours made, expected an "
                          "empty directory, or one of a run",
                          key, out, name));
        fs::remove_all(dir / "out");
      }
    }
    CHECK(read_file(out + "/" + name) == "mine");
    CHECK(bytes_of(out).size() == (std::string_view(name) == "run.lock" ? 0u : 1u));
  }
  // The lock of a run that got no further, at any point of its making.
  for (const char* text : {"", "{\"host\":\"a\",\"pid\":1}\n"}) {
    fs::create_directory(dir / "early");
    std::ofstream(dir / "early/run.lock") << text;
    CHECK_NOTHROW(train_on(1, small_config(dir, {"--output.dir=" + dir / "early"})));
    fs::remove_all(dir / "early");
  }
  fs::create_directories(dir / "out/model.safetensors");
  CHECK_THAT(error_on(1, small_config(dir)),
             Catch::EndsWith("out: model.safetensors in it is a directory, expected none"));
  // model.from under another name.
  fs::create_directory(dir / "hf");
  std::ofstream(dir / "hf/config.json") << "{}";
  std::ofstream(dir / "hf/tokenizer.json") << R"({"type": "byte"})";
  fs::create_directory_symlink(dir / "hf", dir / "same");
  for (const char* key : {"output.dir", "checkpoint.dir"}) {
    Config config = small_config(dir, {"--output.dir=" + dir / "new"});
    config.model.from = dir / "hf";
    (std::string_view(key) == "output.dir" ? config.output.dir : config.checkpoint.dir) =
        dir / "same";
    CHECK_THAT(
        error_on(1, config),
        Catch::Contains(fmt::format("{} = {} is the directory of model.from", key, dir / "same")));
  }
  CHECK(bytes_of(dir / "hf").size() == 2);
}

TEST_CASE("run dir: the default run leaves a checkpoint, and goes on with more steps",
          "[run_dir]") {
  const TempDir dir;
  train_on(2, small_config(dir));
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{6});
  train_on(2, small_config(dir, {"--checkpoint.resume=auto", "--train.steps=10"}));
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{10, 6});
  CHECK(model_step(dir / "out") == 10);
  train_on(2, small_config(dir, {"--output.dir=" + dir / "whole", "--train.steps=10"}));
  CHECK(losses(dir / "out") == losses(dir / "whole"));
  CHECK(read_file(dir / "out/model.safetensors") == read_file(dir / "whole/model.safetensors"));
  // The validation loss came after the save.
  const auto manifest = dist::CheckpointReader(dir / "out/step-00000010").manifest();
  CHECK(manifest.progress.val_loss.has_value());
  CHECK(manifest.progress.best_val_loss.has_value());
}

TEST_CASE("run dir: auto never starts from nothing over a model", "[run_dir]") {
  const TempDir dir;
  train_on(1, small_config(dir, {"--checkpoint.last=false"}));
  CHECK(saved_steps(dir / "out").empty());
  const auto before = bytes_of(dir / "out");
  const Config resumed = small_config(dir, {"--checkpoint.resume=auto", "--train.steps=9"});
  CHECK(error_on(1, resumed) ==
        dir /
            "out: the model of step 6, but no checkpoint to go on from, expected one, another "
            "output.dir, or --output.overwrite to start from nothing");
  CHECK(status_of(resumed) == 4);
  CHECK(bytes_of(dir / "out") == before);
}

TEST_CASE("run dir: back to an earlier checkpoint in place only with --output.overwrite",
          "[run_dir]") {
  const TempDir dir;
  train_on(1, small_config(dir, {"--checkpoint.every=2"}));
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{6, 4, 2});
  const std::string from = dir / "out/step-00000002";
  const auto before = bytes_of(dir / "out");
  const std::string resume = "--checkpoint.resume=" + from;
  CHECK(error_on(1, small_config(dir, {resume})) ==
        fmt::format("command line: checkpoint.resume = {} is of step 2, but {} has come to step 6, "
                    "expected --resume=auto, another output.dir, or --output.overwrite to drop the "
                    "later ones",
                    from, dir / "out"));
  CHECK(bytes_of(dir / "out") == before);
  train_on(1, small_config(dir, {resume, "--output.overwrite=true", "--train.steps=5"}));
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{5, 2});
  CHECK(model_step(dir / "out") == 5);
  CHECK(losses(dir / "out").size() == 5);
}

TEST_CASE("run dir: checkpoints by the clock of one rank for all", "[run_dir]") {
  const TempDir dir;
  train_on(2, small_config(dir, {"--checkpoint.every_minutes=1e-9", "--checkpoint.keep=100"}));
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{6, 5, 4, 3, 2, 1});
  train_on(2, small_config(dir, {"--checkpoint.every_minutes=0", "--checkpoint.last=false",
                                 "--output.dir=" + dir / "none"}));
  CHECK(saved_steps(dir / "none").empty());
}

TEST_CASE("run dir: what fails in the last evaluation does not cost the model", "[run_dir]") {
  // A shard of which the check knows that it was good, and that has a token out of range now.
  const TempDir dir;
  const auto shard = [&](const char* name, uint16_t last) {
    std::vector<int32_t> header(256);
    header[0] = 20240520, header[1] = 1, header[2] = 200;
    std::vector<uint16_t> tokens(200, 3);
    tokens.back() = last;
    std::string bytes(reinterpret_cast<const char*>(header.data()), header.size() * 4);
    bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
    return dir.write(name, bytes);
  };
  std::vector<std::string> options = {
      "--data.text=", "--model.vocab=10", "--data.tokens=" + shard("train.bin", 1),
      "--data.val_tokens=" + shard("val.bin", 2), "--train.eval_batches=0"};
  train_on(2, small_config(dir, options));
  {
    std::fstream file(dir / "val.bin", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-2, std::ios::end);
    file.write("\xff\xff", 2);
  }
  testing::keep_token_check(dir / "out/token_check.txt", dir / "val.bin");
  options.insert(options.end(), {"--checkpoint.resume=auto", "--train.steps=9"});
  CHECK_THAT(error_on(2, small_config(dir, options)), Catch::Contains("65535"));
  CHECK(saved_steps(dir / "out") == std::vector<int64_t>{9, 6});
  dist::CheckpointReader(dir / "out/step-00000009").check_files();
  CHECK(model_step(dir / "out") == 9);
  CHECK(losses(dir / "out").size() == 9);
  CHECK(describe_run(dir / "out").starts_with("failed at step 9: "));
}

TEST_CASE("run dir: metrics that cannot be written end all ranks after a save", "[run_dir]") {
  const TempDir dir;
  const auto config = [&](const std::string& name, std::vector<std::string> extra) {
    extra.insert(extra.end(),
                 {"--output.dir=" + dir / name, "--data.tokenizer=char", "--model.heads=1",
                  "--model.width=8", "--model.context=8", "--train.steps=200"});
    return small_config(dir, extra);
  };
  train_on(2, config("whole", {}));
  // As on a full disk: the lines of some hundred steps do not fit, the states do.
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto old_action = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{32768, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const std::string error = error_on(2, config("out", {}));
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_action);
  CHECK(error == dir / "out/metrics.jsonl: cannot be written: File too large");
  const auto status = read_status(dir / "out").value();
  CHECK(status.state == RunState::kFailed);
  CHECK(status.why == error);
  const size_t num_lines = losses(dir / "out").size();  // whole lines all
  REQUIRE(saved_steps(dir / "out").size() == 1);
  CHECK(saved_steps(dir / "out").front() >= static_cast<int64_t>(num_lines));
  train_on(2, config("out", {"--checkpoint.resume=auto"}));
  CHECK(read_file(dir / "out/model.safetensors") == read_file(dir / "whole/model.safetensors"));
}

TEST_CASE("run dir: a timeline that cannot be written is found before the first step",
          "[run_dir]") {
  const TempDir dir;
  dir.write("book", "a text");
  dir.write("empty", "");
  fs::create_directory(dir / "folder");
  const auto error = [&](const std::string& path) {
    const Config config = small_config(dir, {"--profile.steps=1", "--profile.trace=" + dir / path});
    const std::string message = error_on(2, config);
    const std::string begin = "command line: profile.trace = " + dir / path;
    CHECK(message.starts_with(begin));
    CHECK(message.ends_with(", expected a file that can be written"));
    CHECK_FALSE(fs::exists(dir / "out/metrics.jsonl"));
    return message.substr(std::min(message.size(), begin.size()));
  };
  CHECK_THAT(error("none/trace"), Catch::StartsWith(": no directory " + dir / "none"));
  CHECK_THAT(error("folder"), Catch::StartsWith(": a directory"));
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
  CHECK_THAT(error("fifo"), Catch::StartsWith(": no regular file"));
  CHECK_THAT(error("book"),
             Catch::StartsWith(": a file with something else than a timeline in it"));
  fs::create_directories(dir / "out");
  CHECK_THAT(error("out/metrics.jsonl"), Catch::StartsWith(": a file of the run itself"));
  CHECK(read_file(dir / "book") == "a text");
  // An earlier timeline is replaced.
  for (int i = 0; i < 2; ++i) {
    train_on(1, small_config(dir, {"--profile.steps=1", "--profile.trace=" + dir / "empty",
                                   "--output.overwrite=true"}));
    CHECK(read_file(dir / "empty").starts_with("[\n"));
  }
}

TEST_CASE("run dir: every reader takes the newest state and says which", "[run_dir]") {
  const TempDir dir;
  const std::string out = dir / "out";
  const std::vector<std::string> quiet = {"--checkpoint.last=false", "--checkpoint.resume=auto"};
  request_preemption();
  train_on(1, small_config(dir, quiet));
  CHECK(saved_steps(out) == std::vector<int64_t>{1});
  CHECK(output_of({"export", out, dir / "one"}) ==
        fmt::format("{}: the run was preempted at step 1\n{}: parameters of step 1, from "
                    "{}/step-00000001\n",
                    out, dir / "one", out));
  CHECK(load_model(out).step == 1);
  // To the end, which has no checkpoint: the model is what is new.
  train_on(1, small_config(dir, quiet));
  CHECK(saved_steps(out) == std::vector<int64_t>{1});
  for (const std::string& path : {out, out + "/latest"}) {
    CHECK(output_of({"export", path, dir / "six"}) ==
          fmt::format("{}: parameters of step 6, from {}/model.safetensors\n", dir / "six", out));
    CHECK(load_model(path).step == 6);
    CHECK(load_model(path).path == out + "/model.safetensors");
    CHECK_THAT(output_of({"inspect", path}),
               Catch::StartsWith(out + "/model.safetensors\nstep 6, parameters only\n8 tensors:\n  "
                                       "embed.weight  f32 [256, 16]\n"));
  }
  CHECK(load_model(out + "/step-00000001").step == 1);
  // On from the checkpoint of before (the end left none), with more steps and one at their end.
  train_on(1, small_config(dir, {"--checkpoint.resume=auto", "--train.steps=8"}));
  CHECK(output_of({"inspect", out}).starts_with(out + "/step-00000008\nrun "));
  CHECK(load_model(out).step == 8);
  // Preempted after the end: the checkpoint is what is new.
  request_preemption();
  train_on(1, small_config(dir, {"--checkpoint.resume=auto", "--train.steps=12"}));
  CHECK(load_model(out).step == 9);
  CHECK(load_model(out).path == out + "/step-00000009");
  CHECK_THAT(output_of({"verify", out}),
             Catch::StartsWith(out + ": the run was preempted at step 9\n") &&
                 Catch::Contains("step-00000009: whole") &&
                 Catch::Contains("model.safetensors: whole (8 tensors of step 8; it has no "
                                 "checksum)\n"));
  // A run that died says so to all of them.
  write_status(out, RunState::kRunning, 9);
  CHECK_THAT(output_of({"inspect", out}),
             Catch::StartsWith(out + ": the run died at step 9 (" + this_process() + ")\n"));
  fs::create_directory(dir / "young");
  write_status(dir / "young", RunState::kRunning, 1);
  CHECK(error_of([&] { load_model(dir / "young"); }) ==
        fmt::format("{}: no complete checkpoint, and no model.safetensors with a config.toml (the "
                    "run died at step 1 ({})), expected the directory of a run, or a checkpoint",
                    dir / "young", this_process()));
  // Checkpoints elsewhere belong to the run as well.
  const std::string elsewhere = "--checkpoint.dir=" + dir / "checkpoints";
  train_on(1, small_config(dir, {"--output.dir=" + dir / "apart", elsewhere}));
  fs::remove(dir / "apart/model.safetensors");
  CHECK(load_model(dir / "apart").path == dir / "checkpoints/step-00000006");
  CHECK_THAT(output_of({"verify", dir / "apart"}), Catch::Contains("step-00000006: whole"));
}

TEST_CASE("run dir: an export goes into no run's directory and over no files of others",
          "[run_dir]") {
  const TempDir dir;
  const std::string out = dir / "out";
  train_on(1, small_config(dir));
  const auto before = bytes_of(out);
  const auto error = [](const std::vector<std::string>& arguments) {
    return error_of([&] { output_of(arguments); });
  };
  for (const char* format : {"--format=hf", "--format=tessera"}) {
    CHECK(error({"export", out, out, format}) ==
          out +
              ": the directory of a run that finished at step 6, whose files would be replaced, "
              "expected another one");
    CHECK(error({"export", out, out + "/step-00000006", format}) ==
          out + "/step-00000006: a checkpoint, expected another directory");
  }
  CHECK(bytes_of(out) == before);
  fs::create_directory(dir / "mine");
  dir.write("mine/config.toml", "mine");
  CHECK(
      error({"export", out, dir / "mine", "--format=tessera"}) ==
      dir /
          "mine: has config.toml, which no export has written; expected none, an empty directory, "
          "or an earlier export, which is replaced whole");
  CHECK(bytes_of(dir / "mine").size() == 1);
  for (int i = 0; i < 2; ++i) output_of({"export", out, dir / "exported", "--format=tessera"});
  CHECK(load_model(dir / "exported").step == 6);
  // A directory that somebody trains in.
  fs::create_directory(dir / "used");
  const Holder holder(dir / "used");
  CHECK_THAT(error({"reshard", out, dir / "used", "--ranks=2"}),
             Catch::StartsWith(dir / "used: in use"));
  // Another run's.
  train_on(1, small_config(dir, {"--output.dir=" + dir / "second", "--checkpoint.last=false"}));
  CHECK_THAT(error({"reshard", out, dir / "second", "--ranks=2"}),
             Catch::StartsWith(dir / "second: has run "));
}

TEST_CASE("run dir: a checkpoint without a configuration says so", "[run_dir]") {
  const TempDir dir;
  train_on(1, small_config(dir));
  // As a model of one's own leaves it.
  const std::string step = dir / "out/step-00000006";
  dist::Manifest manifest = dist::CheckpointReader(step).manifest();
  manifest.progress.config.clear();
  write_durably(step + "/manifest.json", dist::to_json(manifest));
  const std::string expected =
      step +
      ": no configuration in it (it is of a model of one's own), expected that of "
      "tessera-train; export takes --format=tessera";
  CHECK(error_of([&] { output_of({"export", step, dir / "hf"}); }) == expected);
  CHECK(error_of([&] { load_model(step); }) == expected);
  output_of({"export", step, dir / "own", "--format=tessera"});
  CHECK(fs::exists(dir / "own/model.safetensors"));
  CHECK_FALSE(fs::exists(dir / "own/config.toml"));
}
