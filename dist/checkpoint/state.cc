#include "dist/checkpoint/state.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <span>

#include "core/autograd.h"
#include "core/text.h"
#include "dist/fsdp/offload.h"
#include "dist/fsdp/parts.h"
#include "dist/fsdp/shard_view.h"

namespace tessera::dist {
namespace {

constexpr int64_t kLoadBufferNbytes = int64_t{64} << 20;

/// Of a state with one value for `block` elements; else the parameter's own.
Shape shape_of(const Placement& p, int64_t block) {
  return block == 1 ? p.shape : Shape{optim::state_numel(p.numel, block)};
}

/// The parts of a group's placements in elements [first, first + numel) of this rank's shard, of
/// values that are one for `block` elements: no block is in two shards or parameters.
void add_group(std::vector<Slice>& slices, const HeldGroup& g, const std::string& prefix,
               const Tensor& values, int64_t first, int64_t numel, int64_t block = 1) {
  for (const Placement& p : g.layout.placements) {
    const int64_t begin = std::max(g.begin + first, p.begin);
    const int64_t end = std::min(g.begin + first + numel, p.begin + p.numel);
    if (begin >= end) continue;
    slices.push_back(
        {prefix + p.name, shape_of(p, block), (begin - p.begin) / block,
         values.narrow(0, (begin - g.begin) / block, optim::state_numel(end - begin, block))});
  }
}

Tensor dims_of(const Shape& shape) {
  const std::vector<int64_t> dims(shape.begin(), shape.end());
  return from_values(std::span<const int64_t>(dims), {std::ssize(dims)}, kI64);
}

/// The codes of a group in elements [first, first + numel) of this rank's shard; with `is_all` what
/// is the same on all ranks too.
void add_codes(std::vector<Slice>& slices, const HeldGroup& g, int64_t first, int64_t numel,
               bool is_all) {
  for (size_t i = 0; i < g.layout.placements.size(); ++i) {
    const Placement& p = g.layout.placements[i];
    const int64_t begin = std::max(g.begin + first, p.begin);
    const int64_t end = std::min(g.begin + first + numel, p.begin + p.numel);
    if (begin < end) {
      const Tensor codes =
          g.coded->codes().narrow(0, nf4_nbytes(begin - g.begin), nf4_nbytes(end - begin));
      slices.push_back({std::string(kCodesPrefix) + p.name,
                        {nf4_nbytes(p.numel)},
                        nf4_nbytes(begin - p.begin),
                        codes});
    }
    if (!is_all || p.numel == 0) continue;
    const Tensor scales = g.coded->scales(i), dims = dims_of(p.shape);
    slices.push_back({std::string(kScalesPrefix) + p.name, scales.shape(), 0, scales});
    slices.push_back({std::string(kCodesShapePrefix) + p.name, dims.shape(), 0, dims});
  }
}

std::vector<Slice> slices_of(const TrainingState& state, bool owned) {
  std::vector<Slice> slices;
  const ShardView view(*state.fsdp);
  std::vector<optim::NamedState> optimizer_states;
  if (state.optimizer != nullptr) optimizer_states = state.optimizer->state();
  size_t index = 0;  // of the optimizer's shards: the trainable groups in order
  for (const HeldGroup& g : view.groups()) {
    const int64_t first = owned ? g.own_begin : 0;
    const int64_t numel = owned ? g.own_numel : g.numel;
    if (g.coded != nullptr) {
      add_codes(slices, g, first, numel, !owned || view.is_first());
      continue;
    }
    add_group(slices, g, std::string(kParametersPrefix), g.values, first, numel);
    if (!g.layout.is_trainable) continue;
    for (const optim::NamedState& s : optimizer_states) {
      if (!s.tensors[index].is_defined()) continue;
      add_group(slices, g, s.name + "/", s.tensors[index], first, numel, s.block);
    }
    ++index;
  }
  if (owned && !view.is_first()) return slices;
  // The same on all ranks.
  const auto add_whole = [&](const std::string& name, const Tensor& tensor, bool is_optional) {
    slices.push_back(
        {name, tensor.shape(), 0, tensor.detach().view({tensor.numel()}), is_optional});
  };
  for (const nn::NamedParameter& p : parts_of(*state.fsdp).ignored) {
    add_whole(std::string(kParametersPrefix) + p.name, p.parameter->tensor, false);
  }
  if (state.optimizer != nullptr) {
    add_whole("optimizer/step_count", state.optimizer->step_count(), false);
    for (const optim::WholeState& s : state.optimizer->whole_state()) {
      add_whole(s.name, s.values, false);
    }
  }
  if (state.scaler != nullptr && state.scaler->options().scaling == LossScaling::kDynamic) {
    const LossScaler::State scaler = state.scaler->state();
    add_whole("loss_scale/scale", scaler.scale, true);
    add_whole("loss_scale/num_good", scaler.num_good, true);
    add_whole("loss_scale/num_skipped", scaler.num_skipped, true);
  }
  return slices;
}

bool is_parameter_name(std::string_view name) {
  for (const std::string_view prefix :
       {kParametersPrefix, kCodesPrefix, kScalesPrefix, kCodesShapePrefix}) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

bool is_optional_name(std::string_view name) {
  return name.starts_with("loss_scale/");
}

/// Every tensor of the state, as far as this rank can know: the whole model's, since names and
/// shapes of a unit are the same on all ranks.
std::vector<std::pair<std::string, Shape>> expected_tensors(const TrainingState& state) {
  std::vector<std::pair<std::string, Shape>> tensors;
  std::vector<optim::NamedState> optimizer_states;
  if (state.optimizer != nullptr) {
    optimizer_states = state.optimizer->state();
    tensors.emplace_back("optimizer/step_count", Shape{});
    for (const optim::WholeState& s : state.optimizer->whole_state()) {
      tensors.emplace_back(s.name, s.values.shape());
    }
  }
  const ShardView view(*state.fsdp);
  size_t index = 0;  // of the optimizer's shards
  for (const HeldGroup& g : view.groups()) {
    for (const Placement& p : g.layout.placements) {
      if (p.numel == 0) continue;
      if (g.coded != nullptr) {
        tensors.emplace_back(std::string(kCodesPrefix) + p.name, Shape{nf4_nbytes(p.numel)});
        tensors.emplace_back(std::string(kScalesPrefix) + p.name, Shape{nf4_num_scales(p.numel)});
        tensors.emplace_back(std::string(kCodesShapePrefix) + p.name, Shape{p.shape.num_dims()});
        continue;
      }
      tensors.emplace_back(std::string(kParametersPrefix) + p.name, p.shape);
      if (!g.layout.is_trainable) continue;
      for (const optim::NamedState& s : optimizer_states) {
        if (!s.tensors[index].is_defined()) continue;
        tensors.emplace_back(s.name + "/" + p.name, shape_of(p, s.block));
      }
    }
    if (g.layout.is_trainable) ++index;
  }
  for (const nn::NamedParameter& p : parts_of(*state.fsdp).ignored) {
    tensors.emplace_back(std::string(kParametersPrefix) + p.name, p.parameter->tensor.shape());
  }
  return tensors;
}

/// Sets slices through a buffer in host memory, from their values in a store: dtype_of(slice) says
/// what they are there, read(slice, begin, end, dst) copies elements of its tensor.
template <class DTypeOf, class Read>
void load_slices(std::span<const Slice> slices, const DTypeOf& dtype_of, const Read& read) {
  const NoGrad no_grad;
  const MemoryScope scope(MemoryClass::kOther);
  int64_t largest = 1;
  for (const Slice& s : slices) {
    const auto nbytes_each = static_cast<int64_t>(size_of(dtype_of(s)));
    largest = std::max(largest, s.values.numel() * nbytes_each);
  }
  const int64_t buffer_nbytes = std::min(largest, kLoadBufferNbytes);
  const Tensor buffer = empty_on_host(buffer_nbytes, kU8);
  current_stream().synchronize();  // the host writes into it
  int64_t used = 0;
  for (const Slice& s : slices) {
    const DType dtype = dtype_of(s);
    const auto nbytes_each = static_cast<int64_t>(size_of(dtype));
    for (int64_t first = 0; first < s.values.numel();) {
      used = (used + nbytes_each - 1) / nbytes_each * nbytes_each;
      if (used + nbytes_each > buffer_nbytes) {
        current_stream().synchronize();
        used = 0;
      }
      const int64_t count =
          std::min(s.values.numel() - first, (buffer_nbytes - used) / nbytes_each);
      const Tensor part = view_of_storage(buffer.storage(), used / nbytes_each, {count}, dtype);
      read(s, s.begin + first, s.begin + first + count, part.raw_data());
      s.values.narrow(0, first, count).copy_(part);
      used += count * nbytes_each;
      first += count;
    }
  }
  current_stream().synchronize();
}

}  // namespace

std::vector<Slice> held_slices(const TrainingState& state) {
  return slices_of(state, false);
}
std::vector<Slice> owned_slices(const TrainingState& state) {
  return slices_of(state, true);
}

Snapshot::Snapshot(std::vector<Slice> slices) : slices_(std::move(slices)) {
  // Wide ones first, so that every element is aligned.
  std::stable_sort(slices_.begin(), slices_.end(), [](const Slice& a, const Slice& b) {
    return size_of(a.values.dtype()) > size_of(b.values.dtype());
  });
  int64_t nbytes = 0;
  for (const Slice& s : slices_) {
    entries_.push_back(
        {slice_name(s.tensor, s.begin, s.end()), s.values.dtype(), Shape{s.values.numel()}});
    offsets_.push_back(nbytes);
    nbytes += s.values.nbytes();
  }
  offsets_.push_back(nbytes);
  const MemoryScope scope(MemoryClass::kOther);
  host_ = empty_on_host(nbytes + kAlignment, kU8);
  const auto address = reinterpret_cast<uintptr_t>(host_.raw_data());
  first_ = static_cast<int64_t>(-address % kAlignment);
  for (size_t i = 0; i < slices_.size(); ++i) {
    const DType dtype = slices_[i].values.dtype();
    copies_.push_back(view_of_storage(host_.storage(),
                                      (first_ + offsets_[i]) / static_cast<int64_t>(size_of(dtype)),
                                      {slices_[i].values.numel()}, dtype));
  }
}

void Snapshot::capture() {
  const NoGrad no_grad;
  for (size_t i = 0; i < slices_.size(); ++i) copies_[i].copy_(slices_[i].values);
  done_ = current_stream().record();
}

void Snapshot::wait() const {
  // Not as the host thread that submits: for the order of tasks this is no wait.
  if (done_.impl() != nullptr) done_.impl()->synchronize();
}

void Snapshot::restore() const {
  const NoGrad no_grad;
  for (size_t i = 0; i < slices_.size(); ++i) {
    Tensor values = slices_[i].values;
    values.copy_(copies_[i]);
  }
}

const void* Snapshot::data() const {
  return static_cast<const char*>(host_.raw_data()) + first_;
}

void check_tensors(const CheckpointReader& reader, const TrainingState& state) {
  std::vector<std::string> problems;
  std::set<std::string> expected;
  for (const auto& [name, shape] : expected_tensors(state)) {
    expected.insert(name);
    const TensorRecord* found = reader.manifest().find(name);
    if (found == nullptr) {
      problems.push_back("missing " + name);
    } else if (found->shape != shape) {
      problems.push_back(fmt::format("{} is {}, expected {}", name, found->shape, shape));
    }
  }
  for (const TensorRecord& tensor : reader.manifest().tensors) {
    // Without an optimizer only parameters count.
    const bool counts = state.optimizer != nullptr || is_parameter_name(tensor.name);
    if (counts && !is_optional_name(tensor.name) && !expected.contains(tensor.name)) {
      problems.push_back("unexpected " + tensor.name);
    }
  }
  const ShardView view(*state.fsdp);
  for (const HeldGroup& g : view.groups()) {
    if (g.coded == nullptr || !problems.empty()) continue;
    for (const Placement& p : g.layout.placements) {
      if (p.numel == 0) continue;
      const Shape found = reader.shape_of(p.name);
      if (found == p.shape) continue;
      problems.push_back(fmt::format("{} is {}, expected {}", p.name, found, p.shape));
    }
  }
  if (problems.empty()) return;
  throw CheckpointError(fmt::format("{}: tensors do not fit this model and optimizer: {}",
                                    reader.path(), join_few(problems, "; ")));
}

void load_state(const CheckpointReader& reader, const TrainingState& state) {
  std::vector<Slice> slices = held_slices(state);
  std::erase_if(slices, [&](const Slice& s) {
    return s.is_optional && reader.manifest().find(s.tensor) == nullptr;
  });
  const auto dtype = [&](const Slice& s) {
    const TensorRecord* record = reader.manifest().find(s.tensor);
    return record == nullptr ? s.values.dtype() : record->dtype;
  };
  const auto read = [&](const Slice& s, int64_t begin, int64_t end, void* dst) {
    reader.read_tensor(s.tensor, begin, end, dst);
  };
  load_slices(slices, dtype, read);
  state.fsdp->shards_changed(state.optimizer);
}

namespace {

using IsWanted = std::function<bool(const nn::NamedParameter&)>;

/// Quantizes this rank's part of what is kept as codes, piece by piece.
void load_codes(const ParameterSource& source, Fsdp& fsdp, const std::set<std::string>& left_out) {
  const NoGrad no_grad;
  const MemoryScope scope(MemoryClass::kOther);
  const ShardView view(fsdp);
  Tensor buffer;
  for (const HeldGroup& g : view.groups()) {
    if (g.coded == nullptr) continue;
    for (size_t i = 0; i < g.layout.placements.size(); ++i) {
      const Placement& p = g.layout.placements[i];
      if (left_out.contains(std::string(kParametersPrefix) + p.name)) continue;
      g.coded->set_written(i);
      const int64_t begin = std::max(g.begin, p.begin) - p.begin;
      const int64_t end = std::min(g.begin + g.numel, p.begin + p.numel) - p.begin;
      if (!buffer.is_defined()) buffer = empty_on_host(Coded::kPieceNumel, kF32);
      for (int64_t at = begin; at < end; at += Coded::kPieceNumel) {
        const Tensor piece = buffer.narrow(0, 0, std::min(end - at, Coded::kPieceNumel));
        current_stream().synchronize();  // the host writes into it
        source.read(p.name, at, at + piece.numel(), piece.data<float>());
        g.coded->write(i, at, piece);
      }
    }
  }
  current_stream().synchronize();
}

void load_own_parameters(const ParameterSource& source, Fsdp& fsdp, nn::Module& model,
                         const IsWanted& is_wanted) {
  std::set<std::string> left_out;
  for (const nn::NamedParameter& p : model.named_parameters()) {
    if (is_wanted != nullptr && !is_wanted(p)) {
      left_out.insert(std::string(kParametersPrefix) + p.name);
      continue;
    }
    const Shape& shape = p.parameter->tensor.shape();
    const Shape found = source.shape_of(p.name);
    const bool fits = shape == found ||
                      (p.name == "position.weight" && shape[1] == found[1] && shape[0] < found[0]);
    TESSERA_CHECK_AS(InputError, fits, "{}: {} is {}, expected {} of the model", source.path(),
                     p.name, found, shape);
  }
  const auto dtype = [](const Slice&) { return kF32; };
  const auto read = [&](const Slice& s, int64_t begin, int64_t end, void* dst) {
    source.read(std::string_view(s.tensor).substr(kParametersPrefix.size()), begin, end,
                static_cast<float*>(dst));
  };
  std::vector<Slice> slices = held_slices({.model = &model, .fsdp = &fsdp});
  std::erase_if(slices, [&](const Slice& s) {
    return !s.tensor.starts_with(kParametersPrefix) || left_out.contains(s.tensor);
  });
  load_slices(slices, dtype, read);
  load_codes(source, fsdp, left_out);
}

}  // namespace

void load_parameters(const ParameterSource& source, Fsdp& fsdp, nn::Module& model,
                     const std::function<bool(const nn::NamedParameter&)>& is_wanted) {
  parts_of(fsdp).world.control().verdict(
      [&] { load_own_parameters(source, fsdp, model, is_wanted); });
  fsdp.shards_changed();
}

}  // namespace tessera::dist
