#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/formats/gguf.h"

// A tokenizer as llama.cpp has it: fields of a GGUF file.

namespace tessera::text {

struct GgufTokenIds {
  std::vector<int64_t> bos, eos, pad;
};

/// `files` are a tokenizer's for transformers (Tokenizer::hf_files): tokenizer.json, and if they are
/// there tokenizer_config.json and chat_template.jinja. BPE over bytes with one of the patterns that
/// llama.cpp has a name for becomes its "gpt2", BPE with a fallback to bytes its "llama" (each token's
/// score is the rank of the merge that makes it). Other kinds, such as one id for each character, are
/// "none" with one warning: the model has no tokenizer there. Ids from the vocabulary's end to
/// `vocab_size` are tokens that do not occur. Ids that the model lacks are those of the tokens that the
/// tokenizer names, or that usually stand around a text (document_tokens).
/// Errors   ConfigError for a BPE of another pattern or normalizer than llama.cpp has, which would give
///          other ids
GgufFields gguf_tokenizer(const std::map<std::string, std::string>& files, const GgufTokenIds& ids,
                          int64_t vocab_size);

}  // namespace tessera::text
