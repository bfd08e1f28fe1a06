#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/formats/parameters.h"
#include "core/formats/safetensors.h"
#include "dist/checkpoint/hf_tensors.h"
#include "nn/hf/peft.h"

// Adapters in the form of Hugging Face's peft: a directory with adapter_config.json and
// adapter_model.safetensors.

namespace tessera::dist {

/// The adapters in a directory, and what they were trained with whole. Their tensors are those of a
/// model once it has been given:
///   PeftReader reader(dir);
///   nn::add_lora(model, reader.options());
///   reader.attach(model);
class PeftReader final : public ParameterSource {
 public:
  /// InputError for a file that is missing or cannot be used (nn::parse_peft_config).
  explicit PeftReader(const std::string& dir);

  static constexpr const char* kConfigName = "adapter_config.json";
  static constexpr const char* kTensorsName = "adapter_model.safetensors";

  const nn::LoraOptions& options() const { return options_; }
  /// InputError that lists a few of the tensors that are missing, unexpected or of another shape: of
  /// another base, or other options.
  void attach(nn::Module& model);

  const std::string& path() const override { return dir_; }
  std::vector<std::string> names() const override;  ///< none before `attach`
  Shape shape_of(std::string_view name) const override;

 private:
  void do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const override;

  std::string dir_;
  nn::LoraOptions options_;
  std::unique_ptr<SafetensorsFile> file_;
  HfTensors tensors_;
  std::map<std::string, nn::HfParameter, std::less<>> parameters_;
};

/// How adapters of peft are written.
struct PeftWriteOptions {
  nn::LoraOptions lora;
  std::string base = {};                          ///< where peft is to find the base model
  DType dtype = kF32;                             ///< f32 | bf16 | f16
  std::map<std::string, std::string> files = {};  ///< further ones by name: a tokenizer's
};

/// Writes the adapters of a model that `add_lora` made (it may be without bytes) from their values in
/// `source`, one in memory at a time.
/// Errors   ConfigError as ExportDirectory, or for a model that transformers has no names for; IoError
void write_peft(const std::string& dir, nn::Module& model, const ParameterSource& source,
                const PeftWriteOptions& options);

/// A model without its adapters, whose products are in the weights:
///   W + scale B A, in f32
/// Of a model that `add_lora` made (it may be without bytes), with values in `source`. Both outlive it.
class MergedSource final : public ParameterSource {
 public:
  MergedSource(const ParameterSource& source, nn::Module& model);

  const std::string& path() const override { return source_.path(); }
  std::vector<std::string> names() const override;
  Shape shape_of(std::string_view name) const override { return source_.shape_of(name); }

 private:
  void do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const override;

  const ParameterSource& source_;
  std::map<std::string, const nn::Linear*, std::less<>> adapted_;  // by the weight's name
  std::vector<std::string> names_;
};

}  // namespace tessera::dist
