#include "dist/comm/launcher.h"

#include <map>

#include "test/testing.h"

namespace tessera::dist {
namespace {

using Variables = std::map<std::string, std::string, std::less<>>;

/// What launcher_problem says of a process with these variables that MPI calls rank 0 of 1.
std::string problem_of(const Variables& variables, int num_mpi_ranks = 1) {
  return launcher_problem(
      [&](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
      },
      num_mpi_ranks);
}

TEST_CASE("launcher: a process that another launcher has started beside others is refused",
          "[comm]") {
  for (const auto& [size, rank] : std::vector<std::pair<const char*, const char*>>{
           {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
           {"PMI_SIZE", "PMI_RANK"},
           {"MPI_LOCALNRANKS", "MPI_LOCALRANKID"},
           {"MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"},
           {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"},
           {"WORLD_SIZE", "RANK"}}) {
    CAPTURE(size);
    const std::string message = problem_of({{size, "4"}, {rank, "3"}});
    CHECK(message.find(std::string("World: ") + size + " = 4 and " + rank + " = 3, but ") == 0);
    CHECK(message.find("expected mpirun -n 4") != std::string::npos);
    CHECK(message.find(std::string("for lone processes, no ") + size) != std::string::npos);
    CHECK(problem_of({{size, "1"}, {rank, "0"}}).empty());
    CHECK(problem_of({{size, "4"}}).empty());                   // nobody is a rank of it
    CHECK(problem_of({{size, "4"}, {rank, "4"}}).empty());      // nor is this
    CHECK(problem_of({{size, "four"}, {rank, "0"}}).empty());   // some other variable
    CHECK(problem_of({{size, "4"}, {rank, "3"}}, 4).empty());   // MPI has found the others
    CHECK(problem_of({{size, "2"}, {rank, "1"}}, 16).empty());  // of mpirun's own daemons
  }
}

TEST_CASE("launcher: an allocation is not a step, and one process is one process", "[comm]") {
  CHECK(problem_of({}).empty());
  CHECK(problem_of({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_JOB_NUM_NODES", "2"}})
            .empty());
  CHECK(problem_of({{"SLURM_NTASKS", "8"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}})
            .empty());
}

TEST_CASE("launcher: MPI is asked only where a launcher of one has been", "[comm]") {
  const auto is_launched = [](const Variables& variables) {
    return is_launched_for_mpi(
        [&](const char* name) { return variables.count(name) != 0 ? "1" : nullptr; });
  };
  CHECK_FALSE(is_launched({}));
  CHECK_FALSE(is_launched({{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "1"}}));
  CHECK_FALSE(is_launched({{"WORLD_SIZE", "4"}, {"RANK", "1"}}));
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS"}) {
    CHECK(is_launched({{name, "1"}}));
  }
}

TEST_CASE("launcher: numbers are whole and in range", "[comm]") {
  CHECK(parse_integer("12", 1, 12) == 12);
  for (const char* text :
       {"", "0", "13", "-1", "1.5", "1e1", " 1", "1 ", "0x1", "two", "99999999999999999999"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_integer(text, 1, 12).has_value());
  }
}

}  // namespace
}  // namespace tessera::dist
