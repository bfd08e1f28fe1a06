#pragma once

#include <functional>

namespace tessera::apps {

/// The `main` of a program that is no rank of a World (those have `dist::run_main`): ends with a
/// message on a processor that lacks instructions, else runs `body`. An exception is one line on
/// stderr, and its exit status (1 without one) is returned.
int run_program(const std::function<int()>& body);

}  // namespace tessera::apps
