#include "apps/program.h"

#include <signal.h>

#include "core/check.h"
#include "core/log.h"
#include "core/runtime/cpu/check.h"

namespace tessera::apps {

int run_program(const std::function<int()>& body) {
  check_processor();
  ::signal(SIGXFSZ, SIG_IGN);  // a file that is too large is an error of the write
  try {
    return body();
  } catch (const Error& error) {
    log_error("{}", error.what());
    return error.exit_status();
  } catch (const std::exception& error) {
    log_error("{}", error.what());
    return 1;
  }
}

}  // namespace tessera::apps
