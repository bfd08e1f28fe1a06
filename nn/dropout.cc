#include "nn/dropout.h"

#include "kernels/random/random.h"

namespace tessera::nn {

Dropout::Dropout(double p) : p_(p) {
  TESSERA_CHECK_AS(ConfigError, p >= 0 && p < 1, "Dropout: expected p in [0, 1), got {}", p);
}

Tensor Dropout::forward(const Tensor& x) {
  return is_active() ? dropout(x, p_) : x;
}

}  // namespace tessera::nn
