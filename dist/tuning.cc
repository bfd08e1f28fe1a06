#include "dist/tuning.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "core/check.h"
#include "core/formats/durable_file.h"
#include "core/log.h"
#include "core/runtime/context.h"
#include "core/tensor.h"
#include "dist/checkpoint/manifest.h"

namespace tessera::dist {
namespace {

constexpr std::string_view kTitle = "tessera tuning 1";
constexpr std::string_view kChecksum = "xxh64 ", kArrow = " -> ";

std::string hash_text(std::string_view text) {
  return fmt::format("{:016x}", hash_of(text.data(), static_cast<int64_t>(text.size())));
}

std::string lines_of(const Tuning::Choices& choices) {
  std::string text;
  for (const auto& [key, choice] : choices) text += fmt::format("{}{}{}\n", key, kArrow, choice);
  return text;
}

/// False for anything that `lines_of` has not written.
bool read_line(std::string_view line, Tuning::Choices& choices) {
  const size_t arrow = line.find(kArrow);
  if (arrow == std::string_view::npos || arrow == 0) return false;
  choices[std::string(line.substr(0, arrow))] = line.substr(arrow + kArrow.size());
  return true;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// What is wrong with a text that begins as ours does, or empty; else its choices by machine.
std::string parse(const std::string& text, std::map<std::string, Tuning::Choices>& machines) {
  const size_t end = text.rfind(kChecksum);
  if (end == std::string::npos) return "its last line has no checksum";
  const std::string_view found = std::string_view(text).substr(end + kChecksum.size());
  const std::string expected = hash_text(std::string_view(text).substr(0, end));
  if (found != expected + "\n") {
    return fmt::format("its checksum is {}, expected {}", found.substr(0, found.find('\n')),
                       expected);
  }
  Tuning::Choices* choices = nullptr;
  std::vector<std::string> lines = split_lines(text);
  for (size_t i = 1; i + 1 < lines.size(); ++i) {
    const std::string& line = lines[i];
    if (line.size() > 2 && line.front() == '[' && line.back() == ']') {
      choices = &machines[line.substr(1, line.size() - 2)];
    } else if (choices == nullptr || !read_line(line, *choices)) {
      return fmt::format("line {} is \"{}\", expected a machine in brackets or a choice", i + 1,
                         line);
    }
  }
  return "";
}

}  // namespace

TuningFile::TuningFile(std::string path, std::string machine)
    : path_(std::move(path)), machine_(std::move(machine)) {}

Tuning::Choices TuningFile::read() {
  others_.clear();
  std::error_code error;
  if (!std::filesystem::exists(path_, error) && !error) return {};
  std::ifstream in(path_, std::ios::binary);
  std::stringstream content;
  content << in.rdbuf();
  const std::string text = content.str();
  const std::string first = text.substr(0, text.find('\n'));
  TESSERA_CHECK_AS(ConfigError, in.good() && first == kTitle,
                   "tuning: {} is not a file of tuned choices (its first line is \"{}\", expected "
                   "\"{}\"); name one that is, or that is not there yet",
                   path_, first.substr(0, 60), kTitle);
  std::map<std::string, Tuning::Choices> machines;
  if (const std::string problem = parse(text, machines); !problem.empty()) {
    log_warning("tuning: {} is damaged: {}; it is made anew", path_, problem);
    return {};
  }
  Tuning::Choices choices;
  const auto mine = machines.find(machine_);
  if (mine == machines.end()) {
    std::string names;
    for (const auto& [name, _] : machines)
      names += fmt::format("{}{}", names.empty() ? "" : ", nor ", name);
    log_warning("tuning: {} is of {}, this is {}; its choices are made anew", path_, names,
                machine_);
  } else {
    choices = std::move(mine->second);
    machines.erase(mine);
  }
  others_ = std::move(machines);
  const size_t num_refused = std::erase_if(
      choices, [](const auto& entry) { return !kernels::is_choice(entry.first, entry.second); });
  if (num_refused > 0) {
    log_warning("tuning: {}: the libraries do not take {} of its choices; they are made anew",
                path_, num_refused);
  }
  return choices;
}

void TuningFile::write(const Tuning::Choices& choices) const {
  std::map<std::string, Tuning::Choices> machines = others_;
  machines[machine_] = choices;
  std::string text = fmt::format("{}\n", kTitle);
  for (const auto& [machine, lines] : machines)
    text += fmt::format("[{}]\n{}", machine, lines_of(lines));
  write_durably(path_, fmt::format("{}{}{}\n", text, kChecksum, hash_text(text)));
}

SharedTuning::SharedTuning(World& world, const std::string& path) : world_(world) {
  Control& control = world.control();
  std::string machine, others;
  control.verdict([&] { machine = kernels::tuning_machine(); });
  const std::vector<std::string> machines = control.all_gather(machine);
  const auto other = std::find_if(machines.begin(), machines.end(),
                                  [&](const std::string& x) { return x != machines.front(); });
  if (other != machines.end()) {
    if (world.rank() == 0) {
      log_warning("tuning: rank 0 is {}, rank {} is {}; nothing is tuned", machines.front(),
                  other - machines.begin(), *other);
    }
    return;
  }
  std::string lines;
  control.verdict([&] {
    if (world.rank() != 0 || path.empty()) return;
    file_.emplace(path, machine);
    lines = lines_of(file_->read());
  });
  lines = control.broadcast(lines, 0);
  tuning_ = std::make_unique<Tuning>(/*has_gemms=*/!path.empty());
  scope_.emplace(*tuning_);
  Tuning::Choices choices;
  for (const std::string& line : split_lines(lines)) read_line(line, choices);
  if (!choices.empty()) tuning_->add(choices);
}

void SharedTuning::update() {
  if (tuning_ == nullptr) return;
  Control& control = world_.control();
  const std::vector<std::string> mine = tuning_->wanted();
  if (control.max(static_cast<int64_t>(mine.size())) == 0) return;
  current_stream().synchronize();
  std::string lines;
  for (const std::string& key : mine) lines += key + "\n";
  std::set<std::string> wanted;
  for (const std::string& text : control.all_gather(lines)) {
    for (std::string& key : split_lines(text)) wanted.insert(std::move(key));
  }
  // One by one: each wait for rank 0 is short.
  Tuning::Choices choices;
  for (const std::string& key : wanted) {
    if (choices.contains(key)) continue;
    control.verdict([&] {
      if (world_.rank() == 0) lines = lines_of(kernels::measure_choices({key}));
    });
    for (const std::string& line : split_lines(control.broadcast(lines, 0)))
      read_line(line, choices);
  }
  tuning_->add(choices);
  if (!file_) return;
  try {
    file_->write(tuning_->choices());
  } catch (const IoError& error) {
    log_warning("tuning: {}; the choices of this run are not kept", error.what());
    file_.reset();
  }
}

}  // namespace tessera::dist
