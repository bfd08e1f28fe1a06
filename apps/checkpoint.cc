#include "apps/checkpoint_command.h"
#include "core/check.h"
#include "core/log.h"

int main(int argc, char** argv) {
  try {
    return tessera::apps::checkpoint_command({argv + 1, argv + argc});
  } catch (const tessera::Error& error) {
    tessera::log_error("{}", error.what());
    return error.exit_status();
  } catch (const std::exception& error) {
    tessera::log_error("{}", error.what());
    return 1;
  }
}
