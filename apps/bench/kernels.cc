// tessera-bench-kernels: every kernel on the shapes of a model, its time, rate and percent of the
// roofline that a copy and a large matrix product reach on the same device in the same run.

#include <fmt/format.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "apps/bench/bench.h"
#include "apps/command_line.h"
#include "apps/program.h"
#include "core/autograd.h"
#include "core/elementary/kernel.h"
#include "core/runtime/context.h"
#include "core/tensor.h"
#include "kernels/attention/cuda/cudnn.h"
#include "kernels/attention/kernel.h"
#include "kernels/embedding/kernel.h"
#include "kernels/loss/kernel.h"
#include "kernels/loss_scale/kernel.h"
#include "kernels/matmul/backend.h"
#include "kernels/matmul/cuda/cublaslt.h"
#include "kernels/matmul/kernel.h"
#include "kernels/nf4/kernel.h"
#include "kernels/nf4/nf4.h"
#include "kernels/norm/kernel.h"
#include "kernels/optimizer/dynamic_map.h"
#include "kernels/optimizer/kernel.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/orthogonalize/kernel.h"
#include "kernels/orthogonalize/orthogonalize.h"
#include "kernels/pointwise/kernel.h"
#include "kernels/random/kernel.h"
#include "kernels/random/random.h"
#include "kernels/rank_reduce/kernel.h"
#include "kernels/reduce/kernel.h"
#include "kernels/rope/kernel.h"
#include "kernels/shaping/kernel.h"
#include "kernels/shaping/shaping.h"
#include "kernels/softmax/kernel.h"

namespace tessera::apps {
namespace {

namespace k = kernels;

/// B batch, T time, C width, F feed-forward width, H heads, Hk key/value heads, D head width,
/// V vocabulary, N elements of an optimizer shard.
struct Shapes {
  std::string name;
  int64_t B, T, C, F, H, Hk, D, V, N;
  int64_t R() const { return B * T; }
};

const std::vector<Shapes>& all_shapes() {
  static const std::vector<Shapes> shapes = {
      {"gpt2", 4, 256, 768, 3072, 12, 12, 64, 50304, 32 << 20},
      {"llama", 1, 1024, 2048, 5632, 32, 4, 64, 32000, 32 << 20},
      {"large", 2, 8192, 4096, 14336, 32, 8, 128, 128256, 512 << 20},
      {"long", 1, 8192, 512, 1408, 8, 2, 64, 4096, 1 << 20},
      {"tiny", 2, 32, 64, 176, 4, 2, 16, 512, 1 << 16},
      {"odd", 1, 301, 520, 1404, 4, 2, 128, 1001, (1 << 16) + 3},
  };
  return shapes;
}

struct Options {
  std::string filter;
  bool as_json = false;
  bool asks = false;  // after each timing, on standard input, whether to time the kernel again
  int runs = 20;
  int64_t window = 0;  // of attention, timed beside all of it; 0: not
  /// Who computes on CUDA; `auto` is this project's kernels and beside them the library, where it
  /// is installed.
  std::string attention = "auto", gemm = "auto";
};

void* data(const Tensor& t) {
  return t.is_defined() ? t.raw_data() : nullptr;
}

/// Times kernels and prints a line each.
class Bench {
 public:
  Bench(const Shapes& shapes, const Options& options) : s_(shapes), options_(options) {}

  void run() {
    if (options_.gemm == "own") set_gemm_backend(GemmBackend::kOwn);
    // One run is to see that kernels work, maybe under a tool that makes them slow.
    constexpr int64_t kQuickWidth = 256;
    roofline_ = measure_roofline(options_.runs == 1 && !options_.asks ? kQuickWidth : 0);
    if (!options_.asks) {
      estimated_s_ = 0;
      run_all();
      const double seconds = *estimated_s_;
      estimated_s_.reset();
      say_estimate(seconds);
    }
    print_head();
    run_all();
  }

 private:
  void run_all() {
    for (const DType dtype : {kF32, kBF16}) {
      dtype_ = dtype;
      matmuls();
      attention(0);
      if (options_.window > 0) attention(options_.window);
      norms();
      elementwise();
      pointwise();
      shaping();
      rows();
      embedding();
      losses();
      reductions();
    }
    optimizers();
    orthogonalizing();
    nf4();
  }

  /// Values of an operand; none while only times are added up.
  Tensor random(const Shape& shape, DType dtype, uint32_t key) const {
    Tensor t = empty(shape, dtype);
    if (!estimated_s_) fill_uniform(t, -1, 1, {key, 0});
    return t;
  }

  void print_head() const {
    const std::string device = name_of(Context::current()->device());
    if (options_.as_json) {
      print(nlohmann::json{{"bench", "roofline"},
                           {"device", device},
                           {"gbytes_per_s", roofline_.bytes_per_s * 1e-9},
                           {"f32_tflops", roofline_.f32_flops_per_s * 1e-12},
                           {"bf16_tflops", roofline_.bf16_flops_per_s * 1e-12}});
      return;
    }
    fmt::print(
        "{}: copy {:.1f} GB/s, products {:.3f} (f32) and {:.3f} (bf16) TFLOP/s\n"
        "{:<44} {:>10} {:>21} {:>9} {:>9}  % of roofline\n",
        device, roofline_.bytes_per_s * 1e-9, roofline_.f32_flops_per_s * 1e-12,
        roofline_.bf16_flops_per_s * 1e-12, "kernel", "ms", "min-max", "GB/s", "TFLOP/s");
  }

  static void print(const nlohmann::json& line) {
    fmt::print("{}\n", line.dump());
    std::fflush(stdout);
  }

  bool is_wanted(const std::string& name) const {
    return name.find(options_.filter) != std::string::npos;
  }

  std::string name_for(const std::string& op, const std::string& shape) const {
    return fmt::format("{}/{}/{}", op, tessera::name_of(dtype_), shape);
  }
  static std::string by(int64_t rows, int64_t cols) { return fmt::format("{}x{}", rows, cols); }

  /// `nbytes` >= 0 replaces the bytes of the kernel's cost, where that names a range of which only
  /// a part is touched.
  template <class Args>
  void time(const std::string& op, const std::string& shape,
            void (*kernel)(const Stream&, const Args&), const Args& args,
            double nbytes = -1) const {
    const Cost cost = args.cost();
    report(name_for(op, shape), cost.flops(),
           nbytes >= 0 ? nbytes : static_cast<double>(cost.bytes()),
           [&] { kernel(current_stream(), args); });
  }

  void report(const std::string& name, double flops, double nbytes,
              const std::function<void()>& submit) const {
    if (!is_wanted(name)) return;
    if (estimated_s_) {  // at half of the roofline, and what goes before each run
      constexpr double kFlushedNbytes = 64 << 20, kLeastMs = 0.05;
      const double flush_ms = roofline_.floor_ms(0, kFlushedNbytes, dtype_);
      const double run_ms = kLeastMs + 2 * roofline_.floor_ms(flops, nbytes, dtype_);
      *estimated_s_ += (options_.runs + 2) * (run_ms + flush_ms) * 1e-3;
      return;
    }
    print_timing(name, flops, nbytes, time_on_stream(submit, options_.runs));
    while (const int runs = options_.asks ? runs_asked() : 0) {
      print_timing(name, flops, nbytes, time_on_stream(submit, runs, 0));
    }
  }

  /// The next line of standard input: "again N" is N runs, "next" or the end of the input none.
  static int runs_asked() {
    std::string line;
    if (!std::getline(std::cin, line) || line == "next") return 0;
    int runs = 0;
    const bool is_again = std::sscanf(line.c_str(), "again %d", &runs) == 1 && runs >= 1;
    TESSERA_CHECK_AS(ConfigError, is_again, "--ask: expected `again RUNS` or `next`, got `{}`",
                     line);
    return runs;
  }

  void print_timing(const std::string& name, double flops, double nbytes, const Timing& t) const {
    const double gbytes = nbytes / t.median_ms * 1e-6, tflops = flops / t.median_ms * 1e-9;
    const double percent = 100 * roofline_.floor_ms(flops, nbytes, dtype_) / t.median_ms;
    const bool is_compute = flops / roofline_.flops_per_s(dtype_) > nbytes / roofline_.bytes_per_s;
    if (options_.as_json) {
      print({{"bench", name},
             {"ms", t.median_ms},
             {"min_ms", t.min_ms},
             {"max_ms", t.max_ms},
             {"gbytes_per_s", gbytes},
             {"tflops", tflops},
             {"percent_of_roofline", percent},
             {"bound", is_compute ? "compute" : "memory"}});
      return;
    }
    fmt::print("{:<44} {:>10.4f} {:>10.4f}-{:<10.4f} {:>9.1f} {:>9.3f}  {:>5.1f} ({})\n", name,
               t.median_ms, t.min_ms, t.max_ms, gbytes, tflops, percent,
               is_compute ? "compute" : "memory");
    std::fflush(stdout);
  }

  /// Whether this project's kernels, and whether a library's, are to be timed, by an option.
  static bool wants_own(const std::string& choice) { return choice == "auto" || choice == "own"; }
  static bool wants_library(const std::string& choice, const std::string& problem) {
    if (Context::current()->device().type != DeviceType::kCuda || choice == "own") return false;
    TESSERA_CHECK_AS(ConfigError, choice == "auto" || problem.empty(), "--{}: {}",
                     choice == "cudnn" ? "attention=cudnn" : "gemm=cublaslt", problem);
    return problem.empty();
  }

  /// A product by this project's kernel and by cuBLASLt.
  void time_product(const std::string& op, const std::string& shape, const k::Matmul& args) const {
    if (wants_own(options_.gemm)) {
      set_gemm_backend(GemmBackend::kOwn);
      time(op, shape, k::matmul, args);
    }
    if (wants_library(options_.gemm, k::cuda::cublaslt_problem())) {
      set_gemm_backend(GemmBackend::kCublasLt);
      time(op + "_cublaslt", shape, k::matmul, args);
    }
    set_gemm_backend(GemmBackend::kAuto);
  }

  /// Attention by cuDNN. Nothing is printed if it has no kernel for the shape.
  template <class Args>
  void time_cudnn(const std::string& op, const std::string& shape, const Args& args,
                  bool (*kernel)(const Stream&, const Args&)) const {
    if (!wants_library(options_.attention, k::cudnn_problem()) || !k::cudnn_takes(args) ||
        !is_wanted(name_for(op, shape)) || !kernel(current_stream(), args)) {
      return;
    }
    const Cost cost = args.cost();
    report(name_for(op, shape), cost.flops(), static_cast<double>(cost.bytes()),
           [&] { kernel(current_stream(), args); });
  }

  void matmuls() const {
    const std::pair<int64_t, int64_t> layers[] = {
        {s_.C + 2 * s_.Hk * s_.D, s_.C}, {s_.F, s_.C}, {s_.C, s_.F}, {s_.V, s_.C}};
    for (const auto& [N, K] : layers) linear(s_.R(), N, K);
  }

  /// y [M, N] = x [M, K] w [N, K]^T; f32 gradients of the weight, as masters want them.
  void linear(int64_t M, int64_t N, int64_t K) const {
    const std::string shape = fmt::format("{}x{}x{}", M, N, K);
    bool is_any_wanted = is_wanted(name_for("bias_grad", shape));
    for (const char* op : {"linear_fwd", "linear_dx", "linear_dw"}) {
      is_any_wanted = is_any_wanted || is_wanted(name_for(op, shape)) ||
                      is_wanted(name_for(std::string(op) + "_cublaslt", shape));
    }
    if (!is_any_wanted) return;
    const Tensor x = random({M, K}, dtype_, 1), w = random({N, K}, dtype_, 2),
                 y = random({M, N}, dtype_, 3), dw = empty({N, K});
    k::Matmul product{};  // what the three have in common
    product.dtype = product.c_dtype = dtype_;
    product.num_batches = 1;
    k::Matmul fwd = product;
    fwd.c = data(y), fwd.a = data(x), fwd.b = data(w), fwd.trans_b = true;
    fwd.m = M, fwd.n = N, fwd.k = K, fwd.lda = K, fwd.ldb = K, fwd.ldc = N;
    time_product("linear_fwd", shape, fwd);
    k::Matmul dx = product;
    dx.c = data(x), dx.a = data(y), dx.b = data(w);
    dx.m = M, dx.n = K, dx.k = N, dx.lda = N, dx.ldb = K, dx.ldc = K;
    time_product("linear_dx", shape, dx);
    k::Matmul dweight = product;
    dweight.c = data(dw), dweight.a = data(y), dweight.b = data(x);
    dweight.c_dtype = kF32, dweight.trans_a = true;
    dweight.m = N, dweight.n = K, dweight.k = M, dweight.lda = N, dweight.ldb = K, dweight.ldc = K;
    time_product("linear_dw", shape, dweight);
    const Tensor db = empty({N}), partials = empty({k::BiasGrad::num_chunks(M), N});
    time("bias_grad", by(M, N), k::bias_grad,
         {data(db), data(partials), data(y), kF32, dtype_, M, N, N});
  }

  void attention(int64_t window) const {
    const std::string shape = fmt::format("B{}_T{}_H{}_Hk{}_D{}{}", s_.B, s_.T, s_.H, s_.Hk, s_.D,
                                          window > 0 ? fmt::format("_W{}", window) : "");
    const Tensor q = random({s_.B, s_.T, s_.H, s_.D}, dtype_, 1),
                 kv = random({s_.B, s_.T, s_.Hk, s_.D}, dtype_, 2), o = empty_like(q),
                 d_out = random(q.shape(), dtype_, 3), dq = empty_like(q), dk = empty_like(kv),
                 dv = empty_like(kv), lse = empty({s_.B, s_.H, s_.T});
    const k::HeadStrides q_strides{s_.T * s_.H * s_.D, s_.H * s_.D, s_.D},
        kv_strides{s_.T * s_.Hk * s_.D, s_.Hk * s_.D, s_.D};
    const k::AttentionShape extent{
        dtype_, s_.B,    s_.T,    s_.T,
        s_.H,   s_.Hk,   s_.D,    1 / std::sqrt(static_cast<double>(s_.D)),
        true,   nullptr, nullptr, window};
    const k::AttentionFwd fwd{data(o),   data(lse),  data(q),    data(kv), data(kv),
                              q_strides, kv_strides, kv_strides, extent};
    if (wants_own(options_.attention)) time("attention_fwd", shape, k::attention_fwd, fwd);
    time_cudnn("attention_fwd_cudnn", shape, fwd, k::cudnn_attention_fwd);
    k::AttentionBwd bwd{};
    bwd.dq = data(dq), bwd.dk = data(dk), bwd.dv = data(dv);
    bwd.dq_strides = bwd.q_strides = q_strides;
    bwd.dk_strides = bwd.dv_strides = bwd.k_strides = bwd.v_strides = kv_strides;
    bwd.d_out = data(d_out), bwd.o = data(o), bwd.lse = data(lse);
    bwd.q = data(q), bwd.k = bwd.v = data(kv);
    bwd.shape = extent;
    bwd.device = q.device().type;
    const Tensor workspace = empty({bwd.workspace_numel()});
    bwd.workspace = data(workspace);
    if (wants_own(options_.attention)) time("attention_bwd", shape, k::attention_bwd, bwd);
    time_cudnn("attention_bwd_cudnn", shape, bwd, k::cudnn_attention_bwd);
  }

  void norms() const {
    const int64_t R = s_.R(), C = s_.C;
    const Tensor x = random({R, C}, dtype_, 1), residual = random({R, C}, dtype_, 2),
                 dy = random({R, C}, dtype_, 3), y = empty_like(x), sum = empty_like(x),
                 dx = empty_like(x), w = random({C}, dtype_, 4), b = random({C}, dtype_, 5),
                 mean = empty({R}), rstd = empty({R}), dw = empty({C}), db = empty({C}),
                 partials = empty({k::NormBwd::num_chunks(R, x.device().type), 2, C});
    const k::RowLayout layout = k::contiguous_rows(C);
    for (const bool is_layer : {true, false}) {
      const std::string op = is_layer ? "layer_norm" : "rms_norm";
      k::NormFwd fwd{};
      fwd.y = data(y), fwd.mean = is_layer ? data(mean) : nullptr;
      fwd.rstd = data(rstd), fwd.x = data(x), fwd.w = data(w), fwd.b = is_layer ? data(b) : nullptr;
      fwd.dtype = fwd.w_dtype = dtype_;
      fwd.rows = R, fwd.cols = C, fwd.x_rows = fwd.residual_rows = layout, fwd.eps = 1e-5f;
      const auto run_fwd = is_layer ? k::layer_norm_fwd : k::rms_norm_fwd;
      time(op + "_fwd", by(R, C), run_fwd, fwd);
      fwd.sum = data(sum), fwd.residual = data(residual);
      time("add_" + op + "_fwd", by(R, C), run_fwd, fwd);
      k::NormBwd bwd{};
      bwd.dx = data(dx), bwd.dw = data(dw), bwd.db = is_layer ? data(db) : nullptr;
      bwd.partials = data(partials), bwd.dy = data(dy), bwd.x = data(x), bwd.w = data(w);
      bwd.mean = fwd.mean, bwd.rstd = data(rstd);
      bwd.dtype = bwd.w_dtype = dtype_, bwd.dw_dtype = bwd.db_dtype = kF32;
      bwd.rows = R, bwd.cols = C, bwd.x_rows = bwd.dx_rows = layout;
      bwd.num_partials = partials.dim(0);
      time(op + "_bwd", by(R, C), is_layer ? k::layer_norm_bwd : k::rms_norm_bwd, bwd);
    }
  }

  void elementwise() const {
    const int64_t R = s_.R(), F = s_.F;
    const Tensor x = random({R, F}, dtype_, 1), up = random({R, F}, dtype_, 2),
                 dy = random({R, F}, dtype_, 3), y = empty_like(x), dx = empty_like(x),
                 dup = empty_like(x), wide = empty({R, F});
    const std::string shape = by(R, F);
    time("gelu_fwd", shape, k::activation_fwd,
         {data(y), data(x), dtype_, k::Activation::kGeluTanh, R, F, F});
    time("gelu_bwd", shape, k::activation_bwd,
         {data(dx), data(dy), data(x), dtype_, dtype_, k::Activation::kGeluTanh, R, F, F, F, F});
    time("swiglu_fwd", shape, k::swiglu_fwd, {data(y), data(x), data(up), dtype_, R, F, F, F});
    time("swiglu_bwd", shape, k::swiglu_bwd,
         {data(dx), data(dup), data(dy), data(x), data(up), dtype_, dtype_, dtype_, R, F, F, F, F,
          F, F});
    time("scale", shape, k::scale, {data(y), data(x), dtype_, dtype_, 0.5, R, F, F, F});
    time("cast_to_f32", shape, k::copy,
         {data(wide), data(x), kF32, dtype_, x.shape(), x.strides(), x.strides()});
    time("cast_from_f32", shape, k::copy,
         {data(x), data(wide), dtype_, kF32, x.shape(), x.strides(), x.strides()});
    k::Dropout dropout{data(y),     data(up), dtype_, dtype_, {1, 2}, uint32_t{1} << 29,
                       1.0 / 0.875, 0,        R,      F,      F,      F};
    time("dropout", shape, k::dropout, dropout);
    time("fill_normal", shape, k::fill_normal, {data(y), dtype_, {1, 2}, 0, R * F, 0, 1});
  }

  /// Ops of each number of operands, and of the functions among them the dearest.
  void pointwise() const {
    const int64_t R = s_.R(), F = s_.F;
    const Tensor x = random({R, F}, dtype_, 1), other = random({R, F}, dtype_, 2),
                 row = random({F}, dtype_, 3), dy = random({R, F}, dtype_, 4), y = empty_like(x),
                 mask = zeros({R, F}, kU8);
    const Strides strides = x.strides();
    const auto operand = [&](const Tensor& t) -> k::Pointwise::Operand {
      return {data(t), t.dtype(), t.num_dims() == 1 ? Strides{0, 1} : strides};
    };
    const k::Pointwise::Operand none{nullptr, kF32, {0, 0}, 0.5};
    const auto run = [&](const std::string& op, k::PointwiseOp code, const Tensor& dst,
                         const std::array<k::Pointwise::Operand, 3>& in) {
      time(op, by(R, F), k::pointwise, {data(dst), dst.dtype(), code, x.shape(), strides, in});
    };
    run("add", k::PointwiseOp::kAdd, y, {operand(x), operand(other), none});
    run("add_row", k::PointwiseOp::kAdd, y, {operand(x), operand(row), none});
    run("div", k::PointwiseOp::kDiv, y, {operand(x), operand(other), none});
    run("exp", k::PointwiseOp::kExp, y, {operand(x), none, none});
    run("log", k::PointwiseOp::kLog, y, {operand(x), none, none});
    run("tanh", k::PointwiseOp::kTanh, y, {operand(x), none, none});
    run("pow", k::PointwiseOp::kPow, y, {operand(x), operand(other), none});
    run("maximum_bwd", k::PointwiseOp::kMaximumBwd, y, {operand(dy), operand(x), operand(other)});
    run("less_than", k::PointwiseOp::kLt, mask, {operand(x), none, none});
    run("where", k::PointwiseOp::kWhere, y, {operand(mask), operand(x), operand(other)});
    time("cumsum", by(R, F), k::cumsum, {data(y), data(x), dtype_, dtype_, R, F, 1});
    time("cumsum_cols", by(R, F), k::cumsum, {data(y), data(x), dtype_, dtype_, 1, R, F});
    const Tensor index = zeros({R, F}, kI32), sums = zeros({R, F});
    time("gather", by(R, F), k::gather, {data(y), data(x), data(index), dtype_, kI32, 1, R, R, F});
    time("scatter_add", by(R, F), k::scatter_add,
         {data(sums), data(x), data(index), dtype_, kI32, 1, R, R, F});
  }

  /// Ops that are copies into parts of their result, and fills.
  void shaping() const {
    const NoGrad no_grad;
    const int64_t R = s_.R(), F = s_.F;
    const Tensor x = random({R, F}, dtype_, 1), other = random({R, F}, dtype_, 2),
                 y = empty_like(x);
    const auto moved = static_cast<double>(4 * x.nbytes());
    const auto run = [&](const std::string& op, const std::function<Tensor()>& submit) {
      report(name_for(op, by(R, F)), 0, moved, [&] { submit(); });
    };
    run("cat", [&] { return cat({x, other}, 0); });
    run("cat_cols", [&] { return cat({x, other}, 1); });
    run("stack", [&] { return stack({x, other}, 0); });
    run("stack_cols", [&] { return stack({x, other}, 2); });
    time("fill", by(R, F), k::fill, {data(y), dtype_, x.shape(), x.strides(), 0.5});
    time("fill_uniform", by(R, F), k::fill_uniform, {data(y), dtype_, {1, 2}, 0, R * F, -1, 1});
  }

  void rows() const {
    // Attention's logits: a row for each head and query, as wide as the context.
    const int64_t C = s_.T, R = std::min(s_.B * s_.H * s_.T, (int64_t{64} << 20) / C);
    const Tensor x = random({R, C}, dtype_, 1), dy = random({R, C}, dtype_, 2), y = empty_like(x),
                 dx = empty_like(x);
    const k::RowLayout layout = k::contiguous_rows(C);
    time("softmax_fwd", by(R, C), k::softmax_fwd, {data(y), data(x), dtype_, R, C, layout});
    time("softmax_bwd", by(R, C), k::softmax_bwd,
         {data(dx), data(dy), data(y), dtype_, false, R, C, layout});
    time("log_softmax_fwd", by(R, C), k::log_softmax_fwd, {data(y), data(x), dtype_, R, C, layout});
    time("log_softmax_bwd", by(R, C), k::log_softmax_bwd,
         {data(dx), data(dy), data(y), dtype_, false, R, C, layout});
    const Tensor heads = random({s_.B, s_.T, s_.H, s_.D}, dtype_, 3), out = empty_like(heads),
                 table = empty({s_.T, s_.D});
    k::RopeTable angles{};
    angles.table = table.data<float>();
    angles.rows = s_.T, angles.rotary_dim = s_.D, angles.theta = 10000;
    time("rope_table", by(s_.T, s_.D), k::rope_table, angles);
    k::Rope rope{};
    rope.y = data(out), rope.x = data(heads), rope.table = angles.table, rope.dtype = dtype_;
    rope.batch = s_.B, rope.time = s_.T, rope.heads = s_.H;
    rope.head_dim = rope.rotary_dim = s_.D;
    for (auto* strides : {rope.x_strides, rope.y_strides}) {
      strides[0] = s_.T * s_.H * s_.D, strides[1] = s_.H * s_.D, strides[2] = s_.D;
    }
    time("rope", fmt::format("{}x{}x{}", s_.R(), s_.H, s_.D), k::rope, rope);
  }

  Tensor random_ids() const {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < s_.R(); ++i) {
      ids.push_back(
          static_cast<int32_t>(hash_name(fmt::format("{}", i)) % static_cast<uint64_t>(s_.V)));
    }
    return from_values(std::span<const int32_t>(ids), {s_.R()});
  }

  void embedding() const {
    const int64_t R = s_.R(), C = s_.C, V = s_.V;
    if (!is_wanted(name_for("embedding_fwd", by(R, C))) &&
        !is_wanted(name_for("embedding_bwd", by(R, C)))) {
      return;
    }
    const Tensor ids = random_ids(), weight = random({V, C}, dtype_, 1), y = empty({R, C}, dtype_),
                 dw = zeros({V, C}), order = empty({V + R}, kI32);
    const auto size = static_cast<double>(size_of(dtype_));
    const auto moved = static_cast<double>(R * C);
    time("embedding_fwd", by(R, C), k::embedding_fwd,
         {data(y), data(ids), data(weight), dtype_, kI32, R, C, V}, 2 * moved * size);
    // Into a gradient that is there already: only rows of this batch are touched.
    k::EmbeddingBwd bwd{
        data(dw), order.data<int32_t>(), data(y), data(ids), kF32, dtype_, kI32, R, C, V, C, true};
    time("embedding_bwd", by(R, C), k::embedding_bwd, bwd,
         moved * (size + 8) + 8 * static_cast<double>(V));
  }

  void losses() const {
    const int64_t R = std::min<int64_t>(s_.R(), 4096), V = s_.V;
    const std::string shape = by(R, V);
    if (!is_wanted(name_for("cross_entropy_fwd", shape)) &&
        !is_wanted(name_for("cross_entropy_bwd", shape)) &&
        !is_wanted(name_for("cross_entropy_fused", shape))) {
      return;
    }
    const Tensor ids = random_ids(), logits = random({R, V}, dtype_, 1), losses = empty({R}),
                 stats = empty({R, 2}), scale = full({}, 1.0);
    const k::Targets targets{data(ids), kI32, -100, 0, "bench"};
    time("cross_entropy_fwd", shape, k::cross_entropy_fwd,
         {data(losses), data(stats), data(logits), targets, dtype_, R, V, V});
    const Tensor dlogits = empty_like(logits);
    time("cross_entropy_bwd", shape, k::cross_entropy_bwd,
         {data(dlogits), data(logits), data(stats), targets, data(scale), dtype_, dtype_, false, R,
          V, V, V});
    // Logits of a head are f32; their gradient has the model's dtype.
    const Tensor wide = random({R, V}, kF32, 2);
    time("cross_entropy_fused", shape, k::cross_entropy_fused,
         {data(losses), data(wide), targets, data(scale), kF32, dtype_, R, V, V});
  }

  void reductions() const {
    const Tensor x = random({s_.R(), s_.C}, dtype_, 1), total = empty({}),
                 scratch = empty({2 * k::kMaxNormChunks}, kF64), partial = empty({}, kF64),
                 flags = zeros({1}, kU8);
    const int64_t numel = x.numel(), segments[] = {0, numel};
    const Tensor bounds = from_values(std::span<const int64_t>(segments), {1, 2});
    const std::string shape = fmt::format("{}", numel);
    k::Sum sum{data(total), scratch.data<double>(), data(x), kF32, dtype_, 1, numel, 1};
    sum.num_chunks = k::num_sum_chunks(1, numel, 1, x.device().type);
    time("sum", shape, k::sum, sum);
    time("partial_norm", shape, k::partial_norm,
         {partial.data<double>(), flags.data<uint8_t>(), scratch.data<double>(), data(x),
          bounds.data<int64_t>(), dtype_, numel, 1, 2.0});
    constexpr int kRanks = 8;
    const Tensor others = random({kRanks - 1, numel}, dtype_, 2);
    time("rank_reduce", fmt::format("{}x{}", kRanks, numel), k::rank_reduce,
         {data(x), data(x), data(others), others.nbytes() / (kRanks - 1), 0, kRanks, numel, dtype_,
          dtype_});
    time("scale_check", shape, k::scale_check,
         {data(x), data(x), flags.data<uint8_t>(), dtype_, dtype_, 0.5f, numel});
    const Tensor mark = zeros({1}, kI32);
    time("mark_nonfinite", shape, k::mark_nonfinite,
         {mark.data<int32_t>(), data(x), dtype_, 1, numel, k::contiguous_rows(numel), 1});
    const Tensor checked = from_values({int64_t{0}, numel, int64_t{0}}, {1, 3});
    const Tensor checksum = zeros({1}, kI64);
    time("checksum", shape, k::checksum,
         {reinterpret_cast<uint64_t*>(checksum.data<int64_t>()), data(x), checked.data<int64_t>(),
          static_cast<int64_t>(size_of(dtype_)), numel, 1});
  }

  void optimizers() {
    const FlatSegment whole{0, s_.N, 1, 1};
    const FlatSegments segments = flat_segments({&whole, 1}, s_.N);
    const std::string shape = fmt::format("{}", s_.N);
    for (const DType low : {kF32, kBF16}) {  // named by the dtype that gathers send
      dtype_ = low;
      const bool has_low = low != kF32;
      const std::string_view ops[] = {
          "adamw_step",        "adamw_8bit_step",   "muon_direction",  "muon_apply", "lion_step",
          "adafactor_collect", "adafactor_factors", "adafactor_apply", "sgd_step",   "round_low"};
      if (std::none_of(std::begin(ops), std::end(ops), [&](std::string_view op) {
            return is_wanted(name_for(std::string(op), shape));
          })) {
        continue;
      }
      const Tensor master = random({s_.N}, kF32, 1), grad = random({s_.N}, kF32, 2),
                   m = zeros({s_.N}), v = zeros({s_.N}), step = full({}, 1, kI64);
      k::FlatUpdate flat{};
      flat.master = master.data<float>(), flat.grad = data(grad), flat.grad_dtype = kF32;
      const Tensor low_shard = has_low ? empty({s_.N}, low) : Tensor{};
      flat.low = data(low_shard), flat.low_dtype = low;
      flat.numel = s_.N, flat.bounds = segments.bounds.data<int64_t>();
      flat.factors = segments.factors.data<float>(), flat.num_segments = 1;
      flat.lr = 1e-4f, flat.weight_decay = 0.1f;
      k::AdamWStep adamw{};
      static_cast<k::FlatUpdate&>(adamw) = flat;
      adamw.exp_avg = m.data<float>(), adamw.exp_avg_sq = v.data<float>();
      adamw.step = step.data<int64_t>(), adamw.beta1 = 0.9, adamw.beta2 = 0.95, adamw.eps = 1e-8;
      time("adamw_step", shape, k::adamw_step, adamw);
      k::AdamW8bitStep eight{};
      static_cast<k::FlatUpdate&>(eight) = flat;
      const int64_t blocks = k::state_blocks(s_.N);
      const Tensor m_codes = zeros({s_.N}, kU8), v_codes = zeros({s_.N}, kU8),
                   m_absmax = zeros({blocks}), v_absmax = zeros({blocks});
      const std::vector<float> maps = k::dynamic_maps();
      const Tensor tables = from_values(std::span<const float>(maps), {std::ssize(maps)}, kF32);
      eight.exp_avg = m_codes.data<uint8_t>(), eight.exp_avg_sq = v_codes.data<uint8_t>();
      eight.exp_avg_absmax = m_absmax.data<float>(),
      eight.exp_avg_sq_absmax = v_absmax.data<float>();
      eight.maps = tables.data<float>(), eight.step = step.data<int64_t>();
      eight.beta1 = 0.9, eight.beta2 = 0.95, eight.eps = 1e-8;
      time("adamw_8bit_step", shape, k::adamw_8bit_step, eight);
      k::MuonDirection direction{};
      static_cast<k::FlatUpdate&>(direction) = flat;
      const Tensor directions = zeros({s_.N}, kBF16), scales = full({1}, 1);
      direction.momentum_buffer = m.data<float>(), direction.momentum = 0.95f;
      direction.direction = static_cast<BFloat16*>(directions.raw_data()),
      direction.nesterov = true;
      time("muon_direction", shape, k::muon_direction, direction);
      k::MuonApply apply{};
      static_cast<k::FlatUpdate&>(apply) = flat;
      apply.orthogonal = direction.direction, apply.scales = scales.data<float>();
      time("muon_apply", shape, k::muon_apply, apply);
      k::LionStep lion{};
      static_cast<k::FlatUpdate&>(lion) = flat;
      lion.exp_avg = m.data<float>(), lion.beta1 = 0.9, lion.beta2 = 0.99;
      time("lion_step", shape, k::lion_step, lion);
      adafactor(flat, shape, step);
      k::SgdStep sgd{};
      static_cast<k::FlatUpdate&>(sgd) = flat;
      sgd.momentum_buffer = m.data<float>(), sgd.momentum = 0.9f, sgd.nesterov = false;
      time("sgd_step", shape, k::sgd_step, sgd);
      k::RoundLow round{};
      static_cast<k::FlatUpdate&>(round) = flat;
      if (has_low) time("round_low", shape, k::round_low, round);
    }
  }

  /// Of one vector; its second moments are as many.
  void adafactor(const k::FlatUpdate& flat, const std::string& shape, const Tensor& step) {
    const Tensor scaled = zeros({s_.N}), squares = zeros({k::state_blocks(s_.N)}),
                 before = zeros({s_.N + 2}), values = zeros({s_.N + 2}),
                 workspace = zeros({k::AdafactorFactors::workspace_numel()});
    const Tensor places = from_values({int64_t{0}, int64_t{0}, s_.N, int64_t{0}, int64_t{0}}, {5});
    k::AdafactorCollect collect{};
    static_cast<k::FlatUpdate&>(collect) = flat;
    collect.scaled = scaled.data<float>(), collect.squares = squares.data<float>();
    time("adafactor_collect", shape, k::adafactor_collect, collect);
    k::AdafactorFactors factors{};
    factors.next = values.data<float>(), factors.values = before.data<float>();
    factors.g = scaled.data<float>(), factors.squares = squares.data<float>();
    factors.workspace = workspace.data<float>(), factors.step = step.data<int64_t>();
    factors.cols = s_.N;
    factors.lr = 1e-2, factors.beta2_decay = -0.8, factors.eps1 = 1e-30, factors.eps2 = 1e-3;
    factors.d = 1;
    time("adafactor_factors", shape, k::adafactor_factors, factors);
    k::AdafactorApply apply{};
    static_cast<k::FlatUpdate&>(apply) = flat;
    apply.scaled = scaled.data<float>(), apply.values = values.data<float>();
    apply.places = places.data<int64_t>(), apply.least = 1e-30f;
    time("adafactor_apply", shape, k::adafactor_apply, apply);
  }

  /// Four-bit weights: `N` of them, and back.
  void nf4() {
    const int64_t num_blocks = nf4_num_blocks(s_.N);
    const std::string shape = fmt::format("{}", s_.N);
    const Tensor records = zeros({nf4_nbytes(s_.N)}, kU8), absmax = zeros({num_blocks}),
                 scales = zeros({nf4_num_scales(s_.N)}), map = nf4_map();
    auto* const bytes = static_cast<uint8_t*>(records.raw_data());
    float* const mean = scales.data<float>();
    for (const DType dtype : {kF32, kBF16}) {
      dtype_ = dtype;
      const Tensor values = random({s_.N}, dtype, 1);
      time("nf4_quantize", shape, k::nf4_quantize,
           {bytes, absmax.data<float>(), data(values), dtype, s_.N});
      time("nf4_dequantize", shape, k::nf4_dequantize,
           {data(values), bytes, mean + 1, mean, map.data<float>(), dtype, 0, s_.N});
    }
    dtype_ = kF32;
    time("nf4_mean", shape, k::nf4_mean, {mean, absmax.data<float>(), num_blocks});
    time("nf4_compress", shape, k::nf4_compress,
         {bytes, mean + 1, absmax.data<float>(), mean, map.data<float>(), num_blocks, 0,
          num_blocks});
  }

  /// What the Newton-Schulz steps of Muon have beside GEMMs.
  void orthogonalizing() {
    const int64_t n = s_.C;
    const std::string shape = fmt::format("{}x{}", n, n);
    for (const DType dtype : {kF32, kBF16}) {
      dtype_ = dtype;
      const Tensor x = random({n, n}, dtype, 1), y = random({n, n}, kF32, 2), sums = zeros({n});
      time("row_squares", shape, k::row_squares, {data(sums), data(x), dtype, n, n});
      time("scale_by_norm", shape, k::scale_by_norm,
           {data(x), data(sums), dtype, n, n, 1.f, 1e-7f});
      time("matrix_combine", shape, k::matrix_combine,
           {data(x), data(x), data(y), dtype, kF32, n, n, 0.5, 0.5, true});
      orthogonalize(n, n);
      orthogonalize(n, s_.F);
    }
  }

  /// All of it, beside the rate of a large product: operations are those that symmetry leaves, and
  /// no bytes count.
  void orthogonalize(int64_t rows, int64_t cols) {
    const Tensor g = random({rows, cols}, dtype_, 3);
    report(name_for("orthogonalize", by(rows, cols)), orthogonalize_flops(rows, cols).computed, 0,
           [&] { tessera::orthogonalize(g, MuonCoefficients::kOriginal); });
  }

  const Shapes s_;
  const Options options_;
  Roofline roofline_;
  DType dtype_ = kF32;
  mutable std::optional<double> estimated_s_;  // set: nothing is timed, times are added up
};

int run(int argc, char** argv) {
  CommandLine app(
      "Times every kernel. Names are op/dtype/shape; times are the median, least and largest of "
      "the runs.",
      "tessera-bench-kernels");
  Options options;
  std::string device = "auto", shapes;
  int threads = 0;
  app.add_option("--filter", options.filter, "only kernels whose name contains this");
  app.add_option(
         "--shapes", shapes,
         "gpt2, llama, large (for a GPU), long (8192 positions), tiny, odd (no multiples of "
         "anything); default: gpt2 on cpu, large on cuda")
      ->check(CLI::IsMember({"gpt2", "llama", "large", "long", "tiny", "odd"}));
  app.add_option("--runs", options.runs, "runs of each kernel")
      ->check(in_range(1, std::optional(10000)));
  app.add_option("--device", device, "auto, cpu or cuda");
  app.add_option("--threads", threads, "CPU threads; 0: all allowed processors")
      ->check(in_range(0, std::optional(4096)));
  app.add_option("--window", options.window,
                 "times attention with a window of this many keys beside all of it; 0: not")
      ->check(in_range<int64_t>(0, int64_t{1} << 30));
  app.add_option("--attention", options.attention,
                 "on cuda: own, cudnn, or auto: both where cuDNN is installed")
      ->check(CLI::IsMember({"auto", "own", "cudnn"}));
  app.add_option("--gemm", options.gemm,
                 "on cuda: own, cublaslt, or auto: both where cuBLASLt is installed")
      ->check(CLI::IsMember({"auto", "own", "cublaslt"}));
  app.add_flag("--json", options.as_json, "one JSON object a line instead of a table");
  app.add_flag("--ask", options.asks,
               "after each timing read a line: `again RUNS` times the kernel once more, `next` "
               "goes on (for comparisons that take turns, as apps/compare/ops.py does)");
  if (const auto status = app.read(argc, argv)) return *status;
  ContextOptions context;
  context.device = device_from_name(device);
  context.num_threads = threads;
  if (shapes.empty()) shapes = context.device.type == DeviceType::kCpu ? "gpt2" : "large";
  const Context::Scope scope(std::make_shared<Context>(context));
  const auto& all = all_shapes();
  const auto chosen =
      std::find_if(all.begin(), all.end(), [&](const Shapes& s) { return s.name == shapes; });
  Bench(*chosen, options).run();
  return 0;
}

}  // namespace
}  // namespace tessera::apps

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] { return tessera::apps::run(argc, argv); });
}
