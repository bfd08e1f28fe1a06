#pragma once

#include <string>

namespace tessera::dist {

/// The directory that an export makes. It is written as TARGET.partial and takes its place whole:
/// who reads TARGET sees the model that was there or the new one, never files of both. What was
/// there must be nothing, an empty directory, or an earlier export, unchanged since: each has a
/// list of its files with their sizes, and the hashes of small ones. Anything else is refused,
/// before it is written and again before it is replaced, so that nobody's model or notes are lost.
class ExportDirectory {
 public:
  /// Errors   ConfigError if TARGET holds something else or TARGET.partial is there; IoError
  explicit ExportDirectory(const std::string& target);
  ~ExportDirectory();  ///< without `commit` nothing is left of it
  ExportDirectory(const ExportDirectory&) = delete;
  ExportDirectory& operator=(const ExportDirectory&) = delete;

  /// Where the files are written, with plain names.
  const std::string& path() const { return partial_; }
  /// Flushes, and puts it in its place. ConfigError, IoError.
  void commit();

 private:
  std::string target_, partial_;
  bool is_committed_ = false;
};

/// What an export calls the list of its files.
inline constexpr const char* kExportListName = "tessera_export.json";

}  // namespace tessera::dist
