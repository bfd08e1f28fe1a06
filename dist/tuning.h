#pragma once

#include <memory>
#include <optional>
#include <string>

#include "dist/comm/world.h"
#include "kernels/tuning/tuning.h"

// Choices between ways to compute the same, one for all ranks, kept in a file between runs; see
// [Note: Tuning] (kernels/tuning/tuning.h).

namespace tessera::dist {

/// The choices of a Tuning in a file. Lines of text: those of each machine (`kernels::tuning_machine`)
/// under its name in brackets, and a checksum at the end.
class TuningFile {
 public:
  TuningFile(std::string path, std::string machine);

  /// The choices for this machine; none if the file is not there, and, with a warning that names the
  /// file, if it is of other machines or versions of libraries, or damaged. Lines that the libraries do not
  /// take (`kernels::is_choice`) are left out, with a warning.
  /// Errors   ConfigError if the file is of something else: it is not replaced
  Tuning::Choices read();
  /// Replaces the file by one with these choices and those of other machines. IoError.
  void write(const Tuning::Choices& choices) const;

 private:
  std::string path_, machine_;
  std::map<std::string, Tuning::Choices> others_;  // by machine
};

/// The Tuning of a rank, current on its thread while this lives. All ranks make it and make the
/// same calls. Where their machines differ there is none, with a warning: what each one's fastest is
/// differs, and so would the bits.
class SharedTuning {
 public:
  /// `path`: of the file that rank 0 reads and writes. Empty: none, and no GEMM is tuned, since its
  /// bits would be others in each run; choices of attention are those of this run.
  /// Errors   those of TuningFile::read, on all ranks
  SharedTuning(World& world, const std::string& path);

  /// Between two steps: waits for the current stream, rank 0 times what any rank wants, and all have its
  /// choices. One exchange of a number where nobody wants anything.
  /// Errors   those of kernels::measure_choices, on all ranks. A file that cannot be written is a
  ///          warning, once
  void update();

 private:
  World& world_;
  std::unique_ptr<Tuning> tuning_;  // null: the machines differ
  std::optional<Tuning::Scope> scope_;
  std::optional<TuningFile> file_;  // of rank 0
};

}  // namespace tessera::dist
