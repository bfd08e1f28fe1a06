// tessera-train on ranks that are threads of one process, for test/compare_builds.sh:
//   train_threads RANKS [CONFIG.toml] [--section.key=value ...]
#include <string>
#include <vector>

#include "apps/program.h"
#include "apps/trainer.h"
#include "dist/comm/local.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + (argc > 1 ? 2 : 1), argv + argc);
  return tessera::apps::run_program([&] {
    const int num_ranks = argc > 1 ? std::stoi(argv[1]) : 0;
    tessera::dist::run_ranks(num_ranks, [&](tessera::dist::World& world) {
      tessera::apps::train_command(arguments, world);
    });
    return 0;
  });
}
