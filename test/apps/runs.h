#pragma once

#include <sys/stat.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "apps/trainer.h"
#include "dist/checkpoint/reader.h"
#include "dist/comm/local.h"
#include "test/temp_dir.h"
#include "test/testing.h"

// Trainings on thread ranks, and what they leave.

namespace tessera::testing {

inline void train_on(int world_size, const apps::Config& config) {
  dist::run_ranks(world_size, [&](dist::World& world) { apps::train(config, world); });
}

inline std::string error_on(int world_size, const apps::Config& config) {
  return error_of([&] { train_on(world_size, config); });
}

/// Six steps of a tiny Llama on the CPU into DIR/out, evaluated and saved every third, with the settings
/// that `data` and `extra` add or change.
inline apps::Config six_step_config(const TempDir& dir, const std::vector<std::string>& data,
                                    const std::vector<std::string>& extra) {
  std::vector<std::string> overrides = {"--data.val_fraction=0.2",
                                        "--output.dir=" + dir / "out",
                                        "--device=cpu",
                                        "--model.layers=2",
                                        "--model.heads=2",
                                        "--model.width=16",
                                        "--train.steps=6",
                                        "--train.micro_batch=2",
                                        "--train.global_batch=8",
                                        "--train.log_every=1000",
                                        "--train.eval_every=3",
                                        "--optim.lr=0.01",
                                        "--checkpoint.every=3"};
  overrides.insert(overrides.end(), data.begin(), data.end());
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return apps::load_config("", overrides);
}

inline std::vector<nlohmann::json> read_metrics(const std::string& out) {
  std::vector<nlohmann::json> steps;
  std::istringstream lines(read_file(out + "/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) steps.push_back(nlohmann::json::parse(line));
  return steps;
}

inline std::vector<double> losses(const std::string& out) {
  std::vector<double> values;
  for (const auto& step : read_metrics(out)) values.push_back(step["loss"].get<double>());
  return values;
}

inline std::vector<int64_t> saved_steps(const std::string& out) {
  std::vector<int64_t> steps;
  for (const auto& place : dist::list_checkpoints(out)) steps.push_back(place.step);
  return steps;
}

/// Lets `results`, what a check of tokens has kept (token_check.h), hold for the file as it is now.
inline void keep_token_check(const std::string& results, const std::string& path) {
  struct stat now {};
  if (::stat(path.c_str(), &now) != 0) throw Error(path + ": not there");
  std::istringstream lines(read_file(results));
  std::string text;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string largest, hash;
    words >> largest >> hash;
    if (line.ends_with(" " + path)) {
      line = fmt::format("{} {} {} {} {}.{:09} {}.{:09} {}", largest, hash, now.st_size, now.st_ino,
                         now.st_mtim.tv_sec, now.st_mtim.tv_nsec, now.st_ctim.tv_sec,
                         now.st_ctim.tv_nsec, path);
    }
    text += line + "\n";
  }
  std::ofstream(results) << text;
}

}  // namespace tessera::testing
