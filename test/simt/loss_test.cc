#include "kernels/loss/kernel.h"
#include "test/simt/simt_testing.h"
