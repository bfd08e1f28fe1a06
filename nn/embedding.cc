#include "nn/embedding.h"

#include "kernels/embedding/embedding.h"

namespace tessera::nn {

Embedding::Embedding(int64_t num_rows, int64_t width, const Init& init)
    : weight_(register_parameter("weight", {num_rows, width}, init)) {}

Tensor Embedding::forward(const Tensor& ids) {
  return embedding(ids, weight_);
}

std::string Embedding::kind() const {
  return fmt::format("Embedding({}, {})", weight_.dim(0), weight_.dim(1));
}

}  // namespace tessera::nn
