#include "nn/hf/parameters.h"

namespace tessera::nn {

void HfParameterList::matrix(const std::string& name, int64_t cols, const std::vector<Part>& parts,
                             bool is_transposed) {
  HfParameter p{name, {}, {}};
  int64_t row = 0;
  for (const Part& part : parts) {
    const Shape shape = is_transposed ? Shape{cols, part.num_rows} : Shape{part.num_rows, cols};
    p.sources.push_back({part.name, shape, is_transposed, {{row, 0, part.num_rows}}});
    row += part.num_rows;
  }
  p.shape = {row, cols};
  all_.push_back(std::move(p));
}

void HfParameterList::vector(const std::string& name, const std::vector<Part>& parts) {
  HfParameter p{name, {}, {}};
  int64_t row = 0;
  for (const Part& part : parts) {
    p.sources.push_back({part.name, {part.num_rows}, false, {{row, 0, part.num_rows}}});
    row += part.num_rows;
  }
  p.shape = {row};
  all_.push_back(std::move(p));
}

void HfParameterList::norm(const std::string& name, const std::string& hf_name, int64_t width,
                           bool has_bias) {
  vector(name + ".weight", {{hf_name + ".weight", width}});
  if (has_bias) vector(name + ".bias", {{hf_name + ".bias", width}});
}

}  // namespace tessera::nn
