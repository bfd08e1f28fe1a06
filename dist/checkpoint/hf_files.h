#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/formats/safetensors.h"
#include "nn/family.h"

namespace tessera::dist {

/// The tensors in a directory of transformers, from model.safetensors or the files that
/// model.safetensors.index.json names: plain names of files in the directory, or links to files in
/// the same repository folder (that of the cache has its bytes in blobs/ beside snapshots/).
/// Prefixes of wrappers (torch.compile's _orig_mod., module. of data parallelism, PEFT's
/// base_model.model.) are left out of the names, those of a whole model put in where a model was
/// saved without its head; the log says so. InputError that names file and tensor.
class HfFiles {
 public:
  struct Place {
    const SafetensorsFile* file;
    const SafetensorsEntry* entry;
  };

  static constexpr const char* kSingleName = "model.safetensors";
  static constexpr const char* kIndexName = "model.safetensors.index.json";

  /// Whether the directory has files of tensors.
  static bool exist_in(const std::string& dir);

  HfFiles(const std::string& dir, const nn::FamilyConfig& config);

  const std::map<std::string, Place, std::less<>>& tensors() const { return tensors_; }

  /// What `tied` of the config is by the tensors: a head that is not the embedding makes it untied,
  /// a head without an embedding is both. The log says so.
  void settle_tied(nn::FamilyConfig& config);

 private:
  void add_file(const std::string& name);

  std::string dir_;
  nn::HfLayout names_;
  bool is_classifier_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place, std::less<>> tensors_;
};

}  // namespace tessera::dist
