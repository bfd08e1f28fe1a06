#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "apps/data.h"
#include "apps/packed_samples.h"
#include "dist/comm/world.h"

namespace tessera::apps {

/// [Note: Token cache]
/// What a run tokenizes lies in OUTPUT_DIR/token_cache/KEY, and is tokenized once:
///   tokens.bin   ids one after the other, of 1, 2 or 4 bytes by the size of the vocabulary
///   ends.bin     int64 for each document that has a token: the tokens up to its end
///   targets.bin  of conversations: a byte for each token, 1 if it is to be predicted, or 0
///   cache.json   key, sizes and hashes of these, and the files they are of
/// KEY is a hash of the files' bytes, the tokenizer and how the files are read; of conversations also
/// of the template and what of them is trained on. cache.json comes last: without it, or where sizes or hashes are others, nothing is there and it is made anew. Who
/// uses one holds the lock of the output directory (RunDir), so that two runs never write one.
/// Of files that have not changed since (size, inode, times) the hash is known and not taken again.
struct TokenCacheOptions {
  std::string directory;  ///< of the entries
  int threads = 1;
  /// Called now and then with bytes read of all, or of 0 while files are hashed; may throw to end it.
  std::function<void(int64_t bytes_read, int64_t bytes_total)> progress = {};
};

/// The directory of the entry for a list of files, which is made if it is not there as a whole.
/// Errors   InputError for documents, with file and line or row, for a file that changes while it is
///          read, and for files without a token; IoError
std::string make_token_cache(const text::Tokenizer& tokenizer, const TextSource& source,
                             const TokenCacheOptions& options);

/// The same for conversations of any length, each a document.
/// Errors   as ChatReader, for a file that changes while it is read, and without a conversation
std::string make_chat_cache(std::shared_ptr<const text::Tokenizer> tokenizer,
                            const ChatSource& source, const TokenCacheOptions& options);

/// The documents of an entry, mapped. Waits for one that another node has made.
/// Errors   InputError if it is not there, or not whole by its sizes
TokenDocuments open_token_cache(const std::string& entry, double wait_seconds = 10);

/// Entries in `directory` for all sources of `texts`, in their order, or for its conversations: one rank makes what is not
/// there, the others wait. Collective.
/// Errors   as make_token_cache, the same on all ranks
std::vector<std::string> make_token_caches(const Texts& texts, const std::string& directory,
                                           dist::World& world);
/// Removes entries of other texts in `directory`, as far as a cache has made what is in them: once
/// it is this run's.
void remove_other_token_caches(const std::string& directory, const std::vector<std::string>& used);

}  // namespace tessera::apps
