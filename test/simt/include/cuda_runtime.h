#pragma once

// What kernels see of CUDA in an emulated build: the runtime's types and the device's spellings.

#include "test/simt/include/vector_types.h"
#include "test/simt/intrinsics.h"
#include "test/simt/simt.h"
