#include "dist/checkpoint/manifest.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "core/check.h"
#include "core/formats/safetensors.h"
#include "core/formats/strict_json.h"
#include "core/text.h"

namespace tessera::dist {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kCheckpointFormat = "tessera checkpoint";
// 1: without `sequence` and without a hash at the end.
constexpr int64_t kFormatVersion = 2;
constexpr int kMaxDepth = 8;
constexpr int64_t kMaxCount = int64_t{1} << 48;   // steps, samples: sums of two stay far from 2^63
constexpr int64_t kMaxTokens = int64_t{1} << 62;  // samples x context

// How the text ends; between the two, the hash of all that comes before.
constexpr std::string_view kSealBegin = ",\n \"xxh64\": \"", kSealEnd = "\"\n}\n";
constexpr size_t kNumHexDigits = 16;

std::string hex(uint64_t value) {
  return fmt::format("{:016x}", value);
}

ordered_json shape_json(const Shape& shape) {
  return std::vector<int64_t>(shape.begin(), shape.end());
}

/// Reads members of JSON objects and names file, place and key of what is not as it should be.
class Reader {
 public:
  Reader(const std::string& path) : path_(path) {}

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw CheckpointError(
        fmt::format("{}: {}", path_, fmt::format(format, std::forward<Args>(args)...)));
  }
  template <class... Args>
  [[noreturn]] void fail_unreadable(fmt::format_string<Args...> format, Args&&... args) const {
    throw UnreadableCheckpointError(
        fmt::format("{}: {}", path_, fmt::format(format, std::forward<Args>(args)...)));
  }
  const json& member(const json& object, const char* key, std::string_view where) const {
    const auto found = object.is_object() ? object.find(key) : object.end();
    if (!object.is_object() || found == object.end()) fail("{}: no {}, expected it", where, key);
    return *found;
  }
  int64_t size(const json& object, const char* key, std::string_view where) const {
    const json& value = member(object, key, where);
    if (json_size(value) < 0)
      fail("{}: {} = {}, expected an integer >= 0", where, key, text(value));
    return json_size(value);
  }
  int64_t count(const json& object, const char* key, std::string_view where, int64_t max) const {
    const int64_t value = size(object, key, where);
    if (value > max) fail("{}: {} = {}, expected at most {}", where, key, value, max);
    return value;
  }
  std::string string(const json& object, const char* key, std::string_view where) const {
    const json& value = member(object, key, where);
    if (!value.is_string()) fail("{}: {} = {}, expected a string", where, key, text(value));
    return value.get<std::string>();
  }
  std::optional<double> number(const json& object, const char* key, std::string_view where) const {
    const json& value = member(object, key, where);
    if (value.is_null()) return std::nullopt;
    if (!value.is_number()) fail("{}: {} = {}, expected a number", where, key, text(value));
    return value.get<double>();
  }
  const json& array(const json& object, const char* key, std::string_view where) const {
    const json& value = member(object, key, where);
    if (!value.is_array()) fail("{}: {} = {}, expected an array", where, key, text(value));
    return value;
  }
  uint64_t hash(const json& object, std::string_view where) const {
    const std::string digits = string(object, "xxh64", where);
    if (digits.size() != kNumHexDigits ||
        digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
      fail("{}: xxh64 = {}, expected 16 hexadecimal digits", where, text(json(digits)));
    }
    return std::stoull(digits, nullptr, 16);
  }
  DType dtype(const json& object, std::string_view where) const {
    const std::string name = string(object, "dtype", where);
    const auto dtype = dtype_from_safetensors(name);
    if (!dtype) fail("{}: dtype {}, expected one of safetensors", where, text(json(name)));
    return *dtype;
  }
  Shape shape(const json& object, std::string_view where) const {
    const json& dims = array(object, "shape", where);
    if (dims.size() > Shape::kMaxDims) {
      fail("{}: {} dimensions, expected at most {}", where, dims.size(), Shape::kMaxDims);
    }
    Shape shape;
    int64_t product = 1;
    for (const json& dim : dims) {
      const int64_t size = json_size(dim);
      if (size < 0) fail("{}: size {} in its shape, expected an integer >= 0", where, text(dim));
      // Bytes are counted as well, so that nothing overflows later.
      if (size != 0 && __builtin_mul_overflow(product, size, &product)) product = INT64_MAX;
      if (product > INT64_MAX / 16) fail("{}: its shape overflows, expected fewer elements", where);
      shape.push_back(size);
    }
    return shape;
  }

 private:
  static std::string text(const json& value) {
    std::string dumped = value.dump(-1, ' ', false, json::error_handler_t::replace);
    constexpr size_t kMaxText = 60;
    return dumped.size() <= kMaxText ? dumped : dumped.substr(0, kMaxText) + "...";
  }
  const std::string& path_;
};

/// Empty, or why the slices (by begin) do not cover [0, numel) once.
std::string cover_error(const TensorRecord& tensor) {
  int64_t covered = 0;
  for (const SliceRecord& slice : tensor.slices) {
    if (slice.begin != covered || slice.end <= slice.begin) {
      return fmt::format("slice [{}, {}), expected one that begins at {}", slice.begin, slice.end,
                         covered);
    }
    covered = slice.end;
  }
  if (covered == tensor.shape.numel()) return "";
  return fmt::format("slices cover {} elements, expected {}", covered, tensor.shape.numel());
}

ordered_json progress_json(const Progress& p) {
  const auto optional = [](const std::optional<double>& value) {
    return value ? ordered_json(*value) : ordered_json();
  };
  return {{"step", p.step},
          {"next_sample", p.next_sample},
          {"samples_per_step", p.samples_per_step},
          {"tokens", p.tokens},
          {"num_skipped", p.num_skipped},
          {"lr", p.lr},
          {"val_loss", optional(p.val_loss)},
          {"best_val_loss", optional(p.best_val_loss)},
          {"seed", p.seed},
          {"data_id", p.data_id},
          {"data_content", p.data_content},
          {"val_id", p.val_id},
          {"val_content", p.val_content},
          {"config", p.config}};
}

Progress parse_progress(const Reader& in, const json& object) {
  constexpr std::string_view where = "progress";
  Progress p;
  p.step = in.count(object, "step", where, kMaxCount);
  p.next_sample = in.count(object, "next_sample", where, kMaxCount);
  p.samples_per_step = in.count(object, "samples_per_step", where, kMaxCount);
  p.tokens = in.count(object, "tokens", where, kMaxTokens);
  p.num_skipped = in.count(object, "num_skipped", where, kMaxCount);
  p.lr = in.number(object, "lr", where).value_or(0);
  p.val_loss = in.number(object, "val_loss", where);
  p.best_val_loss = in.number(object, "best_val_loss", where);
  p.seed = static_cast<uint64_t>(in.size(object, "seed", where));
  p.data_id = in.string(object, "data_id", where);
  for (auto [key, text] : {std::pair{"data_content", &p.data_content},
                           {"val_id", &p.val_id},
                           {"val_content", &p.val_content}}) {
    if (object.contains(key)) *text = in.string(object, key, where);  // not always written
  }
  p.config = in.string(object, "config", where);
  return p;
}

/// A name that stays inside the checkpoint's directory.
bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

/// An object without the elements of the long arrays in it, whose texts go to `arrays`.
json parse_but_for(std::initializer_list<std::string_view> names, std::string_view text,
                   std::map<std::string, std::string_view, std::less<>>& arrays) {
  json object = json::object();
  const bool is_object =
      for_each_member(text, [&](const std::string& name, std::string_view value) {
        const bool is_long =
            std::find(names.begin(), names.end(), name) != names.end() && value.starts_with('[');
        object[name] = is_long ? json::array() : json::parse(value);
        if (is_long) arrays[name] = value;
      });
  return is_object ? object : json::parse(text);
}

TensorRecord parse_tensor(const Reader& in, std::string_view text, const Manifest& manifest) {
  TensorRecord tensor;
  std::map<std::string, std::string_view, std::less<>> arrays;
  const json object = parse_but_for({"slices"}, text, arrays);
  tensor.name = in.string(object, "name", "tensors");
  const std::string where = "tensor " + shorten(tensor.name);
  tensor.dtype = in.dtype(object, where);
  tensor.shape = in.shape(object, where);
  in.array(object, "slices", where);
  for_each_element(arrays["slices"], [&](std::string_view element) {
    const json item = json::parse(element);
    SliceRecord slice;
    slice.file = in.size(item, "file", where);
    slice.begin = in.size(item, "begin", where);
    slice.end = in.size(item, "end", where);
    slice.hash = in.hash(item, where);
    if (slice.file >= static_cast<int64_t>(manifest.files.size())) {
      in.fail("{}: file {}, expected less than {}", where, slice.file, manifest.files.size());
    }
    tensor.slices.push_back(slice);
  });
  if (const std::string error = cover_error(tensor); !error.empty())
    in.fail("{}: {}", where, error);
  return tensor;
}

/// The bytes that the slices of each file take, against its size: nobody makes room for a tensor
/// that no file can hold.
void check_file_sizes(const Reader& in, const Manifest& manifest) {
  std::vector<int64_t> left;
  for (const FileRecord& file : manifest.files) left.push_back(file.nbytes);
  for (const TensorRecord& tensor : manifest.tensors) {
    for (const SliceRecord& slice : tensor.slices) {
      const auto nbytes = (slice.end - slice.begin) * static_cast<int64_t>(size_of(tensor.dtype));
      if ((left[static_cast<size_t>(slice.file)] -= nbytes) >= 0) continue;
      const FileRecord& file = manifest.files[static_cast<size_t>(slice.file)];
      in.fail("file {}: {} bytes, expected more for its slices up to that of tensor {}",
              shorten(file.name), file.nbytes, shorten(tensor.name));
    }
  }
}

/// Whether the text has its hash at the end. CheckpointError if it has another one.
bool is_sealed(const Reader& in, std::string_view text) {
  constexpr size_t kNbytes = kSealBegin.size() + kNumHexDigits + kSealEnd.size();
  if (text.size() < kNbytes || !text.ends_with(kSealEnd)) return false;
  const std::string_view body = text.substr(0, text.size() - kNbytes);
  const std::string_view seal = text.substr(body.size(), kSealBegin.size() + kNumHexDigits);
  if (!seal.starts_with(kSealBegin)) return false;
  if (seal.substr(kSealBegin.size()) == hex(hash_of(body.data(), std::ssize(body)))) return true;
  in.fail("its bytes do not have the xxh64 that it ends with, expected them as they were written");
}

/// Takes the keys of the outer object up to the run.
class HeadParser : public json::json_sax_t {
 public:
  std::optional<ManifestHead> head;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t value) override {
    if (depth_ == 1 && key_ == "sequence" && value <= uint64_t{kMaxCount}) {
      found_.sequence = static_cast<int64_t>(value);
    }
    return true;
  }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t& value) override {
    if (depth_ != 1 || key_ != "run") return true;
    found_.run = value;
    head = found_;
    return false;  // the rest may be long
  }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return ++depth_ <= kMaxDepth; }
  bool end_object() override { return --depth_ > 0; }
  bool start_array(size_t) override { return false; }
  bool end_array() override { return false; }
  bool key(string_t& name) override {
    if (depth_ == 1) key_ = name;
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  ManifestHead found_;
  std::string key_;
  int depth_ = 0;
};

}  // namespace

bool is_same_validation(const Progress& a, const Progress& b) {
  const auto differ = [](const std::string& x, const std::string& y) {
    return !x.empty() && !y.empty() && x != y;
  };
  return !differ(a.val_id, b.val_id) && !differ(a.val_content, b.val_content);
}

std::optional<ManifestHead> parse_manifest_head(std::string_view text) {
  HeadParser parser;
  json::sax_parse(text.begin(), text.end(), &parser);
  return parser.head;
}

const TensorRecord* Manifest::find(std::string_view name) const {
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const TensorRecord& tensor, std::string_view value) { return tensor.name < value; });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

int64_t Manifest::nbytes() const {
  int64_t total = 0;
  for (const FileRecord& file : files) total += file.nbytes;
  return total;
}

std::string to_json(const RankRecord& record) {
  ordered_json slices = ordered_json::array();
  for (const RankRecord::Slice& s : record.slices) {
    slices.push_back({{"tensor", s.tensor},
                      {"dtype", safetensors_name(s.dtype)},
                      {"shape", shape_json(s.shape)},
                      {"begin", s.begin},
                      {"end", s.end},
                      {"xxh64", hex(s.hash)}});
  }
  return ordered_json{{"name", record.file.name},
                      {"nbytes", record.file.nbytes},
                      {"xxh64", hex(record.file.hash)},
                      {"slices", std::move(slices)}}
      .dump();
}

RankRecord rank_record_from_json(std::string_view text) {
  const std::string what = "checkpoint record";
  const Reader in(what);
  const json object = parse_strict_json(what, text, kMaxDepth, "that of a rank");
  RankRecord record;
  record.file = {in.string(object, "name", what), in.size(object, "nbytes", what),
                 in.hash(object, what)};
  for (const json& item : in.array(object, "slices", what)) {
    record.slices.push_back({in.string(item, "tensor", what), in.dtype(item, what),
                             in.shape(item, what), in.size(item, "begin", what),
                             in.size(item, "end", what), in.hash(item, what)});
  }
  return record;
}

void add_records(Manifest& manifest, const std::vector<RankRecord>& records) {
  std::map<std::string, TensorRecord> tensors;
  for (const RankRecord& record : records) {
    const auto file = static_cast<int64_t>(manifest.files.size());
    manifest.files.push_back(record.file);
    for (const RankRecord::Slice& s : record.slices) {
      TensorRecord& tensor = tensors[s.tensor];
      if (tensor.slices.empty()) {
        tensor.name = s.tensor;
        tensor.dtype = s.dtype;
        tensor.shape = s.shape;
      }
      tensor.slices.push_back({file, s.begin, s.end, s.hash});
    }
  }
  for (auto& [name, tensor] : tensors) {
    std::sort(tensor.slices.begin(), tensor.slices.end(),
              [](const SliceRecord& a, const SliceRecord& b) { return a.begin < b.begin; });
    const std::string error = cover_error(tensor);
    TESSERA_CHECK_AS(InternalError, error.empty(), "checkpoint: tensor {}: {}", name, error);
    manifest.tensors.push_back(std::move(tensor));
  }
}

std::string to_json(const Manifest& manifest) {
  ordered_json files = ordered_json::array(), tensors = ordered_json::array();
  for (const FileRecord& file : manifest.files) {
    files.push_back({{"name", file.name}, {"nbytes", file.nbytes}, {"xxh64", hex(file.hash)}});
  }
  for (const TensorRecord& tensor : manifest.tensors) {
    ordered_json slices = ordered_json::array();
    for (const SliceRecord& s : tensor.slices) {
      slices.push_back(
          {{"file", s.file}, {"begin", s.begin}, {"end", s.end}, {"xxh64", hex(s.hash)}});
    }
    tensors.push_back({{"name", tensor.name},
                       {"dtype", safetensors_name(tensor.dtype)},
                       {"shape", shape_json(tensor.shape)},
                       {"slices", std::move(slices)}});
  }
  const ordered_json object = {{"format", kCheckpointFormat},
                               {"version", kFormatVersion},
                               {"project_version", manifest.project_version},
                               {"sequence", manifest.sequence},
                               {"run", manifest.run},
                               {"world_size", manifest.world_size},
                               {"progress", progress_json(manifest.progress)},
                               {"files", std::move(files)},
                               {"tensors", std::move(tensors)}};
  std::string text = object.dump(1);
  text.resize(text.size() - 2);  // the end of the object, which comes after its hash
  return fmt::format("{}{}{}{}", text, kSealBegin, hex(hash_of(text.data(), std::ssize(text))),
                     kSealEnd);
}

Manifest parse_manifest(const std::string& path, std::string_view text) {
  const Reader in(path);
  const bool has_hash = is_sealed(in, text);
  try {
    check_strict_json(path + ": manifest", text, {.max_depth = kMaxDepth}, "that of a checkpoint");
  } catch (const InputError& error) {
    throw CheckpointError(error.what());
  }
  std::map<std::string, std::string_view, std::less<>> arrays;
  const json object = parse_but_for({"files", "tensors"}, text, arrays);
  constexpr std::string_view where = "manifest";
  if (const std::string format = in.string(object, "format", where); format != kCheckpointFormat) {
    in.fail_unreadable("format \"{}\", expected \"{}\"", shorten(format), kCheckpointFormat);
  }
  const int64_t version = in.size(object, "version", where);
  if (version < 1 || version > kFormatVersion) {
    in.fail_unreadable("format version {}, expected at most {}", version, kFormatVersion);
  }
  if (version > 1 && !has_hash) {
    in.fail("no xxh64 at its end, expected that of all before it (format version {})", version);
  }
  Manifest manifest;
  manifest.project_version = in.string(object, "project_version", where);
  if (version > 1) manifest.sequence = in.count(object, "sequence", where, kMaxCount);
  manifest.run = in.string(object, "run", where);
  manifest.world_size = in.size(object, "world_size", where);
  manifest.progress = parse_progress(in, in.member(object, "progress", where));
  std::set<std::string> names;
  in.array(object, "files", where);
  for_each_element(arrays["files"], [&](std::string_view element) {
    const json item = json::parse(element);
    FileRecord file{in.string(item, "name", "files"), in.size(item, "nbytes", "files"),
                    in.hash(item, "files")};
    if (!is_plain_file_name(file.name) || !names.insert(file.name).second) {
      in.fail("file {}, expected a name of its own inside the directory", shorten(file.name));
    }
    manifest.files.push_back(std::move(file));
  });
  if (manifest.world_size != std::ssize(manifest.files)) {
    in.fail("{} files of world_size = {}, expected one of each rank", manifest.files.size(),
            manifest.world_size);
  }
  in.array(object, "tensors", where);
  for_each_element(arrays["tensors"], [&](std::string_view element) {
    manifest.tensors.push_back(parse_tensor(in, element, manifest));
    const size_t count = manifest.tensors.size();
    if (count > 1 && manifest.tensors[count - 2].name >= manifest.tensors[count - 1].name) {
      in.fail("tensor {} after {}, expected each once in alphabetical order",
              shorten(manifest.tensors[count - 1].name), shorten(manifest.tensors[count - 2].name));
    }
  });
  check_file_sizes(in, manifest);
  return manifest;
}

std::string step_directory_name(int64_t step) {
  return fmt::format("step-{:08}", step);
}
std::string rank_file_name(int64_t rank) {
  return fmt::format("rank-{:05}.safetensors", rank);
}
bool is_checkpoint_file_name(std::string_view name) {
  constexpr std::string_view kTemporary = ".tmp", kBegin = "rank-", kEnd = ".safetensors";
  if (name.ends_with(kTemporary)) name.remove_suffix(kTemporary.size());
  if (name == kManifestName) return true;
  if (!name.starts_with(kBegin) || !name.ends_with(kEnd)) return false;
  const std::string_view digits =
      name.substr(kBegin.size(), name.size() - kBegin.size() - kEnd.size());
  return digits.size() >= 5 && digits.find_first_not_of("0123456789") == std::string_view::npos;
}
std::string slice_name(std::string_view tensor, int64_t begin, int64_t end) {
  return fmt::format("{}[{}:{}]", tensor, begin, end);
}

Hasher::Hasher() : state_(XXH64_createState()) {
  XXH64_reset(state_, 0);
}
Hasher::~Hasher() {
  XXH64_freeState(state_);
}
void Hasher::update(const void* data, int64_t nbytes) {
  XXH64_update(state_, data, static_cast<size_t>(nbytes));
}
uint64_t Hasher::digest() const {
  return XXH64_digest(state_);
}
uint64_t hash_of(const void* data, int64_t nbytes) {
  return XXH64(data, static_cast<size_t>(nbytes), 0);
}

}  // namespace tessera::dist
