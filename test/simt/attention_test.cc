#include <limits>
#include <optional>

#include "kernels/attention/cuda/flash_bwd.cuh"
#include "kernels/attention/cuda/flash_fwd.cuh"
#include "kernels/attention/kernel.h"
#include "test/simt/simt_testing.h"

// B batch, T queries, S keys, H query heads, K key/value heads, D head width.

namespace tessera {
namespace {

using kernels::AttentionBwd;
using kernels::AttentionFwd;
using kernels::AttentionShape;
using kernels::HeadStrides;
using testing::check_bitwise;
using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

struct Case {
  int64_t B, T, S, H, K, D;
  bool causal = true;
  bool has_documents = false;
  bool has_alibi = false;
  double scale = 0;
  bool accumulate = false;
  int64_t offset = 0;     // elements from an aligned address
  bool is_packed = true;  // false: the heads of an operand lie in wider rows
  int64_t window = 0;
  double softcap = 0;

  std::string name(DType dtype) const {
    return fmt::format(
        "B{} T{} S{} H{} Hk{} D{} {}{}{}{} scale {} accumulate {} offset {} packed {} window {} "
        "softcap {}",
        B, T, S, H, K, D, name_of(dtype), causal ? " causal" : "",
        has_documents ? " documents" : "", has_alibi ? " alibi" : "", scale, accumulate, offset,
        is_packed, window, softcap);
  }
  /// Rows of a [B, T, H, D] operand that is a part of [B, T, 3, H, D], or the whole.
  HeadStrides strides(int64_t times, int64_t heads) const {
    const int64_t row = (is_packed ? 1 : 3) * heads * D;
    return {times * row, row, D};
  }
  int64_t numel(int64_t times, int64_t heads) const {
    return strides(times, heads).span(B, times, heads, D);
  }
};

/// Documents of 1, 3, 7, ... tokens, longer ones in later samples; positions count from the first
/// key.
std::vector<int32_t> document_starts(const Case& c) {
  std::vector<int32_t> starts;
  for (int64_t b = 0; b < c.B; ++b) {
    int64_t start = 0, length = 1 + b;
    for (int64_t s = 0; s < c.S; ++s) {
      if (s - start == length) start = s, length = 2 * length + 1;
      if (s >= c.S - c.T) starts.push_back(static_cast<int32_t>(start));
    }
  }
  return starts;
}

/// Inputs of a case where the kernels of both devices read them.
class Inputs {
 public:
  Inputs(const Case& c, DType dtype)
      : case_(c),
        q_(std::in_place, randn({c.numel(c.T, c.H)}, dtype, 1), c.offset),
        k_(std::in_place, randn({c.numel(c.S, c.K)}, dtype, 2), c.offset),
        v_(std::in_place, randn({c.numel(c.S, c.K)}, dtype, 3), c.offset),
        d_out_(std::in_place, randn({c.B, c.T, c.H, c.D}, dtype, 4), c.offset),
        shape_{.dtype = dtype,
               .batch = c.B,
               .num_queries = c.T,
               .num_keys = c.S,
               .num_heads = c.H,
               .num_kv_heads = c.K,
               .head_dim = c.D,
               .scale = c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.D)),
               .causal = c.causal,
               .document_starts = nullptr,
               .alibi_slopes = nullptr,
               .window = c.window,
               .softcap = c.softcap} {
    if (c.has_documents) {
      starts_.emplace(from_values(std::span<const int32_t>(document_starts(c)), {c.B, c.T}));
      shape_.document_starts = starts_->as<int32_t>();
    }
    if (c.has_alibi) {
      std::vector<float> slopes;
      for (int64_t h = 0; h < c.H; ++h) slopes.push_back(std::exp2(-static_cast<float>(h + 1)));
      slopes_.emplace(from_values(std::span<const float>(slopes), {c.H}));
      shape_.alibi_slopes = slopes_->as<float>();
    }
  }

  AttentionShape& shape() { return shape_; }

  /// Positions [begin, end) of one sample and head become `value`, in k and v or in q and d_out.
  void fill_keys(int64_t begin, int64_t end, double value) {
    for (std::optional<DeviceBuffer>* x : {&k_, &v_}) fill(*x, begin, end, value);
  }
  void fill_queries(int64_t begin, int64_t end, double value) {
    for (std::optional<DeviceBuffer>* x : {&q_, &d_out_}) fill(*x, begin, end, value);
  }

  /// o and lse.
  template <class Kernel>
  std::vector<Tensor> forward(Kernel kernel) const {
    const Case& c = case_;
    const DeviceBuffer o({c.B, c.T, c.H, c.D}, shape_.dtype, c.offset), lse({c.B, c.H, c.T}, kF32);
    kernel(AttentionFwd{.o = o.data(),
                        .lse = lse.data(),
                        .q = q_->data(),
                        .k = k_->data(),
                        .v = v_->data(),
                        .q_strides = c.strides(c.T, c.H),
                        .k_strides = c.strides(c.S, c.K),
                        .v_strides = c.strides(c.S, c.K),
                        .shape = shape_});
    return {o.tensor(), lse.tensor()};
  }

  /// dq, dk and dv, each with what lies between its rows; `wanted` says which of them.
  template <class Kernel>
  std::vector<Tensor> backward(const std::vector<Tensor>& fwd, DeviceType device, Kernel kernel,
                               std::array<bool, 3> wanted = {true, true, true}) const {
    const Case& c = case_;
    const DType dtype = shape_.dtype;
    const DeviceBuffer o(fwd[0], c.offset), lse(fwd[1]);
    const DeviceBuffer dq(randn({c.numel(c.T, c.H)}, dtype, 5), c.offset),
        dk(randn({c.numel(c.S, c.K)}, dtype, 6), c.offset),
        dv(randn({c.numel(c.S, c.K)}, dtype, 7), c.offset);
    AttentionBwd args{.dq = wanted[0] ? dq.data() : nullptr,
                      .dk = wanted[1] ? dk.data() : nullptr,
                      .dv = wanted[2] ? dv.data() : nullptr,
                      .accumulate_dq = c.accumulate,
                      .accumulate_dk = c.accumulate,
                      .accumulate_dv = c.accumulate,
                      .dq_strides = c.strides(c.T, c.H),
                      .dk_strides = c.strides(c.S, c.K),
                      .dv_strides = c.strides(c.S, c.K),
                      .workspace = nullptr,
                      .d_out = d_out_->data(),
                      .o = o.data(),
                      .lse = lse.data(),
                      .q = q_->data(),
                      .k = k_->data(),
                      .v = v_->data(),
                      .q_strides = c.strides(c.T, c.H),
                      .k_strides = c.strides(c.S, c.K),
                      .v_strides = c.strides(c.S, c.K),
                      .shape = shape_,
                      .device = device};
    const DeviceBuffer workspace({args.workspace_numel()}, kF32);
    args.workspace = workspace.data();
    kernel(args);
    return {dq.tensor(), dk.tensor(), dv.tensor()};
  }

 private:
  void fill(std::optional<DeviceBuffer>& x, int64_t begin, int64_t end, double value) const {
    Tensor tensor = x->tensor();
    tensor.view({tensor.numel()}).narrow(0, begin * case_.D, (end - begin) * case_.D).fill_(value);
    x.emplace(tensor, case_.offset);
  }

  Case case_;
  std::optional<DeviceBuffer> q_, k_, v_, d_out_;
  std::optional<DeviceBuffer> starts_, slopes_;
  AttentionShape shape_;
};

std::vector<Tensor> emulated_forward(const Inputs& in) {
  return in.forward([](const AttentionFwd& a) { kernels::cuda::attention_fwd(nullptr, a); });
}
std::vector<Tensor> emulated_backward(const Inputs& in, const std::vector<Tensor>& fwd,
                                      std::array<bool, 3> wanted = {true, true, true}) {
  return in.backward(
      fwd, DeviceType::kCuda,
      [](const AttentionBwd& a) { kernels::cuda::attention_bwd(nullptr, a); }, wanted);
}

/// Forward and backward on the emulator in all schedules against the CPU kernels. P and dS are
/// rounded to the inputs' dtype for the tensor cores, so a gradient may be off by two roundings.
void check_case(const Case& c, DType dtype) {
  INFO(c.name(dtype));
  const Inputs in(c, dtype);
  const auto fwd = in.forward([](const AttentionFwd& a) { kernels::cpu::attention_fwd(a); });
  const auto emulated = run_in_all_schedules([&] { return emulated_forward(in); });
  check_close(emulated[0], fwd[0], tol(dtype, c.S), "o");
  check_close(emulated[1], fwd[1], tol(kF32, c.S + c.D), "lse");

  const auto bwd = in.backward(fwd, DeviceType::kCpu,
                               [](const AttentionBwd& a) { kernels::cpu::attention_bwd(a); });
  const auto gradients = run_in_all_schedules([&] { return emulated_backward(in, fwd); });
  check_close(gradients[0], bwd[0], 2 * tol(dtype, c.S + c.D), "dq");
  check_close(gradients[1], bwd[1], 2 * tol(dtype, c.T * c.H / c.K + c.D), "dk");
  check_close(gradients[2], bwd[2], 2 * tol(dtype, c.T * c.H / c.K), "dv");
}

TEST_CASE("simt attention: lengths around the tiles in bf16", "[attention][simt]") {
  for (const int64_t T : {1, 7, 64, 65, 130}) check_case({1, T, T, 1, 1, 64}, kBF16);
}

TEST_CASE("simt attention: head widths in bf16 and f16", "[attention][simt]") {
  for (const int64_t D : {16, 80, 96, 128}) {
    check_case({1, 65, 65, 1, 1, D}, kBF16);
    check_case({1, 33, 70, 2, 1, D}, kF16);
  }
  for (const DType dtype : {kBF16, kF16}) check_case({1, 40, 40, 1, 1, 192}, dtype);
}

TEST_CASE("simt attention: f32 at lengths and widths around the tiles", "[attention][simt]") {
  for (const int64_t T : {1, 7, 65}) check_case({1, T, T, 1, 1, 16}, kF32);
  check_case({2, 33, 70, 4, 2, 80}, kF32);
  check_case({1, 40, 40, 1, 1, 130}, kF32);
  check_case({1, 50, 50, 2, 1, 7}, kF32);
}

TEST_CASE("simt attention: more keys than queries, grouped heads, several samples",
          "[attention][simt]") {
  check_case({2, 1, 97, 4, 2, 64}, kBF16);
  check_case({1, 50, 200, 2, 2, 64}, kF16);
  check_case({1, 70, 70, 4, 1, 64}, kBF16);
  check_case({2, 5, 66, 2, 1, 128}, kBF16);
}

TEST_CASE("simt attention: without the causal mask", "[attention][simt]") {
  check_case({1, 90, 90, 2, 1, 64, false}, kBF16);
  check_case({2, 13, 77, 2, 2, 16, false}, kF32);
  check_case({1, 5, 131, 1, 1, 128, false}, kF16);
}

TEST_CASE("simt attention: documents, causal and not", "[attention][simt]") {
  for (const DType dtype : {kBF16, kF32}) {
    check_case({2, 150, 150, 1, 1, 64, true, true}, dtype);
    check_case({1, 150, 150, 1, 1, 64, false, true}, dtype);
  }
  check_case({1, 40, 140, 2, 1, 128, true, true}, kF16);
}

TEST_CASE("simt attention: position bias and scales of both signs", "[attention][simt]") {
  for (const DType dtype : {kBF16, kF32}) {
    check_case({1, 70, 70, 3, 3, 16, true, false, true}, dtype);
    check_case({1, 30, 60, 2, 1, 64, false, false, true}, dtype);
    check_case({1, 70, 70, 2, 1, 64, true, true, true, 0.7}, dtype);
    check_case({1, 33, 33, 1, 1, 64, true, false, true, -0.25}, dtype);
  }
}

/// `c` with a window and a soft-cap.
Case with(Case c, int64_t window, double softcap = 0) {
  c.window = window, c.softcap = softcap;
  return c;
}

TEST_CASE("simt attention: windows around the tiles, decoding, with documents",
          "[attention][simt]") {
  for (const DType dtype : {kBF16, kF32}) {
    for (const int64_t window : {1, 31, 64, 65, 170})
      check_case(with({1, 200, 200, 2, 1, 64}, window), dtype);
    check_case(with({2, 5, 150, 2, 1, 64}, 40), dtype);
    check_case(with({1, 100, 300, 1, 1, 16}, 70), dtype);
    check_case(with({1, 150, 150, 2, 2, 64, true, true}, 20), dtype);
    check_case(with({1, 70, 140, 3, 3, 16, true, false, true}, 33), dtype);
  }
  for (const int64_t D : {80, 96, 128, 192}) check_case(with({1, 150, 150, 1, 1, D}, 50), kF16);
}

TEST_CASE("simt attention: soft-caps that hardly bend the logits and that flatten them",
          "[attention][simt]") {
  for (const DType dtype : {kBF16, kF32}) {
    for (const double softcap : {0.5, 3.0, 50.0}) {
      check_case(with({1, 130, 130, 2, 1, 64}, 0, softcap), dtype);
      check_case(with({1, 33, 70, 2, 1, 16, true, true}, 20, softcap), dtype);
    }
    check_case(with({1, 70, 70, 2, 2, 64, false, false, false, -0.7}, 0, 2), dtype);
  }
  for (const int64_t D : {80, 96, 128, 192}) check_case(with({1, 70, 70, 1, 1, D}, 0, 2), kF16);
}

TEST_CASE("simt attention: tiles outside the window are not visited", "[attention][simt]") {
  // Probability 0 times NaN would be NaN.
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : {kBF16, kF32}) {
    const Case c = with({1, 40, 500, 1, 1, 64}, 60);
    const int64_t first = (500 - 40 + 1 - 60) / 64 * 64;  // a tile, whatever the kernel's
    Inputs in(c, dtype);
    const auto fwd = emulated_forward(in), bwd = emulated_backward(in, fwd);
    in.fill_keys(0, first, kNan);
    const auto other_fwd = emulated_forward(in), other_bwd = emulated_backward(in, fwd);
    for (size_t i = 0; i < 2; ++i) check_bitwise(other_fwd[i], fwd[i]);
    for (size_t i = 0; i < 3; ++i) check_bitwise(other_bwd[i], bwd[i]);
    for (const size_t i : {1, 2}) {
      for (const double x : bwd[i].narrow(0, 0, first * c.D).to_vector()) CHECK(x == 0);
    }
  }
  // Keys before 128 are seen by queries before 128 + 60 - 1.
  for (const DType dtype : {kBF16, kF32}) {
    const Case c = with({1, 300, 300, 1, 1, 64}, 60);
    Inputs in(c, dtype);
    const auto fwd = emulated_forward(in), bwd = emulated_backward(in, fwd);
    in.fill_queries(192, 300, kNan);
    const auto other = emulated_backward(in, fwd);
    for (const size_t i : {1, 2})
      check_bitwise(other[i].narrow(0, 0, 128 * c.D), bwd[i].narrow(0, 0, 128 * c.D));
  }
}

TEST_CASE("simt attention: adds to gradients, reads and writes rows with gaps and off alignment",
          "[attention][simt]") {
  for (const DType dtype : {kBF16, kF16, kF32}) {
    Case c{2, 35, 35, 2, 1, 64};
    c.is_packed = false;
    check_case(c, dtype);
    c.accumulate = true;
    check_case(c, dtype);
    c.offset = 1;
    check_case(c, dtype);
    c = {1, 35, 35, 2, 1, 13};  // rows of odd length
    check_case(c, dtype);
    c.accumulate = true;
    check_case(c, dtype);
  }
}

TEST_CASE("simt attention: only the gradients that are wanted are written", "[attention][simt]") {
  for (const auto& [dtype, D] :
       std::vector<std::pair<DType, int64_t>>{{kBF16, 64}, {kF16, 160}, {kF32, 16}}) {
    const Inputs in({1, 20, 20, 1, 1, D}, dtype);
    const auto fwd = emulated_forward(in), all = emulated_backward(in, fwd);
    for (size_t only = 0; only < 3; ++only) {
      std::array<bool, 3> wanted{};
      wanted[only] = true;
      const auto some = emulated_backward(in, fwd, wanted);
      for (size_t i = 0; i < 3; ++i)
        check_bitwise(some[i], i == only ? all[i] : randn(all[i].shape(), dtype, 5 + i));
    }
  }
}

TEST_CASE("simt attention: a query that sees nothing gives zeros", "[attention][simt]") {
  for (const DType dtype : {kBF16, kF32}) {
    Inputs in({1, 66, 66, 1, 1, 64}, dtype);
    // From query 60 on the documents start behind the query.
    std::vector<int32_t> starts(66, 0);
    std::fill(starts.begin() + 60, starts.end(), 100);
    const DeviceBuffer buffer(from_values(std::span<const int32_t>(starts), {66}));
    in.shape().document_starts = buffer.as<int32_t>();
    const auto fwd = in.forward([](const AttentionFwd& a) { kernels::cpu::attention_fwd(a); });
    const auto emulated = emulated_forward(in);
    check_close(emulated[0], fwd[0], tol(dtype, 66), "o");
    const auto lse = emulated[1].to_vector();
    for (size_t t = 0; t < 66; ++t) CHECK(std::isinf(lse[t]) == (t >= 60));
    const auto gradients = emulated_backward(in, fwd);
    for (const double x : gradients[0].narrow(0, 60 * 64, 6 * 64).to_vector()) CHECK(x == 0);
    const auto expected = in.backward(
        fwd, DeviceType::kCpu, [](const AttentionBwd& a) { kernels::cpu::attention_bwd(a); });
    check_close(gradients[1], expected[1], 2 * tol(dtype, 66), "dk");
    check_close(gradients[2], expected[2], 2 * tol(dtype, 66), "dv");
  }
}

TEST_CASE("simt attention: changing the future changes nothing, bit for bit", "[attention][simt]") {
  const int64_t T = 130, D = 64;
  const Case c{1, T, T, 1, 1, D};
  const Tensor q = randn({T, D}, kBF16, 1), k = randn({T, D}, kBF16, 2),
               v = randn({T, D}, kBF16, 3);
  const auto forward = [&](const Tensor& keys, const Tensor& values) {
    const DeviceBuffer o({T, D}, kBF16), lse({T}, kF32), qb(q), kb(keys), vb(values);
    AttentionFwd a{o.data(),        lse.data(),      qb.data(),
                   kb.data(),       vb.data(),       c.strides(T, 1),
                   c.strides(T, 1), c.strides(T, 1), Inputs(c, kBF16).shape()};
    kernels::cuda::attention_fwd(nullptr, a);
    return o.tensor();
  };
  const Tensor o = forward(k, v);
  for (const int64_t t : {1, 63, 64, 100}) {
    Tensor other_k = k.clone(), other_v = v.clone();
    other_k.narrow(0, t, T - t).copy_(randn({T - t, D}, kBF16, 12, 50.0));
    other_v.narrow(0, t, T - t).copy_(randn({T - t, D}, kBF16, 13, 50.0));
    const Tensor changed = forward(other_k, other_v);
    check_bitwise(changed.narrow(0, 0, t), o.narrow(0, 0, t), "the past");
    CHECK(changed.narrow(0, t, 1).to_vector() != o.narrow(0, t, 1).to_vector());
  }
}

TEST_CASE("simt attention: empty shapes; without queries the keys have no gradient",
          "[attention][simt]") {
  for (const DType dtype : {kBF16, kF32}) {
    for (const Case& c : {Case{0, 3, 3, 2, 1, 8}, Case{1, 0, 0, 2, 1, 8}}) {
      const Inputs in(c, dtype);
      emulated_backward(in, emulated_forward(in));
    }
    const Case c{1, 0, 5, 2, 1, 8};
    const Inputs in(c, dtype);
    const auto gradients = emulated_backward(in, emulated_forward(in));
    for (const Tensor& gradient : {gradients[1], gradients[2]})
      for (const double x : gradient.to_vector()) CHECK(x == 0);
  }
}

TEST_CASE("simt attention: first and last block above 2^32 bytes", "[attention][simt]") {
  const simt::OnlyBlocks ends({0, -1});
  constexpr int64_t B = (int64_t{1} << 19) + 1, T = 64, D = 64, kSample = T * D;
  const int64_t numel = B * kSample, last = (B - 1) * kSample;
  const simt::ReservedBuffer q(numel * 2), k(numel * 2), v(numel * 2), o(numel * 2),
      d_out(numel * 2), dq(numel * 2), dk(numel * 2), dv(numel * 2), lse(B * T * 4),
      workspace(2 * B * T * 4);
  const HeadStrides strides{kSample, D, D};
  const AttentionShape shape{kBF16, B, T, T, 1, 1, D, 0.125, true, nullptr, nullptr};
  const auto at = [&](const simt::ReservedBuffer& x, int64_t row) {
    return x.as<BFloat16>() + last + row * D;
  };
  // Logits are 0; only value 0 and the last query's gradient are not.
  std::fill_n(at(k, 0), D, BFloat16(1.0f));
  std::fill_n(at(v, 0), D, BFloat16(2.0f));
  std::fill_n(at(d_out, T - 1), D, BFloat16(1.0f));
  kernels::cuda::attention_fwd(nullptr, {o.data(), lse.data(), q.data(), k.data(), v.data(),
                                         strides, strides, strides, shape});
  CHECK(static_cast<float>(at(o, 0)[D - 1]) == 2);
  CHECK(static_cast<float>(at(o, T - 1)[D - 1]) == 2.0f / T);
  CHECK(lse.as<float>()[B * T - 1] == Approx(std::log(64.0)));
  AttentionBwd bwd{.dq = dq.data(),
                   .dk = dk.data(),
                   .dv = dv.data(),
                   .accumulate_dq = false,
                   .accumulate_dk = false,
                   .accumulate_dv = false,
                   .dq_strides = strides,
                   .dk_strides = strides,
                   .dv_strides = strides,
                   .workspace = workspace.data(),
                   .d_out = d_out.data(),
                   .o = o.data(),
                   .lse = lse.data(),
                   .q = q.data(),
                   .k = k.data(),
                   .v = v.data(),
                   .q_strides = strides,
                   .k_strides = strides,
                   .v_strides = strides,
                   .shape = shape,
                   .device = DeviceType::kCuda};
  kernels::cuda::attention_bwd(nullptr, bwd);
  // dP = 2 D for key 0, so dS = (128 - 2) / 64 there.
  CHECK(static_cast<float>(at(dq, T - 1)[D - 1]) == Approx(0.125 * 126 / 64).epsilon(4e-3));
  CHECK(static_cast<float>(at(dv, T - 1)[D - 1]) == Approx(1.0 / 64).epsilon(4e-3));
  CHECK(static_cast<float>(at(dk, T - 1)[D - 1]) == 0);
}

TEST_CASE("simt attention: every head width on the shared memory of every device",
          "[attention][simt]") {
  for (const int64_t D : {64, 80, 96, 128, 256}) {
    for (const simt::Device& device : simt::kDevices) {
      INFO("width " << D << ", compute capability " << device.compute_capability);
      const simt::OnDevice scope(device);
      check_case({1, 45, 70, 2, 1, D}, kBF16);
      if (device.max_shared_bytes < 100 * 1024) check_case({1, 130, 130, 2, 1, D, false}, kF16);
    }
  }
}

template <int kWidth>
void check_geometry(size_t blocks_of_dkv) {
  INFO("width " << kWidth);
  constexpr size_t kSmemOfHopper = 227 * 1024, kReserved = 1024;  // of a multiprocessor, of a block
  // 300 queries and 700 keys; 2^16 batch rows are too many for any grid dimension but the first.
  const int64_t B = int64_t{1} << 16;
  const AttentionShape s{kBF16, B, 300, 700, 6, 2, kWidth, 1.0, true, nullptr, nullptr};
  const auto check = [&](const cuda::LaunchConfig& config, int64_t grid, size_t blocks_together) {
    CHECK(config.grid.x == grid);
    CHECK(config.grid.y == 1);
    CHECK(config.block.x % 32 == 0);
    CHECK(blocks_together * (config.smem_bytes + kReserved) <= kSmemOfHopper);
  };
  using Fwd = kernels::cuda::FwdTiles<kWidth>;
  using Dq = kernels::cuda::DqTiles<kWidth>;
  using Dkv = kernels::cuda::DkvTiles<kWidth>;
  const auto blocks = [](int64_t rows, int64_t of_block) {
    return (rows + of_block - 1) / of_block;
  };
  check(kernels::cuda::flash_fwd_config<kWidth>(s), B * 6 * blocks(300, Fwd::kRows), 2);
  check(kernels::cuda::flash_dq_config<kWidth>(s), B * 6 * blocks(300, Dq::kRows),
        kWidth <= 128 ? 2 : 1);
  check(kernels::cuda::flash_dkv_config<kWidth>(s), B * 2 * blocks(700, Dkv::kKeys), blocks_of_dkv);
}

TEST_CASE("simt attention: grids and shared memory", "[attention][simt]") {
  check_geometry<64>(2);
  check_geometry<80>(1);
  check_geometry<96>(1);
  check_geometry<128>(1);
  check_geometry<256>(1);
  const int64_t too_many = int64_t{1} << 31;
  const AttentionShape s{kBF16, too_many, 1, 1, 1, 1, 64, 1.0, true, nullptr, nullptr};
  CHECK(error_of([&] {
          kernels::cuda::flash_fwd_config<64>(s);
        }).find("grid_blocks: expected 0 to 2147483647 blocks, got 2147483648") !=
        std::string::npos);
}

TEST_CASE("simt attention: f64 has no CUDA kernel", "[attention][simt]") {
  AttentionFwd fwd{};
  fwd.shape = {kF64, 1, 1, 1, 1, 1, 8, 1.0, true, nullptr, nullptr};
  CHECK(error_of([&] {
          kernels::cuda::attention_fwd(nullptr, fwd);
        }).find("attention_fwd: no CUDA kernel for dtype f64") != std::string::npos);
  AttentionBwd bwd{};
  bwd.shape = fwd.shape;
  CHECK(error_of([&] {
          kernels::cuda::attention_bwd(nullptr, bwd);
        }).find("attention_bwd: no CUDA kernel for dtype f64") != std::string::npos);
  fwd.shape.dtype = kBF16;
  fwd.shape.num_keys = int64_t{1} << 30;
  CHECK(error_of([&] {
          kernels::cuda::attention_fwd(nullptr, fwd);
        }).find("attention: the CUDA kernels take fewer than 2^30 keys, got 1073741824") !=
        std::string::npos);
}

}  // namespace
}  // namespace tessera
