#include "dist/checkpoint/hf_tensors.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/formats/parameters.h"
#include "core/text.h"

namespace tessera::dist {
namespace {

void check_finite(const HfFiles::Place& place, const float* values, int64_t count) {
  const float* const end = values + count;
  const float* bad = std::find_if(values, end, [](float value) { return !std::isfinite(value); });
  if (bad == end) return;
  throw InputError(fmt::format("{}: tensor {} has a value that is {}, expected finite ones",
                               place.file->path(), shorten(place.entry->name), *bad));
}

}  // namespace

std::vector<std::string> hf_tensor_problems(
    const std::vector<nn::HfParameter>& parameters, const HfTensors& tensors,
    const std::function<bool(std::string_view name)>& may_be_there) {
  std::vector<std::string> problems;
  std::set<std::string, std::less<>> expected;
  for (const nn::HfParameter& p : parameters) {
    for (const nn::HfTensor& t : p.sources) {
      expected.insert(t.name);
      const auto found = tensors.find(t.name);
      if (found == tensors.end()) {
        problems.push_back("missing " + t.name);
        continue;
      }
      const SafetensorsEntry& entry = *found->second.entry;
      const bool is_float = entry.dtype == kF32 || entry.dtype == kBF16 || entry.dtype == kF16;
      if (entry.shape != t.shape || !is_float) {
        problems.push_back(fmt::format("{} is {} {}, expected f32, bf16 or f16 {}", entry.name,
                                       entry.dtype, entry.shape, t.shape));
      }
    }
  }
  for (const auto& [name, place] : tensors) {
    if (!expected.contains(name) && !may_be_there(name)) {
      problems.push_back("unexpected " + place.entry->name);
    }
  }
  return problems;
}

void read_hf_parameter(const nn::HfParameter& p, const HfTensors& tensors, int64_t begin,
                       int64_t end, float* dst) {
  const int64_t cols = p.cols();
  for (const nn::HfTensor& source : p.sources) {
    const HfFiles::Place& place = tensors.find(source.name)->second;
    const DType dtype = *place.entry->dtype.ours();  // check_tensors
    const auto* data = static_cast<const char*>(place.file->data(*place.entry));
    const auto at = [&](int64_t element) {
      return data + element * static_cast<int64_t>(size_of(dtype));
    };
    for (const nn::HfRows& run : source.rows) {
      const int64_t first = std::max(begin, run.row * cols);
      const int64_t last = std::min(end, (run.row + run.num_rows) * cols);
      if (first >= last) continue;
      if (!source.is_transposed) {
        load_floats(dst + (first - begin), at(run.hf_row * cols + first - run.row * cols), dtype,
                    last - first);
        check_finite(place, dst + (first - begin), last - first);
        continue;
      }
      // Element (row, col) of ours is (col, row) there: a row of ours at a time.
      const int64_t num_rows = source.shape[1];
      for (int64_t i = first; i < last;) {
        const int64_t row = i / cols, col = i % cols;
        const int64_t count = std::min(last - i, cols - col);
        load_floats(dst + (i - begin), at(col * num_rows + run.hf_row + row - run.row), dtype,
                    count, num_rows);
        i += count;
      }
      check_finite(place, dst + (first - begin), last - first);
    }
    place.file->check();
  }
}

void check_hf_range(std::string_view name, const float* values, int64_t numel, DType dtype) {
  visit_float(dtype, "export", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const float* const end = values + numel;
    const float* bad = std::find_if(values, end, [](float value) {
      return std::isfinite(value) && !std::isfinite(static_cast<float>(T(value)));
    });
    if (bad == end) return;
    throw ConfigError(fmt::format("export: {} has {:g}, which {} cannot hold, expected --dtype={}",
                                  name, *bad, dtype, dtype == kF16 ? "bf16 or f32" : "f32"));
  });
}

std::vector<std::byte> make_hf_tensor(const nn::HfTensor& tensor, const float* ours, int64_t cols,
                                      DType dtype) {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.shape.numel()) * size_of(dtype));
  visit_float(dtype, "export", [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const dst = reinterpret_cast<T*>(bytes.data());
    for (const nn::HfRows& run : tensor.rows) {
      const float* first = ours + run.row * cols;
      if (!tensor.is_transposed) {
        std::transform(first, first + run.num_rows * cols, dst + run.hf_row * cols,
                       [](float value) { return T(value); });
        continue;
      }
      const int64_t num_rows = tensor.shape[1];
      for (int64_t c = 0; c < cols; ++c) {
        for (int64_t r = 0; r < run.num_rows; ++r) {
          dst[c * num_rows + run.hf_row + r] = T(first[r * cols + c]);
        }
      }
    }
  });
  return bytes;
}

}  // namespace tessera::dist
