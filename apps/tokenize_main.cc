#include "apps/program.h"
#include "apps/tokenize.h"

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] {
    return tessera::apps::tokenize_command({argv + 1, argv + argc});
  });
}
