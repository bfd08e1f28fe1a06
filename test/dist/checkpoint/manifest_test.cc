#include "dist/checkpoint/manifest.h"

#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>

#include "core/formats/safetensors.h"
#include "core/formats/strict_json.h"
#include "dist/checkpoint/reader.h"
#include "test/temp_dir.h"
#include "test/testing.h"

// Bytes of the heap, counted on the one thread of this program.
namespace {
size_t heap_nbytes = 0, heap_peak_nbytes = 0;
}
void* operator new(size_t nbytes) {
  void* const data = std::malloc(nbytes);
  if (data == nullptr) throw std::bad_alloc();
  heap_nbytes += ::malloc_usable_size(data);
  heap_peak_nbytes = std::max(heap_peak_nbytes, heap_nbytes);
  return data;
}
void operator delete(void* data) noexcept {
  heap_nbytes -= ::malloc_usable_size(data);
  std::free(data);
}
void operator delete(void* data, size_t) noexcept {
  operator delete(data);
}

using namespace tessera;
using namespace tessera::dist;
using nlohmann::json;
using tessera::testing::error_of;
using tessera::testing::TempDir;

namespace {

Manifest example() {
  Manifest m;
  m.project_version = "1.2.3";
  m.run = "0123";
  m.world_size = 2;
  m.progress.step = 7;
  m.progress.next_sample = 70;
  m.progress.samples_per_step = 10;
  m.progress.tokens = 700;
  m.progress.num_skipped = 1;
  m.progress.lr = 0.1;
  m.progress.val_loss = 2.5;
  m.progress.seed = 3;
  m.progress.data_id = "data";
  m.progress.data_content = "0f";
  m.progress.val_id = "other data";
  m.progress.val_content = "1f";
  m.progress.config = "[train]\nsteps = \"\u00e9\"\n";
  RankRecord a, b;
  a.file = {"rank-00000.safetensors", 100, 0xfedcba9876543210u};
  a.slices = {{"parameters/w", kF32, {3, 4}, 0, 5, 1}, {"optimizer/step_count", kI64, {}, 0, 1, 2}};
  b.file = {"rank-00001.safetensors", 50, 5};
  b.slices = {{"parameters/w", kF32, {3, 4}, 5, 12, 3}};
  add_records(m, {a, b});
  return m;
}

/// The most that `f` has in memory at once.
template <class F>
size_t peak_nbytes(const F& f) {
  const size_t before = heap_peak_nbytes = heap_nbytes;
  f();
  return heap_peak_nbytes - before;
}

/// The message for the example after `change`, without the path in front; in the form without a
/// hash at the end.
std::string message(const std::function<void(json&)>& change) {
  json object = json::parse(to_json(example()));
  object["version"] = 1;
  object.erase("xxh64");
  object.erase("sequence");
  change(object);
  const std::string text = error_of([&] { parse_manifest("m.json", object.dump()); });
  return text.starts_with("m.json: ") ? text.substr(8) : text;
}

}  // namespace

TEST_CASE("manifest: what is written is read", "[checkpoint]") {
  const Manifest m = example(), read = parse_manifest("m", to_json(m));
  CHECK(to_json(read) == to_json(m));
  CHECK(read.progress.config == m.progress.config);
  CHECK(read.progress.data_content == "0f");
  CHECK(read.progress.val_id == "other data");
  CHECK(read.progress.val_content == "1f");
  CHECK(read.progress.val_loss == 2.5);
  CHECK_FALSE(read.progress.best_val_loss.has_value());
  CHECK(read.files[0].hash == 0xfedcba9876543210u);
  CHECK(read.nbytes() == 150);
  const TensorRecord* w = read.find("parameters/w");
  REQUIRE(w != nullptr);
  CHECK(w->shape == Shape{3, 4});
  REQUIRE(w->slices.size() == 2);
  CHECK(w->slices[1].file == 1);
  CHECK(w->slices[1].begin == 5);
  CHECK(w->slices[1].hash == 3);
  CHECK(read.find("parameters/v") == nullptr);
  CHECK(read.find("optimizer/step_count")->shape == Shape{});
}

TEST_CASE("manifest: a tensor may be empty", "[checkpoint]") {
  Manifest m = example();
  m.tensors.insert(m.tensors.begin() + 1,
                   {.name = "parameters/a", .dtype = kF32, .shape = {0, 4}, .slices = {}});
  const Manifest read = parse_manifest("m", to_json(m));
  REQUIRE(read.find("parameters/a") != nullptr);
  CHECK(read.find("parameters/a")->shape == Shape{0, 4});
}

TEST_CASE("manifest: records that do not cover a tensor are an internal error", "[checkpoint]") {
  Manifest m;
  RankRecord a;
  a.slices = {{"w", kF32, {4}, 0, 2, 0}};
  CHECK_THAT(error_of([&] { add_records(m, {a}); }),
             Catch::Contains("checkpoint: tensor w: slices cover 2 elements, expected 4"));
}

TEST_CASE("manifest: each thing that is wrong is named", "[checkpoint]") {
  CHECK(message([](json& m) { m["format"] = "x"; }) ==
        "format \"x\", expected \"tessera checkpoint\"");
  CHECK(message([](json& m) { m["version"] = 3; }) == "format version 3, expected at most 2");
  CHECK(message([](json& m) { m["version"] = 0; }) == "format version 0, expected at most 2");
  CHECK(message([](json& m) { m["version"] = 2; }) ==
        "no xxh64 at its end, expected that of all before it (format version 2)");
  for (const char* key : {"step", "next_sample", "samples_per_step", "num_skipped"}) {
    CHECK(message([&](json& m) { m["progress"][key] = (1ll << 48) + 1; }) ==
          fmt::format("progress: {} = 281474976710657, expected at most 281474976710656", key));
  }
  CHECK(message([](json& m) { m["progress"]["tokens"] = INT64_MAX; }) ==
        "progress: tokens = 9223372036854775807, expected at most 4611686018427387904");
  CHECK(message([](json& m) { m["world_size"] = 1ll << 62; }) ==
        "2 files of world_size = 4611686018427387904, expected one of each rank");
  CHECK(message([](json& m) {
          m["tensors"][1]["shape"] = {1ll << 40};
          m["tensors"][1]["slices"][1]["end"] = 1ll << 40;
        }) ==
        "file rank-00001.safetensors: 50 bytes, expected more for its slices up to that of "
        "tensor parameters/w");
  CHECK(message([](json& m) { m["version"] = -1; }) ==
        "manifest: version = -1, expected an integer >= 0");
  CHECK(message([](json& m) { m["run"] = 5; }) == "manifest: run = 5, expected a string");
  CHECK(message([](json& m) { m["progress"] = 1; }) == "progress: no step, expected it");
  CHECK(message([](json& m) { m["progress"]["tokens"] = 1.5; }) ==
        "progress: tokens = 1.5, expected an integer >= 0");
  CHECK(message([](json& m) { m["progress"]["lr"] = "x"; }) ==
        "progress: lr = \"x\", expected a number");
  CHECK(message([](json& m) { m["files"] = 1; }) == "manifest: files = 1, expected an array");
  CHECK(message([](json& m) { m["files"][0]["xxh64"] = "12"; }) ==
        "files: xxh64 = \"12\", expected 16 hexadecimal digits");
  CHECK(message([](json& m) { m["tensors"][1]["dtype"] = "F99"; }) ==
        "tensor parameters/w: dtype \"F99\", expected one of safetensors");
  CHECK(message([](json& m) { m["tensors"][1]["shape"] = {1, 1, 1, 1, 1, 1, 1, 1, 1}; }) ==
        "tensor parameters/w: 9 dimensions, expected at most 8");
  CHECK(message([](json& m) { m["tensors"][1]["shape"] = {-1}; }) ==
        "tensor parameters/w: size -1 in its shape, expected an integer >= 0");
  CHECK(message([](json& m) {
          m["tensors"][1]["shape"] = {1ll << 62, 1ll << 62};
        }) == "tensor parameters/w: its shape overflows, expected fewer elements");
  CHECK(message([](json& m) { m["tensors"][1]["slices"][0]["file"] = 2; }) ==
        "tensor parameters/w: file 2, expected less than 2");
  CHECK(message([](json& m) { m["tensors"][1]["slices"][1]["begin"] = 4; }) ==
        "tensor parameters/w: slice [4, 12), expected one that begins at 5");
  CHECK(message([](json& m) { m["tensors"][1]["slices"][1]["end"] = 13; }) ==
        "tensor parameters/w: slices cover 13 elements, expected 12");
  CHECK(message([](json& m) { m["tensors"][1]["slices"][1]["end"] = 5; }) ==
        "tensor parameters/w: slice [5, 5), expected one that begins at 5");
  CHECK(message([](json& m) { m["tensors"][1]["name"] = "optimizer/step_count"; }) ==
        "tensor optimizer/step_count after optimizer/step_count, expected each once in "
        "alphabetical order");
}

TEST_CASE("manifest: any flipped bit is found", "[checkpoint]") {
  const std::string text = to_json(example());
  std::string damaged = text;
  for (size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      damaged[i] = static_cast<char>(text[i] ^ (1 << bit));
      bool is_found = false;
      try {
        parse_manifest("m", damaged);
      } catch (const CheckpointError&) {
        is_found = true;
      }
      if (!is_found) FAIL("bit " << bit << " of byte " << i);
    }
    damaged[i] = text[i];
  }
  damaged[text.find("70")] = '8';  // the next sample
  CHECK(error_of([&] { parse_manifest("m", damaged); }) ==
        "m: its bytes do not have the xxh64 that it ends with, expected them as they were written");
}

TEST_CASE("manifest: one of before it had a hash and a count of saves is read", "[checkpoint]") {
  json object = json::parse(to_json(example()));
  object["version"] = 1;
  object.erase("xxh64");
  object.erase("sequence");
  for (const char* key : {"data_content", "val_id", "val_content"}) object["progress"].erase(key);
  const Manifest read = parse_manifest("m", object.dump(1) + "\n");
  CHECK(read.progress.val_id.empty());
  CHECK(read.progress.next_sample == 70);
  CHECK(read.sequence == 0);
  std::string text = to_json(example());
  const auto replace = [&](const std::string& from, const std::string& to) {
    REQUIRE(text.find(from) != std::string::npos);
    text.replace(text.find(from), from.size(), to);
  };
  replace("\"version\": 2", "\"version\": 1");
  replace(" \"sequence\": 0,\n", "");
  const auto head = parse_manifest_head(text);
  REQUIRE(head.has_value());
  CHECK(head->run == "0123");
  CHECK(head->sequence == 0);
}

TEST_CASE("manifest: losses are of the same data unless it is known that they are not",
          "[checkpoint]") {
  const Progress a = example().progress;
  Progress b = a;
  CHECK(is_same_validation(a, b));
  b.val_content = "2f";
  CHECK_FALSE(is_same_validation(a, b));
  b.val_content = "";
  CHECK(is_same_validation(a, b));
  b.val_id = "more data";
  CHECK_FALSE(is_same_validation(a, b));
  CHECK(is_same_validation(Progress(), b));
}

TEST_CASE("manifest: its head is read from the first lines", "[checkpoint]") {
  Manifest m = example();
  m.sequence = 12;
  const std::string text = to_json(m);
  CHECK(parse_manifest("m", text).sequence == 12);
  const auto head = parse_manifest_head(text.substr(0, text.find("progress")));
  REQUIRE(head.has_value());
  CHECK(head->run == "0123");
  CHECK(head->sequence == 12);
  CHECK_FALSE(parse_manifest_head("").has_value());
  CHECK_FALSE(parse_manifest_head("{\"a\": {\"run\": \"x\"}}").has_value());
  CHECK_FALSE(parse_manifest_head(std::string(100000, '[')).has_value());
}

TEST_CASE("manifest: many slices and tensors are read in a time that grows with the text",
          "[checkpoint]") {
  // What takes the square of it does not end before the suite does.
  Manifest m = example();
  constexpr int64_t kCount = 100000;
  m.tensors.clear();
  m.files[0].nbytes = m.files[1].nbytes = 8 * kCount;
  TensorRecord sliced{"a", kF32, {kCount}, {}};
  for (int64_t i = 0; i < kCount; ++i) sliced.slices.push_back({i % 2, i, i + 1, 7});
  m.tensors.push_back(sliced);
  for (int64_t i = 0; i < kCount; ++i) {
    m.tensors.push_back({fmt::format("b{:09}", i), kF32, {1}, {{i % 2, 0, 1, 7}}});
  }
  const Manifest read = parse_manifest("m", to_json(m));
  CHECK(read.tensors.size() == kCount + 1);
  CHECK(read.tensors[0].slices.size() == kCount);
}

TEST_CASE("strict JSON: an object of many members takes a time that grows with the text",
          "[checkpoint]") {
  constexpr int kCount = 200000;
  std::string text = "{";
  for (int i = 0; i < kCount; ++i) text += fmt::format("\"k{}\":{{}},", i);
  text += "\"last\":1}";
  CHECK(parse_strict_json("x", text, 4, "").size() == kCount + 1);
}

TEST_CASE("strict JSON: pieces of a checked text are those that the whole would have",
          "[checkpoint]") {
  const std::string text =
      "\xef\xbb\xbf { \"a\" : [1 , \"x,]}\\\"\", {\"b\":[ ]}, [[2]] ,null] ,\"\\u0062\\\\\":-1.5e3\n,"
      "\"\":{}, \"c\":\"{\", \"d\":true }";
  check_strict_json("text", text, {}, "an object");
  json pieces = json::object();
  std::vector<std::string> names;
  const auto take = [&](const std::string& name, std::string_view value) {
    names.push_back(name);
    json elements = json::array();
    const bool is_array =
        for_each_element(value, [&](std::string_view e) { elements.push_back(json::parse(e)); });
    pieces[name] = is_array ? elements : json::parse(value);
  };
  CHECK(for_each_member(text, take));
  CHECK(pieces == json::parse(text));
  CHECK(names == std::vector<std::string>{"a", "b\\", "", "c", "d"});
  for (const char* other : {"[1]", "1", "\"{\"", "null"}) CHECK_FALSE(for_each_member(other, take));
  for (const char* other : {"{\"a\":1}", "1", "\"[\""}) {
    CHECK_FALSE(for_each_element(other, [](std::string_view) { FAIL("an element"); }));
  }
  CHECK(error_of([&] { check_strict_json("text", "{\"a\":1,\"a\":2}", {}, "an object"); }) ==
        "text has \"a\" twice, expected each name once");
}

TEST_CASE("manifest, safetensors: what is read takes a few times the memory of its text",
          "[checkpoint]") {
  Manifest m = example();
  m.files.clear(), m.tensors.clear();
  std::vector<RankRecord> records(20);
  for (size_t r = 0; r < records.size(); ++r) {
    records[r].file = {rank_file_name(static_cast<int64_t>(r)), 1 << 30, r};
    for (int i = 0; i < 500; ++i) {
      const auto begin = static_cast<int64_t>(100 * r);
      records[r].slices.push_back(
          {fmt::format("parameters/blocks.{:04}.w", i), kF32, {2000}, begin, begin + 100, r});
    }
  }
  m.world_size = std::ssize(records);
  add_records(m, records);
  const std::string manifest = to_json(m);
  const size_t of_manifest = peak_nbytes([&] { parse_manifest("m", manifest); });
  INFO(of_manifest << " bytes for " << manifest.size());
  CHECK(of_manifest < 2 * manifest.size());

  std::vector<SafetensorsEntry> entries;
  for (int i = 0; i < 10'000; ++i) {
    entries.push_back(
        {fmt::format("model.layers.{}.self_attn.q_proj.weight", i), kBF16, {0, 4096}});
  }
  const testing::TempDir dir;
  const std::string header = safetensors_header(entries);
  const std::string path = dir.write("m.safetensors", header);
  const size_t of_header = peak_nbytes([&] { SafetensorsFile file(path); });
  INFO(of_header << " bytes for " << header.size());
  CHECK(of_header < 5 * header.size());
}

TEST_CASE("manifest: F18: a file outside the directory is refused", "[checkpoint]") {
  for (const char* name : {"../x", "/etc/passwd", "a/b", "", ".", ".."}) {
    CHECK(message([&](json& m) { m["files"][1]["name"] = name; }) ==
          fmt::format("file {}, expected a name of its own inside the directory", name));
  }
  CHECK(message([](json& m) { m["files"][1]["name"] = m["files"][0]["name"]; }) ==
        "file rank-00000.safetensors, expected a name of its own inside the directory");
}

TEST_CASE("manifest: text that is no manifest is refused at every length", "[checkpoint]") {
  const std::string text = to_json(example());
  for (size_t length = 0; length + 2 < text.size(); ++length) {
    CHECK_THROWS_AS(parse_manifest("m", text.substr(0, length)), CheckpointError);
  }
  const auto of = [](const std::string& bad) {
    return error_of([&] { parse_manifest("m", bad); });
  };
  CHECK(of("<!DOCTYPE html>") ==
        "m: manifest of 15 bytes is not JSON, expected that of a checkpoint");
  CHECK(of("[]") == "m: manifest: no format, expected it");
  CHECK(of(std::string(100000, '[')) == "m: manifest nested too deep, expected 8");
  CHECK(of("{\"a\":1,\"a\":2}") == "m: manifest has \"a\" twice, expected each name once");
}

TEST_CASE("strict JSON: an array of tiny elements is no way to fill the memory", "[checkpoint]") {
  std::string text = "[";
  for (int i = 0; i < 20000; ++i) text += "0,";
  text += "0]";
  CHECK(error_of([&] { parse_strict_json("x", text, 4, "less"); }) ==
        "x of 40003 bytes has an array of more than 3524 elements, expected fewer");
  // Elements of an ordinary size may be as many as they like.
  std::string objects = "[";
  for (int i = 0; i < 20000; ++i) objects += "{\"name\": \"a name\"},";
  objects += "{}]";
  CHECK(parse_strict_json("x", objects, 4, "").size() == 20001);
  // Two short arrays in a row are two.
  CHECK(parse_strict_json("x", "[[1,2],[3,4]]", 4, "").size() == 2);
}

TEST_CASE("strict JSON: numbers of Python are some only where they are allowed", "[checkpoint]") {
  for (const std::string text : {"[NaN]", "[Infinity]", "[-Infinity]"}) {
    CAPTURE(text);
    CHECK(error_of([&] { parse_strict_json("x", text, 4, "numbers"); }) ==
          fmt::format("x of {} bytes is not JSON, expected numbers", text.size()));
    const auto value =
        parse_strict_json("x", text, {.max_depth = 4, .python_numbers = true}, "")[0].get<double>();
    CHECK((text == "[NaN]" ? std::isnan(value)
                           : value == (text == "[Infinity]" ? 1 : -1) *
                                          std::numeric_limits<double>::infinity()));
  }
  CHECK(parse_strict_json("x", "[\"NaN\"]", 4, "")[0] == "NaN");
}

TEST_CASE("checkpoint paths: a directory, its latest, one checkpoint", "[checkpoint]") {
  const TempDir dir;
  CHECK(error_of([&] { resolve_checkpoint(dir.path()); }) ==
        dir.path() + ": no complete checkpoint, expected step directories with a manifest.json");
  const auto make = [&](const std::string& name, bool is_complete) {
    std::filesystem::create_directory(dir / name);
    if (is_complete) dir.write(name + "/manifest.json", "{}");
  };
  make("step-00000010", true);
  make("step-00000009", true);
  make("step-00000030", false);
  make("step-x", true);
  make("step-", true);
  make("step--5", true);
  make("other-00000099", true);
  dir.write("step-00000077", "a file");
  CHECK(resolve_checkpoint(dir.path()) == dir / "step-00000010");
  CHECK(resolve_checkpoint(dir / "latest") == dir / "step-00000010");
  CHECK(resolve_checkpoint(dir / "step-00000009") == dir / "step-00000009");
  CHECK(resolve_checkpoint(dir / "step-00000009/") == dir / "step-00000009");
  CHECK_THROWS_AS(resolve_checkpoint(dir / "step-00000030"), CheckpointError);
  CHECK(list_checkpoints(dir.path()).size() == 2);
  REQUIRE(list_incomplete(dir.path()).size() == 1);
  CHECK(list_incomplete(dir.path())[0].step == 30);
  CHECK(list_checkpoints(dir / "none").empty());
  CHECK_FALSE(remove_checkpoint(dir / "step-00000010", "r"));  // it does not say that it is of "r"
  std::filesystem::remove_all(dir / "step-00000010");
  CHECK(resolve_checkpoint(dir.path()) == dir / "step-00000009");
  // A manifest in the wrong directory.
  std::filesystem::remove(dir / "step-00000009/manifest.json");
  dir.write("step-00000009/manifest.json", to_json(example()));
  CHECK(error_of([&] { CheckpointReader reader(dir / "step-00000009"); }) ==
        dir / "step-00000009/manifest.json: manifest of step 7 (run 0123), expected step 9");
}
