#include "apps/bench/bench.h"

#include <algorithm>

#include "core/log.h"
#include "core/profiler.h"
#include "core/runtime/context.h"
#include "core/tensor.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"
#include "kernels/random/random.h"

namespace tessera::apps {
namespace {

double ms_since(int64_t begin_ns) {
  return static_cast<double>(profiler::now_ns() - begin_ns) * 1e-6;
}

double run_ms(const std::function<void()>& submit, int times) {
  const int64_t begin = profiler::now_ns();
  for (int i = 0; i < times; ++i) submit();
  current_stream().synchronize();
  return ms_since(begin);
}

double product_rate(int64_t width, DType dtype) {
  Tensor a = empty({width, width}, dtype), b = empty({width, width}, dtype);
  fill_uniform(a, -1, 1, {1, 0});
  fill_uniform(b, -1, 1, {2, 0});
  const Timing timing = time_on_stream([&] { linear(a, b); }, 10);
  const auto n = static_cast<double>(width);
  return 2 * n * n * n / (timing.min_ms * 1e-3);
}

}  // namespace

Timing summarize(std::vector<double> times_ms) {
  if (times_ms.empty()) return {};
  std::sort(times_ms.begin(), times_ms.end());
  const size_t middle = times_ms.size() / 2;
  const double median =
      times_ms.size() % 2 == 1 ? times_ms[middle] : 0.5 * (times_ms[middle - 1] + times_ms[middle]);
  return {median, times_ms.front(), times_ms.back()};
}

Timing time_on_stream(const std::function<void()>& submit, int runs, int warm_ups) {
  std::vector<double> times_ms;
  run_ms(submit, warm_ups);
  if (Context::current()->device().type == DeviceType::kCpu) {
    Tensor flushed = empty({int64_t{16} << 20});  // 64 MiB
    for (int i = 0; i < runs; ++i) {
      flushed.fill_(i);
      current_stream().synchronize();
      times_ms.push_back(run_ms(submit, 1));
    }
    return summarize(std::move(times_ms));
  }
  int times = 1;
  while (times < 4096 && run_ms(submit, times) < 2) times *= 2;
  for (int i = 0; i < runs; ++i) times_ms.push_back(run_ms(submit, times) / times);
  return summarize(std::move(times_ms));
}

std::string estimate_text(double seconds) {
  if (seconds < 90) return fmt::format("about {:.0f} s", std::max(seconds, 1.0));
  if (seconds < 90 * 60) return fmt::format("about {:.0f} min", seconds / 60);
  return fmt::format("about {:.1f} h", seconds / 3600);
}

void say_estimate(double seconds) {
  log_info("this takes {}", estimate_text(seconds));
}

double Roofline::floor_ms(double flops, double nbytes, DType dtype) const {
  return 1e3 * std::max(flops / flops_per_s(dtype), nbytes / bytes_per_s);
}

Roofline measure_roofline(int64_t width) {
  Roofline roofline;
  {
    const Tensor source = zeros({int64_t{64} << 20});
    Tensor copy = empty_like(source);
    const Timing timing = time_on_stream([&] { copy.copy_(source); }, 10);
    roofline.bytes_per_s = 2 * static_cast<double>(source.nbytes()) / (timing.min_ms * 1e-3);
  }
  if (width == 0) width = Context::current()->device().type == DeviceType::kCpu ? 2048 : 8192;
  roofline.f32_flops_per_s = product_rate(width, kF32);
  roofline.bf16_flops_per_s = product_rate(width, kBF16);
  return roofline;
}

}  // namespace tessera::apps
