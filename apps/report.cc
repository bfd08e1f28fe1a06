#include "apps/program.h"
#include "apps/report/command.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  return tessera::apps::run_program([&] { return tessera::apps::report_command(arguments); });
}
