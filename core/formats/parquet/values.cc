#include "core/formats/parquet/values.h"

#include <algorithm>
#include <array>

namespace tessera::parquet {
namespace {

/// A length and that many bytes; advances.
std::string_view take_plain(std::string_view& rest) {
  uint32_t length = 0;
  if (rest.size() < sizeof(length)) {
    throw InputError(fmt::format("values end with {} bytes, expected a length of 4", rest.size()));
  }
  std::memcpy(&length, rest.data(), sizeof(length));
  if (length > rest.size() - sizeof(length)) {
    throw InputError(fmt::format("a value of {} bytes, expected at most the {} that are left",
                                 length, rest.size() - sizeof(length)));
  }
  const std::string_view value = rest.substr(sizeof(length), length);
  rest.remove_prefix(sizeof(length) + length);
  return value;
}

}  // namespace

Dictionary::Dictionary(std::shared_ptr<const Buffer> owner, std::string_view page, int64_t count)
    : owner_(std::move(owner)), page_(page) {
  if (count > static_cast<int64_t>(page.size() / 4)) {
    throw InputError(fmt::format("a dictionary of {} values in {} bytes, expected at most {}",
                                 count, page.size(), page.size() / 4));
  }
  offsets_.reserve(static_cast<size_t>(count) + 1);
  std::string_view rest = page;
  for (int64_t i = 0; i < count; ++i) {
    offsets_.push_back(static_cast<uint32_t>(page.size() - rest.size()));
    take_plain(rest);
  }
  offsets_.push_back(static_cast<uint32_t>(page.size() - rest.size()));
}

ValueDecoder::ValueDecoder(std::shared_ptr<const Buffer> owner, std::string_view values,
                           Encoding encoding, std::shared_ptr<const Dictionary> dictionary)
    : encoding_(encoding),
      owner_(std::move(owner)),
      dictionary_(std::move(dictionary)),
      rest_(values),
      page_nbytes_(values.size()) {
  switch (encoding) {
    case Encoding::kPlain:
      return;
    case Encoding::kPlainDictionary:
    case Encoding::kRleDictionary: {
      if (dictionary_ == nullptr)
        throw InputError("indices without a dictionary page, expected one");
      if (rest_.empty()) return;  // nulls only
      const int width = static_cast<unsigned char>(rest_[0]);
      if (width > 32)
        throw InputError(fmt::format("indices of {} bits, expected at most 32", width));
      indices_ = HybridDecoder(rest_.substr(1), width);
      return;
    }
    case Encoding::kDeltaLengthByteArray:
      lengths_ = DeltaDecoder(rest_);
      rest_ = DeltaDecoder(lengths_).behind();
      return;
    case Encoding::kDeltaByteArray:
      prefixes_ = DeltaDecoder(rest_);
      lengths_ = DeltaDecoder(DeltaDecoder(prefixes_).behind());
      rest_ = DeltaDecoder(lengths_).behind();
      return;
    default:
      throw InputError(
          fmt::format("byte arrays in {}, expected PLAIN, RLE_DICTIONARY, "
                      "DELTA_LENGTH_BYTE_ARRAY or DELTA_BYTE_ARRAY",
                      name_of(encoding)));
  }
}

int64_t ValueDecoder::max_count() const {
  // A short suffix behind a long prefix is a long value, and all of them are written out.
  constexpr size_t kNbytes = 1 << 20;
  if (encoding_ != Encoding::kDeltaByteArray) return INT64_MAX;
  return static_cast<int64_t>(std::max<size_t>(1, kNbytes / std::max<size_t>(1, page_nbytes_)));
}

void ValueDecoder::read(std::vector<std::string_view>& out, int64_t count,
                        std::shared_ptr<const void>& owner) {
  owner = owner_;
  switch (encoding_) {
    case Encoding::kPlain:
      return read_plain(out, count);
    case Encoding::kDeltaLengthByteArray:
      return read_delta_length(out, count);
    case Encoding::kDeltaByteArray:
      owner = read_delta(out, count);
      return;
    default:
      owner = dictionary_->owner();
      return read_indexed(out, count);
  }
}

void ValueDecoder::read_plain(std::vector<std::string_view>& out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out.push_back(take_plain(rest_));
}

void ValueDecoder::read_indexed(std::vector<std::string_view>& out, int64_t count) {
  const auto num_values = static_cast<uint32_t>(dictionary_->num_values());
  std::array<uint32_t, 256> indices;
  for (int64_t done = 0; done < count;) {
    const int64_t here = std::min<int64_t>(count - done, indices.size());
    indices_.read(indices.data(), here);
    for (int64_t i = 0; i < here; ++i) {
      const uint32_t index = indices[static_cast<size_t>(i)];
      if (index >= num_values) {
        throw InputError(fmt::format(
            "index {} into a dictionary of {} values, expected one of them", index, num_values));
      }
      out.push_back((*dictionary_)[index]);
    }
    done += here;
  }
}

std::string_view ValueDecoder::take(int64_t nbytes) {
  if (nbytes < 0 || nbytes > static_cast<int64_t>(rest_.size())) {
    throw InputError(fmt::format("a value of {} bytes, expected at most the {} that are left",
                                 nbytes, rest_.size()));
  }
  const std::string_view taken = rest_.substr(0, static_cast<size_t>(nbytes));
  rest_.remove_prefix(static_cast<size_t>(nbytes));
  return taken;
}

void ValueDecoder::read_delta_length(std::vector<std::string_view>& out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out.push_back(take(lengths_.next()));
}

std::shared_ptr<const void> ValueDecoder::read_delta(std::vector<std::string_view>& out,
                                                     int64_t count) {
  auto values = std::make_shared<std::vector<std::string>>();
  values->reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t prefix = prefixes_.next();
    if (prefix < 0 || prefix > static_cast<int64_t>(previous_.size())) {
      throw InputError(
          fmt::format("a prefix of {} bytes, expected at most the {} of the value before", prefix,
                      previous_.size()));
    }
    previous_.resize(static_cast<size_t>(prefix));
    previous_ += take(lengths_.next());
    out.push_back(values->emplace_back(previous_));
  }
  return values;
}

}  // namespace tessera::parquet
