#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/formats/parameters.h"
#include "core/formats/safetensors.h"
#include "dist/checkpoint/manifest.h"

namespace tessera::dist {

/// A checkpoint open for reading. Files are mapped when they are first needed, so a rank touches
/// only what it reads. CheckpointError names directory, file and tensor of what is cut short,
/// changed, or of another run or step; UnreadableCheckpointError of what is missing, cannot be
/// opened or read, or is of a newer version. As a source it has the parameters (tensors called
/// `kParametersPrefix` and a parameter's name) in f32, bf16 and f16, or as codes (manifest.h), which
/// it dequantizes.
class CheckpointReader final : public ParameterSource {
 public:
  /// Reads and checks `dir`/manifest.json.
  explicit CheckpointReader(std::string dir);
  ~CheckpointReader() override;
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const std::string& path() const override { return dir_; }
  const Manifest& manifest() const { return manifest_; }

  /// Compares size, header and all bytes of the files `first`, `first + stride`, ... with the
  /// manifest; a changed tensor is named.
  void check_files(int64_t first = 0, int64_t stride = 1) const;
  /// Every file's size, without opening it.
  void check_sizes() const;

  /// Copies elements [begin, end) of the flattened tensor to `dst`. CheckpointError if there is no
  /// such tensor.
  void read_tensor(std::string_view tensor, int64_t begin, int64_t end, void* dst) const;
  /// Bytes of slices that were copied from.
  int64_t num_bytes_read() const { return num_bytes_read_; }

  std::vector<std::string> names() const override;
  Shape shape_of(std::string_view name) const override;

 private:
  void do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const override;
  bool is_coded(std::string_view name) const;
  Shape shape_of_codes(std::string_view name) const;
  void read_codes(std::string_view name, int64_t begin, int64_t end, float* dst) const;
  template <class F>
  void for_each_run(const TensorRecord& tensor, int64_t begin, int64_t end, const F& f) const;
  struct OpenFile;
  const OpenFile& open(int64_t file) const;
  const void* slice_data(const TensorRecord& tensor, const SliceRecord& slice) const;
  void check_file(int64_t file) const;
  void check_reads(int64_t file) const;
  [[noreturn]] void fail(int64_t file, const std::string& what) const;

  std::string dir_;
  Manifest manifest_;
  mutable std::map<int64_t, std::unique_ptr<OpenFile>> open_;
  mutable int64_t num_bytes_read_ = 0;
};

/// A checkpoint by its step.
struct CheckpointPlace {
  int64_t step = 0;
  std::string dir;
};
/// The complete checkpoints in `dir`: step directories with a manifest. The newest first: by the
/// saves of a run, which is by step where it never went back. Empty without such a directory.
std::vector<CheckpointPlace> list_checkpoints(const std::string& dir);
/// Step directories without a manifest, or still called step-N.partial: what a save that did not
/// end left. By step, the highest first.
std::vector<CheckpointPlace> list_incomplete(const std::string& dir);

/// What a path on the command line means: a checkpoint's directory itself, the newest complete one
/// of a directory with several, or of that before "/latest". CheckpointError if there is none.
std::string resolve_checkpoint(const std::string& path);

/// Whether a directory (no link) is a checkpoint of `run`, or what a save of it left: by its
/// manifest, by a file of a rank, or, if neither says anything, by the name step-N.partial.
bool is_checkpoint_of(const std::string& dir, const std::string& run);

/// Removes a checkpoint, complete or not, of `run`, so that it stops to be one first: the files of
/// its ranks and the manifest, and the directory if that was all. Nothing else is ever removed: a
/// link, a directory whose manifest is of another run or cannot be read, one without a manifest in
/// which no file says that it is of `run`, and what others put there. Whether it is gone. IoError.
bool remove_checkpoint(const std::string& dir, const std::string& run);

/// Gives a damaged checkpoint a name under which nobody takes it for one, DIR.damaged or
/// DIR.damaged-2, ...; returns that. IoError.
std::string set_checkpoint_aside(const std::string& dir);

}  // namespace tessera::dist
