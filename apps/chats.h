#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "apps/data/documents.h"
#include "apps/text/chat.h"
#include "core/enum_names.h"

// Conversations of files (JSON lines or Parquet, a row each) as token ids, with what is to be learned.

namespace tessera::apps {

struct Chat {
  std::string where;  ///< "chats.jsonl: line 3"
  text::RenderedChat rendered;
  text::TokenizedChat tokens;
};

struct ChatReaderOptions {
  text::TrainOn train_on = text::TrainOn::kAssistant;
  text::ChatShape shape = text::ChatShape::kAuto;
  FileFormat format = FileFormat::kAuto;
  int threads = 1;
};

/// The conversations of files in their order, whatever the number of threads.
class ChatReader {
 public:
  ChatReader(std::vector<std::string> paths,
             std::shared_ptr<const text::ChatTemplate> chat_template,
             std::shared_ptr<const text::Tokenizer> tokenizer, const ChatReaderOptions& options);
  ~ChatReader();
  /// The next one; false at the end.
  /// Errors   InputError of one line that names the file and the row: as DocumentReader,
  ///          parse_conversation, ChatTemplate::render and tokenize. Not to be used after one
  bool next(Chat& chat);

 private:
  struct Row;
  void read_rows();

  DocumentReader reader_;
  std::shared_ptr<const text::ChatTemplate> template_;
  ChatReaderOptions options_;
  std::vector<text::ChatTokenizer> tokenizers_;  // of each thread
  std::vector<Row> rows_;
  size_t next_ = 0;
};

/// Makes a conversation fit into `context` positions, each of which predicts the next token: one of
/// more than context + 1 tokens is cut to these. Of what is left at least one token is learned, the
/// first, which nothing predicts, apart; else false, and so for one that is dropped.
bool fit(text::TokenizedChat& chat, int64_t context, text::LongChats rule);

/// Tokens that are predicted and learned.
int64_t num_learned(const text::TokenizedChat& chat);

struct Config;
struct TokenSource;

struct LoadedChats {
  std::shared_ptr<const std::vector<TokenSource>> sources;  ///< one
  std::shared_ptr<const text::ChatTemplate> chat_template;
  std::string summary;  ///< "2 files, 120 conversations, ...": how many were cut or left out
};

/// What data.chat names, by the template of data.chat_template, or that of `dir`, where the
/// tokenizer is. Each conversation is a document that fits into a window.
/// Errors   InputError as ChatReader, if no conversation is left, and without a chat template
LoadedChats load_chats(const Config& config, std::shared_ptr<const text::Tokenizer> tokenizer,
                       const std::string& dir, int threads = 1);

/// Where the files beside a tokenizer are, by the name or path of it; empty for byte.
std::string folder_of_tokenizer(const std::string& name);

struct ShowChatsOptions {
  int64_t context = 0;  ///< positions; 0: any number
  int64_t count = 0;    ///< conversations that are shown; 0: all
  bool has_colour = false;
};

/// Prints conversations, each with its place and how many of its tokens are learned.
void show_chats(ChatReader& reader, const ShowChatsOptions& options, std::FILE* out);

}  // namespace tessera::apps
