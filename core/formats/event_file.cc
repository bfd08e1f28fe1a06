#include "core/formats/event_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <variant>

#include "core/check.h"
#include "core/utf8.h"

namespace tessera {
namespace {

constexpr std::string_view kEventPrefix = "events.out.tfevents.", kEventSuffix = ".tessera";

constexpr std::array<uint32_t, 256> make_crc32c_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0x82f63b78u : 0);
    table[i] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrc32cTable = make_crc32c_table();

/// A message of Protocol Buffers, field by field. A field of value 0 is written too: a reader takes
/// it as one that is left out.
class WireMessage {
 public:
  WireMessage& integer(int field, uint64_t value) {
    key(field, 0);
    varint(value);
    return *this;
  }
  WireMessage& f64(int field, double value) {
    key(field, 1);
    little_endian(std::bit_cast<uint64_t>(value), 8);
    return *this;
  }
  WireMessage& f32(int field, float value) {
    key(field, 5);
    little_endian(std::bit_cast<uint32_t>(value), 4);
    return *this;
  }
  /// Bytes, a text (UTF-8) or a message.
  WireMessage& text(int field, std::string_view value) {
    key(field, 2);
    varint(value.size());
    bytes_ += value;
    return *this;
  }
  WireMessage& message(int field, const WireMessage& value) { return text(field, value.bytes_); }
  void little_endian(uint64_t value, int nbytes) {
    for (int i = 0; i < nbytes; ++i) bytes_ += static_cast<char>(value >> 8 * i & 0xff);
  }
  void append(std::string_view bytes) { bytes_ += bytes; }
  const std::string& bytes() const { return bytes_; }

 private:
  void key(int field, uint64_t wire_type) { varint(static_cast<uint64_t>(field) << 3 | wire_type); }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

namespace proto {  // fields of tensorboard/compat/proto, event.proto and those that it takes in.
constexpr int kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;  // Event
constexpr int kValue = 1;                                                                 // Summary
constexpr int kTag = 1, kSimpleValue = 2, kTensor = 8, kMetadata = 9;  // Summary.Value
constexpr int kPluginData = 1, kDataClass = 4;                         // SummaryMetadata
constexpr int kPluginName = 1, kPluginContent = 2;                     // and its PluginData
constexpr int kSessionStatus = 1;                                      // SessionLog
constexpr uint64_t kSessionStart = 1, kTensorClass = 2, kStringDtype = 7, kFloatDtype = 1;
}  // namespace proto

WireMessage plugin(std::string_view name, std::string_view content, bool is_tensor) {
  WireMessage metadata;
  metadata.message(
      proto::kPluginData,
      WireMessage().text(proto::kPluginName, name).text(proto::kPluginContent, content));
  if (is_tensor) metadata.integer(proto::kDataClass, proto::kTensorClass);
  return metadata;
}

/// TensorProto of one element: dtype, shape {1}.
WireMessage tensor_of_one(uint64_t dtype) {
  return WireMessage().integer(1, dtype).message(
      2, WireMessage().message(2, WireMessage().integer(1, 1)));
}

/// google.protobuf.Value.
WireMessage value_message(const SettingValue& setting) {
  WireMessage value;
  if (const auto* const flag = std::get_if<bool>(&setting)) {
    value.integer(4, *flag ? 1 : 0);
  } else if (const auto* const integer = std::get_if<int64_t>(&setting)) {
    value.f64(2, static_cast<double>(*integer));
  } else if (const auto* const number = std::get_if<double>(&setting)) {
    value.f64(2, *number);
  } else {
    value.text(3, replace_invalid_utf8(std::get<std::string>(setting)));
  }
  return value;
}

bool is_event_file(std::string_view name) {
  return name.starts_with(kEventPrefix) && name.ends_with(kEventSuffix);
}

/// Of the file's name: ten digits, so that names sort by them.
int64_t seconds_of(std::string_view name) {
  int64_t seconds = 0;
  name.remove_prefix(kEventPrefix.size());
  for (int i = 0; i < 10; ++i) {
    if (static_cast<size_t>(i) >= name.size() || name[i] < '0' || name[i] > '9') return 0;
    seconds = seconds * 10 + (name[i] - '0');
  }
  return seconds;
}

/// Behind all event files that `dir` has, whoever made them.
std::string new_event_path(const std::string& dir) {
  int64_t seconds = std::chrono::duration_cast<std::chrono::seconds>(
                        std::chrono::system_clock::now().time_since_epoch())
                        .count();
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kEventPrefix)) seconds = std::max(seconds, seconds_of(name) + 1);
  }
  char host[256] = "";
  if (::gethostname(host, sizeof(host) - 1) != 0 || host[0] == '\0') std::strcpy(host, "host");
  return fmt::format("{}/{}{:010}.{}.{}{}", dir, kEventPrefix, seconds, host, ::getpid(),
                     kEventSuffix);
}

[[noreturn]] void fail_event_file(const std::string& path, int error) {
  throw IoError(fmt::format("{}: cannot be written: {}", path, std::strerror(error)));
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t value = ~0u;
  for (const char c : bytes) {
    value = value >> 8 ^ kCrc32cTable[(value ^ static_cast<unsigned char>(c)) & 0xff];
  }
  return ~value;
}

uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8u;
}

EventFile::EventFile(const std::string& dir, int64_t first_step) : path_(new_event_path(dir)) {
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_event_file(path_, errno);
  try {
    add_event(0, proto::kFileVersion, "brain.Event:2");
    restart(first_step);
  } catch (...) {
    ::close(fd_);
    ::unlink(path_.c_str());
    throw;
  }
}

EventFile::~EventFile() {
  ::close(fd_);
}

void EventFile::restart(int64_t first_step) {
  add_event(first_step, proto::kSessionLog,
            WireMessage().integer(proto::kSessionStatus, proto::kSessionStart).bytes());
}

void EventFile::add_scalars(int64_t step, std::span<const EventScalar> scalars) {
  WireMessage summary;
  for (const EventScalar& scalar : scalars) {
    summary.message(proto::kValue, WireMessage()
                                       .text(proto::kTag, replace_invalid_utf8(scalar.tag))
                                       .f32(proto::kSimpleValue, static_cast<float>(scalar.value)));
  }
  add_event(step, proto::kSummary, summary.bytes());
}

void EventFile::add_text(int64_t step, std::string_view tag, std::string_view text) {
  std::string quoted = "    ";  // Markdown's code
  for (const char c : replace_invalid_utf8(text)) {
    quoted += c;
    if (c == '\n') quoted += "    ";
  }
  WireMessage tensor = tensor_of_one(proto::kStringDtype);
  tensor.text(8, quoted);
  add_event(step, proto::kSummary,
            WireMessage()
                .message(proto::kValue,
                         WireMessage()
                             .text(proto::kTag, replace_invalid_utf8(tag))
                             .message(proto::kTensor, tensor)
                             .message(proto::kMetadata, plugin("text", "", /*is_tensor=*/true)))
                .bytes());
}

void EventFile::add_settings(int64_t step,
                             std::span<const std::pair<std::string, SettingValue>> settings) {
  WireMessage start;  // SessionStartInfo
  for (const auto& [name, setting] : settings) {
    start.message(1, WireMessage().text(1, name).message(2, value_message(setting)));
  }
  WireMessage tensor = tensor_of_one(proto::kFloatDtype);
  tensor.f32(5, 0);
  const WireMessage content = WireMessage().message(3, start);
  add_event(
      step, proto::kSummary,
      WireMessage()
          .message(proto::kValue, WireMessage()
                                      .text(proto::kTag, "_hparams_/session_start_info")
                                      .message(proto::kTensor, tensor)
                                      .message(proto::kMetadata, plugin("hparams", content.bytes(),
                                                                        /*is_tensor=*/true)))
          .bytes());
}

void EventFile::add_event(int64_t step, int field, std::string_view message) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  append(WireMessage()
             .f64(proto::kWallTime, now.count())
             .integer(proto::kStep, static_cast<uint64_t>(step))
             .text(field, message)
             .bytes());
}

void EventFile::append(std::string_view event) {
  WireMessage record;
  record.little_endian(event.size(), 8);
  record.little_endian(masked_crc32c(record.bytes()), 4);
  record.append(event);
  record.little_endian(masked_crc32c(event), 4);
  std::string_view rest = record.bytes();
  int64_t at = nbytes_;
  while (!rest.empty()) {
    const ssize_t written = ::pwrite(fd_, rest.data(), rest.size(), at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      [[maybe_unused]] const int cut = ::ftruncate(fd_, nbytes_);  // half a record is none
      fail_event_file(path_, error);
    }
    rest.remove_prefix(static_cast<size_t>(written));
    at += written;
  }
  nbytes_ = at;
}

void remove_event_files(const std::string& dir) {
  std::error_code error;
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    const bool is_file = entry.symlink_status().type() == std::filesystem::file_type::regular;
    if (is_file && is_event_file(entry.path().filename().string())) found.push_back(entry.path());
  }
  for (const std::filesystem::path& path : found) {
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
      throw IoError(fmt::format("{}: cannot be removed: {}", path.string(), std::strerror(errno)));
    }
  }
}

}  // namespace tessera
