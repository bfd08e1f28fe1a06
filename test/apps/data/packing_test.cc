#include "apps/data/packing.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;

namespace {

/// As in test/golden/make_packing.py.
std::vector<int64_t> lengths(int64_t count, int64_t longest) {
  uint64_t x = 12345;
  std::vector<int64_t> all;
  for (int64_t i = 0; i < count; ++i) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    const auto u = static_cast<int64_t>((x >> 33) % 1000);
    all.push_back(1 + u * u * u / 1000 * (longest - 1) / (999 * 999 * 999 / 1000));
  }
  return all;
}

PackSource source(std::string name, std::vector<int64_t> lengths, double weight = 0) {
  const auto count = static_cast<int64_t>(lengths.size());
  return {std::move(name), count,
          [lengths = std::move(lengths)](int64_t i) { return lengths[static_cast<size_t>(i)]; },
          weight};
}

/// Seven of very different sizes and lengths; documents without a position are among them.
std::vector<PackSource> seven_sources(bool with_weights = false) {
  std::vector<PackSource> sources;
  const std::vector<std::pair<int64_t, int64_t>> sizes = {{1, 700},  {2, 1},  {640, 90}, {33, 1000},
                                                          {400, 30}, {7, 64}, {150, 257}};
  for (const auto& [count, longest] : sizes) {
    std::vector<int64_t> all = lengths(count, longest);
    if (count > 100) all[17] = all[count / 2] = 0;
    const auto index = static_cast<double>(sources.size());
    sources.push_back(source(fmt::format("s{}", index), all, with_weights ? 1 + index : 0));
  }
  return sources;
}

PackOptions small_buffers(int64_t context = 64, uint64_t seed = 3) {
  return {.context = context, .seed = seed, .buffer_windows = 50, .buffer_documents = 20};
}

using Key = std::tuple<int32_t, int64_t, int64_t, int64_t>;
std::map<Key, int> count_pieces(const PackPlan& plan, int64_t begin, int64_t end) {
  std::map<Key, int> counts;
  for (int64_t i = begin; i < end; ++i) {
    for (const Piece& p : plan.window(i)) ++counts[{p.source, p.document, p.begin, p.length}];
  }
  return counts;
}

/// Each piece of each document once.
std::map<Key, int> all_pieces(const std::vector<PackSource>& sources, int64_t context) {
  std::map<Key, int> counts;
  for (size_t s = 0; s < sources.size(); ++s) {
    for (int64_t d = 0; d < sources[s].num_documents; ++d) {
      const int64_t numel = sources[s].num_positions(d);
      for (int64_t begin = 0; begin < numel; begin += context) {
        ++counts[{static_cast<int32_t>(s), d, begin, std::min(context, numel - begin)}];
      }
    }
  }
  return counts;
}

}  // namespace

TEST_CASE("packing: items go into the bin with the least room in which they fit", "[packing]") {
  const std::vector<int64_t> items = {3, 7, 5, 2, 6, 4, 1};
  const Bins bins = best_fit_decreasing(items, 10);
  // 7 + 3, 6 + 4, 5 + 2 + 1.
  REQUIRE(bins.num_bins() == 3);
  CHECK(bins.first == std::vector<int64_t>{0, 2, 4, 7});
  CHECK(bins.items == std::vector<int32_t>{1, 0, 4, 5, 2, 3, 6});
  CHECK(best_fit_decreasing({}, 10).num_bins() == 0);
  CHECK(error_of([] {
          best_fit_decreasing(std::vector<int64_t>{11}, 10);
        }).starts_with("best_fit_decreasing: expected lengths in [1, 10], got 11"));
  CHECK(error_of([] {
          best_fit_decreasing(std::vector<int64_t>{0}, 10);
        }).starts_with("best_fit_decreasing: expected lengths in [1, 10], got 0"));
}

TEST_CASE("packing: bins are those of a search through all of them", "[packing]") {
  for (const int64_t capacity : {1, 5, 63, 64, 65, 4097, 300000}) {
    std::vector<int64_t> items = lengths(500, capacity);
    const Bins bins = best_fit_decreasing(items, capacity);
    std::vector<int64_t> sorted = items;
    std::stable_sort(sorted.rbegin(), sorted.rend());
    std::vector<int64_t> rooms;
    for (const int64_t length : sorted) {
      auto best = rooms.end();
      for (auto room = rooms.begin(); room != rooms.end(); ++room) {
        if (*room >= length && (best == rooms.end() || *room < *best)) best = room;
      }
      if (best == rooms.end()) best = rooms.insert(best, capacity);
      *best -= length;
    }
    std::vector<int64_t> ours;
    for (int64_t b = 0; b < bins.num_bins(); ++b) {
      int64_t room = capacity;
      for (int64_t k = bins.first[b]; k < bins.first[b + 1]; ++k) room -= items[bins.items[k]];
      ours.push_back(room);
    }
    std::sort(rooms.begin(), rooms.end());
    std::sort(ours.begin(), ours.end());
    CHECK(ours == rooms);
  }
}

TEST_CASE("packing: as many windows as trl's best-fit decreasing, or fewer", "[packing]") {
  std::ifstream file(std::string(TESSERA_GOLDEN_DIR) + "/packing.json");
  const auto golden = nlohmann::json::parse(file);
  for (const auto& entry : golden["cases"]) {
    const int64_t context = entry["context"], count = entry["documents"],
                  longest = entry["longest"];
    INFO(entry.dump());
    std::vector<int64_t> pieces;
    for (const int64_t numel : lengths(count, longest)) {
      for (int64_t begin = 0; begin < numel; begin += context) {
        pieces.push_back(std::min(context, numel - begin));
      }
    }
    CHECK(best_fit_decreasing(pieces, context).num_bins() == entry["windows"].get<int64_t>());
    const PackPlan plan({source("all", lengths(count, longest))}, {.context = context, .seed = 1});
    CHECK(plan.num_positions() == entry["tokens"].get<int64_t>());
    const auto fill = [&](int64_t windows) {
      return static_cast<double>(plan.num_positions()) / static_cast<double>(windows * context);
    };
    CHECK(fill(plan.windows_of_first_epoch()) >= fill(entry["windows_default"]) - 0.001);
    CHECK(fill(plan.windows_of_first_epoch()) >= fill(entry["windows"]) - 0.001);
  }
}

TEST_CASE("packing: an epoch has each position of each document once", "[packing]") {
  const auto sources = seven_sources();
  for (const int64_t context : {1, 7, 64, 5000}) {
    const PackPlan plan(seven_sources(), small_buffers(context));
    const int64_t end = plan.windows_of_first_epoch();
    CHECK(count_pieces(plan, 0, end) == all_pieces(sources, context));
    for (int64_t i = 0; i < std::min<int64_t>(end, 300); ++i) {
      int64_t numel = 0;
      for (const Piece& piece : plan.window(i)) numel += piece.length;
      CHECK((numel >= 1 && numel <= context));
    }
    // The next one as well, in another order.
    int64_t next = end, left = static_cast<int64_t>(all_pieces(sources, context).size());
    while (left > 0) left -= static_cast<int64_t>(plan.window(next++).size());
    CHECK(left == 0);
    CHECK(count_pieces(plan, end, next) == all_pieces(sources, context));
    if (context > 7) CHECK(plan.window(0) != plan.window(end));
    CHECK(plan.progress(end)[0].passes == Approx(1));
    CHECK(plan.progress(next)[2].passes == Approx(2));
  }
}

TEST_CASE("packing: 1, 3 and 4 ranks that stop and go on have the same samples in each step",
          "[packing]") {
  // A rank asks for its part of each step, of a plan of its own that was made at the restart.
  constexpr int64_t kPerStep = 12;
  const PackPlan whole(seven_sources(), small_buffers());
  const int64_t steps = whole.windows_of_first_epoch() / kPerStep + 2;
  std::vector<std::vector<Piece>> expected;
  for (int64_t i = 0; i < steps * kPerStep; ++i) expected.push_back(whole.window(i));
  int64_t step = 0;
  std::map<Key, int> seen;
  for (const int num_ranks : {1, 3, 4, 3, 1, 4}) {  // killed after a few steps each
    const int64_t until =
        num_ranks == 4 && step > steps / 2 ? steps : std::min(steps, step + steps / 7);
    std::vector<std::unique_ptr<PackPlan>> ranks;
    for (int r = 0; r < num_ranks; ++r) {
      ranks.push_back(std::make_unique<PackPlan>(seven_sources(), small_buffers()));
    }
    for (; step < until; ++step) {
      for (int r = num_ranks - 1; r >= 0; --r) {
        const int64_t per_rank = kPerStep / num_ranks;
        for (int64_t i = 0; i < per_rank; ++i) {
          const int64_t sample = step * kPerStep + r * per_rank + i;
          const std::vector<Piece> window = ranks[static_cast<size_t>(r)]->window(sample);
          CHECK(window == expected[static_cast<size_t>(sample)]);
          if (sample >= whole.windows_of_first_epoch()) continue;
          for (const Piece& p : window) ++seen[{p.source, p.document, p.begin, p.length}];
        }
      }
    }
  }
  CHECK(step == steps);
  CHECK(seen == all_pieces(seven_sources(), 64));
}

TEST_CASE("packing: the order depends on the seed", "[packing]") {
  const PackPlan a(seven_sources(), small_buffers(64, 1)), b(seven_sources(), small_buffers(64, 2));
  int num_same = 0;
  for (int64_t i = 0; i < 40; ++i) num_same += a.window(i) == b.window(i) ? 1 : 0;
  CHECK(num_same < 4);
}

TEST_CASE("packing: with weights each source has its share and epochs of its own", "[packing]") {
  const auto sources = seven_sources(true);
  const PackPlan plan(seven_sources(true), small_buffers());
  CHECK(plan.windows_of_first_epoch() == 0);
  std::vector<double> positions(7, 0);
  double total = 0;
  constexpr int64_t kWindows = 12000;
  std::map<std::pair<int32_t, int64_t>, int64_t> times;  // that the first position came
  for (int64_t i = 0; i < kWindows; ++i) {
    for (const Piece& p : plan.window(i)) {
      positions[static_cast<size_t>(p.source)] += static_cast<double>(p.length);
      total += static_cast<double>(p.length);
      if (p.begin == 0) ++times[{p.source, p.document}];
    }
  }
  const auto progress = plan.progress(kWindows);
  for (int32_t s = 0; s < 7; ++s) {
    INFO("source " << s);
    const auto i = static_cast<size_t>(s);
    CHECK(positions[i] / total == Approx((1 + s) / 28.0).margin(0.01));
    CHECK(progress[i].share == Approx(positions[i] / total).margin(0.01));
    // No document comes again before all of its source have come.
    int64_t least = INT64_MAX, most = 0;
    for (int64_t d = 0; d < sources[i].num_documents; ++d) {
      if (sources[i].num_positions(d) == 0) continue;
      least = std::min(least, times[{s, d}]);
      most = std::max(most, times[{s, d}]);
    }
    // A buffer may be cut by the last window; in a small source it holds several epochs.
    const double in_buffer = progress[i].passes / static_cast<double>(kWindows) * 60;
    CHECK(static_cast<double>(most - least) <= 2 + in_buffer);
    CHECK(progress[i].passes ==
          Approx(static_cast<double>(least + most) / 2).margin(2 + in_buffer));
  }
  // A jump into the middle, as after a restart.
  const PackPlan again(seven_sources(true), small_buffers());
  CHECK(again.window(9000) == plan.window(9000));
  CHECK(again.window(10) == plan.window(10));
}

TEST_CASE("packing: sources that cannot be packed are named", "[packing]") {
  const auto plan = [](std::vector<PackSource> sources) {
    return error_of([&] { PackPlan(std::move(sources), small_buffers()); });
  };
  CHECK(plan({source("a", {0, 0})}) ==
        "data: 2 documents without a token to predict, expected at least one with");
  CHECK(plan({source("a", {3}, 1), source("b", {0}, 1)}) ==
        "data source b: 1 documents without a token to predict, expected at least one with");
  CHECK(plan({source("a", {3}, 1), source("b", {5})}) ==
        "data source b: weight 0, expected one > 0 beside those of the others");
}

TEST_CASE("packing: validation takes each document that training does not, and no other",
          "[packing]") {
  for (const auto& [count, fraction, num_val] :
       std::vector<std::tuple<int64_t, double, int64_t>>{{1, 0.5, 0},
                                                         {2, 0.01, 1},
                                                         {2, 0.99, 1},
                                                         {1000, 0.1, 100},
                                                         {77, 0.0, 0},
                                                         {10, 0.25, 3}}) {
    INFO(count << " " << fraction);
    const DocumentSplit split(count, fraction, 5);
    CHECK(split.num_val() == num_val);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < split.num_val(); ++i) seen.insert(split.val(i));
    for (int64_t i = 0; i < split.num_train(); ++i) seen.insert(split.train(i));
    CHECK(static_cast<int64_t>(seen.size()) == count);
    CHECK((*seen.begin() == 0 && *seen.rbegin() == count - 1));
  }
  CHECK(DocumentSplit(1000, 0.1, 1).val(0) != DocumentSplit(1000, 0.1, 2).val(0));
}
