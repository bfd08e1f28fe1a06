#pragma once

#include <memory>
#include <string>

#include "nn/llama/llama.h"

namespace tessera::testing {

/// Reads a model in the first format of llama2.c ("version 0"), f32 little-endian:
///   i32 width, ffn, layers, heads, kv heads, vocabulary (negative: the head is not tied), context
///   f32 embedding; then for all layers one after the other: attention norm, wq, wk, wv, wo,
///   ffn norm, w1 (gate), w2 (down), w3 (up); last norm; two tables of rotary angles (not needed);
///   the head if it is not tied
/// The rotation is of neighbouring pairs. InputError that names the file if it is damaged.
std::unique_ptr<nn::Llama> load_llama2c(const std::string& path);

}  // namespace tessera::testing
