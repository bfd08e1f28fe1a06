#pragma once

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

}  // namespace tessera::testing
