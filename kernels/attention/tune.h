#pragma once

#include <string>

#include "kernels/attention/kernel.h"
#include "kernels/tuning/tuning.h"

// The choice between our kernels and cuDNN's, where it takes the problem; see [Note: Tuning]
// (kernels/tuning/tuning.h).

namespace tessera::kernels {

/// What the time of attention depends on: types, shape and strides. Of problems that `cudnn_takes`.
std::string attention_key(const AttentionFwd& a);
std::string attention_key(const AttentionBwd& a);

/// Adds "cudnn" or "own" for `key`, the faster. False for a key of anything else.
bool measure_attention(const std::string& key, Tuning::Choices& choices);

/// Whether `choice` is one for `key` that this process can follow.
bool is_attention_choice(const std::string& key, const std::string& choice);

}  // namespace tessera::kernels
