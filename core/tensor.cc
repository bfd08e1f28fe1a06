#include "core/tensor.h"

#include <fmt/ranges.h>

#include "core/autograd.h"
#include "core/elementary/kernel.h"
#include "core/runtime/staging.h"

namespace tessera {
namespace {

Tensor make_tensor(std::shared_ptr<Storage> storage, int64_t offset, const Shape& shape,
                   const Strides& strides, DType dtype, std::shared_ptr<uint32_t> version) {
  auto impl = std::make_shared<TensorImpl>();
  impl->storage = std::move(storage);
  impl->offset = offset;
  impl->shape = shape;
  impl->strides = strides;
  impl->dtype = dtype;
  impl->version = version != nullptr ? std::move(version) : std::make_shared<uint32_t>(0);
  return Tensor(std::move(impl));
}

const TensorImpl& get(const Tensor& t) {
  TESSERA_CHECK(t.is_defined(), "Tensor: used while undefined");
  return *t.impl();
}

/// A view of `base` with other geometry, not on the tape.
Tensor alias(const Tensor& base, int64_t offset, const Shape& shape, const Strides& strides) {
  const TensorImpl& b = get(base);
  return make_tensor(b.storage, b.offset + offset, shape, strides, b.dtype, b.version);
}

/// Backward of a view that takes a part: `part` finds the same part of the base's gradient.
template <class Part>
BackwardFn add_into_part(Part part) {
  return [part](const Tensor& dy, Grads& g) {
    GradDst dx = g.destination(0);
    if (!dx) return;
    if (!dx.accumulate) dx.view.fill_(0);
    Tensor place = part(dx.view);
    dx.accumulate ? place.add_(dy) : place.copy_(dy);
    g.written(0);
  };
}

Tensor from_host(const void* values, DType value_dtype, int64_t count, const Shape& shape,
                 DType dtype) {
  TESSERA_CHECK_EQ(count, shape.numel(), "from_values: number of values and shape {} differ",
                   shape);
  Tensor out = empty(shape, dtype);
  if (count == 0) return out;
  const Strides dense = contiguous_strides(shape);
  // Converted on the host first, so that the values may go when we return and any device works.
  HostBuffer staged = Context::current()->staging()->acquire(static_cast<size_t>(out.nbytes()));
  kernels::cpu::copy({staged.data(), values, dtype, value_dtype, shape, dense, dense, false});
  std::move(staged).upload("from_values", current_stream(), out.raw_data());
  return out;
}

}  // namespace

TensorImpl::~TensorImpl() = default;

const Shape& Tensor::shape() const {
  return get(*this).shape;
}
const Strides& Tensor::strides() const {
  return get(*this).strides;
}
DType Tensor::dtype() const {
  return get(*this).dtype;
}
Device Tensor::device() const {
  return get(*this).storage->device();
}
const std::shared_ptr<Storage>& Tensor::storage() const {
  return get(*this).storage;
}
int64_t Tensor::storage_offset() const {
  return get(*this).offset;
}

bool Tensor::is_contiguous() const {
  const TensorImpl& t = get(*this);
  int64_t expected = 1;
  for (int i = t.shape.num_dims() - 1; i >= 0; --i) {
    if (t.shape[i] != 1 && t.strides[i] != expected) return t.shape.numel() == 0;
    expected *= t.shape[i];
  }
  return true;
}

bool Tensor::is_row_strided() const {
  const TensorImpl& t = get(*this);
  const int last = t.shape.num_dims() - 1;
  if (last < 0 || t.shape.numel() == 0) return true;
  if (t.shape[last] != 1 && t.strides[last] != 1) return false;
  int64_t expected = -1;  // stride of the next outer dimension; -1: any
  for (int i = last - 1; i >= 0; --i) {
    if (t.shape[i] == 1) continue;
    if (expected >= 0 && t.strides[i] != expected) return false;
    expected = t.strides[i] * t.shape[i];
  }
  return true;
}

int64_t Tensor::row_stride() const {
  TESSERA_CHECK_SHAPE(is_row_strided(), "Tensor::row_stride: shape {} with strides {} has none",
                      shape(), strides());
  const TensorImpl& t = get(*this);
  for (int i = t.shape.num_dims() - 2; i >= 0; --i) {
    if (t.shape[i] != 1) return t.strides[i];
  }
  return t.shape.num_dims() == 0 ? 1 : t.shape.dim(-1);
}

void* Tensor::raw_data() const {
  const TensorImpl& t = get(*this);
  auto* base = static_cast<char*>(t.storage->data());
  return base + t.offset * static_cast<int64_t>(size_of(t.dtype));
}

Tensor Tensor::view(const Shape& wanted) const {
  Shape target = wanted;
  int64_t known = 1;
  int inferred = -1;
  for (int i = 0; i < target.num_dims(); ++i) {
    if (target[i] == -1) {
      TESSERA_CHECK_SHAPE(inferred < 0, "view: more than one -1 in {}", wanted);
      inferred = i;
    } else {
      TESSERA_CHECK_SHAPE(target[i] >= 0, "view: negative dimension in {}", wanted);
      known *= target[i];
    }
  }
  if (inferred >= 0) target[inferred] = known == 0 ? 0 : numel() / known;
  TESSERA_CHECK_SHAPE(target.numel() == numel(), "view: {} elements of {} do not fit shape {}",
                      numel(), shape(), wanted);
  TESSERA_CHECK_SHAPE(is_contiguous(), "view: expected a contiguous tensor, got strides {} for {}",
                      strides(), shape());
  if (target == shape()) return *this;
  return record("view", {*this}, alias(*this, 0, target, contiguous_strides(target)),
                [base = shape()](const Tensor& dy, Grads& g) { g.add(0, dy.view(base)); });
}

Tensor Tensor::transpose(int a, int b) const {
  Shape s = shape();
  Strides st = strides();
  a = s.wrap(a), b = s.wrap(b);
  std::swap(s[a], s[b]);
  std::swap(st[a], st[b]);
  return record("transpose", {*this}, alias(*this, 0, s, st),
                [a, b](const Tensor& dy, Grads& g) { g.add(0, dy.transpose(a, b)); });
}

Tensor Tensor::narrow(int dim, int64_t start, int64_t length) const {
  dim = shape().wrap(dim);
  TESSERA_CHECK_SHAPE(start >= 0 && length >= 0 && length <= shape()[dim] - start,
                      "narrow: {} from {} on are not inside dimension {} of {}", length, start, dim,
                      shape());
  return record("narrow", {*this},
                alias(*this, start * strides()[dim], shape().with(dim, length), strides()),
                add_into_part([=](const Tensor& dx) { return dx.narrow(dim, start, length); }));
}

Tensor Tensor::select(int dim, int64_t index) const {
  dim = shape().wrap(dim);
  TESSERA_CHECK_SHAPE(index >= 0 && index < shape()[dim],
                      "select: index {} is not inside dimension {} of {}", index, dim, shape());
  Shape s;
  Strides st;
  for (int i = 0; i < num_dims(); ++i) {
    if (i == dim) continue;
    s.push_back(shape()[i]);
    st.push_back(strides()[i]);
  }
  return record("select", {*this}, alias(*this, index * strides()[dim], s, st),
                add_into_part([=](const Tensor& dx) { return dx.select(dim, index); }));
}

Tensor Tensor::contiguous() const {
  if (is_contiguous()) return *this;
  return record("contiguous", {*this}, detach().clone(),
                [](const Tensor& dy, Grads& g) { g.add(0, dy); });
}

Tensor Tensor::to(DType target) const {
  if (target == dtype()) return *this;
  Tensor out = empty(shape(), target);
  out.copy_(*this);
  if (!is_floating(target) || !is_floating(dtype())) return out;
  return record("to", {*this}, out, [](const Tensor& dy, Grads& g) {
    GradDst dx = g.destination(0);
    if (!dx) return;
    kernels::copy(current_stream(), {dx.view.raw_data(), dy.raw_data(), dx.view.dtype(), dy.dtype(),
                                     dy.shape(), dx.view.strides(), dy.strides(), dx.accumulate});
    g.written(0);
  });
}

Tensor Tensor::detach() const {
  const TensorImpl& t = get(*this);
  return make_tensor(t.storage, t.offset, t.shape, t.strides, t.dtype, t.version);
}

Tensor Tensor::clone() const {
  Tensor out = empty(shape(), dtype());
  out.copy_(*this);
  return out;
}

Tensor& Tensor::fill_(double value) {
  const TensorImpl& t = get(*this);
  ++*t.version;
  kernels::fill(current_stream(), {raw_data(), t.dtype, t.shape, t.strides, value});
  return *this;
}

Tensor& Tensor::copy_(const Tensor& source) {
  TESSERA_CHECK_EQ(source.shape(), shape(), "copy_: shapes differ");
  const TensorImpl& t = get(*this);
  ++*t.version;
  kernels::copy(current_stream(), {raw_data(), source.raw_data(), t.dtype, source.dtype(), t.shape,
                                   t.strides, source.strides(), false});
  return *this;
}

Tensor& Tensor::add_(const Tensor& other) {
  TESSERA_CHECK_EQ(other.shape(), shape(), "add_: shapes differ");
  const TensorImpl& t = get(*this);
  ++*t.version;
  kernels::copy(current_stream(), {raw_data(), other.raw_data(), t.dtype, other.dtype(), t.shape,
                                   t.strides, other.strides(), true});
  return *this;
}

bool Tensor::requires_grad() const {
  return get(*this).requires_grad;
}

Tensor& Tensor::set_requires_grad(bool requires_grad) {
  TESSERA_CHECK(is_leaf(), "set_requires_grad: the tensor is the result of an op, not a leaf");
  TESSERA_CHECK_DTYPE(!requires_grad || is_floating(dtype()),
                      "set_requires_grad: expected a floating dtype, got {}", dtype());
  impl_->requires_grad = requires_grad;
  return *this;
}

bool Tensor::is_leaf() const {
  return get(*this).node == nullptr;
}
Tensor Tensor::grad() const {
  return get(*this).grad;
}
void Tensor::set_grad(const Tensor& grad) {
  get(*this);
  impl_->grad = grad;
}
void Tensor::zero_grad() {
  set_grad({});
}
void Tensor::backward() const {
  tessera::backward(*this);
}

double Tensor::item() const {
  TESSERA_CHECK_SHAPE(numel() == 1, "item: expected one element, got shape {}", shape());
  return to_vector()[0];
}

std::vector<double> Tensor::to_vector() const {
  const TensorImpl& t = get(*this);
  std::vector<double> values(static_cast<size_t>(numel()));
  const Strides dense = contiguous_strides(t.shape);
  if (values.empty() || device().type == DeviceType::kCpu) {
    current_stream().synchronize();
    if (values.empty()) return values;
    kernels::cpu::copy(
        {values.data(), raw_data(), kF64, t.dtype, t.shape, dense, t.strides, false});
    return values;
  }
  const Tensor source = is_contiguous() ? *this : detach().clone();
  const HostCopy copy(source);
  kernels::cpu::copy({values.data(), copy.data(), kF64, t.dtype, t.shape, dense, dense, false});
  return values;
}

std::string Tensor::to_string() const {
  if (!is_defined()) return "Tensor(undefined)";
  std::vector<double> values = to_vector();
  const bool is_cut = values.size() > 8;
  if (is_cut) values.resize(8);
  return fmt::format("Tensor({}, {}: {}{})", dtype(), shape(), fmt::join(values, ", "),
                     is_cut ? ", ..." : "");
}

Tensor view_of_storage(std::shared_ptr<Storage> storage, int64_t offset, const Shape& shape,
                       DType dtype) {
  const int64_t last = (offset + shape.numel()) * static_cast<int64_t>(size_of(dtype));
  TESSERA_CHECK_LE(last, static_cast<int64_t>(storage->nbytes()),
                   "view_of_storage: {} elements from {} on do not fit", shape.numel(), offset);
  return make_tensor(std::move(storage), offset, shape, contiguous_strides(shape), dtype, nullptr);
}

Tensor empty_unmaterialized(const Shape& shape, DType dtype) {
  for (const int64_t dim : shape) {
    TESSERA_CHECK_SHAPE(dim >= 0, "empty: negative dimension in {}", shape);
  }
  // With room for rounding up; a dimension of 0 does not help one that is too large.
  int64_t nbytes = static_cast<int64_t>(size_of(dtype));
  bool is_too_large = false;
  for (const int64_t dim : shape) {
    is_too_large =
        is_too_large || __builtin_mul_overflow(nbytes, std::max<int64_t>(dim, 1), &nbytes);
  }
  constexpr int64_t kMaxNbytes = int64_t{1} << 62;
  if (is_too_large || nbytes > kMaxNbytes) {
    throw ShapeError(
        fmt::format("empty: {} {} has more bytes than any memory, expected fewer than {}", dtype,
                    shape, kMaxNbytes));
  }
  nbytes = shape.numel() * static_cast<int64_t>(size_of(dtype));
  return view_of_storage(
      std::make_shared<Storage>(static_cast<size_t>(nbytes), Context::current()->device()), 0,
      shape, dtype);
}

Tensor empty(const Shape& shape, DType dtype) {
  Tensor out = empty_unmaterialized(shape, dtype);
  out.storage()->materialize();
  return out;
}

Tensor empty_like(const Tensor& like) {
  return empty(like.shape(), like.dtype());
}

Tensor full(const Shape& shape, double value, DType dtype) {
  Tensor out = empty(shape, dtype);
  out.fill_(value);
  return out;
}

Tensor zeros(const Shape& shape, DType dtype) {
  return full(shape, 0, dtype);
}

Tensor from_values(std::span<const double> values, const Shape& shape, DType dtype) {
  return from_host(values.data(), kF64, static_cast<int64_t>(values.size()), shape, dtype);
}
Tensor from_values(std::span<const float> values, const Shape& shape, DType dtype) {
  return from_host(values.data(), kF32, static_cast<int64_t>(values.size()), shape, dtype);
}
Tensor from_values(std::span<const int32_t> values, const Shape& shape, DType dtype) {
  return from_host(values.data(), kI32, static_cast<int64_t>(values.size()), shape, dtype);
}
Tensor from_values(std::span<const int64_t> values, const Shape& shape, DType dtype) {
  return from_host(values.data(), kI64, static_cast<int64_t>(values.size()), shape, dtype);
}

}  // namespace tessera
