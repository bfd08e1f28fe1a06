#include "apps/data/documents.h"

#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <filesystem>
#include <fstream>

#include "apps/data/byte_stream.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;

namespace {

std::string gzip(const std::string& bytes) {
  z_stream state{};
  REQUIRE(deflateInit2(&state, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string packed(deflateBound(&state, bytes.size()), '\0');
  state.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  state.avail_in = static_cast<uInt>(bytes.size());
  state.next_out = reinterpret_cast<Bytef*>(packed.data());
  state.avail_out = static_cast<uInt>(packed.size());
  REQUIRE(deflate(&state, Z_FINISH) == Z_STREAM_END);
  packed.resize(state.total_out);
  deflateEnd(&state);
  return packed;
}

std::string zstd(const std::string& bytes) {
  std::string packed(ZSTD_compressBound(bytes.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), bytes.data(), bytes.size(), 3));
  return packed;
}

struct Folder : testing::TempDir {
  std::string operator()(const std::string& name, const std::string& bytes) const {
    return write(name, bytes);
  }
};

std::vector<std::string> texts(DocumentReader& reader) {
  std::vector<std::string> all;
  Document document;
  while (reader.next(document)) all.emplace_back(document.text);
  return all;
}

std::vector<std::string> read(std::vector<std::string> paths, const DocumentOptions& options = {}) {
  DocumentReader reader(std::move(paths), options);
  return texts(reader);
}

std::string failure(const std::string& path, const DocumentOptions& options = {}) {
  const std::string error = error_of([&] { read({path}, options); });
  CHECK(error.find('\n') == std::string::npos);
  REQUIRE(error.starts_with(path + ": "));
  return error.substr(path.size() + 2);
}

std::string json_line(int i, size_t nbytes) {
  return R"({"id": )" + std::to_string(i) + R"(, "text": ")" + std::to_string(i) + R"(\n)" +
         std::string(nbytes, static_cast<char>('a' + i % 26)) + "\"}\n";
}

}  // namespace

TEST_CASE("documents: each format, plain and packed, gives the same texts", "[documents]") {
  const Folder file;
  const std::string text = "A whole file.\nTwo lines, \xc3\xa9\xe2\x82\xac.\n";
  const std::string lines =
      "\xef\xbb\xbf{\"text\": \"one\"}\n\n  \r\n{\"n\": [1, {\"text\": 0}, -2.5e+3, true, NaN], "
      "\"te\\u0078t\": \"tw\\u006f \\ud83d\\ude00\\u20ac\\n\\\"\\\\\\/\\b\\f\\r\\t\"}\r\n"
      "{\"text\":\"\",\"z\":null}\n{ \"text\" : \"no line end\" }";
  const std::vector<std::string> expected = {
      "one", "two \xf0\x9f\x98\x80\xe2\x82\xac\n\"\\/\b\f\r\t", "", "no line end"};
  CHECK(read({file("a.txt", text)}) == std::vector{text});
  CHECK(read({file("a.txt.gz", gzip(text))}) == std::vector{text});
  CHECK(read({file("b.txt.gz", gzip("A whole") + gzip("") + gzip(text.substr(7)))}) ==
        std::vector{text});
  CHECK(read({file("a.md.zst", zstd(text))}) == std::vector{text});
  CHECK(read({file("b.txt.zst", zstd("A whole") + zstd(text.substr(7)))}) == std::vector{text});
  CHECK(read({file("a.jsonl", lines)}) == expected);
  CHECK(read({file("a.jsonl.gz", gzip(lines))}) == expected);
  CHECK(read({file("a.ndjson.zst", zstd(lines))}) == expected);
  DocumentOptions as_text;
  as_text.format = FileFormat::kText;
  CHECK(read({file("a.csv", text)}, as_text) == std::vector{text});
}

TEST_CASE("documents: a restart at any document goes on with the same ones", "[documents]") {
  const Folder file;
  std::string lines;
  for (int i = 0; i < 40; ++i)
    lines += json_line(i, i == 7 ? 5 << 20 : 300000) + (i % 3 ? "" : "\n");
  const std::vector<std::string> paths = {
      file("a.txt", "first"), file("b.jsonl", lines),
      file("c.jsonl.gz", gzip(json_line(1, 9) + json_line(2, 9))), file("d.txt.zst", zstd("last"))};
  DocumentReader reader(paths, {});
  std::vector<DocumentPosition> before, of;
  std::vector<std::string> all;
  std::vector<std::shared_ptr<const void>> owners;
  std::vector<std::string_view> views;
  Document document;
  CHECK(reader.nbytes_read() == 0);
  while (before.push_back(reader.position()), reader.next(document)) {
    of.push_back(document.position);
    all.emplace_back(document.text);
    owners.push_back(document.owner), views.push_back(document.text);
  }
  REQUIRE(all.size() == 44);
  CHECK(reader.nbytes_read() == reader.nbytes());
  CHECK(reader.where(of[1]) == paths[1] + ": line 1");
  CHECK(reader.where(of[2]) == paths[1] + ": line 3");  // behind a blank one
  CHECK(reader.where(of[0]) == paths[0]);
  // What was given stays while its owner is held.
  for (size_t i = 0; i < all.size(); ++i) CHECK(views[i] == all[i]);
  for (size_t i = 0; i <= all.size(); i += i < 10 ? 1 : 7) {
    const std::vector<std::string> rest(all.begin() + static_cast<int64_t>(i), all.end());
    DocumentReader again(paths, {});
    again.seek(before[i]);
    CHECK(texts(again) == rest);
    if (i == all.size()) continue;
    again.seek(of[i]);
    CHECK(texts(again) == rest);
    if (i > 0) CHECK(of[i - 1] < of[i]);
  }
}

TEST_CASE("documents: a restart in a file that has become shorter is an error", "[documents]") {
  const Folder file;
  const std::string path = file("a.jsonl", json_line(0, 100) + json_line(1, 100));
  const std::string packed = file("a.jsonl.gz", gzip(json_line(0, 10)));
  DocumentReader reader({path}, {});
  reader.seek({.file = 0, .row = 9, .byte = 5000});
  Document document;
  CHECK(error_of([&] { reader.next(document); }) ==
        path + ": 250 bytes, expected at least 5000 as before");
  DocumentReader other({packed}, {});
  other.seek({.file = 0, .row = 9, .byte = 5000});
  CHECK(error_of([&] { other.next(document); }) ==
        packed + ": 35 bytes, expected at least 5000 as before");
  CHECK(error_of([&] { reader.seek({.file = 2}); }) ==
        "documents: a position in file 2, expected one of the 1 files");
}

TEST_CASE("documents: bytes that are not UTF-8 are named, or replaced", "[documents]") {
  const Folder file;
  DocumentOptions replace;
  replace.invalid = InvalidText::kReplace;
  const std::string
      text = file("a.txt",
                  "ab\xff"
                  "cd"),
      lines = file("a.jsonl",
                   "{\"text\": \"ok\"}\n{\"text\": \"x\xe2\x82y\"}\n{\"text\": \"\\ud83dz\"}\n");
  CHECK(failure(text) == "byte 2 (0xff) is in no character, expected UTF-8");
  CHECK(failure(lines) == "line 2: byte 11 of the line (0xe2) is in no character, expected UTF-8");
  CHECK(read({text}, replace) == std::vector<std::string>{"ab\xef\xbf\xbd"
                                                          "cd"});
  CHECK(read({lines}, replace) ==
        std::vector<std::string>{"ok", "x\xef\xbf\xbdy", "\xef\xbf\xbdz"});
  CHECK(failure(file("b.jsonl", "{\"text\": \"\\uDE00\"}")) ==
        "line 1: byte 16 of the line: \\ude00, half a character, expected a surrogate pair");
}

TEST_CASE("documents: a line that is not as it should be is named with its place", "[documents]") {
  const Folder file;
  const auto line = [&](const std::string& text) {
    return failure(file("a.jsonl", "{\"text\": \"ok\"}\n" + text + "\n"));
  };
  CHECK(line(R"({"a": 1, "b": "x"})") ==
        R"(line 2: no field "text", expected one with the text (there is a, b))");
  CHECK(line("{}") == R"(line 2: no field "text", expected one with the text (there is none))");
  CHECK(line(R"({"text": 5})") == R"(line 2: field "text" is 5, expected a string)");
  CHECK(line(R"({"text": ["a"]})") == R"(line 2: field "text" is ["a"], expected a string)");
  CHECK(line(R"({"text": null})") == R"(line 2: field "text" is null, expected a string)");
  CHECK(line(R"({"text": "a", "text": "b"})") ==
        R"(line 2: byte 22 of the line: field "text" comes twice, expected it once)");
  CHECK(line(R"(["text"])") == "line 2: byte 0 of the line: '[', expected an object");
  CHECK(line(R"({"text": "a)") ==
        "line 2: byte 11 of the line: the line ends, expected the end of the string");
  CHECK(line(R"({"text": "a"} x)") ==
        "line 2: byte 14 of the line: 'x', expected the end of the line");
  CHECK(line(R"({"text": "a" "b": 1})") == "line 2: byte 13 of the line: '\"', expected , or }");
  CHECK(line(R"({"text": "a\x"})") ==
        "line 2: byte 12 of the line: 'x', expected an escape: one of \"\\/bfnrtu");
  CHECK(line(R"({"text": "\u12g4"})") ==
        "line 2: byte 14 of the line: 'g', expected four hexadecimal digits");
  CHECK(line("{\"text\": \"a\tb\"}") ==
        "line 2: byte 11 of the line: control character \\t, expected it as an escape");
  CHECK(line(R"({"n": 01, "text": ""})") == "line 2: byte 7 of the line: '1', expected , or }");
  CHECK(line(R"({"n": 1., "text": ""})") == "line 2: byte 8 of the line: ',', expected a digit");
  CHECK(line(R"({"n": tru, "text": ""})") == "line 2: byte 6 of the line: 't', expected a value");
  const std::string deep = std::string(600, '[');
  CHECK(line("{\"n\": " + deep) ==
        "line 2: byte 518 of the line: more than 512 levels, expected fewer");
  DocumentOptions skip;
  skip.null = NullText::kSkip;
  DocumentReader reader({file("n.jsonl", "{\"text\": null}\n{\"text\": \"a\"}\n{\"text\": null}")},
                        skip);
  CHECK(texts(reader) == std::vector<std::string>{"a"});
  CHECK(reader.num_null() == 2);
}

TEST_CASE("documents: a file without a document is an error", "[documents]") {
  const Folder file;
  CHECK(failure(file("a.txt", "")) == "0 bytes, expected a text");
  CHECK(failure(file("a.txt.gz", gzip(""))) == "0 bytes, expected a text");
  CHECK(failure(file("a.jsonl", "")) == "0 bytes, expected lines of JSON");
  CHECK(failure(file("b.jsonl", "\n  \n\n")) == "blank lines only, expected lines of JSON");
  CHECK(failure(file("b.txt.gz", "")) == "byte 0: no byte, expected a gzip member");
  CHECK(failure(file("b.txt.zst", "")) == "byte 0: no byte, expected a zstd frame");
}

TEST_CASE("documents: a packed file that is cut or damaged is named", "[documents]") {
  const Folder file;
  std::string lines;
  for (int i = 0; i < 3000; ++i) lines += json_line(i * i, static_cast<size_t>(i * 7919 % 400));
  const std::string gz = gzip(lines), zst = zstd(lines);
  const auto half = [](const std::string& bytes) { return bytes.substr(0, bytes.size() / 2); };
  const auto flip = [](std::string bytes, size_t at) { return bytes[at] ^= 0x55, bytes; };
  CHECK(failure(file("a.jsonl.gz", half(gz))) ==
        fmt::format("byte {}: the file ends inside of a gzip member, expected the rest of it",
                    gz.size() / 2));
  CHECK(failure(file("a.jsonl.zst", half(zst))) ==
        fmt::format("byte {}: the file ends inside of a zstd frame, expected the rest of it",
                    zst.size() / 2));
  CHECK(failure(file("b.jsonl.gz", flip(gz, gz.size() - 6)))
            .ends_with(": incorrect data check, expected a whole gzip member"));
  CHECK(failure(file("c.txt.gz", "a text")) ==
        "byte 2: incorrect header check, expected a whole gzip member");
  CHECK(failure(file("c.txt.zst", "a text")) ==
        "byte 0: Unknown frame descriptor, expected a whole zstd frame");
  CHECK(failure(file("d.jsonl.gz", gz + "tail"))
            .ends_with("incorrect header check, expected a whole gzip member"));
}

TEST_CASE("documents: what is not a file of a known format is refused", "[documents]") {
  const Folder file;
  const std::string fifo = file.path() + "/pipe.jsonl", folder = file.path() + "/folder.txt";
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  std::filesystem::create_directory(folder);
  CHECK(failure(fifo) == "a FIFO, expected a regular file");
  CHECK(failure(folder) == "a directory, expected a regular file");
  CHECK(failure(file.path() + "/none.txt") == "No such file or directory, expected a file");
  CHECK(failure(file("a.csv", "a,b")) ==
        "its name says no format, expected .txt, .jsonl or .parquet, also with .gz or .zst");
  CHECK(failure(file("packed.txt", gzip("x"))) == "it looks like a gzip file, expected a text");
  DocumentOptions rows;
  rows.whole_rows = true;
  CHECK(failure(file("a.txt", "x"), rows) == "a text, expected .jsonl or .parquet with rows");
  CHECK(read({file("rows.jsonl", "{\"a\": \"\\n\"}\n{\"b\":1}")}, rows) ==
        std::vector<std::string>{"{\"a\": \"\\n\"}", "{\"b\":1}"});
}

TEST_CASE("documents: a document that is too long is an error", "[documents]") {
  const Folder file;
  DocumentOptions options;
  options.max_document_nbytes = 100;
  CHECK(failure(file("a.jsonl", json_line(0, 10) + json_line(1, 200)), options) ==
        "line 2: more than 100 bytes, expected at most that many");
  CHECK(failure(file("a.txt.gz", gzip(std::string(200, 'a'))), options) ==
        "more than 100 bytes unpacked, expected at most that many in a document");
}

TEST_CASE("documents: globs give files in the order of bytes, each once", "[documents]") {
  const Folder file;
  const std::string root = file.path() + "/";
  for (const char* name : {"b.txt", "B.txt", "a10.txt", "a9.txt", "[x].txt"}) file(name, "x");
  CHECK(files_of_globs("text", {root + "[x].txt", root + "a*.txt", root + "[bB].txt"}, "texts") ==
        std::vector{root + "[x].txt", root + "a10.txt", root + "a9.txt", root + "B.txt",
                    root + "b.txt"});
  CHECK(error_of([&] { files_of_globs("data.text", {root + "*.json"}, "texts"); }) ==
        "data.text = " + root + "*.json: no file matches, expected texts");
  CHECK(error_of([&] {
          files_of_globs("t", {root + "a*", root + "a9*"}, "texts");
        }) ==
        "t = " + root + "a9*: " + root + "a9.txt comes a second time, expected each file once");
}

TEST_CASE("documents: a packed file becomes one without a name", "[documents]") {
  const Folder file;
  const std::string text(700000, 'q');
  const auto stream = ByteStream::open(file("a.gz", gzip(text)), Compression::kGzip);
  const int fd = unpack_to_temporary(*stream);
  std::string back(text.size() + 1, '\0');
  CHECK(::pread(fd, back.data(), back.size(), 0) == static_cast<ssize_t>(text.size()));
  CHECK(back.substr(0, text.size()) == text);
  ::close(fd);
}
