#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "dist/checkpoint/hf_files.h"
#include "nn/hf/parameters.h"

// Between parameters of ours and the tensors of transformers that they are made of.

namespace tessera::dist {

/// Tensors in files, by their names there.
using HfTensors = std::map<std::string, HfFiles::Place, std::less<>>;

/// "missing NAME", "unexpected NAME", "NAME is bf16 [2, 3], expected ...": what of `tensors` is not as
/// `parameters` want it. `may_be_there` says which others do not matter.
std::vector<std::string> hf_tensor_problems(
    const std::vector<nn::HfParameter>& parameters, const HfTensors& tensors,
    const std::function<bool(std::string_view name)>& may_be_there);

/// f32 elements [begin, end) of a parameter of ours whose tensors have no problems. Touches no more
/// than the bytes that they come from. InputError that names the tensor for one not finite.
void read_hf_parameter(const nn::HfParameter& p, const HfTensors& tensors, int64_t begin,
                       int64_t end, float* dst);

/// ConfigError for a number that `dtype` rounds to infinity, which would be a broken model.
void check_hf_range(std::string_view name, const float* values, int64_t numel, DType dtype);
/// The bytes of a tensor of transformers, made from the parameter of ours that holds its rows.
std::vector<std::byte> make_hf_tensor(const nn::HfTensor& tensor, const float* ours, int64_t cols,
                                      DType dtype);

}  // namespace tessera::dist
