#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/enum_names.h"

// The documents of files, one after the other in a fixed order: the files as they are listed, in a
// file from its beginning to its end. Text is UTF-8.
//   .txt .text .md    the whole file is a document
//   .jsonl .ndjson    each line is a JSON object with the text in a field; blank lines are left out
//   .parquet          each row, the text in a column
// each plain, or with .gz (gzip, any number of members) or .zst (zstd, any number of frames) behind.
// Memory: a block of 4 MiB or a page of parquet, or the largest document, however large the files.

namespace tessera::apps {

enum class InvalidText { kError, kReplace };  ///< what bytes that are not UTF-8 become: U+FFFD
enum class NullText { kError, kSkip };        ///< rows whose field is null
enum class FileFormat { kAuto, kText, kJsonl, kParquet };  ///< auto: by the name

constexpr auto enum_names(InvalidText) {
  return std::to_array<EnumName<InvalidText>>(
      {{InvalidText::kError, "error"}, {InvalidText::kReplace, "replace"}});
}
constexpr auto enum_names(NullText) {
  return std::to_array<EnumName<NullText>>(
      {{NullText::kError, "error"}, {NullText::kSkip, "skip"}});
}
constexpr auto enum_names(FileFormat) {
  return std::to_array<EnumName<FileFormat>>({{FileFormat::kAuto, "auto"},
                                              {FileFormat::kText, "text"},
                                              {FileFormat::kJsonl, "jsonl"},
                                              {FileFormat::kParquet, "parquet"}});
}

/// What of the files is a document's text.
struct DocumentOptions {
  std::string field = "text";  ///< of a JSON line (top level); the column of parquet
  bool whole_rows = false;     ///< in place of the text of `field`: the row as a JSON object. A
                               ///< line comes as it is, checked for UTF-8 only
  std::vector<std::string> columns = {};  ///< of whole rows of parquet: those of these that are
                                          ///< there; empty: all of strings, or lists or structs of
                                          ///< them
  InvalidText invalid = InvalidText::kError;
  NullText null = NullText::kError;
  FileFormat format = FileFormat::kAuto;
  int64_t max_document_nbytes = int64_t{4} << 30;
};

/// Where a document is; ordered as documents come. Where to go on after a restart.
struct DocumentPosition {
  int64_t file = 0;  ///< index in the list
  int64_t row = 0;   ///< line (blank ones count) or row of parquet, from 0; of a text 0
  int64_t byte = 0;  ///< where its line begins, uncompressed; of other formats 0
  auto operator<=>(const DocumentPosition&) const = default;
};

/// A text and where it stands.
struct Document {
  std::string_view text;  ///< as long as `owner` is held, also by other threads
  DocumentPosition position;
  std::shared_ptr<const void> owner;  ///< shared by documents beside each other
};

/// The files of globs: of each pattern those that match in the order of their bytes; a pattern that
/// is a file's name is that file, whatever characters it has. `what` names the patterns' setting.
/// InputError if nothing matches, a file comes twice, or one is not a regular file.
std::vector<std::string> files_of_globs(std::string_view what,
                                        const std::vector<std::string>& patterns,
                                        std::string_view expected);

/// The kind of file by its name. InputError, with what was expected, for another.
FileFormat format_of_name(const std::string& path);

/// Documents of one file. InputError, of one line, names the file, the line or row, what was found
/// and what was expected. Not to be used after an error.
class FileReader {
 public:
  virtual ~FileReader() = default;
  /// The next document; false at the end. `position.file` is left as it is.
  virtual bool next(Document& document) = 0;
  /// Goes on at a position that `next` gave or `position` has said; others are errors.
  virtual void seek(const DocumentPosition& position) = 0;
  virtual DocumentPosition position() const = 0;  ///< where `next` looks
  virtual int64_t nbytes_read() const = 0;        ///< of the file on the disk, about
  virtual int64_t num_null() const { return 0; }  ///< rows left out
};
/// InputError for what cannot be opened, and for files without a byte.
std::unique_ptr<FileReader> open_documents(const std::string& path, const DocumentOptions& options);

/// Documents of a list of files. Used by one thread at a time.
class DocumentReader {
 public:
  DocumentReader(std::vector<std::string> paths, DocumentOptions options);
  /// The next document; false when there are no more. InputError as FileReader.
  bool next(Document& document);
  /// `next` gives the document at `position` and goes on from there.
  void seek(const DocumentPosition& position);
  DocumentPosition position() const;  ///< where `next` looks: what a restart has to seek

  /// "a.jsonl: line 17", "b.parquet: row 3" (both from 1), "c.txt", for messages.
  std::string where(const DocumentPosition& position) const;

  const std::vector<std::string>& paths() const { return paths_; }
  int64_t nbytes() const { return nbytes_; }  ///< of all files on the disk
  int64_t nbytes_read() const;                ///< of these, about, for a progress bar
  int64_t num_null() const;                   ///< rows left out as their text is null

 private:
  std::vector<std::string> paths_;
  DocumentOptions options_;
  std::vector<int64_t> first_byte_;  // of each file in all of them
  int64_t nbytes_ = 0, num_null_ = 0;
  std::unique_ptr<FileReader> reader_;  // of start_.file; none before its first document
  DocumentPosition start_;              // the file, and where to begin in it
};

}  // namespace tessera::apps
