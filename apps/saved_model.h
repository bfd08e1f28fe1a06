#pragma once

#include <memory>
#include <string>
#include <vector>

#include "apps/config.h"
#include "apps/text/tokenizer.h"
#include "core/formats/parameters.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "nn/transformer.h"

namespace tessera::apps {

/// Writes the f32 parameters of `model` after `step` under their full names to a safetensors file;
/// rank 0 holds one unit and one tensor of it at a time. All ranks call it. IoError on every rank
/// if it fails.
void save_model(const std::string& path, nn::Module& model, dist::Fsdp& fsdp, dist::World& world,
                int64_t step);

/// The step of the model in the directory of a run (`model.safetensors`, made at its end): -1
/// without one, 0 if nothing says it.
int64_t model_step(const std::string& dir);

/// The parameters of a state of a run, and what they are: of a checkpoint, or of the model that the
/// run saved at its end.
struct ModelState {
  std::unique_ptr<ParameterSource> parameters;
  int64_t step = 0;
  std::string home;    ///< where the tokenizer is
  std::string config;  ///< TOML; empty: a model of one's own

  const std::string& path() const { return parameters->path(); }  ///< checkpoint or model's file
  /// Of `config`. CheckpointError if there is none.
  Config parse() const;
};

/// What `path` means: a checkpoint, or the newest state (by its step) of a run's directory, whose
/// checkpoints may be in its `checkpoint.dir`; DIR/latest is the same as DIR. Of the same step, the
/// model. Hashes of a checkpoint are checked. CheckpointError if there is none or it is damaged;
/// InputError for the model's file.
ModelState open_model(const std::string& path);

/// The newest checkpoint that `path` means; empty if there is none, or the model that the run saved
/// at its end is newer.
std::string newest_checkpoint(const std::string& path);

/// The size of the vocabulary of a model with this configuration and, if it has one, the tokenizer
/// in `home`. InputError if nothing gives it.
int64_t vocab_size_of(const Config& config, const std::string& home);

/// A model that `train` saved, with values, on the device of the current Context.
struct SavedModel {
  Config config;
  std::unique_ptr<text::Tokenizer> tokenizer;  ///< none if it was trained on token shards
  std::unique_ptr<nn::LanguageModel> model;
  std::string path;  ///< of the state
  std::string home;  ///< where its tokenizer and chat template are
  int64_t step = 0;
};
/// Of `open_model(path)`. CheckpointError if it is damaged; InputError that names file and tensor
/// if something is missing, unexpected or of another shape.
SavedModel load_model(const std::string& path);

}  // namespace tessera::apps
