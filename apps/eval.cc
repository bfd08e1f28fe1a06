#include "apps/model_command.h"
#include "core/runtime/cpu/check.h"

int main(int argc, char** argv) {
  tessera::check_processor();
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  return tessera::dist::run_main(argc, argv, [&](tessera::dist::World& world) {
    return tessera::apps::eval_command(arguments, world);
  });
}
