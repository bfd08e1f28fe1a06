#include <zlib.h>

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/formats/parquet/codec.h"
#include "core/formats/parquet/file.h"
#include "core/formats/parquet/thrift.h"
#include "core/text.h"

namespace tessera::parquet {
namespace {

constexpr int64_t kBatchEntries = 1024;
constexpr int64_t kWindowNbytes = 256 << 10;  // of one read
constexpr int64_t kHeaderNbytes = 1 << 10;    // at first
constexpr int64_t kMaxHeaderNbytes = 16 << 20;

/// Bits of a level.
int level_width(int max) {
  int width = 0;
  while (max >> width != 0) ++width;
  return width;
}

}  // namespace

ColumnReader::ColumnReader(const File& file, const Node& leaf, size_t row_group)
    : file_(file),
      leaf_(leaf),
      chunk_(file.metadata().row_groups.at(row_group).columns.at(static_cast<size_t>(leaf.leaf))),
      position_(chunk_.begin),
      num_left_(chunk_.num_values) {
  for (size_t i = 0; i < row_group; ++i) first_row_ += file.metadata().row_groups[i].num_rows;
  if (leaf.type != PhysicalType::kByteArray) {
    fail(fmt::format("{} values, expected BYTE_ARRAY", name_of(leaf.type)));
  }
  if (!is_known(chunk_.codec)) {
    fail(fmt::format("codec {}, expected UNCOMPRESSED, SNAPPY, GZIP, ZSTD or LZ4_RAW",
                     name_of(chunk_.codec)));
  }
}

void ColumnReader::fail(std::string_view what) const {
  throw InputError(fmt::format("{}: column \"{}\", row {}: {}", file_.path(), shorten(leaf_.path),
                               first_row_ + num_rows_ + 1, what));
}

/// As many bytes of the column as there are, at most `nbytes`.
std::string_view ColumnReader::peek(int64_t nbytes) {
  const int64_t wanted = std::min(nbytes, chunk_.end - position_);
  const size_t has = window_end_ - window_begin_;
  if (static_cast<int64_t>(has) < wanted) {
    const int64_t rest = chunk_.end - position_;
    const auto more = static_cast<size_t>(std::min(rest, std::max(wanted, kWindowNbytes)));
    if (more > window_capacity_) {
      std::unique_ptr<char[]> larger(new char[more]);
      if (has > 0) std::memcpy(larger.get(), window_.get() + window_begin_, has);
      window_ = std::move(larger);
      window_capacity_ = more;
    } else if (has > 0) {
      std::memmove(window_.get(), window_.get() + window_begin_, has);
    }
    file_.read(position_ + static_cast<int64_t>(has), window_.get() + has, more - has);
    window_begin_ = 0, window_end_ = more;
  }
  return {window_.get() + window_begin_, static_cast<size_t>(wanted)};
}

void ColumnReader::advance(int64_t nbytes) {
  window_begin_ += static_cast<size_t>(nbytes);
  position_ += nbytes;
}

PageHeader ColumnReader::read_header() {
  for (int64_t nbytes = kHeaderNbytes;; nbytes *= 4) {
    const std::string_view bytes = peek(nbytes);
    try {
      const PageHeader header = parse_page_header(bytes);
      advance(header.header_nbytes);
      return header;
    } catch (const ThriftEnd&) {  // statistics can be long
      if (static_cast<int64_t>(bytes.size()) < nbytes || nbytes >= kMaxHeaderNbytes) throw;
    }
  }
}

void ColumnReader::read_page() {
  const PageHeader header = read_header();
  const int64_t rest = chunk_.end - position_;
  if (header.packed_nbytes > rest) {
    throw InputError(
        fmt::format("a page of {} bytes, expected at most the {} that are left of the "
                    "column",
                    header.packed_nbytes, rest));
  }
  if (header.nbytes > file_.limits().max_page_nbytes ||
      header.nbytes > max_unpacked_nbytes(chunk_.codec, header.packed_nbytes)) {
    throw InputError(fmt::format(
        "a page of {} bytes from {}, expected at most {}", header.nbytes, header.packed_nbytes,
        std::min(file_.limits().max_page_nbytes,
                 max_unpacked_nbytes(chunk_.codec, header.packed_nbytes))));
  }
  const std::string_view packed = peek(header.packed_nbytes);
  if (header.crc) {
    const auto crc = static_cast<uint32_t>(::crc32(0, reinterpret_cast<const Bytef*>(packed.data()),
                                                   static_cast<uInt>(packed.size())));
    if (crc != *header.crc) {
      throw InputError(
          fmt::format("a page with checksum {:08x}, expected {:08x}", crc, *header.crc));
    }
  }
  switch (header.type) {
    case PageType::kIndex:
      break;
    case PageType::kDictionary: {
      if (header.encoding != Encoding::kPlain && header.encoding != Encoding::kPlainDictionary) {
        throw InputError(
            fmt::format("a dictionary in {}, expected PLAIN", name_of(header.encoding)));
      }
      const std::string_view page = unpack_page(header, packed, 0);
      dictionary_ = std::make_shared<Dictionary>(buffer_, page, header.num_values);
      break;
    }
    default:
      read_data_page(header, packed);
  }
  advance(header.packed_nbytes);
}

/// The page, in buffer_, of which the first `kept` bytes are as they are.
std::string_view ColumnReader::unpack_page(const PageHeader& header, std::string_view packed,
                                           size_t kept) {
  const auto nbytes = static_cast<size_t>(header.nbytes);
  values_ = ValueDecoder();  // lets go of the last page
  if (buffer_ == nullptr || buffer_.use_count() > 1 || buffer_->capacity < nbytes) {
    buffer_ = std::make_shared<Buffer>(nbytes);
  }
  uint8_t* const out = buffer_->bytes.get();
  if (kept > 0) std::memcpy(out, packed.data(), kept);
  packed.remove_prefix(kept);
  const Codec codec = header.is_packed ? chunk_.codec : Codec::kNone;
  // Where there are nulls only, some writers leave the values out, others pack nothing.
  if (nbytes > kept || !packed.empty()) unpack(codec, packed, out + kept, nbytes - kept);
  return buffer_->text(nbytes);
}

HybridDecoder ColumnReader::read_levels(std::string_view& page, int64_t nbytes, Encoding encoding,
                                        int max) {
  if (max == 0 && nbytes <= 0) return {};
  if (nbytes < 0) {  // version 1 says the length in front
    if (encoding != Encoding::kRle) {
      throw InputError(fmt::format("levels in {}, expected RLE", name_of(encoding)));
    }
    uint32_t length = 0;
    if (page.size() < sizeof(length)) throw InputError("a page without levels, expected them");
    std::memcpy(&length, page.data(), sizeof(length));
    page.remove_prefix(sizeof(length));
    nbytes = length;
  }
  if (nbytes > static_cast<int64_t>(page.size())) {
    throw InputError(fmt::format("levels of {} bytes, expected at most {}", nbytes, page.size()));
  }
  const HybridDecoder levels(page.substr(0, static_cast<size_t>(nbytes)), level_width(max));
  page.remove_prefix(static_cast<size_t>(nbytes));
  return levels;
}

void ColumnReader::read_data_page(const PageHeader& header, std::string_view packed) {
  if (header.num_values > num_left_) {
    throw InputError(
        fmt::format("a page of {} values, expected at most the {} that are left of the "
                    "column",
                    header.num_values, num_left_));
  }
  const bool is_v2 = header.type == PageType::kDataV2;
  const int64_t levels_nbytes = int64_t{header.rep_nbytes} + header.def_nbytes;
  if (header.rep_nbytes < 0 || header.def_nbytes < 0 ||
      levels_nbytes > std::min(header.nbytes, header.packed_nbytes)) {
    throw InputError(fmt::format("levels of {} and {} bytes, expected them in a page of {}",
                                 header.rep_nbytes, header.def_nbytes, header.packed_nbytes));
  }
  std::string_view page =
      unpack_page(header, packed, is_v2 ? static_cast<size_t>(levels_nbytes) : 0);
  rep_ = read_levels(page,
                     is_v2               ? header.rep_nbytes
                     : leaf_.max_rep > 0 ? -1
                                         : 0,
                     header.rep_encoding, leaf_.max_rep);
  def_ = read_levels(page,
                     is_v2               ? header.def_nbytes
                     : leaf_.max_def > 0 ? -1
                                         : 0,
                     header.def_encoding, leaf_.max_def);
  values_ = ValueDecoder(buffer_, page, header.encoding, dictionary_);
  num_left_in_page_ = header.num_values;
}

bool ColumnReader::next(Batch& batch) {
  batch.values.clear();
  batch.owner.reset();
  try {
    while (num_left_in_page_ == 0) {
      if (num_left_ == 0) return false;
      if (position_ == chunk_.end) {
        throw InputError(fmt::format("the column ends {} values early, expected {}", num_left_,
                                     chunk_.num_values));
      }
      read_page();
    }
    const int64_t count = std::min({kBatchEntries, num_left_in_page_, values_.max_count()});
    const auto read_levels = [&](HybridDecoder& levels, std::vector<uint8_t>& out, int max) {
      out.resize(max > 0 ? static_cast<size_t>(count) : 0);
      levels.read(out.data(), static_cast<int64_t>(out.size()));
      for (const uint8_t level : out) {
        if (level > max) throw InputError(fmt::format("level {}, expected at most {}", level, max));
      }
    };
    read_levels(rep_, batch.rep, leaf_.max_rep);
    read_levels(def_, batch.def, leaf_.max_def);
    const int64_t num_values =
        leaf_.max_def == 0 ? count : std::count(batch.def.begin(), batch.def.end(), leaf_.max_def);
    values_.read(batch.values, num_values, batch.owner);
    batch.num_entries = count;
    num_left_in_page_ -= count, num_left_ -= count;
    num_rows_ += leaf_.max_rep == 0 ? count : std::count(batch.rep.begin(), batch.rep.end(), 0);
    return true;
  } catch (const InputError& error) {
    const std::string_view text = error.what();
    if (text.starts_with(file_.path() + ": ")) throw;  // the file itself
    fail(text);
  }
}

}  // namespace tessera::parquet
