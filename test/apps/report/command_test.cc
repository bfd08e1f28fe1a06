#include "apps/report/command.h"

#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "apps/report/chart.h"
#include "apps/report/page.h"
#include "core/check.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using testing::error_of;
using testing::read_file;
using testing::TempDir;

namespace {

const double kNaN = std::numeric_limits<double>::quiet_NaN();

nlohmann::json line_of(int64_t step, double loss, int64_t tokens_each = 100) {
  return {{"step", step},
          {"loss", loss},
          {"grad_norm", 1.0 / static_cast<double>(step)},
          {"lr", 1e-3},
          {"tokens_per_second", 1000.0 + static_cast<double>(step % 7)},
          {"peak_bytes", 5000},
          {"tokens", step * tokens_each},
          {"step_ms", 10.0}};
}

double loss_of(int64_t step) {
  return 1 + 4 / static_cast<double>(step);
}

/// A run's directory with `num_steps` lines, each changed by `change`.
std::string make_run(
    const TempDir& dir, const std::string& name, int64_t num_steps, int64_t tokens_each = 100,
    const std::function<void(nlohmann::json&)>& change = [](nlohmann::json&) {}) {
  std::string lines;
  for (int64_t step = 1; step <= num_steps; ++step) {
    nlohmann::json line = line_of(step, loss_of(step), tokens_each);
    change(line);
    lines += line.dump() + "\n";
  }
  std::filesystem::create_directories(dir / name);
  dir.write(name + "/metrics.jsonl", lines);
  return dir / name;
}

/// The page of the command; its standard output is not of interest.
std::string page_of(const TempDir& dir, std::vector<std::string> arguments) {
  arguments.push_back("--output=" + dir / "page.html");
  REQUIRE(report_command(arguments) == 0);
  return read_file(dir / "page.html");
}

/// Tags that are opened and closed, in order; what is not is named.
std::string unbalanced_tag(const std::string& html) {
  std::vector<std::string> open;
  for (size_t at = 0; (at = html.find('<', at)) != std::string::npos; ++at) {
    if (html[at + 1] == '!') continue;
    const bool closes = html[at + 1] == '/';
    const size_t begin = at + (closes ? 2 : 1), end = html.find_first_of(" >/", begin);
    const std::string tag = html.substr(begin, end - begin);
    bool in_quotes = false;
    size_t stop = begin;
    for (; html[stop] != '>' || in_quotes; ++stop) in_quotes ^= html[stop] == '"';
    const bool is_alone = tag == "meta" || tag == "link" || html[stop - 1] == '/';
    if (closes) {
      if (open.empty() || open.back() != tag) return "</" + tag + ">";
      open.pop_back();
    } else if (!is_alone) {
      open.push_back(tag);
      if (tag == "script" || tag == "style") at = html.find("</" + tag, at) - 1;
    }
  }
  return open.empty() ? "" : "<" + open.back() + ">";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The numbers beside each chart, by its title.
std::map<std::string, nlohmann::json> data_of(const std::string& html) {
  std::map<std::string, nlohmann::json> charts;
  const std::string caption = "<figcaption>", script = "<script type=\"application/json\">";
  for (size_t at = 0; (at = html.find(script, at)) != std::string::npos; ++at) {
    const size_t title = html.rfind(caption, at) + caption.size();
    const size_t begin = at + script.size();
    charts[html.substr(title, html.find('<', title) - title)] =
        nlohmann::json::parse(html.substr(begin, html.find("</script>", begin) - begin));
  }
  return charts;
}

}  // namespace

TEST_CASE("report: a run is one page that asks for nothing, with its numbers", "[report]") {
  const TempDir dir;
  const std::string run = make_run(dir, "one", 40, 100, [](nlohmann::json& line) {
    const auto step = line["step"].get<int64_t>();
    line["exposed_gather_ms"] = 1.0, line["exposed_reduce_ms"] = 1.5;
    line["memory"] = {{"parameters", 3000}, {"activations", 2000}};
    line["unit_norms"] = {{"blocks.0", 0.5}, {"head", 0.25 * static_cast<double>(step)}};
    line["slowest_rank"] = step % 4 == 0 ? 0 : 3, line["slowest_behind_ms"] = 2.0;
    if (step % 10 == 0) line["val_loss"] = loss_of(step) + 0.5;
    if (step == 3) {
      line["memory_over_step"] = {{"classes", {"parameters", "gradients", "activations"}},
                                  {"bytes", {{3000, 0, 0}, {3000, 0, 2000}, {3000, 0, 500}}},
                                  {"marks", {{{"point", 1}, {"begins", "backward"}}}}};
    }
  });
  dir.write("one/config.toml", "[optim]\nlr = 0.001\n");
  const std::string html = page_of(dir, {run});
  CHECK(html.starts_with("<!doctype html>"));
  CHECK(unbalanced_tag(html) == "");
  for (const char* request : {"http:", "https:", "src=", "url(", "@import", "href=\"/", "fetch("}) {
    CAPTURE(request);
    CHECK_FALSE(has(html, request));
  }
  CHECK(has(html, "default-src 'none'"));
  const auto charts = data_of(html);
  std::set<std::string> titles;
  for (const auto& [title, _] : charts) titles.insert(title);
  CHECK(titles == std::set<std::string>{"Loss", "Learning rate", "Gradient norm, before clipping",
                                        "Tokens a second",
                                        "Time that compute waits for communication in a step",
                                        "Waiting for the slowest rank, a step",
                                        "Device memory over step 3", "Gradient norm by unit"});
  const auto& loss = charts.at("Loss")["lines"];
  REQUIRE(loss.size() == 2);
  for (size_t i = 0; i < 40; ++i) {
    CHECK(loss[0]["x"][i] == i + 1);
    CHECK(loss[0]["y"][i].get<double>() ==
          Approx(loss_of(static_cast<int64_t>(i) + 1)).epsilon(1e-5));
  }
  CHECK(loss[1]["x"] == nlohmann::json{10, 20, 30, 40});
  CHECK(loss[1]["y"][3] == 1.6);
  const auto& memory = charts.at("Device memory over step 3")["lines"];
  REQUIRE(memory.size() == 2);  // a class that has nothing is left out
  CHECK(memory[1]["name"] == "activations");
  CHECK(memory[1]["y"] == nlohmann::json{0, 2000, 500});
  CHECK(has(html, ">backward</span>"));
  CHECK(charts.at("Gradient norm by unit")["rows"] == nlohmann::json{"blocks.0", "head"});
  CHECK(charts.at("Gradient norm by unit")["cells"][1][39] == 10.0);
  CHECK(has(html, "<b>1.6000</b><span>best validation loss, step 40</span>"));
  CHECK(has(html, "aria-label=\"rank 3: 75 %\""));
  CHECK(has(html, "aria-label=\"one: activations 1.95 KiB, parameters 2.93 KiB\""));
  CHECK(has(html, "<b>25 %</b><span>of a step waits for communication"));
  CHECK(has(
      html,
      "Loss. Loss: 5 at step 1, 1.1 at step 40, lowest 1.1 at step 40; Validation: 1.9 at step 10"));
}

TEST_CASE("report: names and texts of a run are text on its page", "[report]") {
  const TempDir dir;
  const std::string bad = "<script>alert(1)</script>";
  const std::string run = make_run(dir, "a<b>&\"c", 3, 100, [&](nlohmann::json& line) {
    line["unit_norms"] = {{bad, 0.5}};
  });
  dir.write("a<b>&\"c/config.toml", "[data]\ntext = \"" + bad + "\"\n");
  const std::string html = page_of(dir, {run});
  CHECK(unbalanced_tag(html) == "");
  CHECK_FALSE(has(html, "<script>alert"));
  CHECK_FALSE(has(html, "<b>&"));
  CHECK(has(html, "<h1>a&lt;b&gt;&amp;&quot;c</h1>"));
  CHECK(data_of(html).at("Gradient norm by unit")["rows"][0] == bad);
}

TEST_CASE("report: runs of different length are compared at the last step that all have",
          "[report]") {
  const TempDir dir;
  const std::string a = make_run(dir, "x/out", 40), b = make_run(dir, "y/out", 60);
  dir.write("x/out/config.toml", "[optim]\nlr = 0.001\nname = \"adamw\"\n[output]\ndir = \"x\"\n");
  dir.write("y/out/config.toml", "[optim]\nlr = 0.002\nname = \"adamw\"\n[output]\ndir = \"y\"\n");
  const std::string html = page_of(dir, {a, b});
  CHECK(unbalanced_tag(html) == "");
  CHECK(has(html, "The runs end at different steps: the table compares their losses at step 40"));
  CHECK(has(html, "x/out</button>"));  // labels that tell them apart
  // The mean of the last 40 / 20 steps, of both.
  const std::string cell = fmt::format("<td>{:.4f}</td>", (loss_of(39) + loss_of(40)) / 2);
  CHECK(html.find(cell) != html.rfind(cell));
  CHECK(data_of(html).at("Loss")["xs"] == nlohmann::json{1, 60});
  CHECK(has(html,
            "<th scope=\"row\" class=\"code\">optim.lr</th><td class=\"code\">0.001</td>"
            "<td class=\"code\">0.002</td>"));
  CHECK_FALSE(has(html, "class=\"code\">optim.name"));
  CHECK_FALSE(has(html, "class=\"code\">output.dir"));
  const std::string later = make_run(dir, "later", 0);
  dir.write("later/metrics.jsonl", line_of(70, 1).dump() + "\n");
  CHECK(has(page_of(dir, {a, later}), "The runs have no step in common"));
  CHECK_FALSE(has(page_of(dir, {a, make_run(dir, "same", 40)}), "different steps"));
}

TEST_CASE("report: runs with other numbers of tokens a step are drawn over tokens", "[report]") {
  const TempDir dir;
  const std::string a = make_run(dir, "a", 20), b = make_run(dir, "b", 20, 250);
  const std::string html = page_of(dir, {a, b});
  CHECK(has(html, "they are drawn over tokens"));
  CHECK(data_of(html).at("Loss")["xs"] == nlohmann::json{100, 5000});
  CHECK(data_of(page_of(dir, {a, b, "--x=step"})).at("Loss")["xs"] == nlohmann::json{1, 20});
  CHECK(data_of(page_of(dir, {a, "--x=tokens"})).at("Loss")["x"] == "tokens");
}

TEST_CASE("report: a rewind, a loss that is no number and half a line are said", "[report]") {
  const TempDir dir;
  const std::string run = make_run(dir, "run", 0);
  std::string lines;
  for (const int64_t step : {1, 2, 3, 4, 2, 3}) {
    nlohmann::json line = line_of(step, loss_of(step));
    if (lines.size() > 500 && step == 3) line["loss"] = nullptr;
    if (step == 4) line["val_loss"] = 1.0;
    lines += line.dump() + "\n";
  }
  dir.write("run/metrics.jsonl", lines + R"({"step":4,"lo)");
  const RunLog log = read_run_log(run);
  CHECK(log.steps == std::vector<double>{1, 2, 3});
  CHECK(std::isnan(log.find("loss")->at(2)));
  CHECK(std::isnan(log.find("val_loss")->at(2)));  // of the step that was taken back
  const std::string html = page_of(dir, {run});
  CHECK(has(html,
            "The loss of 1 step is not finite; it went back to an earlier step 1 time, of "
            "which the later steps are shown; its last line is not complete and left out."));
  CHECK(data_of(html).at("Loss")["lines"][0]["y"][2].is_null());
  CHECK(has(html, ">not finite</span>"));
}

TEST_CASE("report: a range test is drawn over its rates, with the rate to begin with", "[report]") {
  const TempDir dir;
  const auto rate_at = [](int64_t step) {
    return std::pow(10.0, -6 + 6 * static_cast<double>(step - 1) / 199);
  };
  // Falls by 3 around a rate of 1e-3, to a minimum at 1e-2, and blows up.
  const std::string run = make_run(dir, "range", 200, 100, [&](nlohmann::json& line) {
    const double lr = rate_at(line["step"].get<int64_t>());
    line["lr"] = lr;
    line["loss"] = 5 - 3 / (1 + std::pow(1e-3 / lr, 2)) + std::pow(lr / 0.05, 2);
    if (lr > 0.5) line["loss"] = nullptr;
  });
  CHECK_FALSE(has(page_of(dir, {run}), "range test"));
  dir.write("range/config.toml", "[optim]\nschedule = \"range_test\"\n");
  const std::string html = page_of(dir, {run});
  const auto chart = data_of(html).at("Loss over the learning rate (range test)");
  CHECK(chart["xlog"] == true);
  CHECK(chart["xs"] == nlohmann::json{-6, 0});
  for (const auto& y : chart["lines"][0]["y"]) {
    if (!y.is_null()) CHECK(y.get<double>() < 6.6);  // what has blown up is left out
  }
  const std::string begin = "The loss is lowest at a learning rate of ";
  REQUIRE(has(html, begin));
  double lowest = 0, fastest = 0, advised = 0;
  REQUIRE(std::sscanf(html.c_str() + html.find(begin) + begin.size(),
                      "%lf and falls fastest at %lf: begin with about %lf,", &lowest, &fastest,
                      &advised) == 3);
  CHECK(lowest == Approx(0.01).epsilon(0.4));
  CHECK(fastest == Approx(1e-3).epsilon(0.4));
  CHECK(advised == Approx(lowest / 10).epsilon(0.4));
}

TEST_CASE("report: a line that nests without end is read", "[report]") {
  const TempDir dir;
  const std::string run = make_run(dir, "deep", 1);
  std::string line = line_of(1, 2).dump();
  line.pop_back();
  line += ",\"deep\":";
  for (int i = 0; i < 300'000; ++i) line += "{\"a\":";
  line += "1" + std::string(300'000, '}') + "}\n";
  dir.write("deep/metrics.jsonl", line);
  CHECK(read_run_log(run).find("deep/a/a/a") == nullptr);
}

TEST_CASE("report: what is no run is an error in one line, and no file is replaced", "[report]") {
  const TempDir dir;
  const std::string run = make_run(dir, "run", 3);
  std::filesystem::create_directory(dir / "empty");
  dir.write("file", "x");
  const std::string none = make_run(dir, "none", 0), bad = make_run(dir, "bad", 0);
  const auto error = [&](std::vector<std::string> arguments) {
    arguments.push_back("--output=" + dir / "new.html");
    return error_of([&] { report_command(arguments); });
  };
  CHECK(error({dir / "gone"}) ==
        dir / "gone: not there, expected the directory of a run (output.dir)");
  CHECK(error({run, dir / "file"}) ==
        dir / "file: no directory, expected the directory of a run (output.dir)");
  CHECK(error({dir / "empty"}) ==
        dir / "empty: no metrics.jsonl in it, expected the directory of a run (output.dir)");
  CHECK(error({none}) == dir / "none/metrics.jsonl: no step in it, expected at least one");
  const std::string first = line_of(1, 2).dump() + "\n";
  dir.write("bad/metrics.jsonl", first + "nonsense\n");
  CHECK(error({bad}) == dir /
                            "bad/metrics.jsonl:2: \"nonsense\", expected a JSON object with "
                            "\"step\" and \"loss\"");
  dir.write("bad/metrics.jsonl", first + R"({"step": 2})" + "\n");
  CHECK(error({bad}) == dir /
                            "bad/metrics.jsonl:2: no line of a step, expected a JSON object with "
                            "\"step\" and \"loss\"");
  dir.write("bad/metrics.jsonl", first);
  dir.write("bad/config.toml", "a = \n");
  CHECK(error({bad}).starts_with(dir / "bad/config.toml: "));
  CHECK(error({bad}).ends_with("(line 1), expected the configuration of a run"));
  CHECK(error({run, run + "/"}) ==
        "command line: " + run + "/: given twice, expected different runs");
  CHECK_FALSE(std::filesystem::exists(dir / "new.html"));
  const auto output_error = [&](const std::string& path) {
    return error_of([&] { report_command({run, "--output=" + path}); });
  };
  CHECK(output_error(dir / "file") ==
        "command line: --output=" + dir /
                                        "file: a file that no tessera-report has made, expected "
                                        "a new file, or a report to replace");
  CHECK(read_file(dir / "file") == "x");
  CHECK(output_error(dir / "empty") ==
        "command line: --output=" + dir /
                                        "empty: no regular file, expected a new file, or a report "
                                        "to replace");
  CHECK(output_error(dir / "no/page.html").starts_with(dir / "no/page.html"));
  CHECK(report_command({run, "--output=" + dir / "page.html"}) == 0);
  CHECK(report_command({run, "--output=" + dir / "page.html"}) == 0);
}

TEST_CASE("report: of many values the extremes and the gaps are kept", "[report]") {
  ChartLine line;
  for (int i = 0; i < 10'000; ++i) {
    line.x.push_back(i);
    line.y.push_back(i >= 4000 && i < 4200 ? kNaN : i == 7777 ? 99 : i == 1234 ? -9 : i % 10);
  }
  const ChartLine thin = thinned(line, 500);
  CHECK(thin.x.size() <= 500);
  CHECK(thin.x.size() == thin.y.size());
  CHECK(std::is_sorted(thin.x.begin(), thin.x.end()));
  CHECK(std::count(thin.y.begin(), thin.y.end(), 99) == 1);
  CHECK(std::count(thin.y.begin(), thin.y.end(), -9) == 1);
  CHECK(std::count_if(thin.y.begin(), thin.y.end(), [](double y) { return std::isnan(y); }) >= 4);
  for (size_t i = 0; i < thin.x.size(); ++i) {
    if (!std::isnan(thin.y[i])) CHECK(thin.y[i] == line.y[static_cast<size_t>(thin.x[i])]);
  }
}

TEST_CASE("report: averages follow a slope, ticks are round, numbers are short", "[report]") {
  std::vector<double> slope;
  for (int i = 0; i < 200; ++i) slope.push_back(i);
  slope[100] = kNaN;
  const std::vector<double> smooth = moving_average(slope, 15);
  CHECK(std::isnan(smooth[100]));
  for (const size_t i : {50, 70, 130, 150}) CHECK(smooth[i] == Approx(slope[i]).margin(0.1));
  for (const double v : moving_average({5, 5, 5}, 9)) CHECK(v == Approx(5));
  CHECK(round_ticks(0, 10, 5) == std::vector<double>{0, 2, 4, 6, 8, 10});
  CHECK(round_ticks(1, 1500, 5) == std::vector<double>{200, 400, 600, 800, 1000, 1200, 1400});
  CHECK(round_ticks(3, 3, 5) == std::vector<double>{3});
  CHECK(number_in_words(NumberKind::kPlain, 2.5) == "2.5");
  CHECK(number_in_words(NumberKind::kPlain, 1e-5) == "1e-05");
  CHECK(number_in_words(NumberKind::kPlain, 0) == "0");
  CHECK(number_in_words(NumberKind::kPlain, kNaN) == "none");
  CHECK(number_in_words(NumberKind::kCount, 1500) == "1500");
  CHECK(number_in_words(NumberKind::kCount, 28'123) == "28.1k");
  CHECK(number_in_words(NumberKind::kCount, 6'144'000) == "6.14M");
  CHECK(number_in_words(NumberKind::kBytes, 1000) == "1000 B");
  CHECK(number_in_words(NumberKind::kBytes, 1.5 * (1 << 30)) == "1.5 GiB");
  CHECK(number_in_words(NumberKind::kMs, 12.5) == "12.5 ms");
  CHECK(number_in_words(NumberKind::kMs, 20'000) == "20 s");
  CHECK(number_in_words(NumberKind::kPercent, 0.0291) == "2.91 %");
}

TEST_CASE("report: a place in a chart is that of its value", "[report]") {
  Chart chart{.title = "t", .lines = {{.name = "a", .x = {0, 10}, .y = {0, 1}}}, .from_zero = true};
  // Of 2000 by 1000, from zero, with a twentieth of room above.
  CHECK(has(chart_html(chart), "<path class=\"line c0\" d=\"M0 1000L2000 48\"/>"));
  chart.from_zero = false;
  CHECK(has(chart_html(chart), "d=\"M0 955L2000 45\""));
  chart.lines[0].y = {1, 1000};
  chart.may_be_log = true;
  CHECK(has(chart_html(chart), "t (logarithmic)"));
  chart.lines = {{.name = "a", .x = {0, 10}, .y = {2, 2}},
                 {.name = "b", .x = {0, 10}, .y = {2, 0}}};
  chart.is_stacked = true;
  const std::string stacked = chart_html(chart);
  CHECK(has(stacked, "d=\"M0 524L2000 524L2000 1000L0 1000Z\""));
  CHECK(has(stacked, "d=\"M0 48L2000 524L2000 524L0 524Z\""));
  chart.lines = {{.name = "a", .x = {0}, .y = {kNaN}}};
  chart.is_stacked = false;
  CHECK(chart_html(chart).empty());
}
