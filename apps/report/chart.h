#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Charts as HTML: an SVG without text, stretched to whatever width there is, under labels that are
// text of the page. So lines and letters keep their size on any window, and nothing needs a script;
// the script of the page (assets.h) reads the data beside each chart and says values under a pointer.

namespace tessera::apps {

/// How numbers are written: in ticks, in the summary of a chart and, by the same rules, by the script.
enum class NumberKind : unsigned char { kPlain, kCount, kBytes, kMs, kPercent };

/// "1.234", "12.3k", "1.5 GiB", "3.2 ms", "12 %"; "none" for what is not finite.
std::string number_in_words(NumberKind kind, double value);

/// `<`, `>`, `&` and quotes as HTML wants them; what is not UTF-8 as U+FFFD.
std::string html_text(std::string_view text);

struct ChartLine {
  std::string name = {};
  int color = 0;                       ///< which one of the page's: runs and classes count from 0
  std::vector<double> x = {}, y = {};  ///< as many; NaN in y is a gap
  bool is_smoothed = false;            ///< shown faint, with its moving average over it
  bool has_points = false;             ///< few values: a mark at each
  bool is_dashed = false;
};

struct Chart {
  std::string title = {}, note = {};  ///< the note is a sentence below, may be empty
  std::string x_name = "step";
  NumberKind kind = NumberKind::kPlain;
  std::vector<ChartLine> lines = {};
  bool is_log_x = false;    ///< x is the logarithm to base 10 of what is said
  bool is_stacked = false;  ///< areas on top of each other, all with the same x; no negative values
  bool from_zero = false;
  bool may_be_log = false;  ///< if the largest value is more than 50 times the smallest
  bool has_legend = false;  ///< of the lines' names, where the page has not said them
  bool colors_are_classes = false;
  std::vector<std::pair<double, std::string>> marks = {};  ///< vertical lines at x, with a word
};

/// `<figure>`; empty if no line has a value.
std::string chart_html(const Chart& chart);

/// At most `max_points` of a line, with the extremes of what is left out between two.
ChartLine thinned(const ChartLine& line, size_t max_points);
/// Averages with weights that fall exponentially on both sides, over about `span` values: a slope
/// stays where it is; gaps stay.
std::vector<double> moving_average(const std::vector<double>& values, double span);
/// About `count` round numbers from `low` to `high`.
std::vector<double> round_ticks(double low, double high, int count);

/// Bars of parts on top of each other, one a row, to one scale.
struct BarChart {
  std::string title = {}, note = {};
  NumberKind kind = NumberKind::kBytes;
  std::vector<std::string> parts = {};  ///< names, in colours of classes
  struct Row {
    std::string name;
    std::vector<double> values;  ///< of the parts
  };
  std::vector<Row> rows = {};
};
std::string bars_html(const BarChart& chart);

/// Rows of coloured cells over x.
struct HeatMap {
  std::string title, note, x_name = "step";
  std::vector<std::string> rows;
  std::vector<double> x;
  std::vector<std::vector<double>> values;  ///< of each row, by x; coloured by their logarithm
};
/// Empty without a positive value.
std::string heat_map_html(const HeatMap& map);

}  // namespace tessera::apps
