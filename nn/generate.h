#pragma once

#include <functional>
#include <span>
#include <vector>

#include "nn/transformer.h"

namespace tessera::nn {

struct SamplingOptions {
  double temperature = 1;  ///< 0: always the most likely token
  int64_t top_k = 0;       ///< only the k most likely tokens; 0: all
  double top_p = 1;        ///< only the smallest set of most likely tokens with this probability
  uint64_t seed = 0;
};

struct GenerateOptions {
  int64_t num_tokens = 100;  ///< at most this many after the prompt
  SamplingOptions sampling;
  int32_t stop_token = -1;  ///< ends the text (and is its last token); -1: none
  /// Called with each new token; generation ends when it returns false.
  std::function<bool(int32_t)> on_token;
};

/// Draws a token from unnormalized log probabilities; the draw_index-th number of the seed's
/// stream decides, so that equal inputs give equal tokens. Ties go to the lower token. Error if an
/// option is out of range or no logit is finite.
int32_t sample_token(std::span<const double> logits, const SamplingOptions& options,
                     uint64_t draw_index);

/// Continues `prompt` (at least one token) and returns the new tokens. Runs without gradients in
/// evaluation mode (and restores training), with a key and value cache. When the context is full it
/// starts over with its last half (at least one token), so that the text may be of any length.
/// Reads each token on the host, which waits for the current stream.
/// Under sharding all ranks call it together with the same arguments and get the same tokens.
/// Errors   Error for an empty prompt; ConfigError for a model that is not causal
std::vector<int32_t> generate(LanguageModel& model, std::span<const int32_t> prompt,
                              const GenerateOptions& options = {});

}  // namespace tessera::nn
