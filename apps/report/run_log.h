#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// What a run has left for people to look at.

namespace tessera::apps {

/// Bytes by class in the course of one step (MemoryTimeline).
struct MemoryOverStep {
  int64_t step = 0;
  std::vector<std::string> classes;
  std::vector<std::vector<double>> bytes;              ///< of each class, by point
  std::vector<std::pair<int64_t, std::string>> marks;  ///< first point of a phase
};

/// A directory that tessera-train has written, read: `metrics.jsonl`, `config.toml`, `status.json`.
struct RunLog {
  std::string dir;
  std::string label;  ///< the end of `dir`
  std::vector<double> steps;
  /// Every number of the lines, as long as `steps` and NaN where a line has none: "loss",
  /// "memory/activations", "unit_norms/blocks.0".
  std::map<std::string, std::vector<double>> columns;
  std::vector<std::string> names;  ///< of the columns, in the order in which they came
  std::optional<MemoryOverStep> memory;
  std::vector<std::pair<std::string, std::string>> config;  ///< "optim.lr", "0.001"
  std::string config_text;
  std::string state;         ///< "finished at step 100"; empty: it does not say
  int64_t num_rewinds = 0;   ///< times that the run went back to an earlier step
  bool is_last_cut = false;  ///< the last line is half a line

  /// Null if no line has it.
  const std::vector<double>* find(const std::string& name) const;
};

/// Of a step that came twice (a rewind) the last one counts; half a line at the end is left out.
/// InputError, in one line, for what is no directory, one without metrics or with no step in them,
/// and with the line's number for one that is no line of metrics.
RunLog read_run_log(const std::string& dir);

/// Labels that tell the runs apart: as many of the last components of each directory as that takes.
void set_labels(std::vector<RunLog>& runs);

}  // namespace tessera::apps
