#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

// Documents of several sources in windows of one length: which documents, and where, as numbers
// only. Nothing is dropped: a document longer than a window is split. Which window has what depends
// on the lengths, the seed and the index of the window alone; ranks, micro-batches, threads and
// resumed runs change nothing.

namespace tessera::apps {

/// Items in bins, one after the other: those of bin b are items[first[b]] to items[first[b + 1] - 1].
struct Bins {
  std::vector<int32_t> items;
  std::vector<int64_t> first{0};
  int64_t num_bins() const { return static_cast<int64_t>(first.size()) - 1; }
};

/// Best-fit decreasing (Johnson 1974): the items from the longest to the shortest (of equal ones the
/// first), each into the bin with the least room in which it fits, else into a new one. O(n log n)
/// of n items, and a bit for each length; `lengths` in [1, capacity].
Bins best_fit_decreasing(std::span<const int64_t> lengths, int64_t capacity);

/// Part of a document in a window: positions [begin, begin + length) of the document.
struct Piece {
  int32_t source = 0;
  int64_t document = 0;
  int64_t begin = 0, length = 0;
  auto operator<=>(const Piece&) const = default;
};

/// A source of documents, which are known by their lengths.
struct PackSource {
  std::string name;
  int64_t num_documents = 0;
  /// Of a document in [0, num_documents); 0: it is left out.
  std::function<int64_t(int64_t document)> num_positions;
  double weight = 0;  ///< its share of positions, of all weights; all are > 0, or all 0: no weights
};

/// How documents are shuffled and packed into windows.
struct PackOptions {
  int64_t context = 1;  ///< positions in a window
  uint64_t seed = 0;
  int64_t buffer_windows = 1024;    ///< a buffer has about so many windows,
  int64_t buffer_documents = 1024;  ///< and so many documents at least
};

/// The windows of a run.
///   Order    documents are shuffled, then packed buffer by buffer, and the windows of a buffer
///            shuffled. Without weights the stream is epoch after epoch, each a permutation of the
///            documents of all sources. With weights each source is a stream of its own epochs, of
///            which a buffer takes as many documents as the weight over their mean length says
///   Memory   one buffer and 8 bytes for each that came before; nothing for a document
///   Errors   InputError if no document has a position, or a source with a weight has none
/// Several threads may ask.
class PackPlan {
 public:
  PackPlan(std::vector<PackSource> sources, const PackOptions& options);
  ~PackPlan();

  /// What window `index` of the run holds; their lengths add up to `context` at most.
  std::vector<Piece> window(int64_t index) const;

  /// How much of a source has come.
  struct Progress {
    double passes = 0;  ///< epochs of the source, whole and part
    double share = 0;   ///< of the positions so far
  };
  /// Of each source, after the buffers that the first `num_windows` windows begin.
  std::vector<Progress> progress(int64_t num_windows) const;

  /// Windows of epoch 0, which packs it. 0 with weights: there is no epoch of all.
  int64_t windows_of_first_epoch() const;
  int64_t num_positions() const { return num_positions_; }  ///< of all documents once
  bool has_weights() const { return has_weights_; }

 private:
  struct Buffer;
  void plan_buffers();
  std::shared_ptr<const Buffer> pack(int64_t index) const;
  std::shared_ptr<const Buffer> find(int64_t window) const;
  std::vector<Piece> pieces_of(int64_t buffer) const;
  void add_document(size_t source, int64_t document, std::vector<Piece>& pieces) const;

  std::vector<PackSource> sources_;
  PackOptions options_;
  bool has_weights_ = false;
  int64_t num_positions_ = 0;
  std::vector<int64_t> first_document_{0};    // of each source among all, and the total
  std::vector<int64_t> positions_of_source_;  // once
  int64_t buffers_per_epoch_ = 1;             // without weights
  std::vector<double> documents_per_buffer_;  // of each source, with weights
  mutable std::mutex mutex_;
  mutable std::vector<int64_t> first_window_{0};  // of each buffer that was packed, and the next
  mutable std::shared_ptr<const Buffer> last_;
};

/// Which documents of a source are for validation: a fraction of them, drawn by the source's index
/// alone (the seed of training changes nothing), at least one of two.
class DocumentSplit {
 public:
  DocumentSplit(int64_t num_documents, double val_fraction, uint64_t source);
  int64_t num_train() const { return num_documents_ - num_val_; }
  int64_t num_val() const { return num_val_; }
  int64_t train(int64_t i) const;  ///< the document that is the i-th for training
  int64_t val(int64_t i) const;    ///< the same for validation

 private:
  int64_t num_documents_, num_val_ = 0;
  uint64_t source_;
};

}  // namespace tessera::apps
