#include "kernels/matmul/cuda/cublaslt.h"

#if __has_include(<cublasLt.h>) && !defined(TESSERA_NO_CUDA)
#define TESSERA_HAS_CUBLASLT 1
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#if !defined(TESSERA_SIMT)
#include <nvtx3/nvToolsExt.h>
#endif
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "core/check.h"
#include "core/log.h"
#include "core/runtime/cuda/library.h"
#include "kernels/matmul/backend.h"
#include "kernels/matmul/cuda/tune.h"

// [Note: Plans of cuBLASLt]
// A plan holds descriptors and an algorithm for everything that the choice depends on: types, shape,
// layout, epilogue and the alignment of the pointers. The algorithm is the one that the current Tuning
// has chosen, or the heuristic's first; the plan looks again when the Tuning has grown. Plans and the
// library's handles (one a device) live as long as the process: the driver may be gone before
// static objects are destroyed. A descriptor carries the pointers of bias and auxiliary output, so
// a lock covers setting them and submitting. Split-K partial sums are added in f32, in a fixed
// order: a product is bitwise repeatable on one kind of device.

namespace tessera::kernels::cuda {

#if TESSERA_HAS_CUBLASLT

namespace {

struct Api {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulAlgoCheck) algo_check;
  decltype(&cublasLtMatmul) matmul;
};

/// A range in profilers, as kernels of our own have.
struct NvtxRange {
#if !defined(TESSERA_SIMT)
  NvtxRange() {
    nvtxRangePushA("matmul");
  }
  ~NvtxRange() {
    nvtxRangePop();
  }
#endif
};

struct Library {
  Api api{};
  std::string problem;
};

#if defined(TESSERA_SIMT)
#define TESSERA_CUBLASLT_LOAD(field, name) library.api.field = &name
#else
template <class F>
void load(Library& library, void* handle, F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  if (function == nullptr) library.problem = std::string("cuBLASLt lacks ") + name;
}
#define TESSERA_CUBLASLT_LOAD(field, name) load(library, handle, library.api.field, #name)
#define TESSERA_CUBLASLT_STRING_(x) #x
#define TESSERA_CUBLASLT_STRING(x) TESSERA_CUBLASLT_STRING_(x)
#endif

Library open_library() {
  Library library;
  constexpr const char* kVariable = "TESSERA_CUBLASLT";
#if defined(TESSERA_SIMT)
  // The fake is part of the program; a file that is named is opened as ever.
  const char* file = std::getenv(kVariable);
  void* handle =
      file == nullptr ? &library : tessera::cuda::open_library(file, kVariable, &library.problem);
#else
  void* handle = tessera::cuda::open_library(
      "libcublasLt.so." TESSERA_CUBLASLT_STRING(CUBLAS_VER_MAJOR), kVariable, &library.problem);
#endif
  if (handle == nullptr) return library;
  TESSERA_CUBLASLT_LOAD(create, cublasLtCreate);
  TESSERA_CUBLASLT_LOAD(version, cublasLtGetVersion);
  TESSERA_CUBLASLT_LOAD(status_string, cublasLtGetStatusString);
  TESSERA_CUBLASLT_LOAD(desc_create, cublasLtMatmulDescCreate);
  TESSERA_CUBLASLT_LOAD(desc_set, cublasLtMatmulDescSetAttribute);
  TESSERA_CUBLASLT_LOAD(desc_destroy, cublasLtMatmulDescDestroy);
  TESSERA_CUBLASLT_LOAD(layout_create, cublasLtMatrixLayoutCreate);
  TESSERA_CUBLASLT_LOAD(layout_set, cublasLtMatrixLayoutSetAttribute);
  TESSERA_CUBLASLT_LOAD(layout_destroy, cublasLtMatrixLayoutDestroy);
  TESSERA_CUBLASLT_LOAD(preference_create, cublasLtMatmulPreferenceCreate);
  TESSERA_CUBLASLT_LOAD(preference_set, cublasLtMatmulPreferenceSetAttribute);
  TESSERA_CUBLASLT_LOAD(preference_destroy, cublasLtMatmulPreferenceDestroy);
  TESSERA_CUBLASLT_LOAD(heuristic, cublasLtMatmulAlgoGetHeuristic);
  TESSERA_CUBLASLT_LOAD(algo_check, cublasLtMatmulAlgoCheck);
  TESSERA_CUBLASLT_LOAD(matmul, cublasLtMatmul);
  return library;
}

const Library& library() {
  static const Library& library = *new Library(open_library());
  return library;
}
const Api& api() {
  return library().api;
}

void check(cublasStatus_t status, const char* call) {
  TESSERA_CHECK_AS(CudaError, status == CUBLAS_STATUS_SUCCESS, "matmul: {}: {} (status {})", call,
                   api().status_string(status), static_cast<int>(status));
}

cudaDataType_t type_of(DType dtype) {
  return dtype == kBF16 ? CUDA_R_16BF : dtype == kF16 ? CUDA_R_16F : CUDA_R_32F;
}

int current_device() {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  TESSERA_CHECK_AS(CudaError, error == cudaSuccess, "matmul: cudaGetDevice: {}",
                   cudaGetErrorString(error));
  return device;
}

/// What the choice of an algorithm depends on. Compared and hashed as words, so every field is one.
struct Key {
  int64_t device, tuning, flags, alignments, m, n, k, lda, ldb, ldc, ld_residual, num_batches,
      batch_stride_a, batch_stride_b, batch_stride_c;

  friend bool operator==(const Key&, const Key&) = default;
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    std::array<uint64_t, sizeof(Key) / sizeof(uint64_t)> words;
    static_assert(sizeof(words) == sizeof(Key));
    std::memcpy(words.data(), &key, sizeof(Key));
    uint64_t hash = 0;
    for (uint64_t word : words) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

struct Plan {
  bool is_supported = false;
  GemmWay way = GemmWay::kFused;
  uint64_t tuning_version = 0;  // of the current Tuning, when it was asked last
  size_t workspace_nbytes = 0;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
  cublasLtMatmulAlgo_t algo{};
};

constexpr size_t kMaxPlans = 4096;

struct State {
  std::mutex mutex;
  std::unordered_map<int, cublasLtHandle_t> handles;  // by device
  std::unordered_map<Key, Plan, KeyHash> plans;
  std::function<void(const Matmul&)> observer;
};

State& state() {
  static State& state = *new State;
  return state;
}

cublasLtHandle_t handle_of(State& state, int device) {
  cublasLtHandle_t& handle = state.handles[device];
  if (handle == nullptr) check(api().create(&handle), "cublasLtCreate");
  return handle;
}

cublasLtEpilogue_t epilogue_of(const Matmul& p) {
  if (p.row_sums != nullptr) return CUBLASLT_EPILOGUE_BGRADB;
  if (!p.activate) {
    return p.bias != nullptr ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
  if (p.pre_activation != nullptr) {
    return p.bias != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  }
  return p.bias != nullptr ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
}

/// The library adds to its product what lies in C.
bool has_beta(const Matmul& p) {
  return p.accumulate || p.residual != nullptr;
}
const void* added_to(const Matmul& p) {
  return p.residual != nullptr ? p.residual : p.c;
}

bool is_aligned(const void* data, uintptr_t alignment) {
  return reinterpret_cast<uintptr_t>(data) % alignment == 0;
}

/// The largest power of two up to 256 that divides the address: what the heuristic assumes.
uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data) | 256;
  return static_cast<uint32_t>(address & (~address + 1));
}

/// What the library's documentation excludes, before it is asked.
bool is_offered(const Matmul& p) {
  constexpr int64_t kMaxInt = INT32_MAX;
  if (p.dtype == kF64 || p.k == 0 || p.m == 0 || p.n == 0 || p.num_batches == 0) return false;
  if (std::max({p.m, p.n, p.k, p.num_batches}) > kMaxInt) return false;
  // Its bias has the type of the result and one row for all batches; vectors are read 16 bytes
  // wide.
  if (p.bias != nullptr && (p.bias_dtype != p.c_dtype || !is_aligned(p.bias, 16))) return false;
  if (p.activate && p.activation != Activation::kGeluTanh) return false;
  if (p.pre_activation != nullptr && (p.n % 8 != 0 || !is_aligned(p.pre_activation, 16))) {
    return false;
  }
  if (p.row_sums == nullptr) return true;
  return p.bias == nullptr && !p.activate && p.num_batches == 1 && is_aligned(p.row_sums, 16);
}

/// What an epilogue reads or writes: the bias, or the sums of rows; null for none.
const void* epilogue_vector(const Matmul& p) {
  return p.row_sums != nullptr ? p.row_sums : p.bias;
}
const void* epilogue_aux(const Matmul& p) {
  return p.activate ? p.pre_activation : nullptr;
}

Key key_of(const Matmul& p, int device, const Tuning* tuning) {
  const auto log_alignment = [](const void* data) {
    return static_cast<int64_t>(__builtin_ctz(alignment_of(data)));
  };
  const int64_t flags = static_cast<int64_t>(p.dtype) | static_cast<int64_t>(p.c_dtype) << 4 |
                        int64_t{p.trans_a} << 8 | int64_t{p.trans_b} << 9 |
                        int64_t{has_beta(p)} << 10 | int64_t{gemm_tf32()} << 11 |
                        static_cast<int64_t>(epilogue_of(p)) << 16;
  // The heuristic reads those of the epilogue's pointers too.
  const int64_t alignments = log_alignment(p.a) | log_alignment(p.b) << 8 |
                             log_alignment(p.c) << 16 | log_alignment(added_to(p)) << 24 |
                             log_alignment(epilogue_vector(p)) << 32 |
                             log_alignment(epilogue_aux(p)) << 40;
  return {device,
          tuning != nullptr ? static_cast<int64_t>(tuning->id()) : 0,
          flags,
          alignments,
          p.m,
          p.n,
          p.k,
          p.lda,
          p.ldb,
          p.ldc,
          p.residual != nullptr ? p.ld_residual : p.ldc,
          p.num_batches,
          p.batch_stride_a,
          p.batch_stride_b,
          p.batch_stride_c};
}

template <class T>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, T value) {
  check(api().desc_set(desc, attribute, &value, sizeof(T)), "cublasLtMatmulDescSetAttribute");
}
template <class T>
void set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, T value) {
  check(api().layout_set(layout, attribute, &value, sizeof(T)), "cublasLtMatrixLayoutSetAttribute");
}
template <class T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         T value) {
  check(api().preference_set(preference, attribute, &value, sizeof(T)),
        "cublasLtMatmulPreferenceSetAttribute");
}

/// A matrix stored as `rows` runs of `cols` elements, which the library sees as columns.
cublasLtMatrixLayout_t make_layout(const Matmul& p, DType dtype, int64_t rows, int64_t cols,
                                   int64_t ld, int64_t batch_stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(api().layout_create(&layout, type_of(dtype), static_cast<uint64_t>(cols),
                            static_cast<uint64_t>(rows), ld),
        "cublasLtMatrixLayoutCreate");
  if (p.num_batches > 1) {
    set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(p.num_batches));
    set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, batch_stride);
  }
  return layout;
}

void set_pointers(cublasLtMatmulDesc_t desc, const Matmul& p) {
  if (const void* vector = epilogue_vector(p); vector != nullptr) {
    set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector);
  }
  if (const void* aux = epilogue_aux(p); aux != nullptr) {
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
  }
}

void describe(Plan& plan, const Matmul& p) {
  const bool is_tf32 = p.dtype == kF32 && gemm_tf32();
  check(api().desc_create(&plan.desc, is_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                          CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  const auto operation = [](bool is_transposed) {
    return static_cast<int32_t>(is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  };
  set(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, operation(p.trans_b));
  set(plan.desc, CUBLASLT_MATMUL_DESC_TRANSB, operation(p.trans_a));
  set(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(epilogue_of(p)));
  if (epilogue_aux(p) != nullptr) set(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.n);
  set_pointers(plan.desc, p);
  plan.a = make_layout(p, p.dtype, p.trans_b ? p.n : p.k, p.trans_b ? p.k : p.n, p.ldb,
                       p.batch_stride_b);
  plan.b = make_layout(p, p.dtype, p.trans_a ? p.k : p.m, p.trans_a ? p.m : p.k, p.lda,
                       p.batch_stride_a);
  plan.c = make_layout(p, p.c_dtype, p.m, p.n, p.residual != nullptr ? p.ld_residual : p.ldc,
                       p.batch_stride_c);
  plan.d = make_layout(p, p.c_dtype, p.m, p.n, p.ldc, p.batch_stride_c);
}

/// What the heuristic offers, its favourite first.
std::vector<cublasLtMatmulHeuristicResult_t> ask_heuristic(const Plan& plan, const Matmul& p,
                                                           cublasLtHandle_t handle, int max_count) {
  cublasLtMatmulPreference_t preference = nullptr;
  check(api().preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
      static_cast<uint64_t>(kCublasLtMaxWorkspace));
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.b));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(added_to(p)));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.c));
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(max_count));
  int num_results = 0;
  const cublasStatus_t status =
      api().heuristic(handle, plan.desc, plan.a, plan.b, plan.c, plan.d, preference, max_count,
                      results.data(), &num_results);
  check(api().preference_destroy(preference), "cublasLtMatmulPreferenceDestroy");
  results.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<size_t>(num_results) : 0);
  std::erase_if(results, [](const cublasLtMatmulHeuristicResult_t& result) {
    return result.state != CUBLAS_STATUS_SUCCESS;
  });
  return results;
}

void choose_algorithm(Plan& plan, const Matmul& p, cublasLtHandle_t handle) {
  const auto results = ask_heuristic(plan, p, handle, 1);
  plan.is_supported = !results.empty();
  if (!plan.is_supported) return;
  plan.algo = results.front().algo;
  plan.workspace_nbytes = results.front().workspaceSize;
}

std::string text_of(const cublasLtMatmulAlgo_t& algo, size_t workspace_nbytes) {
  std::string text = fmt::format("{} ", workspace_nbytes);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&algo);
  for (size_t i = 0; i < sizeof algo; ++i) text += fmt::format("{:02x}", bytes[i]);
  return text;
}

/// What `text_of` has written; false for anything else.
bool read_algorithm(const std::string& text, cublasLtMatmulAlgo_t& algo, size_t& workspace_nbytes) {
  const char* const end = text.data() + text.size();
  const auto [blank, error] = std::from_chars(text.data(), end, workspace_nbytes);
  if (error != std::errc{} || end - blank != 1 + 2 * static_cast<std::ptrdiff_t>(sizeof algo) ||
      workspace_nbytes > static_cast<size_t>(kCublasLtMaxWorkspace)) {
    return false;
  }
  auto* bytes = reinterpret_cast<unsigned char*>(&algo);
  for (size_t i = 0; i < sizeof algo; ++i) {
    const char* const digits = blank + 1 + 2 * i;
    if (std::from_chars(digits, digits + 2, bytes[i], 16).ptr != digits + 2) return false;
  }
  return true;
}

/// The current Tuning's choice, if it has one. To be called when it has grown.
void apply_choice(Plan& plan, const Matmul& p, Tuning& tuning) {
  plan.tuning_version = tuning.version();
  if (!plan.is_supported) return;
  const std::string key = gemm_key(p), choice = tuning.find_or_want(key);
  if (choice.empty()) return;
  constexpr std::string_view kFused = "fused ";
  const bool is_fused = choice.rfind(kFused, 0) == 0;
  plan.way = is_fused ? GemmWay::kFused : choice == "apart" ? GemmWay::kApart : GemmWay::kOwn;
  if (!is_fused) return;
  TESSERA_CHECK_AS(InternalError,
                   read_algorithm(choice.substr(kFused.size()), plan.algo, plan.workspace_nbytes),
                   "matmul: the choice \"{}\" for \"{}\" is no algorithm", choice, key);
}

void destroy(const Plan& plan) {
  api().desc_destroy(plan.desc);
  for (cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.c, plan.d}) {
    api().layout_destroy(layout);
  }
}

/// To be called with the lock held.
Plan& find_plan(State& state, const Matmul& p, int device) {
  Tuning* tuning = Tuning::current();
  if (tuning != nullptr && !tuning->has_gemms()) tuning = nullptr;
  const Key key = key_of(p, device, tuning);
  auto found = state.plans.find(key);
  if (found == state.plans.end()) {
    if (state.plans.size() >= kMaxPlans) {  // shapes that never repeat: begin anew
      for (const auto& [old_key, old] : state.plans) destroy(old);
      state.plans.clear();
    }
    Plan plan;
    describe(plan, p);
    choose_algorithm(plan, p, handle_of(state, device));
    found = state.plans.emplace(key, plan).first;
  }
  Plan& plan = found->second;
  if (tuning != nullptr && plan.tuning_version != tuning->version()) apply_choice(plan, p, *tuning);
  return plan;
}

/// Calls `f` with a plan of its own for `p` and the library's handle, under the lock.
template <class F>
auto with_plan(const Matmul& p, const F& f) {
  const int device = current_device();
  const std::lock_guard lock(state().mutex);
  struct Held : Plan {
    ~Held() { destroy(*this); }
  } plan;
  describe(plan, p);
  return f(static_cast<Plan&>(plan), handle_of(state(), device));
}

cublasStatus_t submit(CUstream_st* stream, cublasLtHandle_t handle, const Plan& plan,
                      const Matmul& p) {
  const float alpha = 1, beta = has_beta(p) ? 1 : 0;
  return api().matmul(handle, plan.desc, &alpha, p.b, plan.a, p.a, plan.b, &beta, added_to(p),
                      plan.c, p.c, plan.d, &plan.algo, p.workspace,
                      static_cast<size_t>(p.workspace_nbytes), stream);
}

}  // namespace

const std::string& cublaslt_problem() {
  return library().problem;
}

bool cublaslt_supports(const Matmul& p) {
  if (!is_offered(p) || !library().problem.empty()) return false;
  const int device = current_device();
  const std::lock_guard lock(state().mutex);
  return find_plan(state(), p, device).is_supported;
}

GemmWay cublaslt_way(const Matmul& p) {
  const int device = current_device();
  const std::lock_guard lock(state().mutex);
  return find_plan(state(), p, device).way;
}

int64_t cublaslt_version() {
  return library().problem.empty() ? static_cast<int64_t>(api().version()) : 0;
}

std::vector<std::string> cublaslt_algorithms(const Matmul& p, int max_count) {
  if (!is_offered(p) || !library().problem.empty()) return {};
  return with_plan(p, [&](const Plan& plan, cublasLtHandle_t handle) {
    std::vector<std::string> texts;
    for (const auto& result : ask_heuristic(plan, p, handle, max_count))
      texts.push_back(text_of(result.algo, result.workspaceSize));
    return texts;
  });
}

bool cublaslt_takes(const Matmul& p, const std::string& algorithm) {
  if (!is_offered(p) || !library().problem.empty()) return false;
  return with_plan(p, [&](Plan& plan, cublasLtHandle_t handle) {
    cublasLtMatmulHeuristicResult_t result{};
    return read_algorithm(algorithm, plan.algo, plan.workspace_nbytes) &&
           api().algo_check(handle, plan.desc, plan.a, plan.b, plan.c, plan.d, &plan.algo,
                            &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= plan.workspace_nbytes;
  });
}

bool cublaslt_try(CUstream_st* stream, const Matmul& p, const std::string& algorithm) {
  return with_plan(p, [&](Plan& plan, cublasLtHandle_t handle) {
    return read_algorithm(algorithm, plan.algo, plan.workspace_nbytes) &&
           submit(stream, handle, plan, p) == CUBLAS_STATUS_SUCCESS;
  });
}

void tell_not_taken(const Matmul& p) {
  if (p.dtype == kF64 || p.k == 0) return;
  static std::atomic<bool> is_told = false;
  if (is_told.load(std::memory_order_relaxed) || is_told.exchange(true)) return;
  if (const std::string& problem = cublaslt_problem(); !problem.empty()) {
    log_warning("matmul: {}; own kernels multiply", problem);
    return;
  }
  log_info(
      "matmul: cuBLASLt does not take m {}, n {}, k {}, {} batches of {} into {}{}{}{}; own kernels "
      "compute this and others that it does not take",
      p.m, p.n, p.k, p.num_batches, name_of(p.dtype), name_of(p.c_dtype),
      p.bias != nullptr ? " with a bias" : "", p.activate ? " and an activation" : "",
      p.row_sums != nullptr ? " and sums of rows" : "");
}

int64_t cublaslt_workspace_nbytes(const Matmul& p) {
  if (!is_offered(p) || !library().problem.empty()) return 0;
  const int device = current_device();
  const std::lock_guard lock(state().mutex);
  return static_cast<int64_t>(find_plan(state(), p, device).workspace_nbytes);
}

void cublaslt_matmul(CUstream_st* stream, const Matmul& p) {
  const int device = current_device();
  const std::lock_guard lock(state().mutex);
  Plan& plan = find_plan(state(), p, device);
  const auto needed = static_cast<int64_t>(plan.workspace_nbytes);
  TESSERA_CHECK_AS(InternalError, p.workspace_nbytes >= needed,
                   "matmul: cuBLASLt needs {} bytes of workspace, got {}", needed,
                   p.workspace_nbytes);
  set_pointers(plan.desc, p);
  [[maybe_unused]] const NvtxRange range;
  const cublasStatus_t status = submit(stream, handle_of(state(), device), plan, p);
  TESSERA_CHECK_AS(CudaError, status == CUBLAS_STATUS_SUCCESS,
                   "matmul: cublasLtMatmul of m {}, n {}, k {}, {} batches of {} into {}: {} "
                   "(status {})",
                   p.m, p.n, p.k, p.num_batches, name_of(p.dtype), name_of(p.c_dtype),
                   api().status_string(status), static_cast<int>(status));
  if (state().observer) state().observer(p);
}

void observe_cublaslt(std::function<void(const Matmul&)> observer) {
  const std::lock_guard lock(state().mutex);
  state().observer = std::move(observer);
}

#else

const std::string& cublaslt_problem() {
  static const std::string problem = "this build has no cuBLASLt";
  return problem;
}
bool cublaslt_supports(const Matmul&) {
  return false;
}
GemmWay cublaslt_way(const Matmul&) {
  return GemmWay::kOwn;
}
int64_t cublaslt_version() {
  return 0;
}
std::vector<std::string> cublaslt_algorithms(const Matmul&, int) {
  return {};
}
bool cublaslt_takes(const Matmul&, const std::string&) {
  return false;
}
bool cublaslt_try(CUstream_st*, const Matmul&, const std::string&) {
  return false;
}
void tell_not_taken(const Matmul& p) {
  if (p.dtype == kF64 || p.k == 0) return;
  log_once("info", fmt::format("matmul: {}; own kernels multiply", cublaslt_problem()));
}
int64_t cublaslt_workspace_nbytes(const Matmul&) {
  return 0;
}
void cublaslt_matmul(CUstream_st*, const Matmul&) {
  TESSERA_UNIMPLEMENTED("matmul: {}", cublaslt_problem());
}
void observe_cublaslt(std::function<void(const Matmul&)>) {}

#endif

}  // namespace tessera::kernels::cuda
