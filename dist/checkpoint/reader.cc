#include "dist/checkpoint/reader.h"

#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>

#include "core/check.h"
#include "core/files.h"
#include "core/formats/durable_file.h"
#include "core/text.h"
#include "kernels/nf4/kernel.h"
#include "kernels/nf4/nf4.h"

namespace tessera::dist {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStepPrefix = "step-";

std::string with(std::string_view prefix, std::string_view name) {
  return std::string(prefix) + std::string(name);
}

std::string parameter_tensor(std::string_view name) {
  return with(kParametersPrefix, name);
}

/// The step of a directory's name, or -1.
int64_t step_of(const std::string& name) {
  if (!std::string_view(name).starts_with(kStepPrefix)) return -1;
  int64_t step = -1;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kStepPrefix.size(), end, step);
  return error == std::errc() && stop == end && step >= 0 ? step : -1;
}

std::vector<CheckpointPlace> list_steps(const std::string& dir, bool is_complete) {
  std::vector<CheckpointPlace> places;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    const bool is_partial = name.ends_with(kPartialSuffix);
    if (is_partial) name.resize(name.size() - kPartialSuffix.size());
    const int64_t step = step_of(name);
    std::error_code ignored;
    if (step < 0 || !it->is_directory(ignored)) continue;
    const bool has_manifest = fs::exists(it->path() / kManifestName, ignored);
    if ((has_manifest && !is_partial) == is_complete) places.push_back({step, it->path().string()});
  }
  std::sort(places.begin(), places.end(),
            [](const CheckpointPlace& a, const CheckpointPlace& b) { return a.step > b.step; });
  return places;
}

/// The place of a checkpoint in the order of saves. One that does not say comes first, so that
/// whoever looks for the newest finds out why.
int64_t sequence_of(const std::string& dir) {
  try {
    const MappedFile file(dir + "/" + kManifestName);
    if (const auto head = parse_manifest_head(file.text())) return head->sequence;
  } catch (const InputError&) {  // said by who opens it
  }
  return INT64_MAX;
}

/// The run that a rank's file says it is of, also if it is not complete; empty if it does not.
std::string run_of_file(const std::string& path) {
  try {
    const auto metadata = read_safetensors_metadata(path);
    const auto run = metadata.find("run");
    return run == metadata.end() ? "" : run->second;
  } catch (const InputError&) {
    return "";
  }
}

}  // namespace

/// A mapped file with its entries by name.
struct CheckpointReader::OpenFile {
  explicit OpenFile(std::unique_ptr<MappedFile> mapped) : file(std::move(mapped)) {
    for (const SafetensorsEntry& entry : file.entries()) entries.emplace(entry.name, &entry);
  }
  SafetensorsFile file;
  std::unordered_map<std::string_view, const SafetensorsEntry*> entries;
};

CheckpointReader::CheckpointReader(std::string dir) : dir_(std::move(dir)) {
  const std::string path = dir_ + "/" + kManifestName;
  try {
    const MappedFile file(path);
    manifest_ = parse_manifest(path, file.text());
    file.check();
  } catch (const InputError& error) {
    throw UnreadableCheckpointError(error.what());
  }
  const int64_t step = step_of(fs::path(dir_).filename().string());
  if (step >= 0 && step != manifest_.progress.step) {
    throw UnreadableCheckpointError(
        fmt::format("{}: manifest of step {} (run {}), expected step {}", path,
                    manifest_.progress.step, manifest_.run, step));
  }
}

CheckpointReader::~CheckpointReader() = default;

void CheckpointReader::fail(int64_t file, const std::string& what) const {
  throw CheckpointError(
      fmt::format("{}/{}: {}", dir_, manifest_.files[static_cast<size_t>(file)].name, what));
}

const CheckpointReader::OpenFile& CheckpointReader::open(int64_t file) const {
  std::unique_ptr<OpenFile>& open = open_[file];
  if (open != nullptr) return *open;
  const FileRecord& record = manifest_.files[static_cast<size_t>(file)];
  std::unique_ptr<MappedFile> mapped;
  try {
    mapped = std::make_unique<MappedFile>(dir_ + "/" + record.name);
  } catch (const InputError& error) {
    throw UnreadableCheckpointError(error.what());
  }
  try {
    open = std::make_unique<OpenFile>(std::move(mapped));
  } catch (const InputError& error) {
    throw CheckpointError(error.what());
  }
  const auto& metadata = open->file.metadata();
  const auto value = [&](const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? "none" : found->second;
  };
  const std::string step = std::to_string(manifest_.progress.step);
  if (value("run") != manifest_.run || value("step") != step) {
    fail(file,
         fmt::format("of run {}, step {}, expected run {}, step {} as in the manifest",
                     shorten(value("run")), shorten(value("step")), shorten(manifest_.run), step));
  }
  return *open;
}

void CheckpointReader::check_sizes() const {
  for (size_t i = 0; i < manifest_.files.size(); ++i) {
    const FileRecord& record = manifest_.files[i];
    struct stat status {};
    if (::stat((dir_ + "/" + record.name).c_str(), &status) != 0) {
      throw UnreadableCheckpointError(fmt::format("{}/{}: {}, expected a file of {} bytes", dir_,
                                                  record.name, std::strerror(errno),
                                                  record.nbytes));
    }
    if (!S_ISREG(status.st_mode)) {
      throw UnreadableCheckpointError(fmt::format(
          "{}/{}: no regular file, expected one of {} bytes", dir_, record.name, record.nbytes));
    }
    if (status.st_size != record.nbytes) {
      fail(static_cast<int64_t>(i),
           fmt::format("{} bytes, expected {} as in the manifest", status.st_size, record.nbytes));
    }
  }
}

const void* CheckpointReader::slice_data(const TensorRecord& tensor,
                                         const SliceRecord& slice) const {
  const OpenFile& file = open(slice.file);
  const std::string name = slice_name(tensor.name, slice.begin, slice.end);
  const auto found = file.entries.find(name);
  if (found == file.entries.end())
    fail(slice.file, fmt::format("no tensor {}, expected it", shorten(name)));
  const SafetensorsEntry& entry = *found->second;
  const Shape expected{slice.end - slice.begin};
  if (entry.dtype != tensor.dtype || entry.shape != expected) {
    fail(slice.file, fmt::format("tensor {} is {} {}, expected {} {}", shorten(name), entry.dtype,
                                 entry.shape, tensor.dtype, expected));
  }
  return file.file.data(entry);
}

/// What was read of an open file is what is in it.
void CheckpointReader::check_reads(int64_t file) const {
  try {
    open(file).file.check();
  } catch (const InputError& error) {
    throw UnreadableCheckpointError(error.what());
  }
}

void CheckpointReader::check_file(int64_t file) const {
  const FileRecord& record = manifest_.files[static_cast<size_t>(file)];
  const std::string_view bytes = open(file).file.text();
  const uint64_t hash = hash_of(bytes.data(), static_cast<int64_t>(bytes.size()));
  check_reads(file);
  if (hash == record.hash) return;
  for (const TensorRecord& tensor : manifest_.tensors) {
    for (const SliceRecord& slice : tensor.slices) {
      if (slice.file != file) continue;
      const int64_t nbytes =
          (slice.end - slice.begin) * static_cast<int64_t>(size_of(tensor.dtype));
      if (hash_of(slice_data(tensor, slice), nbytes) != slice.hash) {
        fail(file, fmt::format("tensor {}: its bytes do not have the manifest's xxh64, expected "
                               "them as they were written",
                               shorten(slice_name(tensor.name, slice.begin, slice.end))));
      }
    }
  }
  fail(file, "its header does not have the manifest's xxh64, expected it as it was written");
}

void CheckpointReader::check_files(int64_t first, int64_t stride) const {
  for (int64_t i = first; i < static_cast<int64_t>(manifest_.files.size()); i += stride) {
    check_file(i);
  }
}

/// Calls f(data, numel) with the bytes of elements [begin, end) as they lie in the files.
template <class F>
void CheckpointReader::for_each_run(const TensorRecord& tensor, int64_t begin, int64_t end,
                                    const F& f) const {
  const auto nbytes_each = static_cast<int64_t>(size_of(tensor.dtype));
  auto slice =
      std::upper_bound(tensor.slices.begin(), tensor.slices.end(), begin,
                       [](int64_t element, const SliceRecord& s) { return element < s.end; });
  for (; begin < end; ++slice) {
    const int64_t to = std::min(end, slice->end);
    const char* data = static_cast<const char*>(slice_data(tensor, *slice));
    f(data + (begin - slice->begin) * nbytes_each, to - begin);
    num_bytes_read_ += (to - begin) * nbytes_each;
    begin = to;
    const auto after = slice + 1;
    if (begin == end || after->file != slice->file) check_reads(slice->file);
  }
}

void CheckpointReader::read_tensor(std::string_view name, int64_t begin, int64_t end,
                                   void* dst) const {
  const TensorRecord* tensor = manifest_.find(name);
  if (tensor == nullptr) {
    throw CheckpointError(fmt::format("{}: no tensor {}, expected it", dir_, shorten(name)));
  }
  TESSERA_CHECK(0 <= begin && begin <= end && end <= tensor->shape.numel(),
                "CheckpointReader: elements [{}, {}) of {} with {}", begin, end, name,
                tensor->shape.numel());
  char* next = static_cast<char*>(dst);
  for_each_run(*tensor, begin, end, [&](const char* data, int64_t numel) {
    const size_t nbytes = static_cast<size_t>(numel) * size_of(tensor->dtype);
    std::memcpy(next, data, nbytes);
    next += nbytes;
  });
}

std::vector<std::string> CheckpointReader::names() const {
  std::vector<std::string> names;
  for (const TensorRecord& tensor : manifest_.tensors) {
    for (const std::string_view prefix : {kParametersPrefix, kCodesPrefix}) {
      if (tensor.name.starts_with(prefix)) names.push_back(tensor.name.substr(prefix.size()));
    }
  }
  return names;
}

Shape CheckpointReader::shape_of(std::string_view name) const {
  if (is_coded(name)) return shape_of_codes(name);
  const TensorRecord* tensor = manifest_.find(parameter_tensor(name));
  TESSERA_CHECK_AS(InputError, tensor != nullptr, "{}: no tensor {}, expected it", dir_,
                   shorten(name));
  const DType dtype = tensor->dtype;
  TESSERA_CHECK_AS(CheckpointError, dtype == kF32 || dtype == kBF16 || dtype == kF16,
                   "{}: tensor {} is {}, expected f32, bf16 or f16", dir_, shorten(name), dtype);
  return tensor->shape;
}

void CheckpointReader::do_read(std::string_view name, int64_t begin, int64_t end,
                               float* dst) const {
  if (is_coded(name)) return read_codes(name, begin, end, dst);
  const TensorRecord& tensor = *manifest_.find(parameter_tensor(name));
  for_each_run(tensor, begin, end, [&](const char* data, int64_t numel) {
    load_floats(dst, data, tensor.dtype, numel);
    dst += numel;
  });
}

// ---- parameters kept as codes

bool CheckpointReader::is_coded(std::string_view name) const {
  return manifest_.find(with(kCodesPrefix, name)) != nullptr;
}

/// What its records, scales and shape say, which must be of one size.
Shape CheckpointReader::shape_of_codes(std::string_view name) const {
  const auto fail = [&](std::string_view prefix, const std::string& found,
                        const std::string& expected) {
    throw CheckpointError(fmt::format("{}: tensor {} is {}, expected {}", dir_,
                                      shorten(with(prefix, name)), found, expected));
  };
  const auto check = [&](std::string_view prefix, DType dtype, int64_t numel) {
    const TensorRecord* tensor = manifest_.find(with(prefix, name));
    const std::string expected = fmt::format("{} [{}]", dtype, numel);
    if (tensor == nullptr) return fail(prefix, "missing", expected);
    if (tensor->dtype == dtype && tensor->shape == Shape{numel}) return;
    fail(prefix, fmt::format("{} {}", tensor->dtype, tensor->shape), expected);
  };
  const TensorRecord* shape = manifest_.find(with(kCodesShapePrefix, name));
  const int64_t num_dims = shape == nullptr ? 1 : shape->shape.numel();
  check(kCodesShapePrefix, kI64, std::min<int64_t>(num_dims, Shape::kMaxDims));
  std::vector<int64_t> dims(static_cast<size_t>(num_dims));
  read_tensor(with(kCodesShapePrefix, name), 0, num_dims, dims.data());
  int64_t numel = 1;
  for (const int64_t dim : dims) {
    const bool fits =
        dim >= 0 && !__builtin_mul_overflow(numel, dim, &numel) && numel <= int64_t{1} << 48;
    if (!fits) fail(kCodesShapePrefix, fmt::format("[{}]", fmt::join(dims, ", ")), "a shape");
  }
  check(kCodesPrefix, kU8, nf4_nbytes(numel));
  check(kScalesPrefix, kF32, nf4_num_scales(numel));
  return Shape(dims);
}

void CheckpointReader::read_codes(std::string_view name, int64_t begin, int64_t end,
                                  float* dst) const {
  constexpr int64_t kRecordsAtOnce = 256;
  constexpr int64_t kNumAtOnce = kRecordsAtOnce * kNf4Record;
  const int64_t nbytes = manifest_.find(with(kCodesPrefix, name))->shape.numel();
  std::vector<uint8_t> records(kRecordsAtOnce * kNf4RecordNbytes);
  std::vector<float> values(kNumAtOnce);
  // The mean, and the nested scales of what is read at once: at most 5 of 16,384 values.
  float scales[8];
  constexpr int64_t kNested = 16384;
  for (int64_t at = begin / kNf4Record * kNf4Record; at < end; at += kNumAtOnce) {
    const int64_t first = nf4_nbytes(at);
    const int64_t last = std::min(nbytes, first + std::ssize(records));
    read_tensor(with(kCodesPrefix, name), first, last, records.data());
    const int64_t count = std::min(kNumAtOnce, end - at);
    const int64_t nested = at / kNested, last_nested = (at + count - 1) / kNested;
    read_tensor(with(kScalesPrefix, name), 0, 1, scales);
    read_tensor(with(kScalesPrefix, name), 1 + nested, 2 + last_nested, scales + 1);
    kernels::cpu::nf4_dequantize({.values = values.data(),
                                  .records = records.data(),
                                  .nested = scales + 1,
                                  .mean = scales,
                                  .map = nullptr,
                                  .dtype = kF32,
                                  .first_record = at % kNested / kNf4Record,
                                  .numel = count});
    const int64_t from = std::max(begin, at);
    std::copy(values.begin() + (from - at), values.begin() + count, dst + (from - begin));
  }
}

std::vector<CheckpointPlace> list_checkpoints(const std::string& dir) {
  std::vector<CheckpointPlace> places = list_steps(dir, true);
  std::vector<std::pair<int64_t, CheckpointPlace>> ranked;
  for (CheckpointPlace& place : places) {
    const int64_t sequence = places.size() > 1 ? sequence_of(place.dir) : 0;
    ranked.emplace_back(sequence, std::move(place));
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  places.clear();
  for (auto& [sequence, place] : ranked) places.push_back(std::move(place));
  return places;
}
std::vector<CheckpointPlace> list_incomplete(const std::string& dir) {
  return list_steps(dir, false);
}

std::string resolve_checkpoint(const std::string& path) {
  std::error_code ignored;
  if (fs::exists(fs::path(path) / kManifestName, ignored)) {
    return fs::path(path).has_filename() ? path : fs::path(path).parent_path().string();
  }
  fs::path dir(path);
  if (dir.filename() == "latest" && !fs::exists(dir, ignored)) dir = dir.parent_path();
  const auto places = list_checkpoints(dir.empty() ? "." : dir.string());
  if (places.empty()) {
    throw CheckpointError(fmt::format(
        "{}: no complete checkpoint, expected step directories with a {}", path, kManifestName));
  }
  return places.front().dir;
}

bool is_checkpoint_of(const std::string& path, const std::string& run) {
  const fs::path dir(path);
  std::error_code ignored;
  if (fs::symlink_status(dir, ignored).type() != fs::file_type::directory) return false;
  if (fs::symlink_status(dir / kManifestName, ignored).type() != fs::file_type::not_found) {
    try {
      return CheckpointReader(path).manifest().run == run;
    } catch (const CheckpointError&) {
      return false;
    }
  }
  for (fs::directory_iterator it(dir, ignored), end; it != end; it.increment(ignored)) {
    if (!is_checkpoint_file_name(it->path().filename().string())) continue;
    const std::string owner = run_of_file(it->path().string());
    if (!owner.empty()) return owner == run;
  }
  return path.ends_with(kPartialSuffix);  // a name that nobody else gives
}

bool remove_checkpoint(const std::string& dir, const std::string& run) {
  if (!is_checkpoint_of(dir, run)) return false;
  std::error_code error;
  if (fs::remove(fs::path(dir) / kManifestName, error)) sync_directory(dir);
  std::vector<fs::path> ours;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const bool is_file = it->symlink_status().type() == fs::file_type::regular;
    if (!is_file || !is_checkpoint_file_name(it->path().filename().string())) continue;
    const std::string owner = run_of_file(it->path().string());
    if (owner.empty() || owner == run) ours.push_back(it->path());  // half of a header says nothing
  }
  for (size_t i = 0; !error && i < ours.size(); ++i) fs::remove(ours[i], error);
  if (error) throw IoError(fmt::format("{}: cannot be removed: {}", dir, error.message()));
  return ::rmdir(dir.c_str()) == 0;  // unless others have put something there
}

std::string set_checkpoint_aside(const std::string& dir) {
  for (int k = 1;; ++k) {
    const std::string aside = dir + ".damaged" + (k == 1 ? "" : fmt::format("-{}", k));
    struct stat status {};
    if (::lstat(aside.c_str(), &status) == 0) continue;
    if (::rename(dir.c_str(), aside.c_str()) != 0) {
      throw IoError(
          fmt::format("{}: cannot be renamed to {}: {}", dir, aside, std::strerror(errno)));
    }
    return aside;
  }
}

}  // namespace tessera::dist
