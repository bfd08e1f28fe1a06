#include "core/formats/tensor_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "core/files.h"

namespace tessera {

TensorFileWriter::TensorFileWriter(std::string format, const std::string& path,
                                   std::string_view header, std::vector<Entry> entries,
                                   int64_t nbytes)
    : format_(std::move(format)),
      path_(path),
      entries_(std::move(entries)),
      is_written_(entries_.size()) {
  for (const Entry& entry : entries_) by_name_.emplace(entry.name, by_name_.size());
  TESSERA_CHECK(by_name_.size() == entries_.size(), "{}: a tensor is named twice", format_);
  fd_ = open_new_file(path_ + ".tmp");
  if (fd_ < 0) fail(std::strerror(errno));
  try {
    if (::ftruncate(fd_, nbytes) != 0) fail(std::strerror(errno));
    write_bytes(0, header.data(), static_cast<int64_t>(header.size()));
  } catch (...) {
    ::close(fd_);
    ::unlink((path_ + ".tmp").c_str());
    throw;
  }
}

TensorFileWriter::~TensorFileWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink((path_ + ".tmp").c_str());
}

size_t TensorFileWriter::index_of(std::string_view name) const {
  const auto found = by_name_.find(name);
  TESSERA_CHECK(found != by_name_.end(), "{}: no tensor {} among {}", format_, name,
                entries_.size());
  return found->second;
}

void TensorFileWriter::write(std::string_view name, const void* data, int64_t nbytes) {
  const size_t index = index_of(name);
  const Entry& entry = entries_[index];
  TESSERA_CHECK(entry.nbytes == nbytes, "{}: tensor {} of {} bytes, expected {}", format_, name,
                nbytes, entry.nbytes);
  TESSERA_CHECK(!is_written_[index], "{}: tensor {} written twice", format_, name);
  write_bytes(entry.offset, data, nbytes);
  is_written_[index] = true;
}

void TensorFileWriter::finish() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    TESSERA_CHECK(is_written_[i], "{}: tensor {} was not written", format_, entries_[i].name);
  }
  if (::fsync(fd_) != 0) fail(std::strerror(errno));
  const int status = ::close(std::exchange(fd_, -1));
  if (status != 0 || ::rename((path_ + ".tmp").c_str(), path_.c_str()) != 0) {
    const std::string reason = std::strerror(errno);
    ::unlink((path_ + ".tmp").c_str());
    fail(reason);
  }
}

void TensorFileWriter::write_bytes(int64_t offset, const void* data, int64_t nbytes) {
  const char* next = static_cast<const char*>(data);
  while (nbytes > 0) {
    const ssize_t written = ::pwrite(fd_, next, static_cast<size_t>(nbytes), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(std::strerror(errno));
    next += written;
    offset += written;
    nbytes -= written;
  }
}

void TensorFileWriter::fail(std::string_view what) const {
  throw IoError(fmt::format("{}: cannot be written: {}", path_, what));
}

}  // namespace tessera
