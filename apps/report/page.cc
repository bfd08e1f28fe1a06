#include "apps/report/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "apps/report/chart.h"

namespace tessera::apps {
namespace {

constexpr size_t kNumColors = 8;

std::string words(NumberKind kind, double value) {
  return number_in_words(kind, value);
}

std::string plural(size_t count, const std::string& what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::vector<double> finite_values(const std::vector<double>* column) {
  std::vector<double> values;
  if (column == nullptr) return values;
  std::copy_if(column->begin(), column->end(), std::back_inserter(values),
               [](double v) { return std::isfinite(v); });
  return values;
}

std::optional<double> median(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// What a run is judged by, in a row of the table or in tiles.
struct RunFigures {
  std::optional<double> final_loss, last_validation, best_validation, tokens, rate, peak, exposed;
  double best_step = 0;
};

/// The loss over the last twentieth of the steps up to `last` of `x`, at most 50 of them.
std::optional<double> loss_until(const RunLog& run, const std::vector<double>& x, double last) {
  const std::vector<double>* const loss = run.find("loss");
  if (loss == nullptr) return std::nullopt;
  const auto end = static_cast<size_t>(std::upper_bound(x.begin(), x.end(), last) - x.begin());
  const size_t count = std::clamp<size_t>(end / 20, 1, 50);
  double sum = 0, num = 0;
  for (size_t i = end - std::min(end, count); i < end; ++i) {
    if (std::isfinite((*loss)[i])) sum += (*loss)[i], ++num;
  }
  return num > 0 ? std::optional(sum / num) : std::nullopt;
}

/// Of compute in a step's time, by step; empty for one rank, whose steps have none.
std::vector<double> exposed_share(const RunLog& run) {
  const auto *const gather = run.find("exposed_gather_ms"),
                    *const reduce = run.find("exposed_reduce_ms"),
                    *const step = run.find("step_ms");
  std::vector<double> share;
  if (gather == nullptr || reduce == nullptr || step == nullptr) return share;
  for (size_t i = 0; i < run.steps.size(); ++i) {
    share.push_back(std::min(1.0, ((*gather)[i] + (*reduce)[i]) / (*step)[i]));
  }
  return share;
}

/// Up to `last` of `x`.
RunFigures figures_of(const RunLog& run, const std::vector<double>& x, double last) {
  RunFigures f;
  f.final_loss = loss_until(run, x, last);
  if (const std::vector<double>* const val = run.find("val_loss")) {
    for (size_t i = 0; i < val->size() && x[i] <= last; ++i) {
      if (!std::isfinite((*val)[i])) continue;
      f.last_validation = (*val)[i];
      if (!f.best_validation || (*val)[i] < *f.best_validation) {
        f.best_validation = (*val)[i];
        f.best_step = run.steps[i];
      }
    }
  }
  if (const auto tokens = finite_values(run.find("tokens")); !tokens.empty())
    f.tokens = tokens.back();
  f.rate = median(finite_values(run.find("tokens_per_second")));
  if (const auto peak = finite_values(run.find("peak_bytes")); !peak.empty()) {
    f.peak = *std::max_element(peak.begin(), peak.end());
  }
  const std::vector<double> share = exposed_share(run);
  f.exposed = median(finite_values(&share));
  return f;
}

std::string text_of(const std::optional<double>& value, NumberKind kind) {
  return value ? words(kind, *value) : "–";
}
std::string loss_text(const std::optional<double>& value) {
  return value ? fmt::format("{:.4f}", *value) : "–";
}

/// Tokens of a step, if all steps have as many.
std::optional<double> tokens_a_step(const RunLog& run) {
  const std::vector<double>* const tokens = run.find("tokens");
  if (tokens == nullptr || run.steps.empty()) return std::nullopt;
  std::vector<double> each;
  for (size_t i = 1; i < tokens->size(); ++i) {
    each.push_back(((*tokens)[i] - (*tokens)[i - 1]) / (run.steps[i] - run.steps[i - 1]));
  }
  if (each.empty()) return (*tokens)[0] / run.steps[0];
  return median(each);
}

class Page {
 public:
  Page(const std::vector<RunLog>& runs, ReportAxis axis) : runs_(runs) {
    choose_axis(axis);
    last_x_ = x_of(runs.front()).back();
    for (const RunLog& run : runs) last_x_ = std::min(last_x_, x_of(run).back());
  }

  std::string html() {
    const bool is_one = runs_.size() == 1;
    const std::string title = is_one ? runs_[0].label : plural(runs_.size(), "run") + " compared";
    std::string html =
        std::string(kReportMark) + "<html lang=\"en\"><head><meta charset=\"utf-8\">" +
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
        "'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">"
        "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
        "<link rel=\"icon\" href=\"data:,\"><title>" +
        html_text(title) + "</title><style>" + kReportStyle + "</style></head><body><main><h1>" +
        html_text(title) + "</h1>";
    html += remarks();
    html += is_one ? tiles() : run_buttons() + run_table();
    html += training_charts();
    html += speed_charts();
    html += memory_charts();
    html += unit_charts();
    html += configuration();
    return html + "</main><script>" + kReportScript + "</script></body></html>\n";
  }

 private:
  void choose_axis(ReportAxis axis) {
    const bool have_tokens = std::all_of(runs_.begin(), runs_.end(), [](const RunLog& run) {
      return finite_values(run.find("tokens")).size() == run.steps.size();
    });
    if (axis == ReportAxis::kAuto && have_tokens) {
      std::set<std::optional<double>> each;
      for (const RunLog& run : runs_) each.insert(tokens_a_step(run));
      over_tokens_ = each.size() > 1;
      is_chosen_ = over_tokens_;
    } else {
      over_tokens_ = axis == ReportAxis::kTokens && have_tokens;
    }
  }

  const std::vector<double>& x_of(const RunLog& run) const {
    return over_tokens_ ? *run.find("tokens") : run.steps;
  }
  const char* x_name() const { return over_tokens_ ? "tokens" : "step"; }
  static int color_of(size_t run) { return static_cast<int>(run % kNumColors); }

  std::string paragraph(const std::string& text) const {
    return "<p class=\"soft\">" + html_text(text) + "</p>";
  }

  /// What a reader has to know before looking: how the runs ended, and how they are compared.
  std::string remarks() const {
    std::string html;
    for (const RunLog& run : runs_) {
      std::string text;
      const auto add = [&](const std::string& more) { text += (text.empty() ? "" : "; ") + more; };
      if (runs_.size() == 1 && !run.state.empty()) add("The run " + run.state);
      const std::vector<double>* const loss = run.find("loss");
      const auto bad =
          std::count_if(loss->begin(), loss->end(), [](double v) { return std::isnan(v); });
      if (bad > 0)
        add("the loss of " + plural(static_cast<size_t>(bad), "step") + " is not finite");
      if (run.num_rewinds > 0) {
        add("it went back to an earlier step " +
            plural(static_cast<size_t>(run.num_rewinds), "time") +
            ", of which the later steps are shown");
      }
      if (run.is_last_cut) add("its last line is not complete and left out");
      if (text.empty()) continue;
      if (runs_.size() == 1) text[0] = static_cast<char>(std::toupper(text[0]));
      html += paragraph((runs_.size() > 1 ? run.label + ": " : "") + text + ".");
    }
    if (runs_.size() == 1) return html;
    if (is_chosen_) {
      html += paragraph(
          "The runs take different numbers of tokens a step: they are drawn over tokens.");
    }
    double first = 0;
    bool is_same_end = true;
    for (const RunLog& run : runs_) {
      first = std::max(first, x_of(run).front());
      is_same_end = is_same_end && x_of(run).back() == last_x_;
    }
    if (first > last_x_) {
      html += paragraph("The runs have no step in common: their losses are of different steps.");
    } else if (!is_same_end) {
      html += paragraph(fmt::format(
          "The runs end at different steps: the table compares their losses at {}, the last that "
          "all of them have.",
          last_in_words()));
    }
    return html;
  }

  std::string tiles() const {
    const RunLog& run = runs_[0];
    const RunFigures f = figures_of(run, run.steps, run.steps.back());
    std::string html = "<div class=\"tiles\">";
    const auto tile = [&](const std::string& value, const std::string& name) {
      html += "<div class=\"tile\"><b>" + value + "</b><span>" + name + "</span></div>";
    };
    tile(fmt::format("{:.0f}", run.steps.back()), "steps");
    if (f.tokens) tile(words(NumberKind::kCount, *f.tokens), "tokens");
    tile(loss_text(f.final_loss), "loss, mean of the last steps");
    if (f.best_validation) {
      tile(loss_text(f.best_validation),
           fmt::format("best validation loss, step {:.0f}", f.best_step));
    }
    if (f.rate) tile(words(NumberKind::kCount, *f.rate), "tokens a second, median");
    if (f.peak) tile(words(NumberKind::kBytes, *f.peak), "peak memory of rank 0");
    if (f.exposed)
      tile(words(NumberKind::kPercent, *f.exposed), "of a step waits for communication");
    return html + "</div>";
  }

  /// "step 300", "1.23M tokens".
  std::string last_in_words() const {
    return over_tokens_ ? words(NumberKind::kCount, last_x_) + " tokens"
                        : fmt::format("step {:.0f}", last_x_);
  }

  std::string run_buttons() const {
    std::string html = "<div class=\"runs\" role=\"group\" aria-label=\"runs that are shown\">";
    for (size_t r = 0; r < std::min(runs_.size(), kNumColors); ++r) {
      html += fmt::format(
          "<button type=\"button\" aria-pressed=\"true\" data-color=\"{0}\"><i class=\"c{0}\"></i>"
          "{1}</button>",
          r, html_text(runs_[r].label));
    }
    return html + "</div>";
  }

  std::string run_table() const {
    std::string html = "<h2>Runs</h2><div class=\"scroll\"><table><thead><tr>";
    const std::string at = last_in_words();
    for (const std::string& name :
         {std::string("run"), "loss at " + at, "validation until " + at,
          std::string("best validation"), std::string("steps"), std::string("tokens"),
          std::string("tokens/s"), std::string("peak memory"), std::string("exposed"),
          std::string("state")}) {
      html += "<th scope=\"col\">" + name + "</th>";
    }
    html += "</tr></thead><tbody>";
    for (size_t r = 0; r < runs_.size(); ++r) {
      const RunLog& run = runs_[r];
      const RunFigures common = figures_of(run, x_of(run), last_x_),
                       all = figures_of(run, run.steps, run.steps.back());
      html += fmt::format("<tr><th scope=\"row\"><i class=\"c{}\"></i>{}</th>", color_of(r),
                          html_text(run.label));
      const std::string best =
          all.best_validation
              ? fmt::format("{} (step {:.0f})", loss_text(all.best_validation), all.best_step)
              : "–";
      for (const std::string& cell :
           {loss_text(common.final_loss), loss_text(common.last_validation), best,
            fmt::format("{:.0f}", run.steps.back()), text_of(all.tokens, NumberKind::kCount),
            text_of(all.rate, NumberKind::kCount), text_of(all.peak, NumberKind::kBytes),
            text_of(all.exposed, NumberKind::kPercent), html_text(run.state)}) {
        html += "<td>" + cell + "</td>";
      }
      html += "</tr>";
    }
    return html + "</tbody></table></div>";
  }

  /// One column of all runs that have it.
  Chart chart_of(const std::string& title, const std::string& name, NumberKind kind,
                 bool is_smoothed) const {
    Chart chart;
    chart.title = title;
    chart.kind = kind;
    chart.x_name = x_name();
    for (size_t r = 0; r < runs_.size(); ++r) {
      const std::vector<double>* const values = runs_[r].find(name);
      if (values == nullptr) continue;
      chart.lines.push_back({.name = runs_.size() == 1 ? title : runs_[r].label,
                             .color = color_of(r),
                             .x = x_of(runs_[r]),
                             .y = *values,
                             .is_smoothed = is_smoothed});
    }
    return chart;
  }

  /// Only the steps that have a value: those between are not zero, and no gap.
  ChartLine sparse_line(size_t r, const std::string& name, const std::string& words) const {
    ChartLine line{.name = words, .color = color_of(r), .has_points = true, .is_dashed = true};
    const std::vector<double>& values = *runs_[r].find(name);
    for (size_t i = 0; i < values.size(); ++i) {
      if (!std::isfinite(values[i])) continue;
      line.x.push_back(x_of(runs_[r])[i]);
      line.y.push_back(values[i]);
    }
    return line;
  }

  static std::string section(const std::string& title, const std::string& figures) {
    return figures.empty() ? "" : "<h2>" + title + "</h2><div class=\"grid\">" + figures + "</div>";
  }

  std::string training_charts() const {
    Chart loss = chart_of("Loss", "loss", NumberKind::kPlain, true);
    for (size_t r = 0; r < runs_.size(); ++r) {
      const std::vector<double>& values = *runs_[r].find("loss");
      if (runs_[r].find("val_loss") != nullptr) {
        const std::string name = runs_.size() == 1 ? "Validation" : runs_[r].label + ", validation";
        ChartLine line = sparse_line(r, "val_loss", name);
        if (runs_.size() == 1) line.color = 1;
        loss.lines.push_back(std::move(line));
      }
      constexpr size_t kMostMarks = 12;
      for (size_t i = 0; i < values.size() && runs_.size() == 1; ++i) {
        if (!std::isnan(values[i]) || loss.marks.size() == kMostMarks) continue;
        loss.marks.emplace_back(x_of(runs_[r])[i], "not finite");
      }
    }
    loss.has_legend = runs_.size() == 1 && loss.lines.size() > 1;
    if (runs_.size() > 1 && loss.lines.size() > runs_.size()) {
      loss.note = "Dashed, with points: the validation loss.";
    }
    std::string html = range_charts();
    const size_t begin = html.size();
    html += chart_html(loss);
    if (html.size() > begin) html.insert(begin + std::string("<figure").size(), " class=\"wide\"");
    html += chart_html(chart_of("Learning rate", "lr", NumberKind::kPlain, false));
    Chart norm = chart_of("Gradient norm, before clipping", "grad_norm", NumberKind::kPlain, true);
    norm.may_be_log = true;
    html += chart_html(norm);
    for (const auto& [name, title] :
         {std::pair{"margin", "Margin of rewards, chosen less rejected"},
          std::pair{"accuracy", "Pairs whose chosen answer has the larger reward"}}) {
      Chart chart = chart_of(title, name, NumberKind::kPlain, true);
      if (std::string_view(name) == "accuracy") chart.kind = NumberKind::kPercent;
      html += chart_html(chart);
    }
    Chart scale = chart_of("Loss scale", "loss_scale", NumberKind::kPlain, false);
    scale.may_be_log = true;
    html += chart_html(scale);
    Chart skipped =
        chart_of("Steps that changed nothing so far", "skipped", NumberKind::kCount, false);
    skipped.from_zero = true;
    const bool has_skipped =
        std::any_of(skipped.lines.begin(), skipped.lines.end(), [](const ChartLine& line) {
          return std::any_of(line.y.begin(), line.y.end(), [](double v) { return v > 0; });
        });
    if (has_skipped) html += chart_html(skipped);
    return section("Training", html);
  }

  static bool is_range_test(const RunLog& run) {
    return std::any_of(run.config.begin(), run.config.end(), [](const auto& row) {
      return row.first == "optim.schedule" && row.second.find("range_test") != std::string::npos;
    });
  }

  /// The losses over the learning rates of a range test, and what they say of the rate to take.
  std::string range_charts() const {
    Chart chart;
    chart.title = "Loss over the learning rate (range test)";
    chart.x_name = "learning rate";
    chart.is_log_x = true;
    for (size_t r = 0; r < runs_.size(); ++r) {
      if (!is_range_test(runs_[r]) || runs_[r].find("lr") == nullptr) continue;
      ChartLine line{.name = runs_.size() == 1 ? "Loss" : runs_[r].label, .color = color_of(r)};
      line.is_smoothed = true;
      const std::vector<double>&lr = *runs_[r].find("lr"), &loss = *runs_[r].find("loss");
      for (size_t i = 0; i < lr.size(); ++i) {
        if (!(lr[i] > 0)) continue;
        line.x.push_back(std::log10(lr[i]));
        line.y.push_back(loss[i]);
      }
      if (const std::string advice = advice_of(line); !advice.empty()) {
        chart.note += (chart.note.empty() ? "" : " ") +
                      (runs_.size() > 1 ? runs_[r].label + ": " : std::string()) + advice;
      }
      // What comes after the loss has blown up would flatten the rest.
      const std::vector<double> finite = finite_values(&line.y);
      if (!finite.empty()) {
        const double low = *std::min_element(finite.begin(), finite.end());
        const double most = finite.front() + 0.5 * std::fabs(finite.front() - low);
        for (double& y : line.y) {
          if (y > most) y = std::numeric_limits<double>::quiet_NaN();
        }
      }
      chart.lines.push_back(std::move(line));
    }
    std::string html = chart_html(chart);
    if (!html.empty()) html.insert(std::string("<figure").size(), " class=\"wide\"");
    return html;
  }

  /// "The loss is lowest at 0.03 and falls fastest at 0.004: begin with about 0.003."
  static std::string advice_of(const ChartLine& line) {
    const std::vector<double> smooth =
        moving_average(line.y, std::max(5.0, static_cast<double>(line.y.size()) / 20));
    std::optional<size_t> lowest, steepest;
    for (size_t i = 0; i < smooth.size(); ++i) {
      if (std::isfinite(smooth[i]) && (!lowest || smooth[i] < smooth[*lowest])) lowest = i;
    }
    if (!lowest || *lowest < 2) return "";
    double most = 0;
    const size_t reach = std::max<size_t>(1, line.y.size() / 40);
    for (size_t i = reach; i + reach < smooth.size() && i <= *lowest; ++i) {
      const double slope =
          (smooth[i - reach] - smooth[i + reach]) / (line.x[i + reach] - line.x[i - reach]);
      if (slope > most) most = slope, steepest = i;
    }
    if (!steepest) return "";
    const double best = std::pow(10.0, line.x[*lowest]);
    return fmt::format(
        "The loss is lowest at a learning rate of {:.2g} and falls fastest at {:.2g}: begin with "
        "about {:.1g}, a tenth of the former.",
        best, std::pow(10.0, line.x[*steepest]), best / 10);
  }

  std::string speed_charts() const {
    Chart rate = chart_of("Tokens a second", "tokens_per_second", NumberKind::kCount, true);
    rate.from_zero = true;
    std::string html = chart_html(rate);
    Chart mfu = chart_of("Model FLOPs utilization", "mfu", NumberKind::kPercent, false);
    mfu.from_zero = true;
    html += chart_html(mfu) + exposed_chart() + slow_rank_charts();
    return section("Speed", html);
  }

  std::string exposed_chart() const {
    Chart chart;
    chart.x_name = x_name();
    if (runs_.size() > 1) {
      chart.title = "Share of a step that waits for communication";
      chart.kind = NumberKind::kPercent;
      for (size_t r = 0; r < runs_.size(); ++r) {
        std::vector<double> share = exposed_share(runs_[r]);
        if (share.empty()) continue;
        chart.lines.push_back(
            {runs_[r].label, color_of(r), x_of(runs_[r]), std::move(share), true});
      }
    } else {
      chart.title = "Time that compute waits for communication in a step";
      chart.kind = NumberKind::kMs;
      chart.is_stacked = chart.has_legend = true;
      chart.note = "Of rank 0; over many steps a moving average.";
      const RunLog& run = runs_[0];
      int color = 0;
      for (const auto& [name, title] : {std::pair{"exposed_gather_ms", "all-gathers"},
                                        std::pair{"exposed_reduce_ms", "reduce-scatters"}}) {
        const std::vector<double>* const values = run.find(name);
        if (values == nullptr) continue;
        // Areas share their x: every so-manieth step of a moving average.
        ChartLine line{.name = title, .color = color++};
        const size_t each = (values->size() + 299) / 300;
        const std::vector<double> smooth =
            moving_average(*values, std::max(1.0, static_cast<double>(each)));
        for (size_t i = 0; i < values->size(); i += each) {
          line.x.push_back(x_of(run)[i]);
          line.y.push_back(smooth[i]);
        }
        chart.lines.push_back(std::move(line));
      }
    }
    chart.from_zero = true;
    return chart_html(chart);
  }

  std::string slow_rank_charts() const {
    Chart behind = chart_of("Waiting for the slowest rank, a step", "slowest_behind_ms",
                            NumberKind::kMs, true);
    behind.from_zero = true;
    behind.note =
        "How much longer the other ranks have waited in collectives than the one they wait for.";
    std::string html = chart_html(behind);
    BarChart bars{.title = "Steps in which a rank was the slowest", .kind = NumberKind::kPercent};
    bars.parts = {"share of steps"};
    for (const RunLog& run : runs_) {
      const std::vector<double>* const slowest = run.find("slowest_rank");
      if (slowest == nullptr) continue;
      std::map<double, double> counts;
      double total = 0;
      for (const double rank : *slowest) {
        if (std::isfinite(rank)) ++counts[rank], ++total;
      }
      std::vector<std::pair<double, double>> most;  // steps, rank
      for (const auto& [rank, count] : counts) most.emplace_back(count, rank);
      std::sort(most.rbegin(), most.rend());
      constexpr size_t kMostRanks = 8;
      if (most.size() > kMostRanks) most.resize(kMostRanks);
      for (const auto& [count, rank] : most) {
        const std::string name = fmt::format("rank {:.0f}", rank);
        bars.rows.push_back({runs_.size() > 1 ? run.label + ", " + name : name, {count / total}});
      }
    }
    return html + bars_html(bars);
  }

  std::string memory_charts() const {
    BarChart bars{.title = "Peak of device memory by class, rank 0"};
    std::map<std::string, size_t> index;
    for (const RunLog& run : runs_) {
      for (const std::string& name : run.names) {
        if (!name.starts_with("memory/")) continue;
        const std::string part = name.substr(7);
        if (index.try_emplace(part, index.size()).second) bars.parts.push_back(part);
      }
    }
    for (const RunLog& run : runs_) {
      std::vector<double> values(bars.parts.size(), 0.0);
      for (size_t p = 0; p < values.size(); ++p) {
        const auto last = finite_values(run.find("memory/" + bars.parts[p]));
        if (!last.empty()) values[p] = last.back();
      }
      bars.rows.push_back({run.label, std::move(values)});
    }
    std::string html = bars_html(bars);
    for (const RunLog& run : runs_) {
      if (run.memory) html += memory_over_step(run, index);
    }
    return section("Memory", html);
  }

  std::string memory_over_step(const RunLog& run, std::map<std::string, size_t>& index) const {
    const MemoryOverStep& memory = *run.memory;
    Chart chart;
    chart.title = fmt::format("Device memory over step {}{}", memory.step,
                              runs_.size() > 1 ? ", " + run.label : "");
    chart.note = "In the order in which the host allocates and frees.";
    chart.x_name = "change";
    chart.kind = NumberKind::kBytes;
    chart.is_stacked = chart.has_legend = chart.colors_are_classes = true;
    for (size_t c = 0; c < memory.classes.size(); ++c) {
      const std::vector<double>& bytes = memory.bytes[c];
      if (std::all_of(bytes.begin(), bytes.end(), [](double b) { return b == 0; })) continue;
      const size_t color = index.try_emplace(memory.classes[c], index.size()).first->second;
      ChartLine line{.name = memory.classes[c], .color = static_cast<int>(color), .y = bytes};
      line.x.resize(bytes.size());
      std::iota(line.x.begin(), line.x.end(), 0.0);
      chart.lines.push_back(std::move(line));
    }
    // Of many micro-batches the words would be on top of each other.
    constexpr size_t kMostMarks = 6;
    if (memory.marks.size() <= kMostMarks) {
      for (const auto& [point, phase] : memory.marks) {
        chart.marks.emplace_back(static_cast<double>(point), phase);
      }
    }
    return chart_html(chart);
  }

  std::string unit_charts() const {
    std::string html;
    for (const RunLog& run : runs_) {
      HeatMap map;
      map.title = "Gradient norm by unit" + (runs_.size() > 1 ? ", " + run.label : std::string());
      map.x_name = x_name();
      map.x = x_of(run);
      for (const std::string& name : run.names) {
        if (!name.starts_with("unit_norms/")) continue;
        map.rows.push_back(name.substr(11));
        map.values.push_back(*run.find(name));
      }
      if (!map.rows.empty()) html += heat_map_html(map);
    }
    return section("Units", html);
  }

  std::string configuration() const {
    std::string html;
    if (runs_.size() > 1) html += differences();
    for (const RunLog& run : runs_) {
      if (run.config_text.empty()) continue;
      html += "<details><summary>Configuration" +
              (runs_.size() > 1 ? " of " + html_text(run.label) : std::string()) +
              "</summary><pre>" + html_text(run.config_text) + "</pre></details>";
    }
    return html.empty() ? "" : "<h2>Configuration</h2>" + html;
  }

  std::string differences() const {
    std::map<std::string, std::vector<std::string>> values;
    size_t num_without = 0;
    for (size_t r = 0; r < runs_.size(); ++r) {
      num_without += runs_[r].config.empty() ? 1 : 0;
      for (const auto& [key, value] : runs_[r].config) {
        auto& row = values[key];
        row.resize(runs_.size(), "–");
        row[r] = value;
      }
    }
    std::string rows;
    for (const auto& [key, row] : values) {
      if (key == "output.dir") continue;  // the runs' names say it
      const bool differs =
          std::any_of(row.begin(), row.end(),
                      [&, first = row.front()](const std::string& v) { return v != first; });
      if (!differs) continue;
      rows += "<tr><th scope=\"row\" class=\"code\">" + html_text(key) + "</th>";
      for (const std::string& value : row)
        rows += "<td class=\"code\">" + html_text(value) + "</td>";
      rows += "</tr>";
    }
    const std::string without =
        num_without == 0 ? "" : paragraph(plural(num_without, "run") + " without a config.toml.");
    if (rows.empty()) return without + paragraph("No key differs but output.dir.");
    std::string html =
        without + "<div class=\"scroll\"><table><thead><tr><th scope=\"col\">key</th>";
    for (size_t r = 0; r < runs_.size(); ++r) {
      html += fmt::format("<th scope=\"col\" class=\"code\">{}</th>", html_text(runs_[r].label));
    }
    return html + "</tr></thead><tbody>" + rows + "</tbody></table></div>";
  }

  const std::vector<RunLog>& runs_;
  bool over_tokens_ = false, is_chosen_ = false;
  double last_x_ = 0;  // that all runs have
};

}  // namespace

std::string report_html(const std::vector<RunLog>& runs, ReportAxis axis) {
  return Page(runs, axis).html();
}

}  // namespace tessera::apps
