#include "core/formats/gguf.h"

#include <cstring>
#include <type_traits>

#include "core/check.h"

namespace tessera {
namespace {

constexpr int64_t kAlignment = 32;
constexpr size_t kMaxNameNbytes = 63;  // and a zero

int64_t aligned(int64_t offset) {
  return (offset + kAlignment - 1) / kAlignment * kAlignment;
}

/// The format's number of a type of values.
template <class T>
constexpr uint32_t type_of() {
  if constexpr (std::is_same_v<T, uint32_t>) return 4;
  if constexpr (std::is_same_v<T, int32_t>) return 5;
  if constexpr (std::is_same_v<T, float>) return 6;
  if constexpr (std::is_same_v<T, bool>) return 7;
  if constexpr (std::is_same_v<T, std::string>) return 8;
  return 9;  // an array
}

uint32_t type_of(const GgufEntry& entry) {
  switch (entry.dtype) {
    case kF32:
      return 0;
    case kF16:
      return 1;
    case kBF16:
      return 30;
    default:
      TESSERA_CHECK(false, "gguf: tensor {} of {}, expected f32, bf16 or f16", entry.name,
                    entry.dtype);
  }
  return 0;
}

class Header {
 public:
  template <class T>
  void add(T value) requires std::is_arithmetic_v<T> {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    text_.append(bytes, sizeof value);
  }
  void add(const std::string& text) {
    add(static_cast<uint64_t>(text.size()));
    text_ += text;
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(type_of<T>());
    add(static_cast<uint64_t>(values.size()));
    for (const T& value : values) add(value);
  }
  void append(std::string_view text) { text_ += text; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace

GgufWriter::GgufWriter(const std::string& path, const GgufFields& fields,
                       const std::vector<GgufEntry>& entries) {
  constexpr uint32_t kVersion = 3;
  Header header;
  header.append("GGUF");
  header.add(kVersion);
  header.add(static_cast<uint64_t>(entries.size()));
  header.add(static_cast<uint64_t>(fields.size()));
  for (const auto& [key, value] : fields) {
    header.add(key);
    std::visit(
        [&]<class T>(const T& of_type) {
          header.add(type_of<T>());
          header.add(of_type);
        },
        value);
  }
  std::vector<TensorFileWriter::Entry> places;
  int64_t offset = 0;  // from the first tensor on
  for (const GgufEntry& entry : entries) {
    TESSERA_CHECK(entry.name.size() <= kMaxNameNbytes,
                  "gguf: the name of tensor {} has {} bytes, expected at most {}", entry.name,
                  entry.name.size(), kMaxNameNbytes);
    header.add(entry.name);
    header.add(static_cast<uint32_t>(entry.shape.num_dims()));
    for (int dim = entry.shape.num_dims() - 1; dim >= 0; --dim) {
      header.add(static_cast<uint64_t>(entry.shape[dim]));
    }
    header.add(type_of(entry));
    header.add(static_cast<uint64_t>(offset));
    const int64_t nbytes = entry.shape.numel() * static_cast<int64_t>(size_of(entry.dtype));
    places.push_back({entry.name, offset, nbytes});
    offset = aligned(offset + nbytes);
  }
  const int64_t first = aligned(static_cast<int64_t>(header.text().size()));
  for (TensorFileWriter::Entry& place : places) place.offset += first;
  file_ = std::make_unique<TensorFileWriter>("gguf", path, header.text(), std::move(places),
                                             first + offset);
}

}  // namespace tessera
