#pragma once

#include "apps/data/byte_stream.h"
#include "apps/data/documents.h"

// Readers of one file each: see FileReader.

namespace tessera::apps {

std::unique_ptr<FileReader> open_text(const std::string& path, Compression compression,
                                      const DocumentOptions& options);
std::unique_ptr<FileReader> open_jsonl(const std::string& path, Compression compression,
                                       const DocumentOptions& options);

/// What is no text but often taken for one, by its first bytes: "a gzip file"; empty if nothing is
/// known about it.
std::string_view packed_format(std::string_view bytes);

}  // namespace tessera::apps
