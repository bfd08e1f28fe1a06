#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "apps/data/documents.h"
#include "apps/text/tokenizer.h"

namespace tessera::apps {

struct EncodeFilesOptions {
  std::string out = {};                ///< directory of the shards
  int64_t shard_tokens = 100'000'000;  ///< of one file
  int bits = 0;                        ///< 16 or 32; 0: 16 if every id fits
  int64_t separator = -1;              ///< id behind each document; -1: none
  int threads = 1;
  bool add_special_tokens = false;
  DocumentOptions documents = {};
  std::string tokenizer_id = {};  ///< what a restart must find again
};

struct EncodeFilesResult {
  int64_t num_documents = 0, num_tokens = 0, num_shards = 0, num_text_bytes = 0;
  bool is_resumed = false;
};

/// Tokens of all documents, in their order, in shards (text/shards.h). The bytes do not depend on
/// the threads. DIR/tokenize.json says what is complete: where it is there with the same settings
/// and files, the work goes on behind the last complete shard, and after the end nothing is done.
/// Memory   some MiB a thread and the largest document with its tokens
/// Errors   InputError for documents, with file and line or row; ConfigError for an output directory
///          of other settings or an id that does not fit; IoError
EncodeFilesResult encode_files(
    const text::Tokenizer& tokenizer, std::vector<std::string> paths,
    const EncodeFilesOptions& options,
    const std::function<void(int64_t bytes_read, int64_t bytes_total)>& progress = {});

}  // namespace tessera::apps
