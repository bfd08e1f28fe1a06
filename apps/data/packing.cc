#include "apps/data/packing.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "apps/data/permutation.h"
#include "core/check.h"

namespace tessera::apps {
namespace {

constexpr int64_t kMaxBufferDocuments = 1 << 22;  // 128 MiB of pieces

/// The numbers of [0, count) that are in it, by words of 64 and words that say which words are not
/// empty: the least that is not below a given one takes a few steps.
class NumberSet {
 public:
  explicit NumberSet(int64_t count) {
    auto size = static_cast<size_t>(count);
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size, 0);
    } while (size > 1);
  }
  void insert(int64_t number) {
    auto i = static_cast<size_t>(number);
    for (auto& level : levels_) level[i / 64] |= uint64_t{1} << (i % 64), i /= 64;
  }
  void erase(int64_t number) {
    auto i = static_cast<size_t>(number);
    for (auto& level : levels_) {
      level[i / 64] &= ~(uint64_t{1} << (i % 64));
      if (level[i / 64] != 0) return;
      i /= 64;
    }
  }
  /// -1 if there is none.
  int64_t least_from(int64_t number) const {
    auto i = static_cast<size_t>(number);
    size_t k = 0;
    while (true) {  // up, to where one is not below
      if (k == levels_.size() || i / 64 >= levels_[k].size()) return -1;
      const uint64_t word = levels_[k][i / 64] >> (i % 64);
      if (word != 0) {
        i += static_cast<size_t>(std::countr_zero(word));
        break;
      }
      i = i / 64 + 1;
      ++k;
    }
    for (; k > 0; --k) i = 64 * i + static_cast<size_t>(std::countr_zero(levels_[k - 1][i]));
    return static_cast<int64_t>(i);
  }

 private:
  std::vector<std::vector<uint64_t>> levels_;  // from the numbers themselves up
};

PhiloxKey key_of(uint64_t seed, std::string_view what, uint64_t a, uint64_t b = 0) {
  return make_key(seed, hash_name(fmt::format("{} {} {}", what, a, b)));
}

}  // namespace

Bins best_fit_decreasing(std::span<const int64_t> lengths, int64_t capacity) {
  constexpr int32_t kNone = -1;
  std::vector<int32_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  const auto length_of = [&](int32_t item) { return lengths[static_cast<size_t>(item)]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return length_of(a) > length_of(b); });
  // Bins with the same room are a stack: which of them takes an item changes no number of bins.
  NumberSet rooms(capacity + 1);
  std::vector<int32_t> top(static_cast<size_t>(capacity) + 1, kNone);  // bin, by its room
  std::vector<int32_t> below;                                          // in the stack, by bin
  std::vector<int32_t> bin_of(lengths.size());
  std::vector<int64_t> first;
  const auto push = [&](int32_t bin, int64_t room) {
    int32_t& head = top[static_cast<size_t>(room)];
    if (head == kNone) rooms.insert(room);
    below[static_cast<size_t>(bin)] = head;
    head = bin;
  };
  for (const int32_t item : order) {
    const int64_t length = length_of(item);
    TESSERA_CHECK(length >= 1 && length <= capacity,
                  "best_fit_decreasing: expected lengths in [1, {}], got {}", capacity, length);
    int64_t room = rooms.least_from(length);
    int32_t bin;
    if (room >= 0) {
      int32_t& head = top[static_cast<size_t>(room)];
      bin = head;
      head = below[static_cast<size_t>(bin)];
      if (head == kNone) rooms.erase(room);
    } else {
      bin = static_cast<int32_t>(below.size());
      below.push_back(kNone);
      first.push_back(0);
      room = capacity;
    }
    bin_of[static_cast<size_t>(item)] = bin;
    ++first[static_cast<size_t>(bin)];  // a count, for now
    push(bin, room - length);
  }
  Bins bins;
  bins.items.resize(lengths.size());
  for (const int64_t count : first) bins.first.push_back(bins.first.back() + count);
  std::copy(bins.first.begin(), bins.first.end() - 1, first.begin());
  for (const int32_t item : order) {
    const auto bin = static_cast<size_t>(bin_of[static_cast<size_t>(item)]);
    bins.items[static_cast<size_t>(first[bin]++)] = item;
  }
  return bins;
}

struct PackPlan::Buffer {
  int64_t index = 0;
  std::vector<Piece> pieces;      // window after window
  std::vector<int64_t> first{0};  // of each window, and the end
  int64_t num_windows() const { return static_cast<int64_t>(first.size()) - 1; }
};

PackPlan::PackPlan(std::vector<PackSource> sources, const PackOptions& options)
    : sources_(std::move(sources)), options_(options) {
  for (const PackSource& source : sources_) {
    has_weights_ = has_weights_ || source.weight > 0;
    first_document_.push_back(first_document_.back() + source.num_documents);
    int64_t positions = 0;
    for (int64_t i = 0; i < source.num_documents; ++i) positions += source.num_positions(i);
    positions_of_source_.push_back(positions);
    num_positions_ += positions;
  }
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (has_weights_ && sources_[i].weight <= 0) {
      throw InputError(
          fmt::format("data source {}: weight {}, expected one > 0 beside those of the "
                      "others",
                      sources_[i].name, sources_[i].weight));
    }
    if (has_weights_ && positions_of_source_[i] == 0) {
      throw InputError(
          fmt::format("data source {}: {} documents without a token to predict, expected "
                      "at least one with",
                      sources_[i].name, sources_[i].num_documents));
    }
  }
  if (num_positions_ == 0) {
    throw InputError(
        fmt::format("data: {} documents without a token to predict, expected at least "
                    "one with",
                    first_document_.back()));
  }
  plan_buffers();
}

PackPlan::~PackPlan() = default;

void PackPlan::plan_buffers() {
  const double wanted =
      static_cast<double>(options_.buffer_windows) * static_cast<double>(options_.context);
  const auto least_documents = static_cast<double>(options_.buffer_documents);
  if (!has_weights_) {
    const auto num_documents = static_cast<double>(first_document_.back());
    double count =
        std::min(static_cast<double>(num_positions_) / wanted, num_documents / least_documents);
    count = std::max({1.0, std::floor(count), std::ceil(num_documents / kMaxBufferDocuments)});
    buffers_per_epoch_ = static_cast<int64_t>(count);
    return;
  }
  double weights = 0, documents = 0;  // documents: for each position
  for (const PackSource& source : sources_) weights += source.weight;
  for (size_t i = 0; i < sources_.size(); ++i) {
    const double rate = sources_[i].weight / weights *
                        static_cast<double>(sources_[i].num_documents) /
                        static_cast<double>(positions_of_source_[i]);
    documents_per_buffer_.push_back(rate);
    documents += rate;
  }
  const double positions = std::min(std::max(wanted, least_documents / documents),
                                    static_cast<double>(kMaxBufferDocuments) / documents);
  for (double& rate : documents_per_buffer_) rate *= positions;
}

void PackPlan::add_document(size_t source, int64_t document, std::vector<Piece>& pieces) const {
  const int64_t numel = sources_[source].num_positions(document);
  for (int64_t begin = 0; begin < numel; begin += options_.context) {
    pieces.push_back(
        {static_cast<int32_t>(source), document, begin, std::min(options_.context, numel - begin)});
  }
}

std::vector<Piece> PackPlan::pieces_of(int64_t buffer) const {
  std::vector<Piece> pieces;
  if (!has_weights_) {
    const int64_t count = first_document_.back();
    const int64_t epoch = buffer / buffers_per_epoch_, part = buffer % buffers_per_epoch_;
    const Permutation shuffled(count,
                               key_of(options_.seed, "documents", static_cast<uint64_t>(epoch)));
    const auto cut = [&](int64_t i) {  // without overflow
      return count / buffers_per_epoch_ * i + count % buffers_per_epoch_ * i / buffers_per_epoch_;
    };
    for (int64_t i = cut(part); i < cut(part + 1); ++i) {
      const int64_t document = shuffled(i);
      const auto after = std::upper_bound(first_document_.begin(), first_document_.end(), document);
      const auto source = static_cast<size_t>(after - first_document_.begin()) - 1;
      add_document(source, document - first_document_[source], pieces);
    }
    return pieces;
  }
  for (size_t source = 0; source < sources_.size(); ++source) {
    const auto cut = [&](int64_t i) {
      return static_cast<int64_t>(
          std::floor(static_cast<double>(i) * documents_per_buffer_[source]));
    };
    const int64_t count = sources_[source].num_documents;
    for (int64_t i = cut(buffer); i < cut(buffer + 1);) {
      const auto epoch = static_cast<uint64_t>(i / count);
      const Permutation shuffled(count, key_of(options_.seed, "documents of", epoch, source));
      const int64_t end = std::min(cut(buffer + 1), (i / count + 1) * count);
      for (; i < end; ++i) add_document(source, shuffled(i % count), pieces);
    }
  }
  return pieces;
}

std::shared_ptr<const PackPlan::Buffer> PackPlan::pack(int64_t index) const {
  const std::vector<Piece> pieces = pieces_of(index);
  std::vector<int64_t> lengths;
  lengths.reserve(pieces.size());
  for (const Piece& piece : pieces) lengths.push_back(piece.length);
  const Bins bins = best_fit_decreasing(lengths, options_.context);
  auto buffer = std::make_shared<Buffer>();
  buffer->index = index;
  buffer->pieces.reserve(pieces.size());
  // Bins begin with the longest documents; in a run windows of all kinds come side by side.
  const Permutation shuffled(bins.num_bins(),
                             key_of(options_.seed, "windows", static_cast<uint64_t>(index)));
  for (int64_t i = 0; i < bins.num_bins(); ++i) {
    const auto bin = static_cast<size_t>(shuffled(i));
    for (int64_t k = bins.first[bin]; k < bins.first[bin + 1]; ++k) {
      buffer->pieces.push_back(pieces[static_cast<size_t>(bins.items[static_cast<size_t>(k)])]);
    }
    buffer->first.push_back(static_cast<int64_t>(buffer->pieces.size()));
  }
  return buffer;
}

/// The buffer that has the window. Those before it are packed once, to know where it begins.
std::shared_ptr<const PackPlan::Buffer> PackPlan::find(int64_t window) const {
  const std::lock_guard lock(mutex_);
  const auto has = [&](const Buffer& b) {
    const int64_t first = first_window_[static_cast<size_t>(b.index)];
    return window >= first && window < first + b.num_windows();
  };
  if (last_ != nullptr && has(*last_)) return last_;
  while (first_window_.back() <= window) {
    last_ = pack(static_cast<int64_t>(first_window_.size()) - 1);
    first_window_.push_back(first_window_.back() + last_->num_windows());
  }
  if (last_ != nullptr && has(*last_)) return last_;
  const auto after = std::upper_bound(first_window_.begin(), first_window_.end(), window);
  last_ = pack(after - first_window_.begin() - 1);
  return last_;
}

std::vector<Piece> PackPlan::window(int64_t index) const {
  TESSERA_CHECK(index >= 0, "PackPlan: window {}, expected one from 0", index);
  const std::shared_ptr<const Buffer> buffer = find(index);
  int64_t first = 0;
  {
    const std::lock_guard lock(mutex_);
    first = first_window_[static_cast<size_t>(buffer->index)];
  }
  const auto i = static_cast<size_t>(index - first);
  return {buffer->pieces.begin() + buffer->first[i], buffer->pieces.begin() + buffer->first[i + 1]};
}

int64_t PackPlan::windows_of_first_epoch() const {
  if (has_weights_) return 0;
  const std::lock_guard lock(mutex_);
  while (static_cast<int64_t>(first_window_.size()) <= buffers_per_epoch_) {
    last_ = pack(static_cast<int64_t>(first_window_.size()) - 1);
    first_window_.push_back(first_window_.back() + last_->num_windows());
  }
  return first_window_[static_cast<size_t>(buffers_per_epoch_)];
}

std::vector<PackPlan::Progress> PackPlan::progress(int64_t num_windows) const {
  double buffers = 0;  // whole and part
  if (num_windows > 0) {
    const std::shared_ptr<const Buffer> buffer = find(num_windows - 1);
    const std::lock_guard lock(mutex_);
    const int64_t inside = num_windows - first_window_[static_cast<size_t>(buffer->index)];
    buffers = static_cast<double>(buffer->index) +
              static_cast<double>(inside) / static_cast<double>(buffer->num_windows());
  }
  std::vector<Progress> progress(sources_.size());
  double total = 0;
  for (size_t i = 0; i < sources_.size(); ++i) {
    progress[i].passes = has_weights_ ? buffers * documents_per_buffer_[i] /
                                            static_cast<double>(sources_[i].num_documents)
                                      : buffers / static_cast<double>(buffers_per_epoch_);
    progress[i].share = progress[i].passes * static_cast<double>(positions_of_source_[i]);
    total += progress[i].share;
  }
  for (Progress& p : progress) p.share = total > 0 ? p.share / total : 0;
  return progress;
}

DocumentSplit::DocumentSplit(int64_t num_documents, double val_fraction, uint64_t source)
    : num_documents_(num_documents), source_(source) {
  if (val_fraction <= 0 || num_documents < 2) return;
  const auto wanted =
      static_cast<int64_t>(std::llround(static_cast<double>(num_documents) * val_fraction));
  num_val_ = std::clamp<int64_t>(wanted, 1, num_documents - 1);
}

int64_t DocumentSplit::val(int64_t i) const {
  return Permutation(num_documents_, key_of(0, "validation", source_))(i);
}

int64_t DocumentSplit::train(int64_t i) const {
  return Permutation(num_documents_, key_of(0, "validation", source_))(num_val_ + i);
}

}  // namespace tessera::apps
