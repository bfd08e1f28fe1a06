#include "core/formats/safetensors.h"

#include <cstring>

#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using tessera::testing::error_of;
using tessera::testing::read_file;
using tessera::testing::TempDir;

namespace {

std::string file_bytes(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>((header.size() >> (8 * i)) & 0xff);
  return bytes + header + data;
}

/// The message for a file with this header and data, without the path in front.
std::string message(const std::string& header, const std::string& data = "") {
  const TempDir dir;
  const std::string path = dir.write("m.safetensors", file_bytes(header, data));
  const std::string text = error_of([&] { SafetensorsFile file(path); });
  return text.starts_with(path + ": ") ? text.substr(path.size() + 2) : text;
}

std::string message_of_bytes(const std::string& bytes) {
  const TempDir dir;
  const std::string path = dir.write("m.safetensors", bytes);
  return error_of([&] { SafetensorsFile file(path); }).substr(path.size() + 2);
}

}  // namespace

TEST_CASE("safetensors: what is written reads back", "[safetensors]") {
  const TempDir dir;
  const std::vector<SafetensorsEntry> entries = {{"a.weight", kF32, {2, 3}},
                                                 {"empty", kBF16, {0, 4}},
                                                 {"scalar", kF64, {}},
                                                 {"bytes", kU8, {3}},
                                                 {"ids", kI64, {1}}};
  const float a[6] = {1, 2, 3, 4, 5, 6};
  const double scalar = 0.1;
  const uint8_t bytes[3] = {7, 8, 9};
  const int64_t id = -5;
  SafetensorsWriter writer(dir / "m.safetensors", entries, {{"format", "pt"}, {"note", "\"x\""}});
  writer.write("ids", &id, sizeof(id));
  writer.write("a.weight", a, sizeof(a));
  writer.write("empty", nullptr, 0);
  writer.write("scalar", &scalar, sizeof(scalar));
  writer.write("bytes", bytes, sizeof(bytes));
  CHECK_FALSE(std::filesystem::exists(dir / "m.safetensors"));
  writer.finish();
  CHECK_FALSE(std::filesystem::exists(dir / "m.safetensors.tmp"));

  const SafetensorsFile file(dir / "m.safetensors");
  REQUIRE(file.entries().size() == 5);
  CHECK(file.metadata().at("note") == "\"x\"");
  const SafetensorsEntry& weight = file.find("a.weight");
  CHECK(weight.shape == Shape{2, 3});
  CHECK(weight.dtype == kF32);
  CHECK(std::memcmp(file.data(weight), a, sizeof(a)) == 0);
  CHECK(file.find("empty").nbytes() == 0);
  CHECK(std::memcmp(file.data(file.find("scalar")), &scalar, sizeof(scalar)) == 0);
  CHECK(std::memcmp(file.data(file.find("ids")), &id, sizeof(id)) == 0);
  CHECK(error_of([&] { file.find("b"); }) ==
        dir / "m.safetensors: no tensor b among 5, expected it");
}

TEST_CASE("safetensors: element types that tensors here do not have are read as bytes",
          "[safetensors]") {
  struct Type {
    const char* name;
    int64_t nbytes;
  };
  const Type types[] = {{"I8", 1},  {"I16", 2},  {"U16", 2},     {"U32", 4},
                        {"U64", 8}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
  const TempDir dir;
  std::string header = R"({"__metadata__":{"test":"a"})", data;
  for (const Type& type : types) {
    const auto begin = static_cast<int64_t>(data.size()), end = begin + 6 * type.nbytes;
    header += fmt::format(R"(,"{}":{{"dtype":"{}","shape":[2,3],"data_offsets":[{},{}]}})",
                          type.name, type.name, begin, end);
    while (static_cast<int64_t>(data.size()) < end) data += static_cast<char>(data.size());
  }
  const SafetensorsFile file(dir.write("m", file_bytes(header + "}", data)));
  REQUIRE(file.entries().size() == std::size(types));
  size_t at = 0;
  for (const Type& type : types) {
    CAPTURE(type.name);
    const SafetensorsEntry& entry = file.find(type.name);
    CHECK(entry.dtype.name() == type.name);
    CHECK(fmt::format("{}", entry.dtype) == type.name);
    CHECK_FALSE(entry.dtype.ours().has_value());
    CHECK(entry.dtype != StoredDType(kU8));
    REQUIRE(entry.nbytes() == 6 * type.nbytes);
    CHECK(std::memcmp(file.data(entry), data.data() + at, static_cast<size_t>(entry.nbytes())) ==
          0);
    at += static_cast<size_t>(entry.nbytes());
  }
  CHECK(StoredDType(kBF16).name() == "BF16");
  CHECK(StoredDType(kBF16).ours() == kBF16);
  CHECK(fmt::format("{}", StoredDType(kBF16)) == "bf16");
}

TEST_CASE("safetensors: an unfinished file leaves nothing behind", "[safetensors]") {
  const TempDir dir;
  {
    SafetensorsWriter writer(dir / "m.safetensors", {{"a", kU8, {2}}, {"b", kU8, {1}}});
    CHECK(error_of([&] {
            writer.write("c", "x", 1);
          }).starts_with("safetensors: no tensor c among 2"));
    CHECK(error_of([&] {
            writer.write("b", "xy", 2);
          }).starts_with("safetensors: tensor b of 2 bytes, expected 1"));
    writer.write("b", "x", 1);
    CHECK(error_of([&] {
            writer.write("b", "x", 1);
          }).starts_with("safetensors: tensor b written twice"));
    CHECK(error_of([&] { writer.finish(); }).starts_with("safetensors: tensor a was not written"));
  }
  CHECK(std::filesystem::is_empty(dir.path()));
  CHECK(error_of([&] { SafetensorsWriter(dir / "no/m", {}); }) ==
        dir / "no/m: cannot be written: No such file or directory");
  CHECK(error_of([&] {
          SafetensorsWriter(dir / "m", {{"a", kU8, {1}}, {"a", kU8, {1}}});
        }).starts_with("safetensors: tensor a twice"));
}

TEST_CASE("safetensors: a file is a source of f32 values, a writer takes them", "[safetensors]") {
  const TempDir dir;
  const float values[] = {1.5f, -2, 0.25f, 3};
  {
    SafetensorsWriter writer(dir / "stored",
                             {{"low", kBF16, {4}}, {"half", kF16, {4}}, {"f32", kF32, {2, 2}}});
    const BFloat16 low[] = {BFloat16(1.5f), BFloat16(-2.0f), BFloat16(0.25f), BFloat16(3.0f)};
    const Float16 half[] = {Float16(1.5f), Float16(-2.0f), Float16(0.25f), Float16(3.0f)};
    writer.write("low", low, sizeof(low));
    writer.write("half", half, sizeof(half));
    CHECK(error_of([&] {
            writer.write("f32", Shape{4}, values);
          }).starts_with("safetensors: tensor f32 of f32 [4], expected f32 [2, 2]"));
    CHECK(error_of([&] {
            writer.write("low", Shape{4}, values);
          }).starts_with("safetensors: tensor low of f32 [4], expected bf16 [4]"));
    writer.write("f32", Shape{2, 2}, values);
    writer.finish();
  }
  const SafetensorsFile stored(dir / "stored");
  CHECK(stored.names() == std::vector<std::string>{"low", "half", "f32"});
  SafetensorsWriter writer(dir / "copy", f32_entries(stored));
  copy_parameters(stored, writer);
  const SafetensorsFile copy(dir / "copy");
  for (const std::string& name : stored.names()) {
    CAPTURE(name);
    CHECK(copy.find(name).dtype == kF32);
    CHECK(copy.shape_of(name) == stored.shape_of(name));
    float read[2] = {};
    copy.read(name, 1, 3, read);
    CHECK(read[0] == -2);
    CHECK(read[1] == 0.25f);
    CHECK(error_of([&] { copy.read(name, 3, 5, read); }) ==
          fmt::format("{}: elements [3, 5) of {}, expected some of its 4", dir / "copy", name));
  }
  CHECK(error_of([&] { copy.shape_of("none"); }) ==
        dir / "copy: no tensor none among 3, expected it");
  SafetensorsWriter ids(dir / "ids", {{"ids", kI64, {1}}});
  const int64_t id = 1;
  ids.write("ids", &id, sizeof(id));
  ids.finish();
  CHECK(error_of([&] { SafetensorsFile(dir / "ids").shape_of("ids"); }) ==
        dir / "ids: tensor ids is i64 [1], expected f32, bf16 or f16");
}

TEST_CASE("safetensors: no files and no tensors are legal", "[safetensors]") {
  const TempDir dir;
  SafetensorsWriter(dir / "m", {}).finish();
  CHECK(SafetensorsFile(dir / "m").entries().empty());
}

TEST_CASE("safetensors: headers that lie are refused with what was found", "[safetensors]") {
  const std::string ok = R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})";
  {
    const TempDir dir;
    CHECK_NOTHROW(SafetensorsFile(dir.write("m", file_bytes(ok, "xy"))));
  }
  CHECK(message(ok, "x") ==
        "tensor a: data_offsets [0,2], expected [begin, end] within 1 bytes of data");
  CHECK(message(ok, "xyz") == "3 bytes of data, expected 2 as the header says");
  CHECK(message("{", "") == "header of 1 bytes is not JSON, expected a safetensors file");
  CHECK(message("{\"\xff\":1}").starts_with("header of 7 bytes is not JSON"));
  CHECK(message("[]") == "header is no JSON object, expected one");
  CHECK(message(R"({"a":3})") == "tensor a: 3, expected an object");
  CHECK(message(std::string(10000, '[')) == "header nested too deep, expected 4");
  CHECK(
      message(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          "xy") == "header has \"a\" twice, expected each name once");
  CHECK(message(R"({"a":{"dtype":"U8","dtype":"F32","shape":[1],"data_offsets":[0,1]}})", "x") ==
        "header has \"dtype\" twice, expected each name once");
  CHECK(
      message(R"({"a":{"dtype":"F8","shape":[2],"data_offsets":[0,2]}})", "xy") ==
      "tensor a: dtype \"F8\", expected F32, BF16, F16, F64, I32, I64, U8, I8, I16, U16, U32, U64, "
      "BOOL, F8_E4M3 or F8_E5M2");
  CHECK(message(R"({"a":{"shape":[2],"data_offsets":[0,2]}})", "xy") ==
        "tensor a: dtype missing, expected F32, BF16, F16, F64, I32, I64, U8, I8, I16, U16, U32, "
        "U64, "
        "BOOL, F8_E4M3 or F8_E5M2");
  CHECK(message(R"({"a":{"dtype":"U8","data_offsets":[0,2]}})", "xy") ==
        "tensor a: no shape, expected an array of at most 8 sizes");
  CHECK(message(R"({"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}})", "xy") ==
        "tensor a: size -2 in its shape, expected an integer >= 0");
  CHECK(message(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,2]}})",
                "xy") ==
        "tensor a: shape [4294967296, 4294967296] overflows, expected fewer elements");
  CHECK(message(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,2]}})", "xy") ==
        "tensor a: 2 bytes of data, expected 8 for f32 [2]");
  CHECK(message(R"({"__metadata__":{"a":3}})") == "metadata a: 3, expected a string");
  CHECK(message(R"({"__metadata__":[]})") == "__metadata__: [], expected an object");
  CHECK(message(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[NaN,1]}})", "x")
            .find("bytes is not JSON") != std::string::npos);
}

TEST_CASE("safetensors: metadata of null is none", "[safetensors]") {
  const TempDir dir;
  const SafetensorsFile file(dir.write(
      "m",
      file_bytes(R"({"__metadata__":null,"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
                 "xy")));
  CHECK(file.metadata().empty());
  CHECK(file.entries().size() == 1);
}

TEST_CASE("safetensors: names and values in messages are shortened", "[safetensors]") {
  const std::string name(100'000, 'n');
  CHECK(message("{\"" + name + "\":3}").size() < 300);
  CHECK(message("{\"a\":\"" + name + "\"}").size() < 300);
  CHECK(message("{\"" + name + "\":{\"dtype\":\"" + name + "\"}}").size() < 700);
  CHECK(message("{\"" + name + "\":{},\"" + name + "\":{}}").size() < 700);
}

TEST_CASE("safetensors: a header of many tensors is read in one pass", "[safetensors]") {
  // Each step that looked at all tensors before it would make this take minutes.
  constexpr int kCount = 100'000;
  const TempDir dir;
  std::vector<SafetensorsEntry> entries;
  for (int i = 0; i < kCount; ++i) entries.push_back({std::to_string(i), kU8, {0}});
  SafetensorsWriter writer(dir / "m", entries);
  for (const SafetensorsEntry& entry : entries) writer.write(entry.name, "", 0);
  writer.finish();
  const SafetensorsFile file(dir / "m");
  REQUIRE(file.entries().size() == kCount);
  for (const SafetensorsEntry& entry : entries) CHECK_NOTHROW(file.find(entry.name));
}

TEST_CASE("safetensors: a header of tiny things without number is refused", "[safetensors]") {
  const auto repeat = [](std::string_view text, int count) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  };
  std::string members;
  for (int i = 0; i < 40'000; ++i) members += fmt::format("\"{}\":0,", i);
  // Each would take far more memory than its text.
  CHECK_THAT(message("{\"a\":[" + repeat("0,", 20'000) + "0]}"),
             Catch::EndsWith("has an array of more than 3524 elements, expected fewer"));
  CHECK_THAT(message("{" + members + "\"a\":0}"), Catch::Contains("has an object of more than ") &&
                                                      Catch::EndsWith(" elements, expected fewer"));
  const std::string empty = "[" + repeat("[],", 800) + "[]]";
  CHECK_THAT(message("{\"a\":" + empty + ",\"b\":" + empty + ",\"c\":" + empty + "}"),
             Catch::EndsWith(" arrays and objects, expected fewer"));
}

TEST_CASE("safetensors: offsets must tile the data", "[safetensors]") {
  const auto with_offsets = [](const std::string& a, const std::string& b) {
    return message(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + a +
                       R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + b + "}}",
                   "xyzw");
  };
  CHECK(with_offsets("[0,2]", "[1,3]") ==
        "tensor b: data begins at 1, expected 2 (it overlaps another)");
  CHECK(with_offsets("[1,3]", "[2,4]") == "tensor a: data begins at 1, expected 0 (a gap)");
  for (const char* bad :
       {"[2,0]", "[-1,1]", "[0.0,2.0]", "[0]", "[0,2,4]", "3", "[0,18446744073709551615]"}) {
    CAPTURE(bad);
    CHECK(with_offsets(bad, "[2,4]").ends_with("expected [begin, end] within 4 bytes of data"));
  }
}

TEST_CASE("safetensors: a file cut at any byte is refused", "[safetensors]") {
  const TempDir dir;
  {
    SafetensorsWriter writer(dir / "m", {{"a", kF32, {3}}, {"b", kU8, {1}}});
    const float a[3] = {1, 2, 3};
    writer.write("a", a, sizeof(a));
    writer.write("b", "x", 1);
    writer.finish();
  }
  const std::string whole = read_file(dir / "m");
  for (size_t length = 0; length < whole.size(); ++length) {
    CAPTURE(length);
    CHECK_THROWS_AS(SafetensorsFile(dir.write("cut", whole.substr(0, length))), InputError);
  }
}

TEST_CASE("safetensors: a file that is cut while it is read is named", "[safetensors]") {
  const TempDir dir;
  const std::vector<SafetensorsEntry> entries = {{"w", kF32, {4096}}};
  const std::string header = safetensors_header(entries);
  const std::string path = dir.write("m.safetensors", header + std::string(4096 * 4, 'x'));
  const SafetensorsFile file(path);
  std::filesystem::resize_file(path, 4096);
  std::vector<float> values(4096);
  std::memcpy(values.data(), file.data(file.find("w")), values.size() * sizeof(float));
  CHECK(error_of([&] { file.check(); }) ==
        fmt::format("{}: cut to 4096 bytes while it was read, expected {} as before", path,
                    header.size() + 4096 * 4));
}

TEST_CASE("safetensors: metadata is read from a file whose data is not all there",
          "[safetensors]") {
  const TempDir dir;
  const std::vector<SafetensorsEntry> entries = {{"w", kF32, {4096}}};
  const std::string path = dir.write("m", safetensors_header(entries, {{"run", "r"}}) + "half");
  CHECK(read_safetensors_metadata(path) == std::map<std::string, std::string>{{"run", "r"}});
  CHECK(read_safetensors_metadata(dir.write("n", safetensors_header(entries))).empty());
  CHECK(error_of([&] { read_safetensors_metadata(dir.write("o", "half")); }) ==
        dir / "o: 4 bytes, expected a safetensors file");
}

TEST_CASE("safetensors: absurd header sizes and other formats are named", "[safetensors]") {
  CHECK(message_of_bytes(std::string(7, 'x')) == "7 bytes, expected a safetensors file");
  CHECK(message_of_bytes(std::string("\0\0\0\0\0\0\0\x80", 8) + "{}") ==
        "header of 9223372036854775808 bytes, expected at most 2");
  {
    // More than any header may have, in a file that is as large (and empty: nothing of it is read).
    const TempDir dir;
    const std::string path = dir.write("m", std::string("\x01\xe1\xf5\x05\0\0\0\0", 8));
    std::filesystem::resize_file(path, 200'000'000);
    CHECK(error_of([&] { SafetensorsFile file(path); }) ==
          path + ": header of 100000001 bytes, expected at most 100000000");
  }
  CHECK(message_of_bytes("GGUF\3\0\0\0 and so on").ends_with("(it looks like a GGUF file)"));
  CHECK(message_of_bytes("PK\x03\x04 and so on")
            .ends_with("(it looks like a zip archive, as PyTorch saves)"));
  CHECK(message_of_bytes("\x80\x02}q and so on").ends_with("(it looks like a Python pickle)"));
  CHECK(message_of_bytes("version https://git-lfs.github.com/spec/v1")
            .ends_with("(it looks like a Git LFS pointer)"));
  CHECK(message_of_bytes("<!DOCTYPE html><html></html>").ends_with("(it looks like a web page)"));
}
