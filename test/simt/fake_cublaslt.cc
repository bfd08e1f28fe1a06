#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "test/simt/fake_cuda.h"
#include "test/simt/include/cublasLt.h"

// cuBLASLt as its documentation describes it: column-major matrices, D = epilogue(alpha op(A) op(B)
// + beta C), everything in f32 with one rounding at the end. It has several algorithms
// (simt::GemmAlgorithm), which ask for a workspace and fill it with NaN, and refuses what does not fit
// together.

namespace {

using tessera::BFloat16;
using tessera::Float16;

constexpr uint64_t kMagic = 0x7465737365726121u;  // of an algorithm that the heuristic has given

float load(cudaDataType_t type, const void* data, int64_t i) {
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[i];
  if (type == CUDA_R_16F) return static_cast<float>(static_cast<const Float16*>(data)[i]);
  return static_cast<float>(static_cast<const BFloat16*>(data)[i]);
}

void store(cudaDataType_t type, void* data, int64_t i, float value) {
  if (type == CUDA_R_32F)
    static_cast<float*>(data)[i] = value;
  else if (type == CUDA_R_16F)
    static_cast<Float16*>(data)[i] = Float16(value);
  else
    static_cast<BFloat16*>(data)[i] = BFloat16(value);
}

int64_t size_of(cudaDataType_t type) {
  return type == CUDA_R_32F ? 4 : 2;
}

float gelu(float x) {
  return 0.5f * x * (1 + std::tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

}  // namespace

struct cublasLtContext {
  int device;
};

struct cublasLtMatmulDescOpaque {
  cublasComputeType_t compute_type = CUBLAS_COMPUTE_32F;
  int32_t trans_a = CUBLAS_OP_N, trans_b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;  // bias, or the destination of BGRADB
  void* aux = nullptr;
  int64_t aux_ld = 0;

  bool is_gelu() const { return (epilogue & CUBLASLT_EPILOGUE_GELU) != 0; }
  bool has_aux() const { return (epilogue & 128u) != 0; }
  bool has_bias() const { return (epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }
  bool has_bgradb() const { return epilogue == CUBLASLT_EPILOGUE_BGRADB; }
};

struct cublasLtMatrixLayoutOpaque {
  cudaDataType_t type;
  int64_t rows, cols, ld;
  int32_t num_batches = 1;
  int64_t batch_stride = 0;

  int64_t index(int64_t batch, int64_t row, int64_t col) const {
    return batch * batch_stride + col * ld + row;
  }
  int64_t nbytes() const {
    return (index(num_batches - 1, rows - 1, cols - 1) + 1) * size_of(type);
  }
};

struct cublasLtMatmulPreferenceOpaque {
  uint64_t max_workspace_nbytes = 0;
  uint32_t alignments[4] = {256, 256, 256, 256};  // of A, B, C, D
};

namespace {

using Desc = cublasLtMatmulDescOpaque;
using Layout = cublasLtMatrixLayoutOpaque;

/// Rounded to the 10 bits of fraction of TF32.
float to_tf32(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~uint32_t{0x1fff};
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

struct Operand {
  const void* data;
  Layout layout;
  bool is_transposed = false;

  int64_t rows() const { return is_transposed ? layout.cols : layout.rows; }
  int64_t cols() const { return is_transposed ? layout.rows : layout.cols; }
  float at(int64_t batch, int64_t row, int64_t col) const {
    const int64_t i = is_transposed ? layout.index(batch, col, row) : layout.index(batch, row, col);
    return load(layout.type, data, i);
  }
  /// As rows of `cols` elements (or, for columns, the other way) in f32.
  std::vector<float> values(int64_t batch, bool by_columns) const {
    std::vector<float> out(static_cast<size_t>(rows() * cols()));
    for (int64_t r = 0; r < rows(); ++r) {
      for (int64_t c = 0; c < cols(); ++c)
        out[static_cast<size_t>(by_columns ? c * rows() + r : r * cols() + c)] = at(batch, r, c);
    }
    return out;
  }
};

struct Product {
  Desc desc;
  float alpha, beta;
  Operand a, b, c;
  void* d;
  Layout d_layout;
  int order;
};

void compute(const Product& p) {
  const int64_t m = p.a.rows(), n = p.b.cols(), k = p.a.cols();
  for (int64_t batch = 0; batch < p.d_layout.num_batches; ++batch) {
    std::vector<float> a = p.a.values(batch, false), b = p.b.values(batch, true);
    if (p.desc.compute_type == CUBLAS_COMPUTE_32F_FAST_TF32) {
      std::transform(a.begin(), a.end(), a.begin(), to_tf32);
      std::transform(b.begin(), b.end(), b.begin(), to_tf32);
    }
    std::vector<float> results(static_cast<size_t>(m * n));
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t row = 0; row < m; ++row) {
        const float* x = a.data() + row * k;
        const float* y = b.data() + col * k;
        const int64_t run = int64_t{1} << p.order;
        float sum = 0;
        for (int64_t first = 0; first < k; first += run) {
          float part = 0;
          for (int64_t i = first; i < std::min(first + run, k); ++i) part += x[i] * y[i];
          sum += part;
        }
        float value = p.alpha * sum;
        if (p.beta != 0) value += p.beta * p.c.at(batch, row, col);
        if (p.desc.has_bias()) value += load(p.d_layout.type, p.desc.bias, row);
        results[static_cast<size_t>(col * m + row)] = value;
      }
    }
    // C may be D: all is read before the first is written.
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t row = 0; row < m; ++row) {
        const float value = results[static_cast<size_t>(col * m + row)];
        if (p.desc.has_aux()) store(p.d_layout.type, p.desc.aux, col * p.desc.aux_ld + row, value);
        store(p.d_layout.type, p.d, p.d_layout.index(batch, row, col),
              p.desc.is_gelu() ? gelu(value) : value);
      }
    }
    if (!p.desc.has_bgradb()) continue;
    for (int64_t col = 0; col < n; ++col) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += b[static_cast<size_t>(col * k + i)];
      store(p.d_layout.type, p.desc.bias, col, sum);
    }
  }
}

/// What does not fit together, or empty.
std::string find_mistake(const Desc& desc, const Operand& a, const Operand& b, const Operand& c,
                         const Layout& d) {
  if (a.cols() != b.rows() || a.rows() != d.rows || b.cols() != d.cols)
    return "the shapes do not fit";
  if (c.layout.rows != d.rows || c.layout.cols != d.cols || c.layout.type != d.type)
    return "C is not like D";
  if (a.layout.type != b.layout.type) return "A and B are of different types";
  if (a.layout.type == CUDA_R_32F && d.type != CUDA_R_32F) return "f32 into a narrower type";
  for (const Layout* layout : {&a.layout, &b.layout, &c.layout, &d}) {
    if (layout->ld < layout->rows) return "a leading dimension is shorter than a column";
    if (layout->num_batches != d.num_batches) return "the numbers of batches differ";
  }
  if (desc.has_aux() && (desc.aux_ld < d.rows || desc.aux_ld % 8 != 0))
    return "the leading dimension of the auxiliary output";
  if (desc.has_bgradb() && d.num_batches != 1) return "BGRADB in batches";
  return "";
}

/// An algorithm for pointers of no less than the alignments that the heuristic was told, or read from
/// the descriptor: of A, B, C, D, bias and auxiliary output.
struct Algorithm {
  uint64_t magic;  // kMagic
  uint32_t alignments[6];
  int32_t index;  // in the library's list
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

uint32_t alignment_of(const void* data) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data) | 256;
  return static_cast<uint32_t>(address & (~address + 1));
}

template <class T>
bool set(T& field, const void* value, size_t nbytes) {
  if (nbytes != sizeof(T)) return false;
  std::memcpy(&field, value, nbytes);
  return true;
}

/// The library as a test has set it.
struct Library {
  std::mutex mutex;
  std::vector<simt::GemmAlgorithm> algorithms = {{}};
  size_t version = 130100;
  std::vector<int> used;
};
Library& library() {
  static auto* library = new Library;
  return *library;
}

bool has_epilogue(const Desc& desc) {
  return desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT && desc.epilogue != CUBLASLT_EPILOGUE_BIAS;
}

/// Whether the algorithm computes such a product at all.
bool takes(const simt::GemmAlgorithm& algorithm, const Desc& desc, const Layout& a,
           const uint32_t* alignments) {
  return (algorithm.takes_f32 || a.type != CUDA_R_32F) &&
         (algorithm.takes_epilogues || !has_epilogue(desc)) &&
         std::all_of(alignments, alignments + 4,
                     [&](uint32_t x) { return x >= algorithm.min_alignment; });
}

cublasStatus_t status_of(bool is_valid) {
  return is_valid ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

}  // namespace

void simt::set_gemm_algorithms(std::vector<GemmAlgorithm> algorithms) {
  const std::lock_guard lock(library().mutex);
  library().algorithms = std::move(algorithms);
}
void simt::set_cublaslt_version(size_t version) {
  const std::lock_guard lock(library().mutex);
  library().version = version;
}
std::vector<int> simt::take_gemm_algorithms() {
  const std::lock_guard lock(library().mutex);
  return std::exchange(library().used, {});
}

extern "C" {

const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "?";
}

size_t cublasLtGetVersion(void) {
  const std::lock_guard lock(library().mutex);
  return library().version;
}

// Handles live as long as the process, as the caller's do: they are no leaks.
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  cudaGetDevice(&(*handle)->device);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc,
                                        cublasComputeType_t compute_type, cudaDataType_t scale) {
  *desc = new Desc{.compute_type = compute_type};
  return status_of(scale == CUDA_R_32F);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t nbytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return status_of(set(desc->trans_a, value, nbytes));
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return status_of(set(desc->trans_b, value, nbytes));
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return status_of(set(desc->epilogue, value, nbytes));
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return status_of(set(desc->bias, value, nbytes));
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return status_of(set(desc->aux, value, nbytes));
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return status_of(set(desc->aux_ld, value, nbytes));
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete desc;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  *layout = new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(cols), ld};
  return status_of(rows > 0 && cols > 0);
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t nbytes) {
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
    return status_of(set(layout->num_batches, value, nbytes));
  return status_of(set(layout->batch_stride, value, nbytes));
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t nbytes) {
  if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
    return status_of(set(preference->max_workspace_nbytes, value, nbytes));
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return status_of(set(preference->alignments[0], value, nbytes));
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return status_of(set(preference->alignments[1], value, nbytes));
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return status_of(set(preference->alignments[2], value, nbytes));
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return status_of(set(preference->alignments[3], value, nbytes));
    default:
      return status_of(nbytes == sizeof(uint32_t));
  }
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
    int max_results, cublasLtMatmulHeuristicResult_t* results, int* num_results) {
  const std::string mistake =
      find_mistake(*desc, {nullptr, *a, desc->trans_a == CUBLAS_OP_T},
                   {nullptr, *b, desc->trans_b == CUBLAS_OP_T}, {nullptr, *c}, *d);
  *num_results = 0;
  if (!mistake.empty() || max_results < 1) return CUBLAS_STATUS_NOT_SUPPORTED;
  Algorithm algorithm{kMagic, {}, 0};
  std::copy_n(preference->alignments, 4, algorithm.alignments);
  algorithm.alignments[4] = alignment_of(desc->bias);
  algorithm.alignments[5] = alignment_of(desc->aux);
  const std::lock_guard lock(library().mutex);
  for (const simt::GemmAlgorithm& x : library().algorithms) {
    if (*num_results < max_results && x.workspace_nbytes <= preference->max_workspace_nbytes &&
        takes(x, *desc, *a, algorithm.alignments)) {
      cublasLtMatmulAlgo_t algo{};
      std::memcpy(&algo, &algorithm, sizeof algorithm);
      results[(*num_results)++] = {algo, x.workspace_nbytes, CUBLAS_STATUS_SUCCESS};
    }
    ++algorithm.index;
  }
  return *num_results > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
  Algorithm algorithm{};
  std::memcpy(&algorithm, algo, sizeof algorithm);
  const std::lock_guard lock(library().mutex);
  const auto index = static_cast<size_t>(algorithm.index);
  if (algorithm.magic != kMagic || index >= library().algorithms.size())
    return CUBLAS_STATUS_INVALID_VALUE;
  const simt::GemmAlgorithm& x = library().algorithms[index];
  if (!takes(x, *desc, *a, algorithm.alignments)) return CUBLAS_STATUS_NOT_SUPPORTED;
  *result = {*algo, x.workspace_nbytes, CUBLAS_STATUS_SUCCESS};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_nbytes, cudaStream_t stream) {
  Algorithm algorithm{};
  if (algo != nullptr) std::memcpy(&algorithm, algo, sizeof algorithm);
  simt::GemmAlgorithm chosen;
  std::string mistake;
  {
    const std::lock_guard lock(library().mutex);
    const auto index = static_cast<size_t>(algorithm.index);
    if (algorithm.magic != kMagic || index >= library().algorithms.size())
      mistake = "an algorithm of nobody";
    else
      chosen = library().algorithms[index];
  }
  if (mistake.empty() && !takes(chosen, *desc, *a_layout, algorithm.alignments))
    mistake = "an algorithm that does not take this";
  if (mistake.empty() && workspace_nbytes < chosen.workspace_nbytes)
    mistake = "less workspace than the algorithm needs";
  if (mistake.empty() && chosen.fails) return CUBLAS_STATUS_NOT_SUPPORTED;
  const Product p{*desc,
                  *static_cast<const float*>(alpha),
                  *static_cast<const float*>(beta),
                  {a, *a_layout, desc->trans_a == CUBLAS_OP_T},
                  {b, *b_layout, desc->trans_b == CUBLAS_OP_T},
                  {c, *c_layout},
                  d,
                  *d_layout,
                  chosen.order};
  if (mistake.empty()) mistake = find_mistake(p.desc, p.a, p.b, p.c, p.d_layout);
  const void* const pointers[] = {a, b, c, d, desc->bias, desc->aux};
  for (int i = 0; i < 6 && mistake.empty(); ++i) {
    if (alignment_of(pointers[i]) < algorithm.alignments[i])
      mistake = "a pointer of less alignment than the algorithm was chosen for";
  }
  if (stream != nullptr && simt::device_of(stream) != handle->device)
    mistake = "the stream is of another device than the handle";
  if (!mistake.empty()) {
    simt::report_mistake("cublasLtMatmul: " + mistake);
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  std::vector<simt::Range> ranges = {{a, a_layout->nbytes(), false},
                                     {b, b_layout->nbytes(), false},
                                     {d, d_layout->nbytes(), true}};
  const int64_t item = size_of(d_layout->type);
  if (p.beta != 0) ranges.push_back({c, c_layout->nbytes(), false});
  if (desc->has_bias()) ranges.push_back({desc->bias, d_layout->rows * item, false});
  if (desc->has_bgradb()) ranges.push_back({desc->bias, d_layout->cols * item, true});
  if (desc->has_aux()) {
    const int64_t numel = desc->aux_ld * (d_layout->cols - 1) + d_layout->rows;
    ranges.push_back({desc->aux, numel * item, true});
  }
  if (workspace_nbytes > 0)
    ranges.push_back({workspace, static_cast<int64_t>(workspace_nbytes), true});
  const double ms = chosen.ms + (has_epilogue(*desc) ? chosen.epilogue_ms : 0) +
                    chosen.device_ms * handle->device;
  const auto work = [p, workspace, chosen, ms] {
    if (chosen.workspace_nbytes > 0) std::memset(workspace, 0xff, chosen.workspace_nbytes);
    compute(p);
    simt::take_time(ms);
  };
  {
    const std::lock_guard lock(library().mutex);
    library().used.push_back(algorithm.index);
  }
  return simt::submit(stream, "cublasLtMatmul", ranges, work) == cudaSuccess
             ? CUBLAS_STATUS_SUCCESS
             : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
