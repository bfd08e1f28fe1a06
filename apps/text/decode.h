#pragma once

#include <memory>
#include <string>
#include <vector>

#include "apps/text/json_node.h"

namespace tessera::text {

/// What makes text of tokens.
class Decoder {
 public:
  virtual ~Decoder() = default;
  /// Changes the list of tokens; the text is what remains of them, one behind the other.
  virtual void apply(std::vector<std::string>& tokens) const = 0;
  /// It does nothing but replace characters by the bytes they stand for.
  virtual bool is_byte_level() const { return false; }
};

/// Of tokenizer.json's "decoder": BPEDecoder, ByteFallback, ByteLevel, Fuse, Metaspace, Replace,
/// Sequence, Strip, WordPiece; nullptr for null (tokens with a space between them).
/// ByteLevel and ByteFallback give the bytes as they are, also where those are not UTF-8.
/// Errors   InputError that names the key of what is not known
std::unique_ptr<Decoder> parse_decoder(const JsonNode& node);

}  // namespace tessera::text
