#include "core/formats/parquet/codec.h"

#include <lz4.h>
#include <snappy.h>
#include <zlib.h>
#include <zstd.h>

#include <climits>
#include <cstring>
#include <memory>

#include "core/check.h"

namespace tessera::parquet {
namespace {

[[noreturn]] void fail(std::string_view codec, std::string_view what, std::string_view expected) {
  throw InputError(fmt::format("{} data: {}, expected {}", codec, what, expected));
}

void check_size(std::string_view codec, uint64_t found, size_t nbytes) {
  if (found != nbytes) {
    fail(codec, fmt::format("{} bytes unpacked", found),
         fmt::format("{} as its header says", nbytes));
  }
}

void unpack_zstd(std::string_view packed, uint8_t* out, size_t nbytes) {
  // A context for each thread: to make one takes longer than a small page.
  thread_local const std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> context(ZSTD_createDCtx(),
                                                                                  &ZSTD_freeDCtx);
  const size_t got = ZSTD_decompressDCtx(context.get(), out, nbytes, packed.data(), packed.size());
  if (ZSTD_isError(got)) fail("ZSTD", ZSTD_getErrorName(got), "a whole frame");
  check_size("ZSTD", got, nbytes);
}

void unpack_snappy(std::string_view packed, uint8_t* out, size_t nbytes) {
  size_t length = 0;
  if (!snappy::GetUncompressedLength(packed.data(), packed.size(), &length)) {
    fail("SNAPPY", "damaged", "its length");
  }
  check_size("SNAPPY", length, nbytes);
  if (!snappy::RawUncompress(packed.data(), packed.size(), reinterpret_cast<char*>(out))) {
    fail("SNAPPY", "damaged", fmt::format("{} bytes unpacked", nbytes));
  }
}

void unpack_gzip(std::string_view packed, uint8_t* out, size_t nbytes) {
  constexpr int kGzipOrZlib = 32;
  z_stream state{};
  if (::inflateInit2(&state, MAX_WBITS + kGzipOrZlib) != Z_OK) throw std::bad_alloc();
  const std::unique_ptr<z_stream, decltype(&::inflateEnd)> end(&state, &::inflateEnd);
  state.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
  state.avail_in = static_cast<uInt>(packed.size());
  state.next_out = out;
  state.avail_out = static_cast<uInt>(nbytes);
  const int status = ::inflate(&state, Z_FINISH);
  if (status != Z_STREAM_END) {
    fail("GZIP", state.msg != nullptr ? state.msg : "ends early or is longer",
         fmt::format("{} bytes unpacked", nbytes));
  }
  check_size("GZIP", state.total_out, nbytes);
}

void unpack_lz4(std::string_view packed, uint8_t* out, size_t nbytes) {
  const int got = LZ4_decompress_safe(packed.data(), reinterpret_cast<char*>(out),
                                      static_cast<int>(packed.size()), static_cast<int>(nbytes));
  if (got < 0) fail("LZ4_RAW", "damaged", fmt::format("{} bytes unpacked", nbytes));
  check_size("LZ4_RAW", static_cast<uint64_t>(got), nbytes);
}

}  // namespace

bool is_known(Codec codec) {
  return codec == Codec::kNone || codec == Codec::kSnappy || codec == Codec::kGzip ||
         codec == Codec::kZstd || codec == Codec::kLz4Raw;
}

int64_t max_unpacked_nbytes(Codec codec, int64_t packed_nbytes) {
  // What the densest piece of each format expands to: a copy of 64 bytes from 3 of Snappy, 258
  // from 2 bits of Deflate, 255 from 1 of LZ4, a block of 128 KiB from 4 of Zstandard.
  switch (codec) {
    case Codec::kSnappy:
      return packed_nbytes * 64;
    case Codec::kGzip:
      return packed_nbytes * 1040;
    case Codec::kLz4Raw:
      return packed_nbytes * 256;
    case Codec::kZstd:
      return packed_nbytes * (128 << 10);
    default:
      return packed_nbytes;
  }
}

void unpack(Codec codec, std::string_view packed, uint8_t* out, size_t nbytes) {
  static_assert(INT_MAX >= INT32_MAX, "sizes of pages are of 32 bits");
  switch (codec) {
    case Codec::kNone:
      check_size("UNCOMPRESSED", packed.size(), nbytes);
      if (nbytes > 0) std::memcpy(out, packed.data(), nbytes);
      return;
    case Codec::kSnappy:
      return unpack_snappy(packed, out, nbytes);
    case Codec::kGzip:
      return unpack_gzip(packed, out, nbytes);
    case Codec::kZstd:
      return unpack_zstd(packed, out, nbytes);
    case Codec::kLz4Raw:
      return unpack_lz4(packed, out, nbytes);
    default:
      throw InputError(fmt::format("{}, expected a known codec", name_of(codec)));
  }
}

}  // namespace tessera::parquet
