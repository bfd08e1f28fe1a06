#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/dtype.h"
#include "core/shape.h"

// [Note: Checkpoint]
// A checkpoint is a directory, step-00000100/, with one safetensors file a rank and manifest.json.
// A rank's file holds slices: contiguous elements [begin, end) of flattened tensors, as entries
// "parameters/lm_head.weight[256:1024]". The slices of all files cover each tensor once, whatever
// strategy, wrapping and number of ranks wrote them, so any other can read them. Ranks that hold
// the same shard write a part of it each. The manifest comes last, by rename, after the files are
// on the disk: a directory without one is no checkpoint. It has the hash of each file and slice, so
// that damage is found and named before anything is read, and ends with a hash of itself. All of it
// is made in step-00000100.partial/ and gets its name in one rename, in place of an earlier
// checkpoint of that step: of a run that went back.
//
// Two things keep a checkpoint from being used. *Damaged*: what is there is not what was written
// (CheckpointError). *Unreadable*: what was written cannot be seen or is not understood, by a
// version that is too old, a disk that is not mounted, a call that fails (its subclass). The first
// is passed over; the second ends a resume, since going on from an older state would be a loss
// without need. Neither is ever removed.
//
//   parameters/NAME        f32 masters (a frozen parameter in the dtype it is kept in)
//   nf4/NAME               in place of it, of a parameter kept as codes: its records, u8, and
//   nf4_scales/NAME        f32, the mean and the nested scales ([Note: NF4] in kernels/nf4/kernel.h)
//   nf4_shape/NAME         i64, its dimensions
//   exp_avg/NAME, ...      the optimizer's states
//   optimizer/step_count   i64; loss_scale/{scale,num_good,num_skipped} with a dynamic loss scale

struct XXH64_state_s;

namespace tessera::dist {

/// In front of the name of each parameter.
inline constexpr std::string_view kParametersPrefix = "parameters/";
/// Of one that is kept as codes, in place of that.
inline constexpr std::string_view kCodesPrefix = "nf4/", kScalesPrefix = "nf4_scales/",
                                  kCodesShapePrefix = "nf4_shape/";

/// Where a training is, beside its tensors.
struct Progress {
  int64_t step = 0;         ///< steps done; random numbers follow from it and the seed
  int64_t next_sample = 0;  ///< global index: what the next step begins with
  int64_t samples_per_step = 0;
  int64_t tokens = 0;              ///< trained on
  int64_t num_skipped = 0;         ///< steps that changed nothing
  double lr = 0;                   ///< of the last step; the schedule follows from config and step
  std::optional<double> val_loss;  ///< of the parameters in this checkpoint
  std::optional<double> best_val_loss;  ///< so far
  uint64_t seed = 0;
  std::string data_id;              ///< fingerprint of the training data
  std::string data_content;         ///< hash of all of it; empty: not known
  std::string val_id, val_content;  ///< the same of what val_loss is of; empty: not known
  std::string config;               ///< resolved, TOML
};

/// Whether the losses of the two are of the same data, as far as it is known.
bool is_same_validation(const Progress& a, const Progress& b);

struct SliceRecord {
  int64_t file = 0;            ///< index in `Manifest::files`
  int64_t begin = 0, end = 0;  ///< elements of the flattened tensor
  uint64_t hash = 0;           ///< xxh64 of its bytes
};

struct TensorRecord {
  std::string name;
  DType dtype = kF32;
  Shape shape;
  std::vector<SliceRecord> slices;  ///< by begin; they cover the tensor once
};

struct FileRecord {
  std::string name;
  int64_t nbytes = 0;
  uint64_t hash = 0;  ///< xxh64 of the whole file
};

/// A checkpoint that is perhaps whole but cannot be read here and now.
class UnreadableCheckpointError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

struct Manifest {
  std::string project_version;
  std::string run;  ///< random, the same in all checkpoints of a run
  /// Counts the saves of a run: after a step back, the newest state is not that of the highest
  /// step. 0 in checkpoints of before there was a count.
  int64_t sequence = 0;
  int64_t world_size = 0;
  Progress progress;
  std::vector<FileRecord> files;
  std::vector<TensorRecord> tensors;

  /// Null if there is none.
  const TensorRecord* find(std::string_view name) const;
  int64_t nbytes() const;  ///< of all files
};

/// What one rank has written: its part of a manifest.
struct RankRecord {
  FileRecord file;
  struct Slice {
    std::string tensor;
    DType dtype = kF32;
    Shape shape;  ///< of the whole tensor
    int64_t begin = 0, end = 0;
    uint64_t hash = 0;
  };
  std::vector<Slice> slices;
};
std::string to_json(const RankRecord& record);
RankRecord rank_record_from_json(std::string_view text);

/// Puts the records of ranks 0, 1, ... together. InternalError if slices do not cover a tensor.
void add_records(Manifest& manifest, const std::vector<RankRecord>& records);

/// With its hash at the end.
std::string to_json(const Manifest& manifest);
/// The inverse; trusts nothing, and takes time and memory as the text and the files are long.
/// CheckpointError that begins with `path` for what does not have its hash, is not JSON, lacks a
/// key, has counts beyond any training, or does not cover each tensor once;
/// UnreadableCheckpointError for another format or a newer version.
Manifest parse_manifest(const std::string& path, std::string_view text);

/// What orders checkpoints, from the first lines of a manifest; the hash is not checked.
struct ManifestHead {
  std::string run;
  int64_t sequence = 0;
};
/// Empty for a text that does not say.
std::optional<ManifestHead> parse_manifest_head(std::string_view text);

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr std::string_view kPartialSuffix = ".partial";  ///< of a directory being written

/// "step-00000100", "rank-00003.safetensors", "parameters/w[0:256]".
std::string step_directory_name(int64_t step);
std::string rank_file_name(int64_t rank);
/// Whether a file is called like one that a save writes, also while it is written (".tmp").
bool is_checkpoint_file_name(std::string_view name);
std::string slice_name(std::string_view tensor, int64_t begin, int64_t end);

/// xxh64 of successive pieces.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;
  void update(const void* data, int64_t nbytes);
  uint64_t digest() const;

 private:
  XXH64_state_s* state_;
};
uint64_t hash_of(const void* data, int64_t nbytes);

}  // namespace tessera::dist
