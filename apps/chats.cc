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

int64_t num_learned(const text::TokenizedChat& chat) {
  if (chat.is_trained.empty()) return 0;
  return std::count(chat.is_trained.begin() + 1, chat.is_trained.end(), uint8_t{1});
}

bool fit(text::TokenizedChat& chat, int64_t context, text::LongChats rule) {
  const auto limit = static_cast<size_t>(context) + 1;
  if (chat.ids.size() > limit) {
    if (rule == text::LongChats::kDrop) return false;
    chat.ids.resize(limit);
    chat.is_trained.resize(limit);
  }
  return num_learned(chat) > 0;
}

LoadedChats load_chats(const Config& config, std::shared_ptr<const text::Tokenizer> tokenizer,
                       const std::string& dir, int threads) {
  const DataConfig& d = config.data;
  LoadedChats loaded;
  loaded.chat_template =
      std::make_shared<const text::ChatTemplate>(text::load_chat_template(dir, d.chat_template));
  ChatReaderOptions options;
  options.train_on = d.train_on;
  options.threads = threads;
  const std::vector<std::string> paths =
      files_of_globs("data.chat", {d.chat}, "JSON lines or Parquet files of conversations");
  ChatReader reader(paths, loaded.chat_template, std::move(tokenizer), options);
  TokenDocuments documents;
  std::vector<int32_t> ids, is_target;
  int64_t count = 0, num_long = 0, num_empty = 0, learned = 0;
  Chat chat;
  while (reader.next(chat)) {
    ++count;
    const bool is_long = std::ssize(chat.tokens.ids) > config.model.context + 1;
    num_long += is_long ? 1 : 0;
    if (!fit(chat.tokens, config.model.context, d.long_chats)) {
      num_empty += is_long && d.long_chats == text::LongChats::kDrop ? 0 : 1;
      continue;
    }
    learned += num_learned(chat.tokens);
    documents.begins.push_back(std::ssize(ids));
    ids.insert(ids.end(), chat.tokens.ids.begin(), chat.tokens.ids.end());
    is_target.insert(is_target.end(), chat.tokens.is_trained.begin(), chat.tokens.is_trained.end());
    documents.ends.push_back(std::ssize(ids));
  }
  loaded.summary = fmt::format(
      "chats: {} conversations of {} files, {} of them trained on: {} tokens, {} learned", count,
      paths.size(), documents.count(), ids.size(), learned);
  if (num_long > 0) {
    loaded.summary += fmt::format("; {} longer than model.context + 1 = {} tokens: {}", num_long,
                                  config.model.context + 1,
                                  d.long_chats == text::LongChats::kDrop ? "dropped" : "cut");
  }
  if (num_empty > 0) {
    loaded.summary += fmt::format("; {} left out, as nothing of them is learned", num_empty);
  }
  if (ids.empty()) {
    throw InputError(
        fmt::format("data.chat = {}: {}; expected at least one", shorten(d.chat), loaded.summary));
  }
  documents.tokens = TokenArray(ids, d.chat);
  documents.is_target = TokenArray(is_target, d.chat);
  auto sources = std::make_shared<std::vector<TokenSource>>();
  sources->push_back({d.chat, 0, {std::move(documents)}});
  loaded.sources = std::move(sources);
  return loaded;
}

void show_chats(ChatReader& reader, const ShowChatsOptions& options, std::FILE* out) {
  Chat chat;
  int64_t count = 0, num_tokens = 0, learned = 0, num_long = 0;
  while ((options.count == 0 || count < options.count) && reader.next(chat)) {
    const auto length = static_cast<int64_t>(chat.tokens.ids.size());
    const int64_t of_chat = num_learned(chat.tokens);
    std::string longer;
    if (options.context > 0 && length > options.context + 1) {
      fit(chat.tokens, options.context, text::LongChats::kCut);
      longer = fmt::format(", longer than the context of {}: {} of these are left if it is cut",
                           options.context, num_learned(chat.tokens));
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
