#pragma once

#include <memory>
#include <string>

#include "apps/config.h"
#include "apps/tokenizer.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "nn/transformer.h"

namespace tessera::apps {

/// Writes the f32 parameters of `model` under their full names to a safetensors file; rank 0 holds
/// one unit and one tensor of it at a time. All ranks call it. IoError on every rank if it fails.
void save_model(const std::string& path, nn::Module& model, dist::Fsdp& fsdp, dist::World& world);

/// A model that `train` saved, with values, on the device of the current Context.
struct SavedModel {
  Config config;
  std::unique_ptr<Tokenizer> tokenizer;  ///< none if it was trained on token shards
  std::unique_ptr<nn::LanguageModel> model;
};
/// From `output.dir` of a run that ended, from a checkpoint, or the newest one of a directory of
/// them (also DIR/latest). CheckpointError if it is damaged; InputError that names file and tensor
/// if something is missing, unexpected or of another shape.
SavedModel load_model(const std::string& dir);

}  // namespace tessera::apps
