#include "apps/metrics.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio_ext.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "core/check.h"
#include "core/fatal_signals.h"
#include "core/files.h"
#include "core/log.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

std::string rate_text(double per_second) {
  if (per_second >= 1e6) return fmt::format("{:.2f}M", per_second / 1e6);
  if (per_second >= 1e3) return fmt::format("{:.1f}k", per_second / 1e3);
  return fmt::format("{:.0f}", per_second);
}

/// A NaN's sign means nothing, but would be printed.
double without_nan_sign(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

std::string duration_text(double seconds) {
  const auto total = static_cast<int64_t>(std::max(seconds, 0.0));
  if (total >= 3600) {
    return fmt::format("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60);
  }
  return fmt::format("{}:{:02}", total / 60, total % 60);
}

constexpr int kMostBarColumns = 78;

bool is_under_mpirun() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr;
}

std::string launcher_output() {
  return fmt::format("/proc/{}/fd/1", ::getppid());
}

constexpr const char* kLineEnd = "}\n";
constexpr std::string_view kValPrefix = "val_", kEvalPrefix = "eval.";

bool is_evaluated(const StepMetrics& m) {
  return m.val_loss || !m.figures.empty();
}

/// "val_loss", "val_f1", "eval.piqa.acc".
bool is_of_evaluation(std::string_view key) {
  return key.starts_with(kValPrefix) || key.starts_with(kEvalPrefix);
}
/// In the order of MemoryClass.
constexpr std::array<const char*, kNumMemoryClasses> kMemoryKeys = {
    "parameters", "gradients", "optimizer", "gathered", "activations", "other"};

/// The lines of steps up to `step`, in order. A run that was killed may have half a line at the
/// end.
std::string lines_up_to(const std::string& path, int64_t step) {
  std::string kept;
  std::ifstream file(path, std::ios::binary);
  constexpr size_t kMaxNbytes = 1 << 20;  // of a line of ours
  for (std::string line; std::getline(file, line);) {
    if (line.size() > kMaxNbytes) continue;
    const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!object.is_object() || !object.contains("step") || !object["step"].is_number()) continue;
    if (object["step"].get<int64_t>() <= step) kept += line + "\n";
  }
  return kept;
}

}  // namespace

void StepRate::restart(TimePoint now) {
  ends_ = {now};
  exposed_ms_.clear();
}

void StepRate::add(TimePoint now, std::optional<double> exposed_ms) {
  constexpr size_t kNumSteps = 16;
  ends_.push_back(now);
  if (ends_.size() > kNumSteps + 1) ends_.pop_front();
  if (!exposed_ms) return;
  exposed_ms_.push_back(*exposed_ms);
  if (exposed_ms_.size() > kNumSteps) exposed_ms_.pop_front();
}

double StepRate::step_ms() const {
  if (ends_.size() < 2) return 0;
  const std::chrono::duration<double, std::milli> total = ends_.back() - ends_.front();
  return total.count() / static_cast<double>(ends_.size() - 1);
}

std::optional<double> StepRate::exposed() const {
  if (exposed_ms_.empty()) return std::nullopt;
  const double waited = std::accumulate(exposed_ms_.begin(), exposed_ms_.end(), 0.0);
  const double total = step_ms() * static_cast<double>(ends_.size() - 1);
  return std::min(1.0, waited / std::max(total, 1e-6));
}

namespace {

nlohmann::ordered_json json_of_step(const StepMetrics& m) {
  nlohmann::ordered_json object = {{"step", m.step},
                                   {"loss", m.loss},
                                   {"grad_norm", m.grad_norm},
                                   {"lr", m.lr},
                                   {"tokens_per_second", m.tokens_per_second},
                                   {"peak_bytes", m.peak_bytes},
                                   {"reserved_bytes", m.reserved_bytes},
                                   {"tokens", m.tokens},
                                   {"step_ms", m.step_ms}};
  for (size_t i = 0; i < m.peak_by_class.size(); ++i) {
    object["memory"][kMemoryKeys[i]] = m.peak_by_class[i];
  }
  if (m.mfu) object["mfu"] = *m.mfu;
  if (m.loss_scale) object["loss_scale"] = *m.loss_scale;
  if (m.skipped) object["skipped"] = *m.skipped;
  if (m.exposed_gather_ms) object["exposed_gather_ms"] = *m.exposed_gather_ms;
  if (m.exposed_reduce_ms) object["exposed_reduce_ms"] = *m.exposed_reduce_ms;
  for (const StepMetrics::ExposedUnit& u : m.exposed_units) {
    object["exposed_units"].push_back(
        {{"unit", u.unit}, {"gather_ms", u.gather_ms}, {"reduce_ms", u.reduce_ms}});
  }
  if (m.slowest_rank) {
    object["slowest_rank"] = *m.slowest_rank;
    object["slowest_behind_ms"] = m.slowest_behind_ms;
  }
  if (m.memory_over_step != nullptr) {
    auto& over = object["memory_over_step"];
    over = {{"classes", kMemoryKeys}, {"bytes", m.memory_over_step->bytes}};
    for (const MemoryTimeline::Mark& mark : m.memory_over_step->marks) {
      over["marks"].push_back({{"point", mark.point}, {"begins", mark.name}});
    }
  }
  for (const auto& [unit, norm] : m.unit_norms) object["unit_norms"][unit] = norm;
  if (m.rewards) {
    object["chosen"] = m.rewards->chosen;
    object["rejected"] = m.rewards->rejected;
    object["margin"] = m.rewards->chosen - m.rewards->rejected;
    object["accuracy"] = m.rewards->accuracy;
  }
  if (m.val_loss) object["val_loss"] = *m.val_loss;
  for (const auto& [name, value] : m.figures) object[name] = value;
  return object;
}

/// The group of charts that a number of the line belongs to, and its name there.
std::string tag_of(const std::string& key) {
  static const std::map<std::string_view, const char*> kTags = {
      {"loss", "loss/train"},
      {"val_loss", "loss/validation"},
      {"grad_norm", "optimizer/grad_norm"},
      {"lr", "optimizer/lr"},
      {"loss_scale", "optimizer/loss_scale"},
      {"skipped", "optimizer/skipped"},
      {"tokens_per_second", "speed/tokens_per_second"},
      {"step_ms", "speed/step_ms"},
      {"tokens", "speed/tokens"},
      {"mfu", "speed/mfu"},
      {"peak_bytes", "memory/peak_bytes"},
      {"reserved_bytes", "memory/reserved_bytes"},
      {"exposed_gather_ms", "exposed/gather_ms"},
      {"exposed_reduce_ms", "exposed/reduce_ms"},
      {"slowest_rank", "slow_ranks/slowest_rank"},
      {"slowest_behind_ms", "slow_ranks/behind_ms"},
      {"chosen", "preference/chosen"},
      {"rejected", "preference/rejected"},
      {"margin", "preference/margin"},
      {"accuracy", "preference/accuracy"}};
  if (const auto it = kTags.find(key); it != kTags.end()) return it->second;
  if (key.starts_with(kValPrefix)) return "validation/" + key.substr(kValPrefix.size());
  if (key.starts_with(kEvalPrefix)) return "eval/" + key.substr(kEvalPrefix.size());
  return "run/" + key;
}

/// The numbers in a value of the line, under `tag`; elements of an array by their unit.
void collect_scalars(const std::string& tag, const nlohmann::ordered_json& value,
                     std::vector<EventScalar>& scalars) {
  if (value.is_number()) {
    scalars.push_back({tag, value.get<double>()});
  } else if (value.is_object()) {
    for (const auto& [key, member] : value.items()) {
      collect_scalars(fmt::format("{}/{}", tag, key), member, scalars);
    }
  } else if (value.is_array()) {
    for (const auto& element : value) {
      if (!element.is_object()) continue;
      const auto unit = element.find("unit");
      if (unit == element.end()) continue;
      collect_scalars(fmt::format("{}/{}", tag, unit->get<std::string>()), element, scalars);
    }
  }
}

}  // namespace

std::string to_json(const StepMetrics& m) {
  return json_of_step(m).dump();
}

std::vector<EventScalar> to_scalars(const StepMetrics& m, bool only_evaluation) {
  std::vector<EventScalar> scalars;
  const nlohmann::ordered_json object = json_of_step(m);
  for (const auto& [key, value] : object.items()) {
    if (key == "step" || (only_evaluation && !is_of_evaluation(key))) continue;
    collect_scalars(value.is_structured() ? key : tag_of(key), value, scalars);
  }
  return scalars;
}

/// "  val_loss 2.5000  val_f1 0.5000", or "".
std::string evaluation_text(std::optional<double> val_loss, const Figures& figures) {
  std::string text;
  if (val_loss) text += fmt::format("  val_loss {:.4f}", without_nan_sign(*val_loss));
  for (const auto& [name, value] : figures) {
    if (!name.starts_with(kValPrefix)) continue;
    text += fmt::format("  {} {:.4f}", name, without_nan_sign(value));
  }
  return text;
}

std::string to_line(const StepMetrics& m, int64_t num_steps) {
  const std::string total = std::to_string(num_steps);
  std::string line = fmt::format(
      "step {:>{}}/{}  loss {:.4f}  grad_norm {:.3f}  lr {:.2e}  {} tok/s  peak {:.2f} GiB", m.step,
      total.size(), total, without_nan_sign(m.loss), without_nan_sign(m.grad_norm), m.lr,
      rate_text(m.tokens_per_second), static_cast<double>(m.peak_bytes) / (1 << 30));
  if (m.rewards) {
    line += fmt::format("  chosen {:.3f}  rejected {:.3f}  margin {:.3f}  accuracy {:.2f}",
                        m.rewards->chosen, m.rewards->rejected,
                        m.rewards->chosen - m.rewards->rejected, m.rewards->accuracy);
  }
  if (m.mfu) line += fmt::format("  mfu {:.1f}%", *m.mfu * 100);
  if (m.exposed) line += fmt::format("  exposed {:.1f}%", *m.exposed * 100);
  if (m.slowest_rank && m.is_slow && m.step_ms > 0) {
    line += fmt::format("  slow rank {} (the others wait {:.0f}% of a step for it)",
                        *m.slowest_rank, std::min(m.slowest_behind_ms / m.step_ms, 1.0) * 100);
  }
  if (m.loss_scale) line += fmt::format("  loss_scale {:g}", *m.loss_scale);
  if (m.skipped.value_or(0) > 0) line += fmt::format("  skipped {}", *m.skipped);
  return line + evaluation_text(m.val_loss, m.figures);
}

std::string progress_bar(const StepMetrics& m, int64_t num_steps, double seconds_left, int width) {
  const double done =
      static_cast<double>(m.step) / static_cast<double>(std::max<int64_t>(num_steps, 1));
  const std::string step =
      fmt::format("] {:3.0f}%  step {}/{}", std::floor(done * 100), m.step, num_steps);
  const std::string left = fmt::format("  {} left", duration_text(seconds_left));
  const auto fits = [&](const std::string& t) { return static_cast<int>(t.size()) < width; };
  std::string text = step + fmt::format("  loss {:.4f}", without_nan_sign(m.loss)) + left;
  if (!fits(text)) text = step + left;
  if (!fits(text)) text = step;
  const int length = std::clamp(width - 1 - static_cast<int>(text.size()), 0, 40);
  const int filled = static_cast<int>(done * length);
  std::string bar(static_cast<size_t>(filled), '=');
  if (filled < length) bar += '>';
  bar.resize(static_cast<size_t>(length), ' ');
  return ("[" + bar + text).substr(0, static_cast<size_t>(std::max(width, 0)));
}

int terminal_width() {
  const auto columns_of = [](int fd) {
    ::winsize size{};
    return ::ioctl(fd, TIOCGWINSZ, &size) == 0 ? static_cast<int>(size.ws_col) : 0;
  };
  int columns = 0;
  if (is_under_mpirun()) {  // each rank's own terminal is one that mpirun made
    const int fd = ::open(launcher_output().c_str(), O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0) {
      columns = columns_of(fd);
      ::close(fd);
    }
  } else {
    columns = columns_of(STDOUT_FILENO);
  }
  if (columns <= 0) {
    const char* const text = std::getenv("COLUMNS");
    columns = text == nullptr ? 0 : std::atoi(text);
  }
  return columns > 0 ? columns : 80;
}

bool prints_to_terminal() {
  if (!is_under_mpirun()) return ::isatty(STDOUT_FILENO) == 1;
  // Open MPI gives each rank a pseudo-terminal, wherever mpirun's own output goes.
  char target[256];
  const ssize_t length = ::readlink(launcher_output().c_str(), target, sizeof(target));
  if (length <= 0) return false;
  const std::string_view path(target, static_cast<size_t>(length));
  return path.starts_with("/dev/pts/") || path.starts_with("/dev/tty");
}

MetricsLog::MetricsLog(const Options& options)
    : options_(options), start_(std::chrono::steady_clock::now()) {
  const std::string path = options.dir + "/metrics.jsonl";
  const std::string kept = options.first_step > 0 ? lines_up_to(path, options.first_step) : "";
  write_file_atomically(path, kept);  // on a full disk the old one stays
  fd_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd_ < 0) fail(errno);
  nbytes_ = static_cast<int64_t>(kept.size());
  const size_t last = kept.empty() ? 0 : kept.rfind('\n', kept.size() - 2) + 1;
  if (!kept.empty() && kept.ends_with(kLineEnd)) {
    const auto line = nlohmann::json::parse(std::string_view(kept).substr(last));
    bool is_open = true;
    for (const auto& item : line.items()) is_open = is_open && !is_of_evaluation(item.key());
    if (is_open) open_step_ = line["step"].get<int64_t>();
  }
  last_step_ = options.first_step;
  if (options.has_events) events_ = std::make_unique<EventFile>(options.dir, last_step_ + 1);
}

MetricsLog::~MetricsLog() {
  clear_bar();
  if (fd_ >= 0) ::close(fd_);
}

void MetricsLog::fail(int error) const {
  throw IoError(
      fmt::format("{}/metrics.jsonl: cannot be written: {}", options_.dir, std::strerror(error)));
}

void MetricsLog::append(std::string_view line) {
  write_at(nbytes_, line);
}

/// From an offset in the last line, or behind it, to the end of the file.
void MetricsLog::write_at(int64_t offset, std::string_view text) {
  const int64_t end = offset + static_cast<int64_t>(text.size());
  int64_t at = offset;
  while (!text.empty()) {
    const ssize_t written = ::pwrite(fd_, text.data(), text.size(), at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      // Half a line would be no JSON; a line that was to be completed is as it was.
      [[maybe_unused]] const int cut = ::ftruncate(fd_, nbytes_);
      if (offset < nbytes_) {
        [[maybe_unused]] const ssize_t whole =
            ::pwrite(fd_, kLineEnd, std::strlen(kLineEnd), offset);
      }
      fail(error);
    }
    text.remove_prefix(static_cast<size_t>(written));
    at += written;
  }
  nbytes_ = end;
}

/// In one write, so that a process that dies leaves the line without or with it.
void MetricsLog::complete_line(std::optional<double> val_loss, const Figures& figures) {
  open_step_.reset();
  std::string text;
  const auto add = [&](const std::string& name, double value) {
    text += fmt::format(",{}:{}", nlohmann::json(name).dump(), nlohmann::json(value).dump());
  };
  if (val_loss) add("val_loss", *val_loss);
  for (const auto& [name, value] : figures) add(name, value);
  write_at(nbytes_ - static_cast<int64_t>(std::strlen(kLineEnd)), text + kLineEnd);
}

void MetricsLog::write_out(const std::string& text) {
  if (is_out_gone_) return;
  if (std::fputs(text.c_str(), options_.out) >= 0 && std::fflush(options_.out) == 0) return;
  const int error = errno;
  is_out_gone_ = true;
  ::__fpurge(options_.out);  // or every later flush tries again
  if (error == EPIPE) {
    if (options_.on_out_closed) options_.on_out_closed();
  } else if (error != EIO) {  // which a terminal that is gone gives
    log_warning("standard output: cannot be written: {}; training goes on without",
                std::strerror(error));
  }
}

void MetricsLog::clear_bar() {
  if (bar_is_shown_) write_out("\r\033[K");
  bar_is_shown_ = false;
}

void MetricsLog::print(const std::string& lines) {
  std::string shown;
  std::istringstream all(lines);
  for (std::string line; std::getline(all, line);) {
    shown += shorten(printable(line, "\t"), kMaxLineShown) + "\n";
  }
  clear_bar();
  write_out(shown);
}

void MetricsLog::print_text(const std::string& text) {
  clear_bar();
  write_out(printable(text, "\n\t") + "\n");
}

/// A step that comes again after a rewind takes back what was said of it and of later ones.
void MetricsLog::add_events(const StepMetrics& m, bool only_evaluation) {
  if (!only_evaluation) {
    if (events_ != nullptr && m.step <= last_step_) events_->restart(m.step);
    last_step_ = m.step;
  }
  if (events_ != nullptr) events_->add_scalars(m.step, to_scalars(m, only_evaluation));
}

void MetricsLog::add_config(const std::string& text,
                            const std::vector<std::pair<std::string, SettingValue>>& settings) {
  if (events_ == nullptr) return;
  events_->add_text(last_step_, "config", text);
  events_->add_settings(last_step_, settings);
}

void MetricsLog::add_sample(int64_t step, const std::string& text) {
  print_text(text);
  if (events_ != nullptr) events_->add_text(step, "sample", text);
}

void MetricsLog::record(const StepMetrics& m) {
  append(to_json(m) + "\n");
  is_recorded_ = true;
  add_events(m, false);
}

void MetricsLog::add_evaluation(int64_t step, std::optional<double> val_loss,
                                const Figures& figures) {
  if (open_step_ == step) complete_line(val_loss, figures);
  StepMetrics m;
  m.step = step, m.val_loss = val_loss, m.figures = figures;
  add_events(m, true);
  const std::string text = evaluation_text(val_loss, figures);
  if (!text.empty()) print(fmt::format("step {}/{}{}", step, options_.num_steps, text));
}

void MetricsLog::add(const StepMetrics& m) {
  if (is_recorded_) {
    if (is_evaluated(m)) {
      complete_line(m.val_loss, m.figures);
      add_events(m, true);
    }
  } else {
    append(to_json(m) + "\n");
    add_events(m, false);
  }
  is_recorded_ = false;
  open_step_.reset();
  if (first_step_ == 0) first_step_ = m.step;
  const bool is_last = m.step == options_.num_steps;
  if (m.step % options_.log_every == 0 || m.step == 1 || is_evaluated(m) || is_last) {
    print(to_line(m, options_.num_steps));
  }
  if (!options_.progress_bar || is_last) return;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  const double per_step = elapsed.count() / static_cast<double>(m.step - first_step_ + 1);
  const double left = per_step * static_cast<double>(options_.num_steps - m.step);
  // Its last column stays free, where some terminals wrap.
  const int width = std::min(terminal_width() - 1, kMostBarColumns);
  write_out("\r\033[K" + progress_bar(m, options_.num_steps, left, width));
  bar_is_shown_ = true;
}

}  // namespace tessera::apps
