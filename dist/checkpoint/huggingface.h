#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/formats/parameters.h"
#include "core/formats/safetensors.h"
#include "dist/checkpoint/export_dir.h"
#include "dist/checkpoint/hf_files.h"
#include "nn/hf/config.h"

// Models in the form of Hugging Face's transformers: a directory with config.json and
// model.safetensors, or several files and model.safetensors.index.json.

namespace tessera::dist {

/// What a directory's config.json says, as far as its tensors bear it out (HfReader); `tied` as
/// these are (HfFiles::settle_tied).
struct HfModel {
  nn::FamilyConfig config;
  nn::HfTokenIds token_ids;
};
/// `ignored_keys` of config.json are passed over. InputError as parse_hf_config and HfFiles; a
/// directory without tensors is left to HfReader.
HfModel read_hf_model(const std::string& dir, const std::vector<std::string>& ignored_keys = {});

/// A model's directory open for reading. Everything is checked when it is opened: the config, the
/// files (see HfFiles), each as SafetensorsFile does, that no more layers are told than there are
/// tensors, and that names, shapes and dtypes (f32, bf16, f16) of all tensors are those of the
/// model. InputError names the file and a few of the tensors that are missing, unexpected or of
/// another shape, with their number.
class HfReader final : public ParameterSource {
 public:
  /// With a `classifier` a model that predicts tokens is read as what one is to become: of its layers
  /// that classify, those that are not there have no parameter.
  explicit HfReader(const std::string& dir, const std::vector<std::string>& ignored_keys = {},
                    const nn::ClassifierConfig* classifier = nullptr);

  const std::string& path() const override { return dir_; }
  const nn::FamilyConfig& config() const { return config_; }
  const nn::HfTokenIds& token_ids() const { return token_ids_; }
  const std::vector<nn::HfParameter>& parameters() const { return parameters_; }

  std::vector<std::string> names() const override;
  Shape shape_of(std::string_view name) const override;

 private:
  /// InputError that names the tensor for a value that is not finite.
  void do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const override;
  HfReader(const std::string& dir, HfModel model, const nn::ClassifierConfig* classifier);
  void check_tensors();

  std::string dir_;
  nn::FamilyConfig config_;
  nn::HfTokenIds token_ids_;
  std::vector<nn::HfParameter> parameters_;
  std::unordered_map<std::string, const nn::HfParameter*> by_name_;
  std::unique_ptr<HfFiles> files_;
};

/// How a model of transformers is written.
struct HfWriteOptions {
  DType dtype = kF32;                       ///< f32 | bf16 | f16
  int64_t max_file_nbytes = 5'000'000'000;  ///< beyond it, several files and an index
  nn::HfTokenIds token_ids = {};            ///< for config.json and generation_config.json
  /// Further files by name: a tokenizer's, a generation_config.json in place of that of the ids.
  std::map<std::string, std::string> files = {};
};

/// Writes a model's directory tensor by tensor: no more than the parameter given and one tensor
/// made of it are in memory. The directory takes its place when it is complete (ExportDirectory).
class HfWriter final : public ParameterSink {
 public:
  /// ConfigError if the directory holds something else than an earlier export; IoError if it cannot
  /// be made or written.
  HfWriter(const std::string& dir, const nn::FamilyConfig& config,
           const HfWriteOptions& options = {});
  ~HfWriter() override;
  HfWriter(const HfWriter&) = delete;
  HfWriter& operator=(const HfWriter&) = delete;

  const std::vector<nn::HfParameter>& parameters() const { return parameters_; }
  /// ConfigError for a value that the dtype cannot hold.
  void write(std::string_view name, const Shape& shape, const float* values) override;
  void finish() override;

 private:
  std::unique_ptr<ExportDirectory> place_;
  nn::FamilyConfig config_;
  HfWriteOptions options_;
  std::vector<nn::HfParameter> parameters_;
  std::unordered_map<std::string, size_t> by_name_;  // of parameters_
  std::vector<std::unique_ptr<SafetensorsWriter>> writers_;
  std::vector<std::string> file_names_;
  std::map<std::string, size_t, std::less<>> file_of_;  // by the tensor's name
};

}  // namespace tessera::dist
