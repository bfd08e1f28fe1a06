#include "core/formats/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/formats/durable_file.h"
#include "core/formats/strict_json.h"
#include "core/text.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr int64_t kMaxHeaderNbytes = 100'000'000;
constexpr int kMaxHeaderDepth = 4;
constexpr std::string_view kMetadata = "__metadata__";

struct TypeName {
  std::string_view name;
  int64_t nbytes;
  std::optional<DType> ours;
};
constexpr TypeName kTypeNames[] = {{"F32", 4, kF32},
                                   {"BF16", 2, kBF16},
                                   {"F16", 2, kF16},
                                   {"F64", 8, kF64},
                                   {"I32", 4, kI32},
                                   {"I64", 8, kI64},
                                   {"U8", 1, kU8},
                                   {"I8", 1, std::nullopt},
                                   {"I16", 2, std::nullopt},
                                   {"U16", 2, std::nullopt},
                                   {"U32", 4, std::nullopt},
                                   {"U64", 8, std::nullopt},
                                   {"BOOL", 1, std::nullopt},
                                   {"F8_E4M3", 1, std::nullopt},
                                   {"F8_E5M2", 1, std::nullopt}};

std::string all_type_names() {
  std::vector<std::string_view> names;
  for (const TypeName& type : kTypeNames) names.push_back(type.name);
  return fmt::format("{} or {}", fmt::join(names.begin(), names.end() - 1, ", "), names.back());
}

template <class... Args>
[[noreturn]] void fail_input(const std::string& path, fmt::format_string<Args...> format,
                             Args&&... args) {
  throw InputError(fmt::format("{}: {}", path, fmt::format(format, std::forward<Args>(args)...)));
}

/// What a file is that has no safetensors header, if it is something well known.
std::string_view looks_like(std::string_view text) {
  const auto begins = [&](std::string_view prefix) { return text.starts_with(prefix); };
  if (begins("GGUF")) return " (it looks like a GGUF file)";
  if (begins("PK\x03\x04")) return " (it looks like a zip archive, as PyTorch saves)";
  if (begins("\x80\x02") || begins("\x80\x04")) return " (it looks like a Python pickle)";
  if (begins("version https://git-lfs")) return " (it looks like a Git LFS pointer)";
  if (begins("<!DOCTYPE") || begins("<html")) return " (it looks like a web page)";
  return "";
}

/// Each member of the header; what it says of a tensor is parsed by itself.
void read_header(const std::string& path, std::string_view text,
                 const std::function<void(const std::string& name, std::string_view info)>& f) {
  constexpr JsonRules kRules{.max_depth = kMaxHeaderDepth, .nbytes_each_member = 32};
  check_strict_json(path + ": header", text, kRules, "a safetensors file");
  if (!for_each_member(text, f)) fail_input(path, "header is no JSON object, expected one");
}

/// The text between the length that a file begins with and the data.
std::string_view header_of(const MappedFile& file) {
  const std::string_view text = file.text();
  if (text.size() < 8) {
    fail_input(file.path(), "{} bytes, expected a safetensors file{}", text.size(),
               looks_like(text));
  }
  uint64_t nbytes = 0;
  for (size_t i = 0; i < 8; ++i) nbytes |= uint64_t{static_cast<unsigned char>(text[i])} << (8 * i);
  const uint64_t limit = std::min<uint64_t>(text.size() - 8, kMaxHeaderNbytes);
  if (nbytes > limit) {
    fail_input(file.path(), "header of {} bytes, expected at most {}{}", nbytes, limit,
               looks_like(text));
  }
  return text.substr(8, nbytes);
}

std::map<std::string, std::string> parse_metadata(const std::string& path, const json& info) {
  std::map<std::string, std::string> metadata;
  if (info.is_null()) return metadata;  // some writers' "none"
  if (!info.is_object()) {
    fail_input(path, "{}: {}, expected an object", kMetadata, json_text(info));
  }
  for (const auto& [key, value] : info.items()) {
    if (!value.is_string()) {
      fail_input(path, "metadata {}: {}, expected a string", shorten(key), json_text(value));
    }
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

std::optional<int64_t> as_size(const json& value) {
  const int64_t number = json_size(value);
  return number < 0 ? std::nullopt : std::optional(number);
}

StoredDType parse_dtype(const std::string& path, const std::string& name, const json& info) {
  const auto found = info.find("dtype");
  if (found != info.end() && found->is_string()) {
    if (const auto dtype = StoredDType::from_name(found->get_ref<const std::string&>())) {
      return *dtype;
    }
  }
  fail_input(path, "tensor {}: dtype {}, expected {}", shorten(name),
             found == info.end() ? "missing" : json_text(*found), all_type_names());
}

/// The shape and, since it may overflow, the number of bytes.
std::pair<Shape, int64_t> parse_shape(const std::string& path, const std::string& name,
                                      const json& info, StoredDType dtype) {
  const auto found = info.find("shape");
  if (found == info.end() || !found->is_array() || found->size() > Shape::kMaxDims) {
    fail_input(path, "tensor {}: no shape, expected an array of at most {} sizes", shorten(name),
               Shape::kMaxDims);
  }
  Shape shape;
  int64_t nbytes = dtype.nbytes_each();
  bool is_empty = false, overflow = false;
  for (const json& dim : *found) {
    const auto size = as_size(dim);
    if (!size)
      fail_input(path, "tensor {}: size {} in its shape, expected an integer >= 0", shorten(name),
                 json_text(dim));
    shape.push_back(*size);
    is_empty = is_empty || *size == 0;
    if (*size != 0) overflow = __builtin_mul_overflow(nbytes, *size, &nbytes) || overflow;
  }
  if (overflow)
    fail_input(path, "tensor {}: shape {} overflows, expected fewer elements", shorten(name),
               shape);
  return {shape, is_empty ? 0 : nbytes};
}

std::pair<int64_t, int64_t> parse_offsets(const std::string& path, const std::string& name,
                                          const json& info, int64_t data_nbytes) {
  const auto found = info.find("data_offsets");
  if (found != info.end() && found->is_array() && found->size() == 2) {
    const auto begin = as_size((*found)[0]), end = as_size((*found)[1]);
    if (begin && end && *begin <= *end && *end <= data_nbytes) return {*begin, *end};
  }
  fail_input(path, "tensor {}: data_offsets {}, expected [begin, end] within {} bytes of data",
             shorten(name), found == info.end() ? "missing" : json_text(*found), data_nbytes);
}

}  // namespace

StoredDType::StoredDType(DType dtype)
    : index_(static_cast<size_t>(
          std::find_if(std::begin(kTypeNames), std::end(kTypeNames),
                       [&](const TypeName& type) { return type.ours == dtype; }) -
          std::begin(kTypeNames))) {
  if (index_ == std::size(kTypeNames)) {
    TESSERA_UNIMPLEMENTED("safetensors: no name for dtype {}", dtype);
  }
}

std::optional<StoredDType> StoredDType::from_name(std::string_view name) {
  for (size_t i = 0; i < std::size(kTypeNames); ++i) {
    if (kTypeNames[i].name == name) return StoredDType(i);
  }
  return std::nullopt;
}

std::string_view StoredDType::name() const {
  return kTypeNames[index_].name;
}
std::optional<DType> StoredDType::ours() const {
  return kTypeNames[index_].ours;
}
int64_t StoredDType::nbytes_each() const {
  return kTypeNames[index_].nbytes;
}

std::string_view safetensors_name(DType dtype) {
  return StoredDType(dtype).name();
}

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  const std::optional<StoredDType> dtype = StoredDType::from_name(name);
  return dtype ? dtype->ours() : std::nullopt;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : SafetensorsFile(std::make_unique<MappedFile>(path)) {}

SafetensorsFile::SafetensorsFile(std::unique_ptr<MappedFile> mapped) : file_(std::move(mapped)) {
  const std::string& path = file_->path();
  const std::string_view header_text = header_of(*file_);
  const int64_t data_begin = 8 + std::ssize(header_text);
  const int64_t data_nbytes = file_->nbytes() - data_begin;
  struct Found {
    SafetensorsEntry entry;
    int64_t begin, end;
  };
  std::vector<Found> found;
  read_header(path, header_text, [&](const std::string& name, std::string_view text) {
    const json info = json::parse(text);
    if (name == kMetadata) {
      metadata_ = parse_metadata(path, info);
      return;
    }
    if (!info.is_object()) {
      fail_input(path, "tensor {}: {}, expected an object", shorten(name), json_text(info));
    }
    const StoredDType dtype = parse_dtype(path, name, info);
    const auto shape_nbytes = parse_shape(path, name, info, dtype);
    const auto offsets = parse_offsets(path, name, info, data_nbytes);
    if (offsets.second - offsets.first != shape_nbytes.second) {
      fail_input(path, "tensor {}: {} bytes of data, expected {} for {} {}", shorten(name),
                 offsets.second - offsets.first, shape_nbytes.second, dtype, shape_nbytes.first);
    }
    found.push_back({{name, dtype, shape_nbytes.first}, offsets.first, offsets.second});
  });
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::tie(a.begin, a.end, a.entry.name) < std::tie(b.begin, b.end, b.entry.name);
  });
  int64_t covered = 0;
  entries_.reserve(found.size());
  offsets_.reserve(found.size());
  for (Found& f : found) {
    if (f.begin != covered) {
      fail_input(path, "tensor {}: data begins at {}, expected {} ({})", shorten(f.entry.name),
                 f.begin, covered, f.begin < covered ? "it overlaps another" : "a gap");
    }
    covered = f.end;
    entries_.push_back(std::move(f.entry));
    offsets_.push_back(data_begin + f.begin);
  }
  if (covered != data_nbytes) {
    fail_input(path, "{} bytes of data, expected {} as the header says", data_nbytes, covered);
  }
  for (size_t i = 0; i < entries_.size(); ++i) by_name_.emplace(entries_[i].name, i);
  file_->check();
}

std::map<std::string, std::string> read_safetensors_metadata(const std::string& path) {
  const MappedFile file(path);
  std::map<std::string, std::string> metadata;
  read_header(path, header_of(file), [&](const std::string& name, std::string_view info) {
    if (name == kMetadata) metadata = parse_metadata(path, json::parse(info));
  });
  file.check();
  return metadata;
}

const SafetensorsEntry& SafetensorsFile::find(std::string_view name) const {
  if (const auto found = by_name_.find(name); found != by_name_.end()) {
    return entries_[found->second];
  }
  fail_input(file_->path(), "no tensor {} among {}, expected it", shorten(name), entries_.size());
}

const void* SafetensorsFile::data(const SafetensorsEntry& entry) const {
  return file_->data() + offsets_[static_cast<size_t>(&entry - entries_.data())];
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const SafetensorsEntry& entry : entries_) names.push_back(entry.name);
  return names;
}

Shape SafetensorsFile::shape_of(std::string_view name) const {
  const SafetensorsEntry& entry = find(name);
  if (entry.dtype == kF32 || entry.dtype == kBF16 || entry.dtype == kF16) return entry.shape;
  fail_input(path(), "tensor {} is {} {}, expected f32, bf16 or f16", shorten(name), entry.dtype,
             entry.shape);
}

void SafetensorsFile::do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const {
  const SafetensorsEntry& entry = find(name);
  const char* first = static_cast<const char*>(data(entry)) + begin * entry.dtype.nbytes_each();
  load_floats(dst, first, *entry.dtype.ours(), end - begin);
  check();
}

std::vector<SafetensorsEntry> f32_entries(const ParameterSource& source) {
  std::vector<SafetensorsEntry> entries;
  for (std::string& name : source.names()) {
    const Shape shape = source.shape_of(name);
    entries.push_back({std::move(name), kF32, shape});
  }
  return entries;
}

std::string safetensors_header(std::span<const SafetensorsEntry> entries,
                               const std::map<std::string, std::string>& metadata,
                               size_t alignment) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(kMetadata)] = metadata;
  std::set<std::string_view> names;
  int64_t offset = 0;
  for (const SafetensorsEntry& entry : entries) {
    TESSERA_CHECK(names.insert(entry.name).second, "safetensors: tensor {} twice", entry.name);
    // Appended without a search for the name: an ordered object looks at all keys before it.
    nlohmann::ordered_json info = {
        {"dtype", entry.dtype.name()},
        {"shape", std::vector<int64_t>(entry.shape.begin(), entry.shape.end())},
        {"data_offsets", {offset, offset + entry.nbytes()}}};
    header.get_ref<nlohmann::ordered_json::object_t&>().emplace_back(entry.name, std::move(info));
    offset += entry.nbytes();
  }
  std::string text = header.dump();
  constexpr size_t kLengthNbytes = 8;
  const size_t nbytes =
      (kLengthNbytes + text.size() + alignment - 1) / alignment * alignment - kLengthNbytes;
  text.resize(nbytes, ' ');
  std::string length;
  for (size_t i = 0; i < kLengthNbytes; ++i)
    length += static_cast<char>((text.size() >> (8 * i)) & 0xff);
  return length + text;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                                     const std::map<std::string, std::string>& metadata)
    : entries_(std::move(entries)) {
  const std::string header = safetensors_header(entries_, metadata);
  std::vector<TensorFileWriter::Entry> places;
  auto offset = static_cast<int64_t>(header.size());
  for (const SafetensorsEntry& entry : entries_) {
    places.push_back({entry.name, offset, entry.nbytes()});
    offset += entry.nbytes();
  }
  file_ =
      std::make_unique<TensorFileWriter>("safetensors", path, header, std::move(places), offset);
}

void SafetensorsWriter::write(std::string_view name, const Shape& shape, const float* values) {
  const SafetensorsEntry& entry = entries_[file_->index_of(name)];
  TESSERA_CHECK(entry.dtype == kF32 && entry.shape == shape,
                "safetensors: tensor {} of f32 {}, expected {} {}", name, shape, entry.dtype,
                entry.shape);
  file_->write(name, values, entry.nbytes());
}

}  // namespace tessera
