#include "apps/chats.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <filesystem>
#include <thread>

#include "apps/config.h"
#include "apps/packed_samples.h"
#include "core/check.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

DocumentOptions rows_of(FileFormat format) {
  DocumentOptions options;
  options.whole_rows = true;
  options.columns = {"messages",     "prompt",      "completion", "conversations",
                     "conversation", "instruction", "input",      "output",
                     "system",       "history",     "tools"};
  options.format = format;
  return options;
}

}  // namespace

/// A conversation on its way, or what is wrong with it.
struct ChatReader::Row {
  Document document;
  Chat chat;
  std::exception_ptr error;
};

ChatReader::ChatReader(std::vector<std::string> paths,
                       std::shared_ptr<const text::ChatTemplate> chat_template,
                       std::shared_ptr<const text::Tokenizer> tokenizer,
                       const ChatReaderOptions& options)
    : reader_(std::move(paths), rows_of(options.format)),
      template_(std::move(chat_template)),
      options_(options) {
  for (int i = 0; i < std::max(options.threads, 1); ++i) tokenizers_.emplace_back(tokenizer);
}

ChatReader::~ChatReader() = default;

/// Some rows by all threads. What the file itself has wrong comes behind the rows before it.
void ChatReader::read_rows() {
  constexpr size_t kRowsPerThread = 256;
  rows_.clear();
  next_ = 0;
  const size_t num_rows = tokenizers_.size() == 1 ? 1 : tokenizers_.size() * kRowsPerThread;
  while (rows_.size() < num_rows) {
    Row row;
    try {
      if (!reader_.next(row.document)) break;
      row.chat.where = reader_.where(row.document.position);
    } catch (const InputError&) {
      row.error = std::current_exception();
    }
    rows_.push_back(std::move(row));
    if (rows_.back().error != nullptr) break;
  }
  std::atomic<size_t> at = 0;
  const auto work = [&](const text::ChatTokenizer& tokenizer) {
    for (size_t i = at++; i < rows_.size(); i = at++) {
      Row& row = rows_[i];
      if (row.error != nullptr) continue;
      try {
        const auto json = text::jinja::parse_json("the row", row.document.text);
        const text::Conversation conversation = text::parse_conversation(json, options_.shape);
        row.chat.rendered = template_->render(conversation, options_.train_on);
        row.chat.tokens = tokenizer.tokenize(row.chat.rendered);
      } catch (const InputError& error) {
        row.error = std::make_exception_ptr(
            InputError(fmt::format("{}: {}", row.chat.where, error.what())));
      } catch (...) {
        row.error = std::current_exception();
      }
      row.document = {};
    }
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < std::min(tokenizers_.size(), rows_.size()); ++i) {
    helpers.emplace_back(work, std::cref(tokenizers_[i]));
  }
  work(tokenizers_[0]);
  for (auto& helper : helpers) helper.join();
}

bool ChatReader::next(Chat& chat) {
  if (next_ == rows_.size()) read_rows();
  if (rows_.empty()) return false;
  Row& row = rows_[next_++];
  if (row.error != nullptr) std::rethrow_exception(row.error);
  chat = std::move(row.chat);
  return true;
}

std::string folder_of_tokenizer(const std::string& name) {
  if (name == "byte") return "";
  std::error_code ignored;
  const std::filesystem::path path(name);
  const std::string dir =
      (std::filesystem::is_directory(path, ignored) ? path : path.parent_path()).string();
  return dir.empty() ? "." : dir;
}

ChatSource open_chats(const Config& config, const std::string& dir) {
  const DataConfig& d = config.data;
  ChatSource source{.name = d.chat, .paths = {}, .chat_template = nullptr, .train_on = d.train_on};
  source.chat_template =
      std::make_shared<const text::ChatTemplate>(text::load_chat_template(dir, d.chat_template));
  source.paths =
      files_of_globs("data.chat", {d.chat}, "JSON lines or Parquet files of conversations");
  return source;
}

TokenDocuments encode_chats(const ChatSource& source,
                            std::shared_ptr<const text::Tokenizer> tokenizer, int threads) {
  ChatReader reader(source.paths, source.chat_template, std::move(tokenizer),
                    {.train_on = source.train_on, .threads = threads});
  TokenDocuments documents;
  std::vector<int32_t> ids, is_target;
  Chat chat;
  while (reader.next(chat)) {
    if (chat.tokens.ids.empty()) continue;
    documents.begins.push_back(std::ssize(ids));
    ids.insert(ids.end(), chat.tokens.ids.begin(), chat.tokens.ids.end());
    is_target.insert(is_target.end(), chat.tokens.is_trained.begin(), chat.tokens.is_trained.end());
    documents.ends.push_back(std::ssize(ids));
  }
  documents.tokens = TokenArray(ids, source.name);
  documents.is_target = TokenArray(is_target, source.name);
  return documents;
}

std::string left_out_text(int64_t num_long, int64_t limit, text::LongChats rule, int64_t num_empty,
                          std::string_view why_empty) {
  std::string text;
  if (num_long > 0) {
    text += fmt::format("; {} longer than model.context + 1 = {} tokens: {}", num_long, limit,
                        rule == text::LongChats::kDrop ? "dropped" : "cut");
  }
  if (num_empty > 0) text += fmt::format("; {} left out, as {}", num_empty, why_empty);
  return text;
}

std::string fit_chats(TokenDocuments& documents, const ChatSource& source, int64_t context,
                      text::LongChats rule) {
  // As many tokens as positions predict, and the first.
  const int64_t limit = context + 1, count = documents.count();
  const bool drops = rule == text::LongChats::kDrop;
  int64_t num_long = 0, num_empty = 0, learned = 0, num_tokens = 0;
  size_t kept = 0;
  for (size_t i = 0; i < documents.begins.size(); ++i) {
    const int64_t begin = documents.begins[i];
    int64_t end = documents.ends[i];
    if (end - begin > limit) {
      ++num_long;
      if (drops) continue;
      end = begin + limit;
    }
    int64_t learned_here = 0;
    for (int64_t t = begin + 1; t < end; ++t) learned_here += documents.is_target[t];
    if (learned_here == 0) {
      ++num_empty;
      continue;
    }
    learned += learned_here;
    num_tokens += end - begin;
    documents.begins[kept] = begin;
    documents.ends[kept++] = end;
  }
  documents.begins.resize(kept);
  documents.ends.resize(kept);
  documents.is_target.check();
  std::string summary = fmt::format(
      "chats: {} conversations of {} files, {} of them trained on: {} tokens, {} learned", count,
      source.paths.size(), kept, num_tokens, learned);
  summary += left_out_text(num_long, limit, rule, num_empty, "nothing of them is learned");
  if (kept == 0) {
    throw InputError(
        fmt::format("data.chat = {}: {}; expected at least one", shorten(source.name), summary));
  }
  return summary;
}

namespace {

/// Of the first `length` tokens those that are learned; nothing predicts the first.
int64_t num_learned(const text::TokenizedChat& chat, int64_t length) {
  if (length < 1 || chat.is_trained.empty()) return 0;
  return std::count(chat.is_trained.begin() + 1, chat.is_trained.begin() + length, uint8_t{1});
}

}  // namespace

void show_chats(ChatReader& reader, const ShowChatsOptions& options, std::FILE* out) {
  Chat chat;
  int64_t count = 0, num_tokens = 0, learned = 0, num_long = 0;
  while ((options.count == 0 || count < options.count) && reader.next(chat)) {
    const auto length = static_cast<int64_t>(chat.tokens.ids.size());
    const int64_t of_chat = num_learned(chat.tokens, length);
    std::string longer;
    if (options.context > 0 && length > options.context + 1) {
      longer = fmt::format(", longer than the context of {}: {} of these are left if it is cut",
                           options.context, num_learned(chat.tokens, options.context + 1));
      ++num_long;
    }
    fmt::print(out, "{}{}: {} tokens, {} of them learned{}\n{}\n", count == 0 ? "" : "\n",
               chat.where, length, of_chat, longer, text::show(chat.rendered, options.has_colour));
    ++count;
    num_tokens += length;
    learned += of_chat;
  }
  fmt::print(out, "\n{} conversations, {} tokens, {} of them learned", count, num_tokens, learned);
  if (options.context > 0) {
    fmt::print(out, "; {} longer than the context of {}", num_long, options.context);
  }
  fmt::print(out, "\n");
}

}  // namespace tessera::apps
