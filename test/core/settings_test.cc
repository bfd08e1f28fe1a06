#include "core/settings.h"

#include "test/testing.h"

using namespace tessera;
using tessera::testing::error_of;

namespace {

enum class Fruit : unsigned char { kApple, kPear };
constexpr auto enum_names(Fruit) {
  return std::to_array<EnumName<Fruit>>({{Fruit::kApple, "apple"}, {Fruit::kPear, "pear"}});
}

struct Options {
  bool flag = false, order = false;
  int small = 3;
  int64_t count = 1000;
  float eps = 1e-5f;
  double rate = 0.5, sum = 2;
  std::string text = "x", kind = "a";
  Fruit fruit = Fruit::kPear;
  std::optional<Fruit> other;
  DType dtype = kBF16;
  std::optional<DType> wire, reduce = kF32;
};

SettingTable<> table_of(Options& o) {
  SettingTable<> t;
  t.add("flag", o.flag, "a flag");
  t.add("order", o.order, {"tree", "ring"}, "a flag with names");
  t.add("small", o.small, {1, 5}, "an int");
  t.add("count", o.count, at_least(1), "an integer");
  t.add("eps", o.eps, kPositive, "an f32");
  t.add("rate", o.rate, kFraction, "an f64");
  t.add("sum", o.sum, kNotNegative, "an f64");
  t.add("text", o.text, "a text");
  t.add("kind", o.kind, {"a", "b"}, "a text of two");
  t.add("fruit", o.fruit, "an enum");
  t.add("other", o.other, "none", "an enum or nothing");
  t.add("dtype", o.dtype, "a dtype");
  t.add("wire", o.wire, "same", "a dtype or nothing");
  t.add("reduce", o.reduce, "a dtype");
  return t;
}

const Setting& row(const SettingTable<>& table, std::string_view key) {
  for (const Setting& setting : table.rows()) {
    if (setting.key == key) return setting;
  }
  throw Error("no row " + std::string(key));
}

}  // namespace

TEST_CASE("settings: a row writes the default of its struct as TOML", "[settings]") {
  Options options;
  const SettingTable<> table = table_of(options);
  std::string text;
  for (const Setting& s : table.rows()) text += fmt::format("{}={} ", s.key, s.value_text());
  CHECK(text ==
        "flag=false order=\"tree\" small=3 count=1000 eps=1e-05 rate=0.5 sum=2.0 text=\"x\" "
        "kind=\"a\" fruit=\"pear\" other=\"none\" dtype=\"bf16\" wire=\"same\" reduce=\"f32\" ");
}

TEST_CASE("settings: a row sets the field of its struct", "[settings]") {
  Options o;
  const SettingTable<> table = table_of(o);
  const auto set = [&](std::string_view key, const SettingValue& value) {
    row(table, key).set(value, "");
  };
  set("flag", true);
  set("order", std::string("ring"));
  set("small", int64_t{5});
  set("count", int64_t{7});
  set("eps", 1e-6);
  set("rate", int64_t{0});  // a number may be an integer
  set("sum", 1e30);
  set("text", std::string("y\n"));
  set("kind", std::string("b"));
  set("fruit", std::string("apple"));
  set("other", std::string("pear"));
  set("dtype", std::string("f16"));
  set("wire", std::string("f32"));
  set("reduce", std::string("bf16"));
  CHECK(o.flag);
  CHECK(o.order);
  CHECK(o.small == 5);
  CHECK(o.count == 7);
  CHECK(o.eps == 1e-6f);
  CHECK(o.rate == 0);
  CHECK(o.sum == 1e30);
  CHECK(o.text == "y\n");
  CHECK(o.kind == "b");
  CHECK(o.fruit == Fruit::kApple);
  CHECK(o.other == Fruit::kPear);
  CHECK(o.dtype == kF16);
  CHECK(o.wire == kF32);
  CHECK(o.reduce == kBF16);
  set("other", std::string("none"));
  set("wire", std::string("same"));
  CHECK_FALSE(o.other.has_value());
  CHECK_FALSE(o.wire.has_value());
}

TEST_CASE("settings: what a row refuses is named with what it accepts, and changes nothing",
          "[settings]") {
  Options o;
  SettingTable<> table = table_of(o);
  table.add_text(
      "parsed", {}, [] { return std::string(); },
      [](const std::string& text) { throw ConfigError("\"" + text + "\" is no number"); }, "");
  table.rows()[7].is_one_line = true;  // text
  const auto error = [&](std::string_view key, const SettingValue& value,
                         const std::string& found) {
    return error_of([&] { row(table, key).set(value, found); });
  };
  CHECK(error("flag", int64_t{1}, "1") == "flag = 1, expected true or false");
  CHECK(error("small", int64_t{6}, "6") == "small = 6, expected an integer in [1, 5]");
  CHECK(error("small", 2.0, "2.0") == "small = 2.0, expected an integer in [1, 5]");
  CHECK(error("count", int64_t{0}, "0") == "count = 0, expected an integer >= 1");
  CHECK(error("count", int64_t{2'000'000'000'000}, "2e12") ==
        "count = 2e12, expected an integer >= 1 and <= 1000000000000");
  CHECK(error("eps", 0.0, "0") == "eps = 0, expected a number > 0");
  CHECK(error("rate", 1.0, "1.0") == "rate = 1.0, expected a number in [0, 1)");
  CHECK(error("sum", HUGE_VAL, "inf") == "sum = inf, expected a finite number >= 0");
  CHECK(error("sum", std::nan(""), "nan") == "sum = nan, expected a number >= 0");
  CHECK(error("text", true, "true") == "text = true, expected a string");
  CHECK(error("text", std::string("a\nb"), "") ==
        "text = \"a\\nb\": byte 0x0a at 1, expected no control character");
  CHECK(error("kind", std::string("\xff"), "") ==
        "kind = \"\\xff\": byte 0xff at 0, expected UTF-8");
  CHECK(error("kind", std::string("c"), "") == "kind = \"c\", expected one of a, b (nearest: a)");
  CHECK(error("fruit", std::string("peer"), "") ==
        "fruit = \"peer\", expected one of apple, pear (nearest: pear)");
  CHECK(error("other", int64_t{1}, "1") == "other = 1, expected one of none, apple, pear");
  CHECK(error("wire", std::string("f64"), "") ==
        "wire = \"f64\", expected one of same, f32, bf16, f16 (nearest: f32)");
  CHECK(error("reduce", std::string("same"), "") ==
        "reduce = \"same\", expected one of f32, bf16, f16 (nearest: f32)");
  CHECK(error("parsed", std::string("z"), "") == "parsed: \"z\" is no number");
  Options unchanged;
  const SettingTable<> defaults = table_of(unchanged);
  for (const Setting& s : defaults.rows()) {
    CHECK(row(table, s.key).value_text() == s.value_text());
  }
}

TEST_CASE("settings: a number from elsewhere is held against the range", "[settings]") {
  Options o;
  const SettingTable<> table = table_of(o);
  for (const Setting& s : table.rows()) CHECK_NOTHROW(s.check());
  o.small = 9, o.eps = 0;
  CHECK(error_of([&] { row(table, "small").check(); }) ==
        "small = 9, expected an integer in [1, 5]");
  CHECK(error_of([&] { row(table, "eps").check(); }) == "eps = 0.0, expected a number > 0");
}

TEST_CASE("settings: an enum and its names are one another's inverse", "[settings]") {
  CHECK(name_of(Fruit::kApple) == "apple");
  CHECK(enum_from_name<Fruit>("pear", "fruit") == Fruit::kPear);
  CHECK(error_of([] { enum_from_name<Fruit>("plum", "fruit"); }) ==
        "fruit: unknown name \"plum\", expected one of apple, pear");
  CHECK(name_of(static_cast<Fruit>(9)) == "?");
}

TEST_CASE("settings: nearest_name prefers the fewest edits", "[settings]") {
  const std::vector<std::string_view> names{"steps", "seed", "micro_batch"};
  CHECK(nearest_name("step", names) == "steps");
  CHECK(nearest_name("sed", names) == "seed");
  CHECK(nearest_name("microbatch", names) == "micro_batch");
  CHECK(nearest_name("", names) == "seed");
}
