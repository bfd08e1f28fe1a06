#pragma once

#include <functional>
#include <span>
#include <vector>

#include "nn/transformer.h"

namespace tessera::nn {

/// What becomes of the logits before a token is drawn, in this order.
struct SamplingOptions {
  /// Logits of tokens that the text has: x / penalty if x > 0, x * penalty else (Keskar et al. 2019,
  /// arXiv:1909.05858); 1: none.
  double repetition_penalty = 1;
  double temperature = 1;  ///< 0: always the most likely token
  int64_t top_k = 0;       ///< only the k most likely tokens; 0: all
  double top_p = 1;        ///< of these only the smallest set of most likely ones with this share
  double min_p = 0;        ///< only tokens with this share of the likeliest one's probability
  uint64_t seed = 0;
};

/// How texts are continued.
struct GenerateOptions {
  int64_t num_tokens = 100;  ///< at most this many after a prompt
  SamplingOptions sampling;
  std::vector<int32_t> stop_tokens = {};  ///< each ends the text (and is its last token)
  int64_t max_batch = 16;                 ///< prompts that are decoded together
  /// Called with each new token of a prompt, whose text ends when it returns false.
  std::function<bool(int64_t prompt, int32_t token)> on_token = {};
  /// Under sharding, where ranks have prompts of their own: called before each forward with whether
  /// this rank needs one, returns whether any does. All ranks make the same number of forwards.
  std::function<bool(bool is_busy)> any_is_busy = {};
};

/// Draws a token from unnormalized log probabilities; the draw_index-th number of the seed's
/// stream decides, so that equal inputs give equal tokens. Ties go to the lower token. The
/// repetition penalty is not its business. Error if an option is out of range or no logit is finite.
int32_t sample_token(std::span<const double> logits, const SamplingOptions& options,
                     uint64_t draw_index);

/// The repetition penalty of SamplingOptions for the tokens of `text`, each once.
void penalize_repetition(std::span<double> logits, std::span<const int32_t> text, double penalty);

/// Continues each prompt (at least one token) and returns the new tokens. Prompt i draws with
/// seed + i: its text depends on the prompt, its index and the options alone, on the CPU to the last
/// bit whatever other prompts there are and however many are decoded together. Runs without
/// gradients in evaluation mode (and restores training), with a cache of keys and values: a prompt
/// in one forward, then a token of each text a forward, whose weights are read once (FewRows). A
/// text that ends makes room for the next prompt. When the context is full it starts over with its
/// last half (at least one token), so that a text may be of any length.
/// Reads each token on the host, which waits for the current stream.
/// Under sharding all ranks call it together with the same arguments and get the same tokens, or
/// with `any_is_busy`.
/// Errors   Error for an empty prompt; ConfigError for a model that is not causal
std::vector<std::vector<int32_t>> generate(LanguageModel& model,
                                           const std::vector<std::vector<int32_t>>& prompts,
                                           const GenerateOptions& options = {});

/// The same for one prompt.
std::vector<int32_t> generate(LanguageModel& model, std::span<const int32_t> prompt,
                              const GenerateOptions& options = {});

}  // namespace tessera::nn
