#include "apps/data/text_files.h"

#include <algorithm>
#include <cstring>

#include "apps/data/json_line.h"
#include "core/check.h"
#include "core/files.h"
#include "core/text.h"
#include "core/utf8.h"

namespace tessera::apps {
namespace {

constexpr size_t kBlockNbytes = 4 << 20;

/// Bytes with an end that grows, not filled with zeros.
struct Block {
  explicit Block(size_t nbytes) : bytes(new char[nbytes]), capacity(nbytes) {}
  std::unique_ptr<char[]> bytes;
  size_t capacity;
};

[[noreturn]] void fail_seek(const std::string& path, const DocumentPosition& position) {
  throw InputError(
      fmt::format("{}: no document begins at row {}, byte {}, expected the file as it "
                  "was",
                  path, position.row, position.byte));
}

std::string byte_text(std::string_view text, size_t offset) {
  return fmt::format("0x{:02x}", static_cast<unsigned char>(text[offset]));
}

class TextReader : public FileReader {
 public:
  TextReader(const std::string& path, Compression compression, const DocumentOptions& options)
      : path_(path), compression_(compression), options_(options) {
    if (options.whole_rows) {
      throw InputError(fmt::format("{}: a text, expected .jsonl or .parquet with rows", path));
    }
  }

  bool next(Document& document) override {
    if (position_.row > 0) return false;
    if (compression_ == Compression::kNone) {
      const auto file = std::make_shared<MappedFile>(path_);
      nbytes_read_ = file->nbytes();
      document.text = file->text();
      document.owner = file;
    } else {
      unpack(document);
    }
    if (document.text.empty()) {
      throw InputError(fmt::format("{}: 0 bytes, expected a text", path_));
    }
    if (const auto format = packed_format(document.text); !format.empty()) {
      throw InputError(fmt::format("{}: it looks like {}, expected a text", path_, format));
    }
    if (const size_t bad = find_invalid_utf8(document.text); bad < document.text.size()) {
      if (options_.invalid == InvalidText::kError) {
        throw InputError(fmt::format("{}: byte {} ({}) is in no character, expected UTF-8", path_,
                                     bad, byte_text(document.text, bad)));
      }
      const auto mended = std::make_shared<std::string>(replace_invalid_utf8(document.text));
      document.text = *mended;
      document.owner = mended;
    }
    document.position.row = document.position.byte = 0;
    position_.row = 1;
    return true;
  }

  void seek(const DocumentPosition& position) override {
    if (position.row < 0 || position.row > 1 || position.byte != 0) fail_seek(path_, position);
    position_.row = position.row;
  }
  DocumentPosition position() const override { return position_; }
  int64_t nbytes_read() const override { return nbytes_read_; }

 private:
  void unpack(Document& document) {
    const auto stream = ByteStream::open(path_, compression_);
    auto block = std::make_shared<Block>(kBlockNbytes);
    size_t length = 0;
    while (const size_t got = stream->read(block->bytes.get() + length, block->capacity - length)) {
      length += got;
      if (length > static_cast<size_t>(options_.max_document_nbytes)) {
        throw InputError(
            fmt::format("{}: more than {} bytes unpacked, expected at most that many "
                        "in a document",
                        path_, options_.max_document_nbytes));
      }
      if (length < block->capacity) continue;
      auto larger = std::make_shared<Block>(2 * length);
      std::memcpy(larger->bytes.get(), block->bytes.get(), length);
      block = std::move(larger);
    }
    nbytes_read_ = stream->nbytes_read();
    document.text = {block->bytes.get(), length};
    document.owner = std::move(block);
  }

  std::string path_;
  Compression compression_;
  DocumentOptions options_;
  DocumentPosition position_;
  int64_t nbytes_read_ = 0;
};

class JsonlReader : public FileReader {
 public:
  JsonlReader(const std::string& path, Compression compression, const DocumentOptions& options)
      : path_(path), options_(options), stream_(ByteStream::open(path, compression)) {}

  bool next(Document& document) override {
    document.owner.reset();  // the block can be used again
    std::string_view line;
    while (next_line(line)) {
      if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
      ++num_rows_;
      if (take(line, document)) return true;
      ++num_null_;
    }
    if (num_rows_ == 0 && begins_at_ == 0) {
      throw InputError(fmt::format("{}: blank lines only, expected lines of JSON", path_));
    }
    return false;
  }
  int64_t num_null() const override { return num_null_; }

  void seek(const DocumentPosition& position) override {
    if (position < position_ || begin_ != end_) fail_seek(path_, position);
    stream_->skip(position.byte - position_.byte);
    position_.row = position.row;
    position_.byte = begins_at_ = position.byte;
  }
  DocumentPosition position() const override { return position_; }
  int64_t nbytes_read() const override { return stream_->nbytes_read(); }

 private:
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw InputError(fmt::format("{}: line {}: {}", path_, line_.row + 1,
                                 fmt::format(format, std::forward<Args>(args)...)));
  }

  /// The bytes of the next line without its end.
  bool next_line(std::string_view& line) {
    line_ = position_;
    size_t scanned = 0;
    while (true) {
      const char* const data = block_ != nullptr ? block_->bytes.get() + begin_ : nullptr;
      const size_t length = end_ - begin_;
      const auto* const found = static_cast<const char*>(
          length > scanned ? std::memchr(data + scanned, '\n', length - scanned) : nullptr);
      if (found == nullptr && !is_at_end_) {
        scanned = length;
        refill();
        continue;
      }
      if (found == nullptr && length == 0) return false;
      const size_t line_nbytes = found != nullptr ? static_cast<size_t>(found - data) : length;
      check_length(line_nbytes);
      line = {data, line_nbytes};
      const size_t step = line_nbytes + (found != nullptr ? 1 : 0);
      begin_ += step;
      position_.byte += static_cast<int64_t>(step);
      ++position_.row;
      return true;
    }
  }

  void check_length(size_t nbytes) const {
    if (nbytes > static_cast<size_t>(options_.max_document_nbytes)) {
      fail("more than {} bytes, expected at most that many", options_.max_document_nbytes);
    }
  }

  /// More bytes behind those that are left, in a block of their own: documents keep theirs.
  void refill() {
    const size_t left = end_ - begin_;
    check_length(left);
    if (block_ == nullptr || block_.use_count() > 1 || begin_ == 0) {
      auto block = std::make_shared<Block>(std::max(kBlockNbytes, 2 * left));
      if (left > 0) std::memcpy(block->bytes.get(), block_->bytes.get() + begin_, left);
      block_ = std::move(block);
    } else if (left > 0) {
      std::memmove(block_->bytes.get(), block_->bytes.get() + begin_, left);
    }
    begin_ = 0, end_ = left;
    const size_t got = stream_->read(block_->bytes.get() + end_, block_->capacity - end_);
    end_ += got;
    is_at_end_ = got == 0;
    if (is_at_end_ && position_.byte == 0 && end_ == 0) {
      throw InputError(fmt::format("{}: 0 bytes, expected lines of JSON", path_));
    }
  }

  /// False for a null that is to be left out.
  bool take(std::string_view line, Document& document) {
    std::shared_ptr<const void> owner = block_;
    if (const size_t bad = find_invalid_utf8(line); bad < line.size()) {
      if (options_.invalid == InvalidText::kError) {
        fail("byte {} of the line ({}) is in no character, expected UTF-8", bad,
             byte_text(line, bad));
      }
      const auto mended = std::make_shared<std::string>(replace_invalid_utf8(line));
      line = *mended;
      owner = mended;
    }
    constexpr std::string_view kMark = "\xef\xbb\xbf";  // of the byte order: some editors write it
    if (line_.byte == 0 && line.starts_with(kMark)) line.remove_prefix(kMark.size());
    if (!options_.whole_rows) {
      try {
        // The bytes are ours, and nobody comes back to the line.
        const JsonString found =
            json_string_field(const_cast<char*>(line.data()), line.size(), options_.field,
                              options_.invalid == InvalidText::kReplace);
        if (found.is_null && options_.null == NullText::kSkip) return false;
        if (found.is_null) {
          throw InputError(
              fmt::format("field \"{}\" is null, expected a string", shorten(options_.field)));
        }
        line = found.text;
      } catch (const InputError& error) {
        fail("{}", error.what());
      }
    }
    document.text = line;
    document.position.row = line_.row;
    document.position.byte = line_.byte;
    document.owner = std::move(owner);
    return true;
  }

  std::string path_;
  DocumentOptions options_;
  std::unique_ptr<ByteStream> stream_;
  std::shared_ptr<Block> block_;
  size_t begin_ = 0, end_ = 0;  // of what is not read yet, in the block
  bool is_at_end_ = false;
  DocumentPosition position_, line_;  // of what comes, of the line that is read
  int64_t begins_at_ = 0, num_rows_ = 0, num_null_ = 0;
};

}  // namespace

std::unique_ptr<FileReader> open_text(const std::string& path, Compression compression,
                                      const DocumentOptions& options) {
  return std::make_unique<TextReader>(path, compression, options);
}

std::unique_ptr<FileReader> open_jsonl(const std::string& path, Compression compression,
                                       const DocumentOptions& options) {
  return std::make_unique<JsonlReader>(path, compression, options);
}

std::string_view packed_format(std::string_view bytes) {
  struct Magic {
    std::string_view bytes, what;
  };
  constexpr std::array kMagics = {Magic{"\x1f\x8b", "a gzip file"},
                                  Magic{"PK\x03\x04", "a zip archive"},
                                  Magic{"\xfd"
                                        "7zXZ",
                                        "an xz file"},
                                  Magic{"BZh", "a bzip2 file"},
                                  Magic{"\x28\xb5\x2f\xfd", "a zstd file"},
                                  Magic{"PAR1", "a Parquet file"},
                                  Magic{"%PDF-", "a PDF file"}};
  for (const Magic& magic : kMagics) {
    if (bytes.starts_with(magic.bytes)) return magic.what;
  }
  return "";
}

}  // namespace tessera::apps
