#include "apps/report/run_log.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "apps/run_dir.h"
#include "core/check.h"
#include "core/files.h"
#include "core/settings.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

/// Of the line that is last in `run`.
void set_value(RunLog& run, const std::string& name, double value) {
  const auto [it, is_new] = run.columns.try_emplace(name);
  if (is_new) run.names.push_back(name);
  it->second.resize(run.steps.size(), kNoNumber);
  it->second.back() = value;
}

/// The numbers of a line; null is a number that JSON has no word for.
/// Lines of ours have two levels; what nests deeper is somebody else's.
void take_numbers(RunLog& run, const std::string& name, const nlohmann::ordered_json& value,
                  int num_levels = 3) {
  if (value.is_number()) {
    set_value(run, name, value.get<double>());
  } else if (value.is_null()) {
    set_value(run, name, kNoNumber);
  } else if (num_levels == 0) {
    return;
  } else if (value.is_object()) {
    for (const auto& [key, member] : value.items()) {
      take_numbers(run, name + "/" + key, member, num_levels - 1);
    }
  } else if (value.is_array()) {
    for (const auto& element : value) {
      if (!element.is_object() || !element.contains("unit") || !element["unit"].is_string())
        continue;
      take_numbers(run, name + "/" + element["unit"].get<std::string>(), element, num_levels - 1);
    }
  }
}

/// Nothing if it has another shape: it is an extra.
std::optional<MemoryOverStep> memory_of(const nlohmann::ordered_json& value, int64_t step) {
  MemoryOverStep memory;
  memory.step = step;
  try {
    memory.classes = value.at("classes").get<std::vector<std::string>>();
    memory.bytes.resize(memory.classes.size());
    for (const auto& point : value.at("bytes")) {
      for (size_t c = 0; c < memory.classes.size(); ++c) {
        memory.bytes[c].push_back(point.at(c).get<double>());
      }
    }
    if (value.contains("marks")) {
      for (const auto& mark : value["marks"]) {
        memory.marks.emplace_back(mark.at("point").get<int64_t>(),
                                  mark.at("begins").get<std::string>());
      }
    }
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
  if (memory.bytes.empty() || memory.bytes[0].size() < 2) return std::nullopt;
  return memory;
}

/// The run went back: what it said of `step` and later ones does not hold.
void drop_from(RunLog& run, double step) {
  const auto first = std::lower_bound(run.steps.begin(), run.steps.end(), step);
  const auto kept = static_cast<size_t>(first - run.steps.begin());
  run.steps.resize(kept);
  for (auto& [_, column] : run.columns) column.resize(std::min(column.size(), kept));
}

void take_line(RunLog& run, const std::string& where, const std::string& line) {
  const auto fail = [&](const std::string& what) {
    throw InputError(
        fmt::format("{}: {}, expected a JSON object with \"step\" and \"loss\"", where, what));
  };
  const auto object = nlohmann::ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) fail(fmt::format("\"{}\"", shorten(line, 60)));
  const auto step_at = object.find("step");
  if (step_at == object.end() || !step_at->is_number_integer() || !object.contains("loss")) {
    fail("no line of a step");
  }
  const auto step = step_at->get<int64_t>();
  if (!run.steps.empty() && static_cast<double>(step) <= run.steps.back()) {
    ++run.num_rewinds;
    drop_from(run, static_cast<double>(step));
  }
  run.steps.push_back(static_cast<double>(step));
  for (const auto& [key, value] : object.items()) {
    if (key == "step") continue;
    if (key == "memory_over_step") {
      if (auto memory = memory_of(value, step)) run.memory = std::move(memory);
    } else {
      take_numbers(run, key, value);
    }
  }
}

void read_metrics(RunLog& run) {
  const std::string path = run.dir + "/metrics.jsonl";
  std::error_code ignored;
  if (!fs::is_directory(run.dir, ignored)) {
    const bool exists = fs::exists(run.dir, ignored);
    throw InputError(fmt::format("{}: {}, expected the directory of a run (output.dir)", run.dir,
                                 exists ? "no directory" : "not there"));
  }
  if (!fs::exists(path, ignored)) {
    throw InputError(fmt::format(
        "{}: no metrics.jsonl in it, expected the directory of a run (output.dir)", run.dir));
  }
  const MappedFile file(path);
  std::string_view rest = file.text();
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = rest.find('\n');
    if (end == std::string_view::npos) {  // a run that was killed, or is writing
      run.is_last_cut = true;
      break;
    }
    take_line(run, fmt::format("{}:{}", path, number), std::string(rest.substr(0, end)));
    rest.remove_prefix(end + 1);
  }
  file.check();
  if (run.steps.empty()) {
    throw InputError(fmt::format("{}: no step in it, expected at least one", path));
  }
  for (auto& [_, column] : run.columns) column.resize(run.steps.size(), kNoNumber);
}

void flatten(const std::string& prefix, const toml::node& node,
             std::vector<std::pair<std::string, std::string>>& values) {
  if (const toml::table* const table = node.as_table()) {
    for (const auto& [key, member] : *table) {
      flatten(prefix.empty() ? std::string(key.str()) : fmt::format("{}.{}", prefix, key.str()),
              member, values);
    }
    return;
  }
  if (node.is_floating_point()) {
    values.emplace_back(prefix, number_text(*node.value<double>()));
    return;
  }
  std::ostringstream text;
  text << toml::node_view<const toml::node>(node);
  values.emplace_back(prefix, text.str());
}

/// Without one a report has less to say.
void read_config(RunLog& run) {
  const std::string path = run.dir + "/config.toml";
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return;
  constexpr int64_t kMaxNbytes = 1 << 20;
  run.config_text = read_regular_file(path, kMaxNbytes);
  try {
    const toml::table table = toml::parse(run.config_text);
    flatten("", table, run.config);
  } catch (const toml::parse_error& error) {
    throw InputError(fmt::format("{}: {} (line {}), expected the configuration of a run", path,
                                 error.description(), error.source().begin.line));
  }
  std::sort(run.config.begin(), run.config.end());
}

/// The last `count` components, joined by '/'.
std::string end_of_path(const std::string& dir, size_t count) {
  fs::path path = fs::absolute(dir).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  std::string text = path.filename().string();
  for (size_t i = 1; i < count && path.has_parent_path() && path != path.parent_path(); ++i) {
    path = path.parent_path();
    text = path.filename().string() + "/" + text;
  }
  return text.empty() ? dir : text;
}

}  // namespace

const std::vector<double>* RunLog::find(const std::string& name) const {
  const auto it = columns.find(name);
  return it == columns.end() ? nullptr : &it->second;
}

RunLog read_run_log(const std::string& dir) {
  RunLog run;
  run.dir = dir;
  while (run.dir.size() > 1 && run.dir.ends_with('/')) run.dir.pop_back();
  run.label = end_of_path(run.dir, 1);
  read_metrics(run);
  read_config(run);
  run.state = describe_run(run.dir);
  return run;
}

void set_labels(std::vector<RunLog>& runs) {
  for (size_t count = 1; count < 64; ++count) {
    std::set<std::string> labels;
    for (RunLog& run : runs) {
      run.label = end_of_path(run.dir, count);
      labels.insert(run.label);
    }
    if (labels.size() == runs.size()) return;
  }
}

}  // namespace tessera::apps
