#pragma once

namespace tessera {

/// Ends the program with one line that names the missing instructions if this processor is older
/// than the build (option `simd`). Runs by itself before main; calling it only links it in.
void check_processor();

}  // namespace tessera
