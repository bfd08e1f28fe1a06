#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/settings.h"

// [Note: Event files]
// What TensorBoard reads: records of TFRecord (length, its masked CRC-32C, bytes, theirs), each an
// `Event` in the wire format of Protocol Buffers, of which the few messages below are written by
// hand. A directory is one run of TensorBoard's; it reads the files in the order of their names and
// goes on from one to the next for good, so the name of a new file sorts behind those that are
// there. A session that starts at a step takes back what earlier files say of it and later ones.

namespace tessera {

struct EventScalar {
  std::string tag;  ///< "loss/train": what is before the first '/' is a group of charts
  double value;
};

/// One event file, which grows by whole records: each is there for a reader when its call returns,
/// none is lost by a process that dies. IoError with the path if one cannot be written: the file is
/// then as it was before.
class EventFile {
 public:
  /// A new file in `dir`, "events.out.tfevents.1764500000.HOST.PID.tessera", of a session whose
  /// first step is `first_step`.
  EventFile(const std::string& dir, int64_t first_step);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  const std::string& path() const { return path_; }

  /// Values of one step, as f32, in one record.
  void add_scalars(int64_t step, std::span<const EventScalar> scalars);
  /// A text as it is, on TensorBoard's page of texts, which would take it for Markdown. What is not
  /// UTF-8 becomes U+FFFD.
  void add_text(int64_t step, std::string_view tag, std::string_view text);
  /// Settings of the session for the page of hyperparameters.
  void add_settings(int64_t step, std::span<const std::pair<std::string, SettingValue>> settings);
  /// The session goes back: what was said of `first_step` and later ones does not hold.
  void restart(int64_t first_step);

 private:
  void add_event(int64_t step, int field, std::string_view message);
  void append(std::string_view event);

  std::string path_;
  int fd_ = -1;
  int64_t nbytes_ = 0;  // of whole records
};

/// Removes the event files of `dir` that an EventFile has made, and no others. IoError.
void remove_event_files(const std::string& dir);

/// CRC-32C (Castagnoli, RFC 3720), and as TFRecord masks it, whose records may hold checksums:
/// rotated right by 15 bits, plus 0xa282ead8.
uint32_t crc32c(std::string_view bytes);
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace tessera
