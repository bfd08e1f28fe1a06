#include "optim/muon.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/autograd.h"
#include "optim/exchange.h"

namespace tessera::optim {
namespace {

constexpr const char* kMuon = "Muon";

std::vector<int64_t> blocks_of(const WholeParameter& p) {
  TESSERA_CHECK_AS(ConfigError, p.shape.num_dims() == 2,
                   "{}: {} is {}, expected a matrix; another optimizer can update it", kMuon,
                   p.name, p.shape);
  if (p.row_blocks.empty()) return {p.shape[0]};
  const int64_t rows = std::accumulate(p.row_blocks.begin(), p.row_blocks.end(), int64_t{0});
  TESSERA_CHECK_AS(ConfigError, rows == p.shape[0],
                   "{}: the blocks of {} have {} rows, expected {}", kMuon, p.name, rows,
                   p.shape[0]);
  return p.row_blocks;
}

/// Segments that end where a matrix ends.
FlatShard split_segments(FlatShard shard) {
  std::vector<Segment> segments;
  for (const Segment& whole : shard.segments) {
    const WholeParameter& p = of_parameter(kMuon, shard, whole, shard.parameters,
                                           [](const WholeParameter& w) { return w.name; });
    int64_t end = 0;  // of a block, in elements of the parameter
    for (const int64_t rows : blocks_of(p)) {
      const int64_t begin = end;
      end += rows * p.shape[1];
      Segment part = whole;
      part.offset = std::max(whole.offset, begin);
      part.begin = whole.begin + part.offset - whole.offset;
      part.end = std::min(whole.end, whole.begin + end - whole.offset);
      if (part.begin < part.end) segments.push_back(std::move(part));
    }
  }
  shard.segments = std::move(segments);
  return shard;
}

std::vector<FlatShard> split_all(std::vector<FlatShard> shards) {
  for (FlatShard& shard : shards) shard = split_segments(std::move(shard));
  return shards;
}

double scale_of(MuonScale scale, int64_t rows, int64_t cols) {
  const auto R = static_cast<double>(rows), C = static_cast<double>(cols);
  return scale == MuonScale::kOriginal ? std::sqrt(std::max(1.0, R / C))
                                       : 0.2 * std::sqrt(std::max(R, C));
}

}  // namespace

Muon::Muon(std::vector<FlatShard> shards, const MuonOptions& options)
    : Optimizer(split_all(std::move(shards)), options.lr, options.weight_decay,
                options.rounding_seed),
      options_(options) {
  check_decay_rate(kMuon, "momentum", options.momentum);
  check_not_negative(kMuon, "weight_decay", options.weight_decay);
  momentum_buffer_ = make_state("momentum_buffer");
  const MemoryScope scope(MemoryClass::kOptimizer);
  int64_t largest_part = 0, largest_whole = 0;
  bool is_shared = false;
  for (const FlatShard& shard : shards_) {
    std::vector<Matrix>& matrices = matrices_.emplace_back();
    for (const WholeParameter& p : shard.parameters) {
      int64_t row = 0;
      for (const int64_t rows : blocks_of(p)) {
        if (rows * p.shape[1] > 0) {
          matrices.push_back({p.begin + row * p.shape[1], rows, p.shape[1], 0});
        }
        row += rows;
      }
    }
    // The largest first, each to the rank that has the least to do: the same on all ranks.
    std::vector<double> work(static_cast<size_t>(num_owners(shard)), 0);
    std::vector<Matrix*> order;
    for (Matrix& m : matrices) order.push_back(&m);
    const auto flops = [](const Matrix& m) { return orthogonalize_flops(m.rows, m.cols).computed; };
    std::stable_sort(order.begin(), order.end(),
                     [&](const Matrix* a, const Matrix* b) { return flops(*a) > flops(*b); });
    for (Matrix* m : order) m->owner = give_to_least(work, flops(*m));
    std::vector<float> scales;
    for (const Segment& segment : shard.segments) {
      const int64_t at = shard.begin + segment.begin;
      const auto m = std::find_if(matrices.begin(), matrices.end(), [&](const Matrix& matrix) {
        return matrix.begin <= at && at < matrix.begin + matrix.rows * matrix.cols;
      });
      scales.push_back(static_cast<float>(scale_of(options.scale, m->rows, m->cols)));
    }
    scales_.push_back(
        from_values(std::span<const float>(scales), {static_cast<int64_t>(scales.size())}, kF32));
    largest_part = std::max(largest_part, shard.master.numel());
    largest_whole = std::max(largest_whole, shard.master.numel() * num_owners(shard));
    is_shared |= shard.exchange != nullptr;
  }
  for (Slot& slot : slots_) {
    slot.whole = zeros({largest_whole}, kBF16);
    slot.result = zeros({largest_whole}, kBF16);
    slot.part = is_shared ? zeros({largest_part}, kBF16) : slot.whole;
    slot.update = is_shared ? zeros({largest_part}, kBF16) : slot.result;
  }
}

/// While the matrices of a shard are computed, the directions of the next one come and the results
/// of the one before go back.
void Muon::update(const StepScalars& step) {
  const NoGrad no_grad;
  const size_t count = shards_.size();
  for (size_t i = 0; i < count + 2; ++i) {
    if (i < count) collect(i, step, slot_of(i));
    if (i >= 1 && i - 1 < count) compute(i - 1, slot_of(i - 1));
    if (i >= 2) apply(i - 2, step, slot_of(i - 2));
  }
}

void Muon::collect(size_t index, const StepScalars& step, Slot& slot) {
  const FlatShard& shard = shards_[index];
  const Tensor part = slot.part.narrow(0, 0, shard.master.numel());
  for_parts(index, index + 1, step, {.master = false},
            [&](const FlatUpdate& window, std::span<const Tensor> states) {
              muon_direction(window,
                             {.momentum_buffer = states[0],
                              .direction = part.narrow(0, window.first, window.master.numel()),
                              .momentum = static_cast<float>(options_.momentum),
                              .nesterov = options_.nesterov});
            });
  if (shard.exchange == nullptr) {
    slot.is_here = current_stream().record();
    return;
  }
  const int64_t numel = part.numel() * num_owners(shard);
  slot.is_here = shard.exchange->gather_shards(slot.whole.narrow(0, 0, numel), part);
}

void Muon::compute(size_t index, Slot& slot) {
  const FlatShard& shard = shards_[index];
  current_stream().wait(slot.is_here);
  const int owner = this_owner(shard);
  Tensor result = slot.result.narrow(0, 0, shard.master.numel() * num_owners(shard));
  if (shard.exchange != nullptr) result.fill_(0);  // the sum over ranks is that of the owner
  for (const Matrix& m : matrices_[index]) {
    if (m.owner != owner) continue;
    const int64_t numel = m.rows * m.cols;
    const Tensor g = slot.whole.narrow(0, m.begin, numel).view({m.rows, m.cols});
    Tensor place = result.narrow(0, m.begin, numel).view({m.rows, m.cols});
    place.copy_(orthogonalize(g, options_.coefficients));
  }
  slot.is_back =
      shard.exchange == nullptr
          ? current_stream().record()
          : shard.exchange->scatter_sum(slot.update.narrow(0, 0, shard.master.numel()), result);
}

void Muon::apply(size_t index, const StepScalars& step, const Slot& slot) {
  current_stream().wait(slot.is_back);
  for_parts(index, index + 1, step, {.states = false, .grad = false},
            [&](const FlatUpdate& window, std::span<const Tensor>) {
              muon_apply(window,
                         {.orthogonal = slot.update.narrow(0, window.first, window.master.numel()),
                          .scales = scales_[index]});
            });
}

}  // namespace tessera::optim
