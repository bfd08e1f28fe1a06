#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "test/simt/fake_cuda.h"
#include "test/simt/include/cudnn.h"

// cuDNN's backend API: descriptors of a graph of operations, which a plan computes on the host,
// operation by operation in f32, each result rounded to the type of its tensor. It refuses what does not
// fit together: attributes of a finalized descriptor, descriptors that are not finalized, results that
// nobody or two operations write, shapes that do not go together, types of the wrong size.
//
// Old versions have the faults that the real ones are known for (simt::CudnnOptions::version):
//   before 9.6     the sums of dQ are added to what lies in their memory
//   before 9.15.1  the gradients of keys off tiles of 128 are NaN

namespace {

using tessera::BFloat16;
using tessera::Float16;
using Extents = std::array<int64_t, 4>;

constexpr int64_t kWorkspaceNbytes = 1024;

thread_local std::string last_error;

cudnnStatus_t refuse(cudnnStatus_t status, std::string why) {
  last_error = std::move(why);
  return status;
}

struct Tensor {
  int64_t id = 0;
  cudnnDataType_t type{};
  Extents extents{}, strides{};
  bool is_virtual = false, is_by_value = false;

  int64_t index(const Extents& at) const {
    int64_t index = 0;
    for (size_t d = 0; d < 4; ++d) index += at[d] * strides[d];
    return index;
  }
  int64_t span() const {
    int64_t last = 0;
    for (size_t d = 0; d < 4; ++d) last += (extents[d] - 1) * strides[d];
    return last + 1;
  }
  int64_t item() const {
    return type == CUDNN_DATA_BOOLEAN                               ? 1
           : type == CUDNN_DATA_BFLOAT16 || type == CUDNN_DATA_HALF ? 2
                                                                    : 4;
  }
};

enum class Kind { kMatmul, kPointwise, kReduce, kReshape };

struct Operation {
  Kind kind{};
  std::vector<Tensor> inputs;
  Tensor output;
  int mode = 0;
  int64_t axis = 0;
};

struct Graph {
  std::vector<Operation> operations;

  bool is_backward() const {
    return std::any_of(operations.begin(), operations.end(),
                       [](const Operation& op) { return op.kind == Kind::kReshape; });
  }
};

/// What an application has set, and what it stands for once it is finalized.
struct Descriptor {
  cudnnBackendDescriptorType_t type{};
  std::map<int, std::pair<cudnnBackendAttributeType_t, std::vector<char>>> attributes;
  std::map<int, std::vector<std::shared_ptr<const Descriptor>>> parts;
  bool is_finalized = false;
  Tensor tensor;
  Operation operation;
  Graph graph;
  int config = 0;

  template <class T>
  std::vector<T> values(int name) const {
    const auto found = attributes.find(name);
    if (found == attributes.end()) return {};
    std::vector<T> out(found->second.second.size() / sizeof(T));
    std::memcpy(out.data(), found->second.second.data(), out.size() * sizeof(T));
    return out;
  }
  template <class T>
  T value(int name, T otherwise = {}) const {
    const auto found = attributes.find(name);
    if (found == attributes.end() || found->second.second.size() < sizeof(T)) return otherwise;
    std::memcpy(&otherwise, found->second.second.data(), sizeof(T));
    return otherwise;
  }
  const Descriptor* part(int name) const {
    const auto found = parts.find(name);
    return found == parts.end() ? nullptr : found->second.front().get();
  }
};

using Handle = std::shared_ptr<Descriptor>;
Handle& of(cudnnBackendDescriptor_t raw) {
  return *static_cast<Handle*>(raw);
}

struct Library {
  std::mutex mutex;
  simt::CudnnOptions options;
};
Library& library() {
  static auto* library = new Library;
  return *library;
}
simt::CudnnOptions options() {
  const std::lock_guard lock(library().mutex);
  return library().options;
}

size_t size_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return 8;
    case CUDNN_TYPE_BOOLEAN:
      return 1;
    default:
      return 4;
  }
}

// ----- what is finalized

std::string finish_tensor(Descriptor& d) {
  const auto dims = d.values<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS),
             strides = d.values<int64_t>(CUDNN_ATTR_TENSOR_STRIDES);
  if (dims.size() != 4 || strides.size() != 4) return "a tensor without four dimensions";
  if (d.attributes.count(CUDNN_ATTR_TENSOR_UNIQUE_ID) == 0) return "a tensor without an id";
  if (d.value<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT) % 16 != 0) return "a tensor's alignment";
  Tensor& t = d.tensor;
  std::copy_n(dims.begin(), 4, t.extents.begin());
  std::copy_n(strides.begin(), 4, t.strides.begin());
  if (std::any_of(dims.begin(), dims.end(), [](int64_t x) { return x < 1; }))
    return "a tensor without elements";
  t.id = d.value<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
  t.type = d.value<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE);
  t.is_virtual = d.value<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL);
  t.is_by_value = d.value<bool>(CUDNN_ATTR_TENSOR_IS_BY_VALUE);
  return t.is_virtual && t.is_by_value ? "a virtual tensor passed by value" : "";
}

bool is_multiple(const Extents& large, const Extents& small) {
  for (size_t d = 0; d < 4; ++d) {
    if (large[d] % small[d] != 0) return false;
  }
  return true;
}

std::string finish_operation(Descriptor& d, Kind kind, const std::vector<int>& inputs, int output,
                             int what) {
  Operation& op = d.operation;
  op.kind = kind;
  for (const int name : inputs) {
    if (const Descriptor* part = d.part(name)) op.inputs.push_back(part->tensor);
  }
  if (d.part(output) == nullptr || op.inputs.empty()) return "an operation without tensors";
  op.output = d.part(output)->tensor;
  const Descriptor* const math = what != 0 ? d.part(what) : nullptr;
  if (what != 0 && math == nullptr) return "an operation that does not say which";
  const Extents& y = op.output.extents;
  switch (kind) {
    case Kind::kMatmul: {
      if (op.inputs.size() != 2) return "a product of one tensor";
      const Extents &a = op.inputs[0].extents, &b = op.inputs[1].extents;
      if (a[3] != b[2] || y[2] != a[2] || y[3] != b[3] || y[0] != a[0] || y[0] != b[0] ||
          y[1] % a[1] != 0 || y[1] % b[1] != 0)
        return "shapes of a product";
      break;
    }
    case Kind::kPointwise:
      op.mode = math->value<int>(CUDNN_ATTR_POINTWISE_MODE);
      op.axis = math->value<int64_t>(CUDNN_ATTR_POINTWISE_AXIS);
      for (const Tensor& x : op.inputs) {
        if (!is_multiple(y, x.extents)) return "shapes of a pointwise operation";
      }
      break;
    case Kind::kReduce:
      op.mode = math->value<int>(CUDNN_ATTR_REDUCTION_OPERATOR);
      if (!is_multiple(op.inputs[0].extents, y)) return "shapes of a reduction";
      break;
    case Kind::kReshape:
      if (op.inputs[0].span() != op.output.span()) return "sizes of a reshape";
  }
  return "";
}

std::string finish_graph(Descriptor& d) {
  std::set<int64_t> written;
  for (const auto& part : d.parts[CUDNN_ATTR_OPERATIONGRAPH_OPS]) {
    const Operation& op = part->operation;
    for (const Tensor& x : op.inputs) {
      if (x.is_virtual && written.count(x.id) == 0) return "a result is used before it is there";
    }
    if (!written.insert(op.output.id).second) return "two operations write one tensor";
    if (op.output.is_by_value) return "an operation writes a scalar";
    d.graph.operations.push_back(op);
  }
  return d.graph.operations.empty() ? "a graph without operations" : "";
}

std::string finish(Descriptor& d) {
  switch (d.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
      return finish_tensor(d);
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
      return finish_operation(
          d, Kind::kMatmul, {CUDNN_ATTR_OPERATION_MATMUL_ADESC, CUDNN_ATTR_OPERATION_MATMUL_BDESC},
          CUDNN_ATTR_OPERATION_MATMUL_CDESC, CUDNN_ATTR_OPERATION_MATMUL_DESC);
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
      return finish_operation(
          d, Kind::kPointwise,
          {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
           CUDNN_ATTR_OPERATION_POINTWISE_TDESC},
          CUDNN_ATTR_OPERATION_POINTWISE_YDESC, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
      return finish_operation(d, Kind::kReduce, {CUDNN_ATTR_OPERATION_REDUCTION_XDESC},
                              CUDNN_ATTR_OPERATION_REDUCTION_YDESC,
                              CUDNN_ATTR_OPERATION_REDUCTION_DESC);
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
      return finish_operation(d, Kind::kReshape, {CUDNN_ATTR_OPERATION_RESHAPE_XDESC},
                              CUDNN_ATTR_OPERATION_RESHAPE_YDESC, 0);
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
      return finish_graph(d);
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR: {
      const Descriptor* const graph = d.part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
      if (graph == nullptr) return "heuristics without a graph";
      if (graph->attributes.count(CUDNN_ATTR_OPERATIONGRAPH_HANDLE) == 0)
        return "a graph without a handle";
      d.graph = graph->graph;
      return "";
    }
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: {
      const Descriptor* const config = d.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
      if (config == nullptr) return "a plan without a configuration";
      if (config->config < options().num_refused) return "a configuration that does not compile";
      d.graph = config->graph;
      return "";
    }
    default:
      return "";
  }
}

// ----- the graph on the host

float round_to(cudnnDataType_t type, float value) {
  switch (type) {
    case CUDNN_DATA_BFLOAT16:
      return static_cast<float>(BFloat16(value));
    case CUDNN_DATA_HALF:
      return static_cast<float>(Float16(value));
    default:
      return value;
  }
}

float load(cudnnDataType_t type, const void* data, int64_t i) {
  switch (type) {
    case CUDNN_DATA_BFLOAT16:
      return static_cast<float>(static_cast<const BFloat16*>(data)[i]);
    case CUDNN_DATA_HALF:
      return static_cast<float>(static_cast<const Float16*>(data)[i]);
    case CUDNN_DATA_INT32:
      return static_cast<float>(static_cast<const int32_t*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

void store(cudnnDataType_t type, void* data, int64_t i, float value) {
  if (type == CUDNN_DATA_BFLOAT16)
    static_cast<BFloat16*>(data)[i] = BFloat16(value);
  else if (type == CUDNN_DATA_HALF)
    static_cast<Float16*>(data)[i] = Float16(value);
  else
    static_cast<float*>(data)[i] = value;
}

template <class F>
void for_each(const Extents& extents, const F& f) {
  Extents i{};
  for (i[0] = 0; i[0] < extents[0]; ++i[0])
    for (i[1] = 0; i[1] < extents[1]; ++i[1])
      for (i[2] = 0; i[2] < extents[2]; ++i[2])
        for (i[3] = 0; i[3] < extents[3]; ++i[3]) f(i);
}

/// The element of a smaller tensor that stands for element `i` of one of `extents`.
Extents scaled(const Extents& i, const Extents& extents, const Extents& small) {
  Extents out;
  for (size_t d = 0; d < 4; ++d) out[d] = i[d] / (extents[d] / small[d]);
  return out;
}

/// Values by id, at the places that the tensor's strides say.
class Run {
 public:
  Run(const std::map<int64_t, void*>& pointers, const std::map<int64_t, float>& scalars)
      : pointers_(pointers), scalars_(scalars) {}

  void compute(const Operation& op, bool adds_to_memory) {
    std::vector<float> out(static_cast<size_t>(op.output.span()), 0.0f);
    const auto at = [&](const Extents& i) -> float& {
      return out[static_cast<size_t>(op.output.index(i))];
    };
    const Extents& y = op.output.extents;
    switch (op.kind) {
      case Kind::kMatmul: {
        const Tensor &a = op.inputs[0], &b = op.inputs[1];
        const std::vector<float>&x = values(a), &w = values(b);
        for_each(y, [&](const Extents& i) {
          Extents p = {i[0], i[1] / (y[1] / a.extents[1]), i[2], 0};
          Extents q = {i[0], i[1] / (y[1] / b.extents[1]), 0, i[3]};
          float sum = 0;
          for (p[3] = q[2] = 0; p[3] < a.extents[3]; ++p[3], ++q[2]) {
            sum += x[static_cast<size_t>(a.index(p))] * w[static_cast<size_t>(b.index(q))];
          }
          at(i) = sum;
        });
        if (adds_to_memory && !op.output.is_virtual && op.output.type == CUDNN_DATA_FLOAT) {
          for_each(y, [&](const Extents& i) {
            at(i) += load(CUDNN_DATA_FLOAT, pointers_.at(op.output.id), op.output.index(i));
          });
        }
        break;
      }
      case Kind::kPointwise:
        for_each(y, [&](const Extents& i) { at(i) = pointwise(op, i); });
        break;
      case Kind::kReduce: {
        const Tensor& x = op.inputs[0];
        const bool is_max = op.mode == CUDNN_REDUCE_TENSOR_MAX;
        const std::vector<float>& in = values(x);
        if (is_max) std::fill(out.begin(), out.end(), -std::numeric_limits<float>::infinity());
        for_each(x.extents, [&](const Extents& i) {
          float& sum = at(scaled(i, x.extents, y));
          const float value = in[static_cast<size_t>(x.index(i))];
          sum = is_max ? std::max(sum, value) : sum + value;
        });
        break;
      }
      case Kind::kReshape:  // the same memory, seen otherwise
        out = values(op.inputs[0]);
    }
    for (float& value : out) value = round_to(op.output.type, value);
    if (!op.output.is_virtual) {
      for_each(y, [&](const Extents& i) {
        store(op.output.type, pointers_.at(op.output.id), op.output.index(i), at(i));
      });
    }
    values_[op.output.id] = std::move(out);
  }

 private:
  const std::vector<float>& values(const Tensor& t) {
    const auto found = values_.find(t.id);
    if (found != values_.end()) return found->second;
    std::vector<float>& out = values_[t.id];
    out.assign(static_cast<size_t>(t.span()), 0.0f);
    if (t.is_by_value) {
      out[0] = scalars_.at(t.id);
    } else {
      for_each(t.extents, [&](const Extents& i) {
        const int64_t place = t.index(i);
        out[static_cast<size_t>(place)] = load(t.type, pointers_.at(t.id), place);
      });
    }
    return out;
  }

  float pointwise(const Operation& op, const Extents& i) {
    std::array<float, 3> x{};
    for (size_t k = 0; k < op.inputs.size(); ++k) {
      const Tensor& t = op.inputs[k];
      x[k] = values(t)[static_cast<size_t>(t.index(scaled(i, op.output.extents, t.extents)))];
    }
    switch (op.mode) {
      case CUDNN_POINTWISE_ADD:
        return x[0] + x[1];
      case CUDNN_POINTWISE_SUB:
        return x[0] - x[1];
      case CUDNN_POINTWISE_MUL:
        return x[0] * x[1];
      case CUDNN_POINTWISE_DIV:
        return x[0] / x[1];
      case CUDNN_POINTWISE_EXP:
        return std::exp(x[0]);
      case CUDNN_POINTWISE_LOG:
        return std::log(x[0]);
      case CUDNN_POINTWISE_IDENTITY:
        return x[0];
      case CUDNN_POINTWISE_CMP_GE:
        return x[0] >= x[1] ? 1.0f : 0.0f;
      case CUDNN_POINTWISE_BINARY_SELECT:
        return x[2] != 0 ? x[0] : x[1];
      case CUDNN_POINTWISE_GEN_INDEX:
        return static_cast<float>(i[static_cast<size_t>(op.axis)]);
    }
    return std::numeric_limits<float>::quiet_NaN();
  }

  const std::map<int64_t, void*>& pointers_;
  const std::map<int64_t, float>& scalars_;
  std::map<int64_t, std::vector<float>> values_;
};

/// Through 9.15.0: what comes from sums over keys off their tiles.
void spoil_gradients(const Graph& graph, const std::map<int64_t, void*>& pointers) {
  for (const Operation& op : graph.operations) {
    const bool is_off = op.kind == Kind::kMatmul &&
                        op.inputs[0].extents[3] != op.output.extents[3] &&
                        op.inputs[0].extents[3] % 128 != 0;
    if (!is_off || op.output.is_virtual) continue;
    store(op.output.type, pointers.at(op.output.id), 0, std::numeric_limits<float>::quiet_NaN());
  }
}

}  // namespace

struct cudnnContext {
  int device = 0;
  cudaStream_t stream = nullptr;
};

void simt::set_cudnn(const CudnnOptions& options) {
  const std::lock_guard lock(library().mutex);
  library().options = options;
}

extern "C" {

size_t cudnnGetVersion(void) {
  return options().version;
}

void cudnnGetLastErrorString(char* message, size_t max_size) {
  std::snprintf(message, max_size, "%s", last_error.c_str());
}

// Handles live as long as the process, as the caller's do: they are no leaks.
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = new cudnnContext;
  cudaGetDevice(&(*handle)->device);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  if (stream != nullptr && simt::device_of(stream) != handle->device) {
    simt::report_mistake("cudnnSetStream: the stream is of another device than the handle");
    return CUDNN_STATUS_BAD_PARAM;
  }
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  auto handle = std::make_unique<Handle>(std::make_shared<Descriptor>());
  (*handle)->type = type;
  *descriptor = handle.release();
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  delete &of(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void* values) {
  Descriptor& d = *of(descriptor);
  if (d.is_finalized) return refuse(CUDNN_STATUS_NOT_SUPPORTED, "the descriptor is finalized");
  if (count < 1) return refuse(CUDNN_STATUS_BAD_PARAM, "no values");
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    std::vector<std::shared_ptr<const Descriptor>> parts;
    for (int64_t i = 0; i < count; ++i) {
      const Handle& part = of(static_cast<const cudnnBackendDescriptor_t*>(values)[i]);
      if (!part->is_finalized && part->type != CUDNN_BACKEND_ENGINECFG_DESCRIPTOR) {
        return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a descriptor that is not finalized");
      }
      parts.push_back(part);
    }
    d.parts[name] = std::move(parts);
    return CUDNN_STATUS_SUCCESS;
  }
  const auto* bytes = static_cast<const char*>(values);
  d.attributes[name] = {type, {bytes, bytes + static_cast<size_t>(count) * size_of(type)}};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t, int64_t max_count,
                                       int64_t* count, void* values) {
  const Descriptor& d = *of(descriptor);
  if (!d.is_finalized) {
    return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "the descriptor is not finalized");
  }
  if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
    *count = 1;
    *static_cast<int64_t*>(values) = kWorkspaceNbytes;
    return CUDNN_STATUS_SUCCESS;
  }
  if (name != CUDNN_ATTR_ENGINEHEUR_RESULTS) return refuse(CUDNN_STATUS_BAD_PARAM, "the attribute");
  *count = std::min<int64_t>(max_count, options().num_configs);
  for (int64_t i = 0; i < *count; ++i) {
    Descriptor& config = *of(static_cast<cudnnBackendDescriptor_t*>(values)[i]);
    config.graph = d.graph;
    config.config = static_cast<int>(i);
    config.is_finalized = true;
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  Descriptor& d = *of(descriptor);
  const std::string problem = finish(d);
  if (!problem.empty()) return refuse(CUDNN_STATUS_NOT_SUPPORTED, problem);
  d.is_finalized = true;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t variant_pack) {
  const Graph& graph = of(plan)->graph;
  const Descriptor& pack = *of(variant_pack);
  if (!of(plan)->is_finalized || !pack.is_finalized)
    return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a descriptor that is not finalized");
  const auto ids = pack.values<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto data = pack.values<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  if (ids.size() != data.size()) return refuse(CUDNN_STATUS_BAD_PARAM, "ids and pointers");
  std::map<int64_t, void*> pointers;
  for (size_t i = 0; i < ids.size(); ++i) pointers[ids[i]] = data[i];
  std::map<int64_t, float> scalars;
  std::vector<simt::Range> ranges;
  std::set<int64_t> written;
  const auto visit = [&](const Tensor& t, bool is_written) -> std::string {
    if (t.is_virtual) return "";
    const auto found = pointers.find(t.id);
    if (found == pointers.end() || found->second == nullptr)
      return "no pointer for tensor " + std::to_string(t.id);
    if (t.is_by_value) {
      scalars[t.id] = load(t.type, found->second, 0);
      return "";
    }
    if (reinterpret_cast<uintptr_t>(found->second) % 16 != 0)
      return "tensor " + std::to_string(t.id) + " is not aligned to 16 bytes";
    ranges.push_back({found->second, t.span() * t.item(), is_written});
    return "";
  };
  std::string problem;
  for (const Operation& op : graph.operations) {
    for (const Tensor& t : op.inputs) {
      if (problem.empty()) problem = visit(t, false);
    }
    if (problem.empty()) problem = visit(op.output, true);
  }
  if (!problem.empty()) {
    simt::report_mistake("cudnnBackendExecute: " + problem);
    return refuse(CUDNN_STATUS_BAD_PARAM, problem);
  }
  void* const workspace = pack.value<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
  ranges.push_back({workspace, kWorkspaceNbytes, true});
  const simt::CudnnOptions o = options();
  const auto work = [graph, pointers, scalars, workspace, o] {
    std::memset(workspace, 0xff, kWorkspaceNbytes);
    Run run(pointers, scalars);
    for (const Operation& op : graph.operations) run.compute(op, o.version < 90600);
    if (graph.is_backward() && o.version < 91501) spoil_gradients(graph, pointers);
    simt::take_time(o.ms);
  };
  return simt::submit(handle->stream, "cudnnBackendExecute", ranges, work) == cudaSuccess
             ? CUDNN_STATUS_SUCCESS
             : refuse(CUDNN_STATUS_EXECUTION_FAILED, "the stream");
}

}  // extern "C"
