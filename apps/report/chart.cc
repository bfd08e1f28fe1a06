#include "apps/report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/utf8.h"

namespace tessera::apps {
namespace {

constexpr double kWidth = 2000, kHeight = 1000;  // of the stretched SVG's own units
constexpr size_t kMaxPoints = 700;
constexpr const char* kKindNames[] = {"plain", "count", "bytes", "ms", "percent"};

struct Extent {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  void add(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value), high = std::max(high, value);
  }
  bool is_empty() const { return low > high; }
  double size() const { return high - low; }
};

/// Three to five digits, without zeros at the end.
std::string short_number(double value) {
  const double size = std::fabs(value);
  if (size != 0 && (size < 1e-3 || size >= 1e7)) return fmt::format("{:.3g}", value);
  if (size >= 1000) return fmt::format("{:.0f}", value);
  std::string text = fmt::format("{:.{}f}", value, size >= 100 ? 1 : size >= 1 ? 3 : 4);
  while (text.ends_with('0')) text.pop_back();
  if (text.ends_with('.')) text.pop_back();
  return text == "-0" ? "0" : text;
}

/// Of a number below 1024.
std::string three_digits(double value) {
  const double size = std::fabs(value);
  std::string text = fmt::format("{:.{}f}", value, size >= 100 ? 0 : size >= 10 ? 1 : 2);
  if (text.find('.') != std::string::npos) {
    while (text.ends_with('0')) text.pop_back();
    if (text.ends_with('.')) text.pop_back();
  }
  return text;
}

std::string with_unit(double value, double step, std::initializer_list<const char*> units) {
  auto unit = units.begin();
  while (std::fabs(value) >= step && unit + 1 != units.end()) value /= step, ++unit;
  return three_digits(value) + *unit;
}

/// Values to places in the SVG, and back for ticks.
struct Scale {
  double low = 0, high = 1, size = 1;
  bool is_log = false, is_down = false;

  double at(double value) const {
    const double v = is_log ? std::log10(value) : value;
    const double part = (v - low) / (high - low);
    return size * (is_down ? 1 - part : part);
  }
  double percent(double value) const { return 100 * at(value) / size; }
};

Scale x_scale(const Extent& x) {
  Scale s{x.low, x.high, kWidth};
  if (x.size() <= 0) s.low -= 0.5, s.high += 0.5;
  return s;
}

Scale y_scale(const Chart& chart, const Extent& y) {
  Scale s{y.low, y.high, kHeight, false, true};
  if (chart.may_be_log && y.low > 0 && y.high > 50 * y.low) {
    s.is_log = true;
    s.low = std::log10(y.low), s.high = std::log10(y.high);
  } else if (chart.from_zero || chart.is_stacked) {
    s.low = std::min(0.0, y.low);
  }
  double span = s.high - s.low;
  if (span <= 0) span = std::max(std::fabs(s.high) * 0.1, 1e-12);
  s.high += 0.05 * span;
  if (s.is_log || !(chart.from_zero || chart.is_stacked) || s.low < 0) s.low -= 0.05 * span;
  return s;
}

std::vector<double> ticks_of(const Scale& scale, int count, NumberKind kind) {
  if (!scale.is_log) {
    double unit = 1;  // bytes are round in the unit in which they are written
    while (kind == NumberKind::kBytes && scale.high >= 1024 * unit) unit *= 1024;
    std::vector<double> ticks = round_ticks(scale.low / unit, scale.high / unit, count);
    for (double& tick : ticks) tick *= unit;
    return ticks;
  }
  std::vector<double> ticks;
  const int first = static_cast<int>(std::floor(scale.low));
  const int last = static_cast<int>(std::ceil(scale.high));
  const int step = std::max(1, (last - first + count - 1) / count);
  for (int power = first; power <= last; power += step) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      if (digit > 1 && last - first > 2) continue;
      const double at = power + std::log10(digit);
      if (at >= scale.low && at <= scale.high) ticks.push_back(digit * std::pow(10.0, power));
    }
  }
  return ticks;
}

std::string path_of(const std::vector<double>& x, const std::vector<double>& y, const Scale& xs,
                    const Scale& ys) {
  std::string path;
  bool is_down = false;
  for (size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(y[i]) || (ys.is_log && y[i] <= 0)) {
      is_down = false;
      continue;
    }
    path += fmt::format("{}{:.0f} {:.0f}", is_down ? "L" : "M", xs.at(x[i]), ys.at(y[i]));
    // A value alone is a dot: round caps draw it.
    const bool is_alone =
        !is_down && (i + 1 == x.size() || !std::isfinite(y[i + 1]) || (ys.is_log && y[i + 1] <= 0));
    if (is_alone) path += "h0";
    is_down = true;
  }
  return path;
}

std::string area_path(const std::vector<double>& x, const std::vector<double>& base,
                      const std::vector<double>& top, const Scale& xs, const Scale& ys) {
  std::string path;
  for (size_t i = 0; i < x.size(); ++i) {
    path += fmt::format("{}{:.0f} {:.0f}", i == 0 ? "M" : "L", xs.at(x[i]), ys.at(top[i]));
  }
  for (size_t i = x.size(); i-- > 0;) {
    path += fmt::format("L{:.0f} {:.0f}", xs.at(x[i]), ys.at(base[i]));
  }
  return path.empty() ? path : path + "Z";
}

std::string color_class(const Chart& chart, int color) {
  return fmt::format("{}{}", chart.colors_are_classes ? "m" : "c", color % 8);
}

/// "step 120", "learning rate 0.001".
std::string x_in_words(double x, bool is_log) {
  return is_log ? fmt::format("{:.3g}", std::pow(10.0, x)) : fmt::format("{:.0f}", x);
}

/// "a: 5.2 at step 1, 1.2 at step 100, lowest 1.1 at step 90".
std::string line_in_words(const Chart& chart, const ChartLine& line) {
  std::optional<size_t> first, last, low;
  for (size_t i = 0; i < line.y.size(); ++i) {
    if (!std::isfinite(line.y[i])) continue;
    if (!first) first = i;
    last = i;
    if (!low || line.y[i] < line.y[*low]) low = i;
  }
  if (!first) return "";
  const auto say = [&](size_t i) {
    return fmt::format("{} at {} {}", number_in_words(chart.kind, line.y[i]), chart.x_name,
                       x_in_words(line.x[i], chart.is_log_x));
  };
  return fmt::format("{}: {}, {}, lowest {}", line.name, say(*first), say(*last), say(*low));
}

/// For the script: null where there is none.
nlohmann::json json_numbers(const std::vector<double>& values) {
  auto list = nlohmann::json::array();
  for (const double v : values) {
    list.push_back(std::isfinite(v) ? nlohmann::json::parse(fmt::format("{:.6g}", v))
                                    : nlohmann::json());
  }
  return list;
}

std::string script_data(const nlohmann::json& data) {
  std::string text = data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  for (size_t at = 0; (at = text.find('<', at)) != std::string::npos;) {
    text.replace(at, 1, "\\u003c");  // no end tag in it
  }
  return "<script type=\"application/json\">" + text + "</script>";
}

/// Of steps, tokens and the like: whole numbers, or powers of ten.
std::string x_labels(const Scale& xs, const std::string& name, bool is_log = false) {
  std::string html = "<div class=\"xs\" aria-hidden=\"true\">";
  for (const double tick : ticks_of(xs, 5, NumberKind::kCount)) {
    if (tick != std::round(tick)) continue;
    const double at = xs.percent(tick);
    const char* const side = at < 4 ? " class=\"first\"" : at > 96 ? " class=\"last\"" : "";
    html +=
        fmt::format("<span{} style=\"left:{:.2f}%\">{}</span>", side, at,
                    is_log ? x_in_words(tick, true) : number_in_words(NumberKind::kCount, tick));
  }
  return html +
         fmt::format("</div><div class=\"xname\" aria-hidden=\"true\">{}</div>", html_text(name));
}

std::string legend_html(const std::vector<std::pair<std::string, std::string>>& names) {
  std::string html = "<ul class=\"legend\">";
  for (const auto& [color, name] : names) {
    html += fmt::format("<li class=\"{}\"><i></i>{}</li>", color, html_text(name));
  }
  return html + "</ul>";
}

std::string figure_head(const std::string& title) {
  return "<figure><figcaption>" + html_text(title) + "</figcaption>";
}

std::string note_html(const std::string& note) {
  return note.empty() ? "" : "<p class=\"note\">" + html_text(note) + "</p>";
}

/// Sums of the lines up to each, by x; gaps count as 0.
std::vector<std::vector<double>> stacked_sums(const std::vector<ChartLine>& lines) {
  std::vector<std::vector<double>> sums;
  std::vector<double> sum(lines.empty() ? 0 : lines[0].x.size(), 0.0);
  sums.push_back(sum);
  for (const ChartLine& line : lines) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += std::isfinite(line.y[i]) ? line.y[i] : 0;
    sums.push_back(sum);
  }
  return sums;
}

struct Scales {
  Scale x, y;
};

std::optional<Scales> scales_of(const Chart& chart,
                                const std::vector<std::vector<double>>& stacked) {
  Extent x, y;
  for (const ChartLine& line : chart.lines) {
    for (size_t i = 0; i < line.x.size(); ++i) {
      x.add(line.x[i]);
      if (!chart.is_stacked) y.add(line.y[i]);
    }
  }
  for (const std::vector<double>& sums : stacked) {
    for (const double sum : sums) y.add(sum);
  }
  if (x.is_empty() || y.is_empty()) return std::nullopt;
  return Scales{x_scale(x), y_scale(chart, y)};
}

constexpr double kFewPoints = 60;

std::string draw_lines(const Chart& chart, const Scales& scales) {
  std::string svg;
  for (const ChartLine& whole : chart.lines) {
    const std::string color = color_class(chart, whole.color);
    const ChartLine line = thinned(whole, kMaxPoints);
    const bool is_smoothed = whole.is_smoothed && static_cast<double>(whole.x.size()) > kFewPoints;
    svg +=
        fmt::format("<path class=\"line {}{}{}\" d=\"{}\"/>", color, is_smoothed ? " faint" : "",
                    whole.is_dashed ? " dashed" : "", path_of(line.x, line.y, scales.x, scales.y));
    if (is_smoothed) {
      ChartLine smooth = whole;
      smooth.y = moving_average(whole.y, std::max(10.0, static_cast<double>(whole.x.size()) / 100));
      smooth = thinned(smooth, kMaxPoints);
      svg += fmt::format("<path class=\"line {}\" d=\"{}\"/>", color,
                         path_of(smooth.x, smooth.y, scales.x, scales.y));
    }
    if (!whole.has_points || line.x.size() > 100) continue;
    std::string dots;
    for (size_t i = 0; i < line.x.size(); ++i) {
      if (!std::isfinite(line.y[i]) || (scales.y.is_log && line.y[i] <= 0)) continue;
      dots += fmt::format("M{:.0f} {:.0f}h0", scales.x.at(line.x[i]), scales.y.at(line.y[i]));
    }
    svg += fmt::format("<path class=\"dots {}\" d=\"{}\"/>", color, dots);
  }
  return svg;
}

std::string draw_areas(const Chart& chart, const Scales& scales,
                       const std::vector<std::vector<double>>& sums) {
  std::string svg;
  for (size_t i = 0; i < chart.lines.size(); ++i) {
    const ChartLine& line = chart.lines[i];
    svg += fmt::format("<path class=\"area {}\" d=\"{}\"/>", color_class(chart, line.color),
                       area_path(line.x, sums[i], sums[i + 1], scales.x, scales.y));
  }
  return svg;
}

nlohmann::json chart_data(const Chart& chart, const Scales& scales) {
  nlohmann::json data{{"kind", kKindNames[static_cast<int>(chart.kind)]},
                      {"x", chart.x_name},
                      {"xs", {scales.x.low, scales.x.high}},
                      {"ys", {scales.y.low, scales.y.high}},
                      {"log", scales.y.is_log},
                      {"xlog", chart.is_log_x},
                      {"stacked", chart.is_stacked}};
  for (const ChartLine& whole : chart.lines) {
    const ChartLine line = thinned(whole, kMaxPoints);
    data["lines"].push_back({{"name", whole.name},
                             {"color", color_class(chart, whole.color)},
                             {"x", json_numbers(line.x)},
                             {"y", json_numbers(line.y)}});
  }
  return data;
}

}  // namespace

std::string number_in_words(NumberKind kind, double value) {
  if (!std::isfinite(value)) return "none";
  switch (kind) {
    case NumberKind::kPlain:
      return short_number(value);
    case NumberKind::kCount:
      if (std::fabs(value) < 10000 && value == std::floor(value)) {
        return fmt::format("{:.0f}", value);
      }
      return with_unit(value, 1000, {"", "k", "M", "G", "T"});
    case NumberKind::kBytes:
      return with_unit(value, 1024, {" B", " KiB", " MiB", " GiB", " TiB"});
    case NumberKind::kMs:
      return value >= 10000 ? short_number(value / 1000) + " s" : short_number(value) + " ms";
    case NumberKind::kPercent:
      return fmt::format("{:.3g} %", value * 100);
  }
  return "";
}

std::string html_text(std::string_view text) {
  std::string html;
  for (const char c : replace_invalid_utf8(text)) {
    switch (c) {
      case '<':
        html += "&lt;";
        break;
      case '>':
        html += "&gt;";
        break;
      case '&':
        html += "&amp;";
        break;
      case '"':
        html += "&quot;";
        break;
      case '\'':
        html += "&#39;";
        break;
      case '\0':
        html += "\xef\xbf\xbd";
        break;
      default:
        html += c;
    }
  }
  return html;
}

ChartLine thinned(const ChartLine& line, size_t max_points) {
  if (line.x.size() <= max_points) return line;
  ChartLine thin = line;
  thin.x.clear(), thin.y.clear();
  const size_t num_buckets = max_points / 2;
  for (size_t b = 0; b < num_buckets; ++b) {
    const size_t begin = line.x.size() * b / num_buckets;
    const size_t end = line.x.size() * (b + 1) / num_buckets;
    std::optional<size_t> low, high;
    for (size_t i = begin; i < end; ++i) {
      if (!std::isfinite(line.y[i])) continue;
      if (!low || line.y[i] < line.y[*low]) low = i;
      if (!high || line.y[i] > line.y[*high]) high = i;
    }
    if (!low) {  // a gap
      thin.x.push_back(line.x[begin]);
      thin.y.push_back(std::numeric_limits<double>::quiet_NaN());
      continue;
    }
    const auto [first, second] = std::minmax(*low, *high);
    thin.x.push_back(line.x[first]), thin.y.push_back(line.y[first]);
    if (second != first) thin.x.push_back(line.x[second]), thin.y.push_back(line.y[second]);
  }
  return thin;
}

std::vector<double> moving_average(const std::vector<double>& values, double span) {
  const double keep = 1 - 2 / (span + 1);
  std::vector<double> sums(values.size(), 0.0), weights(values.size(), 0.0);
  const auto walk = [&](auto begin, auto end, auto index) {
    double sum = 0, weight = 0;
    for (auto it = begin; it != end; ++it) {
      sum *= keep, weight *= keep;
      if (std::isfinite(*it)) sum += *it, ++weight;
      sums[index(it)] += sum, weights[index(it)] += weight;
    }
  };
  walk(values.begin(), values.end(),
       [&](auto it) { return static_cast<size_t>(it - values.begin()); });
  walk(values.rbegin(), values.rend(),
       [&](auto it) { return values.size() - 1 - static_cast<size_t>(it - values.rbegin()); });
  std::vector<double> smooth(values.size(), std::numeric_limits<double>::quiet_NaN());
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) continue;
    // The value itself is in both sums.
    smooth[i] = (sums[i] - values[i]) / (weights[i] - 1);
  }
  return smooth;
}

std::vector<double> round_ticks(double low, double high, int count) {
  const double raw = (high - low) / std::max(count, 1);
  if (!(raw > 0) || !std::isfinite(raw)) return {low};
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  const double digit = raw / power;
  const double step = power * (digit < 1.5 ? 1 : digit < 3.5 ? 2 : digit < 7.5 ? 5 : 10);
  std::vector<double> ticks;
  for (double i = std::ceil(low / step); i * step <= high; ++i) ticks.push_back(i * step);
  return ticks;
}

std::string chart_html(const Chart& chart) {
  const auto sums = chart.is_stacked ? stacked_sums(chart.lines) : decltype(stacked_sums({})){};
  const std::optional<Scales> scales = scales_of(chart, sums);
  if (!scales) return "";
  const std::vector<double> ys = ticks_of(scales->y, 5, chart.kind);
  std::string grid, y_labels;
  size_t widest = 1;
  for (const double tick : ys) {
    grid += fmt::format("M0 {0:.0f}H{1:.0f}", scales->y.at(tick), kWidth);
    const std::string text = number_in_words(chart.kind, tick);
    widest = std::max(widest, text.size());
    y_labels += fmt::format("<span style=\"top:{:.2f}%\">{}</span>", scales->y.percent(tick), text);
  }
  std::string words = chart.title + ".";
  for (const ChartLine& line : chart.lines) {
    if (const std::string more = line_in_words(chart, line); !more.empty())
      words += " " + more + ";";
  }
  std::string marks, mark_words;
  double last_word = -100;  // no word on top of another
  for (const auto& [x, word] : chart.marks) {
    const double at = scales->x.percent(x);
    marks += fmt::format("M{:.0f} 0V{:.0f}", scales->x.at(x), kHeight);
    if (at - last_word < 15) continue;
    last_word = at;
    mark_words += fmt::format("<span class=\"mark{}\" style=\"left:{:.2f}%\">{}</span>",
                              at > 80 ? " left" : "", at, html_text(word));
  }
  std::string html = figure_head(chart.title + (scales->y.is_log ? " (logarithmic)" : ""));
  if (chart.has_legend) {
    std::vector<std::pair<std::string, std::string>> names;
    for (const ChartLine& line : chart.lines) {
      names.emplace_back(color_class(chart, line.color), line.name);
    }
    html += legend_html(names);
  }
  html += fmt::format(
      "<div class=\"plot\" style=\"--yw:{}ch\"><div class=\"ys\" aria-hidden=\"true\">{}</div>"
      "<div class=\"canvas\" tabindex=\"0\" role=\"group\" aria-label=\"{}; left and right keys "
      "tell values\"><svg viewBox=\"0 0 {:.0f} {:.0f}\" preserveAspectRatio=\"none\" role=\"img\" "
      "aria-label=\"{}\"><path class=\"grid\" d=\"{}\"/>",
      widest, y_labels, html_text(chart.title), kWidth, kHeight, html_text(words), grid);
  html += chart.is_stacked ? draw_areas(chart, *scales, sums) : draw_lines(chart, *scales);
  if (!marks.empty()) html += fmt::format("<path class=\"marks\" d=\"{}\"/>", marks);
  html += "</svg>" + mark_words + script_data(chart_data(chart, *scales)) + "</div>" +
          x_labels(scales->x, chart.x_name, chart.is_log_x) + "</div>" + note_html(chart.note) +
          "</figure>";
  return html;
}

std::string bars_html(const BarChart& chart) {
  double longest = 0;
  std::vector<bool> is_used(chart.parts.size());
  for (const BarChart::Row& row : chart.rows) {
    double total = 0;
    for (size_t p = 0; p < row.values.size(); ++p) {
      if (!(row.values[p] > 0)) continue;
      total += row.values[p];
      is_used[p] = true;
    }
    longest = std::max(longest, total);
  }
  if (longest <= 0) return "";
  std::string html = figure_head(chart.title);
  std::vector<std::pair<std::string, std::string>> names;
  for (size_t p = 0; p < chart.parts.size(); ++p) {
    if (is_used[p]) names.emplace_back(fmt::format("m{}", p % 8), chart.parts[p]);
  }
  if (chart.parts.size() > 1) html += legend_html(names);
  html += "<div class=\"bars\">";
  for (const BarChart::Row& row : chart.rows) {
    double total = 0;
    std::string parts, words;
    for (size_t p = 0; p < row.values.size(); ++p) {
      const double value = row.values[p];
      if (!(value > 0)) continue;
      total += value;
      const std::string text = number_in_words(chart.kind, value);
      const std::string part = chart.parts.size() > 1 ? chart.parts[p] + " " + text : text;
      words += (words.empty() ? "" : ", ") + part;
      parts += fmt::format("<i class=\"m{}\" style=\"width:{:.2f}%\" title=\"{}\"></i>", p % 8,
                           100 * value / longest, html_text(part));
    }
    html += fmt::format(
        "<div class=\"bar\"><span>{}</span><b role=\"img\" aria-label=\"{}\">{}</b><em>{}</em></div>",
        html_text(row.name), html_text(row.name + ": " + words), parts,
        number_in_words(chart.kind, total));
  }
  return html + "</div>" + note_html(chart.note) + "</figure>";
}

std::string heat_map_html(const HeatMap& map) {
  constexpr size_t kMaxColumns = 80;
  constexpr int kNumLevels = 10;
  const size_t num_columns = std::min(map.x.size(), kMaxColumns);
  // The mean of the logarithm over the steps of a column.
  std::vector<std::vector<double>> cells(map.rows.size(), std::vector<double>(num_columns));
  std::vector<double> begins(num_columns);
  Extent extent;
  for (size_t c = 0; c < num_columns; ++c) {
    const size_t begin = map.x.size() * c / num_columns;
    const size_t end = map.x.size() * (c + 1) / num_columns;
    begins[c] = map.x[begin];
    for (size_t r = 0; r < map.rows.size(); ++r) {
      double sum = 0, count = 0;
      for (size_t i = begin; i < end; ++i) {
        const double v = map.values[r][i];
        if (v > 0 && std::isfinite(v)) sum += std::log10(v), ++count;
      }
      cells[r][c] = count > 0 ? sum / count : std::numeric_limits<double>::quiet_NaN();
      extent.add(cells[r][c]);
    }
  }
  if (extent.is_empty()) return "";
  std::array<std::string, kNumLevels> paths;
  for (size_t r = 0; r < map.rows.size(); ++r) {
    for (size_t c = 0; c < num_columns; ++c) {
      if (std::isnan(cells[r][c])) continue;
      const double part = extent.size() > 0 ? (cells[r][c] - extent.low) / extent.size() : 0.5;
      const int level = std::min(static_cast<int>(part * kNumLevels), kNumLevels - 1);
      paths[static_cast<size_t>(level)] += fmt::format("M{} {}h1v1h-1z", c, r);
    }
  }
  std::string html = figure_head(map.title);
  size_t widest = 1;
  std::string y_labels;
  const size_t each = (map.rows.size() + 15) / 16;  // no more labels than have room
  for (size_t r = 0; r < map.rows.size(); r += each) {
    widest = std::max(widest, std::min<size_t>(map.rows[r].size(), 18));
    y_labels +=
        fmt::format("<span style=\"top:{:.2f}%\">{}</span>",
                    100 * (static_cast<double>(r) + 0.5) / static_cast<double>(map.rows.size()),
                    html_text(map.rows[r]));
  }
  nlohmann::json data{{"heat", true}, {"x", map.x_name}, {"rows", map.rows}};
  data["begins"] = json_numbers(begins);
  for (const auto& row : cells) {
    std::vector<double> values;
    for (const double cell : row) values.push_back(std::pow(10.0, cell));
    data["cells"].push_back(json_numbers(values));
  }
  html += fmt::format(
      "<div class=\"plot heat\" style=\"--yw:{}ch;--rows:{}\"><div class=\"ys\" "
      "aria-hidden=\"true\">{}</div><div class=\"canvas\"><svg viewBox=\"0 0 {} {}\" "
      "preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}. {} rows from {} to {}; lowest {}, "
      "highest {}\">",
      widest, map.rows.size(), y_labels, num_columns, map.rows.size(), html_text(map.title),
      map.rows.size(), html_text(map.rows.front()), html_text(map.rows.back()),
      number_in_words(NumberKind::kPlain, std::pow(10.0, extent.low)),
      number_in_words(NumberKind::kPlain, std::pow(10.0, extent.high)));
  for (int level = 0; level < kNumLevels; ++level) {
    const std::string& path = paths[static_cast<size_t>(level)];
    if (!path.empty()) html += fmt::format("<path class=\"h{}\" d=\"{}\"/>", level, path);
  }
  Extent x;
  x.add(map.x.front()), x.add(map.x.back());
  const Scale xs = x_scale(x);
  std::string ramp;
  for (int level = 0; level < kNumLevels; ++level)
    ramp += fmt::format("<i class=\"h{}\"></i>", level);
  return html + "</svg>" + script_data(data) + "</div>" + x_labels(xs, map.x_name) + "</div>" +
         fmt::format("<p class=\"ramp\">{} <span>{}</span> {}</p>",
                     number_in_words(NumberKind::kPlain, std::pow(10.0, extent.low)), ramp,
                     number_in_words(NumberKind::kPlain, std::pow(10.0, extent.high))) +
         note_html(map.note) + "</figure>";
}

}  // namespace tessera::apps
