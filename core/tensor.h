#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/shape.h"
#include "core/storage.h"

namespace tessera {

struct TensorImpl;
struct Node;
class GradSink;

/// A strided view of a Storage, with what autograd needs. A value with shared state: copies refer
/// to the same elements, gradient and graph position. Operations on tensors (kernels/*/*.h) run on
/// the current stream and never synchronize; functions that read values on the host say so.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::shared_ptr<TensorImpl> impl) : impl_(std::move(impl)) {}

  bool is_defined() const { return impl_ != nullptr; }
  const Shape& shape() const;
  const Strides& strides() const;  ///< in elements
  int num_dims() const { return shape().num_dims(); }
  /// Size of dimension i, from the end if it is negative.
  int64_t dim(int i) const { return shape().dim(i); }
  int64_t numel() const { return shape().numel(); }
  int64_t nbytes() const { return numel() * static_cast<int64_t>(size_of(dtype())); }
  DType dtype() const;
  Device device() const;
  bool is_contiguous() const;
  /// Contiguous within each row of the last dimension, rows evenly spaced in all leading dims
  /// (so that one row stride describes it). A column slice of a contiguous tensor is.
  bool is_row_strided() const;
  /// Elements between consecutive rows of the last dimension; ShapeError unless row-strided.
  int64_t row_stride() const;

  /// First element. Error if the storage is released, see `Storage::data`.
  void* raw_data() const;
  template <class T>
  T* data() const {
    TESSERA_CHECK_AS(DtypeError, dtype() == dtype_of<std::remove_const_t<T>>,
                     "Tensor::data: the tensor is {}, asked for {}", dtype(),
                     dtype_of<std::remove_const_t<T>>);
    return static_cast<T*>(raw_data());
  }
  const std::shared_ptr<Storage>& storage() const;
  int64_t storage_offset() const;  ///< in elements

  // Views share elements and take part in autograd (their gradients add into the base's).
  Tensor view(const Shape& shape) const;  ///< same numel, contiguous; one dim may be -1
  /// With dimensions a and b exchanged; a view.
  Tensor transpose(int a, int b) const;
  /// [start, start + length) of a dimension; a view.
  Tensor narrow(int dim, int64_t start, int64_t length) const;
  Tensor select(int dim, int64_t index) const;  ///< narrow to one and drop the dimension
  /// Itself if contiguous, else a copy.
  Tensor contiguous() const;
  /// Itself if the dtype is the same, else a converted copy (differentiable).
  Tensor to(DType dtype) const;
  /// Same elements without history.
  Tensor detach() const;
  /// A copy with own, contiguous memory (not differentiable).
  Tensor clone() const;

  // In place, on the current stream; they bump the version (see autograd.h).
  /// Every element becomes `value`, rounded to the dtype.
  Tensor& fill_(double value);
  Tensor& copy_(const Tensor& source);  ///< same shape; converts dtype
  Tensor& add_(const Tensor& other);    ///< same shape; adds in f32 (f64 for f64)

  // Autograd.
  bool requires_grad() const;
  Tensor& set_requires_grad(bool requires_grad);  ///< leaves only
  bool is_leaf() const;
  /// The gradient of a leaf, undefined before the first backward.
  Tensor grad() const;
  /// Of a leaf: what the next backward adds to.
  void set_grad(const Tensor& grad);
  void zero_grad();
  /// Runs backward from this scalar. See `backward` in autograd.h.
  void backward() const;

  // On the host: these wait for the current stream.
  double item() const;                    ///< one element
  std::vector<double> to_vector() const;  ///< all elements in row-major order
  template <class T>
  std::vector<T> to_vector_of() const;
  std::string to_string() const;  ///< shape, dtype and the first elements

  TensorImpl* impl() const { return impl_.get(); }
  const std::shared_ptr<TensorImpl>& shared_impl() const { return impl_; }

 private:
  std::shared_ptr<TensorImpl> impl_;
};

/// What the values of a Tensor share.
struct TensorImpl {
  std::shared_ptr<Storage> storage;
  int64_t offset = 0;  // elements
  Shape shape;
  Strides strides;
  DType dtype = kF32;
  bool requires_grad = false;
  std::shared_ptr<uint32_t> version;    // shared by views of one tensor
  std::shared_ptr<Node> node;           // producer; null for leaves
  int output_index = 0;                 // of the producer
  Tensor grad;                          // leaves
  std::shared_ptr<GradSink> grad_sink;  // leaves: where gradients go; see autograd.h

  ~TensorImpl();
};

// Creation, on the device of the current Context. Memory is uninitialized unless said.
/// Uninitialized.
Tensor empty(const Shape& shape, DType dtype = kF32);
/// Of its shape and dtype; uninitialized.
Tensor empty_like(const Tensor& like);
/// A tensor whose storage has no bytes yet (deferred initialization, sharded parameters).
Tensor empty_unmaterialized(const Shape& shape, DType dtype = kF32);
Tensor zeros(const Shape& shape, DType dtype = kF32);
Tensor full(const Shape& shape, double value, DType dtype = kF32);
/// A tensor with the host's values, converted to `dtype`; they are copied before it returns.
Tensor from_values(std::span<const double> values, const Shape& shape, DType dtype = kF32);
Tensor from_values(std::span<const float> values, const Shape& shape, DType dtype = kF32);
Tensor from_values(std::span<const int32_t> values, const Shape& shape, DType dtype = kI32);
Tensor from_values(std::span<const int64_t> values, const Shape& shape, DType dtype = kI64);
template <class T>
Tensor from_values(std::initializer_list<T> values, const Shape& shape, DType dtype = dtype_of<T>) {
  return from_values(std::span<const T>(values.begin(), values.size()), shape, dtype);
}
/// A view of `storage` from element `offset` on, with a version of its own.
Tensor view_of_storage(std::shared_ptr<Storage> storage, int64_t offset, const Shape& shape,
                       DType dtype);

template <class T>
std::vector<T> Tensor::to_vector_of() const {
  const std::vector<double> values = to_vector();
  return std::vector<T>(values.begin(), values.end());
}

}  // namespace tessera
