#pragma once

#include <cstdint>
#include <string_view>

#include "core/formats/parquet/metadata.h"

namespace tessera::parquet {

/// Whether pages of this codec can be read: UNCOMPRESSED, SNAPPY, GZIP, ZSTD, LZ4_RAW.
bool is_known(Codec codec);

/// The most that `packed_nbytes` can become: what a page says is checked against it before memory is
/// asked for.
int64_t max_unpacked_nbytes(Codec codec, int64_t packed_nbytes);

/// Unpacks into exactly `nbytes`. InputError, without the name of a file, if it is not that.
void unpack(Codec codec, std::string_view packed, uint8_t* out, size_t nbytes);

}  // namespace tessera::parquet
