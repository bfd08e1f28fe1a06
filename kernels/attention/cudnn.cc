#include "kernels/attention/cudnn.h"

#if __has_include(<cudnn.h>)
#include <cudnn.h>
#if CUDNN_VERSION >= 90600
#define TESSERA_HAS_CUDNN 1
#include <dlfcn.h>
#endif
#endif

#include <array>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/tensor.h"

// [Note: Attention as a graph of cuDNN]
// cuDNN 9 has one operation for all of attention (CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR), but
// through 9.20 its attributes cannot say "causal". What cuDNN recognizes as flash attention
// since 9.0 is the graph of its parts: products, scale, a mask that compares generated row and
// column indices, the softmax spelled out. So that graph is described here, operation by operation,
// in the order of the formula; tensors in between are virtual and never reach memory.
//
// Its backward adds parts of dQ by atomics: it is not bitwise repeatable.

namespace tessera::kernels {

#if TESSERA_HAS_CUDNN

namespace {

struct Api {
  decltype(&cudnnCreate) create;
  decltype(&cudnnSetStream) set_stream;
  decltype(&cudnnGetVersion) version;
  decltype(&cudnnGetLastErrorString) last_error;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor;
  decltype(&cudnnBackendSetAttribute) set_attribute;
  decltype(&cudnnBackendGetAttribute) get_attribute;
  decltype(&cudnnBackendFinalize) finalize;
  decltype(&cudnnBackendExecute) execute;
};

struct Library {
  Api api{};
  std::string problem;
};

template <class F>
void load(Library& library, void* handle, F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  if (function == nullptr) library.problem = std::string("cuDNN lacks ") + name;
}

Library open_library() {
  Library library;
  constexpr const char* kName = "libcudnn.so.9";
  void* handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  // Where the toolkit installs itself, often without telling the loader.
  if (handle == nullptr) {
    handle = dlopen((std::string("/usr/local/cuda/lib64/") + kName).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (handle == nullptr) {
    library.problem = std::string(kName) + " cannot be loaded";
    return library;
  }
  Api& api = library.api;
  load(library, handle, api.create, "cudnnCreate");
  load(library, handle, api.set_stream, "cudnnSetStream");
  load(library, handle, api.version, "cudnnGetVersion");
  load(library, handle, api.last_error, "cudnnGetLastErrorString");
  load(library, handle, api.create_descriptor, "cudnnBackendCreateDescriptor");
  load(library, handle, api.destroy_descriptor, "cudnnBackendDestroyDescriptor");
  load(library, handle, api.set_attribute, "cudnnBackendSetAttribute");
  load(library, handle, api.get_attribute, "cudnnBackendGetAttribute");
  load(library, handle, api.finalize, "cudnnBackendFinalize");
  load(library, handle, api.execute, "cudnnBackendExecute");
  constexpr size_t kOldest = 90600;  // which clears the sums of dQ itself
  if (library.problem.empty() && api.version() < kOldest)
    library.problem = fmt::format("cuDNN is {}, attention needs {}", api.version(), kOldest);
  return library;
}

// As long as the process: the driver may be gone before static objects are destroyed.
const Library& library() {
  static const Library& library = *new Library(open_library());
  return library;
}
const Api& api() {
  return library().api;
}

void check(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) [[likely]]
    return;
  std::array<char, 512> text{};
  api().last_error(text.data(), text.size());
  TESSERA_CHECK_AS(CudaError, false, "attention: {}: status {} {}", call, static_cast<int>(status),
                   text.data());
}

/// A descriptor of the backend API.
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    check(api().create_descriptor(type, &raw_), "cudnnBackendCreateDescriptor");
  }
  ~Descriptor() {
    if (raw_ != nullptr) api().destroy_descriptor(raw_);
  }
  Descriptor(Descriptor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Descriptor& operator=(Descriptor&&) = delete;

  cudnnBackendDescriptor_t raw() const { return raw_; }

  template <class T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                  const std::vector<T>& values) {
    check(api().set_attribute(raw_, name, type, static_cast<int64_t>(values.size()), values.data()),
          "cudnnBackendSetAttribute");
    return *this;
  }
  template <class T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                  const T& value) {
    check(api().set_attribute(raw_, name, type, 1, &value), "cudnnBackendSetAttribute");
    return *this;
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, value.raw_);
  }
  Descriptor& finalize() {
    check(api().finalize(raw_), "cudnnBackendFinalize");
    return *this;
  }

 private:
  cudnnBackendDescriptor_t raw_ = nullptr;
};

/// Ids of the tensors in memory, and of scalars that are passed by value.
enum Id : int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kLse,
  kDOut,
  kDq,
  kDk,
  kDv,
  kDqSums,
  kDelta,
  kScale,
  kMasked,
  kOne,
  kNumKeys,
  kNumQueries,
  kFirstVirtual = 100,
};

/// Extents and strides of [batch, head, row, column].
using Extents = std::array<int64_t, 4>;

Extents packed_strides(const Extents& extents) {
  return {extents[1] * extents[2] * extents[3], extents[2] * extents[3], extents[3], 1};
}

/// Operations in the order in which they are described.
class Graph {
 public:
  /// Index of a tensor of this graph.
  using Node = size_t;

  explicit Graph(const AttentionShape& s)
      : io_type_(s.dtype == kBF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF) {}

  cudnnDataType_t io_type() const { return io_type_; }
  const Extents& extents(Node x) const { return tensors_[x].extents; }

  Node tensor(int64_t id, const Extents& extents, const Extents& strides, cudnnDataType_t type,
              bool is_virtual = false, bool is_by_value = false) {
    constexpr int64_t kAlignment = 16;
    Descriptor d(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    d.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type)
        .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64,
             std::vector<int64_t>(extents.begin(), extents.end()))
        .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64,
             std::vector<int64_t>(strides.begin(), strides.end()))
        .set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id)
        .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kAlignment)
        .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_virtual)
        .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, is_by_value)
        .finalize();
    tensors_.push_back({std::move(d), extents});
    return tensors_.size() - 1;
  }
  Node scalar(int64_t id, cudnnDataType_t type) {
    return tensor(id, {1, 1, 1, 1}, {1, 1, 1, 1}, type, false, true);
  }
  Node between(const Extents& extents, const Extents& strides, cudnnDataType_t type) {
    return tensor(next_id_++, extents, strides, type, true);
  }
  Node between(const Extents& extents, cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    return between(extents, packed_strides(extents), type);
  }

  void multiply(Node a, Node b, Node c) {
    Descriptor matmul(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    matmul.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT).finalize();
    Descriptor operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    operation.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, tensors_[a].descriptor)
        .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, tensors_[b].descriptor)
        .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, tensors_[c].descriptor)
        .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, matmul);
    add(std::move(operation));
    parts_.push_back(std::move(matmul));
  }

  void pointwise(cudnnPointwiseMode_t mode, Node y, Node x,
                 cudnnDataType_t compute_type = CUDNN_DATA_FLOAT) {
    add_pointwise(mode, compute_type, y, {x}, -1);
  }
  void pointwise(cudnnPointwiseMode_t mode, Node y, Node x, Node b,
                 cudnnDataType_t compute_type = CUDNN_DATA_FLOAT) {
    add_pointwise(mode, compute_type, y, {x, b}, -1);
  }
  /// y = condition ? x : b
  void select(Node y, Node x, Node b, Node condition) {
    add_pointwise(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, y, {x, b, condition}, -1);
  }
  void index(Node y, Node x, int64_t axis) {
    add_pointwise(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, y, {x}, axis);
  }

  void reduce(cudnnReduceTensorOp_t op, Node y, Node x) {
    Descriptor reduction(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    reduction.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, op)
        .set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT)
        .finalize();
    Descriptor operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    operation.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, tensors_[x].descriptor)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, tensors_[y].descriptor)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, reduction);
    add(std::move(operation));
    parts_.push_back(std::move(reduction));
  }

  void reshape(Node y, Node x) {
    Descriptor operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    operation.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, tensors_[x].descriptor)
        .set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, tensors_[y].descriptor);
    add(std::move(operation));
  }

  /// The operation graph, not yet finalized.
  Descriptor operation_graph() const {
    std::vector<cudnnBackendDescriptor_t> raw;
    for (const Descriptor& operation : operations_) raw.push_back(operation.raw());
    Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw);
    return graph;
  }

 private:
  struct Tensor {
    Descriptor descriptor;
    Extents extents;
  };

  void add(Descriptor operation) { operations_.push_back(std::move(operation.finalize())); }

  void add_pointwise(cudnnPointwiseMode_t mode, cudnnDataType_t compute_type, Node y,
                     const std::vector<Node>& inputs, int64_t axis) {
    Descriptor pointwise(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    pointwise.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode)
        .set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, compute_type);
    if (axis >= 0) pointwise.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
    pointwise.finalize();
    constexpr std::array kInputs = {CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
                                    CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                                    CUDNN_ATTR_OPERATION_POINTWISE_TDESC};
    Descriptor operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, pointwise)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, tensors_[y].descriptor);
    for (size_t i = 0; i < inputs.size(); ++i)
      operation.set(kInputs[i], tensors_[inputs[i]].descriptor);
    add(std::move(operation));
    parts_.push_back(std::move(pointwise));
  }

  cudnnDataType_t io_type_;
  int64_t next_id_ = kFirstVirtual;
  std::vector<Tensor> tensors_;
  std::vector<Descriptor> operations_, parts_;
};

Extents query_extents(const AttentionShape& s) {
  return {s.batch, s.num_heads, s.num_queries, s.head_dim};
}
Extents key_extents(const AttentionShape& s) {
  return {s.batch, s.num_kv_heads, s.num_keys, s.head_dim};
}
Extents row_extents(const AttentionShape& s) {
  return {s.batch, s.num_heads, s.num_queries, 1};
}
Extents strides_of(const HeadStrides& x) {
  return {x.batch, x.head, x.time, 1};
}
Extents transposed(const Extents& x) {
  return {x[0], x[1], x[3], x[2]};
}
HeadStrides contiguous_strides(const AttentionShape& s) {
  return {s.num_queries * s.num_heads * s.head_dim, s.num_heads * s.head_dim, s.head_dim};
}

/// scale q k' of all pairs.
Graph::Node describe_logits(Graph& g, const AttentionShape& s, Graph::Node q, Graph::Node k,
                            Graph::Node scale) {
  const Extents pairs = {s.batch, s.num_heads, s.num_queries, s.num_keys};
  const Graph::Node products = g.between(pairs), logits = g.between(pairs);
  g.multiply(q, k, products);
  g.pointwise(CUDNN_POINTWISE_MUL, logits, products, scale);
  return logits;
}

/// `x` where the key is not behind the query, else the lowest number.
Graph::Node describe_mask(Graph& g, const AttentionShape& s, Graph::Node x) {
  if (!s.causal) return x;
  const Extents pairs = g.extents(x);
  Graph::Node row = g.between(pairs, CUDNN_DATA_INT32);
  const Graph::Node col = g.between(pairs, CUDNN_DATA_INT32);
  const Graph::Node is_visible = g.between(pairs, CUDNN_DATA_BOOLEAN), masked = g.between(pairs);
  g.index(row, x, 2);
  g.index(col, x, 3);
  if (s.num_keys != s.num_queries) {  // the queries are the last positions
    const Graph::Node moved = g.between(pairs, CUDNN_DATA_INT32),
                      position = g.between(pairs, CUDNN_DATA_INT32);
    g.pointwise(CUDNN_POINTWISE_ADD, moved, row, g.scalar(kNumKeys, CUDNN_DATA_INT32),
                CUDNN_DATA_INT32);
    g.pointwise(CUDNN_POINTWISE_SUB, position, moved, g.scalar(kNumQueries, CUDNN_DATA_INT32),
                CUDNN_DATA_INT32);
    row = position;
  }
  g.pointwise(CUDNN_POINTWISE_CMP_GE, is_visible, row, col, CUDNN_DATA_BOOLEAN);
  g.select(masked, x, g.scalar(kMasked, CUDNN_DATA_FLOAT), is_visible);
  return masked;
}

Graph describe(const AttentionFwd& a) {
  const AttentionShape& s = a.shape;
  Graph g(s);
  const Extents rows = row_extents(s);
  const Graph::Node q = g.tensor(kQ, query_extents(s), strides_of(a.q_strides), g.io_type());
  const Graph::Node k =
      g.tensor(kK, transposed(key_extents(s)), transposed(strides_of(a.k_strides)), g.io_type());
  const Graph::Node v = g.tensor(kV, key_extents(s), strides_of(a.v_strides), g.io_type());
  const Graph::Node o =
      g.tensor(kO, query_extents(s), strides_of(contiguous_strides(s)), g.io_type());
  const Graph::Node lse = g.tensor(kLse, rows, packed_strides(rows), CUDNN_DATA_FLOAT);
  const Graph::Node scale = g.scalar(kScale, CUDNN_DATA_FLOAT);

  const Graph::Node logits = describe_mask(g, s, describe_logits(g, s, q, k, scale));
  const Extents pairs = g.extents(logits);
  const Graph::Node maximum = g.between(rows), shifted = g.between(pairs),
                    exponentials = g.between(pairs), sum = g.between(rows), log = g.between(rows),
                    p = g.between(pairs, g.io_type());
  g.reduce(CUDNN_REDUCE_TENSOR_MAX, maximum, logits);
  g.pointwise(CUDNN_POINTWISE_SUB, shifted, logits, maximum);
  g.pointwise(CUDNN_POINTWISE_EXP, exponentials, shifted);
  g.reduce(CUDNN_REDUCE_TENSOR_ADD, sum, exponentials);
  g.pointwise(CUDNN_POINTWISE_LOG, log, sum);
  g.pointwise(CUDNN_POINTWISE_ADD, lse, maximum, log);
  g.pointwise(CUDNN_POINTWISE_DIV, p, exponentials, sum);
  g.multiply(p, v, o);
  return g;
}

/// x' p summed over the query heads that share a key/value head.
void describe_key_gradient(Graph& g, const AttentionShape& s, Graph::Node pairs, Graph::Node rows,
                           Graph::Node gradient) {
  const Extents extents = g.extents(pairs);
  const Extents strides = packed_strides(extents);
  const Graph::Node turned = g.between(transposed(extents), transposed(strides), g.io_type());
  g.reshape(turned, pairs);
  if (s.num_heads == s.num_kv_heads) return g.multiply(turned, rows, gradient);
  const Graph::Node of_each_head =
      g.between({s.batch, s.num_heads, s.num_keys, s.head_dim}, g.io_type());
  g.multiply(turned, rows, of_each_head);
  g.reduce(CUDNN_REDUCE_TENSOR_ADD, gradient, of_each_head);
}

Graph describe(const AttentionBwd& a) {
  const AttentionShape& s = a.shape;
  Graph g(s);
  const Extents queries = query_extents(s), rows = row_extents(s);
  const Extents o_strides = strides_of(contiguous_strides(s));
  const Graph::Node q = g.tensor(kQ, queries, strides_of(a.q_strides), g.io_type());
  const Graph::Node k =
      g.tensor(kK, transposed(key_extents(s)), transposed(strides_of(a.k_strides)), g.io_type());
  const Graph::Node v =
      g.tensor(kV, transposed(key_extents(s)), transposed(strides_of(a.v_strides)), g.io_type());
  const Graph::Node o = g.tensor(kO, queries, o_strides, g.io_type());
  const Graph::Node d_out = g.tensor(kDOut, queries, o_strides, g.io_type());
  const Graph::Node lse = g.tensor(kLse, rows, packed_strides(rows), CUDNN_DATA_FLOAT);
  const Graph::Node dq = g.tensor(kDq, queries, strides_of(a.dq_strides), g.io_type());
  const Graph::Node dk = g.tensor(kDk, key_extents(s), strides_of(a.dk_strides), g.io_type());
  const Graph::Node dv = g.tensor(kDv, key_extents(s), strides_of(a.dv_strides), g.io_type());
  const Graph::Node dq_sums = g.tensor(kDqSums, queries, packed_strides(queries), CUDNN_DATA_FLOAT);
  const Graph::Node delta = g.tensor(kDelta, rows, packed_strides(rows), CUDNN_DATA_FLOAT);
  const Graph::Node scale = g.scalar(kScale, CUDNN_DATA_FLOAT);

  // delta = rowsum(d_out o)
  const Graph::Node products = g.between(queries), sums = g.between(rows);
  g.pointwise(CUDNN_POINTWISE_MUL, products, d_out, o);
  g.reduce(CUDNN_REDUCE_TENSOR_ADD, sums, products);
  g.pointwise(CUDNN_POINTWISE_MUL, delta, sums, g.scalar(kOne, CUDNN_DATA_FLOAT));

  // P = exp(logits - lse), dV = P' d_out
  const Graph::Node logits = describe_logits(g, s, q, k, scale);
  const Extents pairs = g.extents(logits);
  const Graph::Node shifted = g.between(pairs), p = g.between(pairs);
  g.pointwise(CUDNN_POINTWISE_SUB, shifted, logits, lse);
  g.pointwise(CUDNN_POINTWISE_EXP, p, describe_mask(g, s, shifted));
  describe_key_gradient(g, s, p, d_out, dv);

  // dS = scale P (d_out V' - delta), dK = dS' Q, dQ = dS K
  const Graph::Node dp = g.between(pairs), difference = g.between(pairs),
                    unscaled = g.between(pairs), ds = g.between(pairs);
  g.multiply(d_out, v, dp);
  g.pointwise(CUDNN_POINTWISE_SUB, difference, dp, delta);
  g.pointwise(CUDNN_POINTWISE_MUL, unscaled, difference, p);
  g.pointwise(CUDNN_POINTWISE_MUL, ds, unscaled, scale);
  describe_key_gradient(g, s, ds, q, dk);
  const Graph::Node k_rows = g.between(key_extents(s), strides_of(a.k_strides), g.io_type());
  g.reshape(k_rows, k);
  g.multiply(ds, k_rows, dq_sums);
  g.pointwise(CUDNN_POINTWISE_IDENTITY, dq, dq_sums);
  return g;
}

/// A kernel chosen for one shape; without a plan cuDNN has none.
struct Plan {
  std::unique_ptr<Descriptor> descriptor;
  int64_t workspace_nbytes = 0;
};

/// The first configuration of the heuristics that can be finalized.
Plan make_plan(cudnnHandle_t handle, const Graph& graph) {
  Plan plan;
  try {
    Descriptor operations = graph.operation_graph();
    operations.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle).finalize();
    Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations)
        .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A)
        .finalize();
    constexpr int64_t kMaxChoices = 8;
    std::vector<Descriptor> choices;
    std::vector<cudnnBackendDescriptor_t> raw;
    for (int64_t i = 0; i < kMaxChoices; ++i) {
      choices.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
      raw.push_back(choices.back().raw());
    }
    int64_t count = 0;
    check(api().get_attribute(heuristics.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                              CUDNN_TYPE_BACKEND_DESCRIPTOR, kMaxChoices, &count, raw.data()),
          "cudnnBackendGetAttribute");
    for (int64_t i = 0; i < count; ++i) {
      auto descriptor = std::make_unique<Descriptor>(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      descriptor->set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle)
          .set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, choices[static_cast<size_t>(i)]);
      if (api().finalize(descriptor->raw()) != CUDNN_STATUS_SUCCESS) continue;
      int64_t num_values = 0;
      check(api().get_attribute(descriptor->raw(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                CUDNN_TYPE_INT64, 1, &num_values, &plan.workspace_nbytes),
            "cudnnBackendGetAttribute");
      plan.descriptor = std::move(descriptor);
      break;
    }
  } catch (const CudaError&) {
    plan.descriptor = nullptr;  // not a graph that cuDNN supports
  }
  return plan;
}

void append(std::vector<int64_t>& key, const HeadStrides& x) {
  key.insert(key.end(), {x.batch, x.time, x.head});
}
std::vector<int64_t> key_of(int device, bool is_backward, const AttentionShape& s) {
  return {device,      is_backward,    static_cast<int64_t>(s.dtype),
          s.batch,     s.num_queries,  s.num_keys,
          s.num_heads, s.num_kv_heads, s.head_dim,
          s.causal};
}

/// The handles and plans of the process, one of each a device and shape. A handle has one stream at
/// a time: the lock covers setting it and submitting.
class Plans {
 public:
  std::mutex& mutex() { return mutex_; }
  cudnnHandle_t handle(const Stream& s) {
    cudnnHandle_t& handle = handles_[s.device().index];
    if (handle == nullptr) check(api().create(&handle), "cudnnCreate");
    check(api().set_stream(handle, reinterpret_cast<cudaStream_t>(s.cuda())), "cudnnSetStream");
    return handle;
  }
  template <class Args>
  const Plan& plan(cudnnHandle_t handle, const std::vector<int64_t>& key, const Args& a) {
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
    return plans_.emplace(key, make_plan(handle, describe(a))).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<int, cudnnHandle_t> handles_;
  std::map<std::vector<int64_t>, Plan> plans_;
};

Plans& plans() {
  static Plans& plans = *new Plans;
  return plans;
}

/// What the graphs take by value. Lives while a plan is submitted.
struct Scalars {
  float scale, masked = std::numeric_limits<float>::lowest(), one = 1.0f;
  int32_t num_keys, num_queries;
};

using Pointers = std::vector<std::pair<int64_t, void*>>;

void execute(cudnnHandle_t handle, const Plan& plan, const AttentionShape& s, Pointers pointers,
             void* workspace) {
  Scalars scalars{.scale = static_cast<float>(s.scale),
                  .num_keys = static_cast<int32_t>(s.num_keys),
                  .num_queries = static_cast<int32_t>(s.num_queries)};
  pointers.emplace_back(kScale, &scalars.scale);
  if (s.causal) pointers.emplace_back(kMasked, &scalars.masked);
  if (s.causal && s.num_keys != s.num_queries) {
    pointers.emplace_back(kNumKeys, &scalars.num_keys);
    pointers.emplace_back(kNumQueries, &scalars.num_queries);
  }
  std::vector<int64_t> ids;
  std::vector<void*> data;
  for (const auto& [id, pointer] : pointers) {
    ids.push_back(id);
    data.push_back(id == kOne ? &scalars.one : pointer);
  }
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, ids)
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, data)
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace)
      .finalize();
  check(api().execute(handle, plan.descriptor->raw(), pack.raw()), "cudnnBackendExecute");
}

/// Bytes from the stream's allocator, in pieces that start at multiples of 256.
class Scratch {
 public:
  int64_t reserve(int64_t nbytes) {
    constexpr int64_t kAlignment = 256;
    const int64_t offset = nbytes_;
    nbytes_ += (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }
  void allocate() { memory_ = empty({std::max<int64_t>(1, nbytes_)}, kU8); }
  void* at(int64_t offset) const { return static_cast<uint8_t*>(memory_.raw_data()) + offset; }

 private:
  int64_t nbytes_ = 0;
  Tensor memory_;
};

bool is_whole(const void* data, const HeadStrides& x, const AttentionShape& s) {
  constexpr int64_t kVec = 8;
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && s.head_dim % kVec == 0 &&
         x.batch % kVec == 0 && x.time % kVec == 0 && x.head % kVec == 0;
}

bool takes_shape(const AttentionShape& s) {
  return (s.dtype == kBF16 || s.dtype == kF16) && s.document_starts == nullptr &&
         s.alibi_slopes == nullptr && s.scale > 0 && s.batch > 0 && s.num_queries > 0 &&
         s.num_keys <= std::numeric_limits<int32_t>::max();
}

template <class Args>
std::string describe_without_device(const Args& a) {
  if (!cudnn_problem().empty()) return cudnn_problem();
  try {
    describe(a).operation_graph().finalize();
  } catch (const CudaError& error) {
    return error.what();
  }
  return {};
}

}  // namespace

const std::string& cudnn_problem() {
  return library().problem;
}

bool cudnn_takes(const AttentionFwd& a) {
  return takes_shape(a.shape) && is_whole(a.q, a.q_strides, a.shape) &&
         is_whole(a.k, a.k_strides, a.shape) && is_whole(a.v, a.v_strides, a.shape) &&
         is_whole(a.o, contiguous_strides(a.shape), a.shape);
}

bool cudnn_takes(const AttentionBwd& a) {
  if (a.dq == nullptr || a.dk == nullptr || a.dv == nullptr) return false;
  if (a.accumulate_dq || a.accumulate_dk || a.accumulate_dv) return false;
  const HeadStrides o_strides = contiguous_strides(a.shape);
  return takes_shape(a.shape) && is_whole(a.q, a.q_strides, a.shape) &&
         is_whole(a.k, a.k_strides, a.shape) && is_whole(a.v, a.v_strides, a.shape) &&
         is_whole(a.dq, a.dq_strides, a.shape) && is_whole(a.dk, a.dk_strides, a.shape) &&
         is_whole(a.dv, a.dv_strides, a.shape) && is_whole(a.o, o_strides, a.shape) &&
         is_whole(a.d_out, o_strides, a.shape);
}

bool cudnn_attention_fwd(const Stream& s, const AttentionFwd& a) {
  const std::lock_guard lock(plans().mutex());
  const cudnnHandle_t handle = plans().handle(s);
  std::vector<int64_t> key = key_of(s.device().index, false, a.shape);
  for (const HeadStrides& x : {a.q_strides, a.k_strides, a.v_strides}) append(key, x);
  const Plan& plan = plans().plan(handle, key, a);
  if (plan.descriptor == nullptr) return false;
  if (s.is_observed()) s.declare("attention_fwd", a.cost());
  Scratch scratch;
  const int64_t workspace = scratch.reserve(plan.workspace_nbytes);
  scratch.allocate();
  execute(handle, plan, a.shape,
          {{kQ, const_cast<void*>(a.q)},
           {kK, const_cast<void*>(a.k)},
           {kV, const_cast<void*>(a.v)},
           {kO, a.o},
           {kLse, a.lse}},
          scratch.at(workspace));
  return true;
}

bool cudnn_attention_bwd(const Stream& s, const AttentionBwd& a) {
  const std::lock_guard lock(plans().mutex());
  const cudnnHandle_t handle = plans().handle(s);
  std::vector<int64_t> key = key_of(s.device().index, true, a.shape);
  for (const HeadStrides& x :
       {a.q_strides, a.k_strides, a.v_strides, a.dq_strides, a.dk_strides, a.dv_strides})
    append(key, x);
  const Plan& plan = plans().plan(handle, key, a);
  if (plan.descriptor == nullptr) return false;
  if (s.is_observed()) s.declare("attention_bwd", a.cost());
  const int64_t num_rows = a.shape.batch * a.shape.num_heads * a.shape.num_queries;
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  Scratch scratch;
  const int64_t dq_sums = scratch.reserve(num_rows * a.shape.head_dim * kFloat);
  const int64_t delta = scratch.reserve(num_rows * kFloat);
  const int64_t workspace = scratch.reserve(plan.workspace_nbytes);
  scratch.allocate();
  execute(handle, plan, a.shape,
          {{kQ, const_cast<void*>(a.q)},
           {kK, const_cast<void*>(a.k)},
           {kV, const_cast<void*>(a.v)},
           {kO, const_cast<void*>(a.o)},
           {kLse, const_cast<void*>(a.lse)},
           {kDOut, const_cast<void*>(a.d_out)},
           {kDq, a.dq},
           {kDk, a.dk},
           {kDv, a.dv},
           {kDqSums, scratch.at(dq_sums)},
           {kDelta, scratch.at(delta)},
           {kOne, nullptr}},
          scratch.at(workspace));
  return true;
}

std::string describe_to_cudnn(const AttentionFwd& a) {
  return describe_without_device(a);
}
std::string describe_to_cudnn(const AttentionBwd& a) {
  return describe_without_device(a);
}

#else

const std::string& cudnn_problem() {
  static const std::string problem = "this build has no cuDNN";
  return problem;
}
bool cudnn_takes(const AttentionFwd&) {
  return false;
}
bool cudnn_takes(const AttentionBwd&) {
  return false;
}
bool cudnn_attention_fwd(const Stream&, const AttentionFwd&) {
  return false;
}
bool cudnn_attention_bwd(const Stream&, const AttentionBwd&) {
  return false;
}
std::string describe_to_cudnn(const AttentionFwd&) {
  return cudnn_problem();
}
std::string describe_to_cudnn(const AttentionBwd&) {
  return cudnn_problem();
}

#endif

}  // namespace tessera::kernels
