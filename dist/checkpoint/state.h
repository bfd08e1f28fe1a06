#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/formats/parameters.h"
#include "core/formats/safetensors.h"
#include "dist/checkpoint/manifest.h"
#include "dist/checkpoint/reader.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/scaler.h"
#include "optim/optimizer.h"

namespace tessera::dist {

/// What changes in a training, to be saved and loaded. The pointers outlive their users.
struct TrainingState {
  nn::Module* model = nullptr;
  Fsdp* fsdp = nullptr;
  optim::Optimizer* optimizer = nullptr;  ///< may be null: parameters only
  const LossScaler* scaler = nullptr;     ///< may be null
};

/// Elements [begin, begin + numel) of a flattened tensor of a checkpoint, as this rank holds them.
struct Slice {
  std::string tensor;
  Shape shape;  ///< of the whole tensor
  int64_t begin = 0;
  Tensor values;             ///< flat
  bool is_optional = false;  ///< a checkpoint may lack it; then it stays as it is
  int64_t end() const { return begin + values.numel(); }
};

/// All that this rank holds.
std::vector<Slice> held_slices(const TrainingState& state);
/// The part of it that this rank writes: over all ranks each element once. Ranks that hold the same
/// shard share it out.
std::vector<Slice> owned_slices(const TrainingState& state);

/// A copy of slices in host memory, laid out as the data of a file. It is taken on the compute
/// stream, so training goes on at once; its memory stays for the next one.
class Snapshot {
 public:
  static constexpr int64_t kAlignment = 4096;  ///< of `data()`, as disks want it

  explicit Snapshot(std::vector<Slice> slices);

  /// Enqueues the copies.
  void capture();
  /// Blocks until they are done; any thread.
  void wait() const;
  /// Enqueues the way back.
  void restore() const;

  const std::vector<Slice>& slices() const { return slices_; }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  const void* data() const;
  /// Where the bytes of entry i begin.
  int64_t offset(size_t i) const { return offsets_[i]; }
  int64_t nbytes() const { return offsets_.back(); }

 private:
  std::vector<Slice> slices_;
  std::vector<SafetensorsEntry> entries_;
  std::vector<int64_t> offsets_;  // and the end
  Tensor host_;
  int64_t first_ = 0;  // where in it the data begins
  std::vector<Tensor> copies_;
  Event done_;
};

/// Compares the tensors' names and shapes with what a checkpoint must have; CheckpointError lists
/// all that are missing, unexpected, or of another shape.
void check_tensors(const CheckpointReader& reader, const TrainingState& state);

/// Sets the state from a checkpoint of any strategy, wrapping and number of ranks, reading what
/// this rank holds and no more. Local to the rank.
void load_state(const CheckpointReader& reader, const TrainingState& state);

/// Sets the masters of this rank's shards, slice by slice through a buffer of at most 64 MiB in
/// host memory: no rank holds more of the model than its shards, and of what is kept as codes no
/// more values than a piece of 4 MiB. Those that are not wanted (null: all are) stay as they are.
/// Collective.
/// Errors   on all ranks: InputError if `source` lacks a parameter of the model or has another shape, but more
///          positions, of which the first are taken
void load_parameters(const ParameterSource& source, Fsdp& fsdp, nn::Module& model,
                     const std::function<bool(const nn::NamedParameter&)>& is_wanted = nullptr);

}  // namespace tessera::dist
