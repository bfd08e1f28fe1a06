#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/dtype.h"
#include "core/formats/tensor_file.h"
#include "core/shape.h"

// GGUF, version 3, the form of models that llama.cpp and its relatives read: "GGUF", the version, the
// numbers of tensors and of fields; the fields (key, type, value), the tensors (name, sizes from the
// innermost on, type, offset), all little endian; then the tensors, each at a multiple of 32 bytes.
// Source: the specification in ggml, docs/gguf.md.

namespace tessera {

using GgufValue = std::variant<uint32_t, float, bool, std::string, std::vector<int32_t>,
                               std::vector<float>, std::vector<std::string>>;
/// By key, in the order of the file.
using GgufFields = std::vector<std::pair<std::string, GgufValue>>;

struct GgufEntry {
  std::string name;
  DType dtype = kF32;  ///< f32 | bf16 | f16
  Shape shape;
};

/// Writes a file as TensorFileWriter does.
class GgufWriter {
 public:
  /// Error for a tensor of another dtype, or a name of more than 64 bytes, which readers refuse.
  GgufWriter(const std::string& path, const GgufFields& fields,
             const std::vector<GgufEntry>& entries);

  void write(std::string_view name, const void* data, int64_t nbytes) {
    file_->write(name, data, nbytes);
  }
  void finish() { file_->finish(); }

 private:
  std::unique_ptr<TensorFileWriter> file_;
};

}  // namespace tessera
