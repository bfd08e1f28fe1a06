#include "core/formats/parquet/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/check.h"
#include "core/files.h"

namespace tessera::parquet {
namespace {

constexpr std::string_view kMagic = "PAR1", kEncryptedMagic = "PARE";
constexpr int64_t kTailNbytes = 8;  // the footer's length and the magic

}  // namespace

File::File(const std::string& path, const Limits& limits)
    : File(open_regular_file(path), path, limits) {}

File::File(int descriptor, std::string path, const Limits& limits)
    : descriptor_(descriptor), path_(std::move(path)), limits_(limits) {
  try {
    read_footer();
  } catch (const InputError&) {
    ::close(descriptor_);
    throw;
  }
}

File::~File() {
  ::close(descriptor_);
}

void File::read(int64_t offset, void* out, size_t nbytes) const {
  for (size_t done = 0; done < nbytes;) {
    const ssize_t got = ::pread(descriptor_, static_cast<char*>(out) + done, nbytes - done,
                                offset + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw InputError(fmt::format("{}: cannot be read: {}", path_, std::strerror(errno)));
    }
    if (got == 0) {
      throw InputError(fmt::format("{}: ends at byte {}, expected {} bytes as before", path_,
                                   offset + static_cast<int64_t>(done), nbytes_));
    }
    done += static_cast<size_t>(got);
  }
}

void File::read_footer() {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) {
    throw InputError(fmt::format("{}: cannot be read: {}", path_, std::strerror(errno)));
  }
  nbytes_ = status.st_size;
  const int64_t least = static_cast<int64_t>(kMagic.size()) + kTailNbytes;
  if (nbytes_ < least) {
    throw InputError(
        fmt::format("{}: {} bytes, expected a Parquet file of at least {}", path_, nbytes_, least));
  }
  char head[4], tail[kTailNbytes];
  read(0, head, sizeof(head));
  read(nbytes_ - kTailNbytes, tail, sizeof(tail));
  const std::string_view first(head, sizeof(head)), last(tail + 4, 4);
  if (last == kEncryptedMagic) {
    throw InputError(fmt::format("{}: an encrypted file, expected a plain one", path_));
  }
  if (first != kMagic || last != kMagic) {
    throw InputError(fmt::format("{}: does not {} with PAR1, expected a whole Parquet file", path_,
                                 first != kMagic ? "begin" : "end"));
  }
  uint32_t footer_nbytes = 0;
  std::memcpy(&footer_nbytes, tail, sizeof(footer_nbytes));
  if (footer_nbytes > nbytes_ - least) {
    throw InputError(fmt::format("{}: a footer of {} bytes, expected at most {}", path_,
                                 footer_nbytes, nbytes_ - least));
  }
  const int64_t data_end = nbytes_ - kTailNbytes - footer_nbytes;
  const Buffer footer(footer_nbytes);
  read(data_end, footer.bytes.get(), footer_nbytes);
  try {
    metadata_ = parse_metadata(footer.text(footer_nbytes), data_end);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: footer: {}", path_, error.what()));
  }
}

}  // namespace tessera::parquet
