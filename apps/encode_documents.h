#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "apps/data/documents.h"
#include "apps/text/tokenizer.h"

namespace tessera::apps {

/// Documents beside each other, or a part of one, with their ids.
struct EncodedDocuments {
  struct Part {
    Document document;
    std::string_view text;  ///< of the document
    bool is_last = true;    ///< the document ends with it
  };
  std::vector<Part> parts;
  std::vector<std::vector<int32_t>> ids;  ///< of each part
  int64_t bytes_read = 0;                 ///< of the files, with these
};

/// Reads documents, has them encoded by threads and gives them in their order.
/// Memory   some MiB a thread and the largest document with its tokens
class DocumentEncoder {
 public:
  struct Options {
    int threads = 1;
    int64_t separator = -1;  ///< id behind each document; -1: none
    bool add_special_tokens = false;
  };
  DocumentEncoder(const text::Tokenizer& tokenizer, DocumentReader& reader, const Options& options);
  ~DocumentEncoder();
  DocumentEncoder(const DocumentEncoder&) = delete;
  DocumentEncoder& operator=(const DocumentEncoder&) = delete;

  /// What comes next; none at the end. A document that is longer than a MiB may come in parts, which
  /// have together the ids of the whole.
  /// Errors   InputError with file, line or row, once what stands before it has been given
  std::unique_ptr<EncodedDocuments> next();

 private:
  struct Batch : EncodedDocuments {
    size_t nbytes = 0;
    bool is_done = false;
    std::exception_ptr error;
  };
  void read();
  void work();
  void encode(Batch& batch) const;

  const text::Tokenizer& tokenizer_;
  DocumentReader& reader_;
  const Options options_;
  Document document_;
  std::string_view rest_;  // of document_, not read yet
  bool is_at_end_ = false;
  std::exception_ptr read_error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Batch>> queue_;
  std::deque<Batch*> waiting_;
  bool is_ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tessera::apps
