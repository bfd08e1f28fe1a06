#include "kernels/attention/cuda/cudnn_graph.h"

#if TESSERA_HAS_CUDNN

#include "core/runtime/cuda/library.h"

namespace tessera::kernels::cudnn {
namespace {

struct Library {
  Api api{};
  std::string problem;
};

#if defined(TESSERA_SIMT)
#define TESSERA_CUDNN_LOAD(field, name) api.field = &name
#else
template <class F>
void load(Library& library, void* handle, F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  if (function == nullptr) library.problem = std::string("cuDNN lacks ") + name;
}
#define TESSERA_CUDNN_LOAD(field, name) load(library, handle, api.field, #name)
#endif

Library open_library() {
  Library library;
  constexpr const char* kVariable = "TESSERA_CUDNN";
#if defined(TESSERA_SIMT)
  // The fake is part of the program; a file that is named is opened as ever.
  const char* file = std::getenv(kVariable);
  void* handle =
      file == nullptr ? &library : tessera::cuda::open_library(file, kVariable, &library.problem);
#else
  void* handle = tessera::cuda::open_library("libcudnn.so.9", kVariable, &library.problem);
#endif
  if (handle == nullptr) return library;
  Api& api = library.api;
  TESSERA_CUDNN_LOAD(create, cudnnCreate);
  TESSERA_CUDNN_LOAD(set_stream, cudnnSetStream);
  TESSERA_CUDNN_LOAD(version, cudnnGetVersion);
  TESSERA_CUDNN_LOAD(last_error, cudnnGetLastErrorString);
  TESSERA_CUDNN_LOAD(create_descriptor, cudnnBackendCreateDescriptor);
  TESSERA_CUDNN_LOAD(destroy_descriptor, cudnnBackendDestroyDescriptor);
  TESSERA_CUDNN_LOAD(set_attribute, cudnnBackendSetAttribute);
  TESSERA_CUDNN_LOAD(get_attribute, cudnnBackendGetAttribute);
  TESSERA_CUDNN_LOAD(finalize, cudnnBackendFinalize);
  TESSERA_CUDNN_LOAD(execute, cudnnBackendExecute);
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

}  // namespace

const std::string& library_problem() {
  return library().problem;
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

Extents packed_strides(const Extents& extents) {
  return {extents[1] * extents[2] * extents[3], extents[2] * extents[3], extents[3], 1};
}

Graph::Node Graph::tensor(int64_t id, const Extents& extents, const Extents& strides,
                          cudnnDataType_t type, bool is_virtual, bool is_by_value) {
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

Graph::Node Graph::scalar(int64_t id, cudnnDataType_t type) {
  return tensor(id, {1, 1, 1, 1}, {1, 1, 1, 1}, type, false, true);
}

Graph::Node Graph::between(const Extents& extents, const Extents& strides, cudnnDataType_t type) {
  return tensor(next_id_++, extents, strides, type, true);
}

Graph::Node Graph::between(const Extents& extents, cudnnDataType_t type) {
  return between(extents, packed_strides(extents), type);
}

void Graph::multiply(Node a, Node b, Node c) {
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

void Graph::pointwise(cudnnPointwiseMode_t mode, Node y, Node x, cudnnDataType_t compute_type) {
  add_pointwise(mode, compute_type, y, {x}, -1);
}

void Graph::pointwise(cudnnPointwiseMode_t mode, Node y, Node x, Node b,
                      cudnnDataType_t compute_type) {
  add_pointwise(mode, compute_type, y, {x, b}, -1);
}

void Graph::select(Node y, Node x, Node b, Node condition) {
  add_pointwise(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, y, {x, b, condition}, -1);
}

void Graph::index(Node y, Node x, int64_t axis) {
  add_pointwise(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, y, {x}, axis);
}

void Graph::reduce(cudnnReduceTensorOp_t op, Node y, Node x) {
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

void Graph::reshape(Node y, Node x) {
  Descriptor operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, tensors_[x].descriptor)
      .set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, tensors_[y].descriptor);
  add(std::move(operation));
}

Descriptor Graph::operation_graph() const {
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const Descriptor& operation : operations_) raw.push_back(operation.raw());
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw);
  return graph;
}

void Graph::add_pointwise(cudnnPointwiseMode_t mode, cudnnDataType_t compute_type, Node y,
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

}  // namespace tessera::kernels::cudnn

#endif
