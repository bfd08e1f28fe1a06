#include "apps/encode_documents.h"

#include <fmt/format.h>

#include "core/check.h"

namespace tessera::apps {
namespace {

constexpr size_t kBatchNbytes = 1 << 20;  // of text that a thread takes at once

}  // namespace

DocumentEncoder::DocumentEncoder(const text::Tokenizer& tokenizer, DocumentReader& reader,
                                 const Options& options)
    : tokenizer_(tokenizer), reader_(reader), options_(options) {
  for (int i = 0; i < options.threads; ++i) threads_.emplace_back([this] { work(); });
}

DocumentEncoder::~DocumentEncoder() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

std::unique_ptr<EncodedDocuments> DocumentEncoder::next() {
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

/// One more batch into the queue.
void DocumentEncoder::read() {
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

void DocumentEncoder::work() {
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

void DocumentEncoder::encode(Batch& batch) const {
  const text::EncodeOptions options{.add_special_tokens = options_.add_special_tokens};
  for (const EncodedDocuments::Part& part : batch.parts) {
    auto& ids = batch.ids.emplace_back();
    try {
      tokenizer_.encode(part.text, ids, options);
    } catch (const InputError& error) {
      throw InputError(fmt::format("{}: {}", reader_.where(part.document.position), error.what()));
    }
    if (part.is_last && options_.separator >= 0) {
      ids.push_back(static_cast<int32_t>(options_.separator));
    }
  }
}

}  // namespace tessera::apps
