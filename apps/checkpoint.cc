#include <cstdlib>

#include "apps/checkpoint_command.h"
#include "apps/program.h"
#include "core/check.h"
#include "dist/comm/launcher.h"

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] {
    // Each would write the same files.
    const std::string claim = tessera::dist::launcher_claim(std::getenv);
    TESSERA_CHECK_AS(tessera::ConfigError, claim.empty(),
                     "tessera-checkpoint: {}, expected one process, without a launcher", claim);
    return tessera::apps::checkpoint_command({argv + 1, argv + argc});
  });
}
