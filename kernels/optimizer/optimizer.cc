#include "kernels/optimizer/optimizer.h"

#include "kernels/optimizer/dynamic_map.h"
#include "kernels/optimizer/kernel.h"

namespace tessera {
namespace kernels {
namespace {

int64_t nbytes_of(DType dtype, int64_t numel) {
  return numel * static_cast<int64_t>(size_of(dtype));
}

/// Of a kernel that reads a shard's gradient and updates nothing.
Cost gradient_cost(const FlatUpdate& u, double flops_per_element) {
  return Cost(flops_per_element * static_cast<double>(u.numel))
      .read(u.grad, nbytes_of(u.grad_dtype, u.numel))
      .read(u.bounds, nbytes_of(kI64, 2 * u.num_segments))
      .read(u.grad_scale, 4)
      .read(u.skip, 1);
}

}  // namespace

Cost FlatUpdate::cost(double flops_per_element) const {
  Cost cost(flops_per_element * static_cast<double>(numel));
  cost.write_or_accumulate(master, nbytes_of(kF32, numel), true)
      .write(low, nbytes_of(low_dtype, numel))
      .read(grad, nbytes_of(grad_dtype, numel))
      .read(bounds, nbytes_of(kI64, 2 * num_segments))
      .read(factors, nbytes_of(kF32, 2 * num_segments))
      .read(grad_scale, 4)
      .read(skip, 1)
      .read(rounding.segments, nbytes_of(kI64, 2 * num_segments))
      .read(rounding.step, 8);
  return cost;
}

Cost AdamWStep::cost() const {
  return FlatUpdate::cost(15)
      .write_or_accumulate(exp_avg, nbytes_of(kF32, numel), true)
      .write_or_accumulate(exp_avg_sq, nbytes_of(kF32, numel), true)
      .read(step, 8);
}

Cost AdamW8bitStep::cost() const {
  const int64_t blocks = state_blocks(numel);
  return FlatUpdate::cost(35)
      .write_or_accumulate(exp_avg, numel, true)
      .write_or_accumulate(exp_avg_sq, numel, true)
      .write_or_accumulate(exp_avg_absmax, nbytes_of(kF32, blocks), true)
      .write_or_accumulate(exp_avg_sq_absmax, nbytes_of(kF32, blocks), true)
      .read(maps, nbytes_of(kF32, 4 * 256))
      .read(step, 8);
}

Cost SgdStep::cost() const {
  return FlatUpdate::cost(momentum_buffer == nullptr ? 5
                          : nesterov                 ? 9
                                                     : 7)
      .write_or_accumulate(momentum_buffer, nbytes_of(kF32, numel), true);
}

Cost MuonDirection::cost() const {
  return gradient_cost(*this, 6)
      .write_or_accumulate(momentum_buffer, nbytes_of(kF32, numel), true)
      .write(direction, nbytes_of(kBF16, numel));
}

Cost MuonApply::cost() const {
  return FlatUpdate::cost(3)
      .read(orthogonal, nbytes_of(kBF16, numel))
      .read(scales, nbytes_of(kF32, num_segments));
}

Cost LionStep::cost() const {
  return FlatUpdate::cost(11).write_or_accumulate(exp_avg, nbytes_of(kF32, numel), true);
}

Cost AdafactorCollect::cost() const {
  return gradient_cost(*this, 3)
      .write(scaled, nbytes_of(kF32, numel))
      .write(squares, nbytes_of(kF32, state_blocks(numel)))
      .read(master, nbytes_of(kF32, numel));
}

Cost AdafactorFactors::cost() const {
  return Cost(10.0 * static_cast<double>(numel()))
      .write(next, nbytes_of(kF32, rows + cols + 2))
      .read(values, nbytes_of(kF32, rows + cols + 2))
      .read(g, nbytes_of(kF32, numel()))
      .read(squares, nbytes_of(kF32, state_blocks(numel())))
      .write(workspace, nbytes_of(kF32, workspace_numel()))
      .read(step, 8)
      .read(skip, 1);
}

Cost AdafactorApply::cost() const {
  return FlatUpdate::cost(8)
      .read(scaled, nbytes_of(kF32, numel))
      .read(values, nbytes_of(kF32, num_values))
      .read(places, nbytes_of(kI64, 5 * num_segments));
}

Cost RoundLow::cost() const {
  return Cost(0)
      .read(master, nbytes_of(kF32, numel))
      .write(low, nbytes_of(low_dtype, numel))
      .read(bounds, nbytes_of(kI64, 2 * num_segments))
      .read(skip, 1)
      .read(rounding.segments, nbytes_of(kI64, 2 * num_segments))
      .read(rounding.step, 8);
}

Cost AdvanceStep::cost() const {
  return Cost(0).write_or_accumulate(step, 8, true).read(skip, 1);
}

TESSERA_DEFINE_KERNEL(adamw_step, AdamWStep);
TESSERA_DEFINE_KERNEL(adamw_8bit_step, AdamW8bitStep);
TESSERA_DEFINE_KERNEL(sgd_step, SgdStep);
TESSERA_DEFINE_KERNEL(muon_direction, MuonDirection);
TESSERA_DEFINE_KERNEL(muon_apply, MuonApply);
TESSERA_DEFINE_KERNEL(lion_step, LionStep);
TESSERA_DEFINE_KERNEL(adafactor_collect, AdafactorCollect);
TESSERA_DEFINE_KERNEL(adafactor_factors, AdafactorFactors);
TESSERA_DEFINE_KERNEL(adafactor_apply, AdafactorApply);
TESSERA_DEFINE_KERNEL(round_low, RoundLow);
TESSERA_DEFINE_KERNEL(advance_step, AdvanceStep);

}  // namespace kernels

namespace {

template <class T>
T* optional_data(const Tensor& t) {
  return t.is_defined() ? static_cast<T*>(t.raw_data()) : nullptr;
}

void check_flat(const char* op, const char* name, const Tensor& t, const Tensor& master) {
  TESSERA_CHECK_SHAPE(t.is_contiguous() && t.shape() == master.shape(),
                      "{}: {} must be contiguous with master's shape {}, got {}", op, name,
                      master.shape(), t.shape());
}

void check_state(const char* op, const char* name, const Tensor& t, const Tensor& master) {
  check_flat(op, name, t, master);
  TESSERA_CHECK_DTYPE(t.dtype() == kF32, "{}: {} must be f32, got {}", op, name, t.dtype());
}

void check_scalar(const char* op, const char* name, const Tensor& t, DType dtype) {
  TESSERA_CHECK_SHAPE(t.numel() == 1, "{}: {} must be a scalar, got {}", op, name, t.shape());
  TESSERA_CHECK_DTYPE(t.dtype() == dtype, "{}: {} must be {}, got {}", op, name, dtype, t.dtype());
}

kernels::StochasticRounding rounding_args(const char* op, const FlatUpdate& u) {
  if (!u.rounding_step.is_defined()) return {};
  check_scalar(op, "rounding_step", u.rounding_step, kI64);
  TESSERA_CHECK_DTYPE(u.low.is_defined() && (u.low.dtype() == kBF16 || u.low.dtype() == kF16),
                      "{}: low must be bf16 or f16 for stochastic rounding, got {}", op,
                      u.low.is_defined() ? name_of(u.low.dtype()) : "none");
  TESSERA_CHECK(u.segments.rounding.is_defined(),
                "{}: stochastic rounding needs segments with the places of their parameters", op);
  return {optional_data<const int64_t>(u.segments.rounding),
          optional_data<const int64_t>(u.rounding_step)};
}

kernels::FlatUpdate flat_args(const char* op, const FlatUpdate& u) {
  check_state(op, "master", u.master, u.master);
  check_flat(op, "grad", u.grad, u.master);
  TESSERA_CHECK_DTYPE(u.grad.dtype() == kF32 || u.grad.dtype() == kBF16 || u.grad.dtype() == kF16,
                      "{}: grad must be f32, bf16 or f16, got {}", op, u.grad.dtype());
  if (u.low.is_defined()) {
    check_flat(op, "low", u.low, u.master);
    TESSERA_CHECK_DTYPE(is_floating(u.low.dtype()), "{}: low must be floating, got {}", op,
                        u.low.dtype());
  }
  if (u.grad_scale.is_defined()) check_scalar(op, "grad_scale", u.grad_scale, kF32);
  if (u.skip.is_defined()) check_scalar(op, "skip", u.skip, kU8);
  return {.master = static_cast<float*>(u.master.raw_data()),
          .low = optional_data<void>(u.low),
          .grad = u.grad.raw_data(),
          .low_dtype = u.low.is_defined() ? u.low.dtype() : kF32,
          .grad_dtype = u.grad.dtype(),
          .first = u.first,
          .numel = u.master.numel(),
          .bounds = optional_data<const int64_t>(u.segments.bounds),
          .factors = optional_data<const float>(u.segments.factors),
          .num_segments = u.segments.bounds.is_defined() ? u.segments.bounds.dim(0) : 0,
          .grad_scale = optional_data<const float>(u.grad_scale),
          .skip = optional_data<const uint8_t>(u.skip),
          .lr = u.lr,
          .weight_decay = u.weight_decay,
          .rounding = rounding_args(op, u)};
}

/// A graph that saved the tensor notices the change.
void mark_changed(const Tensor& t) {
  if (t.is_defined()) ++*t.impl()->version;
}

}  // namespace

FlatSegments flat_segments(std::span<const FlatSegment> segments, int64_t numel,
                           bool has_rounding) {
  std::vector<int64_t> bounds, rounding;
  std::vector<float> factors;
  int64_t previous_end = 0;
  for (const FlatSegment& segment : segments) {
    TESSERA_CHECK(
        segment.begin >= previous_end && segment.end >= segment.begin && segment.end <= numel,
        "flat_segments: segment [{}, {}) must begin at {} or later and end by {}", segment.begin,
        segment.end, previous_end, numel);
    previous_end = segment.end;
    bounds.insert(bounds.end(), {segment.begin, segment.end});
    factors.insert(factors.end(), {segment.lr_scale, segment.decay_scale});
    const uint64_t key = segment.key.k0 | uint64_t{segment.key.k1} << 32;
    rounding.insert(rounding.end(),
                    {static_cast<int64_t>(key), segment.first_element - segment.begin});
  }
  const Shape shape{static_cast<int64_t>(segments.size()), 2};
  FlatSegments flat{from_values(std::span<const int64_t>(bounds), shape, kI64),
                    from_values(std::span<const float>(factors), shape, kF32),
                    {}};
  if (has_rounding) flat.rounding = from_values(std::span<const int64_t>(rounding), shape, kI64);
  return flat;
}

void adamw_step(const FlatUpdate& update, const AdamWUpdate& adamw) {
  const kernels::FlatUpdate args = flat_args("adamw_step", update);
  check_state("adamw_step", "exp_avg", adamw.exp_avg, update.master);
  check_state("adamw_step", "exp_avg_sq", adamw.exp_avg_sq, update.master);
  check_scalar("adamw_step", "step", adamw.step, kI64);
  kernels::adamw_step(current_stream(), {args, static_cast<float*>(adamw.exp_avg.raw_data()),
                                         static_cast<float*>(adamw.exp_avg_sq.raw_data()),
                                         static_cast<const int64_t*>(adamw.step.raw_data()),
                                         adamw.beta1, adamw.beta2, adamw.eps});
  mark_changed(update.master);
  mark_changed(update.low);
}

void adamw_8bit_step(const FlatUpdate& update, const AdamW8bitUpdate& adamw) {
  constexpr const char* kOp = "adamw_8bit_step";
  const kernels::FlatUpdate args = flat_args(kOp, update);
  TESSERA_CHECK_SHAPE(update.first % kernels::kStateBlock == 0,
                      "{}: first must be a multiple of {}, got {}", kOp, kernels::kStateBlock,
                      update.first);
  const Shape blocks{kernels::state_blocks(update.master.numel())};
  const auto check = [&](const char* name, const Tensor& t, const Shape& shape, DType dtype) {
    TESSERA_CHECK_SHAPE(t.is_contiguous() && t.shape() == shape,
                        "{}: {} must be contiguous {}, got {}", kOp, name, shape, t.shape());
    TESSERA_CHECK_DTYPE(t.dtype() == dtype, "{}: {} must be {}, got {}", kOp, name, dtype,
                        t.dtype());
  };
  check("exp_avg", adamw.exp_avg, update.master.shape(), kU8);
  check("exp_avg_sq", adamw.exp_avg_sq, update.master.shape(), kU8);
  check("exp_avg_absmax", adamw.exp_avg_absmax, blocks, kF32);
  check("exp_avg_sq_absmax", adamw.exp_avg_sq_absmax, blocks, kF32);
  check("maps", adamw.maps, {4 * 256}, kF32);
  check_scalar(kOp, "step", adamw.step, kI64);
  kernels::adamw_8bit_step(
      current_stream(),
      {args, static_cast<uint8_t*>(adamw.exp_avg.raw_data()),
       static_cast<uint8_t*>(adamw.exp_avg_sq.raw_data()),
       static_cast<float*>(adamw.exp_avg_absmax.raw_data()),
       static_cast<float*>(adamw.exp_avg_sq_absmax.raw_data()),
       static_cast<const float*>(adamw.maps.raw_data()),
       static_cast<const int64_t*>(adamw.step.raw_data()), adamw.beta1, adamw.beta2, adamw.eps});
  mark_changed(update.master);
  mark_changed(update.low);
}

void sgd_step(const FlatUpdate& update, const SgdUpdate& sgd) {
  const kernels::FlatUpdate args = flat_args("sgd_step", update);
  if (sgd.momentum_buffer.is_defined()) {
    check_state("sgd_step", "momentum_buffer", sgd.momentum_buffer, update.master);
  }
  kernels::sgd_step(current_stream(),
                    {args, optional_data<float>(sgd.momentum_buffer), sgd.momentum, sgd.nesterov});
  mark_changed(update.master);
  mark_changed(update.low);
}

void muon_direction(const FlatUpdate& update, const MuonDirectionUpdate& muon) {
  constexpr const char* kOp = "muon_direction";
  const kernels::FlatUpdate args = flat_args(kOp, update);
  check_state(kOp, "momentum_buffer", muon.momentum_buffer, update.master);
  check_flat(kOp, "direction", muon.direction, update.master);
  TESSERA_CHECK_DTYPE(muon.direction.dtype() == kBF16, "{}: direction must be bf16, got {}", kOp,
                      muon.direction.dtype());
  kernels::muon_direction(
      current_stream(),
      {args, static_cast<float*>(muon.momentum_buffer.raw_data()),
       static_cast<BFloat16*>(muon.direction.raw_data()), muon.momentum, muon.nesterov});
}

void muon_apply(const FlatUpdate& update, const MuonApplyUpdate& muon) {
  constexpr const char* kOp = "muon_apply";
  kernels::FlatUpdate args = flat_args(kOp, update);
  args.grad = nullptr;
  check_flat(kOp, "orthogonal", muon.orthogonal, update.master);
  TESSERA_CHECK_DTYPE(muon.orthogonal.dtype() == kBF16, "{}: orthogonal must be bf16, got {}", kOp,
                      muon.orthogonal.dtype());
  TESSERA_CHECK_SHAPE(muon.scales.numel() == args.num_segments,
                      "{}: expected a scale of each of the {} segments, got {}", kOp,
                      args.num_segments, muon.scales.shape());
  kernels::muon_apply(current_stream(),
                      {args, static_cast<const BFloat16*>(muon.orthogonal.raw_data()),
                       static_cast<const float*>(muon.scales.raw_data())});
  mark_changed(update.master);
  mark_changed(update.low);
}

void lion_step(const FlatUpdate& update, const LionUpdate& lion) {
  const kernels::FlatUpdate args = flat_args("lion_step", update);
  check_state("lion_step", "exp_avg", lion.exp_avg, update.master);
  kernels::lion_step(current_stream(),
                     {args, static_cast<float*>(lion.exp_avg.raw_data()), lion.beta1, lion.beta2});
  mark_changed(update.master);
  mark_changed(update.low);
}

void adafactor_collect(const FlatUpdate& update, const Tensor& scaled, const Tensor& squares) {
  constexpr const char* kOp = "adafactor_collect";
  const kernels::FlatUpdate args = flat_args(kOp, update);
  check_state(kOp, "scaled", scaled, update.master);
  const int64_t blocks = kernels::state_blocks(args.numel);
  TESSERA_CHECK_SHAPE(squares.numel() == blocks && args.first % kernels::kStateBlock == 0,
                      "{}: expected {} sums of squares and first a multiple of {}, got {} and {}",
                      kOp, blocks, kernels::kStateBlock, squares.shape(), args.first);
  kernels::adafactor_collect(current_stream(), {args, static_cast<float*>(scaled.raw_data()),
                                                static_cast<float*>(squares.raw_data())});
}

void adafactor_apply(const FlatUpdate& update, const Tensor& scaled, const Tensor& values,
                     const Tensor& places, double eps1) {
  constexpr const char* kOp = "adafactor_apply";
  kernels::FlatUpdate args = flat_args(kOp, update);
  args.grad = nullptr;
  check_state(kOp, "scaled", scaled, update.master);
  TESSERA_CHECK_SHAPE(places.numel() == 5 * args.num_segments,
                      "{}: expected five places of each of the {} segments, got {}", kOp,
                      args.num_segments, places.shape());
  kernels::adafactor_apply(current_stream(), {args, static_cast<const float*>(scaled.raw_data()),
                                              static_cast<const float*>(values.raw_data()),
                                              static_cast<const int64_t*>(places.raw_data()),
                                              static_cast<float>(eps1 * eps1), values.numel()});
  mark_changed(update.master);
  mark_changed(update.low);
}

void round_low(const FlatUpdate& update) {
  TESSERA_CHECK(update.low.is_defined(), "round_low: low must be defined");
  kernels::FlatUpdate args = flat_args("round_low", update);
  args.grad = nullptr;
  kernels::round_low(current_stream(), {args});
  mark_changed(update.low);
}

void advance_step(const Tensor& step, const Tensor& skip) {
  check_scalar("advance_step", "step", step, kI64);
  if (skip.is_defined()) check_scalar("advance_step", "skip", skip, kU8);
  kernels::advance_step(current_stream(), {static_cast<int64_t*>(step.raw_data()),
                                           optional_data<const uint8_t>(skip)});
}

}  // namespace tessera
