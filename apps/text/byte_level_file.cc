#include "apps/text/byte_level_file.h"

#include "apps/text/hf_tokenizer.h"
#include "apps/text/pretokenize.h"

namespace tessera::text {

using nlohmann::json;

json byte_level_json(bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

std::unique_ptr<Tokenizer> make_byte_level(json vocab, json merges, json pre_tokenizer,
                                           json added_tokens, bool ignore_merges,
                                           const std::string& name) {
  const json root = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", std::move(added_tokens)},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", std::move(pre_tokenizer)},
                     {"post_processor", nullptr},
                     {"decoder", byte_level_json(true)},
                     {"model",
                      {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false},
                       {"ignore_merges", ignore_merges},
                       {"vocab", std::move(vocab)},
                       {"merges", std::move(merges)}}}};
  return std::make_unique<HfTokenizer>(JsonNode(root, name), root.dump() + "\n");
}

json special_token_json(int32_t id, const std::string& content) {
  return {{"id", static_cast<uint32_t>(id)},
          {"content", content},
          {"single_word", false},
          {"lstrip", false},
          {"rstrip", false},
          {"normalized", false},
          {"special", true}};
}

json split_by_regex(std::string_view pattern) {
  const auto known = known_pattern(pattern);
  if (known && known->family == KnownPattern::kGpt2) return byte_level_json(true);
  const json split = {{"type", "Split"},
                      {"pattern", {{"Regex", pattern}}},
                      {"behavior", "Isolated"},
                      {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", {split, byte_level_json(false)}}};
}

}  // namespace tessera::text
