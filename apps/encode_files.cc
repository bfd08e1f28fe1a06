#include "apps/encode_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "apps/text/shards.h"
#include "core/check.h"
#include "core/files.h"
#include "core/formats/durable_file.h"
#include "core/formats/strict_json.h"

namespace tessera::apps {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kBatchNbytes = 1 << 20;  // of text that a thread takes at once
constexpr std::string_view kStateFile = "tokenize.json";

/// Documents, or a part of one, that one thread encodes.
struct Batch {
  struct Part {
    Document document;
    std::string_view text;  // of the document
    bool is_last = true;    // the document ends with it
  };
  std::vector<Part> parts;
  size_t nbytes = 0;
  int64_t bytes_read = 0;
  // By part, once it is done:
  std::vector<std::vector<int32_t>> ids;
  bool is_done = false;
  std::exception_ptr error;
};

/// Where in documents a shard ends: in one of them, behind so many of its tokens.
struct Progress {
  DocumentPosition position;
  int64_t num_tokens_of_document = 0;
  int64_t num_documents = 0, num_tokens = 0, num_shards = 0, num_text_bytes = 0;
  bool is_finished = false;
};

json settings_of(const std::vector<std::string>& paths, const EncodeFilesOptions& options,
                 int bits) {
  json files = json::array();
  for (const std::string& path : paths) {
    std::error_code ignored;
    files.push_back({path, fs::file_size(path, ignored)});
  }
  return {{"tokenizer", options.tokenizer_id},
          {"files", files},
          {"shard_tokens", options.shard_tokens},
          {"bits", bits},
          {"separator", options.separator},
          {"add_special_tokens", options.add_special_tokens},
          {"field", options.documents.field},
          {"invalid", static_cast<int>(options.documents.invalid)},
          {"null", static_cast<int>(options.documents.null)},
          {"format", static_cast<int>(options.documents.format)}};
}

json to_json(const Progress& p) {
  return {{"file", p.position.file},      {"row", p.position.row},
          {"byte", p.position.byte},      {"tokens_of_document", p.num_tokens_of_document},
          {"documents", p.num_documents}, {"tokens", p.num_tokens},
          {"shards", p.num_shards},       {"text_bytes", p.num_text_bytes},
          {"finished", p.is_finished}};
}

/// What an earlier run has completed; nothing if there was none.
Progress read_progress(const std::string& directory, const json& settings) {
  const std::string path = directory + "/" + std::string(kStateFile);
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    if (fs::exists(text::ShardWriter::path_of(directory, 0), ignored)) {
      throw ConfigError(fmt::format("{}: has shards but no {}, expected an empty directory",
                                    directory, kStateFile));
    }
    return {};
  }
  const json state = parse_strict_json(path, read_regular_file(path, 64 << 20),
                                       JsonRules{.max_depth = 6, .num_free_elements = 1 << 20},
                                       "what tessera-tokenize wrote");
  const auto member = [&](const json& object, const char* key) {
    const json found = object.is_object() && object.contains(key) ? object[key] : json();
    return found;
  };
  if (member(state, "settings") != settings) {
    throw ConfigError(
        fmt::format("{}: of other files, another tokenizer or other settings, expected "
                    "the same or another output directory",
                    path));
  }
  const json done = member(state, "done");
  const auto number = [&](const char* key) {
    const int64_t value = json_size(member(done, key));
    if (value < 0) {
      throw InputError(fmt::format("{}: done.{} = {}, expected a number", path, key,
                                   json_text(member(done, key))));
    }
    return value;
  };
  Progress p{{number("file"), number("row"), number("byte")}};
  p.num_tokens_of_document = number("tokens_of_document");
  p.num_documents = number("documents");
  p.num_tokens = number("tokens");
  p.num_shards = number("shards");
  p.num_text_bytes = number("text_bytes");
  p.is_finished = member(done, "finished") == true;
  return p;
}

/// Reads documents, has them encoded by threads and gives them in order.
class Encoder {
 public:
  Encoder(const text::Tokenizer& tokenizer, DocumentReader& reader,
          const EncodeFilesOptions& options)
      : tokenizer_(tokenizer), reader_(reader), options_(options) {
    for (int i = 0; i < options.threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Encoder() {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  /// The next batch in order, encoded; none at the end.
  std::unique_ptr<Batch> next() {
    while (!is_at_end_ && queue_.size() < static_cast<size_t>(options_.threads) * 2 + 1) read();
    if (queue_.empty()) {
      if (read_error_) std::rethrow_exception(read_error_);
      return nullptr;
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.front()->is_done; });
    auto batch = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (batch->error) std::rethrow_exception(batch->error);
    return batch;
  }

 private:
  /// One more batch into the queue.
  void read() {
    auto batch = std::make_unique<Batch>();
    while (batch->nbytes < kBatchNbytes) {
      if (rest_.empty()) {
        bool is_there = false;
        try {
          is_there = reader_.next(document_);
        } catch (...) {  // what stands before it comes first
          read_error_ = std::current_exception();
        }
        if (!is_there) {
          is_at_end_ = true;
          break;
        }
        rest_ = document_.text;
        if (rest_.empty()) {
          batch->parts.push_back({document_, rest_, true});
          continue;
        }
      }
      // A document that is longer than a batch is encoded in parts, where it can be cut.
      size_t end = rest_.size();
      const size_t room = kBatchNbytes - batch->nbytes;
      if (end > room && !options_.add_special_tokens) end = tokenizer_.next_cut(rest_, room);
      batch->parts.push_back({document_, rest_.substr(0, end), end == rest_.size()});
      batch->nbytes += end;
      rest_.remove_prefix(end);
    }
    batch->bytes_read = reader_.nbytes_read();
    if (batch->parts.empty()) return;
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(batch.get());
      queue_.push_back(std::move(batch));
    }
    changed_.notify_all();
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return is_ending_ || !waiting_.empty(); });
      if (is_ending_) return;
      Batch& batch = *waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      try {
        encode(batch);
      } catch (...) {
        batch.error = std::current_exception();
      }
      lock.lock();
      batch.is_done = true;
      changed_.notify_all();
    }
  }
  void encode(Batch& batch) const {
    const text::EncodeOptions options{.add_special_tokens = options_.add_special_tokens};
    for (const Batch::Part& part : batch.parts) {
      auto& ids = batch.ids.emplace_back();
      try {
        tokenizer_.encode(part.text, ids, options);
      } catch (const InputError& error) {
        throw InputError(
            fmt::format("{}: {}", reader_.where(part.document.position), error.what()));
      }
      if (part.is_last && options_.separator >= 0) {
        ids.push_back(static_cast<int32_t>(options_.separator));
      }
    }
  }

  const text::Tokenizer& tokenizer_;
  DocumentReader& reader_;
  const EncodeFilesOptions& options_;
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

int bits_for(const text::Tokenizer& tokenizer, const EncodeFilesOptions& options) {
  const int64_t num_ids = std::max(tokenizer.vocab_size(), options.separator + 1);
  const int bits = options.bits != 0 ? options.bits : num_ids <= 65536 ? 16 : 32;
  if (bits == 16 && num_ids > 65536) {
    throw ConfigError(
        fmt::format("tokenize: {} ids in 16 bits, expected at most 65536 or 32 bits", num_ids));
  }
  return bits;
}

}  // namespace

EncodeFilesResult encode_files(const text::Tokenizer& tokenizer, std::vector<std::string> paths,
                               const EncodeFilesOptions& options,
                               const std::function<void(int64_t, int64_t)>& progress) {
  const int bits = bits_for(tokenizer, options);
  make_directory_durably(options.out);
  const json settings = settings_of(paths, options, bits);
  Progress done = read_progress(options.out, settings);
  EncodeFilesResult result;
  result.is_resumed = done.num_shards > 0;
  DocumentReader reader(std::move(paths), options.documents);
  Progress now = done;
  const auto save = [&] {
    const json state = {{"settings", settings}, {"done", to_json(now)}};
    write_durably(options.out + "/" + std::string(kStateFile), state.dump(1) + "\n");
  };
  if (!done.is_finished) {
    if (done.num_shards > 0) reader.seek(done.position);
    text::ShardWriter writer(options.out, bits, options.shard_tokens, done.num_shards);
    int64_t to_skip = done.num_tokens_of_document;  // of the first document: they are written
    now.num_tokens_of_document = 0;
    Encoder encoder(tokenizer, reader, options);
    while (const auto batch = encoder.next()) {
      for (size_t i = 0; i < batch->parts.size(); ++i) {
        const Batch::Part& part = batch->parts[i];
        const std::vector<int32_t>& ids = batch->ids[i];
        const auto count = static_cast<int64_t>(ids.size());
        now.position = part.document.position;
        for (int64_t at = 0; at < count;) {
          if (to_skip > 0) {
            const int64_t skipped = std::min(to_skip, count - at);
            to_skip -= skipped;
            at += skipped;
            now.num_tokens_of_document += skipped;
            continue;
          }
          const int64_t added = writer.add(ids.data() + at, count - at);
          at += added;
          now.num_tokens += added;
          now.num_tokens_of_document += added;
          if (writer.num_complete() == now.num_shards) continue;
          now.num_shards = writer.num_complete();
          save();
        }
        if (!part.is_last) continue;
        ++now.num_documents;
        now.num_text_bytes += static_cast<int64_t>(part.document.text.size());
        now.num_tokens_of_document = 0;
      }
      if (progress) progress(batch->bytes_read, reader.nbytes());
    }
    writer.finish();
    now.num_shards = writer.num_complete();
    now.is_finished = true;
    save();
  }
  result.num_documents = now.num_documents;
  result.num_tokens = now.num_tokens;
  result.num_shards = now.num_shards;
  result.num_text_bytes = now.num_text_bytes;
  return result;
}

}  // namespace tessera::apps
