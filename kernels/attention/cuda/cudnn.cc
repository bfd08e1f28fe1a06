#include "kernels/attention/cuda/cudnn.h"

#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/log.h"
#include "core/tensor.h"
#include "kernels/attention/cuda/cudnn_graph.h"

// [Note: Attention as a graph of cuDNN]
// cuDNN 9 has one operation for all of attention (CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR), but
// through 9.20 its attributes cannot say "causal". What cuDNN recognizes as flash attention
// since 9.0 is the graph of its parts: products, scale, a mask that compares generated row and
// column indices, the softmax spelled out. So that graph is described here, operation by operation,
// in the order of the formula; tensors in between are virtual and never reach memory.
//
// Its backward adds parts of dQ by atomics: it is not bitwise repeatable.

namespace tessera::kernels {

// Through 9.15.0 the backward of a graph without a padding mask reads past the last key of a tile:
// its gradients are NaN or wrong.
std::string cudnn_backward_problem(int64_t version, int64_t num_keys) {
  constexpr int64_t kMended = 91501, kTile = 128;
  if (version >= kMended || num_keys % kTile == 0) return {};
  return fmt::format(
      "cuDNN {}.{}.{} computes a wrong backward of {} keys, which is no multiple of {} (mended in "
      "9.15.1)",
      version / 10000, version / 100 % 100, version % 100, num_keys, kTile);
}

std::string cudnn_shape_problem(const AttentionShape& s) {
  if (s.window > 0) return fmt::format("cuDNN is not asked for a window of {} keys", s.window);
  if (s.is_capped()) return fmt::format("cuDNN is not asked for a soft-cap of {}", s.softcap);
  if (s.document_starts != nullptr) return "cuDNN is not asked for a mask of documents";
  if (s.alibi_slopes != nullptr) return "cuDNN is not asked for the position bias of ALiBi";
  if (s.dtype != kBF16 && s.dtype != kF16) {
    return fmt::format("cuDNN is asked for bf16 and f16, not for {}", name_of(s.dtype));
  }
  return {};
}

#if TESSERA_HAS_CUDNN

namespace {

using namespace cudnn;  // NOLINT(google-build-using-namespace)

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
  Graph g(s.dtype, kFirstVirtual);
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
  Graph g(s.dtype, kFirstVirtual);
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
  if (const std::string problem = cudnn_shape_problem(s); !problem.empty()) {
    log_once("info", fmt::format("attention: {}; own kernels compute it", problem));
    return false;
  }
  return s.scale > 0 && s.batch > 0 && s.num_queries > 0 &&
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
  return cudnn::library_problem();
}

int64_t cudnn_version() {
  return cudnn_problem().empty() ? static_cast<int64_t>(api().version()) : 0;
}

bool cudnn_takes(const AttentionFwd& a) {
  return takes_shape(a.shape) && is_whole(a.q, a.q_strides, a.shape) &&
         is_whole(a.k, a.k_strides, a.shape) && is_whole(a.v, a.v_strides, a.shape) &&
         is_whole(a.o, contiguous_strides(a.shape), a.shape);
}

bool cudnn_takes(const AttentionBwd& a) {
  return cudnn_takes(a, cudnn_problem().empty() ? cudnn_version() : CUDNN_VERSION);
}

bool cudnn_takes(const AttentionBwd& a, int64_t version) {
  if (a.dq == nullptr || a.dk == nullptr || a.dv == nullptr) return false;
  if (a.accumulate_dq || a.accumulate_dk || a.accumulate_dv) return false;
  const HeadStrides o_strides = contiguous_strides(a.shape);
  const std::string problem = cudnn_backward_problem(version, a.shape.num_keys);
  if (!problem.empty()) {
    static std::once_flag once;
    std::call_once(once, [&] { log_warning("attention: {}; own kernels compute it", problem); });
    return false;
  }
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
int64_t cudnn_version() {
  return 0;
}
bool cudnn_takes(const AttentionFwd&) {
  return false;
}
bool cudnn_takes(const AttentionBwd&) {
  return false;
}
bool cudnn_takes(const AttentionBwd&, int64_t) {
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
