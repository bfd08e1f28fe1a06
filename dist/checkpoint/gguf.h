#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "core/formats/gguf.h"
#include "core/formats/parameters.h"
#include "dist/checkpoint/export_dir.h"
#include "nn/family.h"
#include "nn/gguf.h"

// Models in the form of llama.cpp: a directory with model.gguf, which holds configuration, tokenizer and
// weights.

namespace tessera::dist {

struct GgufExportOptions {
  DType dtype = kF32;      ///< of matrices: f32 | bf16 | f16; vectors and positions are f32
  std::string name = {};   ///< general.name
  GgufFields fields = {};  ///< of the tokenizer
};

/// Writes the file tensor by tensor; it takes its place when it is complete (ExportDirectory).
class GgufExport final : public ParameterSink {
 public:
  static constexpr const char* kFileName = "model.gguf";

  /// ConfigError for a model that llama.cpp does not have, or where the directory holds something else
  /// than an earlier export; IoError if it cannot be made or written.
  GgufExport(const std::string& dir, const nn::FamilyConfig& config,
             const GgufExportOptions& options = {});
  ~GgufExport() override;

  /// ConfigError for a value that the dtype cannot hold.
  void write(std::string_view name, const Shape& shape, const float* values) override;
  void finish() override;

 private:
  DType dtype_of(const nn::HfTensor& tensor) const;

  const DType dtype_;
  nn::GgufModel model_;
  std::unordered_map<std::string_view, const nn::HfParameter*> by_name_;
  std::unique_ptr<ExportDirectory> place_;
  std::unique_ptr<GgufWriter> writer_;
};

}  // namespace tessera::dist
