#pragma once

#include <functional>
#include <string>

#include "dist/checkpoint/reader.h"

// What can be done with a checkpoint without the training: one process, one tensor in memory.

namespace tessera::dist {

/// Calls `f` with each parameter of a checkpoint, whole and in f32, one after the other: its name
/// in the model, its shape, and values that live for the call. One of them is in memory.
void for_each_parameter(
    const CheckpointReader& reader,
    const std::function<void(const std::string& name, const Shape& shape, const float* values)>& f);

/// The f32 parameters as one safetensors file under their full names. IoError.
void export_parameters(const CheckpointReader& reader, const std::string& path);

/// The same checkpoint in `out_dir`/step-NNNNNNNN as `num_ranks` files of about the same size.
/// Returns its directory. IoError, or ConfigError if there is a checkpoint of this step already.
std::string reshard_checkpoint(const CheckpointReader& reader, const std::string& out_dir,
                               int64_t num_ranks);

}  // namespace tessera::dist
