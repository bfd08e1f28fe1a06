#include "apps/checkpoint_command.h"
#include "apps/program.h"

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] {
    return tessera::apps::checkpoint_command({argv + 1, argv + argc});
  });
}
