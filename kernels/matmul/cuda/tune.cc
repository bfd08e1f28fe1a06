#include "kernels/matmul/cuda/tune.h"

#include <limits>
#include <optional>

#include "core/log.h"
#include "core/random.h"
#include "core/runtime/context.h"
#include "core/tensor.h"
#include "kernels/matmul/backend.h"
#include "kernels/matmul/cuda/cublaslt.h"
#include "kernels/random/random.h"
#include "kernels/tuning/measure.h"

namespace tessera::kernels::cuda {
namespace {

constexpr const char* kWord = "gemm";
constexpr int kMaxAlgorithms = 16;  // of one product and epilogue

int64_t log_alignment(const void* data) {
  return __builtin_ctzll(reinterpret_cast<uintptr_t>(data) | 256);
}

bool has_beta(const Matmul& p) {
  return p.accumulate || p.residual != nullptr;
}

/// The product without what can have a pass of its own.
bool has_apart(const Matmul& p) {
  return p.activate || p.row_sums != nullptr;
}

/// A product like that of a key, over operands of its own or over none.
class Case {
 public:
  explicit Case(const std::map<std::string, int64_t>& fields) : fields_(fields) {
    p_.dtype = static_cast<DType>(at("dtype"));
    p_.c_dtype = p_.bias_dtype = static_cast<DType>(at("c_dtype"));
    p_.trans_a = at("trans_a") != 0, p_.trans_b = at("trans_b") != 0;
    p_.activate = at("gelu") != 0;
    p_.m = at("m"), p_.n = at("n"), p_.k = at("k");
    p_.lda = at("lda"), p_.ldb = at("ldb"), p_.ldc = at("ldc"), p_.ld_residual = at("ld_added");
    p_.num_batches = at("batches");
    p_.batch_stride_a = at("stride_a"), p_.batch_stride_b = at("stride_b");
    p_.batch_stride_c = at("stride_c");
    // What is added to the product lies in c or, in rows of other lengths, elsewhere.
    p_.accumulate = at("beta") != 0 && p_.ld_residual == p_.ldc;
  }

  /// Pointers of the right alignment that nobody may read.
  void set_addresses() {
    set_pointers([](DType, int64_t) { return uintptr_t{1} << 40; });
  }
  /// Operands of normal numbers, and a workspace.
  void allocate() {
    set_pointers([this](DType dtype, int64_t numel) {
      memory_.push_back(empty({numel + kMargin}, dtype));
      fill_normal(memory_.back(), 0, 1, make_key(1, memory_.size()));
      return reinterpret_cast<uintptr_t>(memory_.back().raw_data());
    });
    memory_.push_back(empty({kCublasLtMaxWorkspace}, kU8));
    p_.workspace = memory_.back().raw_data();
    p_.workspace_nbytes = kCublasLtMaxWorkspace;
  }
  const Matmul& product() const { return p_; }

  /// The product that the library is left with, into where the activation is to read it.
  Matmul apart() const {
    Matmul p = p_;
    if (p.pre_activation != nullptr) p.c = p.pre_activation, p.ldc = p.ld_residual = p.n;
    p.pre_activation = p.row_sums = nullptr;
    p.activate = false;
    return p;
  }
  /// What `apart` leaves out.
  void submit_rest(const Stream& s) {
    const Matmul linear = apart();
    if (p_.activate) {
      kernels::activation_fwd(s,
                              {p_.c, linear.c, p_.c_dtype, p_.activation, p_.m, p_.n, linear.ldc});
    }
    if (p_.row_sums == nullptr) return;
    // op(a) [m, k] is a transposed: its sums of rows are those of the columns of a [k, m].
    if (!partials_.is_defined()) partials_ = empty({BiasGrad::num_chunks(p_.k), p_.m}, kF32);
    kernels::bias_grad(
        s, {p_.row_sums, partials_.raw_data(), p_.a, p_.c_dtype, p_.dtype, p_.k, p_.m, p_.lda});
  }

 private:
  static constexpr int64_t kMargin = 256;  // elements: at least the alignment

  int64_t at(const char* name) const {
    const auto found = fields_.find(name);
    TESSERA_CHECK_AS(InternalError, found != fields_.end(), "matmul: a key without {}", name);
    return found->second;
  }

  /// `make(dtype, numel)` gives an address of the widest alignment.
  template <class Make>
  void set_pointers(Make make) {
    const auto aligned = [&](const char* name, DType dtype, int64_t numel) {
      const auto log = static_cast<uintptr_t>(at(name));
      const uintptr_t shift = log >= 8 ? 0 : uintptr_t{1} << log;
      return reinterpret_cast<void*>(make(dtype, numel) + shift);
    };
    const auto span = [&](int64_t rows, int64_t ld, int64_t stride) {
      return rows * ld + (p_.num_batches - 1) * stride;
    };
    p_.a = aligned("align_a", p_.dtype, span(p_.trans_a ? p_.k : p_.m, p_.lda, p_.batch_stride_a));
    p_.b = aligned("align_b", p_.dtype, span(p_.trans_b ? p_.n : p_.k, p_.ldb, p_.batch_stride_b));
    p_.c = aligned("align_c", p_.c_dtype, span(p_.m, p_.ldc, p_.batch_stride_c));
    if (at("beta") != 0 && !p_.accumulate)
      p_.residual = aligned("align_added", p_.c_dtype, span(p_.m, p_.ld_residual, 0));
    if (at("bias") != 0) p_.bias = aligned("align_vector", p_.c_dtype, p_.n);
    if (at("sums") != 0) p_.row_sums = aligned("align_vector", p_.c_dtype, p_.m);
    if (at("aux") != 0) p_.pre_activation = aligned("align_aux", p_.c_dtype, p_.m * p_.n);
  }

  const std::map<std::string, int64_t>& fields_;
  Matmul p_{};
  std::vector<Tensor> memory_;
  Tensor partials_;
};

/// Allows TF32 as a key says, while it lives.
class Tf32Guard {
 public:
  explicit Tf32Guard(bool is_allowed) : previous_(gemm_tf32()) { set_gemm_tf32(is_allowed); }
  ~Tf32Guard() { set_gemm_tf32(previous_); }
  Tf32Guard(const Tf32Guard&) = delete;
  Tf32Guard& operator=(const Tf32Guard&) = delete;

 private:
  const bool previous_;
};

struct Timed {
  std::string algorithm;
  double ms = std::numeric_limits<double>::infinity();
};

/// The fastest of the library's algorithms for all of `p`, followed by `then`.
template <class Then>
Timed fastest(const Stream& s, const Matmul& p, const std::vector<std::string>& algorithms,
              const Then& then) {
  Timed best;
  for (const std::string& algorithm : algorithms) {
    const double ms = time_of(s, [&] {
      if (!cublaslt_try(s.cuda(), p, algorithm)) return false;
      then();
      return true;
    });
    if (ms < best.ms) best = {algorithm, ms};
  }
  return best;
}

constexpr std::string_view kFused = "fused ";

std::string choice_of(const Timed& timed) {
  return timed.algorithm.empty() ? "own" : std::string(kFused) + timed.algorithm;
}

void measure(const std::string& key, Case& c, Tuning::Choices& choices) {
  const Stream& s = current_stream();
  const Matmul& p = c.product();
  const auto nothing = [] {};
  const Timed fused = fastest(s, p, cublaslt_algorithms(p, kMaxAlgorithms), nothing);
  if (!has_apart(p)) {
    choices[key] = choice_of(fused);
    return;
  }
  const Matmul linear = c.apart();
  const std::string linear_key = gemm_key(linear);
  // It may have been chosen before; that choice stays, for whoever uses it already.
  std::string& choice = choices[linear_key];
  if (const Tuning* tuning = Tuning::current(); choice.empty() && tuning != nullptr)
    choice = tuning->find(linear_key);
  if (choice.empty())
    choice = choice_of(fastest(s, linear, cublaslt_algorithms(linear, kMaxAlgorithms), nothing));
  Timed apart;
  if (choice.rfind(kFused, 0) == 0) {
    const std::vector<std::string> chosen = {choice.substr(kFused.size())};
    apart = fastest(s, linear, chosen, [&] { c.submit_rest(s); });
  }
  choices[key] = apart.ms < fused.ms ? "apart" : choice_of(fused);
}

}  // namespace

std::string gemm_key(const Matmul& p) {
  const void* vector = p.row_sums != nullptr ? p.row_sums : p.bias;
  const void* aux = p.activate ? p.pre_activation : nullptr;
  const void* added = p.residual != nullptr ? p.residual : p.c;
  return key_text(kWord, {{"dtype", static_cast<int64_t>(p.dtype)},
                          {"c_dtype", static_cast<int64_t>(p.c_dtype)},
                          {"trans_a", p.trans_a},
                          {"trans_b", p.trans_b},
                          {"beta", has_beta(p)},
                          {"tf32", p.dtype == kF32 && gemm_tf32()},
                          {"bias", p.bias != nullptr},
                          {"gelu", p.activate},
                          {"aux", aux != nullptr},
                          {"sums", p.row_sums != nullptr},
                          {"m", p.m},
                          {"n", p.n},
                          {"k", p.k},
                          {"lda", p.lda},
                          {"ldb", p.ldb},
                          {"ldc", p.ldc},
                          {"ld_added", p.residual != nullptr ? p.ld_residual : p.ldc},
                          {"batches", p.num_batches},
                          {"stride_a", p.batch_stride_a},
                          {"stride_b", p.batch_stride_b},
                          {"stride_c", p.batch_stride_c},
                          {"align_a", log_alignment(p.a)},
                          {"align_b", log_alignment(p.b)},
                          {"align_c", log_alignment(p.c)},
                          {"align_added", log_alignment(added)},
                          {"align_vector", log_alignment(vector)},
                          {"align_aux", log_alignment(aux)}});
}

bool measure_gemm(const std::string& key, Tuning::Choices& choices) {
  const std::map<std::string, int64_t> fields = key_fields(kWord, key);
  if (fields.empty()) return false;
  Case c(fields);
  const Tf32Guard tf32(fields.at("tf32") != 0);
  try {
    c.allocate();
  } catch (const OutOfMemoryError&) {
    log_info("tuning: no memory to time \"{}\"; it stays as cuBLASLt proposes", key);
    c.set_addresses();
    const std::vector<std::string> proposed = cublaslt_algorithms(c.product(), 1);
    choices[key] = choice_of({proposed.empty() ? "" : proposed.front()});
    return true;
  }
  measure(key, c, choices);
  current_stream().synchronize();
  return true;
}

bool is_gemm_choice(const std::string& key, const std::string& choice) {
  const std::map<std::string, int64_t> fields = key_fields(kWord, key);
  if (fields.empty() || !cublaslt_problem().empty()) return false;
  std::optional<Case> c;
  try {
    c.emplace(fields);
    c->set_addresses();
  } catch (const InternalError&) {
    return false;
  }
  if (choice == "own") return true;
  if (choice == "apart") return has_apart(c->product());
  const Tf32Guard tf32(fields.at("tf32") != 0);
  return choice.rfind(kFused, 0) == 0 && cublaslt_takes(c->product(), choice.substr(kFused.size()));
}

}  // namespace tessera::kernels::cuda
