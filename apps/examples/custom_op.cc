// An op of one's own: kernels for the CPU (here) and CUDA (softsign.cu, where nvcc is), the function
// that checks, calls and records them, and a check of its gradient by finite differences in f64.
//
//   custom_op                    on the GPU where there is one, else on the CPU
//   custom_op --device=cpu

#include <fmt/format.h>
#include <tessera/core/autograd.h>
#include <tessera/core/runtime/context.h>
#include <tessera/dist/comm/world.h>
#include <tessera/kernels/reduce/reduce.h>
#include <tessera/nn/module.h>

#include <algorithm>
#include <cmath>

#include "flags.h"
#include "softsign.h"

using namespace tessera;

namespace example {

Cost SoftsignFwd::cost() const {
  const int64_t nbytes = numel * static_cast<int64_t>(size_of(dtype));
  return Cost(2.0 * static_cast<double>(numel)).read(x, nbytes).write(y, nbytes);
}

Cost SoftsignBwd::cost() const {
  const int64_t nbytes = numel * static_cast<int64_t>(size_of(dtype));
  return Cost(3.0 * static_cast<double>(numel)).read(x, nbytes).read(dy, nbytes).write(dx, nbytes);
}

// The stream of the device gets the kernel; with TESSERA_CUDA_KERNELS=1 also that of CUDA.
TESSERA_DEFINE_KERNEL(softsign_fwd, SoftsignFwd);
TESSERA_DEFINE_KERNEL(softsign_bwd, SoftsignBwd);

namespace cpu {
namespace {

template <class F>
void with_type(DType dtype, F&& f) {
  if (dtype == kF64) return f(double{});
  TESSERA_CHECK_DTYPE(dtype == kF32, "softsign: expected f32 or f64, got {}", dtype);
  f(float{});
}

}  // namespace

void softsign_fwd(const SoftsignFwd& a) {
  with_type(a.dtype, [&]<class T>(T) {
    const T* const x = static_cast<const T*>(a.x);
    T* const y = static_cast<T*>(a.y);
    for (int64_t i = 0; i < a.numel; ++i) y[i] = x[i] / (1 + std::abs(x[i]));
  });
}

void softsign_bwd(const SoftsignBwd& a) {
  with_type(a.dtype, [&]<class T>(T) {
    const T *const x = static_cast<const T*>(a.x), *const dy = static_cast<const T*>(a.dy);
    T* const dx = static_cast<T*>(a.dx);
    for (int64_t i = 0; i < a.numel; ++i) {
      const T d = 1 + std::abs(x[i]);
      dx[i] = dy[i] / (d * d);
    }
  });
}

}  // namespace cpu

/// y = x / (1 + |x|), element by element.
/// Shapes   x any -> y alike
/// Dtypes   x f32 (f64 on the CPU) -> y the same
/// Saves    x
/// Grads    dx = dy / (1 + |x|)^2
/// Streams  current stream; never synchronizes
/// Errors   DtypeError for another dtype
Tensor softsign(const Tensor& x_in) {
  TESSERA_CHECK_DTYPE(x_in.dtype() == kF32 || x_in.dtype() == kF64,
                      "softsign: expected f32 or f64, got {}", x_in.dtype());
  const Tensor x = x_in.contiguous();
  Tensor y = empty_like(x);
  softsign_fwd(current_stream(), {y.raw_data(), x.raw_data(), x.dtype(), x.numel()});
  return record("softsign", {x}, y, [x = save(x)](const Tensor& dy_in, Grads& g) {
    const Tensor dy = dy_in.contiguous(), dx = empty(x->shape(), x->dtype());
    softsign_bwd(current_stream(),
                 {dx.raw_data(), dy.raw_data(), x->raw_data(), x->dtype(), x->numel()});
    g.add(0, dx);
  });
}

}  // namespace example

/// The largest difference of the gradient of sum(f(x)) and (f(x + h) - f(x - h)) / 2h.
double gradient_error(const std::function<Tensor(const Tensor&)>& f, const Shape& shape,
                      DType dtype, double h) {
  const Tensor x = empty(shape, dtype);
  nn::fill_init(x, nn::Init::normal(0, 1), /*seed=*/3, "x");
  const std::vector<double> values = x.to_vector();
  Tensor leaf = from_values(std::span<const double>(values), shape, dtype);
  leaf.set_requires_grad(true);
  backward(sum(f(leaf)));
  const std::vector<double> gradient = leaf.grad().to_vector();
  const NoGrad no_grad;
  double largest = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto at = [&](double change) {
      std::vector<double> moved = values;
      moved[i] += change;
      return sum(f(from_values(std::span<const double>(moved), shape, dtype))).item();
    };
    largest = std::max(largest, std::abs((at(h) - at(-h)) / (2 * h) - gradient[i]));
  }
  return largest;
}

int main(int argc, char** argv) {
  const Flags flags(argc, argv, {"device"});
  return dist::run_main(argc, argv, [&](dist::World& world) {
    const Device device = world.device(flags.text("device", "auto"));
    Context::set_process_context(std::make_shared<Context>(ContextOptions{.device = device}));
    const bool is_cpu = device.type == DeviceType::kCpu;
    const double error = is_cpu ? gradient_error(example::softsign, {5, 7}, kF64, 1e-6)
                                : gradient_error(example::softsign, {5, 7}, kF32, 1e-2);
    fmt::print("softsign on {}: largest error of the gradient {:.1e}\n", device, error);
    return error < (is_cpu ? 1e-8 : 1e-2) ? 0 : 1;
  });
}
