#include "apps/data/documents.h"

#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "apps/data/byte_stream.h"
#include "apps/data/parquet_files.h"
#include "apps/data/text_files.h"
#include "core/check.h"
#include "core/files.h"

namespace tessera::apps {
namespace {

/// Refuses what is no regular file.
int64_t file_nbytes(const std::string& path) {
  const int fd = open_regular_file(path);
  struct stat status {};
  const int failed = ::fstat(fd, &status);
  ::close(fd);
  return failed != 0 ? 0 : status.st_size;
}

/// For glob(3), with the folders that are there taken as they are: "[x]/a*.bin" is in a folder [x].
std::string with_plain_folders(const std::string& pattern) {
  size_t slash = pattern.rfind('/');
  struct stat place {};
  while (slash != std::string::npos && slash > 0 &&
         (::stat(pattern.substr(0, slash).c_str(), &place) != 0 || !S_ISDIR(place.st_mode))) {
    slash = pattern.rfind('/', slash - 1);
  }
  if (slash == std::string::npos) return pattern;
  std::string plain;
  for (const char c : pattern.substr(0, slash)) {
    if (std::string_view("[]*?\\").find(c) != std::string_view::npos) plain += '\\';
    plain += c;
  }
  return plain + pattern.substr(slash);
}

std::vector<std::string> files_of_glob(std::string_view what, const std::string& pattern,
                                       std::string_view expected) {
  struct stat place {};
  if (::lstat(pattern.c_str(), &place) == 0) return {pattern};
  ::glob_t found{};
  const int status = ::glob(with_plain_folders(pattern).c_str(), GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (status != 0 || paths.empty()) {
    throw InputError(fmt::format("{} = {}: no file matches, expected {}", what, pattern, expected));
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

std::vector<std::string> files_of_globs(std::string_view what,
                                        const std::vector<std::string>& patterns,
                                        std::string_view expected) {
  std::vector<std::string> paths;
  std::set<std::string> known;
  for (const std::string& pattern : patterns) {
    for (std::string& path : files_of_glob(what, pattern, expected)) {
      if (!known.insert(path).second) {
        throw InputError(fmt::format("{} = {}: {} comes a second time, expected each file once",
                                     what, pattern, path));
      }
      file_nbytes(path);
      paths.push_back(std::move(path));
    }
  }
  return paths;
}

FileFormat format_of_name(const std::string& path) {
  const std::string_view name = name_without_compression(path);
  const auto ends = [&](std::string_view end) { return name.ends_with(end); };
  if (ends(".txt") || ends(".text") || ends(".md")) return FileFormat::kText;
  if (ends(".jsonl") || ends(".ndjson")) return FileFormat::kJsonl;
  if (ends(".parquet")) return FileFormat::kParquet;
  throw InputError(fmt::format(
      "{}: its name says no format, expected .txt, .jsonl or .parquet, also with .gz or .zst",
      path));
}

std::unique_ptr<FileReader> open_documents(const std::string& path,
                                           const DocumentOptions& options) {
  const FileFormat format =
      options.format == FileFormat::kAuto ? format_of_name(path) : options.format;
  const Compression compression = compression_of_name(path);
  switch (format) {
    case FileFormat::kText:
      return open_text(path, compression, options);
    case FileFormat::kJsonl:
      return open_jsonl(path, compression, options);
    default:
      return open_parquet(path, compression, options);
  }
}

DocumentReader::DocumentReader(std::vector<std::string> paths, DocumentOptions options)
    : paths_(std::move(paths)), options_(std::move(options)) {
  for (const std::string& path : paths_) {
    first_byte_.push_back(nbytes_);
    nbytes_ += file_nbytes(path);
  }
}

bool DocumentReader::next(Document& document) {
  for (; start_.file < static_cast<int64_t>(paths_.size()); start_ = {.file = start_.file + 1}) {
    if (reader_ == nullptr) {
      reader_ = open_documents(paths_[static_cast<size_t>(start_.file)], options_);
      if (start_.row > 0) reader_->seek(start_);
    }
    if (reader_->next(document)) {
      document.position.file = start_.file;
      return true;
    }
    num_null_ += reader_->num_null();
    reader_.reset();
  }
  return false;
}

void DocumentReader::seek(const DocumentPosition& position) {
  if (position.file < 0 || position.file > static_cast<int64_t>(paths_.size())) {
    throw InputError(fmt::format("documents: a position in file {}, expected one of the {} files",
                                 position.file, paths_.size()));
  }
  num_null_ = this->num_null();
  reader_.reset();
  start_ = position;
}

DocumentPosition DocumentReader::position() const {
  DocumentPosition position = reader_ != nullptr ? reader_->position() : start_;
  position.file = start_.file;
  return position;
}

std::string DocumentReader::where(const DocumentPosition& position) const {
  const std::string& path = paths_.at(static_cast<size_t>(position.file));
  const FileFormat format =
      options_.format == FileFormat::kAuto ? format_of_name(path) : options_.format;
  if (format == FileFormat::kText) return path;
  return fmt::format("{}: {} {}", path, format == FileFormat::kJsonl ? "line" : "row",
                     position.row + 1);
}

int64_t DocumentReader::nbytes_read() const {
  if (start_.file == static_cast<int64_t>(paths_.size())) return nbytes_;
  return first_byte_[static_cast<size_t>(start_.file)] +
         (reader_ != nullptr ? reader_->nbytes_read() : 0);
}

int64_t DocumentReader::num_null() const {
  return num_null_ + (reader_ != nullptr ? reader_->num_null() : 0);
}

}  // namespace tessera::apps
