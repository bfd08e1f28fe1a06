#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// [Note: Launchers]
// Who starts N processes tells each of them so in its environment, and MPI reads that of its own
// launcher only. Started by another one (mpirun of another MPI, srun or a loop of a shell without
// PMI, torchrun) every process is a world of one rank, and N runs would write to one directory. So
// the variables of all launchers that we know are compared with the number of ranks that MPI has.
// What counts is the step, not the allocation: within sbatch, a plain program is one process
// however many tasks were asked for (SLURM_NTASKS). A World of several ranks is taken as meant,
// since variables are inherited: those of the srun that started mpirun's daemons, for one.

namespace tessera::dist {

/// std::getenv, or another for tests.
using Environment = std::function<const char*(const char* name)>;

/// Whether a launcher that an MPI may know started this process; without one MPI need not be
/// initialized.
bool is_launched_for_mpi(const Environment& environment);

/// "WORLD_SIZE = 4 and RANK = 2" if a launcher says that it started several processes, this one
/// among them; else empty. With `num_processes` and `variable`, if they are not null.
std::string launcher_claim(const Environment& environment, int64_t* num_processes = nullptr,
                           std::string* variable = nullptr);

/// What is wrong if this process is one of `num_mpi_ranks`; empty if nothing is.
std::string launcher_problem(const Environment& environment, int num_mpi_ranks);

/// The whole number that `text` is, if it is one and in the range.
std::optional<int64_t> parse_integer(std::string_view text, int64_t low, int64_t high);

}  // namespace tessera::dist
