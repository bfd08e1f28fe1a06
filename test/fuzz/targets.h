#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// The parsers of files that nobody vouches for, as functions of bytes: an Error or an answer that
// is used, whatever the bytes are. Driven by mutate.cc everywhere and by libFuzzer (libfuzzer.sh).

namespace tessera::fuzz {

struct Target {
  std::string_view name;
  void (*run)(std::string_view bytes);
  std::vector<std::string> (*seeds)();  ///< good inputs of several sizes
  std::vector<std::string> (*words)();  ///< the dictionary: what such a file is made of
  /// What one allocation may have beyond twice the input: tables that do not depend on it.
  size_t fixed_nbytes = 64 << 10;
};

const std::vector<Target>& targets();
/// Those of texts and tables to train on.
std::vector<Target> data_targets();
/// Chat templates, and conversations in rows of files.
std::vector<Target> chat_targets();

/// The bytes as a file; its path. The next call replaces it.
std::string as_file(std::string_view bytes);
/// Reads every byte, so that a range outside of the file is found.
void touch(const void* data, int64_t nbytes);

/// Runs the target; an Error is right, anything else passes through. True if the bytes were taken.
bool accepts(const Target& target, std::string_view bytes);

}  // namespace tessera::fuzz
