#include "kernels/matmul/kernel.h"
#include "test/simt/simt_testing.h"
