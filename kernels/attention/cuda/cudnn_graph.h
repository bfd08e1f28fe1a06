#pragma once

#if __has_include(<cudnn.h>)
#include <cudnn.h>
#if CUDNN_VERSION >= 90600
#define TESSERA_HAS_CUDNN 1
#endif
#endif

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"

// cuDNN's backend API as far as attention needs it: the library, loaded when it is first asked for,
// descriptors, and graphs of operations on 4-dimensional tensors. Private to
// kernels/attention/cuda/cudnn.cc. TESSERA_HAS_CUDNN says whether the build has its headers.

#if TESSERA_HAS_CUDNN

namespace tessera::kernels::cudnn {

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

/// Why the library cannot be used; empty if it can.
const std::string& library_problem();
/// Its functions, if there is no problem.
const Api& api();
/// CudaError with the call, the status and cuDNN's words.
void check(cudnnStatus_t status, const char* call);

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

/// Extents and strides of [batch, head, row, column].
using Extents = std::array<int64_t, 4>;

Extents packed_strides(const Extents& extents);

/// Operations in the order in which they are described.
class Graph {
 public:
  /// Index of a tensor of this graph.
  using Node = size_t;

  /// `dtype` (bf16 or f16) is that of the tensors in memory; virtual ones have ids from
  /// `first_virtual_id` on.
  Graph(DType dtype, int64_t first_virtual_id)
      : io_type_(dtype == kBF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF),
        next_id_(first_virtual_id) {}

  cudnnDataType_t io_type() const { return io_type_; }
  const Extents& extents(Node x) const { return tensors_[x].extents; }

  Node tensor(int64_t id, const Extents& extents, const Extents& strides, cudnnDataType_t type,
              bool is_virtual = false, bool is_by_value = false);
  /// One element, passed by value.
  Node scalar(int64_t id, cudnnDataType_t type);
  /// A virtual tensor: the result of one operation and input of others.
  Node between(const Extents& extents, const Extents& strides, cudnnDataType_t type);
  Node between(const Extents& extents, cudnnDataType_t type = CUDNN_DATA_FLOAT);

  /// c = a b
  void multiply(Node a, Node b, Node c);
  void pointwise(cudnnPointwiseMode_t mode, Node y, Node x,
                 cudnnDataType_t compute_type = CUDNN_DATA_FLOAT);
  void pointwise(cudnnPointwiseMode_t mode, Node y, Node x, Node b,
                 cudnnDataType_t compute_type = CUDNN_DATA_FLOAT);
  /// y = condition ? x : b
  void select(Node y, Node x, Node b, Node condition);
  /// y = the index along `axis` of each element of x
  void index(Node y, Node x, int64_t axis);
  /// Over the dimensions in which y has one element.
  void reduce(cudnnReduceTensorOp_t op, Node y, Node x);
  void reshape(Node y, Node x);

  /// The operation graph, not yet finalized.
  Descriptor operation_graph() const;

 private:
  struct Tensor {
    Descriptor descriptor;
    Extents extents;
  };

  void add(Descriptor operation) { operations_.push_back(std::move(operation.finalize())); }
  void add_pointwise(cudnnPointwiseMode_t mode, cudnnDataType_t compute_type, Node y,
                     const std::vector<Node>& inputs, int64_t axis);

  cudnnDataType_t io_type_;
  int64_t next_id_;
  std::vector<Tensor> tensors_;
  std::vector<Descriptor> operations_, parts_;
};

}  // namespace tessera::kernels::cudnn

#endif
