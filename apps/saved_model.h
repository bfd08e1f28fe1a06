#pragma once

#include <memory>
#include <string>
#include <vector>

#include "apps/config.h"
#include "apps/text/tokenizer.h"
#include "core/formats/parameters.h"
#include "dist/checkpoint/peft.h"
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

/// What `path` means as `open_model` has it, or a model of Hugging Face: a directory with a
/// config.json and no config.toml.
struct OpenedModel {
  ModelState state;
  Config config;
};
/// Errors of open_model and ModelState::parse; InputError as dist::HfReader.
OpenedModel open_any_model(const std::string& path);

/// The newest checkpoint that `path` means; empty if there is none, or the model that the run saved
/// at its end is newer.
std::string newest_checkpoint(const std::string& path);

/// The size of the vocabulary of a model with this configuration and, if it has one, the tokenizer
/// in `home`, which is read unless it is given. InputError if nothing gives it.
int64_t vocab_size_of(const Config& config, const std::string& home,
                      const text::Tokenizer* tokenizer = nullptr);

/// The tokenizer in `home`, if there is one.
std::unique_ptr<text::Tokenizer> tokenizer_of(const std::string& home);
/// The tokens that end a text of a model with this configuration: model.eos_ids, data.separator, and what
/// stood behind the documents that it was trained on (data.document_tokens).
std::vector<int32_t> end_tokens_of(const Config& config, const text::Tokenizer* tokenizer);
/// What stands before a text: the token that begins one (model.bos_ids, or of documents), else one that
/// ends one; -1 without them.
int32_t prefix_token_of(const Config& config, const text::Tokenizer* tokenizer);

/// InputError that names the first tensor of the model with this configuration that the state has
/// not, or in another shape, or that is not the model's. Before the model takes any memory, or time
/// beyond what is stored.
void check_shapes(const ModelState& state, const Config& config, int64_t vocab_size);

/// A model that `train` saved, or of Hugging Face, with values, on the device of the current
/// Context.
struct SavedModel {
  Config config;
  std::unique_ptr<text::Tokenizer> tokenizer;  ///< none if it was trained on token shards
  std::unique_ptr<nn::LanguageModel> model;
  std::string path;  ///< of the state
  std::string home;  ///< where its tokenizer and chat template are
  int64_t step = 0;
};
/// All of it but the model, whose shapes in the state are checked (check_shapes); `vocab_size` is
/// that of `make_model`.
SavedModel describe_model(const OpenedModel& opened, int64_t& vocab_size);
/// Adds the adapters in a directory to the model, without their values, which the reader has.
/// Errors of load_model.
std::unique_ptr<dist::PeftReader> attach_adapter(SavedModel& saved, const std::string& adapter);
/// Of `open_any_model(path)`, with parameters of `dtype`, rounded to nearest, and the adapters in the
/// directory `adapter`, unless it is empty (dist::PeftReader). CheckpointError if it is damaged;
/// InputError that names file and tensor if something is missing, unexpected or of another shape;
/// ConfigError for adapters of layers that the model lacks, or beside others.
SavedModel load_model(const std::string& path, DType dtype = kF32, const std::string& adapter = "");

}  // namespace tessera::apps
