#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/dtype.h"
#include "core/files.h"
#include "core/formats/parameters.h"
#include "core/formats/tensor_file.h"
#include "core/shape.h"

// The safetensors format: 8 bytes of header length (little endian), a JSON header
// {"name": {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, "__metadata__": {..}},
// then the bytes of the tensors, which cover the rest of the file without gaps.

namespace tessera {

/// The element type of a tensor in a file: one of ours, or one that tensors here do not have (I8,
/// U32, F8_E4M3, ...), whose bytes can be read all the same.
class StoredDType {
 public:
  StoredDType(DType dtype);  // implicit: any of ours is one
  /// Empty for a name that is not known.
  static std::optional<StoredDType> from_name(std::string_view name);

  std::string_view name() const;      ///< of the format: "F32", "I8"
  std::optional<DType> ours() const;  ///< empty if tensors here do not have it
  int64_t nbytes_each() const;
  bool operator==(const StoredDType&) const = default;

 private:
  explicit StoredDType(size_t index) : index_(index) {}
  size_t index_;  // in the table of names
};

/// A tensor in the header of a file.
struct SafetensorsEntry {
  std::string name;
  StoredDType dtype = kF32;
  Shape shape;
  int64_t nbytes() const { return shape.numel() * dtype.nbytes_each(); }
};

/// "F32", "BF16", ... and back (empty: not a name of one of ours).
std::string_view safetensors_name(DType dtype);
std::optional<DType> dtype_from_safetensors(std::string_view name);

/// A file open for reading, memory-mapped. It trusts nothing: the constructor checks the header's
/// size, JSON (UTF-8, depth, keys given twice), dtypes, shapes, offsets against sizes, overlaps and
/// gaps, and the file's size. InputError that names file, tensor, and what was found and expected.
/// As a source it has the tensors in f32, bf16 and f16.
class SafetensorsFile final : public ParameterSource {
 public:
  explicit SafetensorsFile(const std::string& path);
  explicit SafetensorsFile(std::unique_ptr<MappedFile> file);

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  ///< in file order
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// InputError with the file's name if there is no such tensor.
  const SafetensorsEntry& find(std::string_view name) const;
  /// The bytes of `entry`, which is one of `entries()`; not aligned. They count after `check()`.
  const void* data(const SafetensorsEntry& entry) const;
  const std::string& path() const override { return file_->path(); }
  /// All bytes.
  std::string_view text() const { return file_->text(); }
  /// MappedFile::check: the bytes that were read are those of the file. InputError.
  void check() const { file_->check(); }

  std::vector<std::string> names() const override;
  Shape shape_of(std::string_view name) const override;

 private:
  void do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const override;

  std::unique_ptr<MappedFile> file_;
  std::vector<SafetensorsEntry> entries_;
  std::vector<int64_t> offsets_;  // of the bytes of each entry in the file
  std::unordered_map<std::string_view, size_t> by_name_;
  std::map<std::string, std::string> metadata_;
};

/// The metadata alone, also of a file whose data is not all there. InputError.
std::map<std::string, std::string> read_safetensors_metadata(const std::string& path);

/// What a file begins with: the length and the JSON of its tensors in their order, padded so that
/// the data after it begins at a multiple of `alignment` bytes. Error if a name comes twice.
std::string safetensors_header(std::span<const SafetensorsEntry> entries,
                               const std::map<std::string, std::string>& metadata = {},
                               size_t alignment = 8);

/// The tensors of a file that takes all parameters of `source`, in f32.
std::vector<SafetensorsEntry> f32_entries(const ParameterSource& source);

/// Writes a file as TensorFileWriter does. As a sink it takes the tensors in f32.
class SafetensorsWriter final : public ParameterSink {
 public:
  /// The file's tensors, in its order.
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                    const std::map<std::string, std::string>& metadata = {});

  /// The bytes of the next tensor of the header, which has to be `name`, or of a part of it.
  void write(std::string_view name, const void* data, int64_t nbytes) {
    file_->write(name, data, nbytes);
  }
  void write(std::string_view name, const Shape& shape, const float* values) override;
  void finish() override { file_->finish(); }

 private:
  std::vector<SafetensorsEntry> entries_;
  std::unique_ptr<TensorFileWriter> file_;
};

}  // namespace tessera

/// Ours as they are called here, the others as in the file.
template <>
struct fmt::formatter<tessera::StoredDType> : fmt::formatter<std::string_view> {
  auto format(tessera::StoredDType dtype, fmt::format_context& ctx) const {
    const auto ours = dtype.ours();
    return fmt::formatter<std::string_view>::format(ours ? name_of(*ours) : dtype.name(), ctx);
  }
};
