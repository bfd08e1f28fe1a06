#include "dist/comm/launcher.h"

#include <fmt/format.h>

#include <charconv>
#include <limits>

namespace tessera::dist {

namespace {

/// How a launcher says how many processes there are, and which one this is.
struct Variables {
  const char *size, *rank;
};

#if TESSERA_MPI
constexpr const char* kAlone = "MPI has 1 rank";
#else
constexpr const char* kAlone = "this build has no MPI (-Dmpi=disabled)";
#endif

constexpr Variables kLaunchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},  // mpirun of Open MPI
    {"PMI_SIZE", "PMI_RANK"},                          // mpiexec of MPICH, srun --mpi=pmi2
    {"MPI_LOCALNRANKS", "MPI_LOCALRANKID"},            // mpiexec of MPICH: those on the node
    {"MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"},    // MVAPICH
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"},          // srun
    {"WORLD_SIZE", "RANK"},                            // torchrun, and loops of a shell
};

}  // namespace

std::optional<int64_t> parse_integer(std::string_view text, int64_t low, int64_t high) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < low || value > high) return std::nullopt;
  return value;
}

bool is_launched_for_mpi(const Environment& environment) {
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS"}) {
    if (environment(name) != nullptr) return true;
  }
  return false;
}

std::string launcher_claim(const Environment& environment, int64_t* num_processes,
                           std::string* variable) {
  for (const Variables& v : kLaunchers) {
    const char *const size_text = environment(v.size), *const rank_text = environment(v.rank);
    if (size_text == nullptr || rank_text == nullptr) continue;
    const auto size = parse_integer(size_text, 2, std::numeric_limits<int32_t>::max());
    if (!size || !parse_integer(rank_text, 0, *size - 1)) continue;
    if (num_processes != nullptr) *num_processes = *size;
    if (variable != nullptr) *variable = v.size;
    return fmt::format("{} = {} and {} = {}", v.size, *size, v.rank, rank_text);
  }
  return "";
}

std::string launcher_problem(const Environment& environment, int num_mpi_ranks) {
  int64_t num_processes = 0;
  std::string variable;
  const std::string claim = launcher_claim(environment, &num_processes, &variable);
  if (num_mpi_ranks > 1 || claim.empty()) return "";
  return fmt::format(
      "World: {}, but {}: each of these processes would be a run of its own; expected mpirun -n {} "
      "of the MPI that this program is built with, or, for lone processes, no {}",
      claim, kAlone, num_processes, variable);
}

}  // namespace tessera::dist
