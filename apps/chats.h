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
  const DocumentReader& documents() const { return reader_; }

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

struct Config;
struct TokenDocuments;

/// What data.chat names, and what becomes of it.
struct ChatSource {
  std::string name;  ///< the glob
  std::vector<std::string> paths;
  std::shared_ptr<const text::ChatTemplate> chat_template;
  text::TrainOn train_on = text::TrainOn::kAssistant;
};
/// By the template of data.chat_template, or that of `dir`, where the tokenizer is.
/// Errors   InputError without a file or a chat template
ChatSource open_chats(const Config& config, const std::string& dir);

/// All conversations in memory, each a document with its targets, of any length.
/// Errors   InputError as ChatReader
TokenDocuments encode_chats(const ChatSource& source,
                            std::shared_ptr<const text::Tokenizer> tokenizer, int threads);

/// Makes each of these fit into `context` positions, each of which predicts the next token: one of
/// more than context + 1 tokens is cut to these, or left out. So is one of which nothing is learned,
/// the first token, which nothing predicts, apart. Gives the words for it: "chats: 120 conversations of 2 files, ...".
/// Errors   InputError if none is left
std::string fit_chats(TokenDocuments& documents, const ChatSource& source, int64_t context,
                      text::LongChats rule);

/// What follows in such a line: "; 3 longer than model.context + 1 = 65 tokens: cut; 1 left out, as
/// nothing of them is learned". Nothing where all are whole.
std::string left_out_text(int64_t num_long, int64_t limit, text::LongChats rule, int64_t num_empty,
                          std::string_view why_empty);

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
