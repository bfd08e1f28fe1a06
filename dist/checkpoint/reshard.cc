#include "dist/checkpoint/reshard.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "core/check.h"
#include "core/dtype.h"
#include "core/formats/durable_file.h"
#include "core/formats/safetensors.h"

namespace tessera::dist {
namespace {

constexpr int64_t kBlock = 256;                      // slices begin at multiples, as shards do
constexpr int64_t kBufferNbytes = int64_t{8} << 20;  // of what is copied at once

int64_t numel_of(const SliceRecord& slice) {
  return slice.end - slice.begin;
}

/// A tensor's part of rank `rank` of `num_ranks`.
SliceRecord part_of(const TensorRecord& tensor, int64_t rank, int64_t num_ranks) {
  const int64_t numel = tensor.shape.numel();
  const int64_t blocks = (numel + kBlock - 1) / kBlock;
  const auto bound = [&](int64_t r) { return std::min(numel, blocks * r / num_ranks * kBlock); };
  return {rank, bound(rank), rank + 1 == num_ranks ? numel : bound(rank + 1), 0};
}

RankRecord write_rank(const CheckpointReader& reader, const std::string& dir, int64_t rank,
                      int64_t num_ranks) {
  struct Part {
    const TensorRecord* tensor;
    SliceRecord slice;
  };
  std::vector<Part> parts;
  for (const TensorRecord& tensor : reader.manifest().tensors) {
    const SliceRecord slice = part_of(tensor, rank, num_ranks);
    if (numel_of(slice) > 0) parts.push_back({&tensor, slice});
  }
  // Wide elements first, so that all are aligned.
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return size_of(a.tensor->dtype) > size_of(b.tensor->dtype);
  });
  std::vector<SafetensorsEntry> entries;
  RankRecord record;
  for (const Part& p : parts) {
    entries.push_back({slice_name(p.tensor->name, p.slice.begin, p.slice.end), p.tensor->dtype,
                       Shape{numel_of(p.slice)}});
    record.file.nbytes += entries.back().nbytes();
  }
  const Manifest& m = reader.manifest();
  const std::string header = safetensors_header(entries, {{"format", "tessera checkpoint"},
                                                          {"run", m.run},
                                                          {"step", std::to_string(m.progress.step)},
                                                          {"rank", std::to_string(rank)}});
  record.file.name = rank_file_name(rank);
  record.file.nbytes += static_cast<int64_t>(header.size());
  DurableFile file(dir + "/" + record.file.name, record.file.nbytes);
  Hasher whole;
  const auto write = [&](const void* data, int64_t nbytes) {
    whole.update(data, nbytes);
    file.write(data, nbytes);
  };
  write(header.data(), static_cast<int64_t>(header.size()));
  std::vector<char> buffer;
  for (const Part& p : parts) {
    const auto width = static_cast<int64_t>(size_of(p.tensor->dtype));
    Hasher hasher;
    for (int64_t begin = p.slice.begin; begin < p.slice.end;) {
      const int64_t end = std::min(p.slice.end, begin + kBufferNbytes / width);
      const int64_t nbytes = (end - begin) * width;
      buffer.resize(static_cast<size_t>(nbytes));
      reader.read_tensor(p.tensor->name, begin, end, buffer.data());
      hasher.update(buffer.data(), nbytes);
      write(buffer.data(), nbytes);
      begin = end;
    }
    record.slices.push_back({p.tensor->name, p.tensor->dtype, p.tensor->shape, p.slice.begin,
                             p.slice.end, hasher.digest()});
  }
  record.file.hash = whole.digest();
  file.commit();
  return record;
}

}  // namespace

std::string reshard_checkpoint(const CheckpointReader& reader, const std::string& out_dir,
                               int64_t num_ranks) {
  const std::string to = out_dir + "/" + step_directory_name(reader.manifest().progress.step);
  const std::string dir = to + std::string(kPartialSuffix);
  std::error_code ignored;
  for (const std::string& path : {to, dir}) {
    if (std::filesystem::symlink_status(path, ignored).type() ==
        std::filesystem::file_type::not_found) {
      continue;
    }
    throw ConfigError(
        fmt::format("{}: a checkpoint of this step is there already, expected none", path));
  }
  make_directory_durably(dir);
  Manifest manifest = reader.manifest();
  manifest.files.clear();
  manifest.tensors.clear();
  manifest.world_size = num_ranks;
  std::vector<RankRecord> records;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    records.push_back(write_rank(reader, dir, rank, num_ranks));
  }
  add_records(manifest, records);
  write_durably(dir + "/" + kManifestName, to_json(manifest));
  replace_directory(dir, to);
  return to;
}

}  // namespace tessera::dist
